"""Nemotron."""

from families.gpt_neox import rope

SIZES = {"nemotron": {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 22,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "norm_eps": 1e-3,
}}  # fmt: skip
BIASES = {"attention_bias": True, "mlp_bias": True}
VARIANTS = {
    "nemotron": ("nemotron", {}),
    "nemotron_tied": ("nemotron", {"tie_word_embeddings": True}),
    "nemotron_biases": ("nemotron", {**BIASES, "num_key_value_heads": 4}),
    "nemotron_mlp_bias": ("nemotron", {"mlp_bias": True, "num_key_value_heads": 1}),
    "nemotron_silu": ("nemotron", {"hidden_act": "silu", "partial_rotary_factor": 1.0}),
    "nemotron_linear": ("nemotron", rope("linear", factor=2.5, partial_rotary_factor=0.75)),
}
FIELDS = [
    ("nemotron", {"norm_eps": 1e-5}),
    ("nemotron", {"hidden_act": "relu"}),
    ("nemotron", {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}),
    ("nemotron", {"partial_rotary_factor": 0.25}),
    ("nemotron", rope("default", partial_rotary_factor=0.5)),
]
