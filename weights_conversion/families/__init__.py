"""One file per family, each with a tuple `ARCHITECTURES`. A file placed here is found by itself."""

import importlib
import pkgutil

from weights_conversion.table import Architecture


def all_architectures() -> list[Architecture]:
    """What every file of this folder describes, in alphabetical order of the files."""
    found: list[Architecture] = []
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda m: m.name):
        found += importlib.import_module(f"{__name__}.{module.name}").ARCHITECTURES
    return found
