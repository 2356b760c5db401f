"""SmolLM3: some layers do not turn their queries and keys at all (NoPE)."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformer_lens_lite.config import HookedTransformerConfig
from weights_conversion.families import llama
from weights_conversion.fields import Reading, attn_types, windows, write_windows


def read_config(reading: Reading) -> dict[str, Any]:
    fields = llama.read_config(reading, n_kv=4, n_ctx=32768, theta=2e6)
    n_layers = fields["n_layers"]
    every = reading.size("no_rope_layer_interval", 4)
    turns = reading.raw("no_rope_layers", [(i + 1) % every != 0 for i in range(n_layers)])
    turns = [bool(turn) for turn in turns][:n_layers]  # the config may list more layers
    window = reading.size("sliding_window", None)
    slides = reading.flag("use_sliding_window", False) and window is not None
    types = attn_types(reading, n_layers, [slides and not turn for turn in turns])
    if "local" in types and not slides:
        raise ValueError(
            f"{reading.where}: layer_types has sliding layers, but use_sliding_window or "
            "sliding_window is off: some of Hugging Face's attention functions slide, some do not"
        )
    return {
        **fields,
        "tie_word_embeddings": reading.flag("tie_word_embeddings", True),
        "rotary_layers": turns,
        **windows(types, window),
    }


def write_config(cfg: HookedTransformerConfig, needs: Callable[[str], bool]) -> dict[str, Any]:
    turns = cfg.rotary_layers or [True] * cfg.n_layers
    return {
        **llama.write_config(cfg, needs),
        "no_rope_layers": [int(turn) for turn in turns],
        **write_windows(cfg),
        "use_sliding_window": cfg.use_local_attn,
    }


SMOLLM3 = replace(
    llama.LLAMA,
    model_type="smollm3",
    hf_class="SmolLM3ForCausalLM",
    read_config=read_config,
    write_config=write_config,
    cosmetic={
        "max_window_layers": "is in the first file; Hugging Face's class does not look at it"
    },
)
ARCHITECTURES = (SMOLLM3,)
