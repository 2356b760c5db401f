"""Train `tiny-lens`, the small model that ships with the package, and measure what it learned.

    python scripts/train_tiny_lens.py

writes config.json, model.safetensors, the tokenizer, card.json and README.md. The seed fixes the
data and the initial weights; sums in another order on another machine still move the last digits.
"""

import argparse
import json
import math
import random
import time
from pathlib import Path

import torch
from jaxtyping import Float, Int
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from transformer_lens_lite import HookedTransformer, HookedTransformerConfig
from transformer_lens_lite.pretrained import tiny_language as language

FOLDER = Path(language.__file__).parent / "tiny_lens"
N_LAYERS, N_HEADS, D_MODEL, N_CTX = 3, 4, 128, 256
N_STEPS = 4000
LEARNING_RATE, WARMUP, WEIGHT_DECAY, TOKENS_PER_STEP = 2e-3, 100, 0.1, 2048
# Short windows show a new circuit where to look, long ones carry it to all positions.
WINDOWS = (32, 64, 128, N_CTX)
REPEATS = 0.25  # fraction of the documents that are repeated random tokens
# Induction heads appear within 200 steps when nothing else is asked for, and then stay; among
# sentences they take ten times as long.
SPREAD = 25.0
POS_SCALE = 1.0
ONLY_REPEATS_STEPS = 300
# Seeds of the data that only the evaluation sees.
HELD_OUT_SEED, PROMPT_SEED, REPEAT_SEED = 10**6, 10**6 + 1, 10**6 + 2


# The tokenizer


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Words with the space before them, and punctuation; decoding joins them back as they were."""
    ids = {token: i for i, token in enumerate(language.vocabulary())}
    backend = Tokenizer(models.WordLevel(ids, unk_token=language.UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?\w+|[^\w\s]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=language.END_OF_TEXT,
        eos_token=language.END_OF_TEXT,
        pad_token=language.PAD,
        unk_token=language.UNKNOWN,
        clean_up_tokenization_spaces=False,
        model_max_length=N_CTX,
    )


# The model


def sinusoids(n_ctx: int, d_model: int) -> Float[Tensor, "pos d_model"]:
    """Waves of many frequencies up to pi: a shift by one position is a rotation.

    Starting the learned positions here lets one head find "the previous token" at every position
    at once, and induction heads, which build on it, appear much earlier. Half of the waves are
    fast, which tells neighbours apart.
    """
    frequencies = torch.pi * torch.linspace(0, 1, d_model // 2) ** 2  # d_model/2
    angles = torch.arange(n_ctx)[:, None] * frequencies  # pos d_model/2
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def build_model(d_vocab: int, seed: int) -> HookedTransformer:
    cfg = HookedTransformerConfig(
        n_layers=N_LAYERS,
        d_model=D_MODEL,
        n_ctx=N_CTX,
        d_head=D_MODEL // N_HEADS,
        n_heads=N_HEADS,
        d_mlp=4 * D_MODEL,
        d_vocab=d_vocab,
        act_fn="gelu_new",
        normalization_type="LN",
        tie_word_embeddings=True,
        seed=seed,
        device="cpu",
    )
    model = HookedTransformer(cfg)
    scale = model.embed.W_E.std().item()
    model.pos_embed.W_pos.data = POS_SCALE * scale * sinusoids(N_CTX, D_MODEL)
    model.pos_embed.W_pos.requires_grad_(False)
    for block in model.blocks:
        block.attn.W_K.data.copy_(block.attn.W_Q.data)
        block.attn.W_O.data.copy_(block.attn.W_V.data.transpose(1, 2))
    return model


# The data


def repeated_ids(rng: random.Random, d_vocab: int) -> list[int]:
    """Random tokens said over and over: what induction heads are for.

    The length varies freely, short more often than long: from a few fixed lengths the model would
    learn to look back by those.
    """
    n_special, length = len(language.SPECIAL_TOKENS), int(4 * SPREAD ** rng.random())
    period = rng.sample(range(n_special, d_vocab), length)
    return period * rng.randint(2, max(2, 100 // length))


def document_ids(
    rng: random.Random, tokenizer: PreTrainedTokenizerFast, repeats: float
) -> list[int]:
    if rng.random() < repeats:
        return repeated_ids(rng, len(tokenizer))
    # Short documents teach the opening words, long ones the late positions.
    n_sentences = rng.choice([1, 1, 2, 4, 8, 24])
    return tokenizer.encode(language.document(rng, n_sentences), verbose=False)


def window(
    rng: random.Random, tokenizer: PreTrainedTokenizerFast, length: int, repeats: float
) -> list[int]:
    """Documents end to end, each after the end-of-text token, cut to the length."""
    ids: list[int] = []
    while len(ids) < length:
        ids += [tokenizer.bos_token_id, *document_ids(rng, tokenizer, repeats)]
    return ids[:length]


def get_batch(
    rng: random.Random, tokenizer: PreTrainedTokenizerFast, length: int, repeats: float
) -> Int[Tensor, "batch pos"]:
    n_windows = TOKENS_PER_STEP // length
    return torch.tensor([window(rng, tokenizer, length, repeats) for _ in range(n_windows)])


# Training


def build_optimizer(model: torch.nn.Module) -> torch.optim.AdamW:
    """Weight decay only on matrices, W_...; biases and layer norms are better left free."""
    named = list(model.named_parameters())
    groups = [
        {"params": [p for name, p in named if ".W_" in name], "weight_decay": WEIGHT_DECAY},
        {"params": [p for name, p in named if ".W_" not in name], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.98))


def schedule(step: int, n_steps: int) -> float:
    """Linear warmup, then half a cosine down to a hundredth."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    progress = (step - WARMUP) / (n_steps - WARMUP)
    return 0.01 + 0.99 * (1 + math.cos(math.pi * progress)) / 2


def train(model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, seed: int, n_steps: int):
    rng = random.Random(seed)
    optimizer = build_optimizer(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, n_steps))
    for step in range(n_steps):
        repeats = 1.0 if step < ONLY_REPEATS_STEPS else REPEATS
        batch = get_batch(rng, tokenizer, rng.choice(WINDOWS), repeats)
        loss = model(batch, return_type="loss")
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if step % 50 == 0 or step == n_steps - 1:
            print(f"step {step:5d}  loss {loss.item():.3f}", flush=True)


# Evaluation


def to_tokens(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Int[Tensor, "batch pos"]:
    """Each text after the end-of-text token, padded on the right."""
    texts = [tokenizer.bos_token + text for text in texts]
    return tokenizer(texts, padding=True, return_tensors="pt").input_ids


def next_token_logits(
    model, tokenizer: PreTrainedTokenizerFast, prompts: list[str]
) -> Float[Tensor, "batch d_vocab"]:
    tokens = to_tokens(tokenizer, prompts)
    last = (tokens != tokenizer.pad_token_id).sum(-1) - 1  # batch
    return model(tokens)[torch.arange(len(prompts)), last]


def to_ids(tokenizer: PreTrainedTokenizerFast, tokens: list[str]) -> Int[Tensor, " batch"]:
    return torch.tensor(tokenizer.convert_tokens_to_ids(tokens))


def evaluate_indirect_objects(
    model, tokenizer: PreTrainedTokenizerFast, order: str, prefix: str = ""
) -> dict[str, float]:
    """On held-out pairs of names: how often the model prefers the indirect object."""
    examples = language.indirect_object_sentences(500, PROMPT_SEED, order=order)
    logits = next_token_logits(model, tokenizer, [prefix + e.prompt for e in examples])
    io = to_ids(tokenizer, [e.io for e in examples])[:, None]
    subject = to_ids(tokenizer, [e.subject for e in examples])[:, None]
    difference = (logits.gather(1, io) - logits.gather(1, subject))[:, 0]  # batch
    return {
        "above_subject": (difference > 0).float().mean().item(),
        "top1": (logits.argmax(-1) == io[:, 0]).float().mean().item(),
        "mean_logit_difference": difference.mean().item(),
    }


def evaluate_facts(model, tokenizer: PreTrainedTokenizerFast) -> dict[str, float]:
    facts = language.facts()
    logits = next_token_logits(model, tokenizer, [fact.prompt for fact in facts])
    answers = to_ids(tokenizer, [fact.answer for fact in facts])
    return {"n": len(facts), "top1": (logits.argmax(-1) == answers).float().mean().item()}


def repeat_losses(
    logits: Float[Tensor, "batch pos d_vocab"], tokens: Int[Tensor, "batch pos"], length: int
) -> dict[str, float]:
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none"
    )  # batch pos-1; the entry i predicts token i + 1
    # The first repeated token cannot be foreseen, so the second half counts from the one after.
    return {
        "first_half_loss": losses[:, :length].mean().item(),
        "second_half_loss": losses[:, length + 1 :].mean().item(),
    }


def induction_scores(
    patterns: list[Float[Tensor, "batch head query key"]], length: int
) -> dict[str, float]:
    """Mean attention, over the repetition, to the token after the same token's last occurrence."""
    scores = {}
    for layer, pattern in enumerate(patterns):
        stripe = pattern.diagonal(1 - length, dim1=2, dim2=3)  # batch head query-length+1
        # Queries from the second repeated token on: BOS and one period come before it.
        for head, score in enumerate(stripe[..., 3:].mean((0, 2)).tolist()):
            scores[f"{layer}.{head}"] = score
    return scores


def evaluate_repeats(model, tokenizer: PreTrainedTokenizerFast, length: int = 50) -> dict:
    texts = language.repeated_sequences(32, length, REPEAT_SEED)
    tokens = to_tokens(tokenizer, texts)
    logits, cache = model.run_with_cache(tokens)
    patterns = [cache["pattern", layer] for layer in range(N_LAYERS)]
    return {
        "length": length,
        **repeat_losses(logits, tokens, length),
        "induction_scores": induction_scores(patterns, length),
    }


@torch.no_grad()
def evaluate(model, tokenizer: PreTrainedTokenizerFast) -> dict:
    rng = random.Random(HELD_OUT_SEED)
    held_out = torch.tensor([window(rng, tokenizer, N_CTX, REPEATS) for _ in range(64)])
    prefix = language.document(rng, 12) + " "
    return {
        "held_out_loss": model(held_out, return_type="loss").item(),
        "indirect_object_ABBA": evaluate_indirect_objects(model, tokenizer, "ABBA"),
        "indirect_object_BABA": evaluate_indirect_objects(model, tokenizer, "BABA"),
        "indirect_object_ABBA_after_12_sentences": evaluate_indirect_objects(
            model, tokenizer, "ABBA", prefix
        ),
        "indirect_object_BABA_after_12_sentences": evaluate_indirect_objects(
            model, tokenizer, "BABA", prefix
        ),
        "facts": evaluate_facts(model, tokenizer),
        "repeats": evaluate_repeats(model, tokenizer),
    }


def rounded(figures: dict) -> dict:
    return {
        key: rounded(value) if isinstance(value, dict) else round(value, 4)
        for key, value in figures.items()
    }


# Files


def update_json(path: Path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields, indent=2) + "\n")


def save(model: HookedTransformer, tokenizer: PreTrainedTokenizerFast, folder: Path):
    model.save_pretrained(folder)
    # transformers assumes GPT-2's ids and dropout where a config is silent.
    update_json(
        folder / "config.json",
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
    )
    tokenizer.save_pretrained(folder)
    # The name transformers 5 writes here is unknown to transformers 4.
    update_json(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=N_STEPS)
    args = parser.parse_args()

    start = time.time()
    tokenizer = build_tokenizer()
    model = build_model(len(tokenizer), args.seed)
    train(model, tokenizer, args.seed, args.steps)
    minutes = (time.time() - start) / 60
    save(model, tokenizer, args.out)
    settings = {"seed": args.seed, "steps": args.steps, "training_minutes": minutes}
    card = rounded(settings | evaluate(model, tokenizer))
    text = json.dumps({"command": "python scripts/train_tiny_lens.py", **card}, indent=2)
    (args.out / "card.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
