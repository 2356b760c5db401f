"""GPT-J."""

SIZES = {"gptj": {
    "vocab_size": 61,
    "n_positions": 64,
    "n_embd": 24,
    "n_layer": 3,
    "n_head": 3,
    "n_inner": 52,
    "rotary_dim": 4,
    "layer_norm_epsilon": 1e-3,
    "bos_token_id": None,
    "eos_token_id": None,
}}  # fmt: skip
VARIANTS = {
    "gptj": ("gptj", {}),
    "gptj_tied": ("gptj", {"tie_word_embeddings": True}),
    "gptj_full": ("gptj", {"rotary_dim": 8, "n_inner": None}),
    "gptj_relu": ("gptj", {"activation_function": "relu"}),
}
FIELDS = [
    ("gptj", {"layer_norm_epsilon": 1e-5}),
    ("gptj", {"activation_function": "silu"}),
    ("gptj", {"rotary_dim": 8}),
    ("gptj", {"n_head": 4}),
]
