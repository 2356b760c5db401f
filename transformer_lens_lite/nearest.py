"""The nearest valid choice, for errors about names nobody knows."""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar


def closest(name: str, known: Iterable[str], n: int = 3, cutoff: float = 0.5) -> str:
    """The tail of an error message: " Did you mean 'a' or 'b'?", or nothing."""
    matches = difflib.get_close_matches(name, [str(k) for k in known], n=n, cutoff=cutoff)
    return f" Did you mean {' or '.join(map(repr, matches))}?" if matches else ""


Function = TypeVar("Function", bound=Callable[..., Any])


def names_the_nearest(function: Function) -> Function:
    """The TypeError for an unknown keyword argument says which known one comes closest."""
    known = [name for name in inspect.signature(function).parameters if name != "self"]

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in known:
                raise TypeError(
                    f"{function.__name__}() has no argument {name!r}.{closest(name, known)}"
                )
        return function(*args, **kwargs)

    return checked  # type: ignore[return-value]
