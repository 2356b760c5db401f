"""Which module may import which: the table is the architecture, the rest of the file reads imports.

An import inside a function counts too: that changes when it runs, not who depends on whom. Only
`LAZY` below is about module level.
"""

import ast
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("transformer_lens_lite", "weights_conversion")
LIB, WEIGHTS = PACKAGES

ANY = "*"


class Rule(NamedTuple):
    module: str  # a pattern; a module obeys every rule whose pattern it matches
    may_import: tuple[str, ...]  # patterns of the project's modules
    but_not: tuple[str, ...] = ()


# fmt: off
RULES = [
    Rule(f"{LIB}.rope_scaling",   ()),
    Rule(f"{LIB}.nearest",        ()),
    Rule(f"{LIB}.specs",          (f"{LIB}.rope_scaling",)),
    Rule(f"{LIB}.config_checks",  (f"{LIB}.specs", f"{LIB}.nearest")),
    Rule(f"{LIB}.config",         (f"{LIB}.rope_scaling", f"{LIB}.specs", f"{LIB}.config_checks",
                                   f"{LIB}.nearest")),
    Rule(f"{LIB}.steps",          (f"{LIB}.nearest",)),
    Rule(f"{LIB}.watched",        ()),
    Rule(f"{LIB}.padding",        (f"{LIB}.watched",)),
    Rule(f"{LIB}.hooks",          (f"{LIB}.steps", f"{LIB}.watched")),
    Rule(f"{LIB}.recording",      (f"{LIB}.steps",)),
    Rule(f"{LIB}.capture",        (f"{LIB}.config", f"{LIB}.steps", f"{LIB}.hooks",
                                   f"{LIB}.recording", f"{LIB}.utils")),
    Rule(f"{LIB}.fingerprint",    (f"{LIB}.watched",)),
    Rule(f"{LIB}.checkpoint_files", (WEIGHTS,)),
    Rule(f"{LIB}.hub",            (f"{LIB}.checkpoint_files", f"{LIB}.model_names")),
    Rule(f"{LIB}.model_names",    (f"{LIB}.nearest",)),
    Rule(f"{LIB}.kv_formats",     (f"{LIB}.config",)),
    Rule(f"{LIB}.kv_cache",       (f"{LIB}.config", f"{LIB}.fingerprint", f"{LIB}.kv_formats",
                                   f"{LIB}.padding")),
    Rule(f"{LIB}.factored_matrix", ()),
    Rule(f"{LIB}.components*",    (f"{LIB}.config", f"{LIB}.specs", f"{LIB}.rope_scaling",
                                   f"{LIB}.nearest", f"{LIB}.hooks",
                                   f"{LIB}.kv_cache", f"{LIB}.factored_matrix",
                                   f"{LIB}.components*")),
    Rule(f"{LIB}.model",          (ANY,), but_not=(f"{LIB}.demo", f"{LIB}.analysis*")),
    Rule(f"{WEIGHTS}*",           (f"{LIB}.config", f"{LIB}.config_checks", f"{LIB}.nearest",
                                   f"{WEIGHTS}*")),
]
# fmt: on

# Never at module level: each costs more to import than all of ours.
LAZY = ("transformers", "huggingface_hub", "safetensors", "tokenizers")


class Import(NamedTuple):
    name: str  # for `from a import b` this is a.b if that is a module, else a
    line: int
    at_module_level: bool


def modules() -> dict[str, Path]:
    """Every module of the project: dotted name -> file."""
    found = {}
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            parts = file.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


MODULES = modules()


def is_type_checking(test: ast.expr) -> bool:
    return getattr(test, "id", getattr(test, "attr", None)) == "TYPE_CHECKING"


def imports(tree: ast.AST, package: str, at_module_level: bool = True) -> Iterator[Import]:
    """The imports that can run, below `tree`; `package` is what a leading dot stands for."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, at_module_level)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                parts = parts[: len(parts) - (node.level - 1)]
                base = ".".join([*parts, base] if base else parts)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield Import(full if full in MODULES else base, node.lineno, at_module_level)
        elif isinstance(node, ast.If) and is_type_checking(node.test):
            # Types alone may point anywhere; nothing is loaded for them.
            for child in node.orelse:
                yield from imports(ast.Module([child], []), package, at_module_level)
        else:
            inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from imports(node, package, at_module_level and not inside)


def imports_of(module: str) -> list[Import]:
    file = MODULES[module]
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    return list(imports(ast.parse(file.read_text(encoding="utf-8")), package))


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_point_the_right_way(module: str) -> None:
    wrong = [
        f"line {found.line}: {found.name}  ({rule.module} may import {rule.may_import or 'nothing'}"
        f"{f' but not {rule.but_not}' if rule.but_not else ''})"
        for rule in RULES
        if fnmatchcase(module, rule.module)
        for found in imports_of(module)
        if found.name.partition(".")[0] in PACKAGES
        and (not matches(found.name, rule.may_import) or matches(found.name, rule.but_not))
    ]
    assert not wrong, f"{module} imports what the table in {Path(__file__).name} rules out: {wrong}"


@pytest.mark.parametrize("module", sorted(MODULES))
def test_heavy_libraries_are_imported_late(module: str) -> None:
    early = [
        f"line {found.line}: {found.name}"
        for found in imports_of(module)
        if found.at_module_level and found.name.partition(".")[0] in LAZY
    ]
    assert not early, f"{module} imports at module level what belongs inside a function: {early}"


@pytest.mark.parametrize("rule", RULES, ids=[rule.module for rule in RULES])
def test_every_rule_is_about_something(rule: Rule) -> None:
    """A renamed module must not slip out of the table."""
    assert any(fnmatchcase(module, rule.module) for module in MODULES)


def test_the_reader_sees_every_form_of_import() -> None:
    source = """
import transformers.models
from . import hooks
from ..config import Config
from transformer_lens_lite import model, HookedTransformer
if TYPE_CHECKING:
    import tokenizers
try:
    import safetensors
except ImportError:
    pass
class C:
    import huggingface_hub
    def f(self):
        import tqdm
"""
    found = [(i.name, i.at_module_level) for i in imports(ast.parse(source), f"{LIB}.components")]
    assert [name for name, early in found if not early] == ["tqdm"]
    assert {name for name, early in found if early} == {
        "transformers.models",
        f"{LIB}.components",  # no module components.hooks: the name comes from the package itself
        f"{LIB}.config",
        f"{LIB}.model",
        LIB,
        "safetensors",
        "huggingface_hub",
    }
