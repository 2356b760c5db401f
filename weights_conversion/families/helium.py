"""Helium: Llama that turns adjacent channels; no bias on the output of attention."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformer_lens_lite.config import HookedTransformerConfig
from weights_conversion.families import glm, llama
from weights_conversion.fields import Reading
from weights_conversion.parts import out_projection
from weights_conversion.table import Row, override


def read_config(reading: Reading) -> dict[str, Any]:
    fields = llama.read_config(reading, n_kv=20, d_head=128, n_ctx=4096, theta=1e5)
    if fields["n_heads"] * fields["d_head"] != fields["d_model"]:
        raise ValueError(
            f"{reading.where}: num_attention_heads * head_dim = "
            f"{fields['n_heads'] * fields['d_head']} must be hidden_size={fields['d_model']}"
        )
    eps = reading.number("rms_norm_eps", 1e-8)
    return {**fields, "eps": eps, "rotary_adjacent_pairs": True}


def write_config(cfg: HookedTransformerConfig, needs: Callable[[str], bool]) -> dict[str, Any]:
    bias = any(needs(name) for name in glm.BIASES)
    return {**llama.write_config(cfg, needs), "attention_bias": bias}


def rows(cfg: HookedTransformerConfig, reading: Reading) -> list[Row]:
    return override(llama.rows(cfg, reading), *out_projection(f"{llama.ATTN}o_proj", bias=False))


HELIUM = replace(
    llama.LLAMA,
    model_type="helium",
    hf_class="HeliumForCausalLM",
    read_config=read_config,
    write_config=write_config,
    rows=rows,
)
ARCHITECTURES = (HELIUM,)
