"""GPT-OSS: attention sinks, windows in every other layer, YaRN, and clamped experts with biases."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformer_lens_lite.config import HookedTransformerConfig
from weights_conversion.experts import EXPERT, MLP, router, with_experts
from weights_conversion.families import llama
from weights_conversion.families.llama import ATTN, BLOCK
from weights_conversion.families.mixtral import TRAINING_ONLY
from weights_conversion.fields import Reading, attn_types, because, windows, write_windows
from weights_conversion.table import Map, Row

MOE = f"{BLOCK}mlp."
ALPHA = 1.702  # of `quick_gelu`
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def read_config(reading: Reading) -> dict[str, Any]:
    reading.require("mlp_bias", False, "experts of this family always have biases")
    reading.require("hidden_act", "silu", "the gate of this family is x * sigmoid(alpha * x)")
    alpha = reading.number("swiglu_alpha", ALPHA)
    if reading.raw("rope_parameters", reading.raw("rope_scaling")) is None:
        reading.config["rope_parameters"] = dict(YARN)
    fields = llama.read_config(reading, theta=150000.0, n_kv=8, d_head=64, n_ctx=131072)
    n_layers = fields["n_layers"]
    window = reading.size("sliding_window", reading.if_missing("sliding_window", 128))
    types = attn_types(reading, n_layers, [i % 2 == 0 for i in range(n_layers)])
    return {
        **fields,
        **windows(types, window),
        "eps": reading.number("rms_norm_eps", 1e-5),
        "use_attention_sinks": True,
        "act_fn": "quick_gelu" if alpha == ALPHA else "silu",
        "expert_gate_slope": 1.0 if alpha == ALPHA else alpha,
        "gated_mlp_biases": True,
        "num_experts": reading.size("num_local_experts", 128),
        "experts_per_token": reading.size("num_experts_per_tok", 4),
        "norm_topk_prob": True,  # a softmax over the chosen logits is the same
        "router_bias": True,
        "expert_limit": reading.number("swiglu_limit", 7.0),
        "expert_offset": 1.0,
    }


def write_config(cfg: HookedTransformerConfig, needs: Callable[[str], bool]) -> dict[str, Any]:
    written = {k: v for k, v in llama.write_config(cfg, needs).items() if k != "mlp_bias"}
    return {
        **written,
        **write_windows(cfg),
        # null would be the family's own scaling
        "rope_scaling": written["rope_scaling"] or {"rope_type": "default"},
        "hidden_act": "silu",
        "num_local_experts": cfg.num_experts,
        "num_experts_per_tok": cfg.experts_per_token,
        "swiglu_limit": cfg.expert_limit,
        "swiglu_alpha": ALPHA if cfg.act_fn == "quick_gelu" else cfg.expert_gate_slope,
    }


def rows(cfg: HookedTransformerConfig, reading: Reading) -> list[Row]:
    inner = [f"{EXPERT}{name}" for name in ("W_gate", "W_in", "b_gate", "b_up")]
    reading.flag("attention_bias", True)
    return with_experts(
        [
            *llama.rows(cfg, reading),
            Map(f"{ATTN}sinks", "blocks.{i}.attn.sinks", "n"),
        ],
        [True],
        router(f"{MOE}router.weight"),
        Map(f"{MOE}router.bias", f"{MLP}b_router", "e"),
        # gate and up alternate
        Map(f"{MOE}experts.gate_up_proj", tuple(inner[:2]), "e m (x s) -> e s m x"),
        Map(f"{MOE}experts.gate_up_proj_bias", tuple(inner[2:]), "e (x s) -> e s x"),
        Map(f"{MOE}experts.down_proj", f"{EXPERT}W_out", "e x m"),
        Map(f"{MOE}experts.down_proj_bias", f"{EXPERT}b_out", "e m"),
    )


GPT_OSS = replace(
    llama.LLAMA,
    model_type="gpt_oss",
    hf_class="GptOssForCausalLM",
    read_config=read_config,
    write_config=write_config,
    rows=rows,
    aliases={"num_experts": "num_local_experts"},
    cosmetic={
        **TRAINING_ONLY,
        **because(
            "is said by another field, which Hugging Face's class looks at",
            "experts_per_token initial_context_length",
        ),
    },
)
ARCHITECTURES = (GPT_OSS,)
