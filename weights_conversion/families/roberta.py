"""RoBERTa: BERT whose positions start behind the padding token's row. XLM-RoBERTa and CamemBERT are
the same model with other vocabularies."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from transformer_lens_lite.config import HookedTransformerConfig
from weights_conversion.families import bert
from weights_conversion.families.bert import POOLER, POSITION_IDS
from weights_conversion.fields import Reading, because
from weights_conversion.table import Architecture, Map, Row


def read_config(reading: Reading) -> dict[str, Any]:
    pad_id = reading.raw("pad_token_id", 1)
    if not isinstance(pad_id, int) or pad_id < 0:
        raise ValueError(
            f"{reading.where}: 'pad_token_id' must be an integer of at least 0 (positions start "
            f"behind it), got {pad_id!r}"
        )
    rows = reading.size("max_position_embeddings", 512)
    if rows <= pad_id + 1:
        raise ValueError(
            f"{reading.where}: max_position_embeddings={rows} leaves no position behind "
            f"pad_token_id={pad_id}"
        )
    return {
        **bert.read_encoder(reading),
        **bert.read_head(reading, "gelu"),  # whatever hidden_act says
        "reserved_positions": pad_id + 1,
        "n_ctx": rows - pad_id - 1,
    }


def write_config(
    cfg: HookedTransformerConfig, needs: Callable[[str], bool], *, stem: str = "Roberta"
) -> dict[str, Any]:
    if not cfg.reserved_positions:
        raise ValueError("reserved_positions=0: positions start behind the padding token's row")
    return {
        **bert.write_encoder(cfg),
        **bert.write_head(cfg, stem),
        "pad_token_id": cfg.reserved_positions - 1,
        "max_position_embeddings": cfg.n_ctx + cfg.reserved_positions,
    }


def rows(cfg: HookedTransformerConfig, reading: Reading) -> list[Row]:
    base, head = "roberta." if cfg.unembedding else "", "lm_head."
    positions = Map(
        f"{base}embeddings.position_embeddings.weight",
        ("pos_embed.W_reserved", "pos_embed.W_pos"),
        "a m",
        cut=("r", "c"),
    )
    result = [*bert.encoder_rows(cfg, base), positions]
    if not cfg.unembedding:
        return result
    return [
        *result,
        *bert.transform(cfg, f"{head}dense", f"{head}layer_norm"),
        *bert.unembedding(
            cfg,
            embed=f"{base}embeddings.word_embeddings.weight",
            matrix=f"{head}decoder.weight",
            bias=f"{head}decoder.bias",
            other_bias=f"{head}bias",
        ),
    ]


ROBERTA = Architecture(
    model_type="roberta",
    hf_class="RobertaForMaskedLM",
    headless_class="RobertaModel",
    head_prefix="lm_head.",
    read_config=read_config,
    write_config=write_config,
    rows=rows,
    ignore={
        **because(POOLER, "roberta.pooler.dense.weight roberta.pooler.dense.bias"),
        "roberta.embeddings.position_ids": POSITION_IDS,
    },
    cosmetic=bert.COSMETIC,
    optional_prefix="roberta.",
    old_names=bert.BERT.old_names,
)
XLM_ROBERTA, CAMEMBERT = (
    replace(
        ROBERTA,
        model_type=model_type,
        hf_class=f"{stem}ForMaskedLM",
        headless_class=f"{stem}Model",
        write_config=partial(write_config, stem=stem),
    )
    for model_type, stem in (("xlm-roberta", "XLMRoberta"), ("camembert", "Camembert"))
)
ARCHITECTURES = (ROBERTA, XLM_ROBERTA, CAMEMBERT)
