"""OLMo, OLMo 2 and OLMo 3."""

from families.gemma import ALL_GLOBAL, LINEAR, MIXED, ropes
from families.llama import LLAMA, rope

NONE = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
OLMO = {**LLAMA, "num_key_value_heads": 2, **NONE}
OLMO3 = {**OLMO, "sliding_window": 9}
SIZES = {
    "olmo": {name: value for name, value in OLMO.items() if name != "rms_norm_eps"},
    "olmo2": OLMO,
    "olmo3": OLMO3,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
VARIANTS = {
    "olmo": ("olmo", {}),
    "olmo_clipped": ("olmo", {"clip_qkv": 0.7}),
    "olmo_tied_mha": ("olmo", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "olmo_biases": ("olmo", {"attention_bias": True, "clip_qkv": 1.0}),
    "olmo_gelu": ("olmo", {"hidden_act": "gelu", "head_dim": 6}),
    "olmo2": ("olmo2", {}),
    "olmo2_tied_mha": ("olmo2", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "olmo2_mqa_biases": ("olmo2", {"attention_bias": True, "num_key_value_heads": 1}),
    "olmo2_linear": ("olmo2", rope("linear", factor=2.5)),
    "olmo3": ("olmo3", {"layer_types": MIXED}),
    "olmo3_all_local": ("olmo3", {"num_key_value_heads": 4}),
    "olmo3_all_global": ("olmo3", {"layer_types": ALL_GLOBAL, "head_dim": 6}),
    "olmo3_yarn": ("olmo3", {"layer_types": MIXED, **ropes(YARN, {})}),
    "olmo3_both_linear": ("olmo3", {"layer_types": MIXED, **ropes(LINEAR, LINEAR)}),
    "olmo3_biases_tied": (
        "olmo3",
        {"attention_bias": True, "tie_word_embeddings": True, "layer_types": MIXED},
    ),
}
FIELDS = [
    ("olmo", {"clip_qkv": 0.7}),
    ("olmo_clipped", {"clip_qkv": 0.5}),
    ("olmo", {"hidden_act": "gelu"}),
    ("olmo", rope("default")),
    ("olmo2", {"rms_norm_eps": 1e-5}),
    ("olmo2", {"hidden_act": "gelu"}),
    ("olmo2", rope("default")),
    ("olmo3", {"rms_norm_eps": 1e-5}),
    ("olmo3", {"sliding_window": 5}),
    ("olmo3", {"layer_types": MIXED[::-1]}),
    ("olmo3", ropes({}, {})),
    ("olmo3_yarn", ropes(LINEAR, {})),
    ("olmo3_yarn", ropes(YARN, {"rope_theta": 50.0})),
]
