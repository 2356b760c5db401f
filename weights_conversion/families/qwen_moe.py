"""Qwen2-MoE and Qwen3-MoE: experts in some layers; in Qwen2's, one that every token passes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformer_lens_lite.config import HookedTransformerConfig
from weights_conversion.experts import MLP, experts, router, shared_expert, with_experts
from weights_conversion.families import llama, qwen3
from weights_conversion.families.llama import ATTN, BLOCK
from weights_conversion.families.mixtral import TRAINING_ONLY
from weights_conversion.fields import Reading, attn_types, windows, write_windows
from weights_conversion.table import Map, Row, key_value, optional, override

MOE = f"{BLOCK}mlp."


def sparse_layers(reading: Reading) -> list[bool]:
    """Which layers have experts."""
    dense = reading.raw("mlp_only_layers", [])
    step = reading.size("decoder_sparse_step", 1)
    n_layers = reading.size("num_hidden_layers")
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(n_layers)]


def read_experts(reading: Reading, n_experts: int, top_k: int, width: int) -> dict[str, Any]:
    """The keywords are what the family's class holds by itself."""
    sparse = sparse_layers(reading)
    return {
        "num_experts": reading.size("num_experts", n_experts),
        "experts_per_token": reading.size("num_experts_per_tok", top_k),
        "norm_topk_prob": reading.flag("norm_topk_prob", False),
        "d_expert": reading.size("moe_intermediate_size", width),
        "expert_layers": None if all(sparse) else sparse,
    }


def write_experts(cfg: HookedTransformerConfig) -> dict[str, Any]:
    sparse = cfg.expert_layers or [True] * cfg.n_layers
    return {
        "num_experts": cfg.num_experts,
        "num_experts_per_tok": cfg.experts_per_token,
        "norm_topk_prob": cfg.norm_topk_prob,
        "moe_intermediate_size": cfg.d_expert or cfg.d_mlp,
        "mlp_only_layers": [layer for layer, has in enumerate(sparse) if not has],
        "decoder_sparse_step": 1,
    }


# --- Qwen2-MoE ----------------------------------------------------------------------------------


def read_qwen2(reading: Reading) -> dict[str, Any]:
    fields = llama.read_config(reading, n_kv=16, n_ctx=32768)
    n_layers = fields["n_layers"]
    window = reading.raw("sliding_window", 4096) or None  # 0 where windows are off
    below = reading.raw("max_window_layers", 28)
    slides = reading.flag("use_sliding_window", False)
    types = attn_types(reading, n_layers, [i % 2 == 0 and i < below for i in range(n_layers)])
    return {
        **fields,
        **windows(types, window if slides else None),
        **read_experts(reading, 60, 4, 1408),
        "d_shared_expert": reading.size("shared_expert_intermediate_size", 5632),
        "shared_expert_gate": True,
    }


def write_qwen2(cfg: HookedTransformerConfig, needs: Callable[[str], bool]) -> dict[str, Any]:
    return {
        **llama.write_without_biases(cfg, needs),
        **write_windows(cfg),
        **write_experts(cfg),
        "use_sliding_window": cfg.use_local_attn,
        "shared_expert_intermediate_size": cfg.d_shared_expert,
        "qkv_bias": any(needs(f"blocks.{{i}}.attn.{b}") for b in ("b_Q", "b_K", "b_V")),
    }


def qwen2_rows(cfg: HookedTransformerConfig, reading: Reading) -> list[Row]:
    bias = reading.flag("qkv_bias", True)
    dense = override(
        llama.rows_without_biases(cfg, reading),
        optional(bias, Map(f"{ATTN}q_proj.bias", "blocks.{i}.attn.b_Q", "(n h) -> n h")),
        optional(bias, Map(f"{ATTN}k_proj.bias", key_value(cfg, "b_K"), "(k h) -> k h")),
        optional(bias, Map(f"{ATTN}v_proj.bias", key_value(cfg, "b_V"), "(k h) -> k h")),
    )
    return with_experts(
        dense,
        sparse_layers(reading),
        router(f"{MOE}gate.weight"),
        *experts(f"{MOE}experts"),
        *shared_expert(f"{MOE}shared_expert"),
        Map(f"{MOE}shared_expert_gate.weight", f"{MLP}W_shared_gate", "1 m -> m 1"),
    )


# --- Qwen3-MoE ----------------------------------------------------------------------------------


def read_qwen3(reading: Reading) -> dict[str, Any]:
    reading.require("mlp_bias", False, "MLPs of this family have no biases")
    fields = llama.read_config(reading, n_kv=4, n_ctx=32768)
    window = reading.size("sliding_window", reading.if_missing("sliding_window", 4096))
    slides = reading.flag("use_sliding_window", False)
    return {
        **fields,
        **windows(["local"] * fields["n_layers"], window if slides else None),
        **read_experts(reading, 128, 8, 768),
        "use_qk_norm": True,
    }


def write_qwen3(cfg: HookedTransformerConfig, needs: Callable[[str], bool]) -> dict[str, Any]:
    written = {k: v for k, v in llama.write_config(cfg, needs).items() if k != "mlp_bias"}
    slides = {"use_sliding_window": cfg.use_local_attn, "sliding_window": cfg.window_size}
    return {**written, **write_experts(cfg), **slides}


def qwen3_rows(cfg: HookedTransformerConfig, reading: Reading) -> list[Row]:
    return with_experts(
        [*llama.rows(cfg, reading), *qwen3.qk_norms()],
        sparse_layers(reading),
        router(f"{MOE}gate.weight"),
        *experts(f"{MOE}experts"),
    )


QWEN2_MOE = replace(
    llama.LLAMA,
    model_type="qwen2_moe",
    hf_class="Qwen2MoeForCausalLM",
    read_config=read_qwen2,
    write_config=write_qwen2,
    rows=qwen2_rows,
    cosmetic=TRAINING_ONLY,
)
QWEN3_MOE = replace(
    llama.LLAMA,
    model_type="qwen3_moe",
    hf_class="Qwen3MoeForCausalLM",
    read_config=read_qwen3,
    write_config=write_qwen3,
    rows=qwen3_rows,
    aliases={"num_local_experts": "num_experts"},
    cosmetic={
        **TRAINING_ONLY,
        "max_window_layers": "is in published files; Hugging Face's class does not look at it",
    },
)
ARCHITECTURES = (QWEN2_MOE, QWEN3_MOE)
