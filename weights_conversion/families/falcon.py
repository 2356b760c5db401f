"""Falcon: queries of a group beside the key and value they share; MLP beside or after attention."""

from collections.abc import Callable
from typing import Any

from transformer_lens_lite.config import HookedTransformerConfig
from weights_conversion.fields import Reading, rope, write_activation, write_rope
from weights_conversion.parts import (
    ATTN,
    MLP,
    ends,
    grouped_qkv,
    head_size,
    layer_norm,
    mlp,
    out_projection,
    qkv,
    shared_norm,
)
from weights_conversion.table import Architecture, Map, Row, Zeros

BLOCK = "transformer.h.{i}."


def grouped(reading: Reading) -> bool:
    """Falcon-40B and later: several keys and values, and always parallel."""
    return reading.flag("new_decoder_architecture", False)


def norms(reading: Reading, parallel: bool) -> int:
    """How many a block has."""
    given = reading.size("num_ln_in_parallel_attn", 2 if grouped(reading) else 1)
    if given > (2 if grouped(reading) else 1) and parallel:
        raise ValueError(
            f"{reading.where}: num_ln_in_parallel_attn={given} with new_decoder_architecture="
            f"{grouped(reading)} is not supported: Hugging Face's class fails on it"
        )
    return given if parallel else 2


def read_config(reading: Reading) -> dict[str, Any]:
    d_model, n_heads, d_head = head_size(reading, "hidden_size", "num_attention_heads")
    reading.require("head_dim", d_head, "it is hidden_size / num_attention_heads")
    reading.require(
        "apply_residual_connection_post_layernorm", False, "Hugging Face's class ignores it"
    )
    n_kv, shared = reading.size("num_kv_heads", n_heads), reading.flag("multi_query", True)
    parallel = reading.flag("parallel_attn", True)
    if grouped(reading):
        reading.require("parallel_attn", True, "Hugging Face's class fails without it")
    else:
        n_kv = 1 if shared else n_kv
        if n_kv not in (1, n_heads):
            raise ValueError(
                f"{reading.where}: num_kv_heads={n_kv} needs new_decoder_architecture=true"
            )
    norms(reading, parallel)
    n_ctx = reading.size("max_position_embeddings", 2048)
    positions = rope(reading, d_head, n_ctx)
    if reading.flag("alibi", False):
        positions = {
            "positional_embedding_type": "alibi",
            "alibi_scaled": True,
            "alibi_in_bfloat16": True,
        }
    return {
        "n_layers": reading.size("num_hidden_layers"),
        "d_model": d_model,
        "n_heads": n_heads,
        "n_key_value_heads": None if n_kv == n_heads else n_kv,
        "d_head": d_head,
        "d_mlp": reading.size("ffn_hidden_size", 4 * d_model),
        "d_vocab": reading.size("vocab_size"),
        "n_ctx": n_ctx,
        "act_fn": reading.activation("activation", "gelu"),
        "eps": reading.number("layer_norm_epsilon", 1e-5),
        "normalization_type": "LN",
        "parallel_attn_mlp": parallel,
        "tie_word_embeddings": reading.flag("tie_word_embeddings", True),
        **positions,
    }


def write_config(cfg: HookedTransformerConfig, needs: Callable[[str], bool]) -> dict[str, Any]:
    """A parallel model as Falcon-40B is: that says all the older layouts do."""
    alibi = cfg.positional_embedding_type == "alibi"
    biases = (*qkv(cfg, "b"), f"{ATTN}b_O", f"{MLP}b_in", f"{MLP}b_out")
    return {
        "num_hidden_layers": cfg.n_layers,
        "hidden_size": cfg.d_model,
        "num_attention_heads": cfg.n_heads,
        "num_kv_heads": cfg.n_key_value_heads or cfg.n_heads,
        "multi_query": cfg.n_key_value_heads == 1,
        "new_decoder_architecture": cfg.parallel_attn_mlp,
        "parallel_attn": cfg.parallel_attn_mlp,
        "num_ln_in_parallel_attn": 2 if cfg.parallel_attn_mlp else None,
        "ffn_hidden_size": cfg.d_mlp,
        "vocab_size": cfg.d_vocab,
        "activation": write_activation(cfg),
        "layer_norm_epsilon": cfg.eps,
        "bias": any(needs(name) for name in biases),
        "tie_word_embeddings": cfg.tie_word_embeddings,
        "alibi": alibi,
        **({"max_position_embeddings": cfg.n_ctx} if alibi else write_rope(cfg)),
    }


def fused(cfg: HookedTransformerConfig, reading: Reading, kind: str) -> Map:
    """The matrix (`kind` "W") or bias ("b") that queries, keys and values share."""
    whole, natives = f"{BLOCK}self_attention.query_key_value", qkv(cfg, kind)
    if grouped(reading):
        return grouped_qkv(cfg, whole, kind)
    name, m = {"W": ("weight", " m"), "b": ("bias", "")}[kind]
    hf = f"{whole}.{name}"
    if cfg.n_key_value_heads == 1:
        return Map(hf, natives, f"(a h){m} -> a{m} h", cut=("n", "k", "k"))
    return Map(hf, natives, f"(n s h){m} -> s n{m} h")


def rows(cfg: HookedTransformerConfig, reading: Reading) -> list[Row]:
    bias, n_norms = reading.flag("bias", False), norms(reading, cfg.parallel_attn_mlp)
    names = ("input_layernorm", "post_attention_layernorm")
    if cfg.parallel_attn_mlp:
        names = ("ln_attn", "ln_mlp")
    two = [
        *layer_norm(f"{BLOCK}{names[0]}", "blocks.{i}.ln1"),
        *layer_norm(f"{BLOCK}{names[1]}", "blocks.{i}.ln2"),
    ]
    no_biases = [Zeros(name, f"{n} h") for name, n in zip(qkv(cfg, "b"), "nkk", strict=True)]
    return [
        *ends(cfg, "transformer.word_embeddings"),
        *(two if n_norms == 2 else shared_norm(f"{BLOCK}input_layernorm")),
        fused(cfg, reading, "W"),
        *([fused(cfg, reading, "b")] if bias else no_biases),
        *out_projection(f"{BLOCK}self_attention.dense", bias),
        *mlp(f"{BLOCK}mlp.dense_h_to_4h", f"{BLOCK}mlp.dense_4h_to_h", bias),
        *layer_norm("transformer.ln_f", "ln_final"),
    ]


FALCON = Architecture(
    model_type="falcon",
    hf_class="FalconForCausalLM",
    remote_stem="falcon",
    read_config=read_config,
    write_config=write_config,
    rows=rows,
    ignore={
        f"{BLOCK}self_attention.rotary_emb.inv_freq": "follows from the config; old files have it"
    },
    cosmetic={"ff_factor": "what ffn_hidden_size was made from"},
    aliases={"n_embed": "hidden_size"},
    optional_prefix="transformer.",
)
ARCHITECTURES = (FALCON,)
