"""ERNIE 4.5."""

from families.llama import LLAMA, rope

SIZES = {"ernie4_5": {**LLAMA, "num_key_value_heads": 2, "pad_token_id": None}}
VARIANTS = {
    "ernie4_5": ("ernie4_5", {}),
    "ernie4_5_untied_mha": (
        "ernie4_5",
        {"tie_word_embeddings": False, "num_key_value_heads": 4, "head_dim": None},
    ),
    "ernie4_5_biases": ("ernie4_5", {"use_bias": True}),
    "ernie4_5_mqa_gelu": ("ernie4_5", {"num_key_value_heads": 1, "hidden_act": "gelu"}),
    "ernie4_5_linear": ("ernie4_5", rope("linear", factor=2.5)),
}
FIELDS = [
    ("ernie4_5", {"rms_norm_eps": 1e-6}),
    ("ernie4_5", {"hidden_act": "gelu"}),
    ("ernie4_5", rope("default")),
]
