"""GPT-Neo (TinyStories): every second layer sees a window; scores are not scaled."""

from collections.abc import Callable
from typing import Any

from transformer_lens_lite.config import HookedTransformerConfig
from weights_conversion.families import gpt2
from weights_conversion.fields import Reading, because, write_activation
from weights_conversion.parts import ends, head_size, layer_norm, mlp, out_projection, projections
from weights_conversion.table import Architecture, Map, Row

BLOCK = gpt2.BLOCK
ATTN = f"{BLOCK}attn.attention."


def attn_types(reading: Reading) -> list[str]:
    """[[["global", "local"], 12]] written out; older files hold the result as well."""
    compact = reading.raw("attention_types", [[["global", "local"], 12]])
    try:
        types = [name for names, n in compact for _ in range(n) for name in names]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{reading.where}: attention_types={compact!r}: {error}") from error
    if (given := reading.raw("attention_layers", types)) != types:
        raise ValueError(
            f"{reading.where}: attention_layers={given!r} contradicts attention_types={compact!r}"
        )
    return types


def read_config(reading: Reading) -> dict[str, Any]:
    d_model, n_heads, d_head = head_size(reading, "hidden_size", "num_heads")
    types, window = attn_types(reading), reading.size("window_size", 256)
    local = {"use_local_attn": True, "attn_types": types, "window_size": window}
    n_layers = reading.size("num_layers")
    if len(types) != n_layers:
        raise ValueError(
            f"{reading.where}: attention_types has {len(types)} entries for num_layers={n_layers}"
        )
    return {
        "n_layers": n_layers,
        "d_model": d_model,
        "n_heads": n_heads,
        "d_head": d_head,
        "d_mlp": reading.size("intermediate_size", 4 * d_model),
        "d_vocab": reading.size("vocab_size", 50257),
        "n_ctx": reading.size("max_position_embeddings", 2048),
        "act_fn": reading.activation("activation_function", "gelu_new"),
        "eps": reading.number("layer_norm_epsilon", 1e-5),
        "use_attn_scale": False,
        "normalization_type": "LN",
        "positional_embedding_type": "standard",
        "tie_word_embeddings": reading.flag("tie_word_embeddings", True),
        **(local if "local" in types else {}),
    }


def write_config(cfg: HookedTransformerConfig, needs: Callable[[str], bool]) -> dict[str, Any]:
    types = list(cfg.attn_types) if cfg.use_local_attn and cfg.attn_types else None
    return {
        "num_layers": cfg.n_layers,
        "hidden_size": cfg.d_model,
        "num_heads": cfg.n_heads,
        "intermediate_size": cfg.d_mlp,
        "vocab_size": cfg.d_vocab,
        "max_position_embeddings": cfg.n_ctx,
        "activation_function": write_activation(cfg),
        "layer_norm_epsilon": cfg.eps,
        "attention_types": [[["global"], cfg.n_layers]] if types is None else [[types, 1]],
        "window_size": cfg.window_size or 256,
        "tie_word_embeddings": cfg.tie_word_embeddings,
    }


def rows(cfg: HookedTransformerConfig, reading: Reading) -> list[Row]:
    return [
        *ends(cfg, "transformer.wte"),
        Map("transformer.wpe.weight", "pos_embed.W_pos", "c m"),
        *layer_norm(f"{BLOCK}ln_1", "blocks.{i}.ln1"),
        *projections(cfg, ATTN, bias=False),
        *out_projection(f"{ATTN}out_proj", bias=True),
        *layer_norm(f"{BLOCK}ln_2", "blocks.{i}.ln2"),
        *mlp(f"{BLOCK}mlp.c_fc", f"{BLOCK}mlp.c_proj"),
        *layer_norm("transformer.ln_f", "ln_final"),
    ]


GPT_NEO = Architecture(
    model_type="gpt_neo",
    hf_class="GPTNeoForCausalLM",
    read_config=read_config,
    write_config=write_config,
    rows=rows,
    ignore={
        f"{ATTN}bias": "the causal mask, which older transformers saved",
        f"{ATTN}masked_bias": "the number written where the mask is false",
    },
    cosmetic=because("dropout", "resid_dropout embed_dropout classifier_dropout"),
    aliases={"num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"},
    optional_prefix="transformer.",
)
ARCHITECTURES = (GPT_NEO,)
