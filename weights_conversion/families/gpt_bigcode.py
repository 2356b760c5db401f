"""GPT-BigCode (StarCoder, SantaCoder): GPT-2 whose heads share one key and value."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformer_lens_lite.config import HookedTransformerConfig
from weights_conversion.families import gpt2
from weights_conversion.fields import Reading, because
from weights_conversion.parts import mlp, out_projection, qkv
from weights_conversion.table import Map, Row, override

BLOCK = gpt2.BLOCK
BY_LAYER = "scale_attn_by_inverse_layer_idx"


def read_config(reading: Reading) -> dict[str, Any]:
    reading.require(BY_LAYER, False, "Hugging Face's class does not look at it")
    fields = gpt2.read_config(reading, act="gelu_pytorch_tanh")
    shared = reading.flag("multi_query", True) and fields["n_heads"] > 1
    return {**fields, "n_key_value_heads": 1 if shared else None}


def write_config(cfg: HookedTransformerConfig, needs: Callable[[str], bool]) -> dict[str, Any]:
    written = gpt2.write_config(cfg, needs)
    return {
        **{name: value for name, value in written.items() if name != BY_LAYER},
        "multi_query": cfg.n_key_value_heads == 1,
    }


def rows(cfg: HookedTransformerConfig, reading: Reading) -> list[Row]:
    # shared: all queries, one key, one value; else the three of one head after another
    shared = cfg.n_key_value_heads is not None
    layout = ("(a h)", "a") if shared else ("(n s h)", "s n")
    cut = ("n", "k", "k") if shared else ()
    hf, (left, right) = f"{BLOCK}attn.c_attn", layout
    return override(
        gpt2.rows(cfg, reading),
        Map(f"{hf}.weight", qkv(cfg, "W"), f"{left} m -> {right} m h", cut=cut),
        Map(f"{hf}.bias", qkv(cfg, "b"), f"{left} -> {right} h", cut=cut),
        *out_projection(f"{BLOCK}attn.c_proj", bias=True),
        *mlp(f"{BLOCK}mlp.c_fc", f"{BLOCK}mlp.c_proj"),
    )


GPT_BIGCODE = replace(
    gpt2.GPT2,
    model_type="gpt_bigcode",
    hf_class="GPTBigCodeForCausalLM",
    read_config=read_config,
    write_config=write_config,
    rows=rows,
    cosmetic={
        "num_key_value_heads": "follows from multi_query",
        **because(
            "precision and speed of Hugging Face's own computation",
            "attention_softmax_in_fp32 scale_attention_softmax_in_fp32 inference_runner "
            "max_batch_size pad_key_length pre_allocate_kv_cache validate_runner_input",
        ),
    },
)
ARCHITECTURES = (GPT_BIGCODE,)
