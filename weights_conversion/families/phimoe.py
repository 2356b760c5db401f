"""Phi-3.5-MoE: LayerNorms, and a router (SparseMixer) that weighs each of two experts by itself."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformer_lens_lite.config import HookedTransformerConfig
from weights_conversion.experts import experts, router, with_experts
from weights_conversion.families import llama, mistral
from weights_conversion.families.llama import BLOCK
from weights_conversion.families.mixtral import MOE, TRAINING_ONLY
from weights_conversion.fields import Reading, windows
from weights_conversion.table import Map, Row, optional, override


def read_config(reading: Reading) -> dict[str, Any]:
    reading.require("mlp_bias", False, "experts of this family have no biases")
    of_scaling = ("rope_parameters", "rope_scaling")
    long_factor = None
    for name in of_scaling:
        if scaled := reading.mapping(name):
            reading.config[name], long_factor = with_factor(scaled, reading.where)
    # Past the original length Hugging Face keeps the factors for short texts, against what was
    # trained: up to there both agree.
    lengths = [reading.mapping(n).get("original_max_position_embeddings") for n in of_scaling]
    fields = llama.read_config(reading, theta=1000000.0, n_kv=8, n_ctx=mistral.N_CTX)
    window = reading.size("sliding_window", None)
    if long_factor is not None:
        fields["rotary_scaling"]["long_attention_factor"] = long_factor
    return {
        **fields,
        **windows(["local"] * fields["n_layers"], window),
        "n_ctx": next((n for n in lengths if n), fields["n_ctx"]),
        "normalization_type": "LN",
        "eps": reading.number("rms_norm_eps", 1e-5),
        "num_experts": reading.size("num_local_experts", 16),
        "experts_per_token": reading.size("num_experts_per_tok", 2),
        "router_type": "sparsemixer",
        "router_jitter": reading.number("router_jitter_noise", 0.01),
    }


def with_factor(scaled: dict[str, Any], where: str) -> tuple[dict[str, Any], float | None]:
    """Rotary parameters in which what cosines and sines are multiplied by is `attention_factor`,
    and the number for long texts where it is another."""
    own = Reading(scaled, f"{where}: rope parameters")
    short, long = own.number("short_mscale", None), own.number("long_mscale", None)
    if (short is None) != (long is None):
        raise ValueError(f"{own.where}: short_mscale={short} and long_mscale={long} go together")
    left = {name: value for name, value in scaled.items() if name not in own.was_read}
    if short is None or left.get("rope_type", left.get("type")) in (None, "default"):
        return left, None
    return {**left, "attention_factor": short}, None if long == short else long


def write_config(cfg: HookedTransformerConfig, needs: Callable[[str], bool]) -> dict[str, Any]:
    written = {k: v for k, v in llama.write_config(cfg, needs).items() if k != "mlp_bias"}
    if written["rope_scaling"] is not None:
        short = cfg.rotary_spec("global").scaling.attention_factor
        scaling = dict(written["rope_scaling"])
        scaling.pop("attention_factor", None)
        long = scaling.pop("long_attention_factor", short)
        written["rope_scaling"] = {**scaling, "short_mscale": short, "long_mscale": long}
    return {
        **written,
        "sliding_window": cfg.window_size,
        "num_local_experts": cfg.num_experts,
        "num_experts_per_tok": cfg.experts_per_token,
        "router_jitter_noise": cfg.router_jitter,
        "lm_head_bias": needs("unembed.b_U"),
    }


def rows(cfg: HookedTransformerConfig, reading: Reading) -> list[Row]:
    with_biases = override(
        llama.rows(cfg, reading),
        Map(f"{BLOCK}input_layernorm.bias", "blocks.{i}.ln1.b", "m"),
        Map(f"{BLOCK}post_attention_layernorm.bias", "blocks.{i}.ln2.b", "m"),
        Map("model.norm.bias", "ln_final.b", "m"),
        optional(reading.flag("lm_head_bias", False), Map("lm_head.bias", "unembed.b_U", "u")),
    )
    return with_experts(
        with_biases,
        [True],
        router(f"{MOE}gate.weight"),
        *experts(f"{MOE}experts", "w1", "w3", "w2"),
    )


PHIMOE = replace(
    llama.LLAMA,
    model_type="phimoe",
    hf_class="PhimoeForCausalLM",
    remote_stem="phimoe",
    read_config=read_config,
    write_config=write_config,
    rows=rows,
    aliases={"num_experts": "num_local_experts"},
    cosmetic={
        **TRAINING_ONLY,
        "input_jitter_noise": "only matters for training: noise on the router's input",
    },
)
ARCHITECTURES = (PHIMOE,)
