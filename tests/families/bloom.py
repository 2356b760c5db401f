"""BLOOM."""

SIZES = {"bloom": {
    "vocab_size": 61,
    "hidden_size": 24,
    "n_layer": 3,
    "n_head": 3,
    "layer_norm_epsilon": 1e-3,
}}  # fmt: skip
VARIANTS = {
    "bloom": ("bloom", {}),
    "bloom_untied": ("bloom", {"tie_word_embeddings": False}),
    "bloom_power_of_two": ("bloom", {"n_head": 4}),
    "bloom_residual_behind_norm": ("bloom", {"apply_residual_connection_post_layernorm": True}),
}
FIELDS = [
    ("bloom", {"layer_norm_epsilon": 1e-5}),
    ("bloom", {"n_head": 4}),
    ("bloom", {"apply_residual_connection_post_layernorm": True}),
]
