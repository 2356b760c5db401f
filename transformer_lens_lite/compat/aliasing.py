"""Ours under the name `transformer_lens`, whether or not the real one is installed."""

import sys
import warnings
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from transformer_lens_lite.compat.modules import LOADER, PACKAGE, ClassicModule, hint, make
from transformer_lens_lite.compat.names import MODULES, TOP

ROOT = "transformer_lens"
# what clients look for: the last version whose interface is offered
VERSION = "3.9.0+lite"


class NotOfferedError(ModuleNotFoundError):
    """A module or name of TransformerLens that this library does not have."""


class TransformerLensFinder:
    """Finds `transformer_lens`, its modules and its version number, before anybody else does."""

    def __init__(self, replaced: dict[str, ModuleType]) -> None:
        self.replaced = replaced

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Of a module of ours; None for what is not below `transformer_lens`.

        Raises: NotOfferedError, an ImportError, for what is below it and not offered.
        """
        root, _, name = fullname.partition(".")
        if root != ROOT:
            return None
        if name and name not in MODULES:
            reason, why = hint(name, MODULES), " is not offered: "
            here = f"{PACKAGE} stands for {ROOT} here"
            if why in reason:
                raise NotOfferedError(f"{fullname}{why}{reason.partition(why)[2]} ({here})")
            raise NotOfferedError(f"there is no {fullname}: {here}.{reason}")
        return ModuleSpec(fullname, LOADER, is_package=True)

    def find_distributions(self, context: Any = None) -> Iterator[Any]:
        """What `importlib.metadata` says about `transformer-lens`."""
        wanted = getattr(context, "name", None)
        if wanted is None or wanted.lower().replace("_", "-") == "transformer-lens":
            from transformer_lens_lite.compat.distribution import TransformerLensDistribution

            yield TransformerLensDistribution(VERSION)


def install_as_transformer_lens() -> None:
    """From now on `import transformer_lens`, and all its modules, is this library.

        import transformer_lens_lite.as_transformer_lens   # the same, as an import
        from transformer_lens import HookedTransformer

    `transformer_lens.__version__` and `importlib.metadata.version("transformer-lens")` say
    "3.9.0+lite". What was imported of a real TransformerLens before stays with whoever has it; a
    warning says so. Calling it twice does nothing more; `uninstall()` undoes it.
    """
    if installed() is not None:
        return
    real = {name: sys.modules.pop(name) for name in list(sys.modules) if is_below(name)}
    if real:
        warnings.warn(
            f"{ROOT} was imported before: what was taken from it stays what it was. Install "
            f"{PACKAGE} under its name before anything imports it",
            stacklevel=2,
        )
    sys.meta_path.insert(0, TransformerLensFinder(real))
    for name in ("", *MODULES):
        full = f"{ROOT}.{name}" if name else ROOT
        sys.modules[full] = module_called(full)


def uninstall() -> None:
    """`import transformer_lens` means again what it meant before. Does nothing when nothing is
    installed."""
    finder = installed()
    if finder is None:
        return
    sys.meta_path.remove(finder)
    for name in [name for name in sys.modules if is_below(name)]:
        del sys.modules[name]
    sys.modules.update(finder.replaced)


def installed() -> TransformerLensFinder | None:
    """The finder in use."""
    return next((f for f in sys.meta_path if isinstance(f, TransformerLensFinder)), None)


def is_below(name: str) -> bool:
    """Whether it is `transformer_lens` or a module of it."""
    return name == ROOT or name.startswith(f"{ROOT}.")


def module_called(full: str) -> ModuleType:
    """The module of that full name, below `transformer_lens` or `transformer_lens_lite`."""
    root, _, name = full.partition(".")
    if name:
        return make(root, name)
    module = ClassicModule(ROOT, TOP, PACKAGE)
    module.__version__ = VERSION  # type: ignore[attr-defined]
    return module
