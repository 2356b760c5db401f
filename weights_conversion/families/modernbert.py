"""ModernBERT: an encoder made of what later decoders are: rotary positions, gated MLPs, norms
before attention and MLP (none before the first attention), windows that look both ways."""

from collections.abc import Callable
from typing import Any

from transformer_lens_lite.config import HookedTransformerConfig
from weights_conversion.families import bert
from weights_conversion.fields import (
    Reading,
    attn_types,
    because,
    rope_by_layer_type,
    windows,
    write_activation,
    write_rope_by_layer_type,
    write_windows,
)
from weights_conversion.parts import ends, head_size, out_projection, qkv
from weights_conversion.table import Architecture, Map, Row, Zeros, optional

ATTN, MLP = "blocks.{i}.attn.", "blocks.{i}.mlp."


def read_config(reading: Reading) -> dict[str, Any]:
    d_model, n_heads, d_head = head_size(reading, "hidden_size", "num_attention_heads")
    n_layers = reading.size("num_hidden_layers")
    every = reading.size("global_attn_every_n_layers", 3)
    types = attn_types(reading, n_layers, [bool(i % every) for i in range(n_layers)])
    window = reading.size("local_attention", 128) // 2 + 1
    fields = {
        "attention_dir": "bidirectional",
        "n_layers": n_layers,
        "d_model": d_model,
        "n_heads": n_heads,
        "d_head": d_head,
        "d_mlp": reading.size("intermediate_size"),
        "d_vocab": reading.size("vocab_size"),
        "n_ctx": reading.size("max_position_embeddings", 8192),
        "act_fn": reading.activation("hidden_activation", "gelu"),
        "eps": reading.number("norm_eps", 1e-5),
        "normalization_type": "LN",
        "post_embedding_ln": True,
        "first_norm": False,
        "gated_mlp": True,
        "gated_mlp_biases": reading.flag("mlp_bias", False),
        **windows(types, window),
        **bert.read_head(reading, reading.activation("classifier_activation", "gelu")),
    }
    reading.require("rope_scaling", None, "its rotary parameters are those of each layer type")
    return {**fields, **rope_by_layer_type(reading, fields, 160_000.0, 10_000.0)}


def write_config(cfg: HookedTransformerConfig, needs: Callable[[str], bool]) -> dict[str, Any]:
    norms = ("blocks.{i}.ln1.b", "blocks.{i}.ln2.b", "embed.ln.b", "ln_final.b")
    attention = [f"{ATTN}b_{x}" for x in "QKVO"]
    return {
        "num_hidden_layers": cfg.n_layers,
        "hidden_size": cfg.d_model,
        "num_attention_heads": cfg.n_heads,
        "intermediate_size": cfg.d_mlp,
        "vocab_size": cfg.d_vocab,
        "hidden_activation": write_activation(cfg),
        "classifier_activation": cfg.unembed_act_fn or "gelu",
        "norm_eps": cfg.eps,
        "norm_bias": any(needs(name) for name in (*norms, "unembed.transform.ln.b")),
        "attention_bias": any(needs(name) for name in attention),
        "mlp_bias": cfg.gated_mlp_biases,
        "classifier_bias": needs("unembed.transform.b_dense"),
        "decoder_bias": needs("unembed.b_U"),
        "local_attention": 2 * ((cfg.window_size or 65) - 1),
        "layer_types": write_windows(cfg)["layer_types"],
        **write_rope_by_layer_type(cfg),
        **bert.write_head(cfg, "ModernBert"),
    }


def rows(cfg: HookedTransformerConfig, reading: Reading) -> list[Row]:
    base = "model." if cfg.unembedding else ""
    block = f"{base}layers.{{i}}."
    norm_bias = reading.flag("norm_bias", False)
    attention_bias = reading.flag("attention_bias", False)
    classifier_bias = reading.flag("classifier_bias", False)
    decoder_bias = reading.flag("decoder_bias", True)

    def norm(hf: str, native: str, layers: tuple[int, ...] | None = None) -> list[Row]:
        return [
            Map(f"{hf}.weight", f"{native}.w", "m", layers=layers),
            optional(norm_bias, Map(f"{hf}.bias", f"{native}.b", "m", layers=layers)),
        ]

    later = tuple(range(1, reading.size("num_hidden_layers")))  # of the whole checkpoint
    joined = Map(f"{block}attn.Wqkv.bias", qkv(cfg, "b"), "(s n h) -> s n h")
    inner = Map(f"{block}mlp.Wi.bias", (f"{MLP}b_gate", f"{MLP}b_up"), "(s f) -> s f")
    result: list[Row] = [
        *norm(f"{base}embeddings.norm", "embed.ln"),
        *norm(f"{block}attn_norm", "blocks.{i}.ln1", later),
        Map(f"{block}attn.Wqkv.weight", qkv(cfg, "W"), "(s n h) m -> s n m h"),
        *([joined] if attention_bias else [Zeros(name, "n h") for name in qkv(cfg, "b")]),
        *out_projection(f"{block}attn.Wo", attention_bias),
        *norm(f"{block}mlp_norm", "blocks.{i}.ln2"),
        Map(f"{block}mlp.Wi.weight", (f"{MLP}W_gate", f"{MLP}W_in"), "(s f) m -> s m f"),
        *([inner] if cfg.gated_mlp_biases else []),
        Zeros(f"{MLP}b_in", "f"),
        Map(f"{block}mlp.Wo.weight", f"{MLP}W_out", "m f -> f m"),
        optional(cfg.gated_mlp_biases, Map(f"{block}mlp.Wo.bias", f"{MLP}b_out", "m")),
        *norm(f"{base}final_norm", "ln_final"),
    ]
    embed = f"{base}embeddings.tok_embeddings"
    if not cfg.unembedding:
        return [*result, Map(f"{embed}.weight", "embed.W_E", "v m")]
    dense = "unembed.transform"
    return [
        *result,
        *ends(cfg, embed, "decoder", head_bias=decoder_bias),
        Map("head.dense.weight", f"{dense}.W_dense", "o m -> m o", sizes={"o": cfg.d_model}),
        optional(classifier_bias, Map("head.dense.bias", f"{dense}.b_dense", "m")),
        *norm("head.norm", f"{dense}.ln"),
    ]


MODERNBERT = Architecture(
    model_type="modernbert",
    hf_class="ModernBertForMaskedLM",
    headless_class="ModernBertModel",
    head_prefix="head.",
    read_config=read_config,
    write_config=write_config,
    rows=rows,
    cosmetic={
        **because(
            "only matters for training",
            "initializer_cutoff_factor mlp_dropout embedding_dropout classifier_dropout",
        ),
        **because(
            "how Hugging Face computes or stores the same numbers",
            "deterministic_flash_attn reference_compile repad_logits_with_grad sparse_prediction "
            "sparse_pred_ignore_index position_embedding_type",
        ),
        **because("belongs to the heads of other tasks", "classifier_pooling"),
        **because("belongs to the tokenizer", "cls_token_id gradient_checkpointing"),
        "layer_norm_eps": "Hugging Face's class reads norm_eps",
    },
    aliases={"global_rope_theta": "rope_theta", "local_rope_theta": "rope_local_base_freq"},
    optional_prefix="model.",
)
ARCHITECTURES = (MODERNBERT,)
