"""Apertus."""

from families.llama import LLAMA, LLAMA3, ORIGINAL, rope

NONE = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
SIZES = {"apertus": {**LLAMA, "num_key_value_heads": 2, **NONE}}
VARIANTS = {
    "apertus": ("apertus", rope("llama3", **LLAMA3, **ORIGINAL)),
    "apertus_default_rope": ("apertus", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "apertus_biases": ("apertus", {"attention_bias": True, **rope("default")}),
    "apertus_mqa_relu2": ("apertus", {"num_key_value_heads": 1, "hidden_act": "relu2"}),
    "apertus_narrow_silu": ("apertus", {"head_dim": 6, "hidden_act": "silu", **rope("default")}),
}
FIELDS = [
    ("apertus", {"rms_norm_eps": 1e-5}),
    ("apertus_mqa_relu2", {"hidden_act": "gelu"}),
    ("apertus", rope("default")),
]
