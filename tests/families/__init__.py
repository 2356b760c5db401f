"""Tiny Hugging Face configs of every family, one file per file of `weights_conversion/families`.

A file here has

    SIZES = {model_type: {field: value}}              sizes of that family, awkward on purpose
    VARIANTS = {name: (model_type, {field: value})}   every kind of model the family has
    FIELDS = [(name, {field: value})]                 changes of a config that change the logits
"""

import importlib
import pkgutil
from typing import Any

SIZES: dict[str, dict[str, Any]] = {}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {}
FIELDS: list[tuple[str, dict[str, Any]]] = []

for _found in sorted(pkgutil.iter_modules(__path__), key=lambda module: module.name):
    _module = importlib.import_module(f"{__name__}.{_found.name}")
    SIZES |= _module.SIZES
    VARIANTS |= _module.VARIANTS
    FIELDS += _module.FIELDS

# One variant of each family: the first.
FIRST_VARIANTS = {model_type: name for name, (model_type, _) in reversed(VARIANTS.items())}
