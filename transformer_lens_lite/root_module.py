"""A model that knows its hook points by name: attaching, capturing, and cleaning up.

Every name is resolved before anything is run, and every context detaches exactly what it attached,
however it is left.
"""

import fnmatch
import operator
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from threading import Lock
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from transformer_lens_lite.capture import CaptureSpec, Recorder
from transformer_lens_lite.fingerprint import computes_as_ours, has_function_of_others
from transformer_lens_lite.hooks import (
    Attachment,
    Both,
    Component,
    Direction,
    HandleGroup,
    HookFunction,
    HookPoint,
    LensHandle,
    Limits,
    aside_somewhere,
    check_hook,
    editors_somewhere,
    set_aside,
    strangers_somewhere,
    torchs_hooks,
)
from transformer_lens_lite.nearest import closest, names_the_nearest, refuse_unknown
from transformer_lens_lite.steps import Pos, When
from transformer_lens_lite.utils import Slice, SliceInput, get_act_name, layer_numbers
from transformer_lens_lite.watched import is_listener

# a name, a glob, a predicate on names, or several of those; None: every point but the optional ones
NamesFilter = str | Callable[[str], bool] | Iterable[Any] | None
HookName = str | tuple[Any, ...] | Callable[[str], bool]
NamedHooks = Iterable[tuple[HookName, HookFunction]]
LEVELS = Lock()  # of `context_level`s
ON_ZERO_FIRE = ("warn", "error", "ignore")
ONE_CALL = re.compile(r"(.+):(\d+)")


class UnknownHookError(KeyError, ValueError):
    """A name that no hook point has. Caught as a KeyError or as a ValueError."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would show the repr, quotes and all


# of the two that pass the rest on to forward
HOOK_ARGUMENTS = ("fwd_hooks", "bwd_hooks", "reset_hooks_end", "clear_contexts")
CACHE_ARGUMENTS = (
    *("names_filter", "device", "remove_batch_dim", "incl_bwd", "pos_slice"),
    *("reset_hooks_end", "clear_contexts"),
)


class HookedRootModule(Component):
    """A module that knows its hook points by name.

    Call `setup()` at the end of the constructor, and again after replacing a submodule.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__()
        self.context_level = 0
        self.mod_dict: dict[str, nn.Module] = {}
        self.hook_dict: dict[str, HookPoint] = {}

    def setup(self) -> None:
        """Give every submodule its dotted name and index the hook points."""
        self.mod_dict = {}
        self.hook_dict = {}
        for name, module in self.named_modules():
            if name == "":
                continue  # the root itself would be a reference cycle
            module.name = name
            self.mod_dict[name] = module
            if isinstance(module, HookPoint):
                self.hook_dict[name] = module

    def hook_points(self) -> Iterable[HookPoint]:
        """All hook points, in registration order."""
        return self.hook_dict.values()

    # -- names --

    def wants_optional(self, name: str) -> bool:
        """Whether a blanket capture includes the optional point `name`."""
        return False

    def resolve_names(self, names_filter: NamesFilter = None) -> list[str]:
        """The hook names a filter selects, in registration order, before anything is run.

        A string is a name, a short name ("resid_post", in every layer; `("resid_post", 5)` in one)
        or a glob (`"blocks.*.hook_resid_post"`). Globs and predicates choose among the points of a
        blanket capture, and among the optional ones when none of those match.

        Raises: UnknownHookError (KeyError and ValueError) for a name, glob or predicate that
            selects nothing, with the nearest names.
        """
        chosen = dict.fromkeys(self._resolve(names_filter))
        if names_filter is None or is_glob(names_filter) or len(chosen) == 1:
            return list(chosen)  # in order
        return [name for name in self.hook_dict if name in chosen]

    def _resolve(self, names_filter: NamesFilter) -> list[str]:
        if names_filter is None:
            return self._blanket_of(self.hook_dict, "None")
        if isinstance(names_filter, str):
            if names_filter in self.hook_dict:
                return [names_filter]
            if is_glob(names_filter):
                matching = names_like(names_filter, tuple(self.hook_dict))
                return self._blanket_of(matching, repr(names_filter))
            if meant := self.names_meant_by(names_filter):
                return meant
            ending = [name for name in self.hook_dict if name.endswith(f".{names_filter}")]
            hint = f" Did you mean {ending[0]!r}?" if ending else ""
            last_parts = {name.rpartition(".")[2].removeprefix("hook_") for name in self.hook_dict}
            raise UnknownHookError(
                f"no hook point is called {names_filter!r}."
                f"{hint or closest(names_filter, {**self.hook_dict, **dict.fromkeys(last_parts)})}"
            )
        if isinstance(names_filter, nn.Module):
            name = str(getattr(names_filter, "name", ""))
            if self.hook_dict.get(name) is names_filter:
                return [name]
            raise UnknownHookError(f"{type(names_filter).__name__} is no hook point of this model")
        if callable(names_filter):
            chosen = [name for name in self.hook_dict if names_filter(name)]
            return self._blanket_of(chosen, getattr(names_filter, "__qualname__", "the predicate"))
        if is_name_and_layer(names_filter):
            name, layer, *layer_type = cast(tuple[Any, ...], names_filter)
            number = None if layer is None else operator.index(layer)  # numpy's and torch's too
            if meant := self.names_meant_by(name, number, *layer_type):
                return meant
            near = closest(get_act_name(*names_filter), self.hook_dict)
            raise UnknownHookError(f"no hook point is meant by {names_filter!r}.{near}")
        if not isinstance(names_filter, Iterable):
            raise TypeError(
                "names are a name, a glob, a predicate on names or a list of those, got "
                f"{names_filter!r}"
            )
        return [name for one in names_filter for name in self._resolve(one)]

    def names_meant_by(
        self, name: str, layer: int | None = None, layer_type: str | None = None
    ) -> list[str]:
        """The hook names a short or a foreign name stands for, where a model knows such names."""
        return []

    def resolve_targets(self, names: Any = None, layers: Any = None) -> list[str]:
        """The hook points and the modules that `names` selects, by their names.

        Args:
            names: what `resolve_names` takes, and modules: by path, or themselves.
            layers: a number, a sequence or a slice: only what lies in these blocks.
        Raises: UnknownHookError for what selects nothing; ValueError for a layer that is not there.
        """
        chosen: list[str] = []
        several = one_by_one(names)
        for each in several:
            module = self._module_meant_by(each)
            chosen += self.resolve_names(each) if module is None else [module]
        if len(several) > 1:
            found, every = set(chosen), dict.fromkeys((*self.hook_dict, *self.mod_dict))
            chosen = [name for name in every if name in found]
        if layers is None:
            return chosen
        numbers = layer_numbers(layers, len(getattr(self, "blocks", ())))
        wanted = {f"blocks.{layer}" for layer in numbers}
        inside = [name for name in chosen if ".".join(name.split(".")[:2]) in wanted]
        if not inside:
            raise UnknownHookError(f"layers={layers!r} has none of the points {chosen[:3]}")
        return inside

    def _module_meant_by(self, given: Any) -> str | None:
        """The path of a module, given by itself or by its path; None for other names."""
        if isinstance(given, nn.Module):
            path = next((n for n, module in self.mod_dict.items() if module is given), None)
            if path is None:
                raise UnknownHookError(f"{type(given).__name__} is no module of this model")
        else:
            path = given if isinstance(given, str) and given in self.mod_dict else None
        if path is not None and isinstance(self.mod_dict[path], nn.ModuleList):
            raise UnknownHookError(f"{path!r} is a list of modules, which nobody calls")
        return path

    def _blanket_of(self, matching: Collection[str], shown: str) -> list[str]:
        """Those of the names that `shown` matches which a blanket capture has, or else all."""
        blanket = [n for n in matching if not self.hook_dict[n].optional or self.wants_optional(n)]
        if not matching and self.hook_dict:
            raise UnknownHookError(
                f"{shown} matches none of the {len(self.hook_dict)} hook points, for example "
                f"{list(self.hook_dict)[:3]}"
            )
        return blanket or list(matching)

    def unreached_by(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[str], str | None] | None:
        """Whether a forward with these arguments comes to a point or module: None where it comes
        to all, else a function from a name to the argument that keeps the forward from it, or
        None."""
        return None

    # -- attaching --

    def add_hook(
        self,
        name: HookName,
        hook: HookFunction,
        dir: Direction = "fwd",
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
        when: When = "all",
        pos: Pos = None,
    ) -> LensHandle | HandleGroup:
        """Attach a hook to a named point, or to every point a glob or predicate selects.

        Args:
            when, pos: only in these forwards ("prefill", "decode", a step …), and only on these
                columns, counted from the start of the text: the hook gets `act[:, columns]`, those
                of them that are computed now, and what it returns takes their place.
        Returns: a handle with `remove()`, which counts its calls in `num_fires`.
        Raises: UnknownHookError for a name that selects nothing.
        """
        wanted = self.attachments([(name, hook)], dir, when, pos)
        handles = HandleGroup(
            LensHandle(
                self.hook_dict[each.name], hook, dir, is_permanent, level, limits=each.limits
            ).attach(prepend)
            for each in wanted
        )
        return handles[0] if isinstance(name, str) and len(handles) == 1 else handles

    def attachments(
        self, pairs: NamedHooks, direction: Direction, when: When = "all", pos: Pos = None
    ) -> list[Attachment]:
        """What pairs of names and functions come to, all checked and nothing attached.

        A name may end in ":k": only the k-th call of the point, counted from 1.
        """
        wanted = []
        for name, hook in checked_pairs(pairs, direction):
            match = ONE_CALL.fullmatch(name) if isinstance(name, str) else None
            call = int(match[2]) if match else None
            if call == 0:
                raise ValueError(f"{name!r}: calls are counted from 1")
            limits = Limits(when, pos, call)
            if direction == "bwd" and not limits.are_none:
                raise ValueError("when=, pos= and name:call are for forward hooks")
            names = self.resolve_names(match[1] if match else name)
            check_hook(hook, names[0] if names else None)
            for each in names:
                limits.refuse_on(self.hook_dict[each])
                wanted.append(Attachment(each, hook, direction, limits))
        return wanted

    def add_perma_hook(
        self, name: HookName, hook: HookFunction, dir: Direction = "fwd"
    ) -> LensHandle | HandleGroup:
        """Attach a hook that `reset_hooks()` leaves in place."""
        return self.add_hook(name, hook, dir, is_permanent=True)

    def list_hooks(
        self,
        name_filter: NamesFilter = None,
        dir: Both = "both",
        including_permanent: bool = True,
    ) -> dict[str, list[LensHandle]]:
        """What is attached where: `{name: handles}`, points without hooks left out."""
        names = self.hook_dict if name_filter is None else self.resolve_names(name_filter)
        attached = {
            name: [
                handle
                for handle in self.hook_dict[name]._handles_of(dir)
                if including_permanent or not handle.is_permanent
            ]
            for name in names
        }
        return {name: handles for name, handles in attached.items() if handles}

    # -- removing --

    def remove_all_hook_fns(
        self,
        direction: Both = "both",
        including_permanent: bool = False,
        level: int | None = None,
    ) -> None:
        """Detach hooks from every point."""
        for point in self.hook_points():
            point.remove_hooks(direction, including_permanent, level)

    def clear_contexts(self) -> None:
        """Empty the `ctx` of every point."""
        for point in self.hook_points():
            point.clear_context()

    def reset_hooks(
        self,
        clear_contexts: bool = True,
        direction: Both = "both",
        including_permanent: bool = False,
        level: int | None = None,
    ) -> None:
        """Detach every hook that is not permanent, and empty the contexts."""
        if clear_contexts:
            self.clear_contexts()
        self.remove_all_hook_fns(direction, including_permanent, level)

    # -- for a while --

    @names_the_nearest
    @contextmanager
    def hooks(
        self,
        fwd_hooks: NamedHooks = (),
        bwd_hooks: NamedHooks = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        when: When = "all",
        pos: Pos = None,
        on_zero_fire: str = "warn",
    ) -> Iterator["HookedRootModule"]:
        """Attach hooks inside a `with` block; yields the model.

        All names are checked before any hook is attached. On leaving, however that happens, exactly
        the hooks of this block are detached; with `reset_hooks_end=False` they stay.

        Args:
            when, pos: where the forward hooks act: see `add_hook`.
            on_zero_fire: "warn" about a forward hook that is limited to some place, by these or by
                "name:call", and never reached it; "error" for a RuntimeError about any forward hook
                that was never called; "ignore".
        """
        if on_zero_fire not in ("warn", "error", "ignore"):
            raise ValueError(
                f"on_zero_fire must be 'warn', 'error' or 'ignore', got {on_zero_fire}"
            )
        wanted = self.attachments(fwd_hooks, "fwd", when, pos)
        wanted += self.attachments(bwd_hooks, "bwd")
        with self.attached(wanted, reset_hooks_end, clear_contexts) as handles:
            yield self
        if on_zero_fire != "ignore":
            say_unfired(wanted, handles, on_zero_fire)

    @contextmanager
    def attached(
        self,
        wanted: Sequence[Attachment],
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        is_permanent: bool = False,
    ) -> Iterator[list[LensHandle]]:
        """Attach functions that were checked to names that exist."""
        handles: list[LensHandle] = []
        entered = [0]  # levels

        def move(by: int) -> None:
            with LEVELS:  # blocks of several threads may end in any order
                if entered[0] + by in (0, 1):
                    self.__dict__["context_level"] += by
                    entered[0] += by

        def leave() -> None:
            move(-1)
            for handle in handles if reset_hooks_end else ():
                handle.remove()
            if clear_contexts:
                self.clear_contexts()

        try:
            move(1)
            for name, hook, direction, limits in wanted:
                point, level = self.hook_dict[name], self.context_level
                handle = LensHandle(point, hook, direction, is_permanent, level, limits=limits)
                handles.append(handle)
                handle.attach()
            yield handles
        finally:
            try:
                leave()
            except BaseException:  # Ctrl-C between two handles: the rest would stay attached
                leave()
                raise

    def run_with_hooks(
        self,
        *model_args: Any,
        fwd_hooks: NamedHooks = (),
        bwd_hooks: NamedHooks = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        **model_kwargs: Any,
    ) -> Any:
        """One forward with hooks attached.

        Backward hooks see the gradients of this forward, whenever they are computed; with
        `reset_hooks_end=False` they, like the others, stay for further forwards too.

        Raises: UnknownHookError for a name that selects nothing, or nothing this forward comes to.
        """
        refuse_unknown("run_with_hooks", model_kwargs, self.forward, HOOK_ARGUMENTS)
        if (unreached := self.unreached_by(model_args, model_kwargs)) is not None:
            for pair in fwd_hooks:
                refuse([each.name for each in self.attachments([pair], "fwd")], unreached)
            for pair in bwd_hooks:
                refuse([each.name for each in self.attachments([pair], "bwd")], unreached)
        with self.hooks(fwd_hooks, bwd_hooks, reset_hooks_end, clear_contexts):
            return self(*model_args, **model_kwargs)

    @contextmanager
    def hooks_set_aside(self) -> Iterator[None]:
        """What is attached to hook points now is not called inside the block, in this thread."""
        attached = (h for point in self.hook_points() for h in point.fwd_hooks + point.bwd_hooks)
        before = set_aside.get()
        aside_somewhere.append(1)
        try:
            set_aside.set(before.union(attached))
            yield
        finally:
            set_aside.set(before)
            aside_somewhere.pop()

    def is_listened(self) -> bool:
        """Whether any function is attached anywhere in the model."""
        return any(
            isinstance(module, HookPoint) or module._forward_hooks or module._forward_pre_hooks
            for module in self.listened_modules()
        )

    def edits_are_live(self) -> bool:
        """Whether any attached function could edit an activation, or a gradient, in place."""
        if torch_module._has_any_global_hook():
            return True
        if not (editors_somewhere or strangers_somewhere):
            return False
        return any(
            module._edited
            if isinstance(module, Component)
            else not all(map(is_listener, attached_to(module)))
            for module in self.listened_modules()
        )

    def only_copies_are_taken(self) -> bool:
        """Whether nothing that is attached, and no code of others, could hand on, or compute with,
        a value as it is."""
        modules = list(self._parts())
        if torch_module._has_any_global_hook() or any(map(has_function_of_others, modules)):
            return False
        if not all(computes_as_ours(kind) for kind in {type(each) for each in modules}):
            return False
        for module in filter(may_be_listened, modules):
            is_point = isinstance(module, HookPoint)
            if module.computes if is_point else getattr(module, "stands_for_a_point", False):
                return False
            for each in attached_to(module):
                hook = getattr(each, "user_hook", each)
                if not getattr(getattr(hook, "__self__", hook), "takes_copies", False):
                    return False
        return True

    def listened_modules(self) -> Iterator[Any]:
        """The modules and points at which something may be attached."""
        return filter(may_be_listened, self._parts())

    def _parts(self) -> Iterator[nn.Module]:
        """As `modules()`, in another order, and in a third of its time."""
        waiting, seen = [cast(nn.Module, self)], {id(self)}
        while waiting:
            module = waiting.pop()
            yield module
            for child in module._modules.values():
                if child is not None and id(child) not in seen:
                    seen.add(id(child))
                    waiting.append(child)

    # -- capturing --

    def get_caching_hooks(
        self,
        names_filter: NamesFilter = None,
        incl_bwd: bool = False,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        cache: dict[str, Tensor] | None = None,
        pos_slice: SliceInput = None,
    ) -> tuple[dict[str, Tensor], list[tuple[str, HookFunction]], list[tuple[str, HookFunction]]]:
        """A dictionary, and the forward and backward hooks that fill it when attached.

        Args:
            names_filter: see `resolve_names`.
            incl_bwd: also keep gradients, under name + "_grad".
            device: where to keep activations; None: where they are.
            remove_batch_dim: keep `[0]` of batches of one; ValueError for larger ones.
            pos_slice: which query positions to keep. An integer keeps an axis of length 1.
        Raises: UnknownHookError for names that select nothing.
        """
        cache = {} if cache is None else cache
        names = self.resolve_names(names_filter)
        spec = CaptureSpec(names, device=device, incl_bwd=incl_bwd, clone=True)
        columns = Slice.unwrap(pos_slice)
        recorder = Recorder(self, spec, columns, remove_batch_dim, into=cache)
        hooks: dict[Direction, list[tuple[str, HookFunction]]] = {"fwd": [], "bwd": []}
        for each in recorder.hooks():
            hooks[each.direction].append((each.name, each.hook))
        return cache, hooks["fwd"], hooks["bwd"]

    def add_caching_hooks(
        self,
        names_filter: NamesFilter = None,
        incl_bwd: bool = False,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        cache: dict[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Attach caching hooks until `reset_hooks()`; returns the dictionary they fill."""
        cache, forward, backward = self.get_caching_hooks(
            names_filter, incl_bwd, device, remove_batch_dim, cache
        )
        for name, hook in forward:
            self.hook_dict[name].add_hook(hook, "fwd")
        for name, hook in backward:
            self.hook_dict[name].add_hook(hook, "bwd")
        return cache

    def cache_all(
        self,
        cache: dict[str, Tensor],
        incl_bwd: bool = False,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
    ) -> None:
        """Fill this dictionary until `reset_hooks()`: the older spelling of `add_caching_hooks`."""
        self.add_caching_hooks(None, incl_bwd, device, remove_batch_dim, cache)

    def cache_some(
        self,
        cache: dict[str, Tensor],
        names: NamesFilter,
        incl_bwd: bool = False,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
    ) -> None:
        """`cache_all` of some names only."""
        self.add_caching_hooks(names, incl_bwd, device, remove_batch_dim, cache)

    def run_with_cache(
        self,
        *model_args: Any,
        names_filter: NamesFilter | CaptureSpec = None,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        incl_bwd: bool = False,
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        pos_slice: SliceInput = None,
        **model_kwargs: Any,
    ) -> tuple[Any, Any]:
        """One forward, and a dictionary of its activations by hook name.

        With `incl_bwd` the output must be a scalar; it is differentiated, and gradients are kept
        under name + "_grad". The other arguments: see `get_caching_hooks`.

        Raises: UnknownHookError for names that select nothing, or nothing this forward comes to.
        """
        refuse_unknown("run_with_cache", model_kwargs, self.forward, CACHE_ARGUMENTS)
        spec = CaptureSpec.of(names_filter, device=device, incl_bwd=incl_bwd or None)
        columns = None if pos_slice is None else Slice.unwrap(pos_slice)
        # hooks that stay go on filling one dictionary
        into: dict[str, Any] | None = None if reset_hooks_end else {}
        if incl_bwd and not torch.is_grad_enabled():
            raise ValueError("incl_bwd needs gradients, which are switched off here")
        recorder = Recorder(self, spec, columns, remove_batch_dim, into)
        unreached = self.unreached_by(model_args, model_kwargs)
        if unreached is not None and (spec.names is not None or spec.layers is not None):
            for each in one_by_one(spec.names):
                meant = set(self.resolve_targets(each))
                refuse([name for name in recorder.names if name in meant], unreached)
        with recorder.listening(reset_hooks_end=reset_hooks_end, clear_contexts=clear_contexts):
            output = self(*model_args, **model_kwargs)
            if incl_bwd:
                if not isinstance(output, Tensor) or output.numel() != 1:
                    is_tensor = isinstance(output, Tensor)
                    got = f"shape {tuple(output.shape)}" if is_tensor else type(output).__name__
                    raise ValueError(
                        "incl_bwd needs a scalar output to differentiate, such as "
                        f"return_type='loss'; got {got}"
                    )
                output.backward()
        recorder.part_from((model_args, model_kwargs, output))
        return output, self._cache_of(recorder)

    def _cache_of(self, recorder: Recorder) -> Any:
        """What `run_with_cache` returns of what was recorded."""
        return recorder.first().values


def is_glob(given: Any) -> bool:
    """Whether it is a pattern of names."""
    return isinstance(given, str) and any(character in given for character in "*?[")


@lru_cache(16)
def names_like(glob: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the names that a glob matches."""
    return tuple(name for name in names if fnmatch.fnmatchcase(name, glob))


def may_be_listened(module: nn.Module) -> bool:
    """Whether something may be attached at a module or point; those that are not this library's do
    not say, or say what a module inside them does."""
    return module.listened if isinstance(module, Component) else True


def attached_to(module: nn.Module) -> list[Any]:
    """All functions attached to one module, torch's own hooks among them; at a point, handles."""
    if isinstance(module, Component):
        return module.attached_here()
    return torchs_hooks(module)


def checked_pairs(pairs: Any, direction: Direction) -> Any:
    """The pairs themselves. TypeError when they are no list of (name, function) pairs."""
    for pair in pairs:
        is_pair = isinstance(pair, tuple | list) and len(pair) == 2 and callable(pair[1])
        if not is_pair or pair[0] is None:
            raise TypeError(
                f"{direction}_hooks must be a list of (name or filter, function) pairs, such as "
                f"[('blocks.0.hook_resid_pre', function)]; one of its items is {pair!r}"
            )
    return pairs


def one_by_one(names: Any) -> Collection[Any]:
    """The names, globs, predicates, modules … of a list of those, or the one that is given."""
    several = isinstance(names, list | tuple | set | frozenset) and not is_name_and_layer(names)
    return names if several else [names]


def refuse(names: Sequence[str], unreached: Callable[[str], str | None]) -> None:
    """UnknownHookError when something named these, and a forward comes to none of them."""
    reasons = [unreached(name) for name in names]
    if names and all(reasons):
        raise UnknownHookError(f"{names[0]!r} is not reached with {reasons[0]}: nothing would fire")


def is_name_and_layer(given: Any) -> bool:
    """Whether it is ("resid_post", 5) or ("scale", 5, "ln1"), and not several names. None for a
    layer means all of them."""
    return (
        isinstance(given, tuple)
        and len(given) in (2, 3)
        and isinstance(given[0], str)
        and (
            given[1] is None or (hasattr(given[1], "__index__") and not isinstance(given[1], bool))
        )
    )


def check_zero_fire(given: str) -> None:
    """ValueError for what is no way to deal with hooks that never acted."""
    if given not in ON_ZERO_FIRE:
        raise ValueError(f"on_zero_fire must be one of {list(ON_ZERO_FIRE)}, got {given!r}")


def say_unfired(
    wanted: Sequence[Attachment], handles: Sequence[LensHandle], on_zero_fire: str
) -> None:
    """A warning about limited hooks that never reached their place, or a RuntimeError about any
    forward hook that was never called."""
    unfired = [
        each.name
        for each, handle in zip(wanted, handles, strict=True)
        if each.direction == "fwd"
        and not handle.num_fires
        and (handle.limits is not None or on_zero_fire == "error")
    ]
    if not unfired:
        return
    message = (
        f"{len(unfired)} hook(s) never acted, for example on {unfired[0]!r}: no forward in this "
        "block reached the step, column or call they are limited to"
    )
    if on_zero_fire == "error":
        raise RuntimeError(message)
    warnings.warn(message, stacklevel=4)
