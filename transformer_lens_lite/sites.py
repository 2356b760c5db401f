"""Naming a part of an activation: a point, and which positions, heads or features of it."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor

from transformer_lens_lite.patch_engine import Edit, Index, PatchEngine
from transformer_lens_lite.utils import get_act_name


class Site(NamedTuple):
    """Where to intervene.

        Site("z", 3, head=5)                  a head's output, at all positions
        Site("mlp_out", 2, pos=-1)            what an MLP writes at the last position
        Site("post", 1, feature=[7, 9])       two neurons
        Site("pattern", 0, head=1, pos=4)     where a head looks to from position 4

    name, layer: as `get_act_name` takes them; a full name needs no layer.
    pos, head, feature: an int, a slice or a list; None: all of them. `feature` is the last axis: a
        neuron, a channel, or the key position of a pattern.
    """

    name: str
    layer: int | None = None
    pos: Any = None
    head: Any = None
    feature: Any = None

    def full_name(self, n_layers: int) -> str:
        """The hook point's name; negative layers count from the last."""
        layer = self.layer
        return get_act_name(self.name, layer + n_layers if layer and layer < 0 else layer)

    def index_into(self, activation: Tensor, pos_axis: int) -> Index:
        """Of this site in its point's activation. Ints become ranges of one, so that no axis moves.

        Raises: ValueError for a choice along an axis that it lacks, or lists along several;
            IndexError for an int outside of one.
        """
        has_heads = activation.ndim == 4
        if self.head is not None and not has_heads:
            raise ValueError(f"{self.name!r} has no head axis, but head={self.head!r} was given")
        head_axis = (2 if pos_axis == 1 else 1) if has_heads else None
        index: list[Any] = [slice(None)] * activation.ndim
        for what, axis, choice in (
            ("pos", pos_axis, self.pos),
            ("head", head_axis, self.head),
            ("feature", activation.ndim - 1, self.feature),
        ):
            if choice is not None and axis is not None:
                index[axis] = checked(choice, activation.shape[axis], f"{what} of {self.name!r}")
        if sum(isinstance(choice, list) for choice in index) > 1:
            raise ValueError(
                f"{self}: lists along several axes would pair up; give a Site for each combination"
            )
        return tuple(index)


def checked(choice: Any, size: int, what: str) -> Any:
    """A slice, or a list of indices from 0. IndexError for one outside of the axis."""
    if isinstance(choice, slice):
        return choice
    several = choice.tolist() if isinstance(choice, Tensor) else choice
    several = [several] if isinstance(several, int) else list(several)
    for each in several:
        if not -size <= each < size:
            raise IndexError(f"{what}: {each} is outside of {size}")
    several = [each % size for each in several]
    return slice(several[0], several[0] + 1) if len(several) == 1 else several


def as_cells(sites: Iterable[Any]) -> list[list[Site]]:
    """Every item as a list of sites that are changed together."""
    cells = [[each] if isinstance(each, Site) else list(each) for each in sites]
    for cell in cells:
        for site in cell:
            if not isinstance(site, Site):
                raise TypeError(f"a site is a Site(name, layer, …), got {site!r}")
    return cells


def names_in(cells: Iterable[Iterable[Site]], n_layers: int) -> list[str]:
    """The hook points of all of them."""
    return list(dict.fromkeys(site.full_name(n_layers) for cell in cells for site in cell))


def edit_of(engine: PatchEngine, site: Site, value: Any) -> Edit:
    """The edit that sets a site: to a number, a function of its values, or its part of a whole
    activation."""
    name = site.full_name(engine.n_layers)
    index = site.index_into(engine.base[name], engine.pos_axis(name))
    return Edit(name, index, value[index] if isinstance(value, Tensor) else value)
