"""GLM: half of each head turns, on adjacent channels; the MLP's matrices are fused.

GLM-4 has a second norm behind each sublayer.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformer_lens_lite.config import HookedTransformerConfig
from weights_conversion.families import llama
from weights_conversion.families.llama import BLOCK
from weights_conversion.families.phi3 import fused_mlp
from weights_conversion.fields import Reading, write_partial
from weights_conversion.parts import ATTN, out_projection, projections
from weights_conversion.table import Map, Row, override

Needs = Callable[[str], bool]
BIASES = tuple(f"{ATTN}{name}" for name in ("b_Q", "b_K", "b_V", "_b_K", "_b_V"))


def read_config(reading: Reading) -> dict[str, Any]:
    reading.require("mlp_bias", False, "MLPs of this family have no biases")
    return {
        **llama.read_config(reading, n_kv=2, d_head=128, n_ctx=131072, partial=0.5),
        "eps": reading.number("rms_norm_eps", 0.00000015625),
        "rotary_adjacent_pairs": True,
    }


def write_config(cfg: HookedTransformerConfig, needs: Needs) -> dict[str, Any]:
    return {
        **llama.write_without_biases(cfg, needs),
        "attention_bias": any(needs(name) for name in BIASES),
        "partial_rotary_factor": write_partial(cfg),
    }


def rows(cfg: HookedTransformerConfig, reading: Reading) -> list[Row]:
    return override(
        llama.rows(cfg, reading),
        *projections(cfg, llama.ATTN, bias=reading.flag("attention_bias", True)),
        *out_projection(f"{llama.ATTN}o_proj", bias=False),
        *fused_mlp(),
    )


def read_config_4(reading: Reading) -> dict[str, Any]:
    return {**read_config(reading), "norm_place": "both"}


def rows_4(cfg: HookedTransformerConfig, reading: Reading) -> list[Row]:
    return [
        *rows(cfg, reading),
        Map(f"{BLOCK}post_self_attn_layernorm.weight", "blocks.{i}.ln1_post.w", "m"),
        Map(f"{BLOCK}post_mlp_layernorm.weight", "blocks.{i}.ln2_post.w", "m"),
    ]


GLM = replace(
    llama.LLAMA,
    model_type="glm",
    hf_class="GlmForCausalLM",
    read_config=read_config,
    write_config=write_config,
    rows=rows,
)
GLM4 = replace(
    GLM, model_type="glm4", hf_class="Glm4ForCausalLM", read_config=read_config_4, rows=rows_4
)
ARCHITECTURES = (GLM, GLM4)
