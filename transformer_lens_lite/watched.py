"""Containers that tell their owner what becomes of them; which functions only look; and how often a
tensor was edited, which tells nobody.

torch, its tools and classic code write straight into a module's containers. What the owner works
out from those stays true all the same, and reading it costs one attribute.
"""

import copy
import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

from torch import Tensor


def edits_of(tensor: Tensor) -> int:
    """How often it was edited in place; tensors of inference mode do not know."""
    return 0 if tensor.is_inference() else tensor._version


def is_listener(hook: Any) -> bool:
    """Whether an attached function is marked as one that only looks; of a handle, whether its
    function is."""
    return getattr(hook, "is_listener", False)


class Attributes(dict[str, Any]):
    """A dict whose entries are attributes of their owner too.

    A module's `_parameters`: torch and its tools write there directly (`.to()`, functional_call,
    pruning), and what they write is the attribute from then on.
    """

    def __init__(self, owner: object, entries: dict[str, Any]) -> None:
        self.owner = weakref.ref(owner)  # no cycle: a module dies with its last name
        super().__init__(entries)
        self._attributes().update(entries)

    def _attributes(self) -> dict[str, Any]:
        owner = self.owner()
        return {} if owner is None else owner.__dict__

    def __reduce_ex__(self, protocol: Any) -> tuple[type, tuple[dict[str, Any]]]:
        return dict, (dict(self),)  # a pickle's owner wraps it again

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copied_for_owner(self, dict(self), memo)

    def __ior__(self, other: Any) -> "Attributes":  # type: ignore[override,misc]
        self.update(other)
        return self

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self._attributes()[name] = value

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        self._attributes().pop(name, None)

    # by the two methods above, where dict's own would go past them
    pop = MutableMapping.pop
    popitem = MutableMapping.popitem
    update = MutableMapping.update
    clear = MutableMapping.clear
    setdefault = MutableMapping.setdefault


def copied_for_owner(container: Any, entries: Any, memo: dict[int, Any]) -> Any:
    """A deep copy that belongs to the owner's copy, where there is going to be one; a plain one
    elsewhere."""
    entries = copy.deepcopy(entries, memo)
    owner = memo.get(id(container.owner()))
    return entries if owner is None else type(container)(owner, entries)


class Telling:
    """A container of attached functions, whose owner's `look_again` is called after each change."""

    owner: Callable[[], Any]

    def tell(self) -> None:
        """Let the owner look again."""
        owner = self.owner()
        if owner is not None:
            owner.look_again()


def and_tells(method: Callable[..., Any]) -> Callable[..., Any]:
    """A container's method, which then tells the owner."""

    @functools.wraps(method)
    def telling(self: Telling, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        finally:
            self.tell()

    return telling


class TellingList(list[Any], Telling):
    """A list that tells."""

    def __init__(self, owner: object, entries: Iterable[Any] = ()) -> None:
        self.owner = weakref.ref(owner)
        super().__init__(entries)

    def __reduce_ex__(self, protocol: Any) -> tuple[type, tuple[list[Any]]]:
        return list, (list(self),)

    def __deepcopy__(self, memo: dict[int, Any]) -> list[Any]:
        return copied_for_owner(self, list(self), memo)

    def discard(self, entry: Any) -> None:
        """Remove it if it is there; tell in either case, so that an interrupted call can be made
        again."""
        try:
            if entry in self:
                super().remove(entry)
        finally:
            self.tell()


class TellingDict(OrderedDict[Any, Any], Telling):
    """An ordered dict that tells."""

    def __init__(self, owner: object, entries: dict[Any, Any]) -> None:
        self.owner = lambda: None  # while it is filled
        super().__init__(entries)
        self.owner = weakref.ref(owner)

    def __reduce_ex__(self, protocol: Any) -> tuple[type, tuple[dict[Any, Any]]]:
        return OrderedDict, (dict(self),)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[Any, Any]:
        return copied_for_owner(self, OrderedDict(self), memo)

    def copy(self) -> "OrderedDict[Any, Any]":  # type: ignore[override]
        """One that tells nobody."""
        return OrderedDict(self)


for kind, names in (
    (TellingList, "append extend insert remove pop clear __setitem__ __delitem__ __iadd__"),
    (TellingDict, "__setitem__ __delitem__ pop popitem update clear setdefault"),
):
    for name in names.split():
        setattr(kind, name, and_tells(getattr(kind, name)))
