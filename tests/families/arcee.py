"""Arcee."""

from families.llama import LLAMA, rope

SIZES = {"arcee": {**LLAMA, "num_key_value_heads": 2}}
VARIANTS = {
    "arcee": ("arcee", {}),
    "arcee_tied_mha": ("arcee", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "arcee_biases": ("arcee", {"attention_bias": True, "mlp_bias": True, "head_dim": 10}),
    "arcee_mqa_silu": ("arcee", {"num_key_value_heads": 1, "hidden_act": "silu"}),
    "arcee_yarn": ("arcee", rope("yarn", factor=4.0, original_max_position_embeddings=16)),
}
FIELDS = [
    ("arcee", {"rms_norm_eps": 1e-5}),
    ("arcee", {"hidden_act": "gelu"}),
    ("arcee", rope("default")),
]
