"""sae-lens 6, as it is on the package index, over this library under the name transformer_lens.

Builds an environment of its own (no transformer-lens in it) and runs clients/sae_lens_client.py
there. Needs the package index, so it is not part of the default run: `make clients`.
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

SAE_LENS = "sae-lens>=6.54,<7"


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    env = {**os.environ, **env}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_sae_lens_runs_over_ours(tmp_path: Path, project_root: Path) -> None:
    folder = tmp_path / "environment"
    venv.create(folder, with_pip=True)
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    site = Path(
        run(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=tmp_path).strip()
    )
    # torch and transformers are taken from here instead of being installed again
    here = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site / "tested_with.pth").write_text("\n".join(here))
    constraints = str(project_root / "constraints.txt")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    needs = project_root / "tests" / "clients" / "requirements-sae-lens.txt"
    run(*pip, "-c", constraints, "-r", needs, cwd=tmp_path)
    run(*pip, "-c", constraints, "--no-deps", SAE_LENS, cwd=tmp_path)
    absent = "import importlib.util as u; print(u.find_spec('transformer_lens'))"
    assert run(python, "-c", absent, cwd=tmp_path) == "None\n"
    client = project_root / "tests" / "clients" / "sae_lens_client.py"
    said = run(python, client, cwd=tmp_path, PYTHONPATH=str(project_root), WANDB_MODE="disabled")
    assert said.splitlines()[-1] == "sae-lens works"
