"""StarCoder2: Llama with LayerNorm, a plain MLP and biases; every layer may see a window."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformer_lens_lite.config import HookedTransformerConfig
from weights_conversion.families import llama
from weights_conversion.fields import Reading, because, windows
from weights_conversion.parts import ends, layer_norm, mlp, out_projection, projections, qkv
from weights_conversion.table import Row

BLOCK, ATTN, MLP = llama.BLOCK, llama.ATTN, llama.MLP


def read_config(reading: Reading) -> dict[str, Any]:
    fields = llama.read_config(reading, n_kv=2, n_ctx=4096)
    tied = reading.flag("tie_word_embeddings", True)
    return {
        **fields,
        "act_fn": reading.activation("hidden_act", "gelu_pytorch_tanh"),
        "eps": reading.number("norm_epsilon", 1e-5),
        "normalization_type": "LN",
        "gated_mlp": False,
        "gated_mlp_biases": False,
        "tie_word_embeddings": tied,
        **windows(["local"] * fields["n_layers"], reading.size("sliding_window", None)),
    }


def write_config(cfg: HookedTransformerConfig, needs: Callable[[str], bool]) -> dict[str, Any]:
    written = llama.write_without_biases(cfg, needs)
    ours = ("blocks.{i}.attn.b_O", "blocks.{i}.mlp.b_in", "blocks.{i}.mlp.b_out")
    return {
        **{k: v for k, v in written.items() if k != "rms_norm_eps"},
        "norm_epsilon": cfg.eps,
        "use_bias": any(needs(name) for name in (*qkv(cfg, "b"), *ours)),
        "sliding_window": cfg.window_size,
    }


def rows(cfg: HookedTransformerConfig, reading: Reading) -> list[Row]:
    bias = reading.flag("use_bias", True)
    return [
        *ends(cfg, "model.embed_tokens"),
        *layer_norm(f"{BLOCK}input_layernorm", "blocks.{i}.ln1"),
        *projections(cfg, ATTN, bias),
        *out_projection(f"{ATTN}o_proj", bias),
        *layer_norm(f"{BLOCK}post_attention_layernorm", "blocks.{i}.ln2"),
        *mlp(f"{MLP}c_fc", f"{MLP}c_proj", bias),
        *layer_norm("model.norm", "ln_final"),
    ]


STARCODER2 = replace(
    llama.LLAMA,
    model_type="starcoder2",
    hf_class="Starcoder2ForCausalLM",
    read_config=read_config,
    write_config=write_config,
    rows=rows,
    cosmetic={
        **because("dropout", "residual_dropout embedding_dropout"),
        **because(
            "left over from the training code; Hugging Face's class does not look at it",
            "activation_function attention_softmax_in_fp32 layer_norm_epsilon mlp_type norm_type "
            "scale_attention_softmax_in_fp32 scale_attn_weights",
        ),
    },
)
ARCHITECTURES = (STARCODER2,)
