"""Gemma, Gemma 2 and Gemma 3."""

from typing import Any

from families.llama import LLAMA, LLAMA3, ORIGINAL, rope

IDS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
GEMMA = {**LLAMA, "num_key_value_heads": 2, **IDS}
LATER = {**GEMMA, "query_pre_attn_scalar": 11, "sliding_window": 9}
SIZES = {
    "gemma": GEMMA,
    "gemma2": {**LATER, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 4.0},
    "gemma3_text": LATER,
}
ALL_LOCAL, ALL_GLOBAL = ["sliding_attention"] * 3, ["full_attention"] * 3
MIXED = ["full_attention", "full_attention", "sliding_attention"]
NO_CAPS = {"attn_logit_softcapping": None, "final_logit_softcapping": None}


def ropes(full: dict[str, Any], sliding: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters per layer type, with thetas low enough to show in short texts."""
    full = {"rope_theta": 500.0, "rope_type": "default", **full}
    sliding = {"rope_theta": 20.0, "rope_type": "default", **sliding}
    return {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}


LINEAR = {"rope_type": "linear", "factor": 2.5}
VARIANTS = {
    "gemma": ("gemma", {}),
    "gemma_mqa": ("gemma", {"num_key_value_heads": 1, "head_dim": 10}),
    "gemma_biases": ("gemma", {"attention_bias": True, "num_key_value_heads": 4}),
    "gemma_untied": ("gemma", {"tie_word_embeddings": False}),
    "gemma_legacy_gelu": ("gemma", {"hidden_act": "gelu"}),
    "gemma_silu": ("gemma", {"hidden_act": "silu"}),
    "gemma2": ("gemma2", {}),
    "gemma2_without_caps": ("gemma2", NO_CAPS),
    "gemma2_attention_cap": ("gemma2", {**NO_CAPS, "attn_logit_softcapping": 1.5}),
    "gemma2_final_cap": ("gemma2", {**NO_CAPS, "final_logit_softcapping": 4.0}),
    "gemma2_all_local": ("gemma2", {"layer_types": ALL_LOCAL, "num_key_value_heads": 4}),
    "gemma2_all_global": ("gemma2", {"layer_types": ALL_GLOBAL, "head_dim": 10}),
    "gemma2_untied_silu": ("gemma2", {"tie_word_embeddings": False, "hidden_activation": "silu"}),
    "gemma2_biases": ("gemma2", {"attention_bias": True}),
    "gemma2_exact_gelu": ("gemma2", {"hidden_activation": "gelu"}),
    "gemma3": ("gemma3_text", {"layer_types": MIXED}),
    "gemma3_pattern": ("gemma3_text", {"sliding_window_pattern": 2, "head_dim": 10}),
    "gemma3_linear": ("gemma3_text", {"layer_types": MIXED, **ropes(LINEAR, {})}),
    "gemma3_both_linear": ("gemma3_text", {"layer_types": MIXED, **ropes(LINEAR, LINEAR)}),
    "gemma3_llama3": (
        "gemma3_text",
        {"layer_types": MIXED, **ropes({"rope_type": "llama3", **LLAMA3, **ORIGINAL}, {})},
    ),
    "gemma3_all_local": ("gemma3_text", {"num_key_value_heads": 4, **ropes({}, {})}),
    "gemma3_all_global": ("gemma3_text", {"layer_types": ALL_GLOBAL, **ropes({}, {})}),
    "gemma3_untied_cap": (
        "gemma3_text",
        {"tie_word_embeddings": False, "final_logit_softcapping": 4.0, "layer_types": MIXED},
    ),
    "gemma3_biases": ("gemma3_text", {"attention_bias": True, "layer_types": MIXED}),
}
FIELDS = [
    ("gemma", {"rms_norm_eps": 1e-5}),
    ("gemma", {"hidden_act": "silu"}),
    ("gemma", rope("default")),
    ("gemma2", {"rms_norm_eps": 1e-5}),
    ("gemma2", {"hidden_activation": "gelu"}),
    ("gemma2", rope("default")),
    ("gemma2", {"query_pre_attn_scalar": 8}),
    ("gemma2", {"attn_logit_softcapping": 3.0}),
    ("gemma2", {"attn_logit_softcapping": None}),
    ("gemma2", {"final_logit_softcapping": 5.0}),
    ("gemma2", {"final_logit_softcapping": None}),
    ("gemma2", {"sliding_window": 5}),
    ("gemma2", {"layer_types": MIXED}),
    ("gemma3", {"rms_norm_eps": 1e-5}),
    ("gemma3", {"hidden_activation": "gelu"}),
    ("gemma3", {"query_pre_attn_scalar": 8}),
    ("gemma3", {"final_logit_softcapping": 5.0}),
    ("gemma3", {"sliding_window": 5}),
    ("gemma3", {"layer_types": MIXED[::-1]}),
    ("gemma3_pattern", {"sliding_window_pattern": 3}),
    ("gemma3_linear", ropes({**LINEAR, "factor": 3.0}, {})),
    ("gemma3_linear", ropes(LINEAR, {"rope_theta": 50.0})),
    ("gemma3_linear", ropes({**LINEAR, "rope_theta": 50.0}, {})),
    ("gemma3_both_linear", ropes(LINEAR, {})),
]
