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
    for name in ("rope_parameters", "rope_scaling"):
        if scaled := reading.mapping(name):
            reading.config[name] = with_one_factor(scaled, reading.where)
    # Past the original length Hugging Face keeps the factors for short texts, against what was
    # trained: up to there both agree.
    of_scaling = ("rope_parameters", "rope_scaling")
    lengths = [reading.mapping(n).get("original_max_position_embeddings") for n in of_scaling]
    fields = llama.read_config(reading, theta=1000000.0, n_kv=8, n_ctx=mistral.N_CTX)
    window = reading.size("sliding_window", None)
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


def with_one_factor(scaled: dict[str, Any], where: str) -> dict[str, Any]:
    """Rotary parameters in which what cosines and sines are multiplied by is `attention_factor`.

    phimoe has one number for short texts and one for long ones; in the checkpoints they are equal.
    """
    short, long = scaled.pop("short_mscale", None), scaled.pop("long_mscale", None)
    if short != long:
        raise ValueError(
            f"{where}: rope parameters: short_mscale={short} and long_mscale={long} differ, which "
            "is not supported"
        )
    return scaled if short is None else {**scaled, "attention_factor": short}


def write_config(cfg: HookedTransformerConfig, needs: Callable[[str], bool]) -> dict[str, Any]:
    written = {k: v for k, v in llama.write_config(cfg, needs).items() if k != "mlp_bias"}
    if written["rope_scaling"] is not None:
        factor = cfg.rotary_spec("global").scaling.attention_factor
        scaling = {k: v for k, v in written["rope_scaling"].items() if k != "attention_factor"}
        written["rope_scaling"] = {**scaling, "short_mscale": factor, "long_mscale": factor}
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
