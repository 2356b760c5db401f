"""Everything classic code imports from `transformer_lens.utils`: small helpers around models.

The library itself needs none of them; what it does need is in `utils`, and is offered here too.
pandas, datasets and the hub are imported by the functions that need them.
"""

# ruff: noqa: PT028  (test_prompt is called so by those who use it, and is no test)

import importlib.util
import inspect
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int, Num, Shaped
from torch import Tensor, nn

from transformer_lens_lite import tokens as token_rules
from transformer_lens_lite.compat.names import HELPERS
from transformer_lens_lite.components.activations import ACTIVATION_FUNCTIONS, gelu_tanh
from transformer_lens_lite.components.activations import solu as solu
from transformer_lens_lite.config import default_device
from transformer_lens_lite.factored_matrix import FactoredMatrix
from transformer_lens_lite.factored_matrix import composition_scores as composition_scores
from transformer_lens_lite.kv_cache import KeyValueCache
from transformer_lens_lite.sampling import sample_logits as sample_logits
from transformer_lens_lite.utils import Slice as Slice
from transformer_lens_lite.utils import SliceInput as SliceInput
from transformer_lens_lite.utils import get_act_name as get_act_name
from transformer_lens_lite.utils import lm_accuracy as lm_accuracy
from transformer_lens_lite.utils import lm_cross_entropy_loss as lm_cross_entropy_loss
from transformer_lens_lite.utils import pandas
from transformer_lens_lite.utils import warn_if_mps as warn_if_mps

__all__ = list(HELPERS)

USE_DEFAULT_VALUE = None
SOFTCAP_DISABLED = -1.0
SUPPORTED_ACTIVATIONS = dict(ACTIVATION_FUNCTIONS)
gelu_new = gelu_fast = gelu_tanh

# --- tensors --------------------------------------------------------------------------------------


def to_numpy(tensor: Any) -> np.ndarray:
    """An array from a tensor (detached, on the CPU, bfloat16 as float32), array, list or number.

    Raises ValueError for anything else.
    """
    if isinstance(tensor, np.ndarray):
        return tensor
    if isinstance(tensor, list | tuple):
        return np.array(tensor)
    if isinstance(tensor, Tensor):
        plain = tensor.detach().cpu()
        return (plain.float() if plain.dtype == torch.bfloat16 else plain).numpy()
    if isinstance(tensor, int | float | bool | str):
        return np.array(tensor)
    raise ValueError(f"an array cannot be made from a {type(tensor).__name__}")


def get_corner(tensor: Any, n: int = 3) -> Any:
    """The first `n` entries along every axis of a tensor or factored matrix."""
    return tensor[(slice(n),) * tensor.ndim]


def get_matrix_corner(matrix: FactoredMatrix, n: int = 3) -> Tensor:
    """The first `n` entries along every axis of a factored matrix's product."""
    return matrix.get_corner(n)


def remove_batch_dim(tensor: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
    """The tensor without a first axis of length 1; as it is when that is longer."""
    return tensor.squeeze(0) if tensor.shape[:1] == (1,) else tensor


def transpose(tensor: Shaped[Tensor, "*lead a b"]) -> Shaped[Tensor, "*lead b a"]:
    """The last two axes swapped."""
    return tensor.transpose(-1, -2)


def is_square(x: Shaped[Tensor, "..."]) -> bool:
    """Whether it is a matrix with as many rows as columns."""
    return x.ndim == 2 and x.shape[0] == x.shape[1]


def is_lower_triangular(x: Num[Tensor, "..."]) -> bool:
    """Whether it is a square matrix with nothing above its diagonal."""
    return is_square(x) and torch.equal(x, x.tril())


def get_cumsum_along_dim(
    tensor: Num[Tensor, "*shape"], dim: int, reverse: bool = False
) -> Num[Tensor, "*shape"]:
    """Cumulative sums along `dim`, from its end with `reverse`."""
    if not reverse:
        return tensor.cumsum(dim)
    return tensor.flip(dim).cumsum(dim).flip(dim)


def get_offset_position_ids(
    past_kv_pos_offset: int, attention_mask: Int[Tensor, "batch key_pos"]
) -> Int[Tensor, "batch pos"]:
    """Positions of the tokens behind `past_kv_pos_offset`, padding not counted."""
    return (attention_mask.cumsum(1) - 1).clamp(min=0)[:, past_kv_pos_offset:]


def repeat_along_head_dimension(
    tensor: Float[Tensor, "batch pos d_model"], n_heads: int, clone_tensor: bool = True
) -> Float[Tensor, "batch pos head d_model"]:
    """The tensor once for every head: copies, or views of one tensor without `clone_tensor`."""
    repeated = tensor[:, :, None].expand(-1, -1, n_heads, -1)
    return repeated.clone() if clone_tensor else repeated


def filter_dict_by_prefix(dictionary: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The entries whose keys start with `prefix.`, under what follows it."""
    start = prefix if prefix.endswith(".") else f"{prefix}."
    return {key[len(start) :]: v for key, v in dictionary.items() if key.startswith(start)}


def check_structure(t1: Tensor, t2: Tensor, *, verbose: bool = False) -> None:
    """Print where two matrices differ in the order of neighbouring rows and columns.

    Each row (column) of a matrix is compared with the next, entry by entry; the two matrices are
    consistent when those comparisons agree.
    """
    if t1.ndim != 2 or t1.shape != t2.shape:
        raise ValueError(f"two matrices of one shape are wanted: {t1.shape} and {t2.shape}")
    n_rows, n_columns = t1.shape
    found: dict[str, list[int]] = {}
    for axis, size, name in ((0, n_rows, "row"), (1, n_columns, "column")):
        found[name] = []
        for i in range(size - 1):
            first, second = ((t.select(axis, i) >= t.select(axis, i + 1)) for t in (t1, t2))
            if not torch.equal(first, second):
                found[name].append(i)
                if verbose:
                    print(f"\t{name}s {i}:{i + 1}")
                    print(f"\tt1: {first.tolist()}\n\tt2: {second.tolist()}")
    for name, places in found.items():
        if places:
            print(f"{name} mismatch: [{', '.join(f'{i}:{i + 1}' for i in places)}]")
    if not any(found.values()):
        print("PASSED")


def apply_softcap(x: Float[Tensor, "*shape"], cap: float | None) -> Float[Tensor, "*shape"]:
    """cap * tanh(x / cap); x itself when there is no cap."""
    return cap * torch.tanh(x / cap) if cap is not None and softcap_enabled(cap) else x


def softcap_enabled(cap: float | None) -> bool:
    """Whether a softcap is one: None and -1 are not."""
    return cap is not None and cap > 0


# --- initial weights ------------------------------------------------------------------------------


def calc_fan_in_and_fan_out(tensor: Tensor) -> tuple[int, int]:
    """(inputs, outputs) of a weight in this library's layout: a bias [out] has one input, a matrix
    is [in, out], and [head, in, out] is a map to all heads' outputs.

    Raises: ValueError for other numbers of axes.
    """
    match list(tensor.shape):
        case [n_out]:
            return 1, n_out
        case [n_in, n_out]:
            return n_in, n_out
        case [n_heads, n_in, n_out]:
            return n_in, n_heads * n_out
    raise ValueError(f"a weight has one to three axes, this one {list(tensor.shape)}")


@torch.no_grad()
def _filled(param: Tensor, std: float, kind: str) -> Tensor:
    bound = math.sqrt(3) * std
    return param.normal_(0, std) if kind == "normal" else param.uniform_(-bound, bound)


def _xavier_std(param: Tensor, gain: float) -> float:
    return gain * math.sqrt(2 / sum(calc_fan_in_and_fan_out(param)))


def _kaiming_std(param: Tensor, a: float, nonlinearity: Any, gain: float, mode: str) -> float:
    if mode not in ("fan_in", "fan_out"):
        raise ValueError(f"mode must be 'fan_in' or 'fan_out', got {mode!r}")
    fan = calc_fan_in_and_fan_out(param)[mode == "fan_out"]
    return gain * nn.init.calculate_gain(nonlinearity, a) / math.sqrt(fan)


def init_xavier_uniform_(param: Tensor, gain: float = 1.0) -> Tensor:
    """Fill in place, uniformly, with deviation gain √(2 / (inputs + outputs)) (Glorot 2010)."""
    return _filled(param, _xavier_std(param, gain), "uniform")


def init_xavier_normal_(param: Tensor, gain: float = 1.0) -> Tensor:
    """Fill in place, normally, with deviation gain √(2 / (inputs + outputs)) (Glorot 2010)."""
    return _filled(param, _xavier_std(param, gain), "normal")


def init_kaiming_uniform_(
    param: Tensor,
    a: float = 0,
    nonlinearity: str = "relu",
    gain: float = 1.0,
    mode: str = "fan_in",
) -> Tensor:
    """Fill in place, uniformly, with deviation gain · gain(nonlinearity) / √fan (He 2015)."""
    return _filled(param, _kaiming_std(param, a, nonlinearity, gain, mode), "uniform")


def init_kaiming_normal_(
    param: Tensor,
    a: float = 0,
    nonlinearity: str = "relu",
    gain: float = 1.0,
    mode: str = "fan_in",
) -> Tensor:
    """Fill in place, normally, with deviation gain · gain(nonlinearity) / √fan (He 2015)."""
    return _filled(param, _kaiming_std(param, a, nonlinearity, gain, mode), "normal")


# --- text and logits ------------------------------------------------------------------------------


def get_attention_mask(
    tokenizer: Any,
    tokens: Int[Tensor, "*batch pos"],
    prepend_bos: bool,
    padding_side: str | None = None,
) -> Int[Tensor, "*batch pos"]:
    """1 for tokens and 0 for padding, guessed from ids: see `tokens.get_attention_mask`."""
    return token_rules.get_attention_mask(tokenizer, tokens, prepend_bos, padding_side)


def get_tokens_with_bos_removed(
    tokenizer: Any, tokens: Int[Tensor, "*batch pos"], padding_side: str | None = None
) -> Int[Tensor, "*batch less"]:
    """The tokens without the BOS each row starts with; ValueError when a row has none."""
    return token_rules.get_tokens_with_bos_removed(tokenizer, tokens, padding_side)


def get_input_with_manually_prepended_bos(
    bos_token: str | None, input: str | list[str]
) -> str | list[str]:
    """The text, or each text of a list, with `bos_token` written in front (None: as it is)."""
    bos = bos_token or ""
    return bos + input if isinstance(input, str) else [bos + text for text in input]


def get_tokenizer_with_bos(tokenizer: Any) -> Any:
    """A tokenizer that puts its BOS in front by itself, or the one given when that already does or
    has none to put."""
    if tokenizer.bos_token is None or tokenizer.encode("")[:1] == [tokenizer.bos_token_id]:
        return tokenizer
    import copy

    changed = copy.deepcopy(tokenizer)
    if getattr(changed, "is_fast", False):
        from tokenizers.processors import Sequence, TemplateProcessing

        bos = changed.bos_token
        front = TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, changed.bos_token_id)],
        )
        backend = changed.backend_tokenizer
        before = backend.post_processor
        backend.post_processor = front if before is None else Sequence([before, front])
    else:
        changed.add_bos_token = True
    return changed


def keep_single_column(dataset: Any, col_name: str) -> Any:
    """A dataset of the `datasets` library without its other columns."""
    return dataset.remove_columns([name for name in dataset.features if name != col_name])


def tokenize_and_concatenate(
    dataset: Any,
    tokenizer: Any,
    streaming: bool = False,
    max_length: int = 1024,
    column_name: str = "text",
    add_bos_token: bool = True,
    num_proc: int | None = 10,
    set_format: bool = True,
) -> Any:
    """All texts joined by EOS, cut into rows of `max_length` tokens, as a dataset with the column
    "tokens".

    Args:
        dataset: of the `datasets` library, with texts in `column_name`.
        add_bos_token: each row starts with BOS, counted in `max_length`.
        num_proc: processes to tokenize with; None or 1: this one.
        set_format: give torch tensors.
    Raises: ValueError for a tokenizer without the special token that is needed, and for fewer
        tokens than one row.
    """
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if eos is None or (add_bos_token and bos is None):
        raise ValueError(
            f"texts are joined by EOS{' and rows start with BOS' if add_bos_token else ''}; the "
            f"tokenizer has eos_token_id={eos}, bos_token_id={bos}"
        )
    length = max_length - int(add_bos_token)
    if length < 1:
        raise ValueError(f"max_length={max_length} leaves no room for text")
    adds_own = list(tokenizer.encode("")) if bos is not None else []

    def rows(texts: Mapping[str, list[str]]) -> dict[str, list[list[int]]]:
        joined: list[int] = []
        for i, text in enumerate(texts[column_name]):
            joined += [eos] if i else []
            joined += plain_ids(tokenizer, text, adds_own)
        n = len(joined) // length
        start = [bos] if add_bos_token else []
        return {"tokens": [start + joined[i * length : (i + 1) * length] for i in range(n)]}

    only = keep_single_column(dataset, column_name)
    options: dict[str, Any] = {"batched": True, "remove_columns": [column_name]}
    if not streaming and num_proc is not None and num_proc > 1:
        options["num_proc"] = min(num_proc, max(1, len(only)))
    made = only.map(rows, **options)
    if not streaming and not len(made):
        raise ValueError(f"the texts have fewer than {length} tokens in all, so there is no row")
    return made.with_format("torch", columns=["tokens"]) if set_format else made


def plain_ids(tokenizer: Any, text: str, adds_own: list[int]) -> list[int]:
    """The ids of a text alone, when the tokenizer puts `adds_own` around every text."""
    if not adds_own:
        return list(tokenizer.encode(text))
    return list(tokenizer.encode(text, add_special_tokens=False))


def logits_to_df(
    logits: Float[Tensor, " d_vocab"], tokenizer: Any = None, top_k: int | None = None
) -> Any:
    """A pandas DataFrame of tokens by falling logit: token_index, (token_string,) logit, log_prob
    and probability."""
    wide = logits.detach().float().cpu()
    values, order = wide.sort(descending=True, stable=True)
    log_probs = wide.log_softmax(-1)[order]
    columns: dict[str, Any] = {"token_index": order.tolist()}
    if tokenizer is not None:
        columns["token_string"] = [tokenizer.decode([i]) for i in order[:top_k].tolist()]
    n = len(order) if top_k is None else min(top_k, len(order))
    columns |= {"logit": values, "log_prob": log_probs, "probability": log_probs.exp()}
    return pandas().DataFrame({name: list(to_numpy(v))[:n] for name, v in columns.items()})


def test_prompt(
    prompt: str,
    answer: str | list[str],
    model: Any,
    prepend_space_to_answer: bool = True,
    print_details: bool = True,
    prepend_bos: bool | None = None,
    top_k: int = 10,
) -> None:
    """Print how likely the model finds an answer, or each of several, behind a prompt: its rank,
    logit and probability token by token, and the `top_k` tokens it finds likelier or not."""
    answers = [answer] if isinstance(answer, str) else list(answer)
    if prepend_space_to_answer:
        answers = [a if a.startswith(" ") else f" {a}" for a in answers]
    if not answers:
        raise ValueError("there is no answer to look for")
    start = model.to_tokens(prompt, prepend_bos=prepend_bos)
    ids = [model.to_tokens(a, prepend_bos=False)[0] for a in answers]
    if print_details:
        print("Tokenized prompt:", model.to_str_tokens(prompt, prepend_bos=prepend_bos))
        for each in answers:
            print("Tokenized answer:", model.to_str_tokens(each, prepend_bos=False))
    ranks: list[list[tuple[str, int]]] = []
    for each, own in zip(answers, ids, strict=True):
        with torch.no_grad():
            logits = model(torch.cat((start, own[None].to(start)), 1))[0, start.shape[1] - 1 : -1]
        ranks.append([])
        for step, (token, row) in enumerate(zip(own.tolist(), logits, strict=True)):
            probability = row.float().softmax(-1)
            rank = int((row > row[token]).sum())
            ranks[-1].append((model.to_string([token]), rank))
            if print_details:
                print(
                    f"Performance on answer token {step}: rank {rank:<8} logit "
                    f"{row[token].item():5.2f} prob {probability[token].item():6.2%} "
                    f"token |{model.to_string([token])}|"
                )
                for place, top in enumerate(probability.topk(min(top_k, len(row))).indices):
                    print(
                        f"Top {place}th token. logit {row[top].item():5.2f} prob "
                        f"{probability[top].item():6.2%} token |{model.to_string([int(top)])}|"
                    )
        print(f"Ranks of the answer tokens of {each!r}: {ranks[-1]}")


# nor should pytest collect it
test_prompt.__test__ = False  # type: ignore[attr-defined]

# --- settings, attributes, libraries --------------------------------------------------------------


def override_or_use_default_value(default_flag: Any, override: Any = None) -> Any:
    """`override`, or the default when that is None."""
    return default_flag if override is None else override


class LocallyOverridenDefaults:
    """In a `with` block, another `prepend_bos` or `padding_side` than the model's default ones.

        with LocallyOverridenDefaults(model, prepend_bos=False): ...

    None leaves the default. Raises: ValueError for other names, before anything is changed.
    """

    PLACES = {"prepend_bos": "cfg.default_prepend_bos", "padding_side": "tokenizer.padding_side"}

    def __init__(self, model: Any, **overrides: Any) -> None:
        for name in overrides:
            if name not in self.PLACES:
                raise ValueError(f"{name!r} is none of the defaults {list(self.PLACES)}")
        self.model = model
        self.overrides = {n: v for n, v in overrides.items() if v is not None}
        self.before: dict[str, Any] = {}

    def __enter__(self) -> None:
        for name, value in self.overrides.items():
            self.before[name] = get_nested_attr(self.model, self.PLACES[name])
            set_nested_attr(self.model, self.PLACES[name], value)

    def __exit__(self, *exception: object) -> None:
        for name, value in self.before.items():
            set_nested_attr(self.model, self.PLACES[name], value)
        self.before = {}


def get_nested_attr(obj: Any, attr_str: str) -> Any:
    """The attribute at a dotted path, such as "blocks.0.attn"; numbers are indices."""
    for part in attr_str.split("."):
        obj = obj[int(part)] if part.isdigit() and not hasattr(obj, part) else getattr(obj, part)
    return obj


def set_nested_attr(obj: Any, attr_str: str, value: Any) -> None:
    """Assign the attribute at a dotted path."""
    before, _, last = attr_str.rpartition(".")
    setattr(get_nested_attr(obj, before) if before else obj, last, value)


def select_compatible_kwargs(
    kwargs_dict: Mapping[str, Any], callable: Callable[..., Any]
) -> dict[str, Any]:
    """The keyword arguments that a function has by name."""
    known = inspect.signature(callable).parameters
    return {name: value for name, value in kwargs_dict.items() if name in known}


@contextmanager
def temporarily_swap_parameter(parameter: nn.Parameter, new_value: Tensor) -> Iterator[Tensor]:
    """In a `with` block, other values in a parameter; its own come back, bit by bit, at the end.

    Raises: ValueError for values of another shape.
    """
    if parameter.shape != new_value.shape:
        raise ValueError(f"{list(new_value.shape)} does not fit into {list(parameter.shape)}")
    own = parameter.data
    try:
        parameter.data = new_value.detach().to(own)
        yield parameter
    finally:
        parameter.data = own


def get_pos_offset(past_kv_cache: KeyValueCache | None, batch_size: int) -> int:
    """How many positions are cached, 0 without a cache. ValueError for a cache that does not serve
    so many rows."""
    if past_kv_cache is None:
        return 0
    past_kv_cache[0].check_batch(batch_size)
    return past_kv_cache.length


def is_library_available(name: str) -> bool:
    """Whether a top-level package can be imported."""
    return importlib.util.find_spec(name) is not None


Module = TypeVar("Module", bound=nn.Module)


class TypedModuleList(nn.ModuleList, Generic[Module]):
    """An nn.ModuleList whose items have a known type."""

    def __getitem__(self, index: Any) -> Any:  # of type Module, or a list of such
        return super().__getitem__(index)


# --- devices --------------------------------------------------------------------------------------


def get_device() -> str:
    """ "cuda" when there is one, else "cpu"; never "mps" by itself."""
    return default_device()


def move_to_and_update_config(
    model: Any, device_or_dtype: torch.device | str | torch.dtype, print_details: bool = True
) -> Any:
    """Move or cast a model that has a `cfg`, which follows."""
    is_dtype = isinstance(device_or_dtype, torch.dtype)
    model.cfg.__setattr__("dtype" if is_dtype else "device", device_or_dtype)
    if print_details:
        print(f"{'Changing model dtype' if is_dtype else 'Moving model'} to {device_or_dtype}")
    return nn.Module.to(model, device_or_dtype)


def print_gpu_mem(step_name: str = "") -> None:
    """Print the memory torch holds on the current GPU."""
    held = torch.cuda.memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    print(f"{step_name} ~ {held:.2f} GiB allocated on GPU.")


def calculate_available_device_cuda_memory(i: int) -> int:
    """Bytes of GPU `i` that torch does not hold."""
    total = torch.cuda.get_device_properties(i).total_memory
    return total - torch.cuda.memory_allocated(i)


def determine_available_memory_for_available_devices(max_devices: int) -> list[tuple[int, int]]:
    """(index, available bytes) of the first GPUs."""
    n = min(max_devices, torch.cuda.device_count())
    return [(i, calculate_available_device_cuda_memory(i)) for i in range(n)]


def sort_devices_based_on_available_memory(
    devices: Iterable[tuple[int, int]],
) -> list[tuple[int, int]]:
    """(index, available bytes), the emptiest first."""
    return sorted(devices, key=lambda each: each[1], reverse=True)


def get_best_available_cuda_device(max_devices: int | None = None) -> torch.device:
    """The GPU with most memory to spare. OSError when there is none."""
    n = torch.cuda.device_count() if max_devices is None else max_devices
    devices = determine_available_memory_for_available_devices(n)
    if not devices:
        raise OSError("TransformerLens asked for a GPU, and there is none")
    return torch.device("cuda", sort_devices_based_on_available_memory(devices)[0][0])


def get_best_available_device(cfg: Any) -> torch.device:
    """The device of a config; of several GPUs the one with most memory to spare."""
    device = torch.device(cfg.device)
    if str(device) == "cuda" and torch.cuda.device_count() > 1:
        return get_best_available_cuda_device(cfg.n_devices)
    return device


def get_device_for_block_index(
    index: int, cfg: Any, device: str | torch.device | None = None
) -> torch.device:
    """Where a layer is: all layers of a model are on one device here."""
    if not 0 <= index < cfg.n_layers:
        raise ValueError(f"layer {index} of a model of {cfg.n_layers} layers")
    return torch.device(cfg.device if device is None else device)


# --- the hub --------------------------------------------------------------------------------------

# short names of small data sets, and where they are
DATASETS = {
    "openwebtext": "stas/openwebtext-10k",
    "owt": "stas/openwebtext-10k",
    "pile": "NeelNanda/pile-10k",
    "c4": "NeelNanda/c4-10k",
    "code": "NeelNanda/code-10k",
    "python": "NeelNanda/code-10k",
    "c4_code": "NeelNanda/c4-code-20k",
    "c4-code": "NeelNanda/c4-code-20k",
    "wiki": "NeelNanda/wiki-10k",
}


def get_dataset(dataset_name: str, **kwargs: Any) -> Any:
    """A data set of the hub by one of the short names in `DATASETS`, its train split.

    Raises: ValueError for other names; ImportError without the `datasets` package.
    """
    if dataset_name not in DATASETS:
        raise ValueError(f"dataset {dataset_name!r} is none of {list(DATASETS)}")
    return load_hub_dataset(DATASETS[dataset_name], split="train", **kwargs)


def load_hub_dataset(*args: Any, **kwargs: Any) -> Any:
    """`datasets.load_dataset`; an ImportError that says what to install without that package."""
    if not is_library_available("datasets"):
        raise ImportError(
            "data sets of the hub need the package `datasets`: pip install datasets. Token "
            "batches of your own need nothing"
        )
    from datasets import load_dataset

    return load_dataset(*args, **kwargs)


def download_file_from_hf(
    repo_name: str,
    file_name: str,
    subfolder: str = ".",
    cache_dir: str | None = None,
    force_is_torch: bool = False,
    **kwargs: Any,
) -> Any:
    """A file of the hub: its path; torch files (.pth, .pt, or any with `force_is_torch`) and JSON
    files are read.

    Torch files are read with `weights_only=True`.
    """
    from huggingface_hub import hf_hub_download

    where = None if subfolder == "." else subfolder
    options = select_compatible_kwargs(kwargs, hf_hub_download)
    path = hf_hub_download(repo_name, file_name, subfolder=where, cache_dir=cache_dir, **options)
    if force_is_torch or file_name.endswith((".pth", ".pt")):
        return torch.load(path, map_location="cpu", weights_only=True)
    if file_name.endswith(".json"):
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    return path


def clear_huggingface_cache() -> None:
    """Delete everything that was downloaded from the hub."""
    from huggingface_hub import constants

    cache = constants.HF_HUB_CACHE
    print("Deleting Hugging Face cache directory and all its contents.")
    if os.path.isdir(cache):
        shutil.rmtree(cache)
