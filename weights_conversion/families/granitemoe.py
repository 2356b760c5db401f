"""GraniteMoE: Granite with experts, whose matrices are one tensor per layer."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformer_lens_lite.config import HookedTransformerConfig
from weights_conversion.experts import EXPERT, router, with_experts
from weights_conversion.families import granite, llama
from weights_conversion.families.mixtral import MOE, TRAINING_ONLY
from weights_conversion.fields import Reading
from weights_conversion.table import Map, Row


def read_config(reading: Reading) -> dict[str, Any]:
    reading.require("mlp_bias", False, "experts of this family have no biases")
    return {
        **granite.read_config(reading),
        "num_experts": reading.size("num_local_experts", 8),
        "experts_per_token": reading.size("num_experts_per_tok", 2),
        "norm_topk_prob": True,  # a softmax over the chosen logits is the same
    }


def write_config(cfg: HookedTransformerConfig, needs: Callable[[str], bool]) -> dict[str, Any]:
    written = {k: v for k, v in granite.write_config(cfg, needs).items() if k != "mlp_bias"}
    return {
        **written,
        "num_local_experts": cfg.num_experts,
        "num_experts_per_tok": cfg.experts_per_token,
    }


def rows(cfg: HookedTransformerConfig, reading: Reading) -> list[Row]:
    gate_and_up = (f"{EXPERT}W_gate", f"{EXPERT}W_in")
    return with_experts(
        llama.rows(cfg, reading),
        [True],
        router(f"{MOE}router.layer.weight"),
        Map(f"{MOE}input_linear.weight", gate_and_up, "e (s x) m -> e s m x"),
        Map(f"{MOE}output_linear.weight", f"{EXPERT}W_out", "e m x -> e x m"),
    )


GRANITEMOE = replace(
    granite.GRANITE,
    model_type="granitemoe",
    hf_class="GraniteMoeForCausalLM",
    read_config=read_config,
    write_config=write_config,
    rows=rows,
    aliases={"num_experts": "num_local_experts"},
    cosmetic=TRAINING_ONLY,
)
ARCHITECTURES = (GRANITEMOE,)
