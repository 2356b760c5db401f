"""A model that knows its hook points by name: attaching, capturing, and cleaning up.

Every name is resolved before anything is run, and every context detaches exactly what it attached,
however it is left.
"""

import fnmatch
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from transformer_lens_lite.config import closest
from transformer_lens_lite.hooks import (
    Both,
    Component,
    Direction,
    HandleGroup,
    HookFunction,
    HookPoint,
    LensHandle,
    check_hook,
)
from transformer_lens_lite.utils import Slice, SliceInput

# a name, a glob, a predicate on names, or several of those; None: every point but the optional ones
NamesFilter = str | Callable[[str], bool] | Iterable[Any] | None
NamedHooks = Iterable[tuple[str | Callable[[str], bool], HookFunction]]


class UnknownHookError(KeyError, ValueError):
    """A name that no hook point has. Caught as a KeyError or as a ValueError."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would show the repr, quotes and all


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

        A string is a name or a glob (`"blocks.*.hook_resid_post"`). Globs and predicates choose
        among the points of a blanket capture, and among the optional ones when none of those match.

        Raises: UnknownHookError (KeyError and ValueError) for a name, glob or predicate that
            selects nothing, with the nearest names.
        """
        chosen = set(self._resolve(names_filter))
        return [name for name in self.hook_dict if name in chosen]

    def _resolve(self, names_filter: NamesFilter) -> list[str]:
        if names_filter is None:
            return self._matching(lambda name: True, "None")
        if isinstance(names_filter, str):
            if names_filter in self.hook_dict:
                return [names_filter]
            if any(c in names_filter for c in "*?["):
                glob = names_filter
                return self._matching(lambda name: fnmatch.fnmatchcase(name, glob), repr(glob))
            ending = [name for name in self.hook_dict if name.endswith(f".{names_filter}")]
            hint = f" Did you mean {ending[0]!r}?" if ending else ""
            raise UnknownHookError(
                f"no hook point is called {names_filter!r}."
                f"{hint or closest(names_filter, self.hook_dict)}"
            )
        if callable(names_filter):
            return self._matching(
                names_filter, getattr(names_filter, "__qualname__", "the predicate")
            )
        return [name for one in names_filter for name in self._resolve(one)]

    def _matching(self, predicate: Callable[[str], bool], shown: str) -> list[str]:
        matching = [name for name in self.hook_dict if predicate(name)]
        blanket = [n for n in matching if not self.hook_dict[n].optional or self.wants_optional(n)]
        if not matching and self.hook_dict:
            raise UnknownHookError(
                f"{shown} matches none of the {len(self.hook_dict)} hook points, for example "
                f"{list(self.hook_dict)[:3]}"
            )
        return blanket or matching

    # -- attaching --

    def add_hook(
        self,
        name: str | Callable[[str], bool],
        hook: HookFunction,
        dir: Direction = "fwd",
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
    ) -> LensHandle | HandleGroup:
        """Attach a hook to a named point, or to every point a glob or predicate selects.

        Returns: a handle with `remove()`.
        Raises: UnknownHookError for a name that selects nothing.
        """
        names = self.resolve_names(name)
        check_hook(hook, names[0] if names else None)
        handles = HandleGroup(
            self.hook_dict[n].attach(hook, dir, is_permanent, level, prepend) for n in names
        )
        return handles[0] if isinstance(name, str) and len(handles) == 1 else handles

    def add_perma_hook(
        self, name: str | Callable[[str], bool], hook: HookFunction, dir: Direction = "fwd"
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

    @contextmanager
    def hooks(
        self,
        fwd_hooks: NamedHooks = (),
        bwd_hooks: NamedHooks = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
    ) -> Iterator["HookedRootModule"]:
        """Attach hooks inside a `with` block; yields the model.

        All names are checked before any hook is attached. On leaving, however that happens, exactly
        the hooks of this block are detached; with `reset_hooks_end=False` they stay.
        """
        directions: list[tuple[Direction, NamedHooks]] = [("fwd", fwd_hooks), ("bwd", bwd_hooks)]
        wanted = []
        for direction, pairs in directions:
            for name_or_filter, hook in checked_pairs(pairs, direction):
                names = self.resolve_names(name_or_filter)
                check_hook(hook, names[0] if names else None)
                wanted += [(name, hook, direction) for name in names]
        with self._attached(wanted, reset_hooks_end, clear_contexts):
            yield self

    @contextmanager
    def _attached(
        self,
        wanted: list[tuple[str, HookFunction, Direction]],
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
    ) -> Iterator[list[LensHandle]]:
        """Attach (name, hook, direction) triples of existing names and hooks that were checked."""
        self.context_level += 1
        handles: list[LensHandle] = []
        try:
            for name, hook, direction in wanted:
                point = self.hook_dict[name]
                handles.append(point.attach(hook, direction, level=self.context_level))
            yield handles
        finally:
            self.context_level -= 1
            if reset_hooks_end:
                for handle in handles:
                    handle.remove()
            if clear_contexts:
                self.clear_contexts()

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

        A backward pass happens after this returns, so backward hooks need `reset_hooks_end=False`
        (or the `hooks()` context around forward and backward); without it, a UserWarning says so.
        """
        if bwd_hooks and reset_hooks_end:
            warnings.warn(
                "run_with_hooks detaches its bwd_hooks before any backward pass can reach "
                "them; use "
                "reset_hooks_end=False, or `with model.hooks(bwd_hooks=…)` around both passes",
                stacklevel=2,
            )
        with self.hooks(fwd_hooks, bwd_hooks, reset_hooks_end, clear_contexts):
            return self(*model_args, **model_kwargs)

    def is_listened(self) -> bool:
        """Whether any function is attached anywhere in the model."""
        return any(
            module._forward_hooks or module._forward_pre_hooks for module in self.mod_dict.values()
        ) or any(point.listened for point in self.hook_points())

    def edits_are_live(self) -> bool:
        """Whether any attached function could edit an activation, or a gradient, in place."""
        return any(
            module._forward_hooks
            or module._forward_pre_hooks
            or module._backward_hooks
            or module._backward_pre_hooks
            for module in (self, *self.mod_dict.values())
        ) or any(
            not handle.is_listener
            for point in self.hook_points()
            for handle in point.fwd_hooks + point.bwd_hooks
        )

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
        names = self.resolve_names(names_filter)
        cache = {} if cache is None else cache
        keep = _Keep(cache, device, remove_batch_dim, Slice.unwrap(pos_slice))
        backward = [(name, keep.gradient) for name in names] if incl_bwd else []
        return cache, [(name, keep.activation) for name in names], backward

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

    def run_with_cache(
        self,
        *model_args: Any,
        names_filter: NamesFilter = None,
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
        """
        keep = _Keep({}, device, remove_batch_dim, Slice.unwrap(pos_slice))
        keep.clones = self.edits_are_live()
        names = self.resolve_names(names_filter)
        wanted: list[tuple[str, HookFunction, Direction]] = [
            (name, keep.activation, "fwd") for name in names
        ]
        if incl_bwd:
            wanted += [(name, keep.gradient, "bwd") for name in names]
        with self._attached(wanted, reset_hooks_end, clear_contexts):
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
        keep.part_from(output)
        return output, keep.cache


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


class _Keep:
    """What caching hooks do with what they see.

    What is cached never changes afterwards: values are cloned, unless `clones` is off because
        nothing
    is attached to the model that could edit them in place.
    """

    def __init__(
        self,
        cache: dict[str, Tensor],
        device: torch.device | str | None,
        remove_batch_dim: bool,
        pos_slice: Slice,
    ) -> None:
        self.cache = cache
        self.device = device
        self.remove_batch_dim = remove_batch_dim
        self.pos_slice = pos_slice
        self.clones = True

    def part_from(self, output: Any) -> None:
        """Copy what shares memory with the run's output, which its owner is free to edit."""
        outputs = output if isinstance(output, tuple) else (output,)
        given_away = {
            tensor.untyped_storage().data_ptr() for tensor in outputs if isinstance(tensor, Tensor)
        }
        for name, kept in self.cache.items():
            if kept.untyped_storage().data_ptr() in given_away:
                self.cache[name] = kept.clone()

    def activation(self, tensor: Tensor, hook: HookPoint) -> None:
        """The forward hook."""
        self.cache[hook.name or ""] = self._kept(tensor, hook)

    def gradient(self, tensor: Tensor, hook: HookPoint) -> None:
        """The backward hook."""
        self.cache[(hook.name or "") + "_grad"] = self._kept(tensor, hook)

    def _kept(self, tensor: Tensor, hook: HookPoint) -> Tensor:
        kept = tensor.detach()
        if hook.pos_axis is not None:
            kept = self.pos_slice.apply(kept, dim=hook.pos_axis)
        if self.remove_batch_dim and hook.pos_axis is not None:
            if kept.shape[0] != 1:
                raise ValueError(
                    f"remove_batch_dim needs a batch of 1, {hook.name} has {kept.shape[0]}"
                )
            kept = kept[0]
        if self.device is not None:
            kept = kept.to(self.device)
        is_part = kept.numel() < tensor.numel()  # and would keep the whole alive
        if (
            self.clones or is_part
        ) and kept.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
            kept = kept.clone()
        return kept


# they only look: see LensHandle
_Keep.activation.is_listener = True  # type: ignore[attr-defined]
_Keep.gradient.is_listener = True  # type: ignore[attr-defined]
