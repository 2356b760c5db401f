"""Llama: rotary positions, RMSNorm, grouped queries, a gated MLP. The parent of most families."""

from collections.abc import Callable
from typing import Any

from transformer_lens_lite.config import HookedTransformerConfig
from weights_conversion.fields import Reading, rope, write_activation, write_rope
from weights_conversion.table import Architecture, Map, Row, Tied, Zeros, key_value, optional

BLOCK = "model.layers.{i}."
ATTN = f"{BLOCK}self_attn."
MLP = f"{BLOCK}mlp."


def read_config(
    reading: Reading,
    *,
    theta: float = 10000.0,
    partial: float | None = None,
    n_kv: int | None = None,
    d_head: int | None = None,
    n_ctx: int = 2048,
) -> dict[str, Any]:
    """The keywords are what a descendant's class in Hugging Face holds by itself."""
    fields = read_all_but_positions(reading, n_kv=n_kv, d_head=d_head, n_ctx=n_ctx)
    reading.require("rope_interleaved", False, "Hugging Face's Llama turns (i, i + d/2) together")
    return {**fields, **rope(reading, fields["d_head"], fields["n_ctx"], theta, partial)}


def read_all_but_positions(
    reading: Reading, *, n_kv: int | None = None, d_head: int | None = None, n_ctx: int = 2048
) -> dict[str, Any]:
    d_model, n_heads = reading.size("hidden_size"), reading.size("num_attention_heads")
    kv_heads = reading.if_missing("num_key_value_heads", n_kv) or n_heads
    kv_heads = reading.size("num_key_value_heads", kv_heads)
    width = reading.if_missing("head_dim", d_head) or max(1, d_model // n_heads)
    return {
        "n_layers": reading.size("num_hidden_layers"),
        "d_model": d_model,
        "n_heads": n_heads,
        "n_key_value_heads": None if kv_heads == n_heads else kv_heads,
        "d_head": reading.size("head_dim", width),
        "d_mlp": reading.size("intermediate_size"),
        "d_vocab": reading.size("vocab_size"),
        "n_ctx": reading.size("max_position_embeddings", n_ctx),
        "act_fn": reading.activation("hidden_act", "silu"),
        "eps": reading.number("rms_norm_eps", 1e-6),
        "normalization_type": "RMS",
        "gated_mlp": True,
        "gated_mlp_biases": reading.flag("mlp_bias", False),
        "tie_word_embeddings": reading.flag("tie_word_embeddings", False),
    }


def write_config(cfg: HookedTransformerConfig, needs: Callable[[str], bool]) -> dict[str, Any]:
    return {**write_all_but_positions(cfg, needs), **write_rope(cfg)}


def write_all_but_positions(
    cfg: HookedTransformerConfig, needs: Callable[[str], bool]
) -> dict[str, Any]:
    attn = "blocks.{i}.attn."
    biases = (f"{attn}b_Q", key_value(cfg, "b_K"), key_value(cfg, "b_V"), f"{attn}b_O")
    return {
        "num_hidden_layers": cfg.n_layers,
        "hidden_size": cfg.d_model,
        "num_attention_heads": cfg.n_heads,
        "num_key_value_heads": cfg.n_key_value_heads or cfg.n_heads,
        "head_dim": cfg.d_head,
        "intermediate_size": cfg.d_mlp,
        "vocab_size": cfg.d_vocab,
        "hidden_act": write_activation(cfg),
        "rms_norm_eps": cfg.eps,
        "attention_bias": any(needs(name) for name in biases),
        "mlp_bias": cfg.gated_mlp_biases,
        "tie_word_embeddings": cfg.tie_word_embeddings,
    }


def write_without_biases(
    cfg: HookedTransformerConfig, needs: Callable[[str], bool]
) -> dict[str, Any]:
    """For descendants that have no biases, or no choice: without the fields for them."""
    written = write_config(cfg, needs)
    return {k: v for k, v in written.items() if k not in ("attention_bias", "mlp_bias")}


def rows_without_biases(cfg: HookedTransformerConfig, reading: Reading) -> list[Row]:
    """For the same descendants."""
    for name in ("attention_bias", "mlp_bias"):
        reading.require(name, False, "this family does not choose its biases")
    return rows(cfg, reading)


def rows(cfg: HookedTransformerConfig, reading: Reading) -> list[Row]:
    attn, mlp = "blocks.{i}.attn.", "blocks.{i}.mlp."
    attention_bias, mlp_bias = reading.flag("attention_bias", False), cfg.gated_mlp_biases
    return [
        Map("model.embed_tokens.weight", "embed.W_E", "v m"),
        Map(f"{BLOCK}input_layernorm.weight", "blocks.{i}.ln1.w", "m"),
        Map(f"{ATTN}q_proj.weight", f"{attn}W_Q", "(n h) m -> n m h"),
        Map(f"{ATTN}k_proj.weight", key_value(cfg, "W_K"), "(k h) m -> k m h"),
        Map(f"{ATTN}v_proj.weight", key_value(cfg, "W_V"), "(k h) m -> k m h"),
        Map(f"{ATTN}o_proj.weight", f"{attn}W_O", "m (n h) -> n h m"),
        optional(attention_bias, Map(f"{ATTN}q_proj.bias", f"{attn}b_Q", "(n h) -> n h")),
        optional(attention_bias, Map(f"{ATTN}k_proj.bias", key_value(cfg, "b_K"), "(k h) -> k h")),
        optional(attention_bias, Map(f"{ATTN}v_proj.bias", key_value(cfg, "b_V"), "(k h) -> k h")),
        optional(attention_bias, Map(f"{ATTN}o_proj.bias", f"{attn}b_O", "m")),
        Map(f"{BLOCK}post_attention_layernorm.weight", "blocks.{i}.ln2.w", "m"),
        Map(f"{MLP}gate_proj.weight", f"{mlp}W_gate", "f m -> m f"),
        Map(f"{MLP}up_proj.weight", f"{mlp}W_in", "f m -> m f"),
        Map(f"{MLP}down_proj.weight", f"{mlp}W_out", "m f -> f m"),
        *mlp_biases(mlp_bias),
        Map("model.norm.weight", "ln_final.w", "m"),
        *head(cfg),
    ]


def mlp_biases(present: bool) -> list[Row]:
    """b_in is added after the gate, where no checkpoint has anything; up_proj's bias is b_up."""
    mlp = "blocks.{i}.mlp."
    inner: list[Row] = [
        Map(f"{MLP}gate_proj.bias", f"{mlp}b_gate", "f"),
        Map(f"{MLP}up_proj.bias", f"{mlp}b_up", "f"),
    ]
    return [
        *(inner if present else []),
        optional(present, Map(f"{MLP}down_proj.bias", f"{mlp}b_out", "m")),
        Zeros(f"{mlp}b_in", "f"),
    ]


def head(cfg: HookedTransformerConfig) -> list[Row]:
    tied = Tied("lm_head.weight", "model.embed_tokens.weight", "unembed.W_U")
    own = Map("lm_head.weight", "unembed.W_U", "u m -> m u")
    return [tied if cfg.tie_word_embeddings else own, Zeros("unembed.b_U", "u")]


LLAMA = Architecture(
    model_type="llama",
    hf_class="LlamaForCausalLM",
    read_config=read_config,
    write_config=write_config,
    rows=rows,
    ignore={f"{ATTN}rotary_emb.inv_freq": "follows from the config; older transformers saved it"},
    optional_prefix="model.",
)
ARCHITECTURES = (LLAMA,)
