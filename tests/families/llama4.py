"""Llama 4, its text model."""

from families.llama import LLAMA, rope

SIZES = {
    "llama4_text": {
        **LLAMA,
        "num_key_value_heads": 2,
        "intermediate_size": 14,
        "intermediate_size_mlp": 22,
        "num_local_experts": 5,
        "attention_chunk_size": 9,
        "no_rope_layer_interval": 2,
        "floor_scale": 5,
        "attn_scale": 0.7,
    }
}
FULL = {"attention_chunk_size": None, "no_rope_layers": [1, 1, 1]}
VARIANTS = {
    "llama4": ("llama4_text", {}),
    "llama4_every_second": ("llama4_text", {"interleave_moe_layer_step": 2, "head_dim": 6}),
    "llama4_two_choices": ("llama4_text", {"num_experts_per_tok": 2, "tie_word_embeddings": True}),
    "llama4_plain": ("llama4_text", {"use_qk_norm": False, "attn_temperature_tuning": False}),
    "llama4_full": ("llama4_text", {**FULL, "attention_bias": True}),
    "llama4_yarn": (
        "llama4_text",
        {**FULL, **rope("yarn", factor=4.0, original_max_position_embeddings=16)},
    ),
    "llama4_dense": ("llama4_text", {"moe_layers": []}),
}
FIELDS = [
    ("llama4", {"num_experts_per_tok": 2}),
    ("llama4", {"attention_chunk_size": 5}),
    ("llama4", {"floor_scale": 7}),
    ("llama4", {"attn_scale": 0.4}),
    ("llama4", {"attn_temperature_tuning": False}),
    ("llama4", {"use_qk_norm": False}),
    ("llama4", {"no_rope_layers": [1, 1, 0]}),
    ("llama4", {"rms_norm_eps": 1e-5}),
    ("llama4", rope("default")),
]
