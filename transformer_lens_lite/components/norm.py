"""Normalisations. Statistics are taken in fp32 whatever the model's dtype."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from transformer_lens_lite.hooks import Absent, Component, HookPoint
from transformer_lens_lite.specs import NormSpec


def widened(x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
    """fp32 for the half precisions, unchanged otherwise."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def weight_shape(spec: NormSpec) -> tuple[int, ...]:
    """[width], or [head, width]."""
    return (spec.width,) if spec.n_heads is None else (spec.n_heads, spec.width)


class Norm(Component):
    """x -> normalized(x) * (offset + w) + b, with two places to listen.

    `hook_scale` [..., 1] is the root of the mean square (plus eps) that x, centred for LayerNorm,
    is divided by; `hook_normalized` [..., width] is the quotient, before weight and bias. Both are
    fp32 in half-precision models. Nobody listening: one fused kernel.
    """

    centred = False
    w: nn.Parameter

    def __init__(self, spec: NormSpec) -> None:
        super().__init__()
        self.width = spec.width
        self.eps = spec.eps
        self.offset = spec.offset
        self.hook_scale = HookPoint()
        self.hook_normalized = HookPoint()

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """Normalise the last axis."""
        if self.hook_scale.listened or self.hook_normalized.listened:
            return self.explicit(x)
        return self.fused(x)

    def explicit(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """The same by hand, calling the hook points."""
        wide = widened(x)
        if self.centred:
            square, mean = torch.var_mean(wide, -1, correction=0, keepdim=True)
            wide = wide - mean
        else:
            square = wide.pow(2).mean(-1, keepdim=True)
        scale = self.hook_scale((square + self.eps).sqrt())
        return self.rescale(self.hook_normalized(wide / scale)).to(x.dtype)

    def fused(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """The fast path; equal to `explicit`."""
        raise NotImplementedError

    def rescale(self, normalized: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """Weight and bias, where there are any."""
        return normalized

    def weight(self) -> Float[Tensor, "*head width"]:
        """What the quotient is multiplied by."""
        return self.w + self.offset if self.offset else self.w


class LayerNormPre(Norm):
    """LayerNorm whose weight and bias were folded into the next matrix."""

    centred = True

    def fused(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        return torch.layer_norm(x, (self.width,), eps=self.eps)


class LayerNorm(LayerNormPre):
    """Layer normalisation (arXiv 1607.06450) with weight `offset + w` and bias `b`, both [width] or
    [head, width]."""

    def __init__(self, spec: NormSpec) -> None:
        super().__init__(spec)
        self.w = nn.Parameter(torch.full(weight_shape(spec), 1.0 - spec.offset))
        self.b = nn.Parameter(torch.zeros(weight_shape(spec)))

    def fused(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        return torch.layer_norm(x, (self.width,), self.weight(), self.b, self.eps)

    def rescale(self, normalized: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        return torch.addcmul(self.b, normalized, self.weight())


class PerHeadLayerNorm(LayerNorm):
    """A LayerNorm with weights of its own for every head, which the fused kernel cannot take."""

    def fused(self, x: Float[Tensor, "*batch head width"]) -> Float[Tensor, "*batch head width"]:
        return self.rescale(LayerNormPre.fused(self, x))


class RMSNormPre(Norm):
    """RMSNorm whose weight was folded into the next matrix."""

    def fused(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        wide = widened(x)
        return self.rescale(F.rms_norm(wide, (self.width,), eps=self.eps)).to(x.dtype)


class RMSNorm(RMSNormPre):
    """Root-mean-square normalisation (arXiv 1910.07467) with weight `offset + w`, [width] or [head,
    width]."""

    def __init__(self, spec: NormSpec) -> None:
        super().__init__(spec)
        self.w = nn.Parameter(torch.full(weight_shape(spec), 1.0 - spec.offset))

    def weight(self) -> Float[Tensor, "*head width"]:
        """Summed in fp32: half precision would round most of w away beside the offset."""
        return widened(self.w) + self.offset if self.offset else self.w

    def rescale(self, normalized: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        return normalized * self.weight()


class FullWidthRMSNorm(RMSNorm):
    """One norm over all heads together: [batch, pos, head, d_head] as one long vector, `w` [head *
    d_head]."""

    def forward(
        self, x: Float[Tensor, "batch pos head d_head"]
    ) -> Float[Tensor, "batch pos head d_head"]:
        """Join the heads, normalise, part them again."""
        return super().forward(x.flatten(-2)).view(x.shape)


NORMS: dict[str, type[Norm]] = {
    "LN": LayerNorm,
    "LNPre": LayerNormPre,
    "RMS": RMSNorm,
    "RMSPre": RMSNormPre,
}


def build_norm(spec: NormSpec | None) -> Norm | Absent:
    """The norm a spec describes; the identity when a model has none."""
    if spec is None:
        return Absent()
    if spec.kind == "LN" and spec.n_heads is not None:
        return PerHeadLayerNorm(spec)
    return NORMS[spec.kind](spec)
