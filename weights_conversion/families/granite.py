"""Granite: Llama with four multipliers: of embeddings, scores, residual additions and logits."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformer_lens_lite.config import HookedTransformerConfig
from weights_conversion.families import llama
from weights_conversion.fields import Reading, reciprocal, score_divisor


def read_config(reading: Reading) -> dict[str, Any]:
    return {
        **llama.read_config(reading),
        "embed_scale": reading.number("embedding_multiplier", 1.0),
        "residual_scale": reading.number("residual_multiplier", 1.0),
        "attn_scale": 1 / positive(reading, "attention_multiplier"),
        "logit_scale": 1 / positive(reading, "logits_scaling"),
    }


def positive(reading: Reading, name: str) -> float:
    value = reading.number(name, 1.0)
    if not value > 0:
        raise ValueError(f"{reading.where}: {name} must be a positive number, got {value!r}")
    return float(value)


def write_config(cfg: HookedTransformerConfig, needs: Callable[[str], bool]) -> dict[str, Any]:
    return {
        **llama.write_config(cfg, needs),
        "embedding_multiplier": cfg.embed_scale,
        "residual_multiplier": cfg.residual_scale,
        "attention_multiplier": reciprocal(score_divisor(cfg)),
        "logits_scaling": reciprocal(cfg.logit_scale),
    }


GRANITE = replace(
    llama.LLAMA,
    model_type="granite",
    hf_class="GraniteForCausalLM",
    read_config=read_config,
    write_config=write_config,
)
ARCHITECTURES = (GRANITE,)
