"""StableLM."""

from families.gpt_neox import rope

SIZES = {"stablelm": {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 38,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "layer_norm_eps": 1e-3,
    "partial_rotary_factor": 0.5,
}}  # fmt: skip
GQA = {"num_key_value_heads": 2}
VARIANTS = {
    "stablelm": ("stablelm", {}),
    "stablelm_tied": ("stablelm", {"tie_word_embeddings": True}),
    "stablelm_gqa_bias": ("stablelm", {**GQA, "use_qkv_bias": True}),
    "stablelm_parallel": ("stablelm", {"use_parallel_residual": True}),
    "stablelm_qk_norm": ("stablelm", {**GQA, "qk_layernorm": True, "use_parallel_residual": True}),
    "stablelm_gelu": ("stablelm", {"hidden_act": "gelu", "partial_rotary_factor": 0.75}),
    "stablelm_linear": ("stablelm", rope("linear", factor=2.5, partial_rotary_factor=1.0)),
}
FIELDS = [
    ("stablelm", {"layer_norm_eps": 1e-5}),
    ("stablelm", {"hidden_act": "relu"}),
    ("stablelm", {"num_attention_heads": 2, "num_key_value_heads": 2}),
    ("stablelm", {"partial_rotary_factor": 0.25}),
    ("stablelm", rope("default", partial_rotary_factor=0.5)),
]
