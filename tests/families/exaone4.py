"""EXAONE 4."""

from families.gemma import ALL_GLOBAL, MIXED
from families.llama import LLAMA, LLAMA3, ORIGINAL, rope

SIZES = {"exaone4": {**LLAMA, "num_key_value_heads": 2, "sliding_window": 9}}
VARIANTS = {
    "exaone4": ("exaone4", {"layer_types": MIXED}),
    "exaone4_pattern": ("exaone4", {"sliding_window_pattern": 2, "num_key_value_heads": 4}),
    "exaone4_all_local": ("exaone4", {"num_key_value_heads": 1}),
    "exaone4_nothing_turns": ("exaone4", {"layer_types": ALL_GLOBAL}),
    "exaone4_without_window": (
        "exaone4",
        {"layer_types": ALL_GLOBAL, "sliding_window": None, "tie_word_embeddings": True},
    ),
    "exaone4_text_pattern": (
        "exaone4",
        {"layer_types": MIXED, "sliding_window_pattern": "GGL", "hidden_act": "gelu"},
    ),
    "exaone4_llama3": ("exaone4", {"layer_types": MIXED, **rope("llama3", **LLAMA3, **ORIGINAL)}),
}
FIELDS = [
    ("exaone4", {"rms_norm_eps": 1e-6}),
    ("exaone4", {"hidden_act": "gelu"}),
    ("exaone4", {"sliding_window": 5}),
    ("exaone4", {"layer_types": MIXED[::-1]}),
    ("exaone4_pattern", {"sliding_window_pattern": 3}),
    ("exaone4", rope("default")),
    ("exaone4_nothing_turns", {"sliding_window": None}),
]
