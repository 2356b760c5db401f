"""Phi (1, 1.5, 2): attention and MLP side by side behind one norm; biases everywhere."""

from collections.abc import Callable
from typing import Any

from transformer_lens_lite.config import HookedTransformerConfig
from weights_conversion.fields import Reading, rope, write_activation, write_partial, write_rope
from weights_conversion.parts import (
    ends,
    head_size,
    layer_norm,
    mlp,
    out_projection,
    projections,
    shared_norm,
)
from weights_conversion.table import Architecture, Row

BLOCK = "model.layers.{i}."
ATTN = f"{BLOCK}self_attn."


def read_config(reading: Reading, n_ctx: int = 2048) -> dict[str, Any]:
    d_model, n_heads, d_head = head_size(reading, "hidden_size", "num_attention_heads")
    n_kv = reading.size("num_key_value_heads", n_heads)
    n_ctx = reading.size("max_position_embeddings", n_ctx)
    qk_norm = {"use_qk_norm": True, "qk_norm_type": "LN"}
    return {
        "n_layers": reading.size("num_hidden_layers"),
        "d_model": d_model,
        "n_heads": n_heads,
        "n_key_value_heads": None if n_kv == n_heads else n_kv,
        "d_head": d_head,
        "d_mlp": reading.size("intermediate_size"),
        "d_vocab": reading.size("vocab_size"),
        "n_ctx": n_ctx,
        "act_fn": reading.activation("hidden_act", "gelu_new"),
        "eps": reading.number("layer_norm_eps", 1e-5),
        "normalization_type": "LN",
        "parallel_attn_mlp": True,
        "tie_word_embeddings": reading.flag("tie_word_embeddings", False),
        **(qk_norm if reading.flag("qk_layernorm", False) else {}),
        **rope(reading, d_head, n_ctx, partial=0.5),
    }


def write_config(cfg: HookedTransformerConfig, needs: Callable[[str], bool]) -> dict[str, Any]:
    return {
        "num_hidden_layers": cfg.n_layers,
        "hidden_size": cfg.d_model,
        "num_attention_heads": cfg.n_heads,
        "num_key_value_heads": cfg.n_key_value_heads or cfg.n_heads,
        "intermediate_size": cfg.d_mlp,
        "vocab_size": cfg.d_vocab,
        "hidden_act": write_activation(cfg),
        "layer_norm_eps": cfg.eps,
        "tie_word_embeddings": cfg.tie_word_embeddings,
        "qk_layernorm": cfg.use_qk_norm,
        "partial_rotary_factor": write_partial(cfg),
        **write_rope(cfg),
    }


def qk_norms(cfg: HookedTransformerConfig) -> list[Row]:
    """LayerNorms of queries and keys, the same for every head."""
    if not cfg.use_qk_norm:
        return []
    return [
        *layer_norm(f"{ATTN}q_layernorm", "blocks.{i}.attn.q_norm", "h"),
        *layer_norm(f"{ATTN}k_layernorm", "blocks.{i}.attn.k_norm", "h"),
    ]


def rows(cfg: HookedTransformerConfig, reading: Reading) -> list[Row]:
    return [
        *ends(cfg, "model.embed_tokens", head_bias=True),
        *shared_norm(f"{BLOCK}input_layernorm"),
        *projections(cfg, ATTN, bias=True),
        *qk_norms(cfg),
        *out_projection(f"{ATTN}dense", bias=True),
        *mlp(f"{BLOCK}mlp.fc1", f"{BLOCK}mlp.fc2"),
        *layer_norm("model.final_layernorm", "ln_final"),
    ]


PHI = Architecture(
    model_type="phi",
    hf_class="PhiForCausalLM",
    remote_stem="phi",
    read_config=read_config,
    write_config=write_config,
    rows=rows,
    ignore={f"{ATTN}rotary_emb.inv_freq": "follows from the config; older transformers saved it"},
    optional_prefix="model.",
)
ARCHITECTURES = (PHI,)
