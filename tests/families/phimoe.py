"""Phi-3.5-MoE."""

from families.llama import LLAMA

PHIMOE = {**LLAMA, "num_key_value_heads": 2, "num_local_experts": 5, "router_jitter_noise": 0.2}
SIZES = {"phimoe": PHIMOE}
VARIANTS = {
    "phimoe": ("phimoe", {}),
    "phimoe_biases": ("phimoe", {"attention_bias": True, "lm_head_bias": True}),
    "phimoe_window": ("phimoe", {"sliding_window": 9, "tie_word_embeddings": True}),
}
FIELDS = [
    ("phimoe", {"router_jitter_noise": 0.02}),
    ("phimoe", {"sliding_window": 9}),
    ("phimoe", {"rms_norm_eps": 1e-5}),
    ("phimoe", {"hidden_act": "relu"}),
]
