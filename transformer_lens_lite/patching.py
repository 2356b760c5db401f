"""Activation patching: which activations carry what a metric sees.

Run the corrupted prompt with one activation taken from the clean run, and see how much of the
metric comes back; for every layer, position or head (Meng et al. 2022, arXiv 2202.05262; Wang et
al. 2022, arXiv 2211.00593). All sweeps are computed by `patch_engine`, and are equal to one full
forward for each cell.

    results = get_act_patch_resid_pre(model, corrupted_tokens, clean_cache, metric)  # [layer, pos]

`metric` takes logits [batch, pos, d_vocab_out] and returns a number (or a tensor, whose axes come
last in the result).
"""

import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from transformer_lens_lite.nearest import closest
from transformer_lens_lite.patch_engine import Edit, Metric, PatchEngine, n_positions
from transformer_lens_lite.utils import get_act_name, pandas

Activation = Float[Tensor, "batch ..."]
# (corrupted, index, clean) -> patched; it may edit `corrupted` in place
PatchSetter = Callable[[Tensor, Sequence[int], Tensor], Tensor]
AXES = ("layer", "pos", "head_index", "head", "src_pos", "dest_pos")
BLOCK_SWEEPS = ("resid_pre", "attn_out", "mlp_out")
HEAD_SWEEPS = ("z", "q", "k", "v", "pattern")


def generic_activation_patch(
    model: Any,
    corrupted_tokens: Any,
    clean_cache: Mapping[str, Tensor],
    patching_metric: Metric,
    patch_setter: PatchSetter,
    activation_name: str,
    index_axis_names: Sequence[str] | None = None,
    index_df: Any = None,
    return_index_df: bool = False,
    *,
    attention_mask: Int[Tensor, "batch pos"] | None = None,
    batch_size: int | None = None,
    verbose: bool = True,
) -> Float[Tensor, "*index_and_result"] | tuple[Tensor, Any]:
    """The metric of the corrupted run, for every index with one activation changed by it.

    Args:
        corrupted_tokens: tokens [batch, pos], or text.
        clean_cache: where patches come from: an `ActivationCache`, or a mapping of hook names.
        patch_setter: `(corrupted, index, clean) -> patched`, activations of the whole text; called
            with copies of what the corrupted run has at that point.
        activation_name: short, as `get_act_name` takes it; its layer is the first of an index.
        index_axis_names: the axes of the result, "layer" first, all of whose indices are patched:
            "layer", "pos", "head" (or "head_index"), "dest_pos", "src_pos".
        index_df: instead, a pandas DataFrame (or rows of ints) whose rows are the indices.
        return_index_df: return the indices too, as a DataFrame.
        attention_mask: 0 for padding; None: as `forward` finds it.
        batch_size: patched runs in one batch; None: as many as come to 2048 positions.
        verbose: a progress bar, in terminals.
    Returns: [*axes, *result] with `index_axis_names`, [row, *result] with `index_df`.
    Raises: ValueError for both or none of the two, for unknown axes, a patch of another shape, or
        texts of which one has too few positions or rows for the other; KeyError for activations
        that the clean cache lacks. No patched run was made then.
    Warns: when the two texts differ in length, as what is at one position is hardly the same then.
    """
    if (index_axis_names is None) == (index_df is None):
        raise ValueError("give index_axis_names= or index_df=, one of them")
    if index_axis_names is not None:
        n_pos = n_positions(model, corrupted_tokens)
        ranges = axis_ranges(model, n_pos, activation_name, index_axis_names)
        indices = list(itertools.product(*map(range, ranges)))
        columns: Sequence[str] = index_axis_names
    else:
        indices, columns = rows_of(index_df)
        ranges = [len(indices)]
    names = {index[0]: get_act_name(activation_name, index[0]) for index in indices}
    clean = {layer: clean_cache[name] for layer, name in names.items()}  # raises for what it lacks
    engine = PatchEngine(model, corrupted_tokens, attention_mask, names.values(), heard=clean_cache)
    for layer, name in names.items():
        if clean[layer].ndim != engine.base[name].ndim:
            raise ValueError(
                f"the clean {name!r} is {list(clean[layer].shape)}, the corrupted one "
                f"{list(engine.base[name].shape)}: has the cache lost its batch axis?"
            )
    lengths = {clean[layer].shape[engine.pos_axis(name)] for layer, name in names.items()}
    if different := lengths - {engine.n_pos}:
        warnings.warn(
            f"the clean text has {different.pop()} positions and the corrupted one {engine.n_pos}: "
            "what is patched at a position is what the other text has at the same place from the "
            "left",
            stacklevel=2,
        )
    cells = []
    for index in indices:
        layer = index[0]
        cells.append(single_edit(engine, names[layer], index, patch_setter, clean[layer]))
    results = engine.metrics(cells, patching_metric, batch_size, verbose)
    results = results.reshape(*ranges, *results.shape[1:])
    if not return_index_df:
        return results
    return results, index_df if index_df is not None else make_df_from_ranges(ranges, columns)


def single_edit(
    engine: PatchEngine, name: str, index: Sequence[int], patch_setter: PatchSetter, clean: Tensor
) -> list[Edit]:
    """What a setter changes, as the smallest box of the activation that holds it; nothing where the
    clean run had the same values."""
    corrupted = engine.base[name]
    try:
        patched = patch_setter(corrupted.clone(), index, clean)
    except (RuntimeError, IndexError) as error:
        if clean.shape == corrupted.shape:
            raise
        raise ValueError(
            f"the clean {name!r} is {list(clean.shape)}, the corrupted one "
            f"{list(corrupted.shape)}, and the patch at {tuple(index)} fails on that ({error}); "
            "the two texts should have as many tokens and rows"
        ) from error
    if not isinstance(patched, Tensor) or patched.shape != corrupted.shape:
        got = list(patched.shape) if isinstance(patched, Tensor) else type(patched).__name__
        raise ValueError(
            f"the patch of {name!r} at {tuple(index)} must be {list(corrupted.shape)}, as the "
            f"activation is, got {got}"
        )
    box = box_of(patched != corrupted)
    return [] if box is None else [Edit(name, box, patched[box].clone())]


def box_of(changed: Bool[Tensor, "..."]) -> tuple[slice, ...] | None:
    """The smallest range of indices along each axis outside of which nothing is True."""
    where = changed.nonzero()
    if not len(where):
        return None
    low, high = where.amin(0).tolist(), where.amax(0).tolist()
    return tuple(slice(first, last + 1) for first, last in zip(low, high, strict=True))


# --- indices --------------------------------------------------------------------------------------


def axis_ranges(model: Any, n_pos: int, activation_name: str, axes: Sequence[str]) -> list[int]:
    """How many indices each axis has; keys and values have as many heads as there are."""
    for axis in axes:
        if axis not in AXES:
            raise ValueError(f"{axis!r} is no axis; there are {list(AXES)}.{closest(axis, AXES)}")
    if axes[0] != "layer":
        raise ValueError(f"the first axis must be 'layer', got {axes[0]!r}")
    sizes = dict.fromkeys(("pos", "src_pos", "dest_pos"), n_pos)
    sizes["layer"] = model.cfg.n_layers
    sizes["head"] = sizes["head_index"] = n_heads_of(model, activation_name)
    return [sizes[axis] for axis in axes]


def n_heads_of(model: Any, activation_name: str) -> int:
    """How many heads an activation has."""
    cfg = model.cfg
    short = get_act_name(activation_name).rsplit("hook_", 1)[-1]
    grouped = short in ("k", "v", "rot_k", "k_input", "v_input")
    if grouped and cfg.n_key_value_heads and not cfg.ungroup_grouped_query_attention:
        return int(cfg.n_key_value_heads)
    return int(cfg.n_heads)


def rows_of(index_df: Any) -> tuple[list[tuple[int, ...]], list[str]]:
    """The rows of a DataFrame, or of anything that lists indices, and its columns' names."""
    rows = index_df.to_numpy().tolist() if hasattr(index_df, "to_numpy") else list(index_df)
    try:
        return [tuple(int(each) for each in row) for row in rows], list(
            getattr(index_df, "columns", ())
        )
    except (TypeError, ValueError):
        raise ValueError("index_df must have a row of ints for every index, layer first") from None


def make_df_from_ranges(column_max_ranges: Sequence[int], column_names: Sequence[str]) -> Any:
    """A pandas DataFrame of all indices below these, the last varying fastest."""
    pd = pandas()
    rows = list(itertools.product(*map(range, column_max_ranges)))
    return pd.DataFrame(rows, columns=list(column_names))


def results_to_df(results: Float[Tensor, "..."], axis_names: Sequence[str]) -> Any:
    """A sweep as a pandas DataFrame: a row for each cell, with its indices and "metric"."""
    if results.ndim != len(axis_names):
        raise ValueError(f"{list(axis_names)} does not name the axes of {list(results.shape)}")
    df = make_df_from_ranges(results.shape, axis_names)
    df["metric"] = results.flatten().tolist()
    return df


# --- setters --------------------------------------------------------------------------------------


def layer_pos_patch_setter(
    corrupted_activation: Tensor, index: Sequence[int], clean_activation: Tensor
) -> Tensor:
    """index (layer, pos); activations [batch, pos, ...]."""
    _, pos = index
    corrupted_activation[:, pos] = clean_activation[:, pos]
    return corrupted_activation


def layer_pos_head_vector_patch_setter(
    corrupted_activation: Tensor, index: Sequence[int], clean_activation: Tensor
) -> Tensor:
    """index (layer, pos, head); activations [batch, pos, head, ...]."""
    _, pos, head = index
    corrupted_activation[:, pos, head] = clean_activation[:, pos, head]
    return corrupted_activation


def layer_head_vector_patch_setter(
    corrupted_activation: Tensor, index: Sequence[int], clean_activation: Tensor
) -> Tensor:
    """index (layer, head); activations [batch, pos, head, ...]."""
    _, head = index
    corrupted_activation[:, :, head] = clean_activation[:, :, head]
    return corrupted_activation


def layer_head_pattern_patch_setter(
    corrupted_activation: Tensor, index: Sequence[int], clean_activation: Tensor
) -> Tensor:
    """index (layer, head); activations [batch, head, dest_pos, src_pos]."""
    _, head = index
    corrupted_activation[:, head] = clean_activation[:, head]
    return corrupted_activation


def layer_head_pos_pattern_patch_setter(
    corrupted_activation: Tensor, index: Sequence[int], clean_activation: Tensor
) -> Tensor:
    """index (layer, head, dest_pos); activations [batch, head, dest_pos, src_pos]."""
    _, head, dest = index
    corrupted_activation[:, head, dest] = clean_activation[:, head, dest]
    return corrupted_activation


def layer_head_dest_src_pos_pattern_patch_setter(
    corrupted_activation: Tensor, index: Sequence[int], clean_activation: Tensor
) -> Tensor:
    """index (layer, head, dest_pos, src_pos); activations [batch, head, dest_pos, src_pos]."""
    _, head, dest, src = index
    corrupted_activation[:, head, dest, src] = clean_activation[:, head, dest, src]
    return corrupted_activation


# --- named sweeps ---------------------------------------------------------------------------------


def sweep(setter: PatchSetter, name: str, axes: tuple[str, ...]) -> Callable[..., Any]:
    """A sweep to be called as (model, corrupted_tokens, clean_cache, metric)."""
    return partial(
        generic_activation_patch,
        patch_setter=setter,
        activation_name=name,
        index_axis_names=axes,
    )


by_pos = partial(sweep, layer_pos_patch_setter, axes=("layer", "pos"))
get_act_patch_resid_pre = by_pos("resid_pre")
get_act_patch_resid_mid = by_pos("resid_mid")
get_act_patch_attn_out = by_pos("attn_out")
get_act_patch_mlp_out = by_pos("mlp_out")

by_head_and_pos = partial(sweep, layer_pos_head_vector_patch_setter, axes=("layer", "pos", "head"))
get_act_patch_attn_head_out_by_pos = by_head_and_pos("z")
get_act_patch_attn_head_q_by_pos = by_head_and_pos("q")
get_act_patch_attn_head_k_by_pos = by_head_and_pos("k")
get_act_patch_attn_head_v_by_pos = by_head_and_pos("v")

by_head = partial(sweep, layer_head_vector_patch_setter, axes=("layer", "head"))
get_act_patch_attn_head_out_all_pos = by_head("z")
get_act_patch_attn_head_q_all_pos = by_head("q")
get_act_patch_attn_head_k_all_pos = by_head("k")
get_act_patch_attn_head_v_all_pos = by_head("v")

get_act_patch_attn_head_pattern_all_pos = sweep(
    layer_head_pattern_patch_setter, "pattern", ("layer", "head_index")
)
get_act_patch_attn_head_pattern_by_pos = sweep(
    layer_head_pos_pattern_patch_setter, "pattern", ("layer", "head_index", "dest_pos")
)
get_act_patch_attn_head_pattern_dest_src_pos = sweep(
    layer_head_dest_src_pos_pattern_patch_setter,
    "pattern",
    ("layer", "head_index", "dest_pos", "src_pos"),
)


def get_act_patch_block_every(
    model: Any, corrupted_tokens: Any, clean_cache: Any, metric: Metric, **how: Any
) -> Float[Tensor, "patch_type layer pos"]:
    """resid_pre, attn_out and mlp_out, by position. `how`: see `generic_activation_patch`."""
    sweeps = (get_act_patch_resid_pre, get_act_patch_attn_out, get_act_patch_mlp_out)
    return torch.stack(
        [each(model, corrupted_tokens, clean_cache, metric, **how) for each in sweeps]
    )


def get_act_patch_attn_head_all_pos_every(
    model: Any, corrupted_tokens: Any, clean_cache: Any, metric: Metric, **how: Any
) -> Float[Tensor, "patch_type layer head"]:
    """Output, queries, keys, values and pattern of every head, at all positions. Where keys and
    values have fewer heads, the rest are zero."""
    sweeps = (
        get_act_patch_attn_head_out_all_pos,
        get_act_patch_attn_head_q_all_pos,
        get_act_patch_attn_head_k_all_pos,
        get_act_patch_attn_head_v_all_pos,
        get_act_patch_attn_head_pattern_all_pos,
    )
    return stacked([each(model, corrupted_tokens, clean_cache, metric, **how) for each in sweeps])


def get_act_patch_attn_head_by_pos_every(
    model: Any, corrupted_tokens: Any, clean_cache: Any, metric: Metric, **how: Any
) -> Float[Tensor, "patch_type layer pos head"]:
    """The same by position; for the pattern, that of the query."""
    sweeps = (
        get_act_patch_attn_head_out_by_pos,
        get_act_patch_attn_head_q_by_pos,
        get_act_patch_attn_head_k_by_pos,
        get_act_patch_attn_head_v_by_pos,
    )
    parts = [each(model, corrupted_tokens, clean_cache, metric, **how) for each in sweeps]
    pattern = get_act_patch_attn_head_pattern_by_pos(
        model, corrupted_tokens, clean_cache, metric, **how
    )
    return stacked([*parts, pattern.transpose(1, 2)])


def stacked(parts: list[Float[Tensor, "..."]]) -> Float[Tensor, "part ..."]:
    """On a new first axis; where there are fewer heads, the last axis, the rest are zero."""
    n_heads = max(part.shape[-1] for part in parts)
    fill = [part.new_zeros(*part.shape[:-1], n_heads - part.shape[-1]) for part in parts]
    return torch.stack([torch.cat(pair, -1) for pair in zip(parts, fill, strict=True)])
