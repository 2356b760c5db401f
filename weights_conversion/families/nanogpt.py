"""nanoGPT and minGPT: GPT-2 with matrices stored [out, in]; checkpoints of their training scripts.

Neither is a Hugging Face family. nanoGPT's `ckpt.pt` brings its sizes along; for minGPT give them:
`from_pretrained("model.pt", hf_config={"model_type": "mingpt", "n_layer": 3, …})`.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from transformer_lens_lite.config import HookedTransformerConfig
from weights_conversion.families import gpt2
from weights_conversion.families.gpt2 import BLOCK
from weights_conversion.fields import Reading, because, write_activation
from weights_conversion.table import Map, Row, optional

ATTN, MLP = "blocks.{i}.attn.", "blocks.{i}.mlp."


def config_of(held: Mapping[str, Any]) -> dict[str, Any] | None:
    """The config of what nanoGPT's training script saved; None where its sizes are not there."""
    sizes = held.get("model_args")
    return {"model_type": "nanogpt", **sizes} if isinstance(sizes, Mapping) else None


def read(reading: Reading, act_fn: str, tied: bool) -> dict[str, Any]:
    d_model, n_heads = reading.size("n_embd"), reading.size("n_head")
    if d_model % n_heads:
        raise ValueError(f"{reading.where}: n_embd={d_model} is not a multiple of n_head={n_heads}")
    return {
        "n_layers": reading.size("n_layer"),
        "d_model": d_model,
        "n_heads": n_heads,
        "d_head": d_model // n_heads,
        "d_mlp": 4 * d_model,
        "d_vocab": reading.size("vocab_size"),
        "n_ctx": reading.size("block_size"),
        "act_fn": reading.activation("activation_function", act_fn),
        "eps": reading.number("layer_norm_epsilon", 1e-5),
        "tie_word_embeddings": reading.flag("tie_word_embeddings", tied),
        "normalization_type": "LN",
        "positional_embedding_type": "standard",
    }


def read_nano(reading: Reading) -> dict[str, Any]:
    return read(reading, "gelu", True)


def read_min(reading: Reading) -> dict[str, Any]:
    return read(reading, "gelu_new", False)


def write_config(cfg: HookedTransformerConfig, needs: Callable[[str], bool]) -> dict[str, Any]:
    if cfg.d_mlp != 4 * cfg.d_model:
        raise ValueError(f"d_mlp={cfg.d_mlp} is not 4 * d_model")
    return {
        "n_layer": cfg.n_layers,
        "n_embd": cfg.d_model,
        "n_head": cfg.n_heads,
        "vocab_size": cfg.d_vocab,
        "block_size": cfg.n_ctx,
        "activation_function": write_activation(cfg),
        "layer_norm_epsilon": cfg.eps,
        "tie_word_embeddings": cfg.tie_word_embeddings,
        "bias": any(needs(name) for name in ("ln_final.b", f"{ATTN}b_O", f"{MLP}b_out")),
    }


def rows(cfg: HookedTransformerConfig, reading: Reading) -> list[Row]:
    bias = reading.flag("bias", True)
    transposed = {
        "attn.c_attn.weight": "(s n h) m -> s n m h",
        "attn.c_proj.weight": "m (n h) -> n h m",
        "mlp.c_fc.weight": "f m -> m f",
        "mlp.c_proj.weight": "m f -> f m",
    }
    result: list[Row] = []
    for row in gpt2.rows(cfg, reading):
        if not isinstance(row, Map):
            result.append(row)
            continue
        name = row.hf.removeprefix(BLOCK)
        row = replace(row, pattern=transposed.get(name, row.pattern))
        if not row.hf.endswith(".bias") or bias:
            result.append(row)
        else:
            shape = "n h" if "c_attn" in row.hf else row.pattern.split("->")[-1].strip()
            natives = row.native if isinstance(row.native, tuple) else (row.native,)
            result += [optional(False, replace(row, native=n, pattern=shape)) for n in natives]
    return result


NANOGPT = replace(
    gpt2.GPT2,
    model_type="nanogpt",
    hf_class="GPT",
    read_config=read_nano,
    write_config=write_config,
    rows=rows,
    in_transformers=False,
    cosmetic={"dropout": "only matters for training"},
    aliases={},
)
MINGPT = replace(
    NANOGPT,
    model_type="mingpt",
    read_config=read_min,
    cosmetic=because("only matters for training", "embd_pdrop resid_pdrop attn_pdrop"),
)
ARCHITECTURES = (NANOGPT, MINGPT)
