"""Activations of many texts on disk, as rows."""

from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transformer_lens_lite.activations import ActivationCache, MissingActivation
from transformer_lens_lite.nearest import closest
from transformer_lens_lite.recording_files import VALUES, opened, write

SHARD = "rows-{:06d}.safetensors"


class ActivationDataset:
    """Activations of many texts on disk, one row for each real token: what dictionaries and probes
    are trained on.

        dataset = ActivationDataset(folder)
        for batch in batches[dataset.n_appended :]:      # goes on where it was interrupted
            _, cache = model.run_with_cache(batch, names_filter="resid_post")
            dataset.append(cache)
        dataset["resid_post", 5][1000:1256]              # [256, d_model], read from the disk

    Every `append` is a file of its own; what was appended is never touched again. Names must have
    positions on axis 1, and be the same in every append.
    """

    def __init__(self, folder: str | PathLike[str]) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._files: list[Any] = []
        self._starts = [0]  # of the rows of each file, and behind the last one
        for number, path in enumerate(sorted(self.folder.glob("rows-*.safetensors"))):
            if path.name != SHARD.format(number):
                raise ValueError(f"{self.folder} has {path.name} and no {SHARD.format(number)}")
            self._take(path)

    def _take(self, path: Path) -> None:
        file, about = opened(path)
        if self._files and set(file.keys()) != set(self._files[0].keys()):
            raise ValueError(f"{path} holds other names than the files before it")
        self._files.append(file)
        self._starts.append(self._starts[-1] + about["rows"])

    @property
    def n_appended(self) -> int:
        """How many times something was appended."""
        return len(self._files)

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def names(self) -> list[str]:
        """The hook names."""
        if not self._files:
            return []
        keys = list(self._files[0].keys())
        return [name.removeprefix(VALUES) for name in keys if name.startswith(VALUES)]

    def append(self, cache: ActivationCache) -> None:
        """One more file: the real tokens of every row of a cache, row after row.

        Raises: ValueError for values without positions, or other names or kinds of values than
            before; FileExistsError when somebody else has appended. Nothing is written then.
        """
        if not isinstance(cache, ActivationCache):
            raise TypeError(f"what is appended is an ActivationCache, got {type(cache).__name__}")
        record = cache._recording()
        mask = record.attention_mask
        if mask is None or not cache.has_batch_dim:
            raise ValueError("a dataset needs caches that know their tokens and have a batch axis")
        if self._files and set(record.values) != set(self.names):
            odd = sorted(set(record.values) ^ set(self.names))
            raise ValueError(f"{odd[0]!r} is in this cache or in the dataset, but not in both")
        real = mask.bool()
        tensors = {}
        for name, value in record.values.items():
            axes = record.axes.get(name)
            if axes is None or axes.pos != 1 or value.shape[:2] != real.shape:
                raise ValueError(
                    f"{name} {list(value.shape)} does not have its positions on axis 1"
                )
            tensors[VALUES + name] = value[real.to(value.device)]
            self._check_kind(name, tensors[VALUES + name])
        rows, columns = real.nonzero(as_tuple=True)
        tensors["row"], tensors["column"] = rows, columns
        if record.tokens is not None:
            tensors["tokens"] = record.tokens.cpu()[real]
        if self._files and set(tensors) != set(self._files[0].keys()):
            lacks = "no" if record.tokens is None else "known"
            raise ValueError(f"this cache has {lacks} tokens, those in the dataset are otherwise")
        path = self.folder / SHARD.format(len(self._files))
        try:
            write(path, tensors, {"rows": len(rows)}, new=True)
        except FileExistsError:
            raise FileExistsError(
                f"{path} was appended by somebody else since this dataset was opened; open it again"
            ) from None
        self._take(path)

    def _check_kind(self, name: str, rows: Tensor) -> None:
        """ValueError for rows of another width or dtype than those that are there."""
        if not self._files:
            return
        before = Rows(self._files, self._starts, VALUES + name)
        if rows.shape[1:] != before.shape[1:] or rows.dtype != before[0:0].dtype:
            raise ValueError(
                f"{name} has rows {list(rows.shape[1:])} of {rows.dtype}, those in the dataset are "
                f"{list(before.shape[1:])} of {before[0:0].dtype}"
            )

    def __getitem__(self, key: Any) -> "Rows":
        name = ActivationCache({}).full_name(key)
        if name not in self.names:
            raise MissingActivation(f"{name!r} is not in this dataset.{closest(name, self.names)}")
        return Rows(self._files, self._starts, VALUES + name)

    @property
    def tokens(self) -> "Rows":
        """The id of every row's token."""
        return Rows(self._files, self._starts, "tokens")

    def __repr__(self) -> str:
        return f"ActivationDataset({len(self)} rows of {self.names}, {self.n_appended} files)"


class Rows:
    """The rows of one name in all files. Indexing reads only what is asked for."""

    def __init__(self, files: list[Any], starts: list[int], name: str) -> None:
        self._files = files
        self._starts = starts
        self._name = name

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of all rows together."""
        return (len(self), *self._files[0].get_slice(self._name).get_shape()[1:])

    def __getitem__(self, which: int | slice | list[int] | Tensor) -> Tensor:
        if isinstance(which, int):
            return self._gathered(torch.tensor([range(len(self))[which]]))[0]
        if isinstance(which, slice):
            chosen = range(len(self))[which]
            if chosen.step == 1:
                return self._range(chosen.start, chosen.stop)
            return self._gathered(torch.tensor(list(chosen), dtype=torch.long))
        return self._gathered(torch.arange(len(self))[torch.as_tensor(which)])

    def _range(self, start: int, stop: int) -> Tensor:
        parts = []
        for file, first, last in zip(self._files, self._starts, self._starts[1:], strict=False):
            a, b = max(start, first), min(stop, last)
            if a < b:
                parts.append(file.get_slice(self._name)[a - first : b - first])
        if not parts:
            return self._files[0].get_slice(self._name)[0:0]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _gathered(self, places: Tensor) -> Tensor:
        found = self._range(0, 0).new_empty((len(places), *self.shape[1:]))
        for file, first, last in zip(self._files, self._starts, self._starts[1:], strict=False):
            here = (places >= first) & (places < last)
            if bool(here.any()):  # mapped: only the pages with these rows are read
                found[here] = file.get_tensor(self._name)[places[here] - first]
        return found
