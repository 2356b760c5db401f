"""Small public helpers that need no model."""

import operator
import re
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor


def __getattr__(name: str) -> Any:
    """Classic helpers that nothing here needs, from `utilities`, when somebody asks for one."""
    from transformer_lens_lite.compat.names import HELPERS

    if name in HELPERS:
        from transformer_lens_lite import utilities

        return getattr(utilities, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def warn_if_mps(device: str | torch.device | None) -> None:
    """A warning when a device is Apple's GPU, where PyTorch has been silently wrong. It is about
    this line, not the caller's, so that Python shows it once."""
    if device is not None and torch.device(device).type == "mps":
        warnings.warn(
            "results on MPS have been wrong without an error; compare with cpu", stacklevel=1
        )


# None, an int, (start, stop[, step]), a list, tensor or array of indices, or a slice
SliceInput = Any


class Slice:
    """An index along one axis, written in any of the usual ways.

    `Slice(None)` is everything, `Slice(3)` one entry (the axis goes), `Slice((1, 5))` a range,
    `Slice([0, 2])` a selection. `mode` is "identity", "int", "slice" or "array".
    """

    def __init__(self, input_slice: SliceInput = None) -> None:
        self.slice: Any
        if isinstance(input_slice, tuple):
            self.mode, self.slice = "slice", slice(*input_slice)
        elif isinstance(input_slice, bool):
            raise ValueError(f"a slice cannot be made from {input_slice!r}")
        elif isinstance(input_slice, int):
            self.mode, self.slice = "int", input_slice
        elif isinstance(input_slice, slice):
            self.mode, self.slice = "slice", input_slice
        elif input_slice is None:
            self.mode, self.slice = "identity", slice(None)
        elif isinstance(input_slice, list | Tensor) or hasattr(input_slice, "__array__"):
            self.mode, self.slice = "array", torch.as_tensor(input_slice)
        else:
            raise ValueError(f"a slice cannot be made from a {type(input_slice).__name__}")

    @classmethod
    def unwrap(cls, slice_input: "Slice | SliceInput") -> "Slice":
        """A Slice from a Slice or its input; an int becomes a list of one, so that the axis
        stays."""
        if isinstance(slice_input, Slice):
            return slice_input
        if isinstance(slice_input, int) and not isinstance(slice_input, bool):
            slice_input = [slice_input]
        return cls(slice_input)

    def apply(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """Index `tensor` along `dim`."""
        if self.mode == "identity":
            return tensor
        return tensor[(slice(None),) * (dim % tensor.ndim) + (self.slice,)]

    def indices(self, max_ctx: int | None = None) -> Any:
        """The indices chosen, out of `max_ctx`."""
        if self.mode == "int":
            return torch.tensor([self.slice]).numpy()
        if max_ctx is None:
            raise ValueError("max_ctx must be given for anything but an int")
        return torch.arange(max_ctx)[self.slice].numpy()

    def __repr__(self) -> str:
        return f"Slice: {self.slice} Mode: {self.mode}"


# --- names of activations -------------------------------------------------------------------------

NAME_ALIASES = {
    "attn": "pattern",
    "attn_logits": "attn_scores",
    "key": "k",
    "query": "q",
    "value": "v",
    "mlp_pre": "pre",
    "mlp_mid": "mid",
    "mlp_post": "post",
}
LAYER_TYPE_ALIASES = {
    "a": "attn",
    "m": "mlp",
    "b": "",
    "block": "",
    "blocks": "",
    "attention": "attn",
}
IN_ATTENTION = {"k", "v", "q", "z", "rot_k", "rot_q", "result", "pattern", "attn_scores"}
IN_MLP = {"pre", "post", "mid", "pre_linear"}
COMPACT_NAME = re.compile(r"([a-z]+)(\d+)([a-z]?.*)")


def get_act_name(name: str, layer: int | str | None = None, layer_type: str | None = None) -> str:
    """The full hook name behind a short one.

    get_act_name("k", 6, "a")          blocks.6.attn.hook_k
    get_act_name("pre", 2)             blocks.2.mlp.hook_pre
    get_act_name("resid_post", 4)      blocks.4.hook_resid_post
    get_act_name("embed")              hook_embed
    get_act_name("normalized", 27, "ln2")   blocks.27.ln2.hook_normalized
    get_act_name("scale4ln1")          blocks.4.ln1.hook_scale
    get_act_name("normalized")         ln_final.hook_normalized
    """
    if layer is None and layer_type is None and ("." in name or name.startswith("hook_")):
        return name
    if layer is None and layer_type is None and (match := COMPACT_NAME.fullmatch(name)):
        name, layer, layer_type = match[1], int(match[2]), match[3] or None
    layer_type = LAYER_TYPE_ALIASES.get(layer_type or "", layer_type)
    name = NAME_ALIASES.get(name, name)
    if name in IN_ATTENTION:
        layer_type = "attn"
    elif name in IN_MLP:
        layer_type = "mlp"
    place = [] if layer is None else [f"blocks.{layer}"]
    if layer_type:
        place.append(layer_type)
    if name in ("scale", "normalized") and layer is None:
        place = ["ln_final"]
    return ".".join([*place, f"hook_{name}"])


def layer_numbers(layers: Any, n: int) -> list[int]:
    """The layers that a number, a slice or a list of numbers means in a model of `n`; negative ones
    count from the end. ValueError for one that is not there."""
    if isinstance(layers, slice):
        return list(range(n)[layers])
    several = layers if isinstance(layers, list | tuple | range | set) else [layers]
    if any(isinstance(each, bool) or not hasattr(each, "__index__") for each in several):
        raise ValueError(f"layers must be numbers, a slice or a list of numbers, got {layers!r}")
    numbers = [operator.index(each) for each in several]
    wrong = [layer for layer in numbers if not -n <= layer < n]
    if wrong:
        raise ValueError(f"layers={layers!r}: there is no layer {wrong[0]} in a model of {n}")
    return [layer % n for layer in numbers]


# --- loss and accuracy ----------------------------------------------------------------------------


def lm_cross_entropy_loss(
    logits: Float[Tensor, "batch pos d_vocab"],
    tokens: Int[Tensor, "batch pos"],
    attention_mask: Int[Tensor, "batch pos"] | None = None,
    per_token: bool = False,
) -> Float[Tensor, ""] | Float[Tensor, "batch next_pos"]:
    """Next-token cross-entropy in nats, fp32 at least.

    Position i predicts token i + 1. With a mask, pairs in which either token is padding count zero.
    Returns the mean over valid pairs, or [batch, pos - 1] with `per_token`.

    Raises: ValueError for a mean over no pair at all.
    """
    wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    targets = tokens[:, 1:].to(logits.device)
    losses = F.cross_entropy(wide[:, :-1].flatten(0, 1), targets.flatten(), reduction="none").view(
        targets.shape
    )
    if not per_token and not losses.numel():
        raise ValueError(f"no mean loss: tokens {list(tokens.shape)} have none that is predicted")
    if attention_mask is None:
        return losses if per_token else losses.mean()
    valid = (attention_mask[:, 1:] * attention_mask[:, :-1]).bool().to(losses.device)
    losses = losses.masked_fill(~valid, 0.0)
    if per_token:
        return losses
    n_valid = valid.sum()
    if not torch.compiler.is_compiling() and n_valid == 0:  # the test would break a compiled graph
        raise ValueError(
            "the attention mask leaves no two neighbouring tokens: there is nothing to predict, "
            "and no mean loss"
        )
    return losses.sum() / n_valid


def lm_accuracy(
    logits: Float[Tensor, "batch pos d_vocab"],
    tokens: Int[Tensor, "batch pos"],
    per_token: bool = False,
) -> Float[Tensor, ""] | Tensor:
    """The share of next tokens that are the most likely one, or which are, with `per_token`."""
    correct = logits[:, :-1].argmax(-1) == tokens[:, 1:]
    return correct if per_token else correct.float().mean()


def pandas() -> Any:
    """The package pandas. ImportError that says how to get it."""
    try:
        import pandas
    except ImportError as error:
        raise ImportError(
            "data frames need pandas: pip install 'transformer_lens_lite[dataframes]'"
        ) from error
    return pandas
