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

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            refuse_unknown(function.__name__, kwargs, function)
        return function(*args, **kwargs)

    return checked  # type: ignore[return-value]


def refuse_unknown(
    called: str, given: Iterable[str], function: Callable[..., Any], also: Iterable[str] = ()
) -> None:
    """TypeError for a keyword argument that the function does not have, when it is known what it
    has; `also` are other names that may have been meant."""
    known = keywords_of(getattr(function, "__func__", function))
    for name in given:
        if known is not None and name not in known:
            raise TypeError(f"{called}() has no argument {name!r}.{closest(name, [*known, *also])}")


@functools.lru_cache(maxsize=64)
def keywords_of(function: Callable[..., Any]) -> list[str] | None:
    """The names of a function's arguments; None where it takes any."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of some built-in ones
        return None
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        return None
    return [each.name for each in parameters if each.name != "self"]
