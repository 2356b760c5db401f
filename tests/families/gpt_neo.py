"""GPT-Neo."""

SIZES = {"gpt_neo": {
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "hidden_size": 24,
    "num_layers": 3,
    "num_heads": 3,
    "intermediate_size": 52,
    "attention_types": [[["global", "local"], 1], [["local"], 1]],
    "window_size": 7,
    "layer_norm_epsilon": 1e-3,
}}  # fmt: skip
GLOBAL = {"attention_types": [[["global"], 3]]}
VARIANTS = {
    "gpt_neo": ("gpt_neo", {}),
    "gpt_neo_untied": ("gpt_neo", {"tie_word_embeddings": False, "intermediate_size": None}),
    "gpt_neo_global": ("gpt_neo", GLOBAL),
    "gpt_neo_silu": ("gpt_neo", {"activation_function": "silu", "window_size": 2}),
}
FIELDS = [
    ("gpt_neo", {"layer_norm_epsilon": 1e-5}),
    ("gpt_neo", {"activation_function": "relu"}),
    ("gpt_neo", {"window_size": 9}),
    ("gpt_neo", {"num_heads": 4}),
    ("gpt_neo", GLOBAL),
    ("gpt_neo", {"attention_types": [[["local"], 1], [["global"], 2]]}),
]
