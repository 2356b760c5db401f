"""Measure how far every family is from Hugging Face, and write `docs/parity.md`.

    python scripts/write_parity.py                  (or: make parity) every family
    python scripts/write_parity.py bloom gpt_oss    only these rows anew, the others as they stand

The models are those of the tests: random, with loud weights and awkward sizes.
"""

import datetime
import platform
import re
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import encoders  # noqa: E402
import tiny  # noqa: E402

from transformer_lens_lite import HookedTransformer  # noqa: E402
from weights_conversion import supported  # noqa: E402

PAGE = ROOT / "docs" / "parity.md"
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
HEAD = """# Parity with Hugging Face

Written by `make parity` on {date}, not edited by hand: {versions}.

One random model per family (weights loud, sizes awkward: the tests' models), two rows of 40 tokens
(31 for encoders), eager attention in Hugging Face (sdpa for Falcon with ALiBi). An error is the
largest difference over the largest value of Hugging Face's.

- **fp32**: logits, the worst of all the family's variants in the tests; in brackets how many.
- **folded**: log-probabilities after `from_pretrained`'s weight processing, first variant.
- **bf16, fp16**: ours / ours folded / Hugging Face's own, each against Hugging Face in fp32 on the
  same rounded weights: log-probabilities, median over positions and vocabulary, relative to the
  largest.

[Encoders](encoders.md) stand at the end: logits are those of the masked language model's head
(Gemma 3's own), and **stream** is the last hidden state of the model without a head, the worst of
the variants.

"""
COLUMNS = {
    "decoders": ("family", "fp32", "folded", "bf16", "fp16"),
    "encoders": ("encoder", "fp32", "folded", "bf16", "fp16", "stream"),
}


@dataclass(frozen=True)
class Family:
    """A row of the page: the variants of one `model_type`, made by `tiny` or by `encoders`."""

    kind: str
    model_type: str
    makes: ModuleType

    @property
    def variants(self) -> list[str]:
        """Names, the first of which stands for the family where one is enough."""
        every = self.makes.VARIANTS.items()
        return [name for name, (model_type, _) in every if model_type == self.model_type]

    def tokens(self, hf_model: nn.Module) -> Tensor:
        """What both models read."""
        return tiny.tokens(hf_model.config) if self.makes is tiny else encoders.tokens()

    def row(self) -> str:
        """Everything measured."""
        first = self.variants[0]
        worst = max(self.fp32(name) for name in self.variants)
        cells = [
            self.model_type,
            f"{worst:.0e} ({len(self.variants)})",
            f"{self.folded(first):.0e}",
        ]
        for dtype in HALF.values():
            cells.append(" / ".join(f"{error:.1e}" for error in self.half(first, dtype)))
        if self.kind == "encoders":
            cells.append(f"{max(self.stream(name) for name in self.variants):.0e}")
        return line(cells)

    def fp32(self, name: str) -> float:
        """Logits of one variant."""
        hf_model = self.makes.build(name)
        tokens = self.tokens(hf_model)
        return relative(load(hf_model, name)(tokens), hf_model(tokens).logits)

    def stream(self, name: str) -> float:
        """The last hidden state of a variant without its head."""
        hf_model = encoders.build(name, headless=True)
        tokens = self.tokens(hf_model)
        ours = load(hf_model, name)(tokens, return_type="residual")
        return relative(ours, hf_model(tokens).last_hidden_state)

    def folded(self, name: str) -> float:
        """Log-probabilities after processing."""
        hf_model = self.makes.build(name)
        tokens = self.tokens(hf_model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # steps that a family's form rules out
            ours = load(hf_model, name, processed=True)(tokens)
        return relative(ours.log_softmax(-1), hf_model(tokens).logits.log_softmax(-1))

    def half(self, name: str, dtype: torch.dtype) -> list[float]:
        """(ours, ours folded, theirs): median distance to fp32 on the same rounded weights."""
        with tempfile.TemporaryDirectory() as folder:
            self.makes.build(name).save_pretrained(folder)
            hf_half = self.makes.read(folder, dtype=dtype)
            hf_half.save_pretrained(f"{folder}/half")
            exact_model = self.makes.read(f"{folder}/half", dtype=torch.float32)
        tokens = self.tokens(hf_half)
        exact = exact_model(tokens).logits.log_softmax(-1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            models = [load(hf_half, name, processed=step, dtype=dtype) for step in (False, True)]
        logits = [model(tokens) for model in models] + [hf_half(tokens).logits]
        errors = [(x.float().log_softmax(-1) - exact).abs().median() for x in logits]
        return [float(error / exact.abs().max()) for error in errors]


def every_family() -> list[Family]:
    """Those with tests' models: all but formats of training scripts, which Hugging Face lacks."""
    decoders = [Family("decoders", name, tiny) for name in supported() if name in tiny.SIZES]
    return decoders + [Family("encoders", name, encoders) for name in sorted(encoders.FAMILIES)]


def load(
    hf_model: nn.Module, name: str, processed: bool = False, **arguments: Any
) -> HookedTransformer:
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


def line(cells: Any) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def rows_of(page: str) -> dict[tuple[str, str], str]:
    """The rows of a page: {(kind, family): line}."""
    found, kind = {}, ""
    for text in page.splitlines():
        kind = next((k for k, titles in COLUMNS.items() if text == line(titles)), kind)
        if (match := re.match(r"\| (\S+) \| \d", text)) is not None:
            found[kind, match[1]] = text
    return found


@torch.no_grad()
def main(names: list[str]) -> None:
    """Measure the families of these names, or all, and write the page."""
    families = every_family()
    if unknown := set(names) - {family.model_type for family in families}:
        sys.exit(f"no models of {sorted(unknown)}; there are those of {sorted(supported())}")
    versions = (
        f"Python {platform.python_version()}, torch {torch.__version__},\n"
        f"transformers {transformers.__version__}, {platform.machine()}"
    )
    before = PAGE.read_text()
    if names and versions not in before:
        sys.exit(f"the other rows were not measured with {versions}: measure all of them")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    rows = rows_of(before) if names else {}
    for family in families:
        if not names or family.model_type in names:
            rows[family.kind, family.model_type] = family.row()
            print(rows[family.kind, family.model_type], flush=True)
    tables = []
    for kind, titles in COLUMNS.items():
        there = [family.model_type for family in families if family.kind == kind]
        measured = [rows[kind, name] for name in there if (kind, name) in rows]
        tables.append("\n".join([line(titles), "|---" * len(titles) + "|", *measured]))
    head = HEAD.format(date=datetime.date.today(), versions=versions)
    PAGE.write_text(head + "\n\n".join(tables) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
