"""Llama, with every way of stretching rotary positions."""

from typing import Any

LLAMA = {
    "vocab_size": 59,
    "hidden_size": 24,
    "intermediate_size": 38,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-3,
}
SIZES = {"llama": LLAMA}


def rope(rope_type: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 500.0, **values, "rope_type": rope_type}}


LONG = {"short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [1.5, 2.0, 3.0, 4.5]}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ORIGINAL = {"original_max_position_embeddings": 16}
YARN = {**ORIGINAL, "rope_theta": 20.0}  # so low that truncation moves a boundary between channels


VARIANTS = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_gqa": ("llama", {"num_key_value_heads": 2, "head_dim": 10}),
    "llama_mqa": ("llama", {"num_key_value_heads": 1, "head_dim": None}),
    "llama_biases": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 2},
    ),
    "llama_attention_bias": ("llama", {"attention_bias": True}),
    "llama_mlp_bias": ("llama", {"mlp_bias": True}),
    "llama_gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama_theta": ("llama", rope("default")),
    "llama_linear": ("llama", rope("linear", factor=2.5)),
    "llama_dynamic": ("llama", {**rope("dynamic", factor=2.0), "max_position_embeddings": 16}),
    "llama_llama3": ("llama", rope("llama3", **LLAMA3, **ORIGINAL)),
    "llama_yarn": ("llama", rope("yarn", factor=4.0, **YARN)),
    "llama_yarn_all": (
        "llama",
        rope("yarn", factor=4.0, beta_fast=2.0, beta_slow=0.25, mscale=0.7, mscale_all_dim=0.4,
             truncate=False, **YARN),
    ),
    "llama_yarn_fixed": ("llama", rope("yarn", factor=4.0, attention_factor=1.3, **YARN)),
    "llama_longrope": ("llama", rope("longrope", **LONG, **ORIGINAL)),
}  # fmt: skip

LLAMA3_32 = rope("llama3", **LLAMA3 | {"factor": 32.0}, **ORIGINAL)
FIELDS = [
    ("llama", {"rms_norm_eps": 1e-5}),
    ("llama", {"hidden_act": "gelu"}),
    ("llama", {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    ("llama", rope("linear", factor=2.5)),
    ("llama_llama3", rope("default")),
    ("llama_llama3", LLAMA3_32),
    ("llama_yarn", rope("yarn", factor=4.0, **YARN, attention_factor=1.0)),
    ("llama_yarn", rope("yarn", factor=4.0, **YARN, beta_slow=0.25)),
    ("llama_longrope", rope("longrope", **LONG, original_max_position_embeddings=48)),
]
