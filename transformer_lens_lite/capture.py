"""Keeping what passes hook points and modules.

One mechanism for one forward, a block of them, and a generation. A `CaptureSpec` says what is
wanted; a `Recorder` listens, and keeps it call by call, aligned to the columns of the text. What is
kept is read through an `ActivationCache`.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor, nn

from transformer_lens_lite.hooks import Attachment, HookPoint
from transformer_lens_lite.recording import Axes, Call, Forward, Recording, parted
from transformer_lens_lite.steps import Columns, Pos, StepContext, Steps, When, current_step
from transformer_lens_lite.utils import Slice

Device = torch.device | str
# a module's value has its positions on this axis, as most hook points have
MODULE_POS_AXIS = 1
INPUT, ARGUMENTS = ".input", ".inputs"
PINNED_AT_MOST = 2**30  # bytes of memory that the system cannot use for anything else


@dataclass(frozen=True)
class CaptureSpec:
    """What to keep of a run, and how.

    Args:
        names: hook points or modules: a name ("blocks.0.attn.hook_q"), a short one ("resid_post" in
            every layer, ("resid_post", 5) in one), a glob, a predicate on names, a module ("blocks.
            1.mlp", or the module itself), a Hugging Face path of the same value, or a list of
            those. None: every point but the optional ones.
        layers: only points in these layers; negative numbers count from the end.
        inputs, outputs: of modules, what they were called with and what they returned.
        steps: which forwards of a generation: "all", "prefill", "decode", a number, a slice, a
            list, or a function of the `StepContext`.
        pos_slice: which columns, counted from the start of the text.
        device, dtype: where, and for floating tensors as what, to keep it. None: as it is.
        detach: without its graph. False leaves it in the graph: then it is neither converted nor
            copied, and a hook that edits in place edits it too.
        clone: "auto" copies a value where it could still change: where some hook edits in place,
            or the output is handed out.
        non_blocking: copies from an accelerator do not wait; reading the cache does.
        incl_bwd: gradients too, under name + "_grad".
        max_bytes: refuse before running what would keep more (see `nbytes`).
    Raises: ValueError for what contradicts itself; unknown names are raised by `resolve`.
    """

    names: Any = None
    layers: Any = None
    inputs: bool = False
    outputs: bool = True
    steps: When = "all"
    pos_slice: Pos = None
    device: Device | None = None
    dtype: torch.dtype | None = None
    detach: bool = True
    clone: bool | Literal["auto"] = "auto"
    non_blocking: bool = True
    incl_bwd: bool = False
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        Steps(self.steps, "steps")
        if self.pos_slice is not None:
            Columns(self.pos_slice, "pos_slice")
        if self.device is not None:
            torch.device(self.device)
        if self.dtype is not None and not (
            isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point
        ):
            raise ValueError(f"dtype must be a floating torch dtype, got {self.dtype!r}")
        if self.max_bytes is not None and (type(self.max_bytes) is not int or self.max_bytes < 0):
            raise ValueError(f"max_bytes must be a number of bytes, got {self.max_bytes!r}")
        if self.clone not in (True, False, "auto"):
            raise ValueError(f"clone must be True, False or 'auto', got {self.clone!r}")
        if not (self.inputs or self.outputs):
            raise ValueError("inputs=False and outputs=False would keep nothing")
        if not self.detach and (self.device is not None or self.dtype is not None):
            raise ValueError(
                "detach=False with device= or dtype=: what is kept would be a converted copy, and "
                "gradients with respect to it are not those of the activation"
            )

    @classmethod
    def of(cls, wanted: Any, **changes: Any) -> "CaptureSpec":
        """A spec from a spec, from names, or (True) for everything; with some fields given."""
        given = {name: value for name, value in changes.items() if value is not None}
        if isinstance(wanted, CaptureSpec):
            if given:
                raise ValueError(f"{list(given)[0]}= was given beside a CaptureSpec, which says it")
            return wanted
        return cls(names=None if wanted is True else wanted, **given)

    def resolve(self, model: Any) -> list[str]:
        """The names of the points and modules it means in this model, before anything is run.

        Raises: UnknownHookError for names that select nothing, with the nearest ones.
        """
        names: list[str] = model.resolve_targets(self.names, self.layers)
        if self.inputs and all(name in model.hook_dict for name in names):
            raise ValueError(
                "inputs=True is about modules, and names= selects hook points only; name a "
                "module, such as 'blocks.0.mlp'"
            )
        return names

    def wants(self, name: str, model: Any) -> bool:
        """Whether it would keep the point or module of this name."""
        return name in self.resolve(model)

    def nbytes(self, model: Any, batch: int, pos: int, new: int = 0) -> int:
        """Bytes it would keep of one forward over `batch` texts of `pos` columns, and of a
        generation that adds `new` ones to them: measured on two columns."""
        return bytes_of(self, measured_sizes(model, self), batch, 0, pos, pos + new)


# --- what was kept --------------------------------------------------------------------------------


WHOLE = slice(None)  # all columns of a forward
APART = object()  # instead of a joined value: there are only those of single calls


class Series:
    """The values of one point in one run: pieces, or a buffer of known length they are copied
    into."""

    def __init__(self, axes: Axes) -> None:
        self.axes = axes
        self.calls: list[Call] = []
        self.pieces: list[Any] = []
        self.buffer: Tensor | None = None
        self.filled = 0

    def add(self, call: Call, value: Any) -> None:
        """One more piece."""
        self.pieces.append(value)
        self.calls.append(call)

    def drop_halves(self) -> None:
        """Forget a piece that an interrupt kept from being counted."""
        del self.pieces[len(self.calls) :]

    def write(self, call: Call, value: Tensor, non_blocking: bool) -> None:
        """One more piece, into the buffer."""
        assert self.buffer is not None
        assert self.axes.pos is not None
        n = value.shape[self.axes.pos]
        place = self.buffer.narrow(self.axes.pos, self.filled, n)
        if self.axes.unseen is not None:
            place = place[..., : value.shape[-1]]
        place.copy_(value, non_blocking=non_blocking)
        self.filled += n
        self.add(call, place)

    def spill(self) -> None:
        """Go on without the buffer: more comes than it was made for."""
        self.buffer = None

    def joined(self, forwards: list[Forward]) -> Any:
        """All pieces as one value; `APART` when they are no consecutive columns.

        A forward that broke off has left its last points without their last columns.
        """
        if not self.pieces:  # it broke off before the first one was kept
            return APART
        if len(forwards) == len(self.pieces) == 1 and self.buffer is None:
            return self.pieces[0]
        if not forwards:  # the model does not say where it is
            return self.pieces[-1]
        if self.axes.pos is None:
            if len(self.pieces) == 1:
                return self.pieces[0]
            alike = {piece.shape if isinstance(piece, Tensor) else None for piece in self.pieces}
            return torch.stack(self.pieces) if len(alike) == 1 and None not in alike else APART
        wanted = [number for number, forward in enumerate(forwards) if forward.n_kept]
        called = [call.forward for call in self.calls if forwards[call.forward].n_kept]
        if called != wanted[: len(called)]:
            return APART
        if len(self.pieces) == 1 and self.buffer is None:
            return self.pieces[0]
        if self.buffer is None:
            self._join()
        assert self.buffer is not None
        whole = self.buffer.narrow(self.axes.pos, 0, self.filled)
        last = forwards[self.calls[-1].forward]
        return whole if self.axes.unseen is None else whole[..., : last.stop]

    def _join(self) -> None:
        """Move the pieces into a buffer of their own, one after the other."""
        pos, pieces = self.axes.pos, self.pieces
        assert pos is not None
        if any(piece.requires_grad for piece in pieces):
            keys = pieces[-1].shape[-1]
            if self.axes.unseen is not None:
                pieces = [padded(piece, keys, self.axes.unseen) for piece in pieces]
            self.buffer = torch.cat(pieces, pos)
            self.filled = self.buffer.shape[pos]
            return
        room = sum(piece.shape[pos] for piece in pieces)
        self.make_buffer(pieces[-1], room, pieces[-1].shape[-1])
        calls, self.calls, self.pieces = self.calls, [], []
        for number, call in enumerate(calls):
            piece, pieces[number] = pieces[number], None
            self.write(call, piece, non_blocking=False)

    def make_buffer(
        self,
        like: Tensor,
        room: int,
        keys: int,
        device: Device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Room for so many columns, and so many keys, of values like this one."""
        assert self.axes.pos is not None
        shape = list(like.shape)
        shape[self.axes.pos] = room
        if self.axes.unseen is not None:
            shape[-1] = keys
        place = like.device if device is None else torch.device(device)
        kind = like.dtype if dtype is None or not like.is_floating_point() else dtype
        with torch.inference_mode(False):  # a tensor of inference mode could not enter autograd
            self.buffer = torch.empty(shape, dtype=kind, device=place)
            if like.is_cuda and place.type == "cpu" and self.buffer.nbytes <= PINNED_AT_MOST:
                self.buffer = self.buffer.pin_memory()
            if self.axes.unseen is not None:
                self.buffer.fill_(self.axes.unseen)


def padded(value: Tensor, keys: int, unseen: float) -> Tensor:
    """More keys on the last axis, none of which was seen."""
    return nn.functional.pad(value, (0, keys - value.shape[-1]), value=unseen)


class Place(NamedTuple):
    """One forward of a run, to be found again when its gradients come."""

    step: StepContext
    part: slice | list[int] | None


class Kept(NamedTuple):
    """The columns that were kept of one forward."""

    start: int
    part: slice | list[int]  # of the columns computed there
    n_columns: int
    tokens: Int[Tensor, "batch kept"] | None
    mask: Int[Tensor, "batch kept"] | None

    @property
    def columns(self) -> Int[Tensor, " kept"]:
        """Their absolute numbers."""
        every = torch.arange(self.start, self.start + self.n_columns)
        return every if self.part is WHOLE else every[self.part]


class Run:
    """What is kept of consecutive forwards over one text."""

    def __init__(self) -> None:
        self.forwards: list[Forward] = []
        self.series: dict[str, Series] = {}
        self.last: StepContext | None = None  # the latest forward, kept or not
        self.part: slice | list[int] | None = WHOLE  # of that forward; None: nothing
        self.places: list[Place] = []  # one for each forward, while gradients may come
        self.kept: list[Kept] = []
        self.batch = 1
        self.planned = 0  # bytes, counted when there is a limit

    def continued_by(self, step: StepContext) -> bool:
        """Whether a forward goes on with the same text, or runs it again with more behind it."""
        last = self.last
        if last is None or step.sequence is None or step.sequence is not last.sequence:
            return False
        # a generation may run all of it again; a cache that is at its start again lost a forward
        again = step.start == 0 and step.expected_stop is not None
        grows = step.stop > last.stop and (again or step.start == last.stop)
        return grows and step.batch == last.batch

    def recording(self, has_batch_dim: bool) -> Recording:
        """What is kept so far, joined."""
        record = Recording(forwards=list(self.forwards), has_batch_dim=has_batch_dim)
        for name, series in self.series.items():
            series.drop_halves()
            record.calls[name] = list(series.calls)
            record.axes[name] = series.axes
            value = series.joined(self.forwards)
            if value is not APART:
                record.keep(name, value)
                if len(series.pieces) > 1 and isinstance(value, Tensor) and value.requires_grad:
                    numbered = zip(series.calls, series.pieces, strict=True)
                    record.in_graph |= {f"{name}:{call.number}": part for call, part in numbered}
                continue
            for call, piece in zip(series.calls, series.pieces, strict=True):
                record.keep(f"{name}:{call.number}", piece)
        if self.kept:
            columns = [each.columns for each in self.kept]
            record.columns = joined(columns)
            record.attention_mask = self._mask(columns)
            if self.last is not None and self.last.attention_mask is not None:
                record.key_mask = self.last.attention_mask.cpu()
            ids = [each.tokens for each in self.kept if each.tokens is not None]
            if len(ids) == len(self.kept):
                record.tokens = joined(ids)
        return record

    def _mask(self, columns: list[Int[Tensor, " _"]]) -> Int[Tensor, "batch kept"]:
        """1 where what was kept is no padding."""
        if all(each.mask is None for each in self.kept):
            return torch.ones(self.batch, sum(map(len, columns)), dtype=torch.long)
        return joined(
            [
                torch.ones(self.batch, len(kept), dtype=torch.long)
                if each.mask is None
                else each.mask.cpu()
                for each, kept in zip(self.kept, columns, strict=True)
            ]
        )


def joined(parts: list[Tensor]) -> Tensor:
    """One behind the other, and nobody else's memory."""
    return parts[0].clone() if len(parts) == 1 else torch.cat(parts, -1)


# --- listening ------------------------------------------------------------------------------------


class Recorder:
    """Listens at the points and modules of a spec, and keeps what the spec asks for.

    Args:
        columns: chooses among the columns of each forward by their place in it, instead of the
            spec's absolute ones.
        remove_batch_dim: keep `[0]` of batches of one; ValueError for larger ones.
        into: only the latest value of each name is kept, here.
    """

    def __init__(
        self,
        model: Any,
        spec: CaptureSpec,
        columns: Slice | None = None,
        remove_batch_dim: bool = False,
        into: dict[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.spec = spec
        self.names = spec.resolve(model)
        points: dict[str, HookPoint] = model.hook_dict
        self.modules = {n: model.mod_dict[n] for n in self.names if n not in points}
        self.axes = {
            n: Axes(points[n].pos_axis, points[n].unseen) for n in self.names if n in points
        }
        # not `point.name`: a model that is a part of another one has longer names there
        self.name_of = {points[n]: n for n in self.axes}
        self.steps = Steps(spec.steps)
        self.absolute = None if spec.pos_slice is None else Columns(spec.pos_slice).in_order()
        if self.absolute is not None:
            for name, axes in self.axes.items():
                if axes.pos is None:
                    raise ValueError(f"{name!r} has no position axis for pos_slice= to choose from")
        self.relative = columns
        self.remove_batch_dim = remove_batch_dim
        self.into = into
        self.runs: list[Run] = []
        self.version = 0  # how much was seen: readers look whether there is more
        self.counts: dict[str, int] = {}  # visits of each name, kept or not
        self._step: StepContext | None = None
        self._run: Run | None = None  # the one that is going on
        self._thread: int | None = None  # whose forwards are meant; None: everybody's
        self._leaves_inference = True  # unless whoever listens is in that mode already
        self._outer: StepContext | None = None  # the forward in the middle of which it listens
        self._copies: bool | None = None  # whether to copy what is kept; None: not looked yet
        self._pending: set[torch.device] = set()  # accelerators whose copies may not have arrived
        self._sizes: list[Size] | None = None  # of what it would keep, when there is a limit

    @property
    def takes_copies(self) -> bool:
        """Whether what it keeps of a generation goes into buffers, but for rare exceptions."""
        spec = self.spec
        goes_on = self.steps.go_on and self.into is None and not self.remove_batch_dim
        return goes_on and spec.detach and not (spec.incl_bwd or self.modules)

    @property
    def run(self) -> Run:
        """The one that is going on."""
        if self._run is None:
            self._run = Run()
            self.runs.append(self._run)
        return self._run

    @contextmanager
    def listening(self, **ending: bool) -> Iterator["Recorder"]:
        """Attached to the model's points and modules while the block lasts."""
        if self.spec.max_bytes is not None:
            self._sizes = measured_sizes(self.model, self.spec)
        self._thread, self._outer = get_ident(), current_step()
        self._leaves_inference = not torch.is_inference_mode_enabled()
        with ExitStack() as stack:
            # not to be swept away by a reset_hooks() in the middle
            stays = ending.get("reset_hooks_end", True)
            stack.enter_context(self.model.attached(self.hooks(), is_permanent=stays, **ending))
            for name, module in self.modules.items():
                hook = _ModuleHook(self, name)
                handle = module.register_forward_hook(hook, with_kwargs=True)
                stack.callback(handle.remove)
            yield self

    def hooks(self) -> list[Attachment]:
        """What is to be attached where, for the points among the names."""
        forward = [Attachment(name, self.activation, "fwd") for name in self.axes]
        backward = [Attachment(name, self.gradient, "bwd") for name in self.axes]
        return forward + backward if self.spec.incl_bwd else forward

    # -- what the hooks do --

    def _name(self, hook: HookPoint) -> str:
        """That of a point here, or of a point in a copy of the model."""
        return self.name_of.get(hook) or hook.name or ""

    def activation(self, tensor: Tensor, hook: HookPoint) -> None:
        """The forward hook."""
        if self._thread is not None and get_ident() != self._thread:
            return
        self._see()
        name = self._name(hook)
        self._keep(name, tensor, self.axes[name])

    def gradient(self, tensor: Tensor, hook: HookPoint) -> None:
        """The backward hook; autograd may have threads of its own."""
        name, step = self._name(hook), current_step()
        for run in self.runs:
            for number, place in enumerate(run.places):
                if place.step is step:
                    before = self._step, self._run, run.part
                    self._step, self._run, run.part = step, run, place.part
                    self._keep(name + "_grad", tensor, self.axes[name], number)
                    self._step, self._run, run.part = before
                    return
        self._keep(name + "_grad", tensor, self.axes[name])

    def of_module(self, name: str, args: Any, kwargs: Any, output: Any) -> None:
        """The forward hook of a module."""
        if get_ident() != self._thread:
            return
        self._see()
        axes = Axes(MODULE_POS_AXIS)
        if self.spec.outputs:
            self._keep(name, output, axes)
        if self.spec.inputs:
            first = args[0] if args else next(iter(kwargs.values()), None)
            self._keep(name + INPUT, first, axes)
            self._keep(name + ARGUMENTS, (args, kwargs), Axes(None))

    def _see(self) -> None:
        """Note the forward that is running, when it is a new one."""
        step = current_step()
        if step is self._step and step is not None:
            return
        self._step = step
        self._copies = None
        if step is None or self.into is not None:
            return  # a model that does not say where it is, or a reader that does not ask
        # not always the latest one: a hook may have run the model in the middle of this forward, a
        # logits processor between two steps
        known = (run for run in reversed(self.runs) if run.last is step or run.continued_by(step))
        self._run = next(known, None)
        if self.run.last is not step:
            self._begin(self.run, step)

    def _begin(self, run: Run, step: StepContext) -> None:
        self.version += 1
        if step.batch is not None:
            run.batch = step.batch
        if run.last is None or step.expected_stop is None:  # a generation is counted once
            stop = step.expected_stop or step.stop
            run.planned += self.check_budget(run.batch, step.start, step.stop, stop)
        again = run.last is not None and step.start < run.last.stop  # the whole text once more
        start = run.last.stop if again and run.last is not None else step.start
        run.last = step
        part = run.part = self._chosen(step, start)
        first = run.forwards[-1].last if run.forwards else 0
        n_columns, last = step.stop - step.start, first
        if part is not None:
            last += len(range(n_columns)[part]) if isinstance(part, slice) else len(part)
            mask = step.real
            if mask is None and step.attention_mask is not None:
                mask = step.attention_mask[:, step.start :]
            # on copies: they may be the caller's, who goes on with them
            tokens, mask = (
                None if each is None else each[:, part].clone() for each in (step.tokens, mask)
            )
            run.kept.append(Kept(step.start, part, n_columns, tokens, mask))
        run.forwards.append(Forward(step.step, step.phase, step.start, step.stop, first, last))
        if self.spec.incl_bwd:
            run.places.append(Place(step, part))

    def check_budget(self, batch: int, start: int, prefilled: int, stop: int) -> int:
        """What columns `start:stop` will come to in bytes, those from `prefilled` on one by one.
        ValueError when that, and what there is already, is more than the spec's `max_bytes`."""
        if self._sizes is None:
            return 0
        new = bytes_of(self.spec, self._sizes, batch, start, prefilled, stop)
        needed = new + sum(run.planned for run in self.runs)
        if needed > (self.spec.max_bytes or 0):
            raise ValueError(
                f"this would keep {needed} bytes, more than max_bytes={self.spec.max_bytes}; "
                "choose fewer names, layers, steps or columns, or a smaller dtype"
            )
        return new

    def _chosen(self, step: StepContext, start: int) -> slice | list[int] | None:
        """The places, in this forward, of the columns to keep; None: there are none."""
        if step not in self.steps:
            return None
        if self.relative is not None:
            n_columns = step.stop - step.start
            try:
                chosen = self.relative.apply(torch.arange(n_columns)).reshape(-1)
            except IndexError:
                raise ValueError(
                    f"pos_slice={self.relative.slice!r} is outside of the {n_columns} columns"
                ) from None
            if n_columns and not chosen.numel():
                raise ValueError(
                    f"pos_slice={self.relative.slice!r} chooses none of the {n_columns} columns"
                )
            return chosen.tolist()
        behind = start - step.start
        if self.absolute is None:
            return slice(behind, None) if behind else WHOLE
        here = self.absolute.within(start, step.stop)
        if here is None or not behind:
            return here
        if isinstance(here, slice):
            return slice(here.start + behind, here.stop + behind, here.step)
        return [place + behind for place in here]

    # -- keeping --

    def _keep(self, name: str, value: Any, axes: Axes, forward: int | None = None) -> None:
        number = self.counts[name] = self.counts.get(name, 0) + 1
        self.version += 1
        if self.into is not None or self._step is None:
            self._keep_latest(name, number, value, axes)
            return
        run = self.run
        if run.part is None:
            return
        axes = self._axes_of(value, axes)
        call = Call(number, len(run.forwards) - 1 if forward is None else forward)
        series = run.series.get(name)
        if series is None:
            series = run.series[name] = Series(axes)
        elif series.axes != axes or (series.calls and series.calls[-1].forward == call.forward):
            series.axes = axes
            series.spill()
        if not isinstance(value, Tensor):
            series.add(call, self._kept_inside(value))
            return
        chosen = self._of_chosen_columns(name, value, axes)
        if self._buffered(series, chosen):
            chosen = chosen.detach() if chosen.requires_grad else chosen
            series.write(call, chosen, self.spec.non_blocking)
            if not chosen.is_cpu:
                self._pending.add(chosen.device)
        else:
            series.add(call, self._kept(chosen, value))

    def _keep_latest(self, name: str, number: int, value: Any, axes: Axes) -> None:
        """Keep a value in the place of those before it."""
        if isinstance(value, Tensor):
            kept = self._kept(self._of_chosen_columns(name, value, axes), value)
        else:
            kept = self._kept_inside(value)
        if self.into is not None:
            self.into[name] = kept
            return
        series = self.run.series[name] = Series(axes)
        series.add(Call(number, 0), kept)

    def _axes_of(self, value: Any, axes: Axes) -> Axes:
        """Without positions where the value has no axis as long as this forward."""
        step = self._step
        if axes.pos is None or step is None:
            return axes
        fits = (
            isinstance(value, Tensor)
            and value.ndim > axes.pos
            and value.shape[axes.pos] == step.stop - step.start
        )
        return axes if fits else Axes(None)

    def _of_chosen_columns(self, name: str, value: Tensor, axes: Axes) -> Tensor:
        if axes.pos is None:
            return value
        if self._step is None or self.into is not None:
            value = value if self.relative is None else self.relative.apply(value, dim=axes.pos)
        elif self.run.part is not WHOLE:
            value = value[(slice(None),) * axes.pos + (self.run.part,)]
        if not self.remove_batch_dim:
            return value
        if value.shape[0] != 1:
            raise ValueError(f"remove_batch_dim needs a batch of 1, {name} has {value.shape[0]}")
        return value[0]

    def _buffered(self, series: Series, value: Tensor) -> bool:
        """Whether the value goes into a buffer: where it is known how long the text will be."""
        if series.buffer is not None or series.pieces:
            return series.buffer is not None
        step, pos = self._step, series.axes.pos
        if step is None or step.expected_stop is None or pos is None:
            return False
        if not self.spec.detach or self.remove_batch_dim or not self.steps.go_on:
            return False
        room = step.expected_stop - step.start
        if self.absolute is not None:
            room = self.absolute.count(step.start, step.expected_stop)
        if room <= value.shape[pos]:  # nothing comes after this
            return False
        series.make_buffer(value, room, step.expected_stop, self.spec.device, self.spec.dtype)
        return True

    def _kept(self, chosen: Tensor, value: Tensor) -> Tensor:
        if self._leaves_inference and torch.is_inference_mode_enabled():
            # of its own accord a generation is in that mode, whose tensors could not enter autograd
            with torch.inference_mode(False):
                return self._kept(chosen.clone() if chosen.is_inference() else chosen, value)
        kept = chosen.detach() if self.spec.detach else chosen
        if self.spec.device is not None:
            if kept.device.type != "cpu":
                self._pending.add(kept.device)
            kept = kept.to(self.spec.device, non_blocking=self.spec.non_blocking)
        if self.spec.dtype is not None and kept.is_floating_point():
            kept = kept.to(self.spec.dtype)
        # and would keep the whole alive
        is_part = chosen is not value and kept.numel() < value.numel()
        if self.spec.clone is False or not (is_part or self._copies_all()):
            return kept
        if not self.spec.detach and self.spec.clone == "auto":
            return kept  # a copy would lie beside the path that gradients take
        shared = kept.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
        return kept.clone() if shared else kept

    def _copies_all(self) -> bool:
        if self._copies is None:
            self._copies = self.spec.clone is True or self.model.edits_are_live()
        return self._copies

    def _kept_inside(self, value: Any) -> Any:
        """Arguments: tensors as they are kept, plain data, and the names of all other things, which
        would go on changing."""
        if isinstance(value, Tensor):
            return self._kept(value, value)
        if isinstance(value, tuple | list):
            return type(value)(self._kept_inside(each) for each in value)
        if isinstance(value, Mapping):
            return {key: self._kept_inside(each) for key, each in value.items()}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        return NotKept(type(value).__name__)

    # -- afterwards --

    def part_from(self, given: Any) -> None:
        """Copy what shares memory with inputs and outputs of a forward, nested in any way: their
        owner is free to edit them."""
        if self.spec.clone is False or not self.runs or get_ident() != self._thread:
            return
        given_away = {tensor.untyped_storage().data_ptr() for tensor in tensors_in(given)}
        for series in self.run.series.values():
            if series.buffer is not None or not series.pieces:
                continue
            piece = series.pieces[-1]  # those of earlier forwards have parted from their outputs
            if isinstance(piece, Tensor) and piece.untyped_storage().data_ptr() in given_away:
                series.pieces[-1] = parted(piece)

    def arrived(self) -> None:
        """Wait for copies that are on their way."""
        for device in self._pending:
            torch.accelerator.synchronize(device)
        self._pending.clear()

    def first(self) -> Recording:
        """What was kept of the forward, or the generation, that was run here; empty when there was
        none. What its hooks and processors ran in the middle are other runs."""
        if self.into is not None:
            return Recording(self.into, has_batch_dim=not self.remove_batch_dim)
        for run, record in zip(self.runs, self.recordings(), strict=True):
            if run.last is None or run.last.outer is self._outer:
                return record
        return Recording()

    def warn_if_empty(self) -> None:
        """A UserWarning when there was something to listen to and nothing of it was asked for."""
        forwards = [forward for run in self.runs for forward in run.forwards]
        had_columns = any(forward.stop > forward.start for forward in forwards)
        if had_columns and not any(forward.n_kept for forward in forwards):
            warnings.warn(
                f"nothing was captured: no forward had the steps={self.spec.steps!r} and "
                f"pos_slice={self.spec.pos_slice!r} that were asked for",
                stacklevel=4,
            )

    def recordings(self) -> list[Recording]:
        """What was kept, run by run."""
        self.arrived()
        return [run.recording(has_batch_dim=not self.remove_batch_dim) for run in self.runs]

    def latest(self) -> Recording:
        """What was kept of the latest run; empty when there was none."""
        return self.recordings()[-1] if self.runs else Recording()


class NotKept(str):
    """Stands in kept arguments for an object that would go on changing: its type's name."""

    def __repr__(self) -> str:
        return f"<{self}, not kept>"


class _ModuleHook:
    """What a recorder registers at a module."""

    is_listener = True  # it changes nothing: see HookedRootModule.edits_are_live

    def __init__(self, recorder: Recorder, name: str) -> None:
        self.recorder = recorder
        self.name = name

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self.recorder.of_module(self.name, args, kwargs, output)


class PartsFromOutput:
    """What a recorder registers at the model itself."""

    is_listener = takes_copies = True

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self.recorder.part_from((args, kwargs, output))


# they only look: see LensHandle
Recorder.activation.is_listener = True  # type: ignore[attr-defined]
Recorder.gradient.is_listener = True  # type: ignore[attr-defined]


# --- how much it would be -------------------------------------------------------------------------


MEASURED_ON = 2  # columns


class Size(NamedTuple):
    """Bytes of one value over `MEASURED_ON` columns, and which axes grow with the text."""

    nbytes: int
    axes: Axes


def measured_sizes(model: Any, spec: CaptureSpec) -> list[Size]:
    """What a spec would keep of each name, by a forward over so few columns; hooks of others do not
    see it."""
    every = CaptureSpec(spec.names, spec.layers, spec.inputs, spec.outputs)
    with model.hooks_set_aside(), torch.no_grad():
        recorder = Recorder(model, every)
        with recorder.listening():
            model(torch.zeros(1, MEASURED_ON, dtype=torch.long, device=model.W_E.device))
    sizes = []
    for series in recorder.run.series.values():
        for value in tensors_in(series.pieces):
            converted = spec.dtype is not None and value.is_floating_point()
            itemsize = spec.dtype.itemsize if converted and spec.dtype else value.element_size()
            sizes.append(Size(value.numel() * itemsize, series.axes))
    return sizes


def bytes_of(
    spec: CaptureSpec, sizes: list[Size], batch: int, start: int, prefilled: int, stop: int
) -> int:
    """What values of these sizes come to for columns `start:stop` of `batch` texts, of which those
    from `prefilled` on come one at a time."""
    forwards = [(start, prefilled), *((each, each + 1) for each in range(prefilled, stop))]
    if not callable(spec.steps):  # a function has to see the forward itself: all, then
        steps = Steps(spec.steps)
        forwards = [each for number, each in enumerate(forwards) if steps.has(number)]
    columns = sum(last - first for first, last in forwards)
    chosen = None if spec.pos_slice is None else Columns(spec.pos_slice)
    if chosen is not None:
        forwards = [each for each in forwards if chosen.count(*each)]
    kept = columns if chosen is None else sum(chosen.count(*each) for each in forwards)
    # a buffer that goes on has room for all keys; otherwise there are those seen last
    seen = forwards[-1][1] if forwards else 0
    n_keys = stop if len(forwards) > 1 and Steps(spec.steps).go_on else seen
    total = 0.0
    for size in sizes:
        keys = 1.0 if size.axes.unseen is None else n_keys / MEASURED_ON
        n_columns = columns if size.axes.pos is None else kept
        total += size.nbytes * batch * n_columns / MEASURED_ON * keys
    return round(total) * (2 if spec.incl_bwd else 1)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested containers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors_in(each)
