"""What was kept of one run: tensors by name, and which columns of the text are in them.

`Recording` is plain data: `capture` makes it, `ActivationCache` gives it names to look up.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from transformer_lens_lite.steps import Phase

NAME_AND_CALL = re.compile(r"(.+):(\d+)")
# not a public name of torch: a plain copy serves where it is missing
COPY_ON_WRITE: Callable[[Tensor], Tensor] | None = getattr(torch, "_lazy_clone", None)
Places = Int[Tensor, "*row place"]  # along an axis; with a row axis, each row has its own


@dataclass(frozen=True)
class Forward:
    """One forward of a run: which step, which absolute columns, and where the kept ones among them
    lie in what is kept of the run."""

    step: int
    phase: Phase
    start: int
    stop: int
    first: int
    last: int  # first:last, along the kept columns

    @property
    def n_kept(self) -> int:
        """How many columns of this forward were kept."""
        return self.last - self.first


class Axes(NamedTuple):
    """Where a value has its positions; its last axis counts keys if `unseen` is a number."""

    pos: int | None
    unseen: float | None = None


class Call(NamedTuple):
    """One visit of a point or module. `number` counts from 1."""

    number: int
    forward: int


@dataclass
class Recording:
    """All that is kept of one run.

    values: tensors by name, columns joined; where they cannot be, by "name:call".
    others: what is no tensor, likewise.
    in_graph: single calls ("name:call") of a value whose joined form is a copy further on in the
        graph; the loss depends on these.
    calls: of which visits a name's value is made up.
    columns: [kept] absolute columns; tokens and attention_mask are of those.
    key_mask: of all columns there were, kept or cached before: 0 for padding. None: none was.
    """

    values: dict[str, Tensor] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)
    in_graph: dict[str, Tensor] = field(default_factory=dict)
    calls: dict[str, list[Call]] = field(default_factory=dict)
    axes: dict[str, Axes] = field(default_factory=dict)
    forwards: list[Forward] = field(default_factory=list)
    columns: Int[Tensor, " kept"] | None = None
    tokens: Int[Tensor, "batch kept"] | None = None
    attention_mask: Int[Tensor, "batch kept"] | None = None
    key_mask: Int[Tensor, "batch key_pos"] | None = None

    has_batch_dim: bool = True

    def keep(self, name: str, value: Any) -> None:
        """A value, where its kind is kept."""
        (self.values if isinstance(value, Tensor) else self.others)[name] = value

    @property
    def n_columns(self) -> int:
        """How many columns were kept."""
        return self.forwards[-1].last if self.forwards else 0

    @property
    def batch_size(self) -> int:
        """Rows."""
        if self.attention_mask is not None:
            return self.attention_mask.shape[0]
        return next((len(value) for value in self.values.values()), 0)

    def axis(self, name: str) -> int | None:
        """Where the values of a name have their columns."""
        pos = self.axes[name].pos if name in self.axes else None
        return pos if pos is None or self.has_batch_dim else pos - 1

    # -- one call --

    def piece(self, name: str, call: Call) -> Any:
        """What one call of a point saw; a view of the joined value where there is one."""
        apart = f"{name}:{call.number}"
        if apart in self.in_graph:
            return self.in_graph[apart]
        if name not in self.values:
            return self.others[apart] if apart in self.others else self.values[apart]
        value, axis = self.values[name], self.axis(name)
        if axis is None:
            alone = len(self.calls[name]) == 1
            return value if alone else value[self.calls[name].index(call)]
        if not self.forwards:
            return value
        forward = self.forwards[call.forward]
        part = value.narrow(axis, forward.first, forward.n_kept)
        return part if self.axes[name].unseen is None else part[..., : forward.stop]

    # -- parts of it --

    def of_names(self, names: Sequence[str]) -> "Recording":
        """Only what these names saw."""
        wanted = set(names)

        def chosen(entries: dict[str, Any]) -> dict[str, Any]:
            return {n: each for n, each in entries.items() if name_and_call(n)[0] in wanted}

        return replace(
            self,
            values=chosen(self.values),
            others=chosen(self.others),
            calls={name: calls for name, calls in self.calls.items() if name in wanted},
        )

    def of_columns(self, places: Places) -> "Recording":
        """Only these of the kept columns; views where they are a range.

        What has no columns stays if it was seen in a forward some of whose columns stay.
        """
        assert self.columns is not None
        flat = places if places.ndim == 1 else places[0]
        forwards, first = [], 0
        for forward in self.forwards:
            n = int(((flat >= forward.first) & (flat < forward.last)).sum())
            forwards.append(replace(forward, first=first, last=first + n))
            first += n
        seen = {number for number, forward in enumerate(forwards) if forward.n_kept}
        calls = {
            name: left
            for name, every in self.calls.items()
            if (left := [call for call in every if call.forward in seen])
        }
        values = {}
        for name, value in self.values.items():
            base, number = name_and_call(name)
            if base not in calls:
                continue
            axis = self.axis(base)
            if number is None and axis is not None:
                # the last forward may have broken off before it came here
                here = places if places.ndim > 1 else places[places < value.shape[axis]]
                values[name] = at(value, axis, here)
            elif number is None or number in {call.number for call in calls[base]}:
                values[name] = value
        others = {n: each for n, each in self.others.items() if name_and_call(n)[0] in calls}
        return replace(
            self,
            values=values,
            others=others,
            in_graph={},
            calls=calls,
            forwards=forwards,
            columns=self.columns[flat],
            tokens=None if self.tokens is None else at(self.tokens, 1, places),
            attention_mask=(
                None if self.attention_mask is None else at(self.attention_mask, 1, places)
            ),
        )

    def of_rows(self, rows: Int[Tensor, " row"]) -> "Recording":
        """Only these rows; views where they are a range. ValueError for values without rows."""
        for name in self.values:
            if is_of_one_expert(name):
                raise ValueError(f"{name} holds the tokens of one expert: it has no batch axis")
        return replace(
            self,
            values={name: at(value, 0, rows) for name, value in self.values.items()},
            in_graph={},
            tokens=None if self.tokens is None else at(self.tokens, 0, rows),
            attention_mask=None
            if self.attention_mask is None
            else at(self.attention_mask, 0, rows),
            key_mask=None if self.key_mask is None else at(self.key_mask, 0, rows),
        )

    def unpadded(self, row: int) -> "Recording":
        """A copy of one row's real columns, as if it had been run alone."""
        one = self.of_rows(torch.tensor([row]))
        assert one.attention_mask is not None
        assert one.columns is not None
        real = one.attention_mask[0].bool()
        cut = one.of_columns(real.nonzero().flatten())
        shown = torch.ones(self.forwards[-1].stop, dtype=torch.bool)
        if one.key_mask is not None:
            shown[: one.key_mask.shape[1]] &= one.key_mask[0].bool()
        shown[one.columns] = real
        keys = shown.nonzero().flatten()
        for name, value in cut.values.items():
            if name in cut.axes and cut.axes[name].unseen is not None:
                # the last forward may have broken off before it came here: there are fewer
                there = keys[keys < value.shape[-1]]
                value = value.index_select(-1, there.to(value.device))
            cut.values[name] = value.clone()
        before = [0, *shown.cumsum(0).tolist()]  # where each column comes to stand
        own = one.columns[real].tolist()
        cut.columns = torch.tensor([before[column] for column in own], dtype=torch.long)
        cut.forwards = [
            replace(forward, start=before[forward.start], stop=before[forward.stop])
            for forward in cut.forwards
        ]
        cut.key_mask = None
        return cut


# --- in a pickle ----------------------------------------------------------------------------------


class Packed(NamedTuple):
    """A tensor as pickles of many small ones want it: torch's own form takes 300 bytes more."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str
    data: bytes

    @classmethod
    def of(cls, tensor: Tensor) -> "Packed":
        """Its values, without a graph."""
        there = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return cls(tensor.dtype, tuple(tensor.shape), str(tensor.device), there.tobytes())

    def tensor(self) -> Tensor:
        """A tensor of its own memory."""
        if not self.data:  # which frombuffer refuses
            return torch.empty(self.shape, dtype=self.dtype, device=self.device)
        read = torch.frombuffer(bytearray(self.data), dtype=self.dtype)
        return read.view(self.shape).to(self.device)


def packed(record: Recording) -> dict[str, Any]:
    """What is pickled of a recording: single calls in a graph are not."""
    once: dict[Any, Any] = {}  # most names were seen in the same calls, at the same axes
    return record.__dict__ | {
        "values": {name: Packed.of(value) for name, value in record.values.items()},
        "in_graph": {},
        "calls": {n: once.setdefault(tuple(each), each) for n, each in record.calls.items()},
        "axes": {n: once.setdefault(each, each) for n, each in record.axes.items()},
        "tokens": compact(record.tokens),
        "attention_mask": compact(record.attention_mask),
        "key_mask": compact(record.key_mask),
    }


def unpacked(state: dict[str, Any]) -> Recording:
    """The inverse of `packed`."""
    values = {name: value.tensor() for name, value in state["values"].items()}
    calls = {name: list(each) for name, each in state["calls"].items()}
    return Recording(**state | {"values": values, "calls": calls})


# --- parts of tensors, and of names ---------------------------------------------------------------


def at(value: Tensor, axis: int, places: Places) -> Tensor:
    """What stands at these places of an axis: a view where they are a range. With a row axis, each
    row has its own places."""
    places = places.to(value.device)
    if places.ndim == 2:
        moved = value.movedim(axis, 1)
        rows = torch.arange(len(places), device=value.device)[:, None]
        return moved[rows, places].movedim(1, axis)
    n = len(places)
    if n and bool((places == torch.arange(n, device=places.device) + places[0]).all()):
        return value.narrow(axis, int(places[0]), n)
    return value.index_select(axis, places)


def compact(value: Any) -> Any:
    """The tensor, or a copy when it is a part of something bigger that pickling would keep."""
    if isinstance(value, Tensor) and value.untyped_storage().nbytes() > value.nbytes:
        return value.clone()
    return value


def parted(value: Tensor) -> Tensor:
    """A copy. On the CPU one that is made when either of the two is first written to, where torch
    can do that and the value is all of its memory: most values never are, and copying the logits
    of a long batch costs as much as a layer."""
    is_whole = value.untyped_storage().nbytes() == value.nbytes
    if COPY_ON_WRITE is not None and is_whole and value.device.type == "cpu":
        try:
            return COPY_ON_WRITE(value)
        except RuntimeError:  # memory that is not torch's own, such as an array's
            pass
    return value.clone()


def name_and_call(key: Any) -> tuple[Any, int | None]:
    """("name:3", …) -> (("name", …), 3); None without a call."""
    name = key[0] if isinstance(key, tuple) and key else key
    match = NAME_AND_CALL.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        return key, None
    return ((match[1], *key[1:]) if isinstance(key, tuple) else match[1]), int(match[2])


def is_of_one_expert(name: str) -> bool:
    """Whether a hook's value is [token, …], for the tokens of one expert: without a batch axis."""
    return ".experts." in name
