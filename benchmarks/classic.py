"""The same cases for TransformerLens 3.9. Run by the interpreter of an environment that has it;
prints JSON.

It gets the weights of a random Hugging Face model through its state dict, and is measured against
that model in its own process. Uses nothing of ours but the timing.
"""

import json
import sys

import torch
from transformer_lens import HookedTransformer, HookedTransformerConfig

from benchmarks.models import SHAPES, hugging_face, prompt
from benchmarks.pairs import compare, keep_freed_memory


def classic(shape: str) -> HookedTransformer:
    """A random model of this shape."""
    sizes = SHAPES[shape]
    cfg = HookedTransformerConfig(
        n_layers=sizes["n_layer"],
        d_model=sizes["n_embd"],
        n_heads=sizes["n_head"],
        d_head=sizes["n_embd"] // sizes["n_head"],
        d_vocab=sizes["vocab_size"],
        n_ctx=sizes["n_positions"],
        act_fn="gelu_new",
        device="cpu",
    )
    return HookedTransformer(cfg)


@torch.no_grad()
def measure() -> dict[str, float]:
    """Median ratios by row name."""
    rows = {}
    hf_model, model = hugging_face("gpt2-small"), classic("gpt2-small")
    for batch, length in ((1, 16), (1, 512), (8, 128)):
        tokens = prompt("gpt2-small", batch, length)
        pairs = 15 if length < 100 else 5
        rows[f"forward {batch}×{length}"] = compare(
            lambda: model(tokens), lambda: hf_model(tokens), pairs
        ).median
        rows[f"run_with_cache, everything, {batch}×{length}"] = compare(
            lambda: model.run_with_cache(tokens), lambda: hf_model(tokens), pairs
        ).median
    for shape, pairs in (("gpt2-small", 3), ("toy", 5)):
        hf_model, model, tokens = hugging_face(shape), classic(shape), prompt(shape, 1, 64)
        mask = torch.ones_like(tokens)
        rows[f"generate 64 + 48, {shape}"] = compare(
            # without a tokenizer its cached generation is wrong for learned positions: uncached
            lambda: model.generate(
                tokens, 48, stop_at_eos=False, do_sample=False, verbose=False,
                use_past_kv_cache=False,
            ),
            lambda: hf_model.generate(
                tokens, attention_mask=mask, max_new_tokens=48, do_sample=False
            ),
            pairs,
        ).median  # fmt: skip
    return rows


if __name__ == "__main__":
    keep_freed_memory()
    json.dump(measure(), sys.stdout)
