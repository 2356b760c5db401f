"""Persimmon: Phi in sequence, with heads fused one by one and norms on queries and keys."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformer_lens_lite.config import HookedTransformerConfig
from weights_conversion.families import phi
from weights_conversion.fields import Reading
from weights_conversion.parts import ends, layer_norm, mlp, out_projection, qkv
from weights_conversion.table import Map, Row

BLOCK, ATTN = phi.BLOCK, phi.ATTN


def read_config(reading: Reading) -> dict[str, Any]:
    act, qk_norm = reading.activation("hidden_act", "relu2"), reading.flag("qk_layernorm", True)
    norms = {"use_qk_norm": True, "qk_norm_type": "LN"} if qk_norm else {}
    fields = phi.read_config(reading, n_ctx=16384)
    reading.require("num_key_value_heads", fields["n_heads"], "each head has its own keys")
    return {**fields, **norms, "act_fn": act, "parallel_attn_mlp": False}


def write_config(cfg: HookedTransformerConfig, needs: Callable[[str], bool]) -> dict[str, Any]:
    written = phi.write_config(cfg, needs)
    return {name: value for name, value in written.items() if name != "num_key_value_heads"}


def rows(cfg: HookedTransformerConfig, reading: Reading) -> list[Row]:
    return [
        *ends(cfg, "model.embed_tokens"),
        *layer_norm(f"{BLOCK}input_layernorm", "blocks.{i}.ln1"),
        Map(f"{ATTN}query_key_value.weight", qkv(cfg, "W"), "(n s h) m -> s n m h"),
        Map(f"{ATTN}query_key_value.bias", qkv(cfg, "b"), "(n s h) -> s n h"),
        *phi.qk_norms(cfg),
        *out_projection(f"{ATTN}dense", bias=True),
        *layer_norm(f"{BLOCK}post_attention_layernorm", "blocks.{i}.ln2"),
        *mlp(f"{BLOCK}mlp.dense_h_to_4h", f"{BLOCK}mlp.dense_4h_to_h"),
        *layer_norm("model.final_layernorm", "ln_final"),
    ]


PERSIMMON = replace(
    phi.PHI,
    model_type="persimmon",
    hf_class="PersimmonForCausalLM",
    read_config=read_config,
    write_config=write_config,
    rows=rows,
    cosmetic={"rms_norm_eps": "there is no RMSNorm"},
)
ARCHITECTURES = (PERSIMMON,)
