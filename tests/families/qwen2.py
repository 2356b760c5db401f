"""Qwen2."""

from typing import Any

from families.llama import LLAMA, rope

QWEN2 = {**LLAMA, "num_key_value_heads": 2}
WINDOW = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]


def windowed(family: str) -> tuple[dict[str, Any], list[tuple[str, dict[str, Any]]]]:
    """Variants and fields that Qwen2 and Qwen3 share."""
    variants = {
        family: (family, {}),
        f"{family}_tied": (family, {"tie_word_embeddings": True, "num_key_value_heads": 4}),
        f"{family}_one_kv_head": (family, {"num_key_value_heads": 1, "head_dim": 6}),
        f"{family}_upper_windows": (family, WINDOW),
        f"{family}_windows": (family, {**WINDOW, "max_window_layers": 0}),
        f"{family}_mixed_windows": (family, {**WINDOW, "layer_types": MIXED}),
        f"{family}_gelu": (family, {"hidden_act": "gelu"}),
        f"{family}_yarn": (family, rope("yarn", factor=4.0, original_max_position_embeddings=16)),
    }
    fields: list[tuple[str, dict[str, Any]]] = [
        (family, {"rms_norm_eps": 1e-5}),
        (family, {"hidden_act": "gelu"}),
        (family, rope("default")),
        (family, WINDOW),
        (f"{family}_upper_windows", {"sliding_window": 5}),
        (f"{family}_upper_windows", {"max_window_layers": 2}),
        (f"{family}_upper_windows", {"layer_types": MIXED}),
    ]
    return variants, fields


SIZES = {"qwen2": QWEN2}
VARIANTS, FIELDS = windowed("qwen2")
