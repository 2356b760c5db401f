"""CodeGen: GPT-J whose queries, values and keys, in this order, are fused in four parts."""

from dataclasses import replace
from typing import Any

from transformer_lens_lite.config import HookedTransformerConfig
from weights_conversion.families import gptj
from weights_conversion.fields import Reading
from weights_conversion.parts import qkv
from weights_conversion.table import Map, Row, Zeros, override

PARTS = 4  # as many machines as CodeGen was trained on; the number is nowhere in its config


def read_config(reading: Reading) -> dict[str, Any]:
    fields = gptj.read_config(reading)
    if fields["n_heads"] % PARTS:
        raise ValueError(
            f"{reading.where}: n_head={fields['n_heads']} is not a multiple of {PARTS}, so a head "
            "would be torn apart"
        )
    return fields


def rows(cfg: HookedTransformerConfig, reading: Reading) -> list[Row]:
    q, k, v = qkv(cfg, "W")
    fused = Map(
        f"{gptj.BLOCK}attn.qkv_proj.weight",
        (q, v, k),
        "(p s l h) m -> s p l m h",
        pieces=("p l m h -> (p l) m h",) * 3,
        sizes={"p": PARTS, "l": cfg.n_heads // PARTS},
    )
    return override(gptj.rows(cfg, reading), fused, *(Zeros(name, "n h") for name in qkv(cfg, "b")))


CODEGEN = replace(
    gptj.GPTJ,
    model_type="codegen",
    hf_class="CodeGenForCausalLM",
    read_config=read_config,
    rows=rows,
    ignore={
        **gptj.GPTJ.ignore,
        f"{gptj.BLOCK}attn.causal_mask": "the causal mask, which older transformers saved",
    },
)
ARCHITECTURES = (CODEGEN,)
