"""Helium."""

from families.llama import LLAMA, rope

SIZES = {"helium": {**LLAMA, "head_dim": 6, "num_key_value_heads": 2}}
VARIANTS = {
    "helium": ("helium", {}),
    "helium_tied_mha": ("helium", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "helium_biases": ("helium", {"attention_bias": True, "mlp_bias": True}),
    "helium_mqa_gelu": ("helium", {"num_key_value_heads": 1, "hidden_act": "gelu"}),
}
FIELDS = [
    ("helium", {"rms_norm_eps": 1e-5}),
    ("helium", {"hidden_act": "gelu"}),
    ("helium", rope("default")),
]
