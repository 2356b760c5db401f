"""StableLM: Llama with LayerNorm; part of each head turns; perhaps a norm for every head."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformer_lens_lite.config import HookedTransformerConfig
from weights_conversion.families import llama
from weights_conversion.fields import Reading, write_partial
from weights_conversion.parts import layer_norm, projections, qkv, shared_norm
from weights_conversion.table import Map, Row, Zeros, override

BLOCK, ATTN = llama.BLOCK, llama.ATTN
QK_NORM = {"use_qk_norm": True, "qk_norm_type": "LN", "qk_norm_over": "each_head"}


def read_config(reading: Reading) -> dict[str, Any]:
    fields = llama.read_config(reading, partial=0.25, n_kv=32, n_ctx=4096)
    width = fields["d_model"] // fields["n_heads"]
    reading.require("head_dim", width, "it is hidden_size / num_attention_heads")
    reading.require("rotary_scaling_factor", 1.0, "Hugging Face's class does not look at it")
    return {
        **fields,
        "eps": reading.number("layer_norm_eps", 1e-5),
        "normalization_type": "LN",
        "parallel_attn_mlp": reading.flag("use_parallel_residual", False),
        **(QK_NORM if reading.flag("qk_layernorm", False) else {}),
    }


def write_config(cfg: HookedTransformerConfig, needs: Callable[[str], bool]) -> dict[str, Any]:
    written = llama.write_without_biases(cfg, needs)
    return {
        **{k: v for k, v in written.items() if k not in ("rms_norm_eps", "head_dim")},
        "layer_norm_eps": cfg.eps,
        "use_parallel_residual": cfg.parallel_attn_mlp,
        "qk_layernorm": cfg.use_qk_norm,
        "use_qkv_bias": any(needs(name) for name in qkv(cfg, "b")),
        "partial_rotary_factor": write_partial(cfg),
    }


def rows(cfg: HookedTransformerConfig, reading: Reading) -> list[Row]:
    norms = [
        *layer_norm(f"{BLOCK}input_layernorm", "blocks.{i}.ln1"),
        *layer_norm(f"{BLOCK}post_attention_layernorm", "blocks.{i}.ln2"),
    ]
    one_norm = shared_norm(f"{BLOCK}input_layernorm")
    return override(
        llama.rows_without_biases(cfg, reading),
        *(one_norm if cfg.parallel_attn_mlp else norms),
        *projections(cfg, ATTN, bias=reading.flag("use_qkv_bias", False)),
        *(qk_norms() if cfg.use_qk_norm else []),
        *layer_norm("model.norm", "ln_final"),
    )


def qk_norms() -> list[Row]:
    """The weights of each head are a tensor of their own; there are no biases."""
    norm = "blocks.{i}.attn."
    return [
        Map(f"{ATTN}q_layernorm.norms.{{n}}.weight", f"{norm}q_norm.w", "n h"),
        Map(f"{ATTN}k_layernorm.norms.{{k}}.weight", f"{norm}k_norm.w", "k h"),
        Zeros(f"{norm}q_norm.b", "n h"),
        Zeros(f"{norm}k_norm.b", "k h"),
    ]


STABLELM = replace(
    llama.LLAMA,
    model_type="stablelm",
    hf_class="StableLmForCausalLM",
    read_config=read_config,
    write_config=write_config,
    rows=rows,
)
ARCHITECTURES = (STABLELM,)
