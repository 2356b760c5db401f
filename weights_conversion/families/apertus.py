"""Apertus: a plain MLP with xIELU, whose slopes are trained; norms on queries and keys."""

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any

from transformer_lens_lite.config import HookedTransformerConfig
from weights_conversion.families import llama
from weights_conversion.families.arcee import plain_mlp, plain_rows
from weights_conversion.families.llama import BLOCK, MLP
from weights_conversion.families.qwen3 import qk_norms
from weights_conversion.fields import Reading, because
from weights_conversion.table import Map, Row, override

# the scaling of the first checkpoints, which Hugging Face's class holds by itself
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 12000000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def read_config(reading: Reading) -> dict[str, Any]:
    reading.require("mlp_bias", False, "MLPs of this family have no biases")
    config = {name: value for name, value in reading.config.items() if value is not None}
    theirs = config.pop("hidden_act", "xielu")
    own = Reading({"rope_parameters": LLAMA3, **config}, reading.where)
    fields = llama.read_config(own, n_ctx=65536, theta=12e6)
    reading.was_read |= own.was_read
    act_fn = "xielu" if theirs == "xielu" else reading.activation("hidden_act", "xielu")
    eps = reading.number("rms_norm_eps", 1e-5)
    return {**plain_mlp(fields, act_fn), "eps": eps, "use_qk_norm": True}


def write_config(cfg: HookedTransformerConfig, needs: Callable[[str], bool]) -> dict[str, Any]:
    act_fn = cfg.act_fn
    if act_fn == "xielu":  # which only this family can write
        cfg = copy(cfg)
        cfg.act_fn = "silu"
    written = llama.write_config(cfg, needs)
    return {
        **{name: value for name, value in written.items() if name != "mlp_bias"},
        "hidden_act": act_fn,
        # without one Hugging Face's class takes the first checkpoints'
        "rope_scaling": written["rope_scaling"] or {"rope_type": "default"},
    }


def xielu() -> list[Row]:
    ours = "blocks.{i}.mlp.act_fn."
    return [
        *(Map(f"{MLP}act_fn.{name}", f"{ours}{name}", "1") for name in ("alpha_p", "alpha_n")),
        *(Map(f"{MLP}act_fn.{name}", f"{ours}{name}", "-> 1") for name in ("beta", "eps")),
    ]


def rows(cfg: HookedTransformerConfig, reading: Reading) -> list[Row]:
    return [
        *override(
            plain_rows(cfg, reading, bias=False),
            Map(f"{BLOCK}attention_layernorm.weight", "blocks.{i}.ln1.w", "m"),
            Map(f"{BLOCK}feedforward_layernorm.weight", "blocks.{i}.ln2.w", "m"),
        ),
        *qk_norms(),
        *(xielu() if cfg.act_fn == "xielu" else []),
    ]


APERTUS = replace(
    llama.LLAMA,
    model_type="apertus",
    hf_class="ApertusForCausalLM",
    read_config=read_config,
    write_config=write_config,
    rows=rows,
    cosmetic=because(
        "is in the first files, and Hugging Face's class does not look at it", "qk_norm post_norm"
    ),
)
ARCHITECTURES = (APERTUS,)
