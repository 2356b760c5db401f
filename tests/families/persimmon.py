"""Persimmon."""

from families.gpt_neox import rope
from families.phi import SIZES as PHI

SIZES = {"persimmon": PHI["phi"]}
VARIANTS = {
    "persimmon": ("persimmon", {}),
    "persimmon_tied": ("persimmon", {"tie_word_embeddings": True}),
    "persimmon_no_qk_norm": ("persimmon", {"qk_layernorm": False, "hidden_act": "gelu"}),
    "persimmon_linear": ("persimmon", rope("linear", factor=2.5, partial_rotary_factor=1.0)),
}
FIELDS = [
    ("persimmon", {"layer_norm_eps": 1e-5}),
    ("persimmon", {"hidden_act": "relu"}),
    ("persimmon_no_qk_norm", {"num_attention_heads": 2}),
    ("persimmon", {"partial_rotary_factor": 0.25}),
    ("persimmon", rope("default", partial_rotary_factor=0.5)),
]
