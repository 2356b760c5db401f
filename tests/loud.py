"""Small native models of every kind, with weights loud enough to show every mistake.

The counterpart of `tiny`, which makes Hugging Face models: nothing here needs transformers.

    model = loud.build("rotary_gqa")
"""

from typing import Any

import torch
from torch import Tensor

from transformer_lens_lite.config import HookedTransformerConfig
from transformer_lens_lite.kv_cache import KeyValueCache
from transformer_lens_lite.model import HookedTransformer

# Awkward on purpose: no two sizes are equal, and the vocabulary is odd.
SIZES: dict[str, Any] = {
    "n_layers": 3,
    "d_model": 24,
    "d_head": 10,
    "n_heads": 4,
    "n_ctx": 48,
    "d_mlp": 38,
    "d_vocab": 61,
    "act_fn": "gelu_new",
    "eps": 1e-3,
    "device": "cpu",
}
LLAMA: dict[str, Any] = {
    "positional_embedding_type": "rotary",
    "normalization_type": "RMS",
    "gated_mlp": True,
    "act_fn": "silu",
    "rotary_base": 500.0,
}
LOCAL = {"use_local_attn": True, "window_size": 4, "attn_types": ["local", "global", "local"]}

KINDS: dict[str, dict[str, Any]] = {
    "standard": {},
    "rotary": LLAMA,
    "rotary_gqa": {**LLAMA, "n_key_value_heads": 2},
    "rotary_pairs": {"positional_embedding_type": "rotary", "rotary_adjacent_pairs": True,
                     "rotary_dim": 6, "parallel_attn_mlp": True},
    "alibi": {"positional_embedding_type": "alibi"},
    "alibi_gqa": {"positional_embedding_type": "alibi", "n_key_value_heads": 2},
    "shortformer": {"positional_embedding_type": "shortformer"},
    "none": {"positional_embedding_type": "none"},
    "window": LOCAL,
    "rotary_window": {**LLAMA, **LOCAL, "n_key_value_heads": 2},
    "alibi_window": {**LOCAL, "positional_embedding_type": "alibi"},
    "softcap": {**LLAMA, "attn_scores_soft_cap": 1.5, "output_logits_soft_cap": 2.0},
    "sinks": {**LLAMA, "use_attention_sinks": True, "n_key_value_heads": 2},
    "qk_norm": {**LLAMA, "use_qk_norm": True, "n_key_value_heads": 2},
    "attn_only": {"attn_only": True},
}  # fmt: skip


def build(kind: str = "standard", tokenizer: Any = None, seed: int = 0, **overrides: Any):
    """A loud model of a kind, its d_vocab from the tokenizer if there is one."""
    vocabulary = {} if tokenizer is None else {"d_vocab": -1}
    cfg = HookedTransformerConfig(**{**SIZES, **KINDS[kind], **vocabulary, **overrides})
    return loud(HookedTransformer(cfg, tokenizer), seed)


@torch.no_grad()
def loud(model: HookedTransformer, seed: int = 0) -> HookedTransformer:
    """Matrices N(0, .25), norm weights 1 + N(0, .3), all other vectors N(0, .3)."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator).to(parameter)
        is_matrix = "W_" in name
        parameter.copy_(0.25 * noise if is_matrix else 0.3 * noise + name.endswith(".w"))
    return model


def tokens(batch: int = 1, length: int = 9, seed: int = 1, d_vocab: int = 61) -> Tensor:
    """Random ids [batch, length]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, d_vocab, (batch, length), generator=generator)


@torch.no_grad()
def frozen_prefix(model: HookedTransformer, ids: Tensor) -> KeyValueCache:
    """A prefix made by hand, as classic code makes it."""
    cache = KeyValueCache.init_cache(model.cfg, "cpu", len(ids))
    model(ids, past_kv_cache=cache)
    cache.freeze()
    return cache


def ragged(
    lengths: list[int], side: str = "left", seed: int = 2
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Rows of these lengths, and the same padded: (rows [1, length], ids, mask); the pad is 0."""
    rows = [tokens(1, length, seed + i) for i, length in enumerate(lengths)]
    ids = torch.zeros(len(rows), max(lengths), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        n = row.shape[1]
        here = slice(-n, None) if side == "left" else slice(0, n)
        ids[i, here], mask[i, here] = row[0], 1
    return rows, ids, mask
