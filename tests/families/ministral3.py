"""Ministral 3."""

from typing import Any

from families.llama import LLAMA, rope

SIZES = {"ministral3": {**LLAMA, "num_key_value_heads": 2, "sliding_window": None}}


def growing(rope_type: str = "yarn", beta: float = 0.6, **values: Any) -> dict[str, Any]:
    """Queries grow at every ninth position."""
    values = {"original_max_position_embeddings": 9, "llama_4_scaling_beta": beta, **values}
    return rope(rope_type, **values)


VARIANTS = {
    "ministral3": ("ministral3", growing(factor=4.0)),
    "ministral3_mscale": (
        "ministral3",
        growing(factor=4.0, mscale=0.7, mscale_all_dim=0.4, max_position_embeddings=64),
    ),
    "ministral3_default_rope": ("ministral3", growing("default")),
    "ministral3_no_growth": ("ministral3", growing(factor=4.0, beta=0.0)),
    "ministral3_window": (
        "ministral3",
        {"sliding_window": 7, "num_key_value_heads": 4, **growing(factor=4.0)},
    ),
    "ministral3_mqa_tied": (
        "ministral3",
        {
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "hidden_act": "gelu",
            **growing(factor=4.0),
        },
    ),
}
FIELDS = [
    ("ministral3", {"rms_norm_eps": 1e-6}),
    ("ministral3", {"hidden_act": "gelu"}),
    ("ministral3", {"sliding_window": 7}),
    ("ministral3", growing(factor=4.0, beta=0.3)),
    ("ministral3", growing(factor=4.0, original_max_position_embeddings=12)),
    ("ministral3", growing(factor=2.0)),
]
