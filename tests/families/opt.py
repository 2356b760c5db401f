"""OPT. The eps of its norms is no field of its config."""

SIZES = {"opt": {
    "vocab_size": 61,
    "hidden_size": 24,
    "ffn_dim": 38,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "max_position_embeddings": 64,
}}  # fmt: skip
VARIANTS = {
    "opt": ("opt", {}),
    "opt_untied": ("opt", {"tie_word_embeddings": False}),
    "opt_no_bias": ("opt", {"enable_bias": False, "activation_function": "gelu"}),
    "opt_350m": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 10}),
    "opt_narrow": ("opt", {"word_embed_proj_dim": 10, "tie_word_embeddings": False}),
    "opt_no_last_norm": ("opt", {"_remove_final_layer_norm": True}),
    "opt_bare_norms": ("opt", {"layer_norm_elementwise_affine": False}),
}
FIELDS = [
    ("opt_350m", {"num_attention_heads": 4}),
    ("opt", {"activation_function": "gelu"}),
    ("opt", {"num_attention_heads": 4}),
]
