"""Phi."""

from families.gpt_neox import rope

SIZES = {"phi": {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 38,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "max_position_embeddings": 64,
    "layer_norm_eps": 1e-3,
}}  # fmt: skip
VARIANTS = {
    "phi": ("phi", {}),
    "phi_tied": ("phi", {"tie_word_embeddings": True}),
    "phi_gqa": ("phi", {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}),
    "phi_qk_norm": ("phi", {"qk_layernorm": True, "num_key_value_heads": 1}),
    "phi_gelu": ("phi", {"hidden_act": "gelu", "partial_rotary_factor": 0.75}),
    "phi_linear": ("phi", rope("linear", factor=2.5, partial_rotary_factor=1.0)),
}
FIELDS = [
    ("phi", {"layer_norm_eps": 1e-5}),
    ("phi", {"hidden_act": "relu"}),
    ("phi", {"num_attention_heads": 2}),
    ("phi", {"partial_rotary_factor": 0.25}),
    ("phi", rope("default", partial_rotary_factor=0.5)),
    ("phi", rope("linear", factor=2.5)),
]
