"""Mistral: Llama whose queries see a window of positions; Ministral: in some layers only."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformer_lens_lite.config import HookedTransformerConfig
from weights_conversion.families import llama
from weights_conversion.fields import Reading, attn_types, windows, write_windows

N_CTX = 4096 * 32


def read_config(reading: Reading) -> dict[str, Any]:
    fields = llama.read_config(reading, n_kv=8, n_ctx=N_CTX)
    window = reading.size("sliding_window", reading.if_missing("sliding_window", 4096))
    return {**fields, **windows(["local"] * fields["n_layers"], window)}


def write_config(cfg: HookedTransformerConfig, needs: Callable[[str], bool]) -> dict[str, Any]:
    return {**llama.write_without_biases(cfg, needs), "sliding_window": cfg.window_size}


def read_ministral_config(reading: Reading) -> dict[str, Any]:
    fields = llama.read_config(reading, n_kv=8, n_ctx=N_CTX)
    n_layers = fields["n_layers"]
    window = reading.size("sliding_window", reading.if_missing("sliding_window", 4096))
    return {**fields, **windows(attn_types(reading, n_layers, [True] * n_layers), window)}


def write_ministral_config(
    cfg: HookedTransformerConfig, needs: Callable[[str], bool]
) -> dict[str, Any]:
    return {**llama.write_without_biases(cfg, needs), **write_windows(cfg)}


MISTRAL = replace(
    llama.LLAMA,
    model_type="mistral",
    hf_class="MistralForCausalLM",
    read_config=read_config,
    write_config=write_config,
    rows=llama.rows_without_biases,
)
MINISTRAL = replace(
    MISTRAL,
    model_type="ministral",
    hf_class="MinistralForCausalLM",
    read_config=read_ministral_config,
    write_config=write_ministral_config,
)
ARCHITECTURES = (MISTRAL, MINISTRAL)
