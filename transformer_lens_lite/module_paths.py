"""Which hook point holds what a module returns: for our modules, and for those of Hugging Face.

The paths of Hugging Face come from the table a checkpoint is read by: where a parameter's tensor
stands, there is the module that uses it.
"""

from collections.abc import Iterator
from typing import Any

from transformer_lens_lite.hooks import Absent


def outputs_by_module(model: Any) -> dict[str, str]:
    """Module paths, and the names of the hook points with the same value; only exact matches."""
    names = dict(our_modules(model))
    for theirs, ours in their_modules(model):
        if ours in names:
            names.setdefault(theirs, names[ours])
    return {path: name for path, name in names.items() if name in model.hook_dict}


def our_modules(model: Any) -> Iterator[tuple[str, str]]:
    """Paths of our modules whose output is what a hook point gets."""
    yield "embed", "hook_embed"
    yield "pos_embed", "hook_pos_embed"
    yield "unembed", "unembed.hook_out"
    for layer, block in enumerate(model.blocks):
        path = f"blocks.{layer}"
        yield path, f"{path}.hook_resid_post"
        # what is added to the stream is the sublayer's output, unless something stands between
        if block.spec.residual_scale != 1.0 or block.spec.norm_place == "post":
            continue
        if block.spec.post_norm is not None:
            continue
        yield f"{path}.attn", f"{path}.hook_attn_out"
        if block.spec.mlp is not None:
            yield f"{path}.mlp", f"{path}.hook_mlp_out"


def their_modules(model: Any) -> Iterator[tuple[str, str]]:
    """Paths of Hugging Face's modules and of ours that return the same; none for a model that came
    from no checkpoint of theirs."""
    if model.checkpoint_config is None:
        return
    from weights_conversion import Table, architecture_for

    architecture = architecture_for(model.checkpoint_config)
    reading = architecture.reading(model.checkpoint_config)
    for placed in Table(architecture, model.cfg, reading).maps:
        for theirs, ours in modules_of(placed.hf[0], placed.native[0], architecture.joins_stream):
            if ours == "embed" and not is_plain(model):
                continue
            yield theirs, ours
            yield theirs.partition(".")[2], ours  # seen from inside "model" or "transformer"


def is_plain(model: Any) -> bool:
    """Whether embeddings are rows of the matrix: families differ in which module scales them."""
    embed = model.embed
    return bool(
        model.cfg.embed_scale == 1.0
        and isinstance(embed.ln, Absent)
        and isinstance(embed.widen, Absent)
    )


def modules_of(
    tensor: str, parameter: str, joins_stream: tuple[str, ...]
) -> Iterator[tuple[str, str]]:
    """Theirs and ours, by one row of the table: the tensor's name there, the parameter's here."""
    module = tensor.rpartition(".")[0]
    if parameter == "embed.W_E":
        yield module, "embed"
    if parameter == "pos_embed.W_pos":
        yield module, "pos_embed"
    if not parameter.startswith("blocks."):
        return
    _, layer, *inside = parameter.split(".")
    parts = module.split(".")
    if layer not in parts:
        return
    depth = parts.index(layer) + 1  # "transformer.h.3" is the layer
    yield ".".join(parts[:depth]), f"blocks.{layer}"
    if inside == ["attn", "W_O"]:
        sublayer = "attn"
    elif inside[0] == "mlp" and inside[-1] in ("W_out", "W_gate"):
        sublayer = "mlp"
    else:
        return
    # the module that has the tensor, up to the one directly inside the layer: the last product's
    # output is the sublayer's, unless the layer itself is what holds it
    if inside[-1] != "W_gate" and inside == [sublayer, inside[-1]]:
        yield module, f"blocks.{layer}.{sublayer}"
    if len(parts) == depth + 2 and sublayer not in joins_stream:
        yield ".".join(parts[: depth + 1]), f"blocks.{layer}.{sublayer}"
