"""GPT-BigCode."""

from families.gpt2 import SIZES as GPT2

SIZES = {"gpt_bigcode": {**GPT2["gpt2"], "n_positions": 64}}
VARIANTS = {
    "gpt_bigcode": ("gpt_bigcode", {}),
    "gpt_bigcode_untied": ("gpt_bigcode", {"tie_word_embeddings": False, "n_inner": None}),
    "gpt_bigcode_multi_head": ("gpt_bigcode", {"multi_query": False}),
    "gpt_bigcode_unscaled": ("gpt_bigcode", {"scale_attn_weights": False}),
    "gpt_bigcode_gelu": ("gpt_bigcode", {"activation_function": "gelu"}),
}
FIELDS = [
    ("gpt_bigcode", {"layer_norm_epsilon": 1e-5}),
    ("gpt_bigcode", {"activation_function": "relu"}),
    ("gpt_bigcode", {"scale_attn_weights": False}),
    ("gpt_bigcode_multi_head", {"n_head": 4}),
]
