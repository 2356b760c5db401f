"""EXAONE 4: norms behind sublayers and on queries and keys; only sliding layers turn, if any do."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformer_lens_lite.config import HookedTransformerConfig
from weights_conversion.families import llama
from weights_conversion.families.olmo import post_norms
from weights_conversion.families.qwen3 import qk_norms
from weights_conversion.fields import Reading, attn_types, windows, write_windows
from weights_conversion.table import Row, override


def read_config(reading: Reading) -> dict[str, Any]:
    fields = llama.read_config(reading, n_kv=32)
    n_layers = fields["n_layers"]
    window = reading.size("sliding_window", reading.if_missing("sliding_window", 4096))
    pattern = reading.raw("sliding_window_pattern", 4)  # text, beside layer_types that say it all
    every = pattern if isinstance(pattern, int) and pattern else 4
    if not reading.names("layer_types") and (window is None or every != pattern):
        raise ValueError(
            f"{reading.where}: without layer_types, sliding_window={window!r} and "
            f"sliding_window_pattern={pattern!r} do not say which layers slide"
        )
    types = attn_types(reading, n_layers, [(i + 1) % every != 0 for i in range(n_layers)])
    turns = None if window is None else [each == "local" for each in types]
    return {
        **fields,
        "eps": reading.number("rms_norm_eps", 1e-5),
        "norm_place": "post",
        "use_qk_norm": True,
        "rotary_layers": turns,
        **windows(types, window),
    }


def write_config(cfg: HookedTransformerConfig, needs: Callable[[str], bool]) -> dict[str, Any]:
    written = {**llama.write_without_biases(cfg, needs), **write_windows(cfg)}
    return written if cfg.rotary_layers is not None else {**written, "sliding_window": None}


def rows(cfg: HookedTransformerConfig, reading: Reading) -> list[Row]:
    return [*override(llama.rows_without_biases(cfg, reading), *post_norms()), *qk_norms()]


EXAONE4 = replace(
    llama.LLAMA,
    model_type="exaone4",
    hf_class="Exaone4ForCausalLM",
    read_config=read_config,
    write_config=write_config,
    rows=rows,
)
ARCHITECTURES = (EXAONE4,)
