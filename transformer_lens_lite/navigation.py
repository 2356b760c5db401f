"""A cache as a picture of the model: `cache.blocks[5].mlp.output`."""

from typing import Any

from transformer_lens_lite.capture import ARGUMENTS, INPUT
from transformer_lens_lite.nearest import closest


class Node:
    """A place in the model's structure, in a cache.

    `output` is what the module or point there returned, `input` what it got first, `inputs` all it
    got as (args, kwargs). `len(node)` counts its calls; `node.keys()` are the cached names there.
    """

    def __init__(self, cache: Any, path: str) -> None:
        self._cache = cache
        self._path = path

    def child(self, part: str) -> "Node":
        """What lies one step further. AttributeError when the cache has nothing there."""
        path = f"{self._path}.{part}" if self._path else part
        names = self._cache.paths()
        if not any(name == path or name.startswith(f"{path}.") for name in names):
            raise AttributeError(
                f"this cache has nothing at {path!r}.{closest(part, self._parts())}"
            )
        return Node(self._cache, path)

    def _parts(self) -> set[str]:
        """What can be said next."""
        start = f"{self._path}." if self._path else ""
        names = self._cache.paths()
        return {name[len(start) :].split(".")[0] for name in names if name.startswith(start)}

    def __getattr__(self, part: str) -> "Node":
        if part.startswith("_"):
            raise AttributeError(part)
        return self.child(part)

    def __getitem__(self, index: int) -> "Node":
        if index < 0:
            cached = [int(part) for part in self._parts() if part.isdigit()]
            index += self._cache._n_layers or 1 + max(cached, default=-1)
        return self.child(str(index))

    @property
    def _name(self) -> str:
        name: str = self._cache.full_name(self._path)
        return name

    @property
    def output(self) -> Any:
        """What was returned, columns joined."""
        return self._cache.value(self._name)

    @property
    def input(self) -> Any:
        """The first argument; None when there was none."""
        return self._cache.value(self._path + INPUT)

    @property
    def inputs(self) -> Any:
        """(args, kwargs) of the one call there was."""
        return self._cache.value(self._path + ARGUMENTS)

    def keys(self) -> list[str]:
        """The cached names here and below."""
        start = f"{self._path}."
        return [n for n in self._cache if n == self._name or n.startswith(start)]

    def __contains__(self, part: object) -> bool:
        return part in self._parts()

    def __len__(self) -> int:
        cache = self._cache
        calls: int = cache.n_calls(self._name) or cache.n_calls(self._path + INPUT)
        return calls

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<{self._path}: {len(self)} calls; {', '.join(self.keys()[:6])}>"
