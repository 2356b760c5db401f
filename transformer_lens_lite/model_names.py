"""Classic short names of models, and the hub's names for them."""

import json
from pathlib import Path
from typing import Any

from transformer_lens_lite.nearest import closest

_DATA = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))

# models in the box -> their folders
BOXED = {"tiny-lens": Path(__file__).parent / "pretrained" / "tiny_lens"}
# hub name -> its short names; the first of each model's names are the classic "official" ones
MODEL_ALIASES: dict[str, list[str]] = _DATA["names"]
OFFICIAL_MODEL_NAMES: list[str] = list(MODEL_ALIASES)
# official names of models that the hub keeps under another name
KEPT_ELSEWHERE: dict[str, str] = _DATA["kept_elsewhere"]
# training steps at which Pythia was saved (Biderman et al. 2023)
PYTHIA_CHECKPOINTS: list[int] = [0, *(2**i for i in range(10)), *range(1000, 143_001, 1000)]

_OFFICIAL = {
    name.lower(): official
    for official, aliases in MODEL_ALIASES.items()
    for name in (official, *aliases)
}


def get_official_model_name(model_name: str) -> str:
    """The official name behind a short one, in any case: "gpt2-small" is "gpt2".

    Raises: ValueError for a name that is neither, with the nearest ones.
    """
    official = _OFFICIAL.get(model_name.lower())
    if official is None:
        raise ValueError(
            f"{model_name!r} is no classic model name.{closest(model_name.lower(), _OFFICIAL)} "
            "(from_pretrained takes any name of the hub, and folders)"
        )
    return official


def hub_name(name: str) -> str:
    """Where the hub keeps the model of a classic name; other names are returned as they are."""
    official = _OFFICIAL.get(name.lower(), name)
    return KEPT_ELSEWHERE.get(official, official)


def nearest_names(name: str) -> str:
    """ " Did you mean …?" with classic names and the models in the box, for one that is none;
    nothing where none is near."""
    name = name.lower()  # a misspelling, and no other name of the hub
    return "" if name in _OFFICIAL else closest(name, [*BOXED, *_OFFICIAL], cutoff=0.8)


def get_checkpoint_labels(model_name: str, **kwargs: Any) -> tuple[list[int], str]:
    """The training steps at which a model was saved, and "step".

    Raises: ValueError for models other than Pythia, whose checkpoints are not listed here.
    """
    official = get_official_model_name(model_name)
    if not official.startswith("EleutherAI/pythia"):
        raise ValueError(f"checkpoints of {official} are not listed; give revision= by its name")
    steps = PYTHIA_CHECKPOINTS
    return (steps[11:] if official.endswith("-v0") else steps), "step"
