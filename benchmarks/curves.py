"""How the costs grow: with length, batch, layers, what is hooked and kept, and the checkpoint."""

import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from benchmarks.cases import loaded, ours_from
from benchmarks.pairs import Ratio, compare
from transformer_lens_lite import HookedTransformer

PAIRS = 9


class Curve(NamedTuple):
    """One table: what grows, what is compared, and a row of cells for each of its values."""

    title: str
    columns: tuple[str, ...]
    rows: Iterator[tuple[str, ...]]


def small_gpt2(n_layer: int = 4, n_embd: int = 384) -> Any:
    """A random GPT-2 whose runs take milliseconds."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=n_layer, n_embd=n_embd, n_head=n_embd // 64, vocab_size=8000, n_positions=1024,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return GPT2LMHeadModel._from_config(config, attn_implementation="sdpa").eval()


def ids(batch: int, length: int) -> torch.Tensor:
    """Random ids [batch, length]."""
    return torch.randint(8000, (batch, length), generator=torch.Generator().manual_seed(1))


def per_token(ratio: Ratio, n_tokens: int) -> str:
    """Our median, for each token of the input."""
    return f"{ratio.ours_ms / n_tokens * 1e3:.1f}"


@torch.no_grad()
def against_hugging_face(
    model: HookedTransformer, hf_model: Any, tokens: torch.Tensor
) -> tuple[str, str, str]:
    """(forward, run_with_cache of everything, µs a token of the forward) at one size."""
    forward = compare(lambda: model(tokens), lambda: hf_model(tokens), PAIRS)
    cached = compare(lambda: model.run_with_cache(tokens), lambda: hf_model(tokens), PAIRS)
    return str(forward), str(cached), per_token(forward, tokens.numel())


def over_lengths() -> Iterator[tuple[str, ...]]:
    """Batches of one."""
    hf_model = small_gpt2()
    model = ours_from(hf_model)
    for length in (8, 32, 128, 512, 1024):
        yield str(length), *against_hugging_face(model, hf_model, ids(1, length))


def over_batches() -> Iterator[tuple[str, ...]]:
    """Texts of 64 tokens."""
    hf_model = small_gpt2()
    model = ours_from(hf_model)
    for batch in (1, 4, 16, 64):
        yield str(batch), *against_hugging_face(model, hf_model, ids(batch, 64))


def over_layers() -> Iterator[tuple[str, ...]]:
    """One text of 128 tokens."""
    for n_layers in (2, 6, 12, 24):
        hf_model = small_gpt2(n_layers)
        yield str(n_layers), *against_hugging_face(ours_from(hf_model), hf_model, ids(1, 128))


@torch.no_grad()
def over_hooks() -> Iterator[tuple[str, ...]]:
    """Hooks that do nothing, on the first so many of all points, in their order."""
    model, tokens = ours_from(small_gpt2(12)), ids(1, 128)
    _, cache = model.run_with_cache(tokens)
    names = list(cache)
    for count in (1, 10, 50, 100, len(names)):
        hooks = [(name, lambda value, hook: None) for name in names[:count]]
        ratio = compare(
            lambda hooks=hooks: model.run_with_hooks(tokens, fwd_hooks=hooks),
            lambda: model(tokens),
            PAIRS,
        )
        yield str(count), str(ratio)


def over_captured() -> Iterator[tuple[str, ...]]:
    """Every resid_post of a greedy generation from 16 tokens."""
    model, tokens = ours_from(small_gpt2(12)), ids(1, 16)
    for new in (16, 64, 256):
        how = {"max_new_tokens": new, "do_sample": False, "stop_at_eos": False, "verbose": False}
        ratio = compare(
            lambda how=how: model.generate(
                tokens, return_cache="resid_post", include_last=False, **how
            ),
            lambda how=how: model.generate(tokens, **how),
            3,
        )
        yield str(16 + new), str(ratio)


def over_checkpoints() -> Iterator[tuple[str, ...]]:
    """Folders of safetensors, each loaded in a process of its own."""
    for n_layers, width in ((4, 384), (12, 768), (24, 1024)):
        with tempfile.TemporaryDirectory() as folder:
            small_gpt2(n_layers, width).save_pretrained(folder)
            seconds, peak, size = loaded("plain", folder)
            theirs, _, _ = loaded("hf", folder)
            processed, _, _ = loaded("processed", folder)
        yield (
            f"{size:.0f} MiB", f"{seconds / theirs:.2f} × HF", f"{peak / size:.0%}",
            f"{processed / theirs:.2f} × HF",
        )  # fmt: skip


BESIDE_HF = ("forward, × HF", "run_with_cache of everything, × HF", "forward, µs of CPU a token")
CURVES: dict[str, Callable[[], Curve]] = {
    "length": lambda: Curve("Length of the text (batch 1)", ("tokens", *BESIDE_HF), over_lengths()),
    "batch": lambda: Curve("Batch (64 tokens)", ("texts", *BESIDE_HF), over_batches()),
    "layers": lambda: Curve("Layers (1 × 128)", ("layers", *BESIDE_HF), over_layers()),
    "hooks": lambda: Curve(
        "Hooked points (12 layers, 1 × 128; hooks that do nothing)",
        ("hooks", "× the bare forward"),
        over_hooks(),
    ),
    "captured": lambda: Curve(
        "Captured tokens (12 resid_post through a generation)",
        ("tokens", "× the same generation"),
        over_captured(),
    ),
    "checkpoint": lambda: Curve(
        "Size of the checkpoint",
        ("safetensors", "time, plain", "extra peak memory, of the file", "time, with processing"),
        over_checkpoints(),
    ),
}
