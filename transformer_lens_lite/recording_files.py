"""A recording as a safetensors file.

A file is written beside its place and then moved there, so that a file that exists is whole; it is
mapped when it is read.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from transformer_lens_lite.recording import Axes, Call, Forward, Recording, compact

FORMAT = "transformer_lens_lite.activations.1"
VALUES = "values/"
OF_COLUMNS = ("tokens", "attention_mask", "columns", "key_mask")


def write(
    path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any], new: bool = False
) -> None:
    """A safetensors file, whole or not at all; FileExistsError for one that has to be `new`."""
    from safetensors.torch import save_file

    whole, storages = {}, set()
    for name, tensor in tensors.items():
        kept = compact(tensor.detach().cpu().contiguous())
        storage = kept.untyped_storage().data_ptr()
        whole[name] = kept.clone() if storage in storages else kept  # the format shares nothing
        storages.add(storage)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} to write {path.name} into")
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    try:
        save_file(whole, unfinished, metadata={"format": FORMAT, "about": json.dumps(about)})
        if new:
            os.link(unfinished, path)  # which never takes the place of another file
        else:
            os.replace(unfinished, path)
    finally:
        with suppress(FileNotFoundError):
            unfinished.unlink()


def opened(path: Path) -> tuple[Any, dict[str, Any]]:
    """A file that `write` made, and what was written about it.

    Raises: FileNotFoundError; ValueError for another kind of file, or a damaged one.
    """
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        file = safe_open(path, framework="pt", device="cpu")
        metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise ValueError(f"{path} holds no activations that were saved here")
        return file, json.loads(metadata["about"])
    except (SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def save_recording(record: Recording, path: Path, about: Mapping[str, Any]) -> None:
    """Write a recording; what is no tensor (arguments of modules) is left out.

    `about` is plain data to keep beside it.
    """
    tensors = {VALUES + name: value for name, value in record.values.items()}
    for name in OF_COLUMNS:
        given = getattr(record, name)
        if given is not None:
            tensors[name] = given
    described = {
        "calls": record.calls,
        "axes": record.axes,
        "forwards": [forward.__dict__ for forward in record.forwards],
        "names": list(record.values),
        "has_batch_dim": record.has_batch_dim,
    }
    write(path, tensors, {**about, **described})


def load_recording(path: Path) -> tuple[Recording, dict[str, Any]]:
    """A recording that was saved, and what was kept beside it."""
    file, about = opened(path)
    try:
        names = set(file.keys())
        record = Recording(
            values={name: file.get_tensor(VALUES + name) for name in about["names"]},
            calls={n: [Call(*each) for each in calls] for n, calls in about["calls"].items()},
            axes={n: Axes(*each) for n, each in about["axes"].items()},
            forwards=[Forward(**each) for each in about["forwards"]],
            has_batch_dim=about["has_batch_dim"],
            **{name: file.get_tensor(name) for name in OF_COLUMNS if name in names},
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from error
    return record, about
