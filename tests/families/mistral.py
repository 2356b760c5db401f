"""Mistral and Ministral."""

from families.llama import LLAMA, rope

MISTRAL = {**LLAMA, "num_key_value_heads": 2, "sliding_window": 9}
MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
SIZES = {"mistral": MISTRAL, "ministral": MISTRAL}
VARIANTS = {
    "mistral": ("mistral", {}),
    "mistral_without_window": ("mistral", {"sliding_window": None}),
    "mistral_one_kv_head": ("mistral", {"num_key_value_heads": 1, "head_dim": None}),
    "mistral_tied_gelu": ("mistral", {"tie_word_embeddings": True, "hidden_act": "gelu"}),
    "mistral_yarn": (
        "mistral",
        rope("yarn", factor=4.0, original_max_position_embeddings=16),
    ),
    "ministral": ("ministral", MIXED),
    "ministral_all_local": ("ministral", {"num_key_value_heads": 4, "head_dim": 10}),
    "ministral_all_global": ("ministral", {"layer_types": ["full_attention"] * 3}),
}
FIELDS = [
    ("mistral", {"sliding_window": 4}),
    ("mistral", {"sliding_window": None}),
    ("mistral", {"rms_norm_eps": 1e-5}),
    ("mistral", rope("default")),
    ("ministral", {"sliding_window": 4}),
    ("ministral", {"layer_types": MIXED["layer_types"][::-1][1:] + ["full_attention"]}),
    ("ministral", {"rms_norm_eps": 1e-5}),
    ("ministral", rope("default")),
]
