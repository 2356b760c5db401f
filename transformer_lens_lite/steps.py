"""Where a forward pass stands: which step of a generation it is, and which columns it computes.

Columns are counted from the start of the text, cached ones included: column j is the same token
whether it is computed in the prefill, in a decode step, or in one forward over everything.
"""

import copy
import operator
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from transformer_lens_lite.nearest import closest

Phase = Literal["prefill", "decode"]
# "all", "prefill", "decode"; a step, a slice or a list of steps; a predicate on the StepContext
When = Any
# an absolute column, a slice or (start, stop[, step]) of them, or a list
Pos = Any
PHASES = ("all", "prefill", "decode")

_running: ContextVar["running | None"] = ContextVar("step", default=None)


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
        "attention_mask", "batch", "chosen", "expected_stop", "outer", "real", "sequence", "start",
        "step", "stop", "tokens",
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
        self.outer: StepContext | None = None  # the forward in the middle of which this one is run
        self.chosen: list[int] | None = None  # the columns a hook with pos= gets; None: all

    @property
    def phase(self) -> Phase:
        """Whether this is the first forward over a text, or one that continues it."""
        return "prefill" if self.step == 0 else "decode"

    @property
    def pos(self) -> slice:
        """The absolute columns computed in this forward."""
        return slice(self.start, self.stop)

    def local(self, absolute_pos: Pos) -> Int[Tensor, " n"] | None:
        """The places of absolute columns in what a hook gets; None when none of them is there.

        `act[:, hook.step.local([3, 4])]` is columns 3 and 4, or those of them computed now.
        """
        here = Columns(absolute_pos).within(self.start, self.stop)
        if here is None:
            return None
        places = torch.arange(self.stop - self.start)[here]
        if self.chosen is None:
            return places
        found = [self.chosen.index(p) for p in places.tolist() if p in self.chosen]
        return torch.tensor(found) if found else None

    def of_part(self, part: slice | list[int]) -> "StepContext":
        """The same, for a hook that gets only these of the columns computed here."""
        new = copy.copy(self)
        places = range(self.stop - self.start)
        new.chosen = list(places[part]) if isinstance(part, slice) else part
        return new

    def __repr__(self) -> str:
        return f"StepContext(step {self.step}, {self.phase}, columns {self.start}:{self.stop})"


class running:
    """While the block lasts, `current_step()` is this one; made when somebody first asks."""

    _around: "running | None" = None
    _is_set = False

    def __init__(self, step: "StepContext | Callable[[], StepContext]") -> None:
        self._step = step

    def __enter__(self) -> None:
        # nobody can listen inside a compiled graph, and it could not hold a context variable
        if torch.compiler.is_compiling():
            return
        self._around = _running.get()
        try:
            self._is_set = True
            _running.set(self)
        except BaseException:  # Ctrl-C that comes when it is set: nobody would leave the block
            _running.set(self._around)
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_set:
            _running.set(self._around)

    @property
    def step(self) -> StepContext:
        """What is running."""
        if not isinstance(self._step, StepContext):
            self._step = self._step()
            self._step.outer = None if self._around is None else self._around.step
        return self._step


def current_step() -> StepContext | None:
    """The forward that is running in this thread; None outside of one."""
    here = _running.get()
    return None if here is None else here.step


# --- which steps --------------------------------------------------------------------------------


class Steps:
    """A choice of steps, checked when it is made.

    Raises: ValueError for what chooses no steps, with the nearest word.
    """

    def __init__(self, when: When = "all", name: str = "when") -> None:
        self.when = when
        self.is_all = isinstance(when, str) and when == "all"
        self.go_on = isinstance(when, str) and when in ("all", "decode")  # as long as steps come
        self._numbers: Columns | None = None
        if isinstance(when, str):
            if when not in PHASES:
                raise ValueError(
                    f"{name} must be one of {list(PHASES)}, a step, a slice or list of steps, or a "
                    f"function of a StepContext; got {when!r}.{closest(when, PHASES)}"
                )
        elif not callable(when):
            self._numbers = Columns(when, name, "steps")

    def __contains__(self, step: StepContext) -> bool:
        if callable(self.when):
            return bool(self.when(step))
        return self.has(step.step)

    def has(self, number: int) -> bool:
        """Whether the step of this number is chosen, 0 being the prefill; for choices that are no
        function."""
        if self._numbers is None:
            return self.when in ("all", "decode" if number else "prefill")
        return self._numbers.within(number, number + 1) is not None

    def __repr__(self) -> str:
        return repr(self.when)


# --- which columns ------------------------------------------------------------------------------


class Columns:
    """A choice of absolute columns (or steps), none of them counted from an end not known yet.

    A list keeps its order.
    Raises: ValueError for negative numbers and for repeated ones, TypeError for what is no number.
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
        plain = given.tolist() if isinstance(given, Tensor) else given
        several = plain if isinstance(plain, Sequence | range) else [plain]
        try:
            if isinstance(plain, str | bytes) or any(isinstance(each, bool) for each in several):
                raise TypeError
            numbers = [operator.index(each) for each in several]
        except TypeError:
            hint = " (of a mask: mask.nonzero().flatten())" if is_mask(given) else ""
            raise TypeError(
                f"{name} must be a number, a slice or a list of numbers{hint}, got {given!r}"
            ) from None
        if len(set(numbers)) < len(numbers):
            raise ValueError(f"{name}={given!r} has a number twice")
        return numbers

    def within(self, start: int, stop: int) -> slice | list[int] | None:
        """Where the chosen ones lie in `start:stop`, counted from `start`; None when none does."""
        if self.range is None:
            here = [each - start for each in self.list if start <= each < stop]
            if not here:
                return None
            as_range = list(range(here[0], here[0] + len(here)))
            return slice(here[0], here[0] + len(here)) if here == as_range else here
        chosen = self.range
        first = chosen.start
        if first < start:  # the first one of the stride that is not before `start`
            first += -(-(start - first) // chosen.step) * chosen.step
        last = stop if chosen.stop is None else min(stop, chosen.stop)
        return slice(first - start, last - start, chosen.step) if first < last else None

    def in_order(self) -> "Columns":
        """The same ones, as they stand in the text."""
        return self if self.range is not None else Columns(sorted(self.list))

    def count(self, start: int, stop: int) -> int:
        """How many of the chosen ones lie in `start:stop`."""
        here = self.within(start, stop)
        if here is None:
            return 0
        return len(range(stop - start)[here]) if isinstance(here, slice) else len(here)


def is_mask(given: Any) -> bool:
    """Whether it holds booleans."""
    if isinstance(given, Tensor):
        return given.dtype == torch.bool
    return isinstance(given, list) and any(isinstance(each, bool) for each in given)
