"""Nemotron: Llama with LayerNorms of weight 1 + w and a plain MLP of squared ReLUs."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformer_lens_lite.config import HookedTransformerConfig
from weights_conversion.families import llama
from weights_conversion.fields import Reading, because, write_partial
from weights_conversion.parts import layer_norm, mlp
from weights_conversion.table import Row, override, without

BLOCK, MLP = llama.BLOCK, llama.MLP


def read_config(reading: Reading) -> dict[str, Any]:
    return {
        **llama.read_config(reading, partial=0.5, n_ctx=4096),
        "act_fn": reading.activation("hidden_act", "relu2"),
        "eps": reading.number("norm_eps", 1e-5),
        "normalization_type": "LN",
        "norm_weight_offset": 1.0,
        "gated_mlp": False,
        "gated_mlp_biases": False,
    }


def write_config(cfg: HookedTransformerConfig, needs: Callable[[str], bool]) -> dict[str, Any]:
    written = llama.write_config(cfg, needs)
    return {
        **{k: v for k, v in written.items() if k != "rms_norm_eps"},
        "norm_eps": cfg.eps,
        "mlp_bias": needs("blocks.{i}.mlp.b_in") or needs("blocks.{i}.mlp.b_out"),
        "partial_rotary_factor": write_partial(cfg),
    }


def rows(cfg: HookedTransformerConfig, reading: Reading) -> list[Row]:
    return override(
        without(llama.rows(cfg, reading), "blocks.{i}.mlp.W_gate"),
        *layer_norm(f"{BLOCK}input_layernorm", "blocks.{i}.ln1"),
        *layer_norm(f"{BLOCK}post_attention_layernorm", "blocks.{i}.ln2"),
        *mlp(f"{MLP}up_proj", f"{MLP}down_proj", bias=reading.flag("mlp_bias", False)),
        *layer_norm("model.norm", "ln_final"),
    )


NEMOTRON = replace(
    llama.LLAMA,
    model_type="nemotron",
    hf_class="NemotronForCausalLM",
    read_config=read_config,
    write_config=write_config,
    rows=rows,
    cosmetic=because(
        "Hugging Face's class does not look at it", "kv_channels num_query_groups rope_percent"
    ),
)
ARCHITECTURES = (NEMOTRON,)
