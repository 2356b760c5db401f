"""MPT: ALiBi instead of positions, no biases anywhere; much of its config is nested."""

import math
from collections.abc import Callable
from typing import Any

from transformer_lens_lite.config import HookedTransformerConfig
from weights_conversion.fields import Reading, because, reciprocal, score_divisor
from weights_conversion.parts import ends, head_size, mlp, out_projection, qkv
from weights_conversion.table import Architecture, Map, Row, Zeros

BLOCK = "transformer.blocks.{i}."
IGNORED = "Hugging Face's class does not look at it"
LAYER_NORMS = ("low_precision_layernorm", "layernorm")


def read_config(reading: Reading) -> dict[str, Any]:
    d_model, n_heads, d_head = head_size(reading, "d_model", "n_heads")
    reading.require("expansion_ratio", 4, "Hugging Face's class makes every MLP 4 times as wide")
    reading.require("no_bias", True, f"there are no biases: {IGNORED}")
    reading.require("logit_scale", None, IGNORED)
    if (norm := reading.text("norm_type", LAYER_NORMS[0])) not in LAYER_NORMS:
        raise ValueError(f"{reading.where}: norm_type={norm!r} is not one of {LAYER_NORMS}")
    return {
        "n_layers": reading.size("n_layers"),
        "d_model": d_model,
        "n_heads": n_heads,
        "d_head": d_head,
        "d_mlp": 4 * d_model,
        "d_vocab": reading.size("vocab_size"),
        "n_ctx": reading.size("max_seq_len", 2048),
        "act_fn": "gelu",
        "eps": reading.number("layer_norm_epsilon", 1e-5),
        "normalization_type": "LN",
        "positional_embedding_type": "alibi",
        "tie_word_embeddings": reading.flag("tie_word_embeddings", True),
        **read_attention(Reading(reading.mapping("attn_config"), f"{reading.where}: attn_config")),
    }


def read_attention(reading: Reading) -> dict[str, Any]:
    """What the nested config says."""
    reading.require("attn_type", "multihead_attention", IGNORED)
    reading.require("prefix_lm", False, IGNORED)
    reading.require("qk_ln", False, IGNORED)
    reading.require("attn_uses_sequence_id", False, IGNORED)
    reading.require("alibi_bias_max", 8, f"the slopes would be others, but {IGNORED}")
    if not reading.flag("alibi", True):
        raise ValueError(f"{reading.where}: alibi=False is not supported: {IGNORED}")
    scale, clip = reading.number("softmax_scale", None), reading.number("clip_qkv", None)
    reading.refuse_unread(("attn_pdrop", "attn_impl"))
    return {
        "clip_qkv": clip or None,  # 0 clips nothing
        **({} if scale is None else {"attn_scale": reciprocal(scale)}),
    }


def write_config(cfg: HookedTransformerConfig, needs: Callable[[str], bool]) -> dict[str, Any]:
    divisor = score_divisor(cfg)
    scale = None if divisor == math.sqrt(cfg.d_head) else reciprocal(divisor)
    return {
        "n_layers": cfg.n_layers,
        "d_model": cfg.d_model,
        "n_heads": cfg.n_heads,
        "vocab_size": cfg.d_vocab,
        "max_seq_len": cfg.n_ctx,
        "layer_norm_epsilon": cfg.eps,
        "tie_word_embeddings": cfg.tie_word_embeddings,
        "attn_config": {"clip_qkv": cfg.clip_qkv, "softmax_scale": scale},
    }


def bare_norm(hf: str, native: str) -> list[Row]:
    """A LayerNorm without bias."""
    return [Map(f"{hf}.weight", f"{native}.w", "m"), Zeros(f"{native}.b", "m")]


def rows(cfg: HookedTransformerConfig, reading: Reading) -> list[Row]:
    return [
        *ends(cfg, "transformer.wte"),
        *bare_norm(f"{BLOCK}norm_1", "blocks.{i}.ln1"),
        Map(f"{BLOCK}attn.Wqkv.weight", qkv(cfg, "W"), "(s n h) m -> s n m h"),
        *(Zeros(name, "n h") for name in qkv(cfg, "b")),
        *out_projection(f"{BLOCK}attn.out_proj", bias=False),
        *bare_norm(f"{BLOCK}norm_2", "blocks.{i}.ln2"),
        *mlp(f"{BLOCK}ffn.up_proj", f"{BLOCK}ffn.down_proj", bias=False),
        *bare_norm("transformer.norm_f", "ln_final"),
    ]


MPT = Architecture(
    model_type="mpt",
    hf_class="MptForCausalLM",
    remote_stem="mpt",
    read_config=read_config,
    write_config=write_config,
    rows=rows,
    joins_stream=("mlp",),
    cosmetic={
        "learned_pos_emb": "ALiBi takes their place",
        "embedding_fraction": "scales gradients",
        "emb_pdrop": "dropout",
        **because("set-up and logging", "init_config init_device verbose tokenizer_name"),
    },
    aliases={
        "num_attention_heads": "n_heads",
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
    },
    optional_prefix="transformer.",
)
ARCHITECTURES = (MPT,)
