"""Attribution patching: all patches at once, to first order.

The effect of replacing a by a' is about (a' - a) · ∂metric/∂a: one backward pass in place of one
forward a patch (Nanda 2023). The same between two components, instead of at one, is edge
attribution (EAP; Syed et al. 2023, arXiv 2310.10348): what the sender adds to the stream, times the
gradient at the receiver's input.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from transformer_lens_lite.nearest import closest
from transformer_lens_lite.patch_engine import Metric
from transformer_lens_lite.utils import get_act_name


class Gradients(NamedTuple):
    """Activations of one run, and the metric's gradients by them."""

    values: dict[str, Tensor]
    gradients: dict[str, Tensor]


def gradients_of(
    model: Any,
    tokens: Any,
    metric: Metric,
    names: Iterable[str],
    attention_mask: Int[Tensor, "batch pos"] | None = None,
) -> Gradients:
    """One forward and one backward pass. The model's parameters gain no gradients, and may be
    frozen.

    Raises: UnknownHookError; ValueError for a metric that is no differentiable scalar.
    """
    kept: dict[str, Tensor] = {}

    def keep(value: Tensor, hook: Any, name: str) -> Tensor:
        if not value.requires_grad:  # where the parameters are frozen
            value = value.detach().requires_grad_()
        kept[name] = value
        return value

    with torch.enable_grad(), model.hooks([(name, partial(keep, name=name)) for name in names]):
        result = metric(model(tokens, attention_mask=attention_mask))
        if not isinstance(result, Tensor) or result.numel() != 1 or not result.requires_grad:
            raise ValueError(
                "the metric must return a tensor of one element that depends on the logits by "
                "differentiable operations"
            )
        found = torch.autograd.grad(result.sum(), list(kept.values()), allow_unused=True)
    gradients = {
        name: torch.zeros_like(value) if gradient is None else gradient
        for (name, value), gradient in zip(kept.items(), found, strict=True)
    }
    return Gradients({name: value.detach() for name, value in kept.items()}, gradients)


def difference(name: str, clean: Tensor, corrupted: Tensor) -> Tensor:
    """clean - corrupted; 0 where they are equal, infinite scores among them.

    Raises: ValueError when one row cannot be laid beside another.
    """
    if clean.shape[1:] != corrupted.shape[1:] or len(clean) not in (1, len(corrupted)):
        raise ValueError(
            f"the clean {name!r} is {list(clean.shape)}, the corrupted one "
            f"{list(corrupted.shape)}: the two texts must have as many tokens and rows"
        )
    return torch.where(clean == corrupted, 0.0, clean - corrupted)


def axes_of(pos_axis: int | None, n_axes: int) -> tuple[str, ...]:
    """What the axes of an activation are called."""
    if pos_axis == 2:
        return ("batch", "head", "dest_pos", "src_pos")
    return ("batch", "pos", "head", "feature") if n_axes == 4 else ("batch", "pos", "feature")


def attribution_patch(
    model: Any,
    corrupted_tokens: Any,
    clean_cache: Mapping[str, Tensor],
    metric: Metric,
    activation_name: str,
    index_axis_names: Sequence[str] = ("layer", "pos"),
    *,
    attention_mask: Int[Tensor, "batch pos"] | None = None,
) -> Float[Tensor, "layer ..."]:
    """About how much the metric of the corrupted run changes when an activation is patched with the
    clean run's: (clean - corrupted) · gradient, summed over all axes but those named.

    The sweep with the same axes in `patching` gives the metrics themselves, exactly; this gives
    their differences from the unpatched one, to first order.

    Args:
        activation_name: short, as `get_act_name` takes it.
        index_axis_names: "layer", and any of the activation's own axes: "batch", "pos" and
            "head" and "feature"; for patterns "head", "dest_pos" and "src_pos".
    Raises: ValueError, KeyError for what does not exist or fit.
    """
    names = [get_act_name(activation_name, layer) for layer in range(model.cfg.n_layers)]
    names = [name for name in names if name in model.hook_dict]
    if not names:
        model.resolve_names([get_act_name(activation_name, 0)])  # raises, with the nearest names
    clean = [clean_cache[name] for name in names]
    wanted = ["head" if axis == "head_index" else axis for axis in index_axis_names]
    axes = axes_of(model.hook_dict[names[0]].pos_axis, clean[0].ndim)
    for axis in wanted[1:]:
        if axis not in axes:
            raise ValueError(
                f"{activation_name!r} has axes {list(axes)}, not {axis!r}.{closest(axis, axes)}"
            )
    if not wanted or wanted[0] != "layer":
        raise ValueError(f"the first axis must be 'layer', got {list(index_axis_names)}")
    run = gradients_of(model, corrupted_tokens, metric, names, attention_mask)
    kept = [axis for axis in axes if axis in wanted]
    order = [0, *(1 + kept.index(axis) for axis in wanted[1:])]
    parts = []
    for name, its in zip(names, clean, strict=True):
        effect = difference(name, its, run.values[name]) * run.gradients[name]
        rest = [place for place, axis in enumerate(axes) if axis not in wanted]
        parts.append(effect.sum(rest) if rest else effect)
    return torch.stack(parts).permute(order)


# --- edges ----------------------------------------------------------------------------------------


class EdgeScores(NamedTuple):
    """Scores [sender, receiver], NaN where no path leads from one to the other, and their names:
    "embed", "0.h3", "0.mlp"; "1.q3", "1.k3", "1.v3", "1.mlp", "logits"."""

    scores: Float[Tensor, "sender receiver"]
    senders: list[str]
    receivers: list[str]

    def strongest(self, n: int = 10) -> list[tuple[str, str, float]]:
        """The edges of the largest scores, either way: (sender, receiver, score)."""
        flat = self.scores.abs().nan_to_num(-1.0).flatten()
        places = flat.topk(min(n, int((flat >= 0).sum()))).indices.tolist()
        width = len(self.receivers)
        return [
            (self.senders[i // width], self.receivers[i % width], float(self.scores.flatten()[i]))
            for i in places
        ]


class Receiver(NamedTuple):
    """A point that reads the stream, one node a head, and which writers come before it."""

    name: str
    labels: list[str]
    layer: int
    after_attention: bool  # of its own layer


def edge_attribution(
    model: Any,
    corrupted_tokens: Any,
    clean_cache: Mapping[str, Tensor],
    metric: Metric,
    *,
    attention_mask: Int[Tensor, "batch pos"] | None = None,
) -> EdgeScores:
    """About how much the metric of the corrupted run changes when what one component writes reaches
    one other component as in the clean run: for every such edge, by one backward pass.

    Args:
        clean_cache: with resid_pre of layer 0, and z and mlp_out of every layer.
    Raises: ValueError for blocks with norms behind their sublayers or on the stream, where what a
        head adds is no function of that head alone; KeyError for what the cache lacks.
    """
    if any(block.spec.norm_place != "pre" for block in model.blocks):
        raise ValueError(
            "edge attribution needs a stream that is a sum of what heads and MLPs write; this "
            "model's norms act on that sum, or behind its summands"
        )
    writers = ["blocks.0.hook_resid_pre"]
    for layer in range(model.cfg.n_layers):
        writers.append(f"blocks.{layer}.attn.hook_z")
        if not model.cfg.attn_only:
            writers.append(f"blocks.{layer}.hook_mlp_out")
    clean = {name: clean_cache[name] for name in writers}
    receivers = list(receivers_of(model))
    points = [receiver.name for receiver in receivers]
    run = gradients_of(model, corrupted_tokens, metric, [*writers, *points], attention_mask)
    changes = {name: difference(name, clean[name], run.values[name]) for name in writers}
    senders = ["embed"]
    for layer in range(model.cfg.n_layers):
        senders += [f"{layer}.h{head}" for head in range(model.cfg.n_heads)]
        senders += [] if model.cfg.attn_only else [f"{layer}.mlp"]
    columns = []
    for receiver in receivers:
        gradient = run.gradients[receiver.name]
        gradient = gradient[:, :, None] if gradient.ndim == 3 else gradient
        parts = [
            score(model, name, changes[name], gradient)
            if reaches(name, receiver)
            else gradient.new_full((n_nodes(model, name), gradient.shape[2]), torch.nan)
            for name in writers
        ]
        columns.append(torch.cat(parts))
    labels = [label for receiver in receivers for label in receiver.labels]
    return EdgeScores(torch.cat(columns, 1), senders, labels)


def receivers_of(model: Any) -> Iterable[Receiver]:
    """All inputs that read the stream, in the order of the forward pass."""
    for layer, block in enumerate(model.blocks):
        n_heads, n_kv_heads = block.spec.attention.n_heads, block.spec.attention.n_kv_heads
        if model.cfg.ungroup_grouped_query_attention:
            n_kv_heads = n_heads
        for what, n in (("q", n_heads), ("k", n_kv_heads), ("v", n_kv_heads)):
            labels = [f"{layer}.{what}{head}" for head in range(n)]
            yield Receiver(f"blocks.{layer}.hook_{what}_input", labels, layer, False)
        if block.spec.mlp is not None:
            parallel = block.spec.parallel
            yield Receiver(f"blocks.{layer}.hook_mlp_in", [f"{layer}.mlp"], layer, not parallel)
    last = model.cfg.n_layers - 1
    yield Receiver(f"blocks.{last}.hook_resid_post", ["logits"], last + 1, False)


def reaches(writer: str, receiver: Receiver) -> bool:
    """Whether what is written there is in the stream that the receiver reads."""
    layer = int(writer.split(".")[1])
    if writer.endswith("hook_resid_pre") or layer < receiver.layer:
        return True
    return layer == receiver.layer and receiver.after_attention and writer.endswith("hook_z")


def n_nodes(model: Any, writer: str) -> int:
    """How many senders a point stands for."""
    return int(model.cfg.n_heads) if writer.endswith("hook_z") else 1


def score(
    model: Any,
    writer: str,
    change: Float[Tensor, "batch pos *head width"],
    gradient: Float[Tensor, "batch pos node d_model"],
) -> Float[Tensor, "sender node"]:
    """Σ (what the writer adds, clean less corrupted) · gradient. A head's gradient is taken back
    through W_O rather than its output forward: no [head, d_model] is built at any position."""
    if not writer.endswith("hook_z"):
        return torch.einsum("bpm,bpnm->n", change, gradient)[None]
    block = model.blocks[int(writer.split(".")[1])]
    W_O = block.attn.W_O.detach() * block.spec.residual_scale
    return torch.stack(
        [
            torch.einsum("bph,bpnh->n", change[:, :, head], gradient @ W_O[head].T)
            for head in range(change.shape[2])
        ]
    )
