"""Qwen3."""

from families.qwen2 import QWEN2, windowed

SIZES = {"qwen3": QWEN2}
VARIANTS, FIELDS = windowed("qwen3")
VARIANTS |= {"qwen3_attention_bias": ("qwen3", {"attention_bias": True})}
