"""Qwen2-MoE and Qwen3-MoE."""

from families.llama import LLAMA

MOE = {
    "num_key_value_heads": 2,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 14,
}
QWEN2 = {**LLAMA, **MOE, "shared_expert_intermediate_size": 22}
del QWEN2["head_dim"]
SIZES = {"qwen2_moe": QWEN2, "qwen3_moe": {**LLAMA, **MOE}}
WINDOW = {"use_sliding_window": True, "sliding_window": 9}
VARIANTS = {
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen2_moe_no_bias": ("qwen2_moe", {"qkv_bias": False, "norm_topk_prob": True}),
    "qwen2_moe_some_dense": ("qwen2_moe", {"mlp_only_layers": [1], "tie_word_embeddings": True}),
    "qwen2_moe_every_second": ("qwen2_moe", {"decoder_sparse_step": 2}),
    "qwen2_moe_window": ("qwen2_moe", {**WINDOW, "max_window_layers": 2}),
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3_moe_plain": ("qwen3_moe", {"attention_bias": True, "head_dim": 6}),
    "qwen3_moe_some_dense": ("qwen3_moe", {"mlp_only_layers": [0], "tie_word_embeddings": True}),
    "qwen3_moe_window": ("qwen3_moe", {**WINDOW, "decoder_sparse_step": 2}),
}
FIELDS = [
    ("qwen2_moe", {"num_experts_per_tok": 3}),
    ("qwen2_moe", {"norm_topk_prob": True}),
    ("qwen2_moe", {"rms_norm_eps": 1e-5}),
    ("qwen2_moe", {"hidden_act": "relu"}),
    ("qwen2_moe_window", {"max_window_layers": 3}),
    ("qwen2_moe_window", {"sliding_window": 5}),
    ("qwen3_moe", {"num_experts_per_tok": 3}),
    ("qwen3_moe", {"norm_topk_prob": False}),
    ("qwen3_moe", WINDOW),
    ("qwen3_moe_window", {"sliding_window": 5}),
]
