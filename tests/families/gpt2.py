"""GPT-2."""

SIZES = {"gpt2": {
    "vocab_size": 61,
    "n_positions": 40,
    "n_embd": 24,
    "n_layer": 3,
    "n_head": 3,
    "n_inner": 52,
    "layer_norm_epsilon": 1e-3,
}}  # fmt: skip
VARIANTS = {
    "gpt2": ("gpt2", {}),
    "gpt2_untied": ("gpt2", {"tie_word_embeddings": False}),
    "gpt2_gelu": ("gpt2", {"activation_function": "gelu", "n_inner": None}),
    "gpt2_relu": ("gpt2", {"activation_function": "relu"}),
    "gpt2_silu": ("gpt2", {"activation_function": "silu"}),
    "gpt2_unscaled": ("gpt2", {"scale_attn_weights": False}),
    "gpt2_by_layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "gpt2_reordered": ("gpt2", {"reorder_and_upcast_attn": True}),
}
FIELDS = [
    ("gpt2", {"layer_norm_epsilon": 1e-5}),
    ("gpt2", {"activation_function": "gelu"}),  # report 023: exact instead of by tanh
    ("gpt2", {"activation_function": "relu"}),
    ("gpt2", {"activation_function": "silu"}),
    ("gpt2", {"scale_attn_weights": False}),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    ("gpt2", {"n_head": 4}),
]
