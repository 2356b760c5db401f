"""Where a forward pass stands: which step of a generation it is, and which columns it computes.

Columns are counted from the start of the text, cached ones included: column j is the same token
whether it is computed in the prefill, in a decode step, or in one forward over everything.
"""

import operator
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from transformer_lens_lite.config import closest

Phase = Literal["prefill", "decode"]
# "all", "prefill", "decode"; a step, a slice or a list of steps; a predicate on the StepContext
When = Any
# an absolute column, a slice or (start, stop[, step]) of them, or a list
Pos = Any
PHASES = ("all", "prefill", "decode")

_running: ContextVar["StepContext | None"] = ContextVar("step", default=None)


class StepContext:
    """What a hook can know about the forward it is called in, as `hook.step`.

    Args:
        step: 0 in the prefill, and then the number of the decode step.
        start, stop: the columns computed here; `start` of them are in the cache.
        tokens: [batch, pos], the ids of these columns; None for embeddings or a residual stream.
        attention_mask: [batch, stop], 0 for padding; None when nothing is padding.
        sequence: what consecutive forwards over one text share: their growing cache, or their
            generation. None: this forward stands alone.
        expected_stop: where the columns of this generation will end, if it is one.
        real: [batch, pos], 0 for padding and for what comes after the end of a row; None: it is
            the attention mask.
        batch: rows.
    """

    __slots__ = (
        "attention_mask", "batch", "expected_stop", "real", "sequence", "start", "step", "stop",
        "tokens",
    )  # fmt: skip

    def __init__(
        self,
        step: int,
        start: int,
        stop: int,
        tokens: Int[Tensor, "batch pos"] | None = None,
        attention_mask: Int[Tensor, "batch key_pos"] | None = None,
        sequence: object = None,
        expected_stop: int | None = None,
        real: Int[Tensor, "batch pos"] | None = None,
        batch: int | None = None,
    ) -> None:
        self.step = step
        self.start = start
        self.stop = stop
        self.tokens = tokens
        self.attention_mask = attention_mask
        self.sequence = sequence
        self.expected_stop = expected_stop
        self.real = real
        self.batch = batch

    @property
    def phase(self) -> Phase:
        """Whether this is the first forward over a text, or one that continues it."""
        return "prefill" if self.step == 0 else "decode"

    @property
    def pos(self) -> slice:
        """The absolute columns computed in this forward."""
        return slice(self.start, self.stop)

    def local(self, absolute_pos: Pos) -> Int[Tensor, " n"] | None:
        """The places of absolute columns in this forward's activations; None when none is here.

        `act[:, hook.step.local([3, 4])]` is columns 3 and 4, or those of them computed now.
        """
        chosen = Columns(absolute_pos).within(self.start, self.stop)
        if chosen is None:
            return None
        return torch.arange(self.stop - self.start)[chosen]

    def __repr__(self) -> str:
        return f"StepContext(step {self.step}, {self.phase}, columns {self.start}:{self.stop})"


class running:
    """While the block lasts, `current_step()` is this one."""

    def __init__(self, step: StepContext) -> None:
        self._step = step

    def __enter__(self) -> None:
        # nobody can listen inside a compiled graph, and it could not hold a context variable
        if not torch.compiler.is_compiling():
            self._token = _running.set(self._step)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not torch.compiler.is_compiling():
            _running.reset(self._token)


def current_step() -> StepContext | None:
    """The forward that is running in this thread; None outside of one."""
    return _running.get()


# --- which steps --------------------------------------------------------------------------------


class Steps:
    """A choice of steps, checked when it is made.

    Raises: ValueError for what chooses no steps, with the nearest word.
    """

    def __init__(self, when: When = "all", name: str = "when") -> None:
        self.when = when
        self.is_all = isinstance(when, str) and when == "all"
        self.go_on = isinstance(when, str) and when in ("all", "decode")  # as long as steps come
        self._matches = self._matcher(when, name)

    def __contains__(self, step: StepContext) -> bool:
        return self.is_all or self._matches(step)

    @staticmethod
    def _matcher(when: When, name: str) -> Callable[[StepContext], bool]:
        if isinstance(when, str):
            if when not in PHASES:
                raise ValueError(
                    f"{name} must be one of {list(PHASES)}, a step, a slice or list of steps, or a "
                    f"function of a StepContext; got {when!r}.{closest(when, PHASES)}"
                )
            return lambda step: when in ("all", step.phase)
        if callable(when):
            return lambda step: bool(when(step))
        columns = Columns(when, name, "steps")
        return lambda step: columns.within(step.step, step.step + 1) is not None

    def __repr__(self) -> str:
        return repr(self.when)


# --- which columns ------------------------------------------------------------------------------


class Columns:
    """A choice of absolute columns (or steps), none of them counted from an end not known yet.

    Raises: ValueError for negative numbers, TypeError for what is no number.
    """

    def __init__(self, given: Pos, name: str = "pos", what: str = "columns") -> None:
        if isinstance(given, tuple) and len(given) in (2, 3) and None in given:
            given = slice(*given)
        self.range: slice | None = None
        self.list: list[int] = []
        if isinstance(given, slice):
            self.range = slice(given.start or 0, given.stop, given.step or 1)
            numbers = [n for n in (given.start, given.stop, given.step) if n is not None]
            if given.step is not None and given.step < 1:
                raise ValueError(f"{name}={given!r} counts backwards")
        else:
            numbers = self.list = self._integers(given, name)
        if any(number < 0 for number in numbers):
            raise ValueError(
                f"{name}={given!r}: absolute {what} are counted from the start of the text; its "
                "end is not known until it has come"
            )

    @staticmethod
    def _integers(given: Pos, name: str) -> list[int]:
        if isinstance(given, Tensor):
            given = given.tolist()
        several = given if isinstance(given, Sequence | range) else [given]
        try:
            if isinstance(given, str | bool):
                raise TypeError
            return sorted({operator.index(each) for each in several})
        except TypeError:
            raise TypeError(
                f"{name} must be a number, a slice or a list of numbers, got {given!r}"
            ) from None

    def within(self, start: int, stop: int) -> slice | list[int] | None:
        """Where the chosen ones lie in `start:stop`, counted from `start`; None when none does."""
        if self.range is None:
            here = [each - start for each in self.list if start <= each < stop]
            if not here:
                return None
            return slice(here[0], here[-1] + 1) if len(here) == here[-1] - here[0] + 1 else here
        chosen = self.range
        first = chosen.start
        if first < start:  # the first one of the stride that is not before `start`
            first += -(-(start - first) // chosen.step) * chosen.step
        last = stop if chosen.stop is None else min(stop, chosen.stop)
        return slice(first - start, last - start, chosen.step) if first < last else None

    def count(self, start: int, stop: int) -> int:
        """How many of the chosen ones lie in `start:stop`."""
        here = self.within(start, stop)
        if here is None:
            return 0
        return len(range(stop - start)[here]) if isinstance(here, slice) else len(here)
