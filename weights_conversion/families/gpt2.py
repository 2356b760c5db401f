"""GPT-2: learned positions, LayerNorm, a fused query/key/value matrix stored as [in, out]."""

from collections.abc import Callable
from typing import Any

from transformer_lens_lite.config import HookedTransformerConfig
from weights_conversion.fields import Reading, because, write_activation
from weights_conversion.table import Architecture, Map, Row, Tied, Zeros

BLOCK = "transformer.h.{i}."


def read_config(
    reading: Reading,
    *,
    n_embd: int = 768,
    n_layer: int = 12,
    n_head: int = 12,
    n_positions: int = 1024,
    vocab_size: int = 50257,
    act: str = "gelu_new",
    tied: bool = True,
) -> dict[str, Any]:
    """The keywords are what a descendant's class in Hugging Face holds by itself."""
    d_model, n_heads = reading.size("n_embd", n_embd), reading.size("n_head", n_head)
    if d_model % n_heads:
        raise ValueError(f"{reading.where}: n_embd={d_model} is not a multiple of n_head={n_heads}")
    reading.require("add_cross_attention", False, "there is no cross-attention")
    reading.require("pruned_heads", {}, "every layer has the same number of heads")
    return {
        "n_layers": reading.size("n_layer", n_layer),
        "d_model": d_model,
        "n_heads": n_heads,
        "d_head": d_model // n_heads,
        "d_mlp": reading.size("n_inner", 4 * d_model),
        "d_vocab": reading.size("vocab_size", vocab_size),
        # n_ctx is the name of old files; where both exist Hugging Face looks at n_positions alone
        "n_ctx": reading.size("n_positions", reading.size("n_ctx", n_positions)),
        "act_fn": reading.activation("activation_function", act),
        "eps": reading.number("layer_norm_epsilon", 1e-5),
        "use_attn_scale": reading.flag("scale_attn_weights", True),
        "scale_attn_by_inverse_layer_idx": reading.flag("scale_attn_by_inverse_layer_idx", False),
        "tie_word_embeddings": reading.flag("tie_word_embeddings", tied),
        "normalization_type": "LN",
        "positional_embedding_type": "standard",
    }


def write_config(cfg: HookedTransformerConfig, needs: Callable[[str], bool]) -> dict[str, Any]:
    return {
        "n_layer": cfg.n_layers,
        "n_embd": cfg.d_model,
        "n_head": cfg.n_heads,
        "n_inner": cfg.d_mlp,
        "vocab_size": cfg.d_vocab,
        "n_positions": cfg.n_ctx,
        "activation_function": write_activation(cfg),
        "layer_norm_epsilon": cfg.eps,
        "scale_attn_weights": cfg.use_attn_scale,
        "scale_attn_by_inverse_layer_idx": cfg.scale_attn_by_inverse_layer_idx,
        "tie_word_embeddings": cfg.tie_word_embeddings,
    }


def norm(hf: str, native: str) -> list[Row]:
    return [Map(f"{hf}.weight", f"{native}.w", "m"), Map(f"{hf}.bias", f"{native}.b", "m")]


def rows(cfg: HookedTransformerConfig, reading: Reading) -> list[Row]:
    attn = "blocks.{i}.attn."
    weights, biases = [tuple(f"{attn}{kind}_{x}" for x in "QKV") for kind in "Wb"]
    head: Row = Map("lm_head.weight", "unembed.W_U", "u m -> m u")
    if cfg.tie_word_embeddings:
        head = Tied("lm_head.weight", "transformer.wte.weight", "unembed.W_U")
    return [
        Map("transformer.wte.weight", "embed.W_E", "v m"),
        Map("transformer.wpe.weight", "pos_embed.W_pos", "c m"),
        *norm(f"{BLOCK}ln_1", "blocks.{i}.ln1"),
        Map(f"{BLOCK}attn.c_attn.weight", weights, "m (s n h) -> s n m h"),
        Map(f"{BLOCK}attn.c_attn.bias", biases, "(s n h) -> s n h"),
        Map(f"{BLOCK}attn.c_proj.weight", f"{attn}W_O", "(n h) m -> n h m"),
        Map(f"{BLOCK}attn.c_proj.bias", f"{attn}b_O", "m"),
        *norm(f"{BLOCK}ln_2", "blocks.{i}.ln2"),
        Map(f"{BLOCK}mlp.c_fc.weight", "blocks.{i}.mlp.W_in", "m f"),
        Map(f"{BLOCK}mlp.c_fc.bias", "blocks.{i}.mlp.b_in", "f"),
        Map(f"{BLOCK}mlp.c_proj.weight", "blocks.{i}.mlp.W_out", "f m"),
        Map(f"{BLOCK}mlp.c_proj.bias", "blocks.{i}.mlp.b_out", "m"),
        *norm("transformer.ln_f", "ln_final"),
        head,
        Zeros("unembed.b_U", "u"),
    ]


GPT2 = Architecture(
    model_type="gpt2",
    hf_class="GPT2LMHeadModel",
    read_config=read_config,
    write_config=write_config,
    rows=rows,
    ignore={
        f"{BLOCK}attn.bias": "the causal mask, which older transformers saved",
        f"{BLOCK}attn.masked_bias": "the number written where the mask is false",
    },
    cosmetic={
        "reorder_and_upcast_attn": "the order of two multiplications; softmax is fp32 here anyway",
        **because("of the first files: extra tokens to train", "n_special predict_special_tokens"),
    },
    aliases={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    optional_prefix="transformer.",
)
ARCHITECTURES = (GPT2,)
