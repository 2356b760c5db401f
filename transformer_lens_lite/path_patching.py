"""Path patching: what one component does to a metric through others, and not past them.

Wang et al. 2022 (arXiv 2211.00593, appendix B), for each sender by itself:

1. Run the base text with the sender's output from another text and the outputs of all other
   attention heads as they are in the base run. MLPs are computed anew, so they belong to the direct
   path (`freeze_mlps` takes them out of it). Keep what enters the receivers.
2. Run the base text with the receivers' inputs set to that, and everything else computed anew.

With the logits as the receiver, the metric of the first run is the result.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from transformer_lens_lite.patch_engine import Edit, Metric, PatchEngine
from transformer_lens_lite.sites import Site, as_cells, edit_of, names_in

Receivers = Any  # "logits", or several sites


def path_patch(
    model: Any,
    tokens: Any,
    source_cache: Mapping[str, Tensor],
    metric: Metric,
    senders: Sequence[Any],
    receivers: Receivers = "logits",
    *,
    freeze_mlps: bool = False,
    attention_mask: Int[Tensor, "batch pos"] | None = None,
    batch_size: int | None = None,
    verbose: bool = True,
) -> Float[Tensor, "sender *result"]:
    """The metric of the base text, with each sender's values of another text reaching the receivers
    only.

    Args:
        tokens: the base text.
        source_cache: activations of the other text, of the same shape, with the senders' points.
        senders: outputs: `Site("z", layer, head=…)`, `Site("mlp_out", layer)`, with or without
            positions; or several that are sent together.
        receivers: "logits", or inputs, all received together: `Site("q", layer, head=…)`, also k
            and v (of a key-value head), and `Site("mlp_in", layer)`.
        freeze_mlps: MLPs that are no senders keep their base outputs too.
        attention_mask, batch_size, verbose: see `patching.generic_activation_patch`.
    Raises: ValueError, KeyError, IndexError for what does not exist or fit, before anything is
        patched.
    """
    cells = as_cells(senders)
    (into,) = as_cells([[] if isinstance(receivers, str) else receivers])
    if (isinstance(receivers, str) and receivers != "logits") or not (into or receivers):
        raise ValueError(f"receivers must be 'logits' or a list of sites, got {receivers!r}")
    n_layers = model.cfg.n_layers
    sent, received = names_in(cells, n_layers), names_in([into], n_layers)
    source = {name: source_cache[name] for name in sent}
    frozen = [f"blocks.{layer}.attn.hook_z" for layer in range(n_layers)]
    if freeze_mlps:
        mlps = [f"blocks.{layer}.hook_mlp_out" for layer in range(n_layers)]
        frozen += [name for name in mlps if name in model.hook_dict]
    heard = (*source_cache, *received)
    engine = PatchEngine(model, tokens, attention_mask, [*sent, *received, *frozen], heard=heard)
    for name, value in source.items():
        if value.shape != engine.base[name].shape:
            raise ValueError(
                f"the source's {name!r} is {list(value.shape)}, the base run's "
                f"{list(engine.base[name].shape)}"
            )
    targets = [(site, site.full_name(n_layers)) for site in into]
    for site in into:
        edit_of(engine, site, 0.0)  # raises for what is not there
    direct = [frozen_but(engine, cell, source, frozen) for cell in cells]
    if not into:
        return engine.metrics(direct, metric, batch_size, verbose)
    last = max(engine.model.stage(name) for name in received)
    arrived: list[list[Edit]] = [[] for _ in cells]
    for outcome in engine.run(direct, received, last + 1, batch_size):
        arrived[outcome.number] = [
            edit_of(engine, site, outcome.observed[name])
            for site, name in targets
            if not torch.equal(outcome.observed[name], engine.base[name])
        ]
    return engine.metrics(arrived, metric, batch_size, verbose)


def frozen_but(
    engine: PatchEngine, senders: Sequence[Site], source: Mapping[str, Tensor], frozen: list[str]
) -> list[Edit]:
    """The base run's values of everything frozen that could change, and behind them, for they win,
    the senders' of the source."""
    sent = [edit_of(engine, site, source[site.full_name(engine.n_layers)]) for site in senders]
    begin = engine.planned(0, sent)
    columns = slice(begin.first, None)
    held = [
        Edit(name, (slice(None), columns), engine.base[name][:, columns])
        for name in frozen
        if engine.model.stage(name) >= begin.layer
    ]
    return held + sent if sent else []


def path_patch_heads(
    model: Any,
    tokens: Any,
    source_cache: Mapping[str, Tensor],
    metric: Metric,
    receivers: Receivers = "logits",
    pos: Any = None,
    **others: Any,
) -> Float[Tensor, "layer head *result"]:
    """`path_patch` from every attention head (at some positions) to the receivers."""
    n_layers, n_heads = model.cfg.n_layers, model.cfg.n_heads
    senders = [Site("z", layer, pos, head) for layer in range(n_layers) for head in range(n_heads)]
    results = path_patch(model, tokens, source_cache, metric, senders, receivers, **others)
    return results.unflatten(0, (n_layers, n_heads))
