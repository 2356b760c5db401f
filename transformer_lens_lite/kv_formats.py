"""Key-value caches outside of this process and this library: files, and Hugging Face's class."""

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from transformer_lens_lite.config import HookedTransformerConfig

FORMAT = "transformer_lens_lite.KeyValueCache 1"


# --- files ----------------------------------------------------------------------------------------


def write(path: str | os.PathLike[str], tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    """A safetensors file: whole or not there."""
    from safetensors.torch import save_file

    path = Path(path)
    metadata = {"format": FORMAT, "facts": json.dumps(facts)}
    handle, unfinished = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".unfinished")
    os.close(handle)
    try:
        save_file({k: t.contiguous() for k, t in tensors.items()}, unfinished, metadata=metadata)
        Path(unfinished).replace(path)
    finally:
        Path(unfinished).unlink(missing_ok=True)


def read(
    path: str | os.PathLike[str], device: torch.device | str | None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, facts) of a file that `write` wrote; on the CPU the tensors are mapped from it.

    Raises: FileNotFoundError; ValueError for a damaged file, or one that holds something else.
    """
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        with safe_open(path, framework="pt", device=str(device or "cpu")) as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ValueError(f"its format is {metadata.get('format')!r}, not {FORMAT!r}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return tensors, json.loads(metadata["facts"])
    except (SafetensorError, ValueError, KeyError, OSError) as error:
        raise ValueError(f"{path} is not a saved KeyValueCache ({error})") from error


# --- Hugging Face ---------------------------------------------------------------------------------


def hf_cache(
    layers: list[tuple[Float[Tensor, "batch kv_head pos _"], Float[Tensor, "batch kv_head pos _"]]],
) -> Any:
    """A DynamicCache that holds these keys and values, every layer all of them."""
    from transformers import DynamicCache

    cache = DynamicCache()
    for layer, (keys, values) in enumerate(layers):
        cache.update(keys, values, layer)
    return cache


def layers_of_hf(
    cache: Any, cfg: HookedTransformerConfig
) -> Iterator[tuple[Float[Tensor, "batch kv_head pos _"], Float[Tensor, "batch kv_head pos _"]]]:
    """Keys and values of a Hugging Face cache, layer by layer. ValueError for what does not hold
    all positions, or is of another model's sizes."""
    if not hasattr(cache, "get_seq_length") or not hasattr(cache, "__iter__"):
        raise ValueError(
            f"from_hf takes a DynamicCache of transformers, got {type(cache).__name__}"
        )
    layers = [layer[:2] for layer in cache]
    if len(layers) != cfg.n_layers:
        raise ValueError(f"the cache has {len(layers)} layers, the config {cfg.n_layers}")
    length = max(cache.get_seq_length(i) for i in range(len(layers)))
    for i, ((keys, values), spec) in enumerate(zip(layers, cfg.block_specs(), strict=True)):
        if not isinstance(keys, Tensor) or not isinstance(values, Tensor) or keys.ndim != 4:
            raise ValueError(f"layer {i} holds no keys and values")
        if keys.shape[2] != length:
            raise ValueError(
                f"layer {i} holds {keys.shape[2]} of {length} positions: Hugging Face kept a "
                "window only. Fill a DynamicCache() made without config=: it keeps everything"
            )
        attention = spec.attention
        n_kv_heads = attention.n_kv_heads
        if keys.shape[1] == attention.n_heads > n_kv_heads and all(
            alike_in_groups(t, n_kv_heads) for t in (keys, values)
        ):  # as Falcon keeps them
            keys, values = (grouped(t, n_kv_heads) for t in (keys, values))
        expected = (attention.n_kv_heads, attention.d_head, attention.d_value)
        got = (keys.shape[1], keys.shape[3], values.shape[3])
        if got != expected:
            hint = "" if attention.latent is None else " (latents of latent attention are neither)"
            raise ValueError(
                f"layer {i} holds (kv heads, d_head, d_value) {got}, the config says {expected}"
                f"{hint}"
            )
        times = attention.n_heads // attention.n_kv_heads
        if cfg.ungroup_grouped_query_attention and times > 1:  # a key for each query head
            keys, values = (t.repeat_interleave(times, 1) for t in (keys, values))
        yield keys, values


def hf_caches_latents() -> bool:
    """Whether this version of transformers caches the latents of DeepSeek's attention, as those do
    in which keys are made of them behind the cache."""
    from transformers.models.deepseek_v3 import modeling_deepseek_v3

    return hasattr(modeling_deepseek_v3.DeepseekV3Attention, "expand_kv")


def grouped(
    stored: Float[Tensor, "batch head pos _"], n_kv_heads: int
) -> Float[Tensor, "batch kv_head pos _"]:
    """One of each group's keys or values, which are the same while a model is ungrouped. ValueError
    where an edit has made them different."""
    if not alike_in_groups(stored, n_kv_heads):
        raise ValueError(
            "the query heads of a group have different keys or values here (of an ungrouped model, "
            "edited): Hugging Face's cache has one for all of them"
        )
    return stored.unflatten(1, (n_kv_heads, -1))[:, :, 0]


def alike_in_groups(stored: Float[Tensor, "batch head pos _"], n_kv_heads: int) -> bool:
    """Whether the heads of each group have the same keys or values."""
    by_group = stored.unflatten(1, (n_kv_heads, -1))
    return bool((by_group == by_group[:, :, :1]).all())


def as_mask(mask: Any) -> Int[Tensor, "..."]:
    """A copy of an attention mask, as integers. ValueError for anything but a tensor of zeros and
    ones."""
    if not isinstance(mask, Tensor):
        raise ValueError(f"attention_mask must be a tensor, got {type(mask).__name__}")
    # looking at values would break a compiled graph
    if not torch.compiler.is_compiling() and bool(((mask != 0) & (mask != 1)).any()):
        raise ValueError(
            "attention_mask must hold 1 for tokens and 0 for padding; it holds other values"
        )
    return mask.to(torch.long, copy=True)


def checked_mask(
    mask: Int[Tensor, "batch pos"] | None, batch: int, length: int
) -> Int[Tensor, "batch pos"] | None:
    """The mask where anything is padding. ValueError when it is not [batch, length]."""
    if mask is None:
        return None
    mask = as_mask(mask)
    if list(mask.shape) != [batch, length]:
        raise ValueError(
            f"attention_mask must be [{batch}, {length}], as the cache is, got {list(mask.shape)}"
        )
    return None if bool(mask.all()) else mask
