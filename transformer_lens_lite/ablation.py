"""Ablation: what a metric is worth without a part of the model.

    ablate_heads(model, tokens, metric)                                   # zero, [layer, head]
    ablate(model, tokens, metric, [Site("mlp_out", 3, pos=-1)], "mean", reference=cache)

Zero ablation takes a model where it has never been; the mean over a reference, or what another
text has there (resampling; Chan et al. 2022, causal scrubbing), stays nearer to what it knows.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from transformer_lens_lite.nearest import closest
from transformer_lens_lite.patch_engine import Metric, PatchEngine, n_positions
from transformer_lens_lite.sites import Site, as_cells, edit_of, names_in

WAYS = ("zero", "mean", "resample")
How = Any  # one of WAYS, a number, or a function of the values


def ablate(
    model: Any,
    tokens: Any,
    metric: Metric,
    sites: Sequence[Any],
    how: How = "zero",
    reference: Mapping[str, Tensor] | None = None,
    *,
    mean_over: str = "positions",
    generator: torch.Generator | None = None,
    attention_mask: Int[Tensor, "batch pos"] | None = None,
    batch_size: int | None = None,
    verbose: bool = True,
) -> Float[Tensor, "site *result"]:
    """The metric of one run without each of these parts.

    Args:
        metric: of logits [batch, pos, d_vocab_out], to a number or a tensor.
        sites: a `Site`, or several that go together; an empty list is the run as it is.
        how: "zero"; "mean" of the reference; "resample": what a row of the reference, drawn for
            each row of `tokens`, has at the same place; a number; or a function of the values.
        reference: a cache with these points, of other texts; for "resample" as long as `tokens`.
        mean_over: "positions": rows and positions alike, padding left out; "rows": each position
            by itself, for texts of one template.
        generator: draws the rows of "resample".
        attention_mask, batch_size, verbose: see `patching.generic_activation_patch`.
    Raises: ValueError, KeyError, IndexError for what does not exist or fit, before anything is
        ablated.
    """
    if isinstance(how, str) and how not in WAYS:
        raise ValueError(
            f"how must be one of {list(WAYS)}, a number or a function; got {how!r}."
            f"{closest(how, WAYS)}"
        )
    needs_reference = how in ("mean", "resample") if isinstance(how, str) else False
    if needs_reference and reference is None:
        raise ValueError(f"how={how!r} needs reference=, a cache of other texts")
    if mean_over not in ("positions", "rows"):
        raise ValueError(f"mean_over must be 'positions' or 'rows', got {mean_over!r}")
    cells = as_cells(sites)
    names = names_in(cells, model.cfg.n_layers)
    values: dict[str, Any] = dict.fromkeys(names, 0.0 if how == "zero" else how)
    stand_in = {} if reference is None or not needs_reference else {n: reference[n] for n in names}
    engine = PatchEngine(model, tokens, attention_mask, names)
    rows = torch.randint(
        len(next(iter(stand_in.values()))) if stand_in else 1, (engine.batch,), generator=generator
    )
    for name, value in stand_in.items():
        axis = engine.pos_axis(name)
        if how == "resample":
            new = value[rows.to(value.device)]
        else:
            new = mean_of(value, axis, mean_over, getattr(reference, "attention_mask", None))
        try:
            values[name] = new.expand_as(engine.base[name])
        except RuntimeError:
            raise ValueError(
                f"the reference's {name!r} is {list(value.shape)}, which does not fit "
                f"{list(engine.base[name].shape)}"
            ) from None
    edits = [
        [edit_of(engine, site, values[site.full_name(engine.n_layers)]) for site in cell]
        for cell in cells
    ]
    return engine.metrics(edits, metric, batch_size, verbose)


def mean_of(
    value: Float[Tensor, "row ..."],
    pos_axis: int,
    over: str,
    mask: Int[Tensor, "row pos"] | None,
) -> Float[Tensor, "1 ..."]:
    """Over rows, or over rows and positions, those that are no padding. Axes stay, as 1."""
    weights = value.new_ones(value.shape[0], value.shape[pos_axis]) if mask is None else mask
    shape = [1] * value.ndim
    shape[0], shape[pos_axis] = weights.shape
    weights = weights.to(value).view(shape)
    axes = (0, pos_axis) if over == "positions" else (0,)
    # where every row is padding, there is nothing to average
    total = weights.sum(axes, keepdim=True).clamp(min=1)
    return (value * weights).sum(axes, keepdim=True) / total


def ablate_heads(
    model: Any, tokens: Any, metric: Metric, how: How = "zero", pos: Any = None, **others: Any
) -> Float[Tensor, "layer head *result"]:
    """The metric without the output of each attention head. Other arguments: see `ablate`."""
    n_layers, n_heads = model.cfg.n_layers, model.cfg.n_heads
    sites = [Site("z", layer, pos, head) for layer in range(n_layers) for head in range(n_heads)]
    return ablate(model, tokens, metric, sites, how, **others).unflatten(0, (n_layers, n_heads))


def ablate_neurons(
    model: Any,
    tokens: Any,
    metric: Metric,
    layer: int,
    neurons: Sequence[int] | None = None,
    how: How = "zero",
    pos: Any = None,
    **others: Any,
) -> Float[Tensor, "neuron *result"]:
    """The metric without each of an MLP's neurons (None: all). Other arguments: see `ablate`."""
    chosen = range(model.cfg.d_mlp) if neurons is None else neurons
    sites = [Site("post", layer, pos, feature=neuron) for neuron in chosen]
    return ablate(model, tokens, metric, sites, how, **others)


def ablate_positions(
    model: Any, tokens: Any, metric: Metric, name: str, how: How = "zero", **others: Any
) -> Float[Tensor, "layer pos *result"]:
    """The metric without one position of an activation, in each layer. Other arguments: see
    `ablate`."""
    n_layers = model.cfg.n_layers
    n_pos = n_positions(model, tokens)
    sites = [Site(name, layer, pos) for layer in range(n_layers) for pos in range(n_pos)]
    return ablate(model, tokens, metric, sites, how, **others).unflatten(0, (n_layers, n_pos))
