"""HunYuan (dense)."""

from families.llama import LLAMA, rope

SIZES = {"hunyuan_v1_dense": {**LLAMA, "num_key_value_heads": 2}}
ALPHA = {"factor": 1.0, "alpha": 50.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
         "mscale_all_dim": 1.0}  # fmt: skip
VARIANTS = {
    "hunyuan": ("hunyuan_v1_dense", {}),
    "hunyuan_tied_mha": (
        "hunyuan_v1_dense",
        {"tie_word_embeddings": True, "num_key_value_heads": 4},
    ),
    "hunyuan_biases": ("hunyuan_v1_dense", {"attention_bias": True, "head_dim": 6}),
    "hunyuan_mqa_gelu": ("hunyuan_v1_dense", {"num_key_value_heads": 1, "hidden_act": "gelu"}),
    "hunyuan_alpha": ("hunyuan_v1_dense", rope("dynamic", **ALPHA)),
    "hunyuan_linear": ("hunyuan_v1_dense", rope("linear", factor=2.5)),
}
FIELDS = [
    ("hunyuan", {"rms_norm_eps": 1e-6}),
    ("hunyuan", {"hidden_act": "gelu"}),
    ("hunyuan", rope("default")),
    ("hunyuan_alpha", rope("dynamic", **{**ALPHA, "alpha": 5.0})),
    ("hunyuan_alpha", rope("default")),
]
