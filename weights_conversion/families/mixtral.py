"""Mixtral: Mistral with experts, of which the best two share a token."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformer_lens_lite.config import HookedTransformerConfig
from weights_conversion.experts import experts, router, with_experts
from weights_conversion.families import llama, mistral
from weights_conversion.families.llama import BLOCK
from weights_conversion.fields import Reading, windows
from weights_conversion.table import Row

MOE = f"{BLOCK}block_sparse_moe."
TRAINING_ONLY = {
    "output_router_logits": "what Hugging Face's forward returns",
    "router_aux_loss_coef": "only matters for training: the weight of a loss",
}


def read_config(reading: Reading) -> dict[str, Any]:
    fields = llama.read_config(reading, theta=1000000.0, n_kv=8, n_ctx=mistral.N_CTX)
    window = reading.size("sliding_window", None)
    return {
        **fields,
        **windows(["local"] * fields["n_layers"], window),
        "eps": reading.number("rms_norm_eps", 1e-5),
        "num_experts": reading.size("num_local_experts", 8),
        "experts_per_token": reading.size("num_experts_per_tok", 2),
        "norm_topk_prob": True,
    }


def write_config(cfg: HookedTransformerConfig, needs: Callable[[str], bool]) -> dict[str, Any]:
    return {
        **mistral.write_config(cfg, needs),
        "num_local_experts": cfg.num_experts,
        "num_experts_per_tok": cfg.experts_per_token,
    }


def rows(cfg: HookedTransformerConfig, reading: Reading) -> list[Row]:
    return with_experts(
        llama.rows_without_biases(cfg, reading),
        [True],
        router(f"{MOE}gate.weight"),
        *experts(f"{MOE}experts", "w1", "w3", "w2"),
    )


MIXTRAL = replace(
    mistral.MISTRAL,
    model_type="mixtral",
    hf_class="MixtralForCausalLM",
    read_config=read_config,
    write_config=write_config,
    rows=rows,
    aliases={"num_experts": "num_local_experts"},
    cosmetic={
        **TRAINING_ONLY,
        "router_jitter_noise": "only matters for training: noise on the router's input",
    },
)
ARCHITECTURES = (MIXTRAL,)
