"""GPT-OSS."""

from families.llama import LLAMA, YARN, rope

SIZES = {
    "gpt_oss": {
        **LLAMA,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": 9,
        "swiglu_limit": 0.8,
        **rope("yarn", factor=4.0, truncate=False, **YARN),
    }
}
GLOBAL = ["full_attention"] * 3
VARIANTS = {
    "gpt_oss": ("gpt_oss", {}),
    "gpt_oss_no_bias": ("gpt_oss", {"attention_bias": False, "tie_word_embeddings": True}),
    "gpt_oss_alpha": ("gpt_oss", {"swiglu_alpha": 1.1}),
    "gpt_oss_global": ("gpt_oss", {"layer_types": GLOBAL, **rope("default")}),
}
FIELDS = [
    ("gpt_oss", {"num_experts_per_tok": 3}),
    ("gpt_oss", {"sliding_window": 5}),
    ("gpt_oss", {"swiglu_limit": 0.5}),
    ("gpt_oss", {"swiglu_alpha": 0.6}),
    ("gpt_oss", {"layer_types": GLOBAL}),
    ("gpt_oss", {"rms_norm_eps": 1e-5}),
    ("gpt_oss", rope("yarn", factor=2.0, truncate=False, **YARN)),
]
