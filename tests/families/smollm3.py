"""SmolLM3."""

from families.llama import LLAMA, rope

NONE = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
SIZES = {"smollm3": {**LLAMA, "num_key_value_heads": 2, "no_rope_layer_interval": 2, **NONE}}
WINDOW = {"use_sliding_window": True, "sliding_window": 9}
MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
VARIANTS = {
    "smollm3": ("smollm3", {}),
    "smollm3_list": ("smollm3", {"no_rope_layers": [0, 1, 1], "tie_word_embeddings": False}),
    "smollm3_all_turn": ("smollm3", {"no_rope_layers": [1, 1, 1], "num_key_value_heads": 1}),
    "smollm3_none_turn": ("smollm3", {"no_rope_layers": [0, 0, 0], "num_key_value_heads": 4}),
    "smollm3_window": ("smollm3", WINDOW),
    "smollm3_mixed_windows": ("smollm3", {**WINDOW, **MIXED}),
    "smollm3_biases": ("smollm3", {"attention_bias": True, "mlp_bias": True, "head_dim": 6}),
    "smollm3_yarn": ("smollm3", rope("yarn", factor=4.0, original_max_position_embeddings=16)),
}
FIELDS = [
    ("smollm3", {"rms_norm_eps": 1e-5}),
    ("smollm3", {"hidden_act": "gelu"}),
    ("smollm3", {"no_rope_layer_interval": 3}),
    ("smollm3", {"no_rope_layers": [0, 1, 1]}),
    ("smollm3", rope("default")),
    ("smollm3", WINDOW),
    ("smollm3_window", {"sliding_window": 5}),
    ("smollm3_window", MIXED),
]
