"""Modules that hold nothing themselves: each looks its names up in the table when asked.

They stand in `sys.modules` before anybody imports them. So importing the module
`transformer_lens.HookedTransformer` never replaces the class `transformer_lens.HookedTransformer`,
as the import of a file would.
"""

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from transformer_lens_lite.compat.names import HOME, MODULES, NOT_OFFERED, WHOLE
from transformer_lens_lite.nearest import closest

PACKAGE = "transformer_lens_lite"


class ClassicLoader:
    """Makes the classic module of a name; there is nothing to run."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module itself."""
        from transformer_lens_lite.compat.aliasing import module_called

        return module_called(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: names are looked up when they are asked for."""


LOADER: Any = ClassicLoader()


class ClassicModule(ModuleType):
    """A module of the classic layout.

    Args:
        name: what it is called in full, such as "transformer_lens.hook_points".
        offered: the names it has, with spaces between them.
        whole: a module of ours all of whose public names it has too.
    """

    def __init__(self, name: str, offered: str, whole: str | None = None) -> None:
        super().__init__(name, f"{name}, as far as {PACKAGE} offers it.")
        self.__path__: list[str] = []
        self.__file__ = __file__  # clients look for the folder a package lies in
        self.__package__ = name
        self.__loader__ = LOADER
        self.__spec__ = ModuleSpec(name, LOADER, is_package=True)
        self._offered = frozenset(offered.split())
        self._whole = whole

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return self._names()
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if name in self._offered:
            return home_of(name)
        if (submodule := sys.modules.get(f"{self.__name__}.{name}")) is not None:
            return submodule
        if self._whole is not None:
            ours = importlib.import_module(self._whole)
            if name in public_names(ours):
                return getattr(ours, name)
        raise AttributeError(f"{self.__name__} has no {name!r}.{hint(name, self._names())}")

    def _names(self) -> list[str]:
        whole = [] if self._whole is None else public_names(importlib.import_module(self._whole))
        return sorted({*self._offered, *whole})

    def __dir__(self) -> list[str]:
        start = f"{self.__name__}."
        below = {m[len(start) :] for m in sys.modules if m.startswith(start)}
        return sorted({*self._names(), *(name for name in below if "." not in name)})


def public_names(module: ModuleType) -> list[str]:
    """`__all__`, or what does not begin with an underscore."""
    named = getattr(module, "__all__", None)
    return list(named) if named is not None else [n for n in vars(module) if n[0] != "_"]


def home_of(name: str) -> Any:
    """The object a classic name stands for."""
    module, _, other = HOME[name].partition(":")
    return getattr(importlib.import_module(f"{PACKAGE}.{module}"), other or name)


def hint(path: str, known: Any = ()) -> str:
    """The tail of an error message: why a name is not offered, or which known names are near."""
    parts = path.split(".")
    for i in range(len(parts)):
        for given in (".".join(parts[i:]), ".".join(parts[: i + 1]), parts[i]):
            if given in NOT_OFFERED:
                return f" {given} is not offered: {NOT_OFFERED[given]}"
    return closest(parts[-1], known)


def make(root: str, name: str) -> ModuleType:
    """The classic module `name` below `root`."""
    whole = WHOLE.get(name)
    if whole is not None:
        return ClassicModule(f"{root}.{name}", "", f"{PACKAGE}.{whole}")
    return ClassicModule(f"{root}.{name}", MODULES[name])


def register_own() -> None:
    """Put the classic modules that are no files of ours below `transformer_lens_lite`."""
    for name in MODULES:
        if name not in OWN_FILES:
            sys.modules[f"{PACKAGE}.{name}"] = make(PACKAGE, name)


def own_attribute(name: str) -> Any:
    """What `transformer_lens_lite.name` is, when it is not loaded yet.

    Raises: AttributeError, with what is not offered or with the nearest names.
    """
    if name in MODULES:
        return importlib.import_module(f"{PACKAGE}.{name}")
    if name in HOME and not name.startswith("_"):
        return home_of(name)
    raise AttributeError(f"module {PACKAGE!r} has no attribute {name!r}.{hint(name, HOME)}")


# classic modules that are files here
OWN_FILES = frozenset(
    [
        "components",
        "components.attention",
        "components.embed",
        "config",
        "evals",
        "head_detector",
        "loading",
        "patching",
        "pretrained",
        "train",
        "utilities",
        "utils",
    ]
)
