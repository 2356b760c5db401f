"""Qwen2: biases on queries, keys and values alone; windows in the upper layers if asked for."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformer_lens_lite.config import HookedTransformerConfig
from weights_conversion.families import llama
from weights_conversion.families.llama import ATTN
from weights_conversion.fields import Reading, attn_types, windows, write_windows
from weights_conversion.table import Map, Row, key_value, override


def read_config(reading: Reading, d_head: int | None = None) -> dict[str, Any]:
    fields = llama.read_config(reading, n_kv=32, n_ctx=32768, d_head=d_head)
    n_layers = fields["n_layers"]
    window = reading.size("sliding_window", reading.if_missing("sliding_window", 4096))
    first = reading.raw("max_window_layers", 28)  # may be 0
    if not reading.flag("use_sliding_window", False):
        window = None
    types = attn_types(reading, n_layers, [i >= first for i in range(n_layers)])
    return {**fields, **windows(types, window)}


def write_config(cfg: HookedTransformerConfig, needs: Callable[[str], bool]) -> dict[str, Any]:
    written = llama.write_without_biases(cfg, needs)
    return {**written, **write_windows(cfg), "use_sliding_window": cfg.use_local_attn}


def rows(cfg: HookedTransformerConfig, reading: Reading) -> list[Row]:
    return override(
        llama.rows_without_biases(cfg, reading),
        Map(f"{ATTN}q_proj.bias", "blocks.{i}.attn.b_Q", "(n h) -> n h"),
        Map(f"{ATTN}k_proj.bias", key_value(cfg, "b_K"), "(k h) -> k h"),
        Map(f"{ATTN}v_proj.bias", key_value(cfg, "b_V"), "(k h) -> k h"),
    )


QWEN2 = replace(
    llama.LLAMA,
    model_type="qwen2",
    hf_class="Qwen2ForCausalLM",
    read_config=read_config,
    write_config=write_config,
    rows=rows,
)
ARCHITECTURES = (QWEN2,)
