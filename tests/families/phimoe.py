"""Phi-3.5-MoE."""

from families.llama import LLAMA, LONG, rope

PHIMOE = {**LLAMA, "num_key_value_heads": 2, "num_local_experts": 5, "router_jitter_noise": 0.2}
SIZES = {"phimoe": PHIMOE}
ORIGINAL = {"original_max_position_embeddings": 64}
SCALES = {"short_mscale": 1.3, "long_mscale": 0.7}
MSCALE = {"short_mscale": 1.3, "long_mscale": 1.3}
VARIANTS = {
    "phimoe": ("phimoe", {}),
    "phimoe_biases": ("phimoe", {"attention_bias": True, "lm_head_bias": True}),
    "phimoe_longrope": (
        "phimoe",
        {**rope("longrope", **LONG, **ORIGINAL, **MSCALE), "max_position_embeddings": 128},
    ),
    "phimoe_longrope_two_scales": (
        "phimoe",
        {**rope("longrope", **LONG, **ORIGINAL, **SCALES), "max_position_embeddings": 128},
    ),
    "phimoe_window": ("phimoe", {"sliding_window": 9, "tie_word_embeddings": True}),
}
FIELDS = [
    ("phimoe", {"router_jitter_noise": 0.02}),
    ("phimoe", {"sliding_window": 9}),
    (
        "phimoe_longrope",
        rope("longrope", **LONG, **ORIGINAL, short_mscale=0.8, long_mscale=0.8),
    ),
    (
        "phimoe_longrope_two_scales",
        rope("longrope", **LONG, **ORIGINAL, short_mscale=0.8, long_mscale=0.7),
    ),
    ("phimoe", {"rms_norm_eps": 1e-5}),
    ("phimoe", {"hidden_act": "relu"}),
]
