"""Rows of mixtures of experts, which families share as little else is shared."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from weights_conversion.table import Map, Row, Tied, Zeros, natives_of

MLP = "blocks.{i}.mlp."
EXPERT = f"{MLP}experts.{{e}}."


def experts(
    hf: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> list[Row]:
    """One tensor per expert and projection: `hf`.{e}.gate_proj.weight …"""
    return [
        Map(f"{hf}.{{e}}.{gate}.weight", f"{EXPERT}W_gate", "x m -> m x"),
        Map(f"{hf}.{{e}}.{up}.weight", f"{EXPERT}W_in", "x m -> m x"),
        Map(f"{hf}.{{e}}.{down}.weight", f"{EXPERT}W_out", "m x -> x m"),
    ]


def router(hf: str) -> Row:
    """The matrix that scores experts."""
    return Map(hf, f"{MLP}W_router", "e m -> m e")


def shared_expert(hf: str) -> list[Row]:
    """The gated MLP that every token passes."""
    return [
        Map(f"{hf}.gate_proj.weight", f"{MLP}shared.W_gate", "y m -> m y"),
        Map(f"{hf}.up_proj.weight", f"{MLP}shared.W_in", "y m -> m y"),
        Map(f"{hf}.down_proj.weight", f"{MLP}shared.W_out", "m y -> y m"),
        Zeros(f"{MLP}shared.b_in", "y"),
        Zeros(f"{MLP}shared.b_out", "m"),
    ]


def with_experts(rows: Iterable[Row], sparse: Sequence[bool], *new: Row) -> list[Row]:
    """A parent's rows, its MLPs left to the layers that are not `sparse`, and these for the
    others."""
    dense_layers = tuple(layer for layer, is_sparse in enumerate(sparse) if not is_sparse)
    sparse_layers = tuple(layer for layer, is_sparse in enumerate(sparse) if is_sparse)
    result: list[Row] = []
    for row in rows:
        if isinstance(row, Tied) or not natives_of(row)[0].startswith(MLP):
            result.append(row)
        elif dense_layers:
            result.append(replace(row, layers=dense_layers))
    for row in new:
        assert not isinstance(row, Tied)
        result.append(replace(row, layers=sparse_layers) if dense_layers else row)
    return result
