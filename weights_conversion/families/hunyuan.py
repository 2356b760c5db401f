"""HunYuan (dense): queries and keys are normed after they turn; a base stretched by `alpha`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformer_lens_lite.config import HookedTransformerConfig
from weights_conversion.families import llama
from weights_conversion.families.qwen3 import qk_norms
from weights_conversion.fields import Reading
from weights_conversion.table import Row


def read_config(reading: Reading) -> dict[str, Any]:
    reading.require("mlp_bias", False, "MLPs of this family have no biases")
    config, alpha = without_alpha(reading)
    own = Reading(config, reading.where)
    fields = llama.read_config(own)
    reading.was_read |= own.was_read
    if alpha is not None:
        dim = fields["d_head"]
        fields["rotary_base"] *= alpha ** (dim / (dim - 2))
    return {
        **fields,
        "eps": reading.number("rms_norm_eps", 1e-5),
        "use_qk_norm": True,
        "qk_norm_after_rotary": True,
    }


def without_alpha(reading: Reading) -> tuple[dict[str, Any], float | None]:
    """The config in Llama's words, and `alpha`: dynamic scaling with one is a larger base."""
    name = "rope_scaling" if reading.mapping("rope_scaling") else "rope_parameters"
    scaling = reading.mapping(name)
    alpha = scaling.pop("alpha", None)
    if scaling.get("rope_type", scaling.get("type")) != "dynamic" or not alpha:
        return {**reading.config, name: scaling}, None
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not alpha > 0:
        raise ValueError(f"{reading.where}: {name}: alpha must be a positive number, got {alpha!r}")
    theta = {key: scaling[key] for key in ("rope_theta",) if key in scaling}
    return {**reading.config, name: {"rope_type": "default", **theta}}, alpha


def write_config(cfg: HookedTransformerConfig, needs: Callable[[str], bool]) -> dict[str, Any]:
    written = llama.write_config(cfg, needs)
    return {name: value for name, value in written.items() if name != "mlp_bias"}


def rows(cfg: HookedTransformerConfig, reading: Reading) -> list[Row]:
    return [*llama.rows(cfg, reading), *qk_norms("query_layernorm", "key_layernorm")]


HUNYUAN = replace(
    llama.LLAMA,
    model_type="hunyuan_v1_dense",
    hf_class="HunYuanDenseV1ForCausalLM",
    read_config=read_config,
    write_config=write_config,
    rows=rows,
    cosmetic={"eod_token_id": "belongs to the tokenizer"},
)
ARCHITECTURES = (HUNYUAN,)
