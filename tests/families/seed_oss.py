"""Seed-OSS."""

from families.llama import LLAMA, rope

SIZES = {"seed_oss": {**LLAMA, "num_key_value_heads": 2}}
VARIANTS = {
    "seed_oss": ("seed_oss", {}),
    "seed_oss_without_biases": ("seed_oss", {"attention_bias": False, "num_key_value_heads": 4}),
    "seed_oss_all_biases": ("seed_oss", {"attention_out_bias": True, "mlp_bias": True}),
    "seed_oss_out_bias": ("seed_oss", {"attention_out_bias": True, "attention_bias": False}),
    "seed_oss_mqa_tied": ("seed_oss", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "seed_oss_gelu": ("seed_oss", {"hidden_act": "gelu", "head_dim": None}),
}
FIELDS = [
    ("seed_oss", {"rms_norm_eps": 1e-5}),
    ("seed_oss", {"hidden_act": "gelu"}),
    ("seed_oss", rope("default")),
]
