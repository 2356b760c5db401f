"""Arcee (AFM): Llama with a plain MLP and squared ReLU."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformer_lens_lite.config import HookedTransformerConfig
from weights_conversion.families import llama
from weights_conversion.fields import Reading
from weights_conversion.parts import mlp
from weights_conversion.table import Row, override, without

GATED = tuple(f"blocks.{{i}}.mlp.{name}" for name in ("W_gate", "b_gate", "b_up"))


def plain_mlp(fields: dict[str, Any], act_fn: str) -> dict[str, Any]:
    """Our config's fields of Llama, with an MLP that has no gate."""
    return {**fields, "gated_mlp": False, "gated_mlp_biases": False, "act_fn": act_fn}


def read_config(reading: Reading) -> dict[str, Any]:
    fields = llama.read_config(reading, n_ctx=4096)
    eps = reading.number("rms_norm_eps", 1e-5)
    return {**plain_mlp(fields, reading.activation("hidden_act", "relu2")), "eps": eps}


def write_config(cfg: HookedTransformerConfig, needs: Callable[[str], bool]) -> dict[str, Any]:
    bias = any(needs(f"blocks.{{i}}.mlp.{name}") for name in ("b_in", "b_out"))
    return {**llama.write_config(cfg, needs), "mlp_bias": bias}


def plain_rows(cfg: HookedTransformerConfig, reading: Reading, bias: bool) -> list[Row]:
    """Those of Llama, with an MLP that has no gate."""
    rows = without(llama.rows(cfg, reading), *GATED)
    return override(rows, *mlp(f"{llama.MLP}up_proj", f"{llama.MLP}down_proj", bias))


def rows(cfg: HookedTransformerConfig, reading: Reading) -> list[Row]:
    return plain_rows(cfg, reading, reading.flag("mlp_bias", False))


ARCEE = replace(
    llama.LLAMA,
    model_type="arcee",
    hf_class="ArceeForCausalLM",
    read_config=read_config,
    write_config=write_config,
    rows=rows,
)
ARCHITECTURES = (ARCEE,)
