"""Ministral 3: Mistral whose queries grow with their position; far by YaRN."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformer_lens_lite.config import HookedTransformerConfig
from weights_conversion.families import llama, mistral
from weights_conversion.fields import Reading, windows

N_CTX = 262144
# what Hugging Face's class holds by itself
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}

WITH_LENGTH = ("llama3", "yarn", "longrope")  # Hugging Face adds it to their parameters


def read_config(reading: Reading) -> dict[str, Any]:
    scaling = reading.mapping("rope_scaling") or reading.mapping("rope_parameters") or dict(ROPE)
    where = f"{reading.where}: rope parameters"
    beta = scaling.pop("llama_4_scaling_beta", None)
    length = scaling.get("original_max_position_embeddings")
    scaling.pop("max_position_embeddings", None)  # which the field beside the dict says
    if isinstance(beta, bool) or not isinstance(beta, (int, float)):
        raise ValueError(f"{where}: llama_4_scaling_beta must be a number, got {beta!r}")
    config = {name: value for name, value in reading.config.items() if name != "rope_parameters"}
    own = Reading({**config, "rope_scaling": scaling}, reading.where)
    fields = llama.read_config(own, n_kv=8, d_head=128, n_ctx=N_CTX)
    reading.was_read |= own.was_read
    if length is None and (fields["rotary_scaling"] or {}).get("rope_type") in WITH_LENGTH:
        length = fields["n_ctx"]
    if not isinstance(length, int):
        raise ValueError(f"{where}: original_max_position_embeddings missing")
    window = reading.size("sliding_window", None)
    return {
        **fields,
        "eps": reading.number("rms_norm_eps", 1e-5),
        "query_growth": {"scale": float(beta), "length": length} if beta else None,
        **windows(["local"] * fields["n_layers"], window),
    }


def write_config(cfg: HookedTransformerConfig, needs: Callable[[str], bool]) -> dict[str, Any]:
    written = mistral.write_config(cfg, needs)
    growth = cfg.query_growth or {"scale": 0.0, "length": cfg.n_ctx}
    scaling = written["rope_scaling"] or {"rope_type": "default"}
    scaling.setdefault("original_max_position_embeddings", growth["length"])
    return {**written, "rope_scaling": {**scaling, "llama_4_scaling_beta": growth["scale"]}}


MINISTRAL3 = replace(
    mistral.MISTRAL,
    model_type="ministral3",
    hf_class="Ministral3ForCausalLM",
    read_config=read_config,
    write_config=write_config,
)
ARCHITECTURES = (MINISTRAL3,)
