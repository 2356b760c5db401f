"""OPT: learned positions, of which the first two rows belong to no position; the model of 350M
parameters has narrower embeddings, and norms behind its sublayers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformer_lens_lite.config import HookedTransformerConfig
from weights_conversion.fields import Reading, because, write_activation
from weights_conversion.parts import ends, head_size, layer_norm, mlp, out_projection, projections
from weights_conversion.table import Architecture, Map, Row

DECODER = "model.decoder."
BLOCK = f"{DECODER}layers.{{i}}."
ATTN = f"{BLOCK}self_attn."


def read_config(reading: Reading) -> dict[str, Any]:
    d_model, n_heads, d_head = head_size(reading, "hidden_size", "num_attention_heads")
    d_embed = reading.size("word_embed_proj_dim", d_model)
    before = reading.flag("do_layer_norm_before", True)
    last = before and not reading.flag("_remove_final_layer_norm", False)
    return {
        "n_layers": reading.size("num_hidden_layers"),
        "d_model": d_model,
        "n_heads": n_heads,
        "d_head": d_head,
        "d_mlp": reading.size("ffn_dim"),
        "d_vocab": reading.size("vocab_size"),
        "n_ctx": reading.size("max_position_embeddings", 2048),
        "act_fn": reading.activation("activation_function", "relu"),
        "eps": 1e-5,
        "normalization_type": "LN" if weighted_norms(reading) else "LNPre",
        "norm_place": "pre" if before else "stream",
        "final_norm": last,
        "d_embed": None if d_embed == d_model else d_embed,
        "positional_embedding_type": "standard",
        "reserved_positions": 2,
        "tie_word_embeddings": reading.flag("tie_word_embeddings", True),
    }


def weighted_norms(reading: Reading) -> bool:
    return reading.flag("layer_norm_elementwise_affine", True)


def write_config(cfg: HookedTransformerConfig, needs: Callable[[str], bool]) -> dict[str, Any]:
    attn, linear = "blocks.{i}.attn.", "blocks.{i}.mlp."
    biases = [f"{attn}b_{x}" for x in "QKVO"] + [f"{linear}b_in", f"{linear}b_out"]
    return {
        "num_hidden_layers": cfg.n_layers,
        "hidden_size": cfg.d_model,
        "word_embed_proj_dim": cfg.d_embed or cfg.d_model,
        "num_attention_heads": cfg.n_heads,
        "ffn_dim": cfg.d_mlp,
        "vocab_size": cfg.d_vocab,
        "max_position_embeddings": cfg.n_ctx,
        "activation_function": write_activation(cfg),
        "do_layer_norm_before": cfg.norm_place == "pre",
        "_remove_final_layer_norm": cfg.norm_place == "pre" and not cfg.final_norm,
        "layer_norm_elementwise_affine": cfg.normalization_type == "LN",
        "enable_bias": any(needs(name) for name in biases),
        "tie_word_embeddings": cfg.tie_word_embeddings,
    }


def rows(cfg: HookedTransformerConfig, reading: Reading) -> list[Row]:
    bias = reading.flag("enable_bias", True)
    sizes = {"o": cfg.d_embed or cfg.d_model}
    narrow = [
        replace(row, sizes={"m": sizes["o"]}) if isinstance(row, Map) else row
        for row in ends(cfg, f"{DECODER}embed_tokens")
    ]
    norms = [
        *layer_norm(f"{BLOCK}self_attn_layer_norm", "blocks.{i}.ln1"),
        *layer_norm(f"{BLOCK}final_layer_norm", "blocks.{i}.ln2"),
        *(layer_norm(f"{DECODER}final_layer_norm", "ln_final") if cfg.final_norm else []),
    ]
    projections_of_embeddings = [
        Map(f"{DECODER}project_in.weight", "embed.widen.W_project", "m o -> o m", sizes=sizes),
        Map(
            f"{DECODER}project_out.weight", "unembed.transform.W_project", "o m -> m o", sizes=sizes
        ),
    ]
    return [
        *narrow,
        *(projections_of_embeddings if cfg.d_embed is not None else []),
        Map(
            f"{DECODER}embed_positions.weight",
            ("pos_embed.W_reserved", "pos_embed.W_pos"),
            "a m",
            cut=("r", "c"),
        ),
        *(norms if weighted_norms(reading) else []),
        *projections(cfg, ATTN, bias),
        *out_projection(f"{ATTN}out_proj", bias),
        *mlp(f"{BLOCK}fc1", f"{BLOCK}fc2", bias),
    ]


OPT = Architecture(
    model_type="opt",
    hf_class="OPTForCausalLM",
    read_config=read_config,
    write_config=write_config,
    rows=rows,
    cosmetic={
        **because("only matters for training", "dropout activation_dropout layerdrop init_std"),
        **because(
            "Hugging Face's class does not look at it", "learned_embeddings scale_embeddings"
        ),
    },
    optional_prefix="model.",
)
ARCHITECTURES = (OPT,)
