"""What a forward pass left behind: `ActivationCache`, a mapping from hook names to tensors."""

import operator
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from transformer_lens_lite.config import closest
from transformer_lens_lite.utils import Slice, SliceInput, get_act_name

CacheKey = str | tuple[Any, ...]


class ActivationCache(Mapping[str, Tensor]):
    """Activations of one run, by hook name.

        cache["blocks.5.attn.hook_pattern"]     the full name
        cache["pattern", 5]                     name and layer; negative layers count from the end
        cache["scale", 3, "ln1"]                name, layer and layer type
        cache["embed"]                          what `get_act_name` makes of a string

    The model is held weakly: a cache does not keep it alive, and pickling drops it.
    """

    def __init__(
        self, cache_dict: Mapping[str, Tensor], model: Any = None, has_batch_dim: bool = True
    ) -> None:
        self.cache_dict = dict(cache_dict)
        self.has_batch_dim = has_batch_dim
        self._model = weakref.ref(model) if model is not None else None
        self._n_layers = None if model is None else model.cfg.n_layers
        self.has_embed = "hook_embed" in self.cache_dict
        self.has_pos_embed = "hook_pos_embed" in self.cache_dict

    @property
    def model(self) -> Any:
        """The model the activations came from. ReferenceError when it is gone."""
        model = self._model() if self._model is not None else None
        if model is None:
            raise ReferenceError(
                "the model this cache came from is gone, or was dropped by pickling"
            )
        return model

    def __getstate__(self) -> dict[str, Any]:
        owned = {name: compact(tensor) for name, tensor in self.cache_dict.items()}
        return self.__dict__ | {"_model": None, "cache_dict": owned}

    __eq__ = object.__eq__  # two caches are equal when they are the same one
    __hash__ = object.__hash__

    # -- looking up --

    def full_name(self, key: CacheKey) -> str:
        """The hook name a key stands for, whether or not it is cached."""
        if isinstance(key, str):
            return key if key in self.cache_dict else get_act_name(key)
        if not isinstance(key, tuple) or not 1 <= len(key) <= 3:
            raise KeyError(f"a key is a name or (name, layer[, layer_type]), got {key!r}")
        name, layer, layer_type = (*key, None, None)[:3]
        if hasattr(layer, "__index__"):  # int, or a number of numpy or torch
            layer = operator.index(layer)
            layer += self._n_layers if layer < 0 and self._n_layers is not None else 0
        elif not isinstance(layer, str | None):
            raise KeyError(f"a layer is a number, got {key!r}")
        if not isinstance(name, str) or not isinstance(layer_type, str | None):
            raise KeyError(f"names and layer types are strings, got {key!r}")
        return get_act_name(name, layer, layer_type)

    def __getitem__(self, key: CacheKey) -> Tensor:
        name = self.full_name(key)
        if name not in self.cache_dict:
            raise MissingActivation(self._why_missing(name))
        return self.cache_dict[name]

    def _why_missing(self, name: str) -> str:
        message = f"{name!r} is not in this cache"
        model = self._model() if self._model is not None else None
        if model is not None and name in model.hook_dict:
            return (
                f"{message}: the model has that hook point, but it was not captured or did not fire"
            )
        if name.endswith("hook_resid_mid"):
            message += " (parallel and attention-only blocks have no resid_mid)"
        return f"{message}.{closest(name, self.cache_dict)}"

    def __contains__(self, key: object) -> bool:
        try:
            return self.full_name(key) in self.cache_dict  # type: ignore[arg-type]
        except (KeyError, TypeError):
            return False

    def __iter__(self) -> Iterator[str]:
        return iter(self.cache_dict)

    def __len__(self) -> int:
        return len(self.cache_dict)

    def keys(self) -> Any:
        """The hook names, in firing order."""
        return self.cache_dict.keys()

    def values(self) -> Any:
        """The tensors, in firing order."""
        return self.cache_dict.values()

    def items(self) -> Any:
        """Pairs of name and tensor, in firing order."""
        return self.cache_dict.items()

    # -- changing place or shape --

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> "ActivationCache":
        """Move to a device, and floating tensors to a dtype, in place; returns the cache."""
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        for name, tensor in self.cache_dict.items():
            wanted = dtype if tensor.is_floating_point() else None
            self.cache_dict[name] = tensor.to(device=device, dtype=wanted)
        return self

    def remove_batch_dim(self) -> "ActivationCache":
        """Drop the batch axis of a batch of one, in place. ValueError for larger batches."""
        if self.has_batch_dim:
            batched = {n: t for n, t in self.cache_dict.items() if not is_of_one_expert(n)}
            for name, tensor in batched.items():
                if tensor.shape[0] != 1:
                    raise ValueError(f"cannot drop a batch of {tensor.shape[0]} ({name})")
            for name, tensor in batched.items():
                self.cache_dict[name] = tensor[0]
            self.has_batch_dim = False
        return self

    def apply_slice_to_batch_dim(self, batch_slice: SliceInput) -> "ActivationCache":
        """A new cache of some rows; an int drops the batch axis. ValueError when there is none."""
        chosen = batch_slice if isinstance(batch_slice, Slice) else Slice(batch_slice)
        if not self.has_batch_dim:
            raise ValueError("this cache has no batch axis to slice")
        if single := [name for name in self.cache_dict if is_of_one_expert(name)]:
            raise ValueError(f"{single[0]} holds the tokens of one expert: it has no batch axis")
        rows = {name: chosen.apply(tensor, dim=0) for name, tensor in self.cache_dict.items()}
        new = ActivationCache(rows, None, has_batch_dim=chosen.mode != "int")
        new._model, new._n_layers = self._model, self._n_layers
        return new

    def nbytes(self) -> int:
        """Bytes of the cached values."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.cache_dict.values())

    def __repr__(self) -> str:
        lines = [
            f"ActivationCache: {len(self)} activations, {self.nbytes() / 2**20:.2f} MiB"
            + ("" if self.has_batch_dim else ", without batch axis")
        ]
        shown = list(self.cache_dict.items())
        for name, tensor in shown[:8] + shown[-2:] if len(shown) > 12 else shown:
            dtype = str(tensor.dtype).removeprefix("torch.")
            lines.append(f"  {name:<36} {dtype} {list(tensor.shape)}")
        if len(shown) > 12:
            lines.insert(9, f"  … {len(shown) - 10} more")
        return "\n".join(lines)


def compact(tensor: Tensor) -> Tensor:
    """The tensor, or a copy when it is a part of something bigger that pickling would keep."""
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


class MissingActivation(KeyError):
    """A KeyError that shows its message as it is."""

    def __str__(self) -> str:
        return str(self.args[0])


def is_of_one_expert(name: str) -> bool:
    """Whether a hook's value is [token, …], for the tokens of one expert: without a batch axis."""
    return ".experts." in name
