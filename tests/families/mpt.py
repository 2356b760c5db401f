"""MPT."""

SIZES = {"mpt": {
    "vocab_size": 61,
    "d_model": 24,
    "n_layers": 3,
    "n_heads": 3,
    "max_seq_len": 64,
    "layer_norm_epsilon": 1e-3,
}}  # fmt: skip
VARIANTS = {
    "mpt": ("mpt", {}),
    "mpt_untied": ("mpt", {"tie_word_embeddings": False, "n_heads": 4}),
    "mpt_clipped": ("mpt", {"attn_config": {"clip_qkv": 0.7}}),
    "mpt_scaled": ("mpt", {"attn_config": {"softmax_scale": 0.2}, "n_heads": 6}),
}
FIELDS = [
    ("mpt", {"layer_norm_epsilon": 1e-5}),
    ("mpt", {"n_heads": 4}),
    ("mpt", {"attn_config": {"clip_qkv": 0.7}}),
    ("mpt", {"attn_config": {"softmax_scale": 0.2}}),
]
