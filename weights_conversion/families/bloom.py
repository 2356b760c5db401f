"""BLOOM: ALiBi instead of positions, a norm after the embedding, heads fused one by one."""

from collections.abc import Callable
from typing import Any

from transformer_lens_lite.config import HookedTransformerConfig
from weights_conversion.fields import Reading, because
from weights_conversion.parts import ends, head_size, layer_norm, mlp, out_projection, qkv
from weights_conversion.table import Architecture, Map, Row

BLOCK = "transformer.h.{i}."
ATTN = f"{BLOCK}self_attention."
PAST_NORM = "apply_residual_connection_post_layernorm"


def read_config(reading: Reading) -> dict[str, Any]:
    d_model, n_heads, d_head = head_size(reading, "hidden_size", "n_head")
    reading.require("slow_but_exact", False, "Hugging Face's class forgets two biases with it")
    return {
        "n_layers": reading.size("n_layer"),
        "d_model": d_model,
        "n_heads": n_heads,
        "d_head": d_head,
        "d_mlp": 4 * d_model,
        "d_vocab": reading.size("vocab_size"),
        "n_ctx": reading.size("seq_length", 2048),  # of its training; nothing depends on it
        "act_fn": "gelu_new",
        "eps": reading.number("layer_norm_epsilon", 1e-5),
        "normalization_type": "LN",
        "norm_place": "skip" if reading.flag(PAST_NORM, False) else "pre",
        "positional_embedding_type": "alibi",
        "post_embedding_ln": True,
        "tie_word_embeddings": reading.flag("tie_word_embeddings", True),
    }


def write_config(cfg: HookedTransformerConfig, needs: Callable[[str], bool]) -> dict[str, Any]:
    return {
        "n_layer": cfg.n_layers,
        "hidden_size": cfg.d_model,
        "n_head": cfg.n_heads,
        "vocab_size": cfg.d_vocab,
        "seq_length": cfg.n_ctx,
        "layer_norm_epsilon": cfg.eps,
        PAST_NORM: cfg.norm_place == "skip",
        "tie_word_embeddings": cfg.tie_word_embeddings,
    }


def rows(cfg: HookedTransformerConfig, reading: Reading) -> list[Row]:
    return [
        *ends(cfg, "transformer.word_embeddings"),
        *layer_norm("transformer.word_embeddings_layernorm", "embed.ln"),
        *layer_norm(f"{BLOCK}input_layernorm", "blocks.{i}.ln1"),
        Map(f"{ATTN}query_key_value.weight", qkv(cfg, "W"), "(n s h) m -> s n m h"),
        Map(f"{ATTN}query_key_value.bias", qkv(cfg, "b"), "(n s h) -> s n h"),
        *out_projection(f"{ATTN}dense", bias=True),
        *layer_norm(f"{BLOCK}post_attention_layernorm", "blocks.{i}.ln2"),
        *mlp(f"{BLOCK}mlp.dense_h_to_4h", f"{BLOCK}mlp.dense_4h_to_h"),
        *layer_norm("transformer.ln_f", "ln_final"),
    ]


BLOOM = Architecture(
    model_type="bloom",
    hf_class="BloomForCausalLM",
    read_config=read_config,
    write_config=write_config,
    rows=rows,
    joins_stream=("attn", "mlp"),
    cosmetic=because(
        "describes the training; Hugging Face's class does not look at it",
        "attention_softmax_in_fp32 bias_dropout_fusion masked_softmax_fusion n_inner "
        "offset_alibi skip_bias_add skip_bias_add_qkv",
    ),
    aliases={
        "n_embed": "hidden_size",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    optional_prefix="transformer.",
)
ARCHITECTURES = (BLOOM,)
