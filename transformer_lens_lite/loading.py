"""Finding checkpoints, and making models of them.

    load_pretrained(HookedTransformer, "tiny-lens")      in the box, a folder, or a hub name
    load_pretrained(HookedTransformer, hf_model=model)   a Hugging Face model in memory

Files are read one tensor at a time and memory-mapped: on the CPU, in the file's own dtype, the
model's parameters *are* the file's pages, so nothing is copied (writing to a parameter copies the
page, not the file). Do not overwrite such a file in place while the model lives; `save_pretrained`
replaces files, which is safe.
"""

import copy
import logging
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from transformer_lens_lite.checkpoint_files import (
    Checkpoint,
    FolderCheckpoint,
    ModelCheckpoint,
    TextPart,
    TrainingCheckpoint,
    conversion,
    first_line,
    read_json,
)
from transformer_lens_lite.config import HookedTransformerConfig, default_device, parse_dtype
from transformer_lens_lite.config_checks import check_device
from transformer_lens_lite.hub import Hub
from transformer_lens_lite.initialisation import parameters_come_later
from transformer_lens_lite.model_names import BOXED, hub_name
from transformer_lens_lite.native_checkpoints import PROCESSED, NativeTable, is_native, understood
from transformer_lens_lite.weight_processing import process_weights

TRAINING_FILES = (".pt", ".pth")
# tokenizer_config.json is missing on purpose: alone it makes no tokenizer
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
WEIGHT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_BAR_FROM_BYTES = 10**9
logger = logging.getLogger(__name__)


# --- finding ------------------------------------------------------------------------------------


def open_checkpoint(
    name: Any,
    hf_model: torch.nn.Module | None = None,
    hf_config: Any = None,
    hub: Hub = Hub(),  # noqa: B008
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
        whole = FolderCheckpoint(_folder(name, hub), hf_config)
    else:
        raise ValueError("give the name or the folder of a model, or hf_model=")
    return TextPart(whole) if conversion().is_around_text(whole.config) else whole


def _training_file(name: str | os.PathLike[str]) -> Path | None:
    """The file itself, or nanoGPT's in a folder that has no config."""
    path = Path(name).expanduser()
    if path.is_file() and path.suffix in TRAINING_FILES:
        return path
    inside = path / "ckpt.pt"
    return inside if inside.is_file() and not (path / "config.json").exists() else None


def _folder(name: str | os.PathLike[str], hub: Hub) -> Path:
    """The local folder of a model, downloading it if it is a hub name."""
    local = _local_folder(name)
    if local is not None:
        if hub.revision is not None:
            raise ValueError(
                f"revision={hub.revision!r} is for names on the hub; {local} is a folder"
            )
        return local
    text = os.fspath(name)
    names_a_file = Path(text).expanduser().is_file()
    is_path = isinstance(name, os.PathLike) or text.startswith((".", "/", "~"))
    if names_a_file or is_path or text.count("/") > 1:
        is_file = Path(text).expanduser().exists()
        raise FileNotFoundError(
            f"{text} {'is a file; give its folder' if is_file else 'does not exist'}"
        )
    return hub.checkpoint(text)


def _local_folder(name: str | os.PathLike[str]) -> Path | None:
    if isinstance(name, str) and name in BOXED:
        return BOXED[name]
    path = Path(name).expanduser()
    return path if path.is_dir() else None


def on_the_hub(name: Any) -> Any:
    """A classic short name ("gpt2-small") as the hub's; folders, files and other names as they
    are."""
    if not isinstance(name, str) or name in BOXED or Path(name).expanduser().exists():
        return name
    return hub_name(name)


def read_config(
    name: str | os.PathLike[str], first_n_layers: int | None, overrides: dict[str, Any]
) -> HookedTransformerConfig:
    """The native config of a folder or hub name, from its config.json alone.

    Raises: FileNotFoundError when there is none; ValueError when it is not understood.
    """
    tables = conversion()
    folder = _local_folder(name)
    config = read_json((folder or Hub().config(os.fspath(name))) / "config.json")
    if is_native(config):
        whole, _ = understood(config, str(name), overrides)
    else:
        tables.refuse_foreign_code(config, str(name))
        config = config["text_config"] if tables.is_around_text(config) else config
        architecture = tables.architecture_for(config)
        whole = architecture.read(architecture.reading(config, str(name)), **overrides)
    return whole if first_n_layers is None else tables.first_layers(whole, first_n_layers)


def load_tokenizer(
    source: str | os.PathLike[str],
    hub: Hub = Hub(),  # noqa: B008
    trust_remote_code: bool = False,
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
        options = {**hub.arguments, "revision": hub.revision or "main"}
        return AutoTokenizer.from_pretrained(where, trust_remote_code=trust_remote_code, **options)
    except Exception as error:
        if folder is None:  # not on the hub, or no network: text is then simply not available
            logger.warning(
                "no tokenizer for %r, so the model takes token ids only: %s",
                where,
                first_line(error),
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
    hub: Hub = Hub(),  # noqa: B008
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
    if device is not None:
        check_device(device)
    model_name = on_the_hub(model_name)
    checkpoint = open_checkpoint(model_name, hf_model, hf_config, hub)
    _refuse_foreign_code(checkpoint)
    checkpoint.config = conversion().completed(checkpoint.config, checkpoint.names())
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
        conversion().check_angles(cfg, checkpoint.where)
        _set_context(cfg, state, n_ctx)
        if is_processed:
            width = torch.promote_types(wanted, torch.float32)
            how: dict[str, Any] = {"dtype": width, "rounded_to": wanted, "taken": taken}
            how |= {**(processing or {}), "consume": True, "progress": bar.update}
            cfg, state = process_weights(cfg, state, **how)
    if tokenizer is None and model_name is not None:
        tokenizer = load_tokenizer(model_name, hub, trust_remote_code)
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
        conversion().refuse_foreign_code(whole.config, whole.where)


def _understand(
    checkpoint: Checkpoint, first_n_layers: int | None, overrides: dict[str, Any]
) -> tuple[HookedTransformerConfig, Any]:
    """The native config of a checkpoint and the table that converts its tensors."""
    tables = conversion()
    if is_native(checkpoint.config):
        whole, zeros = understood(checkpoint.config, checkpoint.where, overrides)
        cfg = whole if first_n_layers is None else tables.first_layers(whole, first_n_layers)
        return cfg, NativeTable(cfg, zeros, checkpoint.where, whole.n_layers)
    architecture = tables.architecture_for(checkpoint.config)
    reading = architecture.reading(checkpoint.config, checkpoint.where)
    whole = architecture.read(reading, **overrides)
    if whole.n_layers > len(checkpoint.names()):  # before anything is as long as that number says
        raise ValueError(
            f"{checkpoint.where} speaks of {whole.n_layers} layers, but the checkpoint has only "
            f"{len(checkpoint.names())} tensors"
        )
    cfg = whole if first_n_layers is None else tables.first_layers(whole, first_n_layers)
    return cfg, tables.Table(architecture, cfg, reading, whole.n_layers)


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
