"""Mixtral."""

from families.llama import LLAMA, rope

SIZES = {"mixtral": {**LLAMA, "num_key_value_heads": 2, "num_local_experts": 5}}
VARIANTS = {
    "mixtral": ("mixtral", {}),
    "mixtral_tied": ("mixtral", {"tie_word_embeddings": True, "num_experts_per_tok": 3}),
    "mixtral_one_choice": ("mixtral", {"num_experts_per_tok": 1, "head_dim": 6}),
    "mixtral_window": ("mixtral", {"sliding_window": 9, "hidden_act": "gelu"}),
}
FIELDS = [
    ("mixtral", {"num_experts_per_tok": 3}),
    ("mixtral", {"sliding_window": 9}),
    ("mixtral", {"hidden_act": "relu"}),
    ("mixtral", {"rms_norm_eps": 1e-5}),
    ("mixtral", rope("default")),
]
