"""Initial weights. Matrices (`W_…`) are random, biases zero, norm weights one."""

import math
from collections.abc import Iterable
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from transformer_lens_lite.config import HookedTransformerConfig

# while a checkpoint is loaded: every parameter will be replaced, so none gets memory before that
parameters_come_later: ContextVar[bool] = ContextVar("parameters_come_later", default=False)


def fans(name: str, weight: Tensor) -> tuple[int, int]:
    """(inputs, outputs) of the linear map a weight is: [head, in, out] or, for W_O, [head, in, out]
    summed over heads; [in, out] otherwise. An embedding looks up one row, so it has one input."""
    if name in ("W_E", "W_pos", "W_token_type"):
        return 1, weight.shape[1]
    if weight.ndim == 2:
        return weight.shape[0], weight.shape[1]
    heads, d_in, d_out = weight.shape
    return (heads * d_in, d_out) if name == "W_O" else (d_in, heads * d_out)


def standard_deviation(cfg: HookedTransformerConfig, name: str, weight: Tensor) -> float:
    """The standard deviation the config's `init_mode` gives a weight.

    gpt2                gain, by default 0.8 / sqrt(d_model)
    xavier_*            gain * sqrt(2 / (inputs + outputs))        (Glorot & Bengio 2010)
    kaiming_*           gain * sqrt(2 / inputs)                    (He et al. 2015)
    muP                 gain / sqrt(inputs); W_U gain / inputs     (arXiv 2203.03466, table 3)

    `gain` is initializer_range, by default 1 but for gpt2.
    """
    gain = cfg.initializer_range
    if cfg.init_mode == "gpt2":
        return gain
    inputs, outputs = fans(name, weight)
    if cfg.init_mode.startswith("xavier"):
        return gain * math.sqrt(2 / (inputs + outputs))
    if cfg.init_mode.startswith("kaiming"):
        return gain * math.sqrt(2 / inputs)
    return gain / (inputs if name == "W_U" else math.sqrt(inputs))


@torch.no_grad()
def initialise(
    cfg: HookedTransformerConfig, parameters: Iterable[tuple[str, nn.Parameter]]
) -> None:
    """Fill every `W_…` parameter in place.

    With `cfg.seed` the numbers come from a generator of their own: the same seed gives the same
    weights, whatever was drawn before.
    """
    generator = None if cfg.seed is None else torch.Generator().manual_seed(cfg.seed)
    for full_name, parameter in parameters:
        name = full_name.rsplit(".", 1)[-1].removeprefix("_")
        if name.startswith("W_"):
            std = standard_deviation(cfg, name, parameter)
            fill = uniform if cfg.init_mode.endswith("uniform") else normal
            # drawn in fp32 on the CPU, so that a seed means the same for every dtype and device
            drawn = fill(torch.empty(parameter.shape), std, generator)
            parameter.copy_(drawn)


def normal(weight: Tensor, std: float, generator: torch.Generator | None) -> Tensor:
    """N(0, std²), in place."""
    return weight.normal_(0.0, std, generator=generator)


def uniform(weight: Tensor, std: float, generator: torch.Generator | None) -> Tensor:
    """Uniform with mean 0 and this standard deviation, in place."""
    limit = math.sqrt(3) * std
    return weight.uniform_(-limit, limit, generator=generator)
