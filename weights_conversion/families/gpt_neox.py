"""GPT-NeoX (Pythia): attention beside the MLP, each with its own norm; heads fused one by one."""

from collections.abc import Callable
from typing import Any

from transformer_lens_lite.config import HookedTransformerConfig
from weights_conversion.fields import (
    Reading,
    because,
    rope,
    write_activation,
    write_partial,
    write_rope,
)
from weights_conversion.parts import ends, head_size, layer_norm, mlp, out_projection, qkv
from weights_conversion.table import Architecture, Map, Row, Zeros

BLOCK = "gpt_neox.layers.{i}."


def read_config(reading: Reading) -> dict[str, Any]:
    d_model, n_heads, d_head = head_size(reading, "hidden_size", "num_attention_heads")
    n_ctx = reading.size("max_position_embeddings", 2048)
    theta, part = reading.number("rotary_emb_base", 10000.0), reading.number("rotary_pct", 0.25)
    return {
        "n_layers": reading.size("num_hidden_layers"),
        "d_model": d_model,
        "n_heads": n_heads,
        "d_head": d_head,
        "d_mlp": reading.size("intermediate_size"),
        "d_vocab": reading.size("vocab_size"),
        "n_ctx": n_ctx,
        "act_fn": reading.activation("hidden_act", "gelu"),
        "eps": reading.number("layer_norm_eps", 1e-5),
        "normalization_type": "LN",
        "parallel_attn_mlp": reading.flag("use_parallel_residual", True),
        "tie_word_embeddings": reading.flag("tie_word_embeddings", False),
        **rope(reading, d_head, n_ctx, theta, part),
    }


def write_config(cfg: HookedTransformerConfig, needs: Callable[[str], bool]) -> dict[str, Any]:
    positions = write_rope(cfg)
    attention = (f"blocks.{{i}}.attn.b_{x}" for x in "QKVO")
    return {
        "num_hidden_layers": cfg.n_layers,
        "hidden_size": cfg.d_model,
        "num_attention_heads": cfg.n_heads,
        "intermediate_size": cfg.d_mlp,
        "vocab_size": cfg.d_vocab,
        "hidden_act": write_activation(cfg),
        "layer_norm_eps": cfg.eps,
        "use_parallel_residual": cfg.parallel_attn_mlp,
        "attention_bias": any(needs(name) for name in attention),
        "tie_word_embeddings": cfg.tie_word_embeddings,
        "rotary_emb_base": positions.pop("rope_theta"),  # the names this family has for them
        "rotary_pct": write_partial(cfg),
        **positions,
    }


def rows(cfg: HookedTransformerConfig, reading: Reading) -> list[Row]:
    bias = reading.flag("attention_bias", True)
    fused: list[Row] = [
        Map(f"{BLOCK}attention.query_key_value.bias", qkv(cfg, "b"), "(n s h) -> s n h")
    ]
    return [
        *ends(cfg, "gpt_neox.embed_in", head="embed_out"),
        *layer_norm(f"{BLOCK}input_layernorm", "blocks.{i}.ln1"),
        Map(f"{BLOCK}attention.query_key_value.weight", qkv(cfg, "W"), "(n s h) m -> s n m h"),
        *(fused if bias else [Zeros(name, "n h") for name in qkv(cfg, "b")]),
        *out_projection(f"{BLOCK}attention.dense", bias),
        *layer_norm(f"{BLOCK}post_attention_layernorm", "blocks.{i}.ln2"),
        *mlp(f"{BLOCK}mlp.dense_h_to_4h", f"{BLOCK}mlp.dense_4h_to_h"),
        *layer_norm("gpt_neox.final_layer_norm", "ln_final"),
    ]


OLD = "follows from the config; older transformers saved it"
GPT_NEOX = Architecture(
    model_type="gpt_neox",
    hf_class="GPTNeoXForCausalLM",
    read_config=read_config,
    write_config=write_config,
    rows=rows,
    ignore=because(
        OLD,
        f"{BLOCK}attention.bias {BLOCK}attention.masked_bias {BLOCK}attention.rotary_emb.inv_freq",
    ),
    cosmetic=because(
        "dropout", "attention_probs_dropout_prob hidden_dropout_prob classifier_dropout"
    ),
    optional_prefix="gpt_neox.",
)
ARCHITECTURES = (GPT_NEOX,)
