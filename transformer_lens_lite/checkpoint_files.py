"""Where a checkpoint's tensors and config are read from: folders, files of training scripts, models
in memory. One tensor at a time, nothing before it is asked for."""

import json
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def conversion() -> ModuleType:
    """The package `weights_conversion`, which is ours although its name does not say so."""
    try:
        import weights_conversion

        weights_conversion.Table  # noqa: B018
    except (ImportError, AttributeError) as error:
        raise ImportError(
            "transformer_lens_lite installs a second package, weights_conversion, but importing "
            f"it gave something else ({error}). Another distribution or a local file of that name "
            "hides it: `python -c 'import weights_conversion as w; print(w.__file__)'`"
        ) from error
    return weights_conversion


# --- files --------------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. FileNotFoundError or ValueError, naming the file."""
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} has no {path.name}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8, bottomless nesting
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, not a JSON object")
    return value


@runtime_checkable
class _File(Protocol):
    """One open file of tensors."""

    def keys(self) -> Iterable[str]: ...

    def get_tensor(self, name: str) -> Tensor: ...


class _BinFile:
    """A file of torch.save: unpickled without running code, memory-mapped where it can be."""

    def __init__(self, path: Path) -> None:
        try:
            tensors = _torch_load(path)
        except Exception as error:  # damaged pickles fail in every way there is
            raise ValueError(
                f"{path} is not a file of plain tensors, or it is damaged; no code in it was run. "
                f"{first_line(error)}"
            ) from error
        if not isinstance(tensors, Mapping):
            raise ValueError(f"{path} holds a {type(tensors).__name__}, not a dict of tensors")
        self.tensors = tensors

    def keys(self) -> Iterable[str]:
        return self.tensors.keys()

    def get_tensor(self, name: str) -> Tensor:
        value = self.tensors[name]
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} is a {type(value).__name__}, not a tensor")
        return value.detach()


def _torch_load(path: Path) -> Any:
    with path.open("rb") as file:
        is_zip = file.read(4) == b"PK\x03\x04"  # torch before 1.6 wrote another, unmappable format
    with warnings.catch_warnings():  # of an unusual pickle protocol; it loads, or raises below
        warnings.simplefilter("ignore", UserWarning)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)


def _open(path: Path) -> _File:
    if path.suffix != ".safetensors":
        return _BinFile(path)
    from safetensors import SafetensorError, safe_open

    try:
        file = safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} is not a whole safetensors file ({error}); download it again"
        ) from error
    _refuse_repeats(path)
    return file


def _refuse_repeats(path: Path) -> None:
    """ValueError when the header names a tensor twice: readers take one of them, silently."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        named = dict(pairs)
        if len(named) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"{path}: its header has {twice!r} twice; which one is meant?")
        return named

    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        json.loads(file.read(length), object_pairs_hook=once)


def first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


# --- sources of tensors -------------------------------------------------------------------------


class FolderCheckpoint:
    """A folder with config.json and weights, opened lazily: `read(name)` touches one tensor.

    Raises:
        FileNotFoundError: no folder, config, weights, or shard.
        ValueError: a file that cannot be read, or an index that does not describe its shards.
    """

    def __init__(self, folder: Path, hf_config: Mapping[str, Any] | None = None) -> None:
        self.folder = folder
        self.where = str(folder / "config.json")
        self.config = read_json(folder / "config.json") if hf_config is None else dict(hf_config)
        self._open: dict[Path, _File] = {}
        self.files = self._find()

    def _find(self) -> dict[str, Path]:
        """Tensor name -> file."""
        path = next((self.folder / n for n in WEIGHT_FILES if (self.folder / n).is_file()), None)
        if path is None:
            adapter = (self.folder / "adapter_config.json").is_file()
            hint = " It is a PEFT adapter: merge it into its base model first." if adapter else ""
            raise FileNotFoundError(f"{self.folder} has none of {', '.join(WEIGHT_FILES)}.{hint}")
        if path.suffix != ".json":
            return dict.fromkeys(self._file(path).keys(), path)
        return self._find_by_index(path)

    def _find_by_index(self, index: Path) -> dict[str, Path]:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{index} has no weight_map")
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise ValueError(f"{index}: {name} is in {file!r}, which is not a file name")
        files = {name: self.folder / file for name, file in weight_map.items()}
        for name, path in files.items():
            if not path.is_file():
                raise FileNotFoundError(f"{index} says that {name} is in {path.name}: no such file")
        for path in sorted(set(files.values())):
            promised = {name for name, file in files.items() if file == path}
            if wrong := sorted(promised ^ set(self._file(path).keys())):
                where = "the index only" if wrong[0] in promised else "the shard only"
                raise ValueError(f"{index} and {path.name} disagree: {wrong[0]} is in {where}")
        return files

    def _file(self, path: Path) -> _File:
        if path not in self._open:
            self._open[path] = _open(path)
        return self._open[path]

    def names(self) -> set[str]:
        return set(self.files)

    def read(self, name: str) -> Tensor:
        return self._get(name, self._file(self.files[name]))

    def read_alone(self, name: str) -> Tensor:
        """The tensor over a mapping of its own: the memory it takes goes with it, where the others
        would keep the whole file's."""
        path = self.files[name]
        return self._get(name, _open(path) if path.suffix == ".safetensors" else self._file(path))

    def _get(self, name: str, file: _File) -> Tensor:
        path = self.files[name]
        try:
            return file.get_tensor(name)
        except Exception as error:
            raise ValueError(f"{path}: cannot read {name}: {error}") from error

    def describe(self, name: str) -> str:
        return str(self.files[name])

    def n_bytes(self) -> int:
        return sum(path.stat().st_size for path in set(self.files.values()))


class ModelCheckpoint:
    """A Hugging Face model in memory. Its tensors stay its own: they are copied one by one."""

    def __init__(
        self, hf_model: torch.nn.Module, hf_config: Mapping[str, Any] | None = None
    ) -> None:
        self.where = f"the config of the {type(hf_model).__name__}"
        config: Any = hf_model.config
        self.config = config.to_dict() if hf_config is None else dict(hf_config)
        self.tensors = _as_in_files(hf_model)

    def names(self) -> set[str]:
        return set(self.tensors)

    def read(self, name: str) -> Tensor:
        tensor = self.tensors[name]
        if tensor.is_meta:
            raise ValueError(f"{name} of the Hugging Face model is on the meta device: no values")
        return tensor

    read_alone = read

    def describe(self, name: str) -> str:
        return "the Hugging Face model"

    def n_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def _as_in_files(hf_model: torch.nn.Module) -> dict[str, Tensor]:
    """The tensors under the names that files have: transformers 5 renames some in memory."""
    state = dict(hf_model.state_dict())
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # transformers 4: the names are the same
        return state
    return dict(revert_weight_conversion(hf_model, state))


class TextPart:
    """The language model inside a checkpoint that sees images too, as a checkpoint of its own.

    Its tensors go by the names they have in the file of the language model alone; those of the
    other parts are not there. An unknown name stays what it is, to be refused by it.
    """

    def __init__(self, whole: "FolderCheckpoint | ModelCheckpoint") -> None:
        self.whole = whole
        self.where = f"{whole.where}: text_config"
        of_all = ("tie_word_embeddings", "quantization_config", "compression_config")
        said_outside = {name: whole.config[name] for name in of_all if name in whole.config}
        self.config = {**whole.config["text_config"], **said_outside}
        self.original = {
            self._renamed(name): name
            for name in whole.names()
            if not name.removeprefix("model.").startswith(conversion().OTHER_PARTS)
        }

    def _renamed(self, name: str) -> str:
        for prefix, short in conversion().TEXT_PREFIXES.items():
            if name.startswith(prefix):
                return short + name.removeprefix(prefix)
        return name

    def names(self) -> set[str]:
        return set(self.original)

    def read(self, name: str) -> Tensor:
        return self.whole.read(self.original[name])

    def read_alone(self, name: str) -> Tensor:
        return self.whole.read_alone(self.original[name])

    def describe(self, name: str) -> str:
        return self.whole.describe(self.original[name])

    def n_bytes(self) -> int:
        return self.whole.n_bytes()


class TrainingCheckpoint:
    """A file of torch.save that a training script wrote: nanoGPT's `ckpt.pt`, minGPT's state dict.

    nanoGPT keeps the sizes beside the weights; for a bare state dict `hf_config` has to say them.
    """

    def __init__(self, path: Path, hf_config: Mapping[str, Any] | None = None) -> None:
        self.path, self.where = path, str(path)
        held = dict(_BinFile(path).tensors)
        if "model" in held and isinstance(held["model"], Mapping):  # beside an optimizer's state
            tensors = held["model"]
            hf_config = conversion().config_of_training(held) if hf_config is None else hf_config
        else:
            tensors = held
        if hf_config is None:
            raise ValueError(
                f"{path} does not say what model its weights are of; pass hf_config=, such as "
                "{'model_type': 'mingpt', 'n_layer': …, 'n_head': …, 'n_embd': …, "
                "'vocab_size': …, 'block_size': …}"
            )
        self.config = dict(hf_config)
        # a compiled model's names have a prefix
        self.tensors = {str(name).removeprefix("_orig_mod."): t for name, t in tensors.items()}

    def names(self) -> set[str]:
        return set(self.tensors)

    def read(self, name: str) -> Tensor:
        value = self.tensors[name]
        if not isinstance(value, Tensor):
            raise ValueError(f"{self.path}: {name} is a {type(value).__name__}, not a tensor")
        return value.detach()

    read_alone = read

    def describe(self, name: str) -> str:
        return str(self.path)

    def n_bytes(self) -> int:
        return self.path.stat().st_size


Checkpoint = FolderCheckpoint | ModelCheckpoint | TextPart | TrainingCheckpoint
