"""The pointwise functions inside MLPs, by their classic names."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from transformer_lens_lite.hooks import Component

Activation = Callable[[Tensor], Tensor]


def gelu_tanh(x: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """GELU by its tanh approximation: `gelu_new`, `gelu_fast` and `gelu_pytorch_tanh` alike."""
    return F.gelu(x, approximate="tanh")


def solu(x: Float[Tensor, "*batch d_mlp"]) -> Float[Tensor, "*batch d_mlp"]:
    """Softmax linear unit: x * softmax(x), over the last axis (Elhage et al. 2022)."""
    return x * x.softmax(dim=-1)


def relu2(x: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """max(x, 0) squared (Primer, arXiv 2109.08668)."""
    return F.relu(x).square()


def quick_gelu(x: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """x * sigmoid(1.702 x)."""
    return x * torch.sigmoid(1.702 * x)


EPS = -1e-6


class XIELU(Component):
    """xIELU (arXiv 2411.13010): a quadratic right of zero and an integrated ELU left of it, trained
    slopes.

    `alpha_p`, `alpha_n` [1] are kept before the softplus that makes them positive.
    """

    eps: Tensor

    def __init__(self, alpha_p: float = 0.8, alpha_n: float = 0.8, beta: float = 0.5) -> None:
        super().__init__()
        self.alpha_p = nn.Parameter(torch.tensor([alpha_p]).expm1().log())  # softplus undoes it
        self.alpha_n = nn.Parameter(torch.tensor([alpha_n - beta]).expm1().log())
        self.beta = nn.Parameter(torch.tensor([beta]), requires_grad=False)
        # keeps expm1 away from its own zero; checkpoints hold it, rounded to their dtype
        self.register_buffer("eps", torch.tensor([EPS]))

    def forward(self, x: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
        """Both branches, chosen by sign."""
        alpha_p = F.softplus(self.alpha_p)
        alpha_n = self.beta + F.softplus(self.alpha_n)
        right = alpha_p * x * x + self.beta * x
        left = (torch.expm1(x.clamp(max=self.eps)) - x) * alpha_n + self.beta * x
        return torch.where(x > 0, right, left)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        state_dict.setdefault(f"{prefix}eps", torch.tensor([EPS]))  # for those who do not keep it
        super()._load_from_state_dict(state_dict, prefix, *args)


ACTIVATION_FUNCTIONS: dict[str, Activation] = {
    "relu": F.relu,
    "relu2": relu2,
    "gelu": F.gelu,
    "gelu_new": gelu_tanh,
    "gelu_fast": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "silu": F.silu,
    "solu": solu,
    "solu_ln": solu,
}


def build_activation(name: str) -> Activation:
    """The function called `name`; a fresh module when it has parameters of its own."""
    return XIELU() if name == "xielu" else ACTIVATION_FUNCTIONS[name]
