"""Rotary position embedding (RoFormer, arXiv 2104.09864): angles for positions, and the turn
itself."""

from functools import lru_cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from transformer_lens_lite.specs import RotarySpec


@lru_cache(maxsize=256)
def _frequencies_on(spec: RotarySpec, device: torch.device) -> Float[Tensor, " half"]:
    with torch.inference_mode(False):  # kept for later forwards, which may want gradients
        return spec.scaling.inverse_frequencies(spec.base, spec.dim).to(device)


def inverse_frequencies(
    spec: RotarySpec, lengths: Int[Tensor, " row"], device: torch.device
) -> Float[Tensor, "*row half"]:
    """fp32 inverse frequencies: one row for all, or one per row when they depend on its length."""
    if spec.scaling.varies_with_length:
        return spec.scaling.inverse_frequencies(spec.base, spec.dim, lengths)
    if torch.compiler.is_compiling():
        return spec.scaling.inverse_frequencies(spec.base, spec.dim).to(device)
    return _frequencies_on(spec, device)


class Turn:
    """The cos and sin that turn keys and queries to their positions: [row, pos, 1, dim], fp32.

    The minus sign of a rotation lives in the sine, so turning is two products and one shuffle.
    """

    def __init__(
        self,
        angles: Float[Tensor, "row pos half"],
        adjacent_pairs: bool,
        factor: float | Float[Tensor, "row 1 1"] = 1.0,
        at_end: bool = False,
    ) -> None:
        self.adjacent_pairs = adjacent_pairs
        self.at_end = at_end
        self.dim = 2 * angles.shape[-1]
        cos, sin = angles.cos(), angles.sin()
        if isinstance(factor, Tensor) or factor != 1.0:
            cos, sin = cos * factor, sin * factor
        if adjacent_pairs:
            self.cos = torch.stack((cos, cos), -1).flatten(-2)[:, :, None]
            self.sin = torch.stack((-sin, sin), -1).flatten(-2)[:, :, None]
        else:
            self.cos = torch.cat((cos, cos), -1)[:, :, None]
            self.sin = torch.cat((-sin, sin), -1)[:, :, None]

    def __call__(
        self, x: Float[Tensor, "batch pos head d_head"]
    ) -> Float[Tensor, "batch pos head d_head"]:
        """Turn the first `dim` channels of every head, or the last; the others pass."""
        if self.dim == x.shape[-1]:
            return self._turned(x)
        if self.at_end:
            return torch.cat((x[..., : -self.dim], self._turned(x[..., -self.dim :])), -1)
        return torch.cat((self._turned(x[..., : self.dim]), x[..., self.dim :]), -1)

    def _turned(
        self, x: Float[Tensor, "batch pos head dim"]
    ) -> Float[Tensor, "batch pos head dim"]:
        if self.adjacent_pairs:
            partner = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        else:
            partner = x.roll(self.dim // 2, -1)
        return torch.addcmul(x * self.cos, partner, self.sin).to(x.dtype)
