"""GPT-NeoX, of which Pythia is made."""

from typing import Any

SIZES = {"gpt_neox": {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 38,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "max_position_embeddings": 64,
    "layer_norm_eps": 1e-3,
    "rotary_pct": 0.5,
}}  # fmt: skip


def rope(rope_type: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 50.0, "rope_type": rope_type, **values}}


YARN = rope("yarn", factor=4.0, partial_rotary_factor=0.75, original_max_position_embeddings=16)
VARIANTS = {
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox_tied": ("gpt_neox", {"tie_word_embeddings": True, "num_attention_heads": 1}),
    "gpt_neox_sequential": ("gpt_neox", {"use_parallel_residual": False}),
    "gpt_neox_no_bias": ("gpt_neox", {"attention_bias": False}),
    "gpt_neox_gelu_fast": ("gpt_neox", {"hidden_act": "gelu_fast", "rotary_emb_base": 50}),
    "gpt_neox_linear": ("gpt_neox", rope("linear", factor=2.5, partial_rotary_factor=1.0)),
    "gpt_neox_yarn": ("gpt_neox", YARN),
}
FIELDS = [
    ("gpt_neox", {"layer_norm_eps": 1e-5}),
    ("gpt_neox", {"hidden_act": "relu"}),
    ("gpt_neox", {"use_parallel_residual": False}),
    ("gpt_neox", {"num_attention_heads": 2}),
    ("gpt_neox", {"rotary_pct": 0.25}),
    ("gpt_neox", {"rotary_emb_base": 50}),
    ("gpt_neox", rope("linear", factor=2.5)),
]
