"""OLMoE."""

from families.llama import LLAMA

OLMOE = {
    **LLAMA,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "pad_token_id": None,
    "eos_token_id": None,
}
del OLMOE["head_dim"]
SIZES = {"olmoe": OLMOE}
VARIANTS = {
    "olmoe": ("olmoe", {}),
    "olmoe_clipped": ("olmoe", {"clip_qkv": 0.6, "num_key_value_heads": 2}),
    "olmoe_biases": ("olmoe", {"attention_bias": True, "norm_topk_prob": True}),
    "olmoe_tied": ("olmoe", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
}
FIELDS = [
    ("olmoe", {"num_experts_per_tok": 3}),
    ("olmoe", {"norm_topk_prob": True}),
    ("olmoe", {"clip_qkv": 0.6}),
    ("olmoe_clipped", {"clip_qkv": 0.4}),
    ("olmoe", {"rms_norm_eps": 1e-5}),
]
