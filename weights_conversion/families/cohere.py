"""Cohere (Command-R): attention and MLP behind one LayerNorm without bias; logits are scaled.

Cohere 2: three of four layers slide, and only those turn their queries and keys.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformer_lens_lite.config import HookedTransformerConfig
from weights_conversion.families import llama
from weights_conversion.families.llama import BLOCK
from weights_conversion.families.qwen3 import qk_norms
from weights_conversion.fields import Reading, attn_types, because, windows, write_windows
from weights_conversion.table import Map, Row, Zeros, override

Needs = Callable[[str], bool]
NORMS = ("blocks.{i}.ln1", "blocks.{i}.ln2")


def read_common(reading: Reading, theta: float) -> dict[str, Any]:
    reading.require("mlp_bias", False, "MLPs of this family have no biases")
    return {
        **llama.read_config(reading, n_ctx=8192, theta=theta),
        "eps": reading.number("layer_norm_eps", 1e-5),
        "tie_word_embeddings": reading.flag("tie_word_embeddings", True),
        "logit_scale": reading.number("logit_scale", 0.0625),
        "normalization_type": "LN",
        "parallel_attn_mlp": True,
        "rotary_adjacent_pairs": True,
    }


def read_config(reading: Reading) -> dict[str, Any]:
    fields = read_common(reading, theta=5e5)
    if reading.flag("use_qk_norm", False):
        fields |= {"use_qk_norm": True, "qk_norm_type": "LN", "qk_norm_over": "each_head"}
    return fields


def write_common(cfg: HookedTransformerConfig, needs: Needs) -> dict[str, Any]:
    written = {**llama.write_config(cfg, needs), "layer_norm_eps": cfg.eps}
    written = {k: v for k, v in written.items() if k not in ("rms_norm_eps", "mlp_bias")}
    return {**written, "logit_scale": cfg.logit_scale}


def write_config(cfg: HookedTransformerConfig, needs: Needs) -> dict[str, Any]:
    return {**write_common(cfg, needs), "use_qk_norm": cfg.use_qk_norm}


def rows(cfg: HookedTransformerConfig, reading: Reading) -> list[Row]:
    weights = tuple(f"{name}.w" for name in NORMS)
    per_head = [
        *qk_norms(pattern="n h"),
        Zeros("blocks.{i}.attn.q_norm.b", "n h"),
        Zeros("blocks.{i}.attn.k_norm.b", "k h"),
    ]
    return [
        *override(
            llama.rows(cfg, reading),
            Map(f"{BLOCK}input_layernorm.weight", weights, "m", copies=True),
        ),
        *(Zeros(f"{name}.b", "m") for name in (*NORMS, "ln_final")),
        *(per_head if cfg.use_qk_norm else []),
    ]


def read_config_2(reading: Reading) -> dict[str, Any]:
    fields = read_common(reading, theta=1e4)
    n_layers = fields["n_layers"]
    pattern = reading.size("sliding_window_pattern", 4)
    types = attn_types(reading, n_layers, [(i + 1) % pattern != 0 for i in range(n_layers)])
    window = reading.size("sliding_window", reading.if_missing("sliding_window", 4096))
    return {
        **fields,
        "rotary_layers": [window is not None and each == "local" for each in types],
        **windows(types, window),
    }


def write_config_2(cfg: HookedTransformerConfig, needs: Needs) -> dict[str, Any]:
    return {**write_common(cfg, needs), **write_windows(cfg)}


COHERE = replace(
    llama.LLAMA,
    model_type="cohere",
    hf_class="CohereForCausalLM",
    read_config=read_config,
    write_config=write_config,
    rows=rows,
)
COHERE2 = replace(
    COHERE,
    model_type="cohere2",
    hf_class="Cohere2ForCausalLM",
    read_config=read_config_2,
    write_config=write_config_2,
    cosmetic=because(
        "is in the first files, and Hugging Face's class does not look at it",
        "layer_switch order_of_interleaved_layers position_embedding_type rotary_pct use_qk_norm "
        "use_embedding_sharing use_gated_activation use_parallel_block use_parallel_embedding",
    ),
)
ARCHITECTURES = (COHERE, COHERE2)
