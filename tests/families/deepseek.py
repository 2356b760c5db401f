"""DeepSeek-V2 and V3."""

from families.llama import LLAMA, rope

COMMON = {
    **LLAMA,
    "first_k_dense_replace": 1,
    "q_lora_rank": 9,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 7,
    "n_group": 3,
    "topk_group": 1,
}
del COMMON["head_dim"]
SIZES = {"deepseek_v2": COMMON, "deepseek_v3": COMMON}
GROUPS = {"topk_method": "group_limited_greedy"}
ORIGINAL = {"original_max_position_embeddings": 16}
YARN = rope("yarn", factor=4.0, mscale=0.7, mscale_all_dim=0.9, **ORIGINAL)
VARIANTS = {
    "deepseek_v2": ("deepseek_v2", GROUPS),
    "deepseek_v2_greedy": ("deepseek_v2", {"q_lora_rank": None, "first_k_dense_replace": 0}),
    "deepseek_v2_yarn": ("deepseek_v2", {**YARN, "attention_bias": True}),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3_halves": (
        "deepseek_v3",
        {"rope_interleave": False, "norm_topk_prob": False, "n_group": 1},  # as Moonlight's
    ),
    "deepseek_v3_yarn": ("deepseek_v3", {**YARN, "q_lora_rank": None}),
    "deepseek_v3_biases": ("deepseek_v3", {"attention_bias": True, "tie_word_embeddings": True}),
}
FIELDS = [
    ("deepseek_v2", {"topk_method": "greedy"}),
    ("deepseek_v2", {"routed_scaling_factor": 2.0}),
    ("deepseek_v2_greedy", {"num_experts_per_tok": 3}),
    ("deepseek_v2", {"topk_group": 2}),
    ("deepseek_v2_yarn", rope("yarn", factor=4.0, mscale=0.7, mscale_all_dim=0.3, **ORIGINAL)),
    ("deepseek_v3", {"rope_interleave": False}),
    ("deepseek_v3", {"norm_topk_prob": False}),
    ("deepseek_v3", {"routed_scaling_factor": 1.0}),
    ("deepseek_v3", {"topk_group": 2}),
    ("deepseek_v3", {"rms_norm_eps": 1e-5}),
]
