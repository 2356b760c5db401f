"""StarCoder2."""

from families.llama import rope

SIZES = {"starcoder2": {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 38,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "norm_epsilon": 1e-3,
    "bos_token_id": None,
    "eos_token_id": None,
}}  # fmt: skip
VARIANTS = {
    "starcoder2": ("starcoder2", {}),
    "starcoder2_untied": ("starcoder2", {"tie_word_embeddings": False}),
    "starcoder2_no_bias": ("starcoder2", {"use_bias": False, "num_key_value_heads": 4}),
    "starcoder2_window": ("starcoder2", {"sliding_window": 7, "num_key_value_heads": 1}),
    "starcoder2_gelu": ("starcoder2", {"hidden_act": "gelu", "head_dim": None}),
    "starcoder2_linear": ("starcoder2", rope("linear", factor=2.5)),
}
FIELDS = [
    ("starcoder2", {"norm_epsilon": 1e-5}),
    ("starcoder2", {"hidden_act": "relu"}),
    ("starcoder2", {"sliding_window": 7}),
    ("starcoder2", {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}),
    ("starcoder2", rope("default")),
]
