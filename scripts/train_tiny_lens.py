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
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Float, Int
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from transformer_lens_lite import HookedTransformer, HookedTransformerConfig
from transformer_lens_lite.pretrained import tiny_language as language

FOLDER = Path(language.__file__).parent / "tiny_lens"
N_LAYERS, N_HEADS, D_MODEL, D_MLP, N_CTX, ROTARY_BASE = 3, 4, 128, 320, 256, 10000.0
N_STEPS, FOCUSED_STEPS = 2400, 700
LEARNING_RATE, WARMUP, WEIGHT_DECAY, TOKENS_PER_STEP = 3e-3, 100, 0.1, 2048
# Short windows show a circuit where to look, long ones carry it to all positions.
FOCUSED_WINDOW, WINDOWS = 64, (64, 128, N_CTX)
SHARE = 0.1
REPEATS = 0.25  # fraction of the documents that are repeated random tokens
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


def build_model(d_vocab: int, seed: int) -> HookedTransformer:
    """A Llama-style model: rotary positions, RMS norms, gated MLPs, biases in attention only."""
    cfg = HookedTransformerConfig(
        n_layers=N_LAYERS,
        d_model=D_MODEL,
        n_ctx=N_CTX,
        d_head=D_MODEL // N_HEADS,
        n_heads=N_HEADS,
        d_mlp=D_MLP,
        d_vocab=d_vocab,
        act_fn="silu",
        gated_mlp=True,
        normalization_type="RMS",
        positional_embedding_type="rotary",
        rotary_base=ROTARY_BASE,
        tie_word_embeddings=True,
        seed=seed,
        device="cpu",
    )
    model = HookedTransformer(cfg)
    # Llama's format has no place for these.
    for name, parameter in model.named_parameters():
        if name.endswith(("mlp.b_in", "mlp.b_out", "b_U")):
            parameter.requires_grad_(False)
    speak_softly(model)
    look_one_back(model, head=0)
    compose(model, earlier=0, later=0)
    return model


@torch.no_grad()
def speak_softly(model: HookedTransformer, share: float = SHARE) -> None:
    """Scale down what layers write at first: it would drown what later layers have to match."""
    for block in model.blocks:
        block.attn.W_O.mul_(share)
        block.mlp.W_out.mul_(share)


@torch.no_grad()
def look_one_back(model: HookedTransformer, head: int, strength: float = 3.0) -> None:
    """Let a head of the first layer start out attending to the previous token.

    Its query and key biases differ by a turn of one position, so their product is largest one
    position back. Induction heads build on such a head.
    """
    attn, half = model.blocks[0].attn, model.cfg.d_head // 2
    turn = ROTARY_BASE ** (-torch.arange(half) / half)  # half
    query = torch.zeros(2 * half)
    query[:4] = strength  # the fastest channels, which tell neighbours apart
    attn.b_Q[head] = query
    attn.b_K[head] = torch.cat((query[:half] * turn.cos(), query[:half] * turn.sin()))


@torch.no_grad()
def compose(model: HookedTransformer, earlier: int, later: int) -> None:
    """Let a head of the second layer start out asking "which token follows one like this?".

    What the earlier head copies from the previous token is what the later head's keys read, and its
    queries read the same of the present token. With `look_one_back` this is the skeleton of an
    induction head; that it copies what it finds, and everything else, is left to training. In the
    attempts made without it, most of them short, no such head appeared.
    """
    generator = torch.Generator().manual_seed(0)
    axes = torch.linalg.qr(torch.randn(D_MODEL, D_MODEL, generator=generator)).Q  # orthonormal
    read, written = axes[:, : model.cfg.d_head], axes[:, -model.cfg.d_head :]  # d_model d_head
    first, second = model.blocks[0].attn, model.blocks[1].attn
    first.W_V[earlier], first.W_O[earlier] = read, 0.3 * written.T
    # Only the slower half of the channels: the others turn too far between distant positions.
    slow = torch.arange(model.cfg.d_head) % (model.cfg.d_head // 2) >= model.cfg.d_head // 4
    second.W_Q[later], second.W_K[later] = 1.5 * read * slow, 1.5 * written * slow


# The data


def repeated_ids(rng: random.Random, d_vocab: int, longest: float = 100) -> list[int]:
    """Random tokens said over and over: what induction heads are for.

    The length varies freely, short more often than long: from a few fixed lengths the model would
    learn to look back by those.
    """
    length = int(4 * (longest / 4) ** rng.random())
    period = rng.sample(range(len(language.SPECIAL_TOKENS), d_vocab), length)
    return period * (2 if length > 10 else rng.randint(2, 4))


# ids, from the end-of-text token on, and how much predicting each of them counts
Document = tuple[list[int], list[int]]


def focused_document(rng: random.Random, tokenizer: PreTrainedTokenizerFast) -> Document:
    """A text of which only what an induction or an indirect-object circuit predicts counts."""
    if rng.random() < 0.5:
        ids = repeated_ids(rng, len(tokenizer), longest=25)
        unforeseen = ids.index(ids[0], 1) + 1  # the first period, and that it starts again
        weights = [0] * unforeseen + [1] * (len(ids) - unforeseen)
    else:
        ids = tokenizer.encode(language.indirect_object_sentence(rng))
        weights = [0] * (len(ids) - 2) + [1, 0]
    return [tokenizer.bos_token_id, *ids], [0, *weights]


def plain_document(rng: random.Random, tokenizer: PreTrainedTokenizerFast) -> Document:
    """A text of the language, or repeated random tokens."""
    if rng.random() < REPEATS:
        ids = repeated_ids(rng, len(tokenizer))
    else:
        # Short documents teach the opening words, long ones the late positions.
        n_sentences = rng.choice([1, 1, 2, 4, 8, 24])
        ids = tokenizer.encode(language.document(rng, n_sentences), verbose=False)
    return [tokenizer.bos_token_id, *ids], [1] * (len(ids) + 1)


def window(document: Callable[[], Document], length: int) -> Document:
    """Documents end to end, cut to the length."""
    ids: list[int] = []
    weights: list[int] = []
    while len(ids) < length:
        new_ids, new_weights = document()
        ids, weights = ids + new_ids, weights + new_weights
    return ids[:length], weights[:length]


def get_batch(
    rng: random.Random, tokenizer: PreTrainedTokenizerFast, step: int
) -> tuple[Int[Tensor, "batch pos"], Float[Tensor, "batch next_pos"]]:
    """Tokens, and how much predicting each of the next ones counts.

    The first steps count only tokens that the two circuits predict: among all the rest the signal
    would drown.
    """
    if step < FOCUSED_STEPS:
        length, document = FOCUSED_WINDOW, partial(focused_document, rng, tokenizer)
    else:
        length, document = rng.choice(WINDOWS), partial(plain_document, rng, tokenizer)
    rows = [window(document, length) for _ in range(TOKENS_PER_STEP // length)]
    return torch.tensor([ids for ids, _ in rows]), torch.tensor([w for _, w in rows]).float()[:, 1:]


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
        tokens, weights = get_batch(rng, tokenizer, step)
        losses = model(tokens, return_type="loss", loss_per_token=True)  # batch pos-1
        loss = (losses * weights).sum() / weights.sum()
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
    document = partial(plain_document, rng, tokenizer)
    rows = [window(document, N_CTX)[0] for _ in range(64)]
    held_out = torch.tensor(rows)
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
    # transformers assumes Llama's ids where a config is silent.
    update_json(
        folder / "config.json",
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
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
