"""DistilBERT: BERT without token types. The eps of its norms is no field of its config."""

from collections.abc import Callable
from typing import Any

from transformer_lens_lite.config import HookedTransformerConfig
from weights_conversion.families import bert
from weights_conversion.fields import Reading, because, write_activation
from weights_conversion.parts import ends, head_size, layer_norm, mlp, out_projection, qkv
from weights_conversion.table import Architecture, Map, Row


def read_config(reading: Reading) -> dict[str, Any]:
    d_model, n_heads, d_head = head_size(reading, "dim", "n_heads")
    reading.require("pruned_heads", {}, "every layer has the same number of heads")
    act_fn = reading.activation("activation", "gelu")
    return {
        **bert.ENCODER,
        **bert.read_head(reading, act_fn),
        "n_layers": reading.size("n_layers"),
        "d_model": d_model,
        "n_heads": n_heads,
        "d_head": d_head,
        "d_mlp": reading.size("hidden_dim"),
        "d_vocab": reading.size("vocab_size"),
        "n_ctx": reading.size("max_position_embeddings", 512),
        "act_fn": act_fn,
        "eps": 1e-12,
    }


def write_config(cfg: HookedTransformerConfig, needs: Callable[[str], bool]) -> dict[str, Any]:
    return {
        "n_layers": cfg.n_layers,
        "dim": cfg.d_model,
        "n_heads": cfg.n_heads,
        "hidden_dim": cfg.d_mlp,
        "vocab_size": cfg.d_vocab,
        "max_position_embeddings": cfg.n_ctx,
        "activation": write_activation(cfg),
        **bert.write_head(cfg, "DistilBert"),
    }


def rows(cfg: HookedTransformerConfig, reading: Reading) -> list[Row]:
    base = "distilbert." if cfg.unembedding else ""
    embeddings, block = f"{base}embeddings.", f"{base}transformer.layer.{{i}}."
    result: list[Row] = [
        Map(f"{embeddings}position_embeddings.weight", "pos_embed.W_pos", "c m"),
        *layer_norm(f"{embeddings}LayerNorm", "ln_embed"),
    ]
    for x, W, b in zip("qkv", qkv(cfg, "W"), qkv(cfg, "b"), strict=True):
        result += [
            Map(f"{block}attention.{x}_lin.weight", W, "(n h) m -> n m h"),
            Map(f"{block}attention.{x}_lin.bias", b, "(n h) -> n h"),
        ]
    result += [
        *out_projection(f"{block}attention.out_lin", bias=True),
        *layer_norm(f"{block}sa_layer_norm", "blocks.{i}.ln1"),
        *mlp(f"{block}ffn.lin1", f"{block}ffn.lin2"),
        *layer_norm(f"{block}output_layer_norm", "blocks.{i}.ln2"),
    ]
    if not cfg.unembedding:
        return [*result, Map(f"{embeddings}word_embeddings.weight", "embed.W_E", "v m")]
    return [
        *result,
        *ends(cfg, f"{embeddings}word_embeddings", "vocab_projector", head_bias=True),
        *bert.transform(cfg, "vocab_transform", "vocab_layer_norm"),
    ]


DISTILBERT = Architecture(
    model_type="distilbert",
    hf_class="DistilBertForMaskedLM",
    headless_class="DistilBertModel",
    head_prefix="vocab_",
    read_config=read_config,
    write_config=write_config,
    rows=rows,
    ignore={"distilbert.embeddings.position_ids": bert.POSITION_IDS},
    cosmetic={
        **because("only matters for training", "dropout qa_dropout seq_classif_dropout"),
        "sinusoidal_pos_embds": "what positions start from; a checkpoint holds them",
        "tie_weights_": "Hugging Face's class does not look at it",
    },
    aliases={
        "hidden_size": "dim",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
    },
    optional_prefix="distilbert.",
)
ARCHITECTURES = (DISTILBERT,)
