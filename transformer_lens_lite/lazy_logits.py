"""Logits that are computed when somebody reads them, and only where.

A metric that looks at one column of `[batch, pos, d_vocab]` need not wait for the others: in small
models the unembedding is a third of a forward.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils._pytree import tree_map

Index = tuple[Any, ...]


class ManyLogits:
    """The logits of several cells, by column; columns before `first` are those of the base run.

    Of one column, all cells' logits are made at once: where one metric looks, all will. Whole
    logits are made cell by cell: those of all together may be larger than the model.
    """

    def __init__(
        self,
        model: Any,
        stream: Float[Tensor, "batch cell pos d_model"],
        first: int,
        base: "ManyLogits | None",
    ) -> None:
        self.model = model
        self.stream = stream
        self.first = first
        self.base = base
        self._columns: dict[int, Float[Tensor, "batch cell d_vocab"]] = {}

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of one cell's logits."""
        batch, _, pos, _ = self.stream.shape
        return batch, self.first + pos, self.model.cfg.d_vocab_out

    def columns(self, cell: int, columns: Sequence[int]) -> Float[Tensor, "batch n d_vocab"]:
        """A copy of these columns of a cell's logits."""
        before = [column for column in columns if column < self.first]
        if before and self.base is not None:
            rest = [column for column in columns if column >= self.first]
            parts = [self.base.columns(0, before), self.columns(cell, rest)]
            order = {column: place for place, column in enumerate([*before, *rest])}
            return torch.cat(parts, 1)[:, [order[column] for column in columns]]
        if len(columns) == 1:
            (column,) = columns
            if column not in self._columns:
                here = self.stream[:, :, column - self.first]
                self._columns[column] = self._unembedded(here)
            return self._columns[column][:, cell, None].clone()
        return self._unembedded(self.stream[:, cell, [c - self.first for c in columns]])

    @torch.no_grad()
    def _unembedded(
        self, stream: Float[Tensor, "batch some d_model"]
    ) -> Float[Tensor, "batch some d_vocab"]:
        with self.model.hooks_set_aside():
            logits: Tensor = self.model.logits_of(self.model.ln_final(stream))
        return logits


class LazyLogits(Tensor):
    """Logits [batch, pos, d_vocab_out] of which only the columns that are read are computed.

    A tensor to whoever uses it: `logits[:, -1]` computes one column, anything but indexing all of
    them.
    """

    _many: ManyLogits
    _cell: int
    _whole: Tensor | None

    @staticmethod
    def __new__(cls, many: ManyLogits, cell: int) -> "LazyLogits":
        like = many.stream
        new: LazyLogits = Tensor._make_wrapper_subclass(
            cls, many.shape, dtype=like.dtype, device=like.device
        )
        new._many, new._cell, new._whole = many, cell, None
        return new

    def __init__(self, many: ManyLogits, cell: int) -> None:
        super().__init__()

    def materialised(self) -> Float[Tensor, "batch pos d_vocab"]:
        """All of them, as an ordinary tensor."""
        if self._whole is None:
            self._whole = self._many.columns(self._cell, range(self._many.shape[1]))
        return self._whole

    def _indexed(self, index: Any) -> Tensor:
        index = index if isinstance(index, tuple) else (index,)
        columns, there = columns_read(index, self._many.shape)
        if columns is None or self._whole is not None:
            return self.materialised()[index]
        return self._many.columns(self._cell, columns)[there]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__ and isinstance(args[0], LazyLogits):
            return args[0]._indexed(args[1])
        if func in ABOUT_A_TENSOR:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return func(*tree_map(ordinary, args), **tree_map(ordinary, kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*tree_map(ordinary, args), **tree_map(ordinary, kwargs or {}))


# what is known of a tensor without its values
ABOUT_A_TENSOR = {
    Tensor.size,
    Tensor.dim,
    Tensor.ndimension,
    Tensor.numel,
    Tensor.is_floating_point,
    Tensor.__len__,
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "requires_grad", "layout", "is_cuda")
    ),
}


def ordinary(x: Any) -> Any:
    """A tensor with values, where it is one without."""
    return x.materialised() if isinstance(x, LazyLogits) else x


def columns_read(index: Index, shape: tuple[int, int, int]) -> tuple[list[int] | None, Index]:
    """The columns that an index into [batch, pos, vocab] reads, and the same index into those
    alone; None where that is not plain to see."""
    plain = (int, slice, list, Tensor, type(Ellipsis))
    if any(isinstance(part, bool) or not isinstance(part, plain) for part in index):
        return None, index
    if any(isinstance(part, Tensor) and part.dtype == torch.bool for part in index):
        return None, index
    places = [place for place, part in enumerate(index) if part is Ellipsis]
    if len(places) > 1 or len(index) - len(places) > 3:
        return None, index
    if places:
        fill = (slice(None),) * (3 - (len(index) - 1))
        index = (*index[: places[0]], *fill, *index[places[0] + 1 :])
    index = (*index, *(slice(None),) * (2 - len(index)))
    n_pos, part = shape[1], index[1]
    if isinstance(part, slice):
        columns = list(range(n_pos)[part])
        return (columns, (index[0], slice(None), *index[2:])) if columns else (None, index)
    given = torch.as_tensor(part)
    if given.numel() == 0 or given.is_floating_point():
        return None, index
    if bool(((given < -n_pos) | (given >= n_pos)).any()):
        return None, index  # indexing says what is wrong
    there = given % n_pos
    columns = there.unique().tolist()
    inside = torch.searchsorted(torch.tensor(columns, device=there.device), there)
    # an int stays one: it drops its axis in place, where a tensor could move it
    place: Any = 0 if isinstance(part, int) else inside
    return columns, (index[0], place, *index[2:])
