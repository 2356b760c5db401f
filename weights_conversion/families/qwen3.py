"""Qwen3: Qwen2 with a norm on the queries and keys of each head, and biases only if asked for."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformer_lens_lite.config import HookedTransformerConfig
from weights_conversion.families import llama, qwen2
from weights_conversion.families.llama import ATTN
from weights_conversion.fields import Reading
from weights_conversion.table import Map, Row


def read_config(reading: Reading) -> dict[str, Any]:
    reading.require("mlp_bias", False, "MLPs of this family have no biases")
    return {**qwen2.read_config(reading, d_head=128), "use_qk_norm": True}


def write_config(cfg: HookedTransformerConfig, needs: Callable[[str], bool]) -> dict[str, Any]:
    with_biases = llama.write_config(cfg, needs)
    return {**qwen2.write_config(cfg, needs), "attention_bias": with_biases["attention_bias"]}


def qk_norms(q_norm: str = "q_norm", k_norm: str = "k_norm", pattern: str = "h") -> list[Row]:
    return [
        Map(f"{ATTN}{q_norm}.weight", "blocks.{i}.attn.q_norm.w", pattern),
        Map(f"{ATTN}{k_norm}.weight", "blocks.{i}.attn.k_norm.w", pattern.replace("n", "k")),
    ]


def rows(cfg: HookedTransformerConfig, reading: Reading) -> list[Row]:
    return [*llama.rows(cfg, reading), *qk_norms()]


QWEN3 = replace(
    qwen2.QWEN2,
    model_type="qwen3",
    hf_class="Qwen3ForCausalLM",
    read_config=read_config,
    write_config=write_config,
    rows=rows,
)
ARCHITECTURES = (QWEN3,)
