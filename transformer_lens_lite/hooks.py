"""Named places in a forward pass where one can listen or interfere.

A `HookPoint` is called in the middle of a sentence, `q = self.hook_q(q)`, and returns its input.
With nobody listening that costs one truth test.

A hook is `fn(tensor, hook=point)`. It returns None (unchanged; in-place edits do take effect) or a
replacement of the same shape. A backward hook gets the gradient of the activation and returns a
gradient, a 1-tuple of one, or None.
"""

import copy
import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from functools import partial
from threading import RLock
from typing import Any, Literal, NamedTuple, cast
from weakref import WeakValueDictionary

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from transformer_lens_lite.steps import (
    Columns,
    Pos,
    StepContext,
    Steps,
    When,
    current_step,
    running,
)
from transformer_lens_lite.watched import (
    Attributes,
    TellingDict,
    TellingList,
    edits_of,
    is_listener,
)

HookFunction = Callable[..., Any]
Direction = Literal["fwd", "bwd"]
Both = Literal["fwd", "bwd", "both"]

# Handles that this thread does not call for now; and one entry for each block in which some thread
# does so, because a compiled graph can look there, but not at a context variable.
set_aside: ContextVar[frozenset["LensHandle"]] = ContextVar("set_aside", default=frozenset())
aside_somewhere: list[int] = []

# Of all models, by their ids: the components at which something is attached that could edit a
# value, and those with parts that do not tell. While there are none, no model has to be searched.
editors_somewhere: "WeakValueDictionary[int, Component]" = WeakValueDictionary()
strangers_somewhere: "WeakValueDictionary[int, Component]" = WeakValueDictionary()

# Held from reading what is attached to writing down what follows from it: no other thread may come
# between. A destructor in this one may, so that it is read again.
LOOKING = RLock()


def _look_alone() -> None:
    """In the child of a fork: the thread that held the lock is not there."""
    global LOOKING
    LOOKING = RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_look_alone)

# Where torch's own methods put what they attach to a module.
TORCHS_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Component(nn.Module):
    """nn.Module without the costs that show in a small model's decoding loop.

    Submodules and parameters are ordinary attributes too: nn.Module finds them only after the
    normal lookup failed, which costs more than several idle hook points do. And a call goes
    straight to `forward` unless somebody's functions are attached.
    """

    listened: bool  # whether any function is attached, or wants every value anyway
    _edited = False  # whether one of them could edit a value

    def __init__(self) -> None:
        super().__init__()
        self._watch()

    def _watch(self) -> None:
        """Hear of every change of the containers that torch has made."""
        for name in WATCHED:
            setattr(self, name, self.__dict__[name])

    def look_again(self) -> None:
        """Work out anew whether anybody listens, which selects the slow path, and could edit."""
        own = self.__dict__
        attached = None
        with LOOKING:
            while attached != (now := self.attached_here()):  # by a destructor in between
                attached = now
                edited = self._could_edit(attached)
                own["listened"] = edited or bool(attached) or "stands_for_a_point" in own
                if edited:  # in an order in which an interrupt leaves nobody out
                    editors_somewhere[id(self)] = self
                own["_edited"] = edited
                if not edited:
                    editors_somewhere.pop(id(self), None)

    def attached_here(self) -> list[Any]:
        """All functions attached here, torch's own hooks among them; at a point, handles too."""
        return torchs_hooks(self) if self.has_torchs_hooks else []

    def _could_edit(self, attached: list[Any]) -> bool:
        return not all(map(is_listener, attached))

    @property
    def has_torchs_hooks(self) -> bool:
        """Whether something that torch's own methods have attached is still there."""
        own = self.__dict__
        return bool(
            own["_forward_hooks"]
            or own["_forward_pre_hooks"]
            or own["_backward_hooks"]
            or own["_backward_pre_hooks"]
        )

    def weights_leave(self) -> None:
        """A parameter is about to be replaced, or all are to be moved: nothing should keep their
        memory alive."""

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles are not listened to by those who listen to the original."""
        state = self.__dict__.copy()
        state.pop("_edited", None)  # a copy has to enter itself
        if any(map(is_listener, self._forward_hooks.values())):
            kept = self._forward_hooks.copy()
            for number, hook in self._forward_hooks.items():
                if is_listener(hook):
                    del kept[number]
            state["_forward_hooks"] = kept
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # copies and pickles hold plain containers
        self._watch()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (
            self.listened
            or self._compiled_call_impl is not None
            or torch_module._has_any_global_hook()
        ):
            return super().__call__(*args, **kwargs)
        return self.forward(*args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in WATCHED:
            before = self.__dict__.get(name)
            for entry in before if isinstance(before, Attributes) else ():
                self.__dict__.pop(entry, None)
            self.__dict__[name] = WATCHED[name](self, value)
            self.look_again()
            return
        super().__setattr__(name, value)
        if name == "__class__" and "listened" in self.__dict__:
            self.look_again()


def torchs_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """What torch's own methods have attached to a module."""
    return [function for name in TORCHS_HOOKS for function in getattr(module, name).values()]


class ComponentList(Component, nn.ModuleList):
    """An nn.ModuleList whose entries tell what is attached to them."""

    def __init__(self, modules: Iterable[nn.Module] | None = None) -> None:
        super().__init__()
        if modules is not None:
            self.extend(modules)

    def __getitem__(self, index: Any) -> Any:
        """An entry; of a slice, a plain list, which nobody has to hear."""
        if isinstance(index, slice):
            return nn.ModuleList(list(self)[index])
        return super().__getitem__(index)


class Weights(Attributes):
    """The parameters of a component, which hears when another one takes the place of one."""

    def __setitem__(self, name: str, value: Any) -> None:
        self._tell()
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        self._tell()
        super().__delitem__(name)

    def _tell(self) -> None:
        owner: Any = self.owner()
        if owner is not None:
            owner.weights_leave()


class Parts(Attributes):
    """The submodules of a component. A module in the place of a point wants every value, on the
    slow path, whether hooks are attached to it or not."""

    def __init__(self, owner: nn.Module, entries: dict[str, Any]) -> None:
        self.points = set(getattr(owner.__dict__.get("_modules"), "points", ()))  # their names
        super().__init__(owner, entries)
        for name, module in entries.items():
            self._place(name, module)

    def __setitem__(self, name: str, value: nn.Module | None) -> None:
        super().__setitem__(name, value)
        self._place(name, value)

    def _place(self, name: str, module: nn.Module | None) -> None:
        if getattr(module, "stands_for_a_point", False):
            self.points.add(name)
        elif module is not None and name in self.points:
            module.listened = module.stands_for_a_point = True  # type: ignore[assignment]
        owner = self.owner()
        if isinstance(owner, Component) and not isinstance(module, Component | None):
            strangers_somewhere[id(owner)] = owner


WATCHED: dict[str, Callable[[Component, Any], Any]] = {
    "_parameters": Weights,
    "_modules": Parts,
    **dict.fromkeys(TORCHS_HOOKS, TellingDict),
}


class Limits:
    """Where a hook acts: at some steps, on some absolute columns, or at one call of its point.

    Args:
        when: see `When`.
        pos: absolute columns; the hook gets only those of them that are computed in this forward,
            and is not called where none is. None: the whole value.
        call: the only call of the point, counted from 1, at which it acts; None: every one.
    Raises: ValueError or TypeError for what chooses nothing.
    """

    def __init__(self, when: When = "all", pos: Pos = None, call: int | None = None) -> None:
        self.steps = Steps(when)
        self.columns = None if pos is None else Columns(pos)
        self.call = call

    @property
    def are_none(self) -> bool:
        """Whether the hook acts everywhere."""
        return self.steps.is_all and self.columns is None and self.call is None

    def __repr__(self) -> str:
        columns = None if self.columns is None else self.columns.range or self.columns.list
        return f"Limits(when={self.steps!r}, pos={columns!r}, call={self.call!r})"

    def refuse_on(self, point: "HookPoint") -> None:
        """ValueError for columns of a value that has none."""
        if self.columns is not None and point.pos_axis is None:
            raise ValueError(f"{point.name!r} has no position axis for pos= to choose from")

    def part(self, point: "HookPoint", call: int) -> slice | list[int] | None:
        """What of the value, along its position axis, the hook gets; None: it is not called."""
        if self.call is not None and call != self.call:
            return None
        if self.steps.is_all and self.columns is None:
            return slice(None)
        step = point.step
        if step not in self.steps:
            return None
        if self.columns is None:
            return slice(None)
        return self.columns.within(step.start, step.stop)


NO_LIMITS = Limits()


class Attachment(NamedTuple):
    """A function that is to be attached to a point of this name."""

    name: str
    hook: HookFunction
    direction: Direction
    limits: Limits = NO_LIMITS


class LensHandle:
    """One function for one hook point, which `check_hook` has seen. `remove()` detaches it; doing
    so twice is harmless. `num_fires` counts how often it was called."""

    def __init__(
        self,
        point: "HookPoint",
        user_hook: HookFunction,
        direction: Direction,
        is_permanent: bool = False,
        context_level: int | None = None,
        alias_names: Sequence[str] | None = None,
        limits: Limits = NO_LIMITS,
    ) -> None:
        limits.refuse_on(point)
        self.limits = None if limits.are_none else limits
        self.num_calls = 0  # of the point
        self.num_fires = 0  # of the function
        self.fires: list[tuple[int, bool]] | None = None  # (call, replaced), when they are wanted
        self.user_hook = user_hook
        self.direction = direction
        self.is_permanent = is_permanent
        self.context_level = context_level
        self.is_listener = is_listener(user_hook)  # what it keeps needs no protection from it
        self.point = point
        self._callers = [HookAlias(point, name) for name in alias_names] if alias_names else [point]

    @property
    def hook(self) -> "LensHandle":
        """The handle itself: classic code removes through `handle.hook.remove()`."""
        return self

    def attach(self, prepend: bool = False) -> "LensHandle":
        """Let the point call the function, after those it calls already or before them."""
        siblings = self.point.handles(self.direction)
        siblings.insert(0 if prepend else len(siblings), self)
        return self

    def remove(self) -> None:
        """Detach the function from its point."""
        self.point.handles(self.direction).discard(self)

    @property
    def when(self) -> When:
        """The steps it is limited to."""
        return "all" if self.limits is None else self.limits.steps.when

    @property
    def pos(self) -> Columns | None:
        """The absolute columns it is limited to; None: it gets the whole value."""
        return None if self.limits is None else self.limits.columns

    def run(self, tensor: Tensor, point: "HookPoint") -> Tensor:
        """Call the function, once per alias, and return what the model carries on with."""
        self.num_calls += 1
        if self.limits is None:
            return self._run_on(tensor, point)
        part = self.limits.part(point, self.num_calls)
        if part is None:
            return tensor
        if part == slice(None):
            return self._run_on(tensor, point)
        assert point.pos_axis is not None  # refused when the hook was attached
        index = (slice(None),) * point.pos_axis + (part,)
        chosen = tensor[index]
        with running(point.step.of_part(part)):  # where hook.step.local counts from
            result = self._run_on(chosen, point)
        # columns next to each other are a view: an edit in place has been made where it belongs
        if result is not chosen or isinstance(part, list):
            tensor = tensor.clone()
            tensor[index] = result
        return tensor

    def _run_on(self, tensor: Tensor, point: "HookPoint") -> Tensor:
        self.num_fires += 1
        before, edits = tensor, 0 if self.fires is None else edits_of(tensor)
        for caller in self._callers:
            result = self.user_hook(tensor, hook=caller)
            if isinstance(result, tuple) and len(result) == 1 and self.direction == "bwd":
                result = result[0]
            if result is not None:
                tensor = self._checked(result, tensor, point)
        if self.fires is not None:
            replaced = tensor is not before or edits_of(before) != edits
            self.fires.append((self.num_calls, replaced))
        return tensor

    def _checked(self, result: Any, tensor: Tensor, point: "HookPoint") -> Tensor:
        """What a hook returned, in the value's dtype. TypeError for what is no tensor, ValueError
        for another shape, or for a dtype that is no rounding of the value's."""
        if not isinstance(result, Tensor):
            raise TypeError(
                f"a hook on {point.name!r} returned a {type(result).__name__}; it may return "
                "None or a "
                f"tensor of shape {tuple(tensor.shape)}"
            )
        if result.shape != tensor.shape:
            raise ValueError(
                f"a hook on {point.name!r} returned shape {tuple(result.shape)}, expected "
                f"{tuple(tensor.shape)}"
            )
        if result.is_floating_point() and tensor.is_floating_point():
            return result.to(tensor.dtype)  # a fp32 vector added in a bf16 model, for one
        if result.dtype != tensor.dtype:
            raise ValueError(
                f"a hook on {point.name!r} returned {result.dtype}, expected {tensor.dtype}"
            )
        return result

    def __repr__(self) -> str:
        name = getattr(self.user_hook, "__qualname__", repr(self.user_hook))
        marks = ["permanent"] if self.is_permanent else []
        marks += [] if self.context_level is None else [f"level {self.context_level}"]
        return f"<{self.direction} hook {name}{' ' + ', '.join(marks) if marks else ''}>"


def check_hook(hook: Any, name: str | None) -> None:
    """TypeError for what cannot be called as `hook(tensor, hook=point)`."""
    if not callable(hook):
        raise TypeError(f"a hook must be callable, got {type(hook).__name__}")
    try:
        signature = inspect.signature(hook)
    except (TypeError, ValueError):
        return  # some builtins do not say
    try:
        signature.bind(None, hook=None)
    except TypeError as error:
        called = getattr(hook, "__name__", repr(hook))
        raise TypeError(
            f"a hook on {name!r} is called as {called}(tensor, hook=point), but it takes "
            f"{signature}: {error}"
        ) from None


class HookAlias:
    """What a hook registered under an alias gets as `hook`: the point, under another name."""

    def __init__(self, point: "HookPoint", name: str) -> None:
        self._point = point
        self.name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._point, attribute)


class HandleGroup(list[LensHandle]):
    """The handles of a hook added to several points at once; `remove()` removes them all."""

    @property
    def num_fires(self) -> int:
        """How often the function was called, at all points together."""
        return sum(each.num_fires for each in self)

    def remove(self, *handle: LensHandle) -> None:
        """Without arguments: detach all of them."""
        if handle:
            super().remove(*handle)
            return
        for each in self:
            each.remove()


class HookPoint(Component):
    """The identity, with a name, at which functions can be attached.

    Args:
        optional: computing the value costs something, so a blanket capture leaves it out.
        pos_axis: which axis of the value counts query positions; None: it has neither a batch nor
            a position axis of its own.
        unseen: the last axis counts keys, and this is the value at keys that a query does not see;
            None: it has no such axis.
    """

    name: str | None
    stands_for_a_point = True
    computes = False  # whether a subclass, or an attribute, has a forward of its own
    fwd_hooks: list[LensHandle]  # lists that tell: what is put in or taken out is heard of
    bwd_hooks: list[LensHandle]

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if cls.forward is not HookPoint.forward:
            cls.computes = True
            cls.__call__ = cls.__dict__.get("__call__", HookPoint._visit)  # type: ignore[method-assign]

    def __init__(
        self, optional: bool = False, pos_axis: int | None = 1, unseen: float | None = None
    ) -> None:
        self.__dict__.update(fwd_hooks=[], bwd_hooks=[])  # they are asked while it is made
        super().__init__()
        self.fwd_hooks = TellingList(self)
        self.bwd_hooks = TellingList(self)
        self.ctx: dict[Any, Any] = {}
        self.name = None
        self.optional = optional
        self.pos_axis = pos_axis
        self.unseen = unseen

    @property
    def step(self) -> StepContext:
        """Where the forward stands in which a hook is called. LookupError outside of one."""
        step = current_step()
        if step is None:
            raise LookupError(
                "hook.step is known while a HookedTransformer runs forward, and only then"
            )
        return step

    def __call__(self, x: Tensor) -> Tensor:
        return self._visit(x) if self.listened else x

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("fwd_hooks", "bwd_hooks"):
            value = TellingList(self, value)
            for handle in value:
                handle.point = self
            self.__dict__[name] = value
            self.look_again()
            return
        if name == "forward" and not self.computes:
            kind = type(self)
            is_plain = kind is HookPoint  # whose copies and pickles should find their class
            own = {"forward": lambda self, x: x}  # the attribute goes before it
            self.__class__ = ComputingHookPoint if is_plain else type(kind.__name__, (kind,), own)
        super().__setattr__(name, value)

    def attached_here(self) -> list[Any]:
        handles = self.fwd_hooks + self.bwd_hooks
        return handles + torchs_hooks(self) if self.has_torchs_hooks else handles

    def _could_edit(self, attached: list[Any]) -> bool:
        return self.computes or super()._could_edit(attached)

    def forward(self, x: Tensor) -> Tensor:
        """The identity; reached only through hooks registered with torch's own methods. A subclass
        may do something else."""
        return x

    def _visit(self, x: Tensor) -> Tensor:
        if self.computes or self.has_torchs_hooks:
            x = Component.__call__(self, x)
        aside = set_aside.get() if aside_somewhere else ()
        for handle in tuple(self.fwd_hooks):
            if handle not in aside:
                x = handle.run(x, self)
        if self.bwd_hooks and x.requires_grad:
            x = x.view_as(x)  # a node of our own: the gradient seen is that of this point's readers
            handles = tuple(handle for handle in self.bwd_hooks if handle not in aside)
            x.register_hook(partial(self._visit_gradient, current_step(), handles))
        return x

    def _visit_gradient(
        self, step: StepContext | None, handles: tuple[LensHandle, ...], gradient: Tensor
    ) -> Tensor:
        """Those who were attached during the forward see its gradient, also when they are gone by
        then, as with torch's own backward hooks; recordings end when they end."""
        with nullcontext() if step is None else running(step):  # it is that forward's gradient
            for handle in handles:
                if not handle.is_listener or handle in self.bwd_hooks:
                    gradient = handle.run(gradient, self)
        return gradient

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        for name in ("fwd_hooks", "bwd_hooks"):
            state[name] = [handle for handle in state[name] if not handle.is_listener]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for name in ("fwd_hooks", "bwd_hooks"):
            # a shallow copy's are copies, too: those of the original stay there
            mine = [h if h.point is self else copy.copy(h) for h in self.__dict__[name]]
            setattr(self, name, mine)

    def handles(self, dir: Direction) -> TellingList:
        """The live list of handles of one direction."""
        if dir not in ("fwd", "bwd"):
            raise ValueError(f"dir must be 'fwd' or 'bwd', got {dir!r}")
        return cast(TellingList, self.fwd_hooks if dir == "fwd" else self.bwd_hooks)

    def add_hook(
        self,
        hook: HookFunction,
        dir: Direction = "fwd",
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
        alias_names: Sequence[str] | None = None,
        when: When = "all",
        pos: Pos = None,
    ) -> LensHandle:
        """Attach `hook(tensor, hook=point)`; hooks run in the order they were added.

        Args:
            prepend: run before those already there.
            alias_names: call it once per name, with `hook.name` being that name.
            when, pos: see `Limits`.
        Raises: ValueError for another `dir`; TypeError when `hook` is not callable.
        """
        check_hook(hook, self.name)
        limits = Limits(when, pos)
        handle = LensHandle(self, hook, dir, is_permanent, level, alias_names, limits)
        return handle.attach(prepend)

    def add_perma_hook(self, hook: HookFunction, dir: Direction = "fwd") -> LensHandle:
        """Attach a hook that `reset_hooks()` leaves in place."""
        return self.add_hook(hook, dir, is_permanent=True)

    def has_hooks(
        self,
        dir: Both = "both",
        including_permanent: bool = True,
        level: int | None = None,
    ) -> bool:
        """Whether a hook of that direction (and context level) is attached."""
        return any(
            (including_permanent or not handle.is_permanent)
            and (level is None or handle.context_level == level)
            for handle in self._handles_of(dir)
        )

    def remove_hooks(
        self,
        dir: Both = "fwd",
        including_permanent: bool = False,
        level: int | None = None,
    ) -> None:
        """Detach hooks of one direction; permanent ones only when asked, others by level if
        given."""
        for handle in self._handles_of(dir):
            matches = level is None or handle.context_level == level
            if including_permanent or (not handle.is_permanent and matches):
                handle.remove()

    def _handles_of(self, dir: Both) -> list[LensHandle]:
        if dir == "both":
            return self.fwd_hooks + self.bwd_hooks
        return list(self.handles(dir))

    def clear_context(self) -> None:
        """Empty `ctx`, the dictionary in which hooks may keep things."""
        self.ctx.clear()

    def layer(self) -> int:
        """The layer in the name; IndexError or ValueError for points outside the blocks."""
        return int((self.name or "").split(".")[1])

    def extra_repr(self) -> str:
        return "optional" if self.optional else ""


class ComputingHookPoint(HookPoint):
    """What a point becomes whose `forward` is assigned."""

    def forward(self, x: Tensor) -> Tensor:
        """The identity, until then."""
        return x


class Absent(Component):
    """What stands where a model has no such part: returns its input."""

    def __call__(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        """The identity."""
        return x
