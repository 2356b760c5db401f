"""Seed-OSS: Llama that chooses the bias on the output of attention by itself."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformer_lens_lite.config import HookedTransformerConfig
from weights_conversion.families import glm, llama
from weights_conversion.fields import Reading
from weights_conversion.parts import ATTN, out_projection, projections
from weights_conversion.table import Row, override


def read_config(reading: Reading) -> dict[str, Any]:
    return llama.read_config(reading, n_kv=8, d_head=128, n_ctx=524288)


def write_config(cfg: HookedTransformerConfig, needs: Callable[[str], bool]) -> dict[str, Any]:
    return {
        **llama.write_config(cfg, needs),
        "attention_bias": any(needs(name) for name in glm.BIASES),
        "attention_out_bias": needs(f"{ATTN}b_O"),
    }


def rows(cfg: HookedTransformerConfig, reading: Reading) -> list[Row]:
    out_bias = reading.flag("attention_out_bias", False)
    return override(
        llama.rows(cfg, reading),
        *projections(cfg, llama.ATTN, bias=reading.flag("attention_bias", True)),
        *out_projection(f"{llama.ATTN}o_proj", out_bias),
    )


SEED_OSS = replace(
    llama.LLAMA,
    model_type="seed_oss",
    hf_class="SeedOssForCausalLM",
    read_config=read_config,
    write_config=write_config,
    rows=rows,
    cosmetic={"residual_dropout": "only matters for training"},
)
ARCHITECTURES = (SEED_OSS,)
