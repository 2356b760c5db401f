"""Phi-3: Llama with fused matrices; part of each head turns (Phi-4-mini), far by LongRoPE."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformer_lens_lite.config import HookedTransformerConfig
from weights_conversion.families import llama
from weights_conversion.families.llama import ATTN, MLP
from weights_conversion.fields import Reading, because, windows, write_partial
from weights_conversion.parts import qkv
from weights_conversion.table import Map, Row, override

LEGACY = ("su", "yarn")  # what LongRoPE was called at first


def read_config(reading: Reading) -> dict[str, Any]:
    config = {"original_max_position_embeddings": 4096, **reading.config}
    for name in ("rope_scaling", "rope_parameters"):
        config[name] = in_todays_words(reading.mapping(name))
    own = Reading(config, reading.where)
    fields = llama.read_config(own, n_ctx=4096, partial=1.0)
    reading.was_read |= own.was_read
    scaling = fields["rotary_scaling"]
    if scaling is not None and scaling["rope_type"] != "longrope":
        raise ValueError(f"{reading.where}: rope type {scaling['rope_type']!r} is none of Phi-3's")
    window = reading.size("sliding_window", None)
    return {
        **fields,
        "eps": reading.number("rms_norm_eps", 1e-5),
        **windows(["local"] * fields["n_layers"], window),
    }


def in_todays_words(scaling: dict[str, Any]) -> dict[str, Any]:
    kind = scaling.pop("type", None)
    kind = scaling.get("rope_type", kind)
    if kind is None:
        return scaling
    return {**scaling, "rope_type": "longrope" if kind in LEGACY else kind}


def write_config(cfg: HookedTransformerConfig, needs: Callable[[str], bool]) -> dict[str, Any]:
    written = llama.write_without_biases(cfg, needs)
    scaling = written["rope_scaling"]
    # Hugging Face reads the original length beside the dict, and only there
    original = (scaling or {}).pop("original_max_position_embeddings", cfg.n_ctx)
    return {
        **written,
        "original_max_position_embeddings": original,
        "partial_rotary_factor": write_partial(cfg),
        "sliding_window": cfg.window_size,
    }


def fused_mlp() -> list[Row]:
    """Gate and up projection in one matrix, the gate first."""
    both = ("blocks.{i}.mlp.W_gate", "blocks.{i}.mlp.W_in")
    return [Map(f"{MLP}gate_up_proj.weight", both, "(s f) m -> s m f")]


def rows(cfg: HookedTransformerConfig, reading: Reading) -> list[Row]:
    fused = Map(f"{ATTN}qkv_proj.weight", qkv(cfg, "W"), "(a h) m -> a m h", cut=("n", "k", "k"))
    return override(llama.rows_without_biases(cfg, reading), fused, *fused_mlp())


PHI3 = replace(
    llama.LLAMA,
    model_type="phi3",
    hf_class="Phi3ForCausalLM",
    remote_stem="phi3",
    read_config=read_config,
    write_config=write_config,
    rows=rows,
    cosmetic=because(
        "is in Phi-4-mini's file, and Hugging Face's class does not look at it",
        "full_attn_mod interpolate_factor",
    ),
)
ARCHITECTURES = (PHI3,)
