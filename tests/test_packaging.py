"""What a user gets: an archive with everything in it, that imports cheaply and changes nothing.

Each test runs a fresh interpreter, since this one has long imported the package, with the run-time
shape checks that pytest adds.
"""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

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
def dependencies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This environment's packages without ours, as links."""
    folder = tmp_path_factory.mktemp("dependencies")
    for site in [Path(p) for p in sys.path if p.endswith(("site-packages", "dist-packages"))]:
        for entry in site.iterdir():
            link = folder / entry.name
            if not entry.name.startswith(PACKAGES) and not link.exists():
                link.symlink_to(entry)
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


@pytest.mark.parametrize("first", PACKAGES)
def test_a_bare_checkout_imports(
    first: str, project_root: Path, dependencies: Path, tmp_path: Path
) -> None:
    """Not installed, whichever of the two packages comes first."""
    version, folders = where_it_imports_from(project_root, dependencies, tmp_path, first)
    assert folders == [project_root / package for package in PACKAGES]
    assert version  # nothing to read it from, and still not an error


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
