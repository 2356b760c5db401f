"""OLMo: LayerNorm without weights, clipped projections. OLMo 2 and 3: RMSNorms behind sublayers.

OLMo 2 norms all queries together, and all keys; OLMo 3 adds windows, and by layer type rotations.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformer_lens_lite.config import HookedTransformerConfig
from weights_conversion.families import llama
from weights_conversion.families.llama import BLOCK
from weights_conversion.families.qwen3 import qk_norms
from weights_conversion.fields import (
    Reading,
    attn_types,
    rope,
    rope_by_layer_type,
    windows,
    write_rope,
    write_rope_by_layer_type,
    write_windows,
)
from weights_conversion.table import Map, Row, override, without

Needs = Callable[[str], bool]
NORMS = ("blocks.{i}.ln1.w", "blocks.{i}.ln2.w")


def read_config(reading: Reading) -> dict[str, Any]:
    reading.require("mlp_bias", False, "MLPs of this family have no biases")
    return {
        **llama.read_config(reading),
        "normalization_type": "LNPre",
        "eps": 1e-5,
        "clip_qkv": reading.number("clip_qkv", None),
    }


def write_common(cfg: HookedTransformerConfig, needs: Needs) -> dict[str, Any]:
    written = llama.write_all_but_positions(cfg, needs)
    return {name: value for name, value in written.items() if name != "mlp_bias"}


def write_config(cfg: HookedTransformerConfig, needs: Needs) -> dict[str, Any]:
    written = {**write_common(cfg, needs), **write_rope(cfg), "clip_qkv": cfg.clip_qkv}
    return {name: value for name, value in written.items() if name != "rms_norm_eps"}


def rows(cfg: HookedTransformerConfig, reading: Reading) -> list[Row]:
    return without(llama.rows(cfg, reading), *NORMS, "ln_final.w")


def read_common_2(reading: Reading) -> dict[str, Any]:
    reading.require("mlp_bias", False, "MLPs of this family have no biases")
    return {
        **llama.read_all_but_positions(reading),
        "eps": reading.number("rms_norm_eps", 1e-5),
        "norm_place": "post",
        "use_qk_norm": True,
        "qk_norm_over": "all_heads",
    }


def read_config_2(reading: Reading) -> dict[str, Any]:
    fields = read_common_2(reading)
    return {**fields, **rope(reading, fields["d_head"], fields["n_ctx"])}


def write_config_2(cfg: HookedTransformerConfig, needs: Needs) -> dict[str, Any]:
    return {**write_common(cfg, needs), **write_rope(cfg)}


def post_norms() -> list[Row]:
    """The norms behind attention and MLP, where there are none before them."""
    return [
        Map(f"{BLOCK}post_attention_layernorm.weight", NORMS[0], "m"),
        Map(f"{BLOCK}post_feedforward_layernorm.weight", NORMS[1], "m"),
    ]


def rows_2(cfg: HookedTransformerConfig, reading: Reading) -> list[Row]:
    return [*override(llama.rows(cfg, reading), *post_norms()), *qk_norms(pattern="(n h)")]


def read_config_3(reading: Reading) -> dict[str, Any]:
    fields = read_common_2(reading)
    n_layers = fields["n_layers"]
    types = attn_types(reading, n_layers, [(i + 1) % 4 != 0 for i in range(n_layers)])
    window = reading.size("sliding_window", reading.if_missing("sliding_window", 4096))
    fields |= windows(types, window)
    return {**fields, **rope_by_layer_type(reading, fields, theta=5e5, local_theta=5e5)}


def write_config_3(cfg: HookedTransformerConfig, needs: Needs) -> dict[str, Any]:
    return {**write_common(cfg, needs), **write_windows(cfg), **write_rope_by_layer_type(cfg)}


OLMO = replace(
    llama.LLAMA,
    model_type="olmo",
    hf_class="OlmoForCausalLM",
    read_config=read_config,
    write_config=write_config,
    rows=rows,
)
OLMO2 = replace(
    OLMO,
    model_type="olmo2",
    hf_class="Olmo2ForCausalLM",
    read_config=read_config_2,
    write_config=write_config_2,
    rows=rows_2,
)
OLMO3 = replace(
    OLMO2,
    model_type="olmo3",
    hf_class="Olmo3ForCausalLM",
    read_config=read_config_3,
    write_config=write_config_3,
)
ARCHITECTURES = (OLMO, OLMO2, OLMO3)
