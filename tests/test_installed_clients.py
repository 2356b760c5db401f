"""sae-lens 6 and circuit-tracer, as they are on the package index, over this library under the name
transformer_lens; and CircuitsVis, which draws our tensors.

Builds an environment of its own (no transformer-lens in it) and runs the scripts of clients/ there.
Needs the package index, so it is not part of `make test`: `make clients`, which CI runs too.
"""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    not os.environ.get("TEST_CLIENTS"), reason="installs packages; run it with `make clients`"
)

# exactly these: CI runs them, and a new release of theirs must not stop a change of ours
CLIENTS = ("sae-lens==6.54.12", "circuit-tracer==0.5.0", "circuitsvis==1.43.3")


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    env = {**os.environ, **env}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory, project_root: Path) -> Path:
    """The interpreter of an environment with both clients in it."""
    folder = tmp_path_factory.mktemp("clients") / "environment"
    venv.create(folder, with_pip=True)
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    where = "import site; print(site.getsitepackages()[0])"
    site = Path(run(python, "-c", where, cwd=folder).strip())
    # torch and transformers are taken from here instead of being installed again
    here = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site / "tested_with.pth").write_text("\n".join(here))
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pip += ["-c", project_root / "constraints.txt"]
    needs = project_root / "tests" / "clients" / "requirements.txt"
    run(*pip, "-r", needs, cwd=folder)
    run(*pip, "--no-deps", *CLIENTS, cwd=folder)
    absent = "import importlib.util as u; print(u.find_spec('transformer_lens'))"
    assert run(python, "-c", absent, cwd=folder) == "None\n"
    return python


@pytest.mark.slow
@pytest.mark.parametrize("client", ["sae-lens", "circuit-tracer", "circuitsvis"])
def test_a_client_runs_over_ours(
    client: str, python: Path, tmp_path: Path, project_root: Path
) -> None:
    tests = project_root / "tests"
    script = tests / "clients" / f"{client.replace('-', '_')}_client.py"
    env = {"PYTHONPATH": str(project_root), "WANDB_MODE": "disabled"}
    said = run(python, script, tests, cwd=tmp_path, **env)
    assert said.splitlines()[-1] == f"{client} works"
