"""Gemma: norm weights are stored less one, embeddings grow by the root of their width.

Gemma 2 has norms around each sublayer, soft caps and windows in every other layer; Gemma 3 norms
queries and keys instead of capping, and its sliding layers turn at a rate of their own. With
`use_bidirectional_attention` Gemma 3 is an encoder (EmbeddingGemma), most often without a head.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformer_lens_lite.config import HookedTransformerConfig
from weights_conversion.families import llama
from weights_conversion.families.llama import BLOCK
from weights_conversion.families.qwen3 import qk_norms
from weights_conversion.fields import (
    Reading,
    attn_types,
    rope,
    rope_by_layer_type,
    score_divisor,
    windows,
    write_rope,
    write_rope_by_layer_type,
    write_windows,
)
from weights_conversion.table import Map, Row, override, without

Needs = Callable[[str], bool]


def read_common(reading: Reading, n_kv: int, n_ctx: int) -> dict[str, Any]:
    """What all generations share: everything but positions, windows and activation."""
    fields = llama.read_all_but_positions(reading, n_kv=n_kv, d_head=256, n_ctx=n_ctx)
    reading.require("mlp_bias", False, "MLPs of this family have no biases")
    return {
        **fields,
        "tie_word_embeddings": reading.flag("tie_word_embeddings", True),
        "embed_scale": math.sqrt(fields["d_model"]),
        "norm_weight_offset": 1.0,
    }


def require_causal(reading: Reading) -> None:
    """Of the families before Gemma 3."""
    causal = "the mask of Hugging Face's class stays causal with it"
    reading.require("use_bidirectional_attention", False, causal)


def read_config(reading: Reading) -> dict[str, Any]:
    require_causal(reading)
    fields = read_common(reading, n_kv=16, n_ctx=8192)
    act_fn = reading.activation("hidden_act", "gelu_pytorch_tanh")
    reading.require("hidden_activation", "gelu_pytorch_tanh", "Hugging Face looks at hidden_act")
    # the first checkpoints say "gelu" and mean its approximation
    act_fn = "gelu_pytorch_tanh" if act_fn == "gelu" else act_fn
    return {**fields, "act_fn": act_fn, **rope(reading, fields["d_head"], fields["n_ctx"])}


def write_common(cfg: HookedTransformerConfig, needs: Needs) -> dict[str, Any]:
    written = llama.write_all_but_positions(cfg, needs)
    return {name: value for name, value in written.items() if name != "mlp_bias"}


def write_config(cfg: HookedTransformerConfig, needs: Needs) -> dict[str, Any]:
    return {**write_common(cfg, needs), **write_rope(cfg)}


# --- Gemma 2 ------------------------------------------------------------------------------------


def read_later(reading: Reading, pattern: int, n_ctx: int) -> dict[str, Any]:
    """What Gemma 2 and 3 share. `pattern`: every so many layers one sees everything."""
    fields = read_common(reading, n_kv=4, n_ctx=n_ctx)
    n_layers = fields["n_layers"]
    types = attn_types(reading, n_layers, [bool((i + 1) % pattern) for i in range(n_layers)])
    window = reading.size("sliding_window", reading.if_missing("sliding_window", 4096))
    return {
        **fields,
        "act_fn": reading.activation("hidden_activation", "gelu_pytorch_tanh"),
        "attn_scale": math.sqrt(reading.size("query_pre_attn_scalar", 256)),
        "norm_place": "both",
        **windows(types, window),
    }


def soft_cap(reading: Reading, name: str, default: float | None) -> float:
    """-1 where the config says null."""
    return reading.number(name, reading.if_missing(name, default)) or -1.0


def read_config_2(reading: Reading) -> dict[str, Any]:
    require_causal(reading)
    fields = read_later(reading, pattern=2, n_ctx=8192)
    return {
        **fields,
        "attn_scores_soft_cap": soft_cap(reading, "attn_logit_softcapping", 50.0),
        "output_logits_soft_cap": soft_cap(reading, "final_logit_softcapping", 30.0),
        **rope(reading, fields["d_head"], fields["n_ctx"]),
    }


def write_later(cfg: HookedTransformerConfig, needs: Needs) -> dict[str, Any]:
    written = write_common(cfg, needs)
    cap = cfg.output_logits_soft_cap
    return {
        **{name: value for name, value in written.items() if name != "hidden_act"},
        **write_windows(cfg),
        "hidden_activation": written["hidden_act"],
        "query_pre_attn_scalar": round(score_divisor(cfg) ** 2),
        "final_logit_softcapping": cap if cap > 0 else None,
    }


def write_config_2(cfg: HookedTransformerConfig, needs: Needs) -> dict[str, Any]:
    cap = cfg.attn_scores_soft_cap
    written = {**write_later(cfg, needs), **write_rope(cfg)}
    return {**written, "attn_logit_softcapping": cap if cap > 0 else None}


def rows_2(cfg: HookedTransformerConfig, reading: Reading) -> list[Row]:
    return [
        *override(
            llama.rows(cfg, reading),
            Map(f"{BLOCK}pre_feedforward_layernorm.weight", "blocks.{i}.ln2.w", "m"),
        ),
        Map(f"{BLOCK}post_attention_layernorm.weight", "blocks.{i}.ln1_post.w", "m"),
        Map(f"{BLOCK}post_feedforward_layernorm.weight", "blocks.{i}.ln2_post.w", "m"),
    ]


# --- Gemma 3 ------------------------------------------------------------------------------------


HEADLESS = "Gemma3TextModel"
# What files that see images leave out of their text_config.
LEFT_OUT = {"vocab_size": 262208, "num_attention_heads": 8}


def read_config_3(reading: Reading) -> dict[str, Any]:
    reading.config = {**LEFT_OUT, **reading.config}
    pattern = reading.size("_sliding_window_pattern", reading.size("sliding_window_pattern", 6))
    fields = read_later(reading, pattern=pattern, n_ctx=131072)
    reading.require("attn_logit_softcapping", None, "Hugging Face's Gemma 3 does not apply it")
    if reading.flag("use_bidirectional_attention", False):
        fields |= read_encoder(reading, fields)
    return {
        **fields,
        "use_qk_norm": True,
        "output_logits_soft_cap": soft_cap(reading, "final_logit_softcapping", None),
        **rope_by_layer_type(reading, fields, theta=1e6, local_theta=1e4),
    }


def read_encoder(reading: Reading, fields: dict[str, Any]) -> dict[str, Any]:
    """What looking both ways changes. The window is written as both sides of a token together."""
    changes: dict[str, Any] = {"attention_dir": "bidirectional"}
    if "window_size" in fields:
        changes["window_size"] = fields["window_size"] // 2 + 1
    if HEADLESS in reading.names("architectures"):
        changes |= {"unembedding": False, "tie_word_embeddings": False}
    return changes


def write_config_3(cfg: HookedTransformerConfig, needs: Needs) -> dict[str, Any]:
    written = {**write_later(cfg, needs), **write_rope_by_layer_type(cfg)}
    if cfg.attention_dir == "causal":
        return written
    head = {} if cfg.unembedding else {"architectures": [HEADLESS], "tie_word_embeddings": True}
    return {
        **written,
        **head,
        "use_bidirectional_attention": True,
        "sliding_window": 2 * (written["sliding_window"] - 1),
    }


def rows_3(cfg: HookedTransformerConfig, reading: Reading) -> list[Row]:
    rows = [*rows_2(cfg, reading), *qk_norms()]
    return rows if cfg.unembedding else headless(rows)


def headless(rows: list[Row]) -> list[Row]:
    """The rows of a file that holds only what is inside `model.`"""
    return [
        replace(row, hf=row.hf.removeprefix("model.")) if isinstance(row, Map) else row
        for row in without(rows, "unembed.W_U", "unembed.b_U")
    ]


GEMMA = replace(
    llama.LLAMA,
    model_type="gemma",
    hf_class="GemmaForCausalLM",
    read_config=read_config,
    write_config=write_config,
)
GEMMA2 = replace(
    GEMMA,
    model_type="gemma2",
    hf_class="Gemma2ForCausalLM",
    read_config=read_config_2,
    write_config=write_config_2,
    rows=rows_2,
    cosmetic={"sliding_window_size": "of the first files; Hugging Face looks at sliding_window"},
)
GEMMA3 = replace(
    GEMMA2,
    model_type="gemma3_text",
    hf_class="Gemma3ForCausalLM",
    read_config=read_config_3,
    write_config=write_config_3,
    rows=rows_3,
    headless_class=HEADLESS,
    head_prefix="model.",  # of all names, unless the file was written by the class without a head
)
ARCHITECTURES = (GEMMA, GEMMA2, GEMMA3)
