"""Granite."""

from families.llama import LLAMA, rope

SIZES = {"granite": {
    **LLAMA,
    "num_key_value_heads": 2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.21,
    "logits_scaling": 0.49,
}}  # fmt: skip
ONES = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
VARIANTS = {
    "granite": ("granite", {}),
    "granite_ones": ("granite", dict.fromkeys(ONES, 1.0)),
    "granite_integers": ("granite", {"embedding_multiplier": 12, "logits_scaling": 1}),
    "granite_tied": ("granite", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "granite_mqa": ("granite", {"num_key_value_heads": 1, "head_dim": 6}),
    "granite_biases": ("granite", {"attention_bias": True, "mlp_bias": True}),
    "granite_gelu": ("granite", {"hidden_act": "gelu"}),
}
FIELDS = [
    ("granite", {"embedding_multiplier": 2.0}),
    ("granite", {"residual_multiplier": 0.3}),
    ("granite", {"attention_multiplier": 0.3}),
    ("granite", {"logits_scaling": 0.5}),
    ("granite", {"rms_norm_eps": 1e-5}),
    ("granite", rope("default")),
]
