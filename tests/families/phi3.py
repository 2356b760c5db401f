"""Phi-3 and Phi-4-mini."""

from typing import Any

from families.llama import LLAMA, LONG

HALF = {"partial_rotary_factor": 0.5}
SHORT_LISTS = {name: values[:2] for name, values in LONG.items()}
SIZES = {"phi3": {
    # Hugging Face checks lengths of factors against hidden_size // num_attention_heads
    **{name: value for name, value in LLAMA.items() if name != "head_dim"},
    "hidden_size": 32,
    "num_key_value_heads": 2,
    "original_max_position_embeddings": 16,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}}  # fmt: skip


def longrope(**values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 500.0, "rope_type": "longrope", **values}}


VARIANTS = {
    "phi3": ("phi3", {}),
    "phi3_mha_tied": ("phi3", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "phi3_mqa": ("phi3", {"num_key_value_heads": 1}),
    "phi3_partial": ("phi3", HALF),
    "phi3_window": ("phi3", {"sliding_window": 9}),
    "phi3_gelu": ("phi3", {"hidden_act": "gelu"}),
    "phi3_longrope": ("phi3", longrope(**LONG)),
    "phi3_longrope_partial": ("phi3", longrope(**SHORT_LISTS, **HALF)),
    "phi3_longrope_factor": ("phi3", longrope(**LONG, factor=8.0)),
    "phi3_longrope_attention_factor": ("phi3", longrope(**LONG, attention_factor=1.4)),
    "phi3_longrope_legacy": (
        "phi3",
        {"rope_theta": 500.0, "rope_scaling": {"type": "longrope", **LONG}},
    ),
}
FIELDS = [
    ("phi3", {"rms_norm_eps": 1e-5}),
    ("phi3", {"sliding_window": 9}),
    ("phi3", {"hidden_act": "gelu"}),
    ("phi3", HALF),
    ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    ("phi3_longrope", {"original_max_position_embeddings": 48}),
    ("phi3_longrope", longrope(**{**LONG, "long_factor": [1.0, 2.0, 3.0, 4.0]})),
    ("phi3_longrope", longrope(**LONG, attention_factor=1.0)),
]
