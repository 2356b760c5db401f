"""Measure how far every family is from Hugging Face, and write `docs/parity.md`.

    python scripts/write_parity.py            (or: make parity)

The models are those of the tests: random, with loud weights and awkward sizes.
"""

import datetime
import platform
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import transformers
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import tiny  # noqa: E402

from transformer_lens_lite import HookedTransformer  # noqa: E402
from weights_conversion import supported  # noqa: E402

PAGE = ROOT / "docs" / "parity.md"
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
HEAD = """# Parity with Hugging Face

Written by `make parity` on {date}, not edited by hand: Python {python}, torch {torch},
transformers {transformers}, {machine}.

One random model per family (weights loud, sizes awkward: the tests' models), two rows of 40 tokens,
eager attention in Hugging Face (sdpa for Falcon with ALiBi). An error is the largest difference
over the largest value of Hugging Face's.

- **fp32**: logits, the worst of all the family's variants in the tests; in brackets how many.
- **folded**: log-probabilities after `from_pretrained`'s weight processing, first variant.
- **bf16, fp16**: ours / ours folded / Hugging Face's own, each against Hugging Face in fp32 on the
  same rounded weights: log-probabilities, median over positions and vocabulary, relative to the
  largest.

| family | fp32 | folded | bf16 | fp16 |
|---|---|---|---|---|
"""


def load(hf_model: object, name: str, processed: bool = False, **arguments: object):
    """Ours, with or without processing."""
    kind = HookedTransformer.from_pretrained if processed else (
        HookedTransformer.from_pretrained_no_processing
    )  # fmt: skip
    if name == "llama_dynamic":  # its scaling begins past the context length
        arguments["n_ctx"] = 64
    return kind(hf_model=hf_model, device="cpu", **arguments)


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference over the largest value."""
    return float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max())


def fp32(name: str) -> float:
    """Logits of one variant."""
    hf_model = tiny.build(name)
    tokens = tiny.tokens(hf_model.config)
    return relative(load(hf_model, name)(tokens), hf_model(tokens).logits)


def folded(name: str) -> float:
    """Log-probabilities after processing."""
    hf_model = tiny.build(name)
    tokens = tiny.tokens(hf_model.config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # steps that a family's form rules out
        ours = load(hf_model, name, processed=True)(tokens)
    return relative(ours.log_softmax(-1), hf_model(tokens).logits.log_softmax(-1))


def half(name: str, dtype: torch.dtype) -> list[float]:
    """(ours, ours folded, theirs): median distance to fp32 on the same rounded weights."""
    with tempfile.TemporaryDirectory() as folder:
        tiny.build(name).save_pretrained(folder)
        hf_half = tiny.read(folder, dtype)
        hf_half.save_pretrained(f"{folder}/half")
        exact_model = tiny.read(f"{folder}/half", torch.float32)
    tokens = tiny.tokens(hf_half.config)
    exact = exact_model(tokens).logits.log_softmax(-1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        models = [load(hf_half, name, processed=step, dtype=dtype) for step in (False, True)]
    logits = [model(tokens) for model in models] + [hf_half(tokens).logits]
    errors = [(x.float().log_softmax(-1) - exact).abs().median() for x in logits]
    return [float(error / exact.abs().max()) for error in errors]


@torch.no_grad()
def main() -> None:
    """Measure and write."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    lines = []
    for family in supported():
        names = [name for name, (kind, _) in tiny.VARIANTS.items() if kind == family]
        if not names:
            continue  # formats of training scripts, which Hugging Face does not load
        first, worst = names[0], max(fp32(name) for name in names)
        halves = [
            " / ".join(f"{error:.1e}" for error in half(first, dtype)) for dtype in HALF.values()
        ]
        cells = [family, f"{worst:.0e} ({len(names)})", f"{folded(first):.0e}", *halves]
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    head = HEAD.format(
        date=datetime.date.today(),
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        machine=platform.machine(),
    )
    PAGE.write_text(head + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
