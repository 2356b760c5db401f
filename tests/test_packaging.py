"""What a user gets: an archive with everything in it, that imports cheaply and changes nothing.

Each test runs a fresh interpreter, since this one has long imported the package, with the run-time
shape checks that pytest adds.
"""

import ast
import json
import os
import re
import subprocess
import sys
import zipfile
from collections import defaultdict
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# One worker for all of them: the archives are built once, and the CPU time is measured on its own.
pytestmark = pytest.mark.xdist_group("packaging")

PACKAGES = ("transformer_lens_lite", "weights_conversion")
# Imported by importing the package, these would be a cost or a side effect nobody asked for.
# fmt: off
NOT_ON_IMPORT = {
    "transformers", "huggingface_hub", "safetensors", "tokenizers", "requests", "httpx", "aiohttp",
    "pandas", "plotly", "matplotlib", "datasets", "wandb", "accelerate", "IPython", "beartype",
}
# fmt: on


def run(*command: str, cwd: Path, env: dict[str, str] | None = None) -> str:
    env = {**os.environ, **(env or {})}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


# --- the archives ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory, project_root: Path) -> Path:
    into = tmp_path_factory.mktemp("sdist")
    build = (sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(into))
    run(*build, cwd=project_root)
    (archive,) = into.glob("*.tar.gz")
    return archive


@pytest.fixture(scope="module", params=["checkout", "sdist"])
def wheel(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, project_root: Path
) -> Path:
    source = request.getfixturevalue("sdist") if request.param == "sdist" else project_root
    into = tmp_path_factory.mktemp("wheel")
    # Without isolation pip takes hatchling from this environment and needs no network.
    options = ["--no-build-isolation", "--no-deps", "--no-index", "--quiet"]
    run(sys.executable, "-m", "pip", "wheel", *options, "-w", str(into), str(source), cwd=into)
    (archive,) = into.glob("*.whl")
    return archive


@pytest.fixture(scope="module")
def project(project_root: Path) -> dict[str, Any]:
    """What pyproject.toml says of the package."""
    whole: dict[str, Any] = tomllib.loads((project_root / "pyproject.toml").read_text())
    return dict(whole["project"])


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This environment's packages without ours, as links."""
    folder = tmp_path_factory.mktemp("environment")
    for site in [Path(p) for p in sys.path if p.endswith(("site-packages", "dist-packages"))]:
        for entry in site.iterdir():
            link = folder / entry.name
            if not entry.name.startswith(PACKAGES) and not link.exists():
                link.symlink_to(entry)
    return folder


@pytest.fixture(scope="module")
def dependencies(tmp_path_factory: pytest.TempPathFactory, project: dict[str, Any]) -> Path:
    """What an install brings along, as links: the required packages and what they require."""
    folder = tmp_path_factory.mktemp("dependencies")
    waiting = [Requirement(line) for line in project["dependencies"]]
    found = set()
    while waiting:
        wanted = waiting.pop()
        extras = wanted.extras or {""}
        if wanted.marker is not None and not wanted.marker.evaluate():
            continue
        try:
            package = metadata.distribution(wanted.name)
        except metadata.PackageNotFoundError:
            continue  # CUDA's, which torch for CPUs names and does not have
        if (wanted.name, frozenset(extras)) in found:
            continue
        found.add((wanted.name, frozenset(extras)))
        for requirement in map(Requirement, package.requires or ()):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras):
                requirement.marker = None
                waiting.append(requirement)
        for top in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
            link = folder / top
            if not link.exists():
                link.symlink_to(Path(str(package.locate_file(top))))
    return folder


def where_it_imports_from(
    place: Path, dependencies: Path, cwd: Path, first: str = PACKAGES[0]
) -> tuple[str, list[Path]]:
    """The version and both packages' folders, when only `place` and `dependencies` are there."""
    probe = (
        f"import {first}, transformer_lens_lite as a, weights_conversion as b; "
        "print(a.__version__, a.__file__, b.__file__, sep='\\n')"
    )
    # -S leaves site-packages out, and with it an editable install of the checkout.
    env = {"PYTHONPATH": os.pathsep.join([str(place), str(dependencies)])}
    version, *files = run(sys.executable, "-S", "-c", probe, cwd=cwd, env=env).splitlines()
    return version, [Path(file).parent for file in files]


def test_wheel_has_every_file_of_both_packages(wheel: Path, project_root: Path) -> None:
    expected = {
        file.relative_to(project_root).as_posix()
        for package in PACKAGES
        for file in (project_root / package).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == expected
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    assert any(name.startswith("transformer_lens_lite/pretrained/tiny_lens/") for name in names)


def test_wheel_imports_where_only_its_dependencies_are(
    wheel: Path, dependencies: Path, tmp_path: Path
) -> None:
    site = tmp_path / "site"
    options = ["--no-deps", "--no-index", "--quiet", "--no-compile", "--target", str(site)]
    run(sys.executable, "-m", "pip", "install", *options, str(wheel), cwd=tmp_path)
    version, folders = where_it_imports_from(site, dependencies, cwd=tmp_path)
    assert folders == [site / package for package in PACKAGES]
    assert version == wheel.name.split("-")[1]


EVERYTHING = """
import importlib.util, pkgutil
import transformer_lens_lite, weights_conversion

for package in (transformer_lens_lite, weights_conversion):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith(("__main__", "as_transformer_lens")):
            importlib.import_module(module.name)
for name in ("plotly", "pandas", "datasets", "pytest", "beartype"):
    assert importlib.util.find_spec(name) is None, name
model = transformer_lens_lite.HookedTransformer.from_pretrained("tiny-lens", device="cpu")
print(model.generate("When Mary and John went to the", max_new_tokens=2, do_sample=False))
"""


def test_the_model_in_the_box_speaks_where_only_the_required_packages_are(
    dependencies: Path, project_root: Path, tmp_path: Path
) -> None:
    """Every module can be imported there: nothing that is imported on the way is missing."""
    env = {"PYTHONPATH": os.pathsep.join([str(project_root), str(dependencies)])}
    said = run(sys.executable, "-S", "-c", EVERYTHING, cwd=tmp_path, env=env)
    assert said.startswith("When Mary and John went to the ")


def test_an_editable_install_is_the_checkout(
    project_root: Path, environment: Path, dependencies: Path, tmp_path: Path
) -> None:
    run(sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv"), cwd=tmp_path)
    python = str(tmp_path / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python")
    options = ["--no-build-isolation", "--no-deps", "--no-index", "--quiet"]
    install = (sys.executable, "-m", "pip", "--python", python, "install", *options)
    env = {"PYTHONPATH": str(environment)}  # hatchling is there
    run(*install, "--editable", str(project_root), cwd=tmp_path, env=env)
    probe = (
        "import importlib.metadata, transformer_lens_lite as a, weights_conversion as b; "
        "assert a.__version__ == importlib.metadata.version('transformer_lens_lite'); "
        "print(a.__file__, b.__file__, sep='\\n')"
    )
    files = run(python, "-c", probe, cwd=tmp_path, env={"PYTHONPATH": str(dependencies)})
    folders = [Path(file).parent for file in files.splitlines()]
    assert folders == [project_root / package for package in PACKAGES]


@pytest.mark.parametrize("first", PACKAGES)
def test_a_bare_checkout_imports(
    first: str, project_root: Path, dependencies: Path, tmp_path: Path
) -> None:
    """Not installed, whichever of the two packages comes first."""
    version, folders = where_it_imports_from(project_root, dependencies, tmp_path, first)
    assert folders == [project_root / package for package in PACKAGES]
    assert version  # nothing to read it from, and still not an error


# --- what is declared -----------------------------------------------------------------------------


def imported(project_root: Path) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Packages of others and who imports them: when a module is imported, and later."""
    at_once: dict[str, set[str]] = defaultdict(set)
    late: dict[str, set[str]] = defaultdict(set)
    for package in PACKAGES:
        for path in (project_root / package).rglob("*.py"):
            tree = ast.parse(path.read_text())
            inner = {
                id(node)
                for function in ast.walk(tree)
                if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
                for node in ast.walk(function)
            }
            for node in ast.walk(tree):
                names = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and not node.level:
                    names = [node.module or ""]
                for name in {name.partition(".")[0] for name in names}:
                    if name not in {*sys.stdlib_module_names, *PACKAGES}:
                        where = late if id(node) in inner else at_once
                        where[name].add(str(path.relative_to(project_root)))
    return at_once, late


def declared(lines: list[str]) -> set[str]:
    return {re.split(r"[^\w-]", line)[0].replace("-", "_") for line in lines}


def test_every_package_that_is_imported_is_declared(
    project: dict[str, Any], project_root: Path
) -> None:
    """Required, or, where a function asks for it, in an extra for users; and none for nothing."""
    required = declared(project["dependencies"])
    of_users = {"plot", "dataframes", "datasets", "wandb"}
    extras = declared(sum((project["optional-dependencies"][name] for name in of_users), []))
    at_once, late = imported(project_root)
    missing = {name: who for name, who in at_once.items() if name not in required}
    assert missing == {}
    assert {name: who for name, who in late.items() if name not in required | extras} == {}
    assert required == (at_once.keys() | late.keys()) - extras
    assert extras == late.keys() - required
    assert {"torch", "numpy", "jaxtyping"} <= at_once.keys()


def test_report_158_nothing_is_pinned(project: dict[str, Any]) -> None:
    """A cap in a library is somebody else's unsolvable environment."""
    lines = sum(project["optional-dependencies"].values(), list(project["dependencies"]))
    for requirement in map(Requirement, lines):
        assert {each.operator for each in requirement.specifier} <= {">="}, str(requirement)


# --- the import -----------------------------------------------------------------------------------

PROBE = """
import json, logging, os, random, resource, signal, sys, time, warnings
import numpy, torch

def resident_mb():  # None where there is no /proc
    try:
        pages = int(open("/proc/self/statm").read().split()[1])
    except OSError:
        return None
    return pages * resource.getpagesize() / 2**20

def state():
    return {
        "grad": torch.is_grad_enabled(),
        "dtype": str(torch.get_default_dtype()),
        "device": str(torch.get_default_device()),
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "matmul": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "sdp": [torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()],
        "torch rng": torch.get_rng_state().tolist(),
        "numpy rng": [str(part) for part in numpy.random.get_state()],
        "python rng": str(random.getstate()),
        "warnings": [str(entry) for entry in warnings.filters],
        "logging": [str(logging.root.handlers), logging.root.level, logging.root.manager.disable],
        "environment": dict(os.environ),
        "sys.path": list(sys.path),
        "hooks": [str(sys.excepthook), str(sys.displayhook), str(signal.getsignal(signal.SIGINT))],
    }

sockets = []
sys.addaudithook(lambda event, args: event.startswith("socket.") and sockets.append(event))
before, modules, memory, start = state(), set(sys.modules), resident_mb(), time.process_time()
import transformer_lens_lite
seconds, after = time.process_time() - start, resident_mb()
changed = {key: [old, state()[key]] for key, old in before.items() if old != state()[key]}
json.dump({
    "seconds": seconds,
    "megabytes": None if memory is None else after - memory,
    "modules": sorted({name.partition(".")[0] for name in set(sys.modules) - modules}),
    "sockets": sockets,
    "changed": changed,
}, sys.stdout)
"""


@pytest.fixture(scope="module")
def probes(project_root: Path) -> list[dict]:
    """Three imports: the first may have to write bytecode, and any may meet a busy machine."""
    env = {"PYTHONPATH": str(project_root)}
    command = (sys.executable, "-W", "error", "-c", PROBE)
    return [json.loads(run(*command, cwd=project_root, env=env)) for _ in range(3)]


def test_report_159_import_costs_little_over_torch(probes: list[dict]) -> None:
    assert min(probe["seconds"] for probe in probes) <= 0.3  # of CPU
    if probes[0]["megabytes"] is None:
        pytest.skip("resident memory is read from /proc, which this system has not")
    assert min(probe["megabytes"] for probe in probes) <= 20


def test_report_152_and_159_import_loads_nothing_heavy(probes: list[dict]) -> None:
    assert set(probes[0]["modules"]).isdisjoint(NOT_ON_IMPORT)


def test_import_opens_no_socket(probes: list[dict]) -> None:
    assert probes[0]["sockets"] == []


def test_import_leaves_global_state_alone(probes: list[dict]) -> None:
    assert probes[0]["changed"] == {}
