"""What every test may rely on: no network, fixed random numbers, threads that fit the machine."""

import os

# Before anything imports transformers: both are read at import time.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import random
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import jaxtyping
import pytest
import torch
from jaxtyping import install_import_hook

# The same examples in every run: a red run is then about the change, and comes back when repeated.
hypothesis.settings.register_profile("repeatable", derandomize=True)
hypothesis.settings.load_profile("repeatable")

# Shapes and types in signatures are checked at run time, under pytest only; an int passes for a
# float (PEP 484). Done here because jaxtyping's command-line option takes no options for the type
# checker.
install_import_hook(
    ["transformer_lens_lite", "weights_conversion"],
    "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))",
)

# Checking shapes takes longer than the forwards of models this small. These files run every family,
# or every kind of model once more: their shapes are checked where native models of every kind run
# (test_features, test_hooks, test_kv_cache …).
UNCHECKED = (
    "test_conversion",
    "test_encoders",
    "test_families",
    "test_hf_parity",
    "test_interrupts",
    "test_loading",
    "test_patching",
    "test_real_models",
    "test_training",
    "test_verification",
    "test_weight_processing",
)

PROJECT_ROOT = Path(__file__).resolve().parent.parent

# Models in tests are tiny: a second thread costs more in waiting than it saves, above all when
# xdist's workers, or another run of the suite, share the cores.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _shapes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whether this file's calls are checked."""
    jaxtyping.config.update("jaxtyping_disable", request.module.__name__ in UNCHECKED)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    """A test gives the same result alone, in any order, and on any worker."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def project_root() -> Path:
    return PROJECT_ROOT


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder with trained test models; it is not part of the repository."""
    folder = Path(os.environ.get("SHARED_DIR") or PROJECT_ROOT.parent / "shared")
    if not (folder / "models").is_dir():
        pytest.skip(
            f"needs trained models in {folder / 'models'}, which is not there; "
            "set SHARED_DIR to a folder that has models/"
        )
    return folder
