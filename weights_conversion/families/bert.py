"""BERT: an encoder. Attention looks both ways, and norms hold the stream after each addition."""

from collections.abc import Callable
from typing import Any

from transformer_lens_lite.config import HookedTransformerConfig
from weights_conversion.fields import Reading, because, write_activation
from weights_conversion.parts import head_size, layer_norm, mlp, out_projection, qkv
from weights_conversion.table import Architecture, Map, Row, Tied

ENCODER: dict[str, Any] = {
    "attention_dir": "bidirectional",
    "normalization_type": "LN",
    "norm_place": "stream",
    "post_embedding_ln": True,
    "post_embedding_ln_last": True,
    "final_norm": False,
    "positional_embedding_type": "standard",
}


def read_encoder(reading: Reading) -> dict[str, Any]:
    """What BERT and RoBERTa have in common: all but positions and head."""
    d_model, n_heads, d_head = head_size(reading, "hidden_size", "num_attention_heads")
    reading.require("is_decoder", False, "this family is loaded as an encoder")
    reading.require("add_cross_attention", False, "there is no cross-attention")
    reading.require("pruned_heads", {}, "every layer has the same number of heads")
    reading.require("position_embedding_type", "absolute", "positions are learned vectors")
    return {
        **ENCODER,
        "n_layers": reading.size("num_hidden_layers"),
        "d_model": d_model,
        "n_heads": n_heads,
        "d_head": d_head,
        "d_mlp": reading.size("intermediate_size"),
        "d_vocab": reading.size("vocab_size"),
        "act_fn": reading.activation("hidden_act", "gelu"),
        "eps": reading.number("layer_norm_eps", 1e-12),
        "n_token_types": reading.size("type_vocab_size", 2),
    }


def read_head(reading: Reading, act_fn: str) -> dict[str, Any]:
    """The masked language model's head, unless the checkpoint ends with the stream, as Hugging
    Face's classes called …Model do."""
    tied = reading.flag("tie_word_embeddings", True)
    if any(name.endswith("Model") for name in reading.names("architectures")):
        return {"unembedding": False}
    return {"unembed_act_fn": act_fn, "tie_word_embeddings": tied}


def write_head(cfg: HookedTransformerConfig, stem: str) -> dict[str, Any]:
    """The inverse; `stem` is how the family's classes begin."""
    if not cfg.unembedding:
        return {"architectures": [f"{stem}Model"]}
    tied = cfg.tie_word_embeddings
    return {"architectures": [f"{stem}ForMaskedLM"], "tie_word_embeddings": tied}


def read_config(reading: Reading) -> dict[str, Any]:
    fields = read_encoder(reading)
    return {
        **fields,
        **read_head(reading, fields["act_fn"]),
        "n_ctx": reading.size("max_position_embeddings", 512),
    }


def write_encoder(cfg: HookedTransformerConfig) -> dict[str, Any]:
    return {
        "num_hidden_layers": cfg.n_layers,
        "hidden_size": cfg.d_model,
        "num_attention_heads": cfg.n_heads,
        "intermediate_size": cfg.d_mlp,
        "vocab_size": cfg.d_vocab,
        "hidden_act": write_activation(cfg),
        "layer_norm_eps": cfg.eps,
        "type_vocab_size": cfg.n_token_types,
    }


def write_config(cfg: HookedTransformerConfig, needs: Callable[[str], bool]) -> dict[str, Any]:
    written = {**write_encoder(cfg), **write_head(cfg, "Bert")}
    return {**written, "max_position_embeddings": cfg.n_ctx}


def encoder_rows(cfg: HookedTransformerConfig, base: str) -> list[Row]:
    """Everything but positions and head."""
    block = f"{base}encoder.layer.{{i}}."
    rows: list[Row] = [
        Map(f"{base}embeddings.word_embeddings.weight", "embed.W_E", "v m"),
        Map(
            f"{base}embeddings.token_type_embeddings.weight", "token_type_embed.W_token_type", "t m"
        ),
        *layer_norm(f"{base}embeddings.LayerNorm", "ln_embed"),
    ]
    names = ("query", "key", "value")
    for x, W, b in zip(names, qkv(cfg, "W"), qkv(cfg, "b"), strict=True):
        rows += [
            Map(f"{block}attention.self.{x}.weight", W, "(n h) m -> n m h"),
            Map(f"{block}attention.self.{x}.bias", b, "(n h) -> n h"),
        ]
    return [
        *rows,
        *out_projection(f"{block}attention.output.dense", bias=True),
        *layer_norm(f"{block}attention.output.LayerNorm", "blocks.{i}.ln1"),
        *mlp(f"{block}intermediate.dense", f"{block}output.dense"),
        *layer_norm(f"{block}output.LayerNorm", "blocks.{i}.ln2"),
    ]


def transform(cfg: HookedTransformerConfig, dense: str, norm: str) -> list[Row]:
    """What the head does before the unembedding."""
    square = {"o": cfg.d_model}
    return [
        Map(f"{dense}.weight", "unembed.transform.W_dense", "o m -> m o", sizes=square),
        Map(f"{dense}.bias", "unembed.transform.b_dense", "m"),
        *layer_norm(norm, "unembed.transform.ln"),
    ]


def unembedding(
    cfg: HookedTransformerConfig, embed: str, matrix: str, bias: str, other_bias: str
) -> list[Row]:
    """The head's matrix, and its bias, which goes by two names and is read by that of the
    matrix."""
    if cfg.tie_word_embeddings:
        return [
            Tied(matrix, embed, "unembed.W_U"),
            Map(other_bias, "unembed.b_U", "u"),
            Tied(bias, other_bias, None),
        ]
    return [
        Map(matrix, "unembed.W_U", "u m -> m u"),
        Map(bias, "unembed.b_U", "u"),
        Tied(other_bias, bias, None, unread=True),
    ]


def rows(cfg: HookedTransformerConfig, reading: Reading) -> list[Row]:
    base, head = "bert." if cfg.unembedding else "", "cls.predictions."
    result = [
        *encoder_rows(cfg, base),
        Map(f"{base}embeddings.position_embeddings.weight", "pos_embed.W_pos", "c m"),
    ]
    if not cfg.unembedding:
        return result
    return [
        *result,
        *transform(cfg, f"{head}transform.dense", f"{head}transform.LayerNorm"),
        *unembedding(
            cfg,
            embed=f"{base}embeddings.word_embeddings.weight",
            matrix=f"{head}decoder.weight",
            bias=f"{head}decoder.bias",
            other_bias=f"{head}bias",
        ),
    ]


COSMETIC = {
    **because(
        "only matters for training",
        "hidden_dropout_prob attention_probs_dropout_prob directionality",
    ),
    **because(
        "belongs to the pooler or to the heads of other tasks",
        "classifier_dropout pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers "
        "pooler_size_per_head pooler_type",
    ),
}
# what a checkpoint of the encoder may hold besides
POOLER = "the pooler: it reads the last residual stream at the first token, behind this model"
POSITION_IDS = "0, 1, 2, …, which older transformers saved"

BERT = Architecture(
    model_type="bert",
    hf_class="BertForMaskedLM",
    headless_class="BertModel",
    head_prefix="cls.predictions.",
    read_config=read_config,
    write_config=write_config,
    rows=rows,
    ignore={
        **because(POOLER, "bert.pooler.dense.weight bert.pooler.dense.bias"),
        "bert.embeddings.position_ids": POSITION_IDS,
        **because(
            "the other task of pretraining: whether one text follows another",
            "cls.seq_relationship.weight cls.seq_relationship.bias",
        ),
    },
    cosmetic=COSMETIC,
    optional_prefix="bert.",
    old_names={"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"},
)
ARCHITECTURES = (BERT,)
