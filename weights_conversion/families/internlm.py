"""InternLM, three generations: Llamas with biases in places of their own.

The first two came with code of their own, and transformers has no class of them; 3 it runs as a
Llama. InternLM 2 keeps the queries of a group beside the key and value they share.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformer_lens_lite.config import HookedTransformerConfig
from weights_conversion.families import llama
from weights_conversion.families.llama import ATTN, BLOCK
from weights_conversion.fields import Reading
from weights_conversion.parts import ends, grouped_qkv, out_projection, projections, qkv
from weights_conversion.table import Architecture, Map, Row, Zeros, override

B_O = "blocks.{i}.attn.b_O"


def without_mlp_biases(reading: Reading, own: dict[str, Any], **defaults: Any) -> dict[str, Any]:
    """Our config of one whose MLPs have no biases; `own`: what it says in Llama's words."""
    words = Reading({**reading.config, **own}, reading.where)
    words.require("mlp_bias", False, "MLPs of this family have no biases")
    fields = llama.read_config(words, **defaults)
    reading.was_read |= words.was_read
    return fields


def write_with_bias(cfg: HookedTransformerConfig, needs: Callable[[str], bool]) -> dict[str, Any]:
    """The config of a Llama whose attention has biases everywhere or nowhere."""
    if cfg.gated_mlp_biases:
        raise ValueError("gated_mlp_biases=True: MLPs of this family have no biases")
    written = llama.write_without_biases(cfg, needs)
    return {**written, "bias": any(needs(name) for name in (*qkv(cfg, "b"), B_O))}


# --- InternLM -------------------------------------------------------------------------------------


def read_config(reading: Reading) -> dict[str, Any]:
    rotary = reading.mapping("rotary")  # the first files have none
    kind, factor = rotary.pop("type", "origin"), rotary.pop("scaling_factor", 1.0)
    base = rotary.pop("base", 10000.0)
    if kind not in ("origin", "dynamic") or rotary:
        raise ValueError(
            f"{reading.where}: rotary may hold base, type ('origin' or 'dynamic') and "
            f"scaling_factor, got {reading.config['rotary']!r}"
        )
    scaling = {"type": "dynamic", "factor": factor} if kind == "dynamic" else None
    return without_mlp_biases(reading, {"rope_theta": base, "rope_scaling": scaling})


def write_config(cfg: HookedTransformerConfig, needs: Callable[[str], bool]) -> dict[str, Any]:
    written = write_with_bias(cfg, needs)
    if cfg.n_key_value_heads is not None:
        raise ValueError(f"n_key_value_heads={cfg.n_key_value_heads}: heads share nothing here")
    del written["num_key_value_heads"]
    scaling = written.pop("rope_scaling") or {"rope_type": "origin"}
    if scaling["rope_type"] not in ("origin", "dynamic"):
        raise ValueError(f"rotary_scaling={scaling!r}: rope may be 'dynamic' or plain")
    rotary = {"type": scaling["rope_type"], "base": written.pop("rope_theta")}
    if "factor" in scaling:
        rotary["scaling_factor"] = scaling["factor"]
    return {**written, "rotary": rotary}


def rows(cfg: HookedTransformerConfig, reading: Reading) -> list[Row]:
    bias = reading.flag("bias", True)
    return override(
        llama.rows_without_biases(cfg, reading),
        *projections(cfg, ATTN, bias),
        *out_projection(f"{ATTN}o_proj", bias),
    )


INTERNLM = replace(
    llama.LLAMA,
    model_type="internlm",
    hf_class="InternLMForCausalLM",
    read_config=read_config,
    write_config=write_config,
    rows=rows,
    in_transformers=False,
)


# --- InternLM 2 -----------------------------------------------------------------------------------


def read_config_2(reading: Reading) -> dict[str, Any]:
    return without_mlp_biases(reading, {})


def rows_2(cfg: HookedTransformerConfig, reading: Reading) -> list[Row]:
    bias = reading.flag("bias", True)
    fused, mlp = f"{BLOCK}attention.wqkv", "blocks.{i}.mlp."
    shapes = ("n h", "k h", "k h")
    no_biases = [Zeros(name, shape) for name, shape in zip(qkv(cfg, "b"), shapes, strict=True)]
    return [
        *ends(cfg, "model.tok_embeddings", "output"),
        Map(f"{BLOCK}attention_norm.weight", "blocks.{i}.ln1.w", "m"),
        grouped_qkv(cfg, fused, "W"),
        *([grouped_qkv(cfg, fused, "b")] if bias else no_biases),
        *out_projection(f"{BLOCK}attention.wo", bias),
        Map(f"{BLOCK}ffn_norm.weight", "blocks.{i}.ln2.w", "m"),
        Map(f"{BLOCK}feed_forward.w1.weight", f"{mlp}W_gate", "f m -> m f"),
        Map(f"{BLOCK}feed_forward.w3.weight", f"{mlp}W_in", "f m -> m f"),
        Map(f"{BLOCK}feed_forward.w2.weight", f"{mlp}W_out", "m f -> f m"),
        Zeros(f"{mlp}b_in", "f"),
        Zeros(f"{mlp}b_out", "m"),
        Map("model.norm.weight", "ln_final.w", "m"),
    ]


INTERNLM2 = Architecture(
    model_type="internlm2",
    hf_class="InternLM2ForCausalLM",
    read_config=read_config_2,
    write_config=write_with_bias,
    rows=rows_2,
    optional_prefix="model.",
    in_transformers=False,
)


# --- InternLM 3: `qkv_bias` for queries, keys and values, `bias` for everything else --------------


def read_config_3(reading: Reading) -> dict[str, Any]:
    fields = llama.read_config(reading, n_kv=2, d_head=128, n_ctx=32768)
    return {**fields, "eps": reading.number("rms_norm_eps", 1e-5)}


def write_config_3(cfg: HookedTransformerConfig, needs: Callable[[str], bool]) -> dict[str, Any]:
    return {
        **llama.write_without_biases(cfg, needs),
        "qkv_bias": any(needs(name) for name in qkv(cfg, "b")),
        "bias": cfg.gated_mlp_biases or needs(B_O),
    }


def rows_3(cfg: HookedTransformerConfig, reading: Reading) -> list[Row]:
    bias = reading.flag("mlp_bias", False)
    return override(llama.rows(cfg, reading), *out_projection(f"{ATTN}o_proj", bias))


INTERNLM3 = replace(
    llama.LLAMA,
    model_type="internlm3",
    hf_class="InternLM3ForCausalLM",
    remote_stem="internlm3",
    read_config=read_config_3,
    write_config=write_config_3,
    rows=rows_3,
    aliases={"qkv_bias": "attention_bias", "bias": "mlp_bias"},
)
ARCHITECTURES = (INTERNLM, INTERNLM2, INTERNLM3)
