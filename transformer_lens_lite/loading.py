"""Finding, reading and writing checkpoints in Hugging Face's format.

    load_pretrained(HookedTransformer, "tiny-lens")      in the box, a folder, or a hub name
    load_pretrained(HookedTransformer, hf_model=model)   a Hugging Face model in memory
    save_pretrained(model, "folder")                     for AutoModelForCausalLM.from_pretrained
    to_hf_state_dict(model)                              the same tensors without a file

Files are read one tensor at a time and memory-mapped: on the CPU, in the file's own dtype, the
model's parameters *are* the file's pages, so nothing is copied (writing to a parameter copies the
page, not the file). Do not overwrite such a file in place while the model lives; `save_pretrained`
replaces files, which is safe.
"""

import contextlib
import copy
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from transformer_lens_lite.config import HookedTransformerConfig, default_device, parse_dtype
from transformer_lens_lite.initialisation import parameters_come_later
from transformer_lens_lite.native_checkpoints import (
    PROCESSED,
    NativeTable,
    is_native,
    understood,
    written,
)
from transformer_lens_lite.weight_processing import process_weights

BOXED = {"tiny-lens": Path(__file__).parent / "pretrained" / "tiny_lens"}
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
# tokenizer_config.json is missing on purpose: alone it makes no tokenizer
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
WEIGHT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_BAR_FROM_BYTES = 10**9
logger = logging.getLogger(__name__)


def _conversion() -> ModuleType:
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
                f"{_first_line(error)}"
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
            if not name.removeprefix("model.").startswith(_conversion().OTHER_PARTS)
        }

    def _renamed(self, name: str) -> str:
        for prefix, short in _conversion().TEXT_PREFIXES.items():
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
            hf_config = _conversion().config_of_training(held) if hf_config is None else hf_config
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
TRAINING_FILES = (".pt", ".pth")


def open_checkpoint(
    name: Any,
    hf_model: torch.nn.Module | None = None,
    hf_config: Any = None,
    revision: str | None = None,
) -> Checkpoint:
    """A model in the box, a local folder, a Hugging Face model, or a hub name, in this order.

    `hf_config` (a dict or a Hugging Face config) replaces the checkpoint's own.
    """
    if hf_config is not None and not isinstance(hf_config, Mapping):
        if not hasattr(hf_config, "to_dict"):
            raise ValueError(
                f"hf_config must be a Hugging Face config or a dict, got {type(hf_config).__name__}"
            )
        hf_config = hf_config.to_dict()
    whole: FolderCheckpoint | ModelCheckpoint
    if hf_model is not None:
        if not hasattr(hf_model, "config"):
            raise ValueError(
                f"hf_model must be a Hugging Face model, which has a config; got "
                f"{type(hf_model).__name__}"
            )
        whole = ModelCheckpoint(hf_model, hf_config)
    elif name is not None and not isinstance(name, (str, os.PathLike)):
        what = "pass it as hf_model=" if isinstance(name, torch.nn.Module) else "it must be a name"
        raise ValueError(f"the model's name is a {type(name).__name__}; {what}")
    elif name is not None and (file := _training_file(name)) is not None:
        return TrainingCheckpoint(file, hf_config)
    elif name is not None:
        whole = FolderCheckpoint(_folder(name, revision), hf_config)
    else:
        raise ValueError("give the name or the folder of a model, or hf_model=")
    return TextPart(whole) if _conversion().is_around_text(whole.config) else whole


def _training_file(name: str | os.PathLike[str]) -> Path | None:
    """The file itself, or nanoGPT's in a folder that has no config."""
    path = Path(name).expanduser()
    if path.is_file() and path.suffix in TRAINING_FILES:
        return path
    inside = path / "ckpt.pt"
    return inside if inside.is_file() and not (path / "config.json").exists() else None


def _folder(name: str | os.PathLike[str], revision: str | None) -> Path:
    """The local folder of a model, downloading it if it is a hub name."""
    local = _local_folder(name)
    if local is not None:
        if revision is not None:
            raise ValueError(f"revision={revision!r} is for names on the hub; {local} is a folder")
        return local
    text = os.fspath(name)
    names_a_file = Path(text).expanduser().is_file()
    is_path = isinstance(name, os.PathLike) or text.startswith((".", "/", "~"))
    if names_a_file or is_path or text.count("/") > 1:
        is_file = Path(text).expanduser().exists()
        raise FileNotFoundError(
            f"{text} {'is a file; give its folder' if is_file else 'does not exist'}"
        )
    return _download(text, revision)


def _local_folder(name: str | os.PathLike[str]) -> Path | None:
    if isinstance(name, str) and name in BOXED:
        return BOXED[name]
    path = Path(name).expanduser()
    return path if path.is_dir() else None


# --- the hub ------------------------------------------------------------------------------------


def on_the_hub(name: Any) -> Any:
    """A classic short name ("gpt2-small") as the hub's; folders, files and other names as they
    are."""
    if not isinstance(name, str) or name in BOXED or Path(name).expanduser().exists():
        return name
    from transformer_lens_lite.model_names import hub_name

    return hub_name(name)


def read_config(
    name: str | os.PathLike[str], first_n_layers: int | None, overrides: dict[str, Any]
) -> HookedTransformerConfig:
    """The native config of a folder or hub name, from its config.json alone.

    Raises: FileNotFoundError when there is none; ValueError when it is not understood.
    """
    conversion = _conversion()
    folder = _local_folder(name)
    config = read_json((folder or _download_config(os.fspath(name), None)) / "config.json")
    if is_native(config):
        whole, _ = understood(config, str(name), overrides)
    else:
        conversion.refuse_foreign_code(config, str(name))
        config = config["text_config"] if conversion.is_around_text(config) else config
        architecture = conversion.architecture_for(config)
        whole = architecture.read(architecture.reading(config, str(name)), **overrides)
    return whole if first_n_layers is None else conversion.first_layers(whole, first_n_layers)


def _download_config(name: str, revision: str | None) -> Path:
    """Fetch config.json into the hub's cache; the folder it is in."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return Path(hf_hub_download(name, "config.json", revision=revision)).parent
    except (OSError, ValueError, EntryNotFoundError) as error:
        raise FileNotFoundError(_why_not(name, error)) from error


def _download(name: str, revision: str | None) -> Path:
    """Fetch config and weights into the hub's cache; the folder they are in.

    Raises:
        FileNotFoundError: no such model, no access, no network, or no weights in a format we read.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    def fetch(file: str) -> Path:
        return Path(hf_hub_download(name, file, revision=revision))

    folder = _download_config(name, revision)
    for file in WEIGHT_FILES:
        try:
            path = fetch(file)
        except EntryNotFoundError:
            continue
        if path.suffix == ".json":
            _fetch_shards(name, path, fetch)
        return folder
    raise FileNotFoundError(
        f"the hub (or its local cache) has none of {', '.join(WEIGHT_FILES)} for {name!r}"
    )


def _fetch_shards(name: str, index: Path, fetch: Callable[[str], Path]) -> None:
    from huggingface_hub.errors import EntryNotFoundError

    weight_map = read_json(index).get("weight_map")
    shards = set(weight_map.values()) if isinstance(weight_map, dict) else set()
    for shard in sorted(str(shard) for shard in shards):
        try:
            fetch(shard)
        except (OSError, ValueError, EntryNotFoundError) as error:
            raise FileNotFoundError(f"{name!r}: cannot get the shard {shard}: {error}") from error


def _why_not(name: str, error: Exception) -> str:
    from huggingface_hub import constants
    from huggingface_hub import errors as hub

    from transformer_lens_lite.model_names import nearest_names

    known = f"{name!r} is no folder here and none of the models in the box ({', '.join(BOXED)})"
    near = nearest_names(name)
    if isinstance(error, hub.GatedRepoError):
        return (
            f"{name!r} is gated: accept its terms on the hub and log in (hf auth login, HF_TOKEN)"
        )
    if isinstance(error, hub.RepositoryNotFoundError):
        hidden = "it is private and you are not logged in"
        return f"{known}; the hub has no such model (or {hidden}).{near}"
    if isinstance(error, hub.LocalEntryNotFoundError):
        mode = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
        return f"{known}; {mode}, and it is not in the local cache.{near}"
    return f"{known}; the hub says: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def load_tokenizer(
    source: str | os.PathLike[str], revision: str | None = None, trust_remote_code: bool = False
) -> Any:
    """The tokenizer of a folder or hub name, or None where there is none.

    Raises:
        ValueError: a folder has tokenizer files, but they cannot be read.
    """
    folder = _local_folder(source)
    if folder is not None and not any((folder / file).is_file() for file in TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer

    where = os.fspath(source) if folder is None else str(folder)
    try:
        return AutoTokenizer.from_pretrained(
            where, revision=revision or "main", trust_remote_code=trust_remote_code
        )
    except Exception as error:
        if folder is None:  # not on the hub, or no network: text is then simply not available
            logger.warning(
                "no tokenizer for %r, so the model takes token ids only: %s",
                where,
                _first_line(error),
            )
            return None
        raise ValueError(
            f"the tokenizer files in {folder} cannot be read ({error}); pass tokenizer="
        ) from error


# --- loading ------------------------------------------------------------------------------------


class _Delivered:
    """A checkpoint whose tensors arrive on a device and in a dtype; a live model's as copies.

    `passing`: they will be rewritten and let go, in their own dtype until then. `progress` is told
    the bytes of what is read to stay.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        passing: bool,
        progress: Callable[[int], Any],
    ) -> None:
        self.checkpoint, self.progress = checkpoint, progress
        self.device, self.dtype, self.passing = device, dtype, passing
        self.names, self.describe = checkpoint.names, checkpoint.describe

    def read(self, name: str) -> Float[Tensor, "..."]:
        if self.passing:
            tensor = self.checkpoint.read_alone(name)
        else:
            tensor = self.checkpoint.read(name)
            self.progress(tensor.nbytes)
            if tensor.dtype != self.dtype or tensor.device != self.device:
                tensor = self.checkpoint.read_alone(name)
        if tensor.dtype not in WEIGHT_DTYPES:
            raise ValueError(
                f"{self.describe(name)}: {name} is {tensor.dtype}; quantised weights are not "
                "supported"
            )
        dtype = tensor.dtype if self.passing else self.dtype
        delivered = tensor.to(device=self.device, dtype=dtype)
        borrowed = isinstance(self.checkpoint, ModelCheckpoint) and delivered is tensor
        return delivered.clone() if borrowed else delivered

    def same(self, name: str, other: str) -> bool:
        a, b = self.checkpoint.read(name), self.checkpoint.read(other)
        return a.data_ptr() == b.data_ptr() or torch.equal(a, b)


@torch.no_grad()
def load_pretrained(
    cls: Any,
    model_name: str | os.PathLike[str] | None = None,
    *,
    hf_model: torch.nn.Module | None = None,
    hf_config: Any = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype = torch.float32,
    n_ctx: int | None = None,
    first_n_layers: int | None = None,
    tokenizer: Any = None,
    default_padding_side: str | None = None,
    default_prepend_bos: bool | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    move_to_device: bool = True,
    processing: Mapping[str, bool] | None = None,
) -> Any:
    """A model of class `cls` with the weights of a checkpoint, as they are or processed.

    model_name: "tiny-lens", a folder with config.json and weights, or a name on the hub. With
        `hf_model` it only says where the tokenizer is.
    n_ctx: another context length than the checkpoint's. Learned positions can only become fewer.
    first_n_layers: build, and read, only these.
    tokenizer: default: the checkpoint's, if it has one.
    move_to_device: False leaves the weights on the CPU.
    processing: the arguments of `weight_processing.process_weights`.

    Raises:
        FileNotFoundError: no such model, or a file of it is missing.
        ValueError: a checkpoint or config that is damaged, unsupported, or not wholly understood.
    """
    model_name = on_the_hub(model_name)
    checkpoint = open_checkpoint(model_name, hf_model, hf_config, revision)
    _refuse_foreign_code(checkpoint)
    checkpoint.config = _conversion().completed(checkpoint.config, checkpoint.names())
    overrides: dict[str, Any] = {
        "device": default_device() if device is None else device,
        "dtype": parse_dtype(dtype),
        "model_name": _display_name(model_name, checkpoint),
        "init_weights": False,
    }
    if default_prepend_bos is not None:
        overrides["default_prepend_bos"] = default_prepend_bos
    cfg, table = _understand(checkpoint, first_n_layers, overrides)
    target = torch.device(cfg.device or "cpu") if move_to_device else torch.device("cpu")
    is_processed, taken = any((processing or {}).values()), set[str]()
    wanted = parse_dtype(cfg.dtype)
    with _bar(checkpoint.n_bytes()) as bar:
        source = _Delivered(checkpoint, target, wanted, is_processed, bar.update)
        state = _read_state(table, source)
        # all sizes are known to be true by now
        _conversion().check_angles(cfg, checkpoint.where)
        _set_context(cfg, state, n_ctx)
        if is_processed:
            width = torch.promote_types(wanted, torch.float32)
            how: dict[str, Any] = {"dtype": width, "rounded_to": wanted, "taken": taken}
            how |= {**(processing or {}), "consume": True, "progress": bar.update}
            cfg, state = process_weights(cfg, state, **how)
    if tokenizer is None and model_name is not None:
        tokenizer = load_tokenizer(model_name, revision, trust_remote_code)
    later = parameters_come_later.set(True)
    try:
        model = cls(cfg, tokenizer, move_to_device=False, default_padding_side=default_padding_side)
    finally:
        parameters_come_later.reset(later)
    try:
        _assign(model, state, table)
    except (RuntimeError, ValueError) as error:  # torch's own is about shapes
        raise ValueError(
            f"{checkpoint.where} and its weights do not go together: {error}"
        ) from None
    model.processed = frozenset(taken)
    if is_native(checkpoint.config):
        model.processed |= frozenset(checkpoint.config.get(PROCESSED) or ())
    else:
        model.checkpoint_config = copy.deepcopy(checkpoint.config)
    return model


def _refuse_foreign_code(checkpoint: Checkpoint) -> None:
    """A model in memory was made by whoever passes it; files say in words what made them."""
    whole = checkpoint.whole if isinstance(checkpoint, TextPart) else checkpoint
    if not isinstance(whole, ModelCheckpoint) and not is_native(whole.config):
        _conversion().refuse_foreign_code(whole.config, whole.where)


def _understand(
    checkpoint: Checkpoint, first_n_layers: int | None, overrides: dict[str, Any]
) -> tuple[HookedTransformerConfig, Any]:
    """The native config of a checkpoint and the table that converts its tensors."""
    conversion = _conversion()
    if is_native(checkpoint.config):
        whole, zeros = understood(checkpoint.config, checkpoint.where, overrides)
        cfg = whole if first_n_layers is None else conversion.first_layers(whole, first_n_layers)
        return cfg, NativeTable(cfg, zeros, checkpoint.where, whole.n_layers)
    architecture = conversion.architecture_for(checkpoint.config)
    reading = architecture.reading(checkpoint.config, checkpoint.where)
    whole = architecture.read(reading, **overrides)
    if whole.n_layers > len(checkpoint.names()):  # before anything is as long as that number says
        raise ValueError(
            f"{checkpoint.where} speaks of {whole.n_layers} layers, but the checkpoint has only "
            f"{len(checkpoint.names())} tensors"
        )
    cfg = whole if first_n_layers is None else conversion.first_layers(whole, first_n_layers)
    return cfg, conversion.Table(architecture, cfg, reading, whole.n_layers)


def _display_name(model_name: str | os.PathLike[str] | None, checkpoint: Checkpoint) -> str:
    if model_name is not None:
        return os.fspath(model_name)
    return str(checkpoint.config.get("_name_or_path") or "custom")


def _read_state(table: Any, source: _Delivered) -> dict[str, Float[Tensor, "..."]]:
    state = dict(table.to_native(source))
    for name, shape in table.zeros.items():
        state[name] = torch.zeros(shape, device=source.device, dtype=source.dtype)
    return state


def _bar(n_bytes: int) -> Any:
    """Counts bytes, in a terminal and for checkpoints that take a while."""
    from tqdm import tqdm

    shown = n_bytes >= _BAR_FROM_BYTES and sys.stderr.isatty()
    return tqdm(
        total=n_bytes, desc="loading weights", unit="B", unit_scale=True, leave=False,
        disable=not shown,
    )  # fmt: skip


def _set_context(
    cfg: HookedTransformerConfig, state: dict[str, Float[Tensor, "..."]], n_ctx: int | None
) -> None:
    """Change the context length; learned positions beyond it are left out of sight."""
    if n_ctx is None:
        return
    if isinstance(n_ctx, bool) or not isinstance(n_ctx, int) or n_ctx < 1:
        raise ValueError(f"n_ctx must be a positive integer, got {n_ctx!r}")
    if "pos_embed.W_pos" in state:
        if n_ctx > cfg.n_ctx:
            raise ValueError(
                f"n_ctx={n_ctx}, but the checkpoint has learned positions for only {cfg.n_ctx}"
            )
        state["pos_embed.W_pos"] = state["pos_embed.W_pos"][:n_ctx]
    cfg.n_ctx = n_ctx


def _assign(model: Any, state: dict[str, Float[Tensor, "..."]], table: Any) -> None:
    """Put the tensors themselves into the model: strides and storage stay what they are.

    What a subclass has made of its own keeps its values and goes where the rest is.
    """
    tied = {row.native for row in table.tied} if model.cfg.tie_word_embeddings else set()
    expected = {name for name, tensor in model.state_dict().items() if tensor.is_meta} - tied
    if expected != set(state):
        nowhere, unfilled = sorted(set(state) - expected), sorted(expected - set(state))
        raise ValueError(
            f"the {table.family} table and the model disagree: rows fill "
            f"{nowhere}, which the model lacks; no row fills {unfilled}"
        )
    own = [tensor for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta]
    model.load_state_dict(state, strict=False, assign=True)
    for tensor in own:
        tensor.data = tensor.data.to(model.embed.W_E.device)
    for name in table.zeros:
        if name in state and not bool(state[name].any()):  # else processing has filled it
            model.get_parameter(name).requires_grad_(False)
    left = [n for n, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]
    if left:
        raise ValueError(f"not loaded and without values: {left}")


# --- saving -------------------------------------------------------------------------------------


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

    conversion = _conversion()
    architecture, config = conversion.export_config(cfg, needs, original)
    return config, conversion.Table(architecture, cfg, architecture.reading(config))


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
