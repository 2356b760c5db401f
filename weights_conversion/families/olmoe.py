"""OLMoE: 64 small experts in every layer; queries and keys are normalised over all heads."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformer_lens_lite.config import HookedTransformerConfig
from weights_conversion.experts import experts, router, with_experts
from weights_conversion.families import llama, qwen3
from weights_conversion.families.llama import BLOCK
from weights_conversion.families.mixtral import TRAINING_ONLY
from weights_conversion.fields import Reading
from weights_conversion.table import Row

MOE = f"{BLOCK}mlp."


def read_config(reading: Reading) -> dict[str, Any]:
    reading.require("mlp_bias", False, "experts of this family have no biases")
    fields = llama.read_config(reading, n_ctx=4096)
    if fields["d_head"] * fields["n_heads"] != fields["d_model"]:
        raise ValueError(f"{reading.where}: head_dim must be hidden_size / num_attention_heads")
    return {
        **fields,
        "eps": reading.number("rms_norm_eps", 1e-5),
        "clip_qkv": reading.number("clip_qkv", None),
        "use_qk_norm": True,
        "qk_norm_over": "all_heads",
        "num_experts": reading.size("num_experts", 64),
        "experts_per_token": reading.size("num_experts_per_tok", 8),
        "norm_topk_prob": reading.flag("norm_topk_prob", False),
    }


def write_config(cfg: HookedTransformerConfig, needs: Callable[[str], bool]) -> dict[str, Any]:
    written = llama.write_config(cfg, needs)
    return {
        **{k: v for k, v in written.items() if k not in ("mlp_bias", "head_dim")},
        "clip_qkv": cfg.clip_qkv,
        "num_experts": cfg.num_experts,
        "num_experts_per_tok": cfg.experts_per_token,
        "norm_topk_prob": cfg.norm_topk_prob,
    }


def rows(cfg: HookedTransformerConfig, reading: Reading) -> list[Row]:
    return with_experts(
        [*llama.rows(cfg, reading), *qwen3.qk_norms(pattern="(n h)")],
        [True],
        router(f"{MOE}gate.weight"),
        *experts(f"{MOE}experts"),
    )


OLMOE = replace(
    llama.LLAMA,
    model_type="olmoe",
    hf_class="OlmoeForCausalLM",
    read_config=read_config,
    write_config=write_config,
    rows=rows,
    cosmetic=TRAINING_ONLY,
)
ARCHITECTURES = (OLMOE,)
