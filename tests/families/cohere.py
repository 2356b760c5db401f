"""Cohere and Cohere 2."""

from families.gemma import ALL_GLOBAL, MIXED
from families.llama import LLAMA, rope

NONE = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
COHERE = {
    **{name: value for name, value in LLAMA.items() if name not in ("rms_norm_eps", "head_dim")},
    "num_key_value_heads": 2,
    "layer_norm_eps": 1e-3,
    "logit_scale": 1.3,
    **NONE,
}
SIZES = {"cohere": COHERE, "cohere2": {**COHERE, "sliding_window": 9}}
VARIANTS = {
    "cohere": ("cohere", {}),
    "cohere_qk_norm": ("cohere", {"use_qk_norm": True}),
    "cohere_qk_norm_mqa": ("cohere", {"use_qk_norm": True, "num_key_value_heads": 1}),
    "cohere_untied_mha": ("cohere", {"tie_word_embeddings": False, "num_key_value_heads": 4}),
    "cohere_biases": ("cohere", {"attention_bias": True, "hidden_act": "gelu"}),
    "cohere2": ("cohere2", {"layer_types": MIXED}),
    "cohere2_pattern": ("cohere2", {"sliding_window_pattern": 2, "num_key_value_heads": 4}),
    "cohere2_all_local": ("cohere2", {"tie_word_embeddings": False}),
    "cohere2_all_global": ("cohere2", {"layer_types": ALL_GLOBAL, "num_key_value_heads": 1}),
    "cohere2_biases": ("cohere2", {"attention_bias": True, "layer_types": MIXED}),
}
FIELDS = [
    ("cohere", {"layer_norm_eps": 1e-5}),
    ("cohere", {"logit_scale": 0.9}),
    ("cohere", {"hidden_act": "gelu"}),
    ("cohere", rope("default")),
    ("cohere_qk_norm", {"layer_norm_eps": 1e-5}),
    ("cohere2", {"layer_norm_eps": 1e-5}),
    ("cohere2", {"logit_scale": 0.9}),
    ("cohere2", {"hidden_act": "gelu"}),
    ("cohere2", rope("default")),
    ("cohere2", {"sliding_window": 5}),
    ("cohere2", {"layer_types": MIXED[::-1]}),
    ("cohere2_pattern", {"sliding_window_pattern": 3}),
]
