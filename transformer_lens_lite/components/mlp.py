"""The position-wise half of a block."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from transformer_lens_lite.components.activations import build_activation
from transformer_lens_lite.components.norm import build_norm
from transformer_lens_lite.components.storage import (
    Projecting,
    Remembered,
    transposed,
    transposes,
)
from transformer_lens_lite.config import HookedTransformerConfig
from transformer_lens_lite.hooks import HookPoint
from transformer_lens_lite.specs import MLPSpec


class MLP(Projecting):
    """Widen, bend, narrow: `W_in` [d_model, d_mlp], `b_in`, `W_out` [d_mlp, d_model], `b_out`.

    With a "*_ln" activation a LayerNorm `ln` follows the nonlinearity, and `hook_mid` lies between
    them.
    """

    def __init__(self, cfg: HookedTransformerConfig, spec: MLPSpec) -> None:
        super().__init__()
        self.cfg = cfg
        self.spec = spec
        self.matrices = Remembered(transposes, "W_in", "W_out")
        self.W_in = transposed(spec.d_model, spec.d_mlp)
        self.b_in = nn.Parameter(torch.zeros(spec.d_mlp))
        self.W_out = transposed(spec.d_mlp, spec.d_model)
        self.b_out = nn.Parameter(torch.zeros(spec.d_model))
        self.act_fn = build_activation(spec.act_fn)
        self.hook_pre = HookPoint()  # [batch, pos, d_mlp]
        if spec.norm is not None:
            self.hook_mid = HookPoint()  # [batch, pos, d_mlp]
            self.ln = build_norm(spec.norm)
        self.hook_post = HookPoint()  # [batch, pos, d_mlp]

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """What the MLP adds to the stream."""
        into, out_of = self.matrices.of(self)
        pre = self.hook_pre(F.linear(x, into, self.b_in))
        post = self.hook_post(self.bent(pre))
        return F.linear(post, out_of, self.b_out)

    def bent(self, pre: Float[Tensor, "batch pos d_mlp"]) -> Float[Tensor, "batch pos d_mlp"]:
        """The nonlinearity, and the norm that belongs to some of them."""
        if self.spec.norm is None:
            return self.act_fn(pre)
        return self.ln(self.hook_mid(self.act_fn(pre)))


class GatedMLP(MLP):
    """An MLP with a gate (arXiv 2002.05202): act(x W_gate) * (x W_in) + b_in, then `W_out`.

    `hook_pre` is the gate before its activation, `hook_pre_linear` the other branch. `b_in` comes
    after the product, as it always has in this class; biases of the two projections themselves,
    where a checkpoint has them, are `b_gate` and `b_up`.
    """

    b_gate: nn.Parameter | None
    b_up: nn.Parameter | None

    def __init__(self, cfg: HookedTransformerConfig, spec: MLPSpec) -> None:
        super().__init__(cfg, spec)
        self.matrices = Remembered(transposes, "W_gate", "W_in", "W_out")
        self.W_gate = transposed(spec.d_model, spec.d_mlp)
        for name in ("b_gate", "b_up"):
            bias = nn.Parameter(torch.zeros(spec.d_mlp)) if spec.gated_biases else None
            self.register_parameter(name, bias)
        self.hook_pre_linear = HookPoint()  # [batch, pos, d_mlp]

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        gate, into, out_of = self.matrices.of(self)
        pre = self.hook_pre(F.linear(x, gate, self.b_gate))
        pre_linear = self.hook_pre_linear(F.linear(x, into, self.b_up))
        post = self.hook_post(torch.addcmul(self.b_in, self.bent(pre), pre_linear))
        return F.linear(post, out_of, self.b_out)
