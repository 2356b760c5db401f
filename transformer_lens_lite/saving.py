"""Writing checkpoints in Hugging Face's format.

save_pretrained(model, "folder")                     for AutoModelForCausalLM.from_pretrained
to_hf_state_dict(model)                              the same tensors without a file
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor

from transformer_lens_lite.checkpoint_files import conversion
from transformer_lens_lite.native_checkpoints import written


def as_checkpoint(model: Any) -> tuple[dict[str, Any], Any]:
    """The Hugging Face config of a model, and its table."""
    cfg = model.cfg
    steps = set(getattr(model, "processed", ()))
    original = getattr(model, "checkpoint_config", None)
    if cfg.normalization_type in ("LNPre", "RMSPre") and original is None:
        steps.add("fold_ln")  # else the checkpoint's own norms have no weights
    if steps:
        raise ValueError(
            f"the weights of this model were processed ({', '.join(sorted(steps))}), which a "
            "Hugging Face checkpoint cannot express; load it with from_pretrained_no_processing"
        )
    state = model.state_dict()

    def needs(name: str) -> bool:
        layers = range(cfg.n_layers) if "{i}" in name else range(1)
        tensors = (state.get(name.replace("{i}", str(i))) for i in layers)
        return any(tensor is not None and bool(tensor.any()) for tensor in tensors)

    tables = conversion()
    architecture, config = tables.export_config(cfg, needs, original)
    return config, tables.Table(architecture, cfg, architecture.reading(config))


def to_hf_state_dict(model: Any) -> dict[str, Float[Tensor, "..."]]:
    """The model's weights by the names and shapes they have in Hugging Face's files.

    `hf_model.load_state_dict` takes them, except that transformers 5 fuses the experts of mixtures
    when it reads a file: for those use `save_pretrained`.

    Bit for bit what was loaded, contiguous, detached; where no copy is needed the model's own
    memory. The head of a tied model is the embedding itself.

    Raises:
        ValueError: something in the model has no place in a checkpoint of its family.
    """
    _, table = as_checkpoint(model)
    return table.to_hf(model.state_dict())


def save_pretrained(
    model: Any,
    folder: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    max_shard_size: int | str = "5GB",
    native: bool = False,
) -> None:
    """Write a folder that Hugging Face's AutoModelForCausalLM (and `load_pretrained`) can load.

    `native`: in this library's own names instead, which can say everything; processed weights too.

    Files appear under their names only once they are complete, so saving into the folder that the
    weights are memory-mapped from is safe.

    Raises:
        ValueError: something in the model has no place in a checkpoint of its family.
    """
    if native:
        config, tensors = written(model)
    else:
        config, tensors = _as_hugging_face_has_it(model)
    # The model's own copy of the tokenizer adds no BOS any more; what it was made from does.
    tokenizer = model.text.original if tokenizer is None else tokenizer
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    with _replacing(target) as new_file:
        files = _write_weights(tensors, new_file, max_shard_size)
        _write_json(new_file("config.json"), config)
    for old in [*target.glob("model*.safetensors"), target / "model.safetensors.index.json"]:
        if old.name not in files:  # of an earlier save; Hugging Face could take it for ours
            old.unlink(missing_ok=True)
    if tokenizer is not None:
        tokenizer.save_pretrained(target)


def _as_hugging_face_has_it(
    model: Any,
) -> tuple[dict[str, Any], dict[str, Float[Tensor, "..."]]]:
    """(config.json, tensors): a tied head is left out."""
    config, table = as_checkpoint(model)
    tensors = table.to_hf(model.state_dict())
    for row in table.tied:
        del tensors[row.hf]
    config = {name: value for name, value in config.items() if name != "dtype"}
    config["torch_dtype"] = str(model.cfg.dtype).removeprefix("torch.")
    config["architectures"] = config.get("architectures") or [table.architecture.hf_class]
    return config, tensors


def _write_weights(
    tensors: dict[str, Float[Tensor, "..."]],
    new_file: Callable[[str], Path],
    max_shard_size: int | str,
) -> set[str]:
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    split = split_torch_state_dict_into_shards(
        tensors, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
    )
    for file, names in split.filename_to_tensors.items():
        shard = {name: tensors[name] for name in names}
        save_file(shard, new_file(file), metadata={"format": "pt"})
    files = set(split.filename_to_tensors)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        _write_json(new_file("model.safetensors.index.json"), index)
        files.add("model.safetensors.index.json")
    return files


def _write_json(path: Path, value: dict[str, Any]) -> None:
    text = json.dumps(value, indent=2, sort_keys=True, default=str)
    path.write_text(text + "\n", encoding="utf-8")


@contextlib.contextmanager
def _replacing(folder: Path) -> Iterator[Callable[[str], Path]]:
    """Files written under temporary names, all moved into place at the end, or all removed."""
    moves: dict[Path, Path] = {}

    def new_file(name: str) -> Path:
        temporary = folder / f".{name}.{os.getpid()}.tmp"
        moves[temporary] = folder / name
        return temporary

    try:
        yield new_file
        for temporary, final in moves.items():
            os.replace(temporary, final)
    finally:
        for temporary in moves:
            temporary.unlink(missing_ok=True)
