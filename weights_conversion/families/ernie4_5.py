"""ERNIE 4.5 (dense): Llama that turns adjacent channels, with biases everywhere or nowhere."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformer_lens_lite.config import HookedTransformerConfig
from weights_conversion.families import llama
from weights_conversion.fields import Reading
from weights_conversion.table import Row


def read_config(reading: Reading) -> dict[str, Any]:
    fields = llama.read_config(as_llama(reading), n_kv=2, d_head=128, n_ctx=131072, theta=5e5)
    return {
        **fields,
        "eps": reading.number("rms_norm_eps", 1e-5),
        "tie_word_embeddings": reading.flag("tie_word_embeddings", True),
        "rotary_adjacent_pairs": True,
    }


def as_llama(reading: Reading) -> Reading:
    """The same reading, in which `use_bias` is known by Llama's two names."""
    for name in ("attention_bias", "mlp_bias"):
        reading.require(name, False, "this family has use_bias")
    bias = reading.flag("use_bias", False)
    own = Reading({**reading.config, "attention_bias": bias, "mlp_bias": bias}, reading.where)
    own.was_read = reading.was_read
    return own


def write_config(cfg: HookedTransformerConfig, needs: Callable[[str], bool]) -> dict[str, Any]:
    with_biases = llama.write_config(cfg, needs)
    bias = with_biases["attention_bias"] or with_biases["mlp_bias"]
    return {**llama.write_without_biases(cfg, needs), "use_bias": bias}


def rows(cfg: HookedTransformerConfig, reading: Reading) -> list[Row]:
    return llama.rows(cfg, as_llama(reading))


ERNIE4_5 = replace(
    llama.LLAMA,
    model_type="ernie4_5",
    hf_class="Ernie4_5ForCausalLM",
    remote_stem="ernie45",
    read_config=read_config,
    write_config=write_config,
    rows=rows,
)
ARCHITECTURES = (ERNIE4_5,)
