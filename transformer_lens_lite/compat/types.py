"""Classic names of types."""

from jaxtyping import Float
from torch import Tensor

SingleLoss = Float[Tensor, ""]
LossPerToken = Float[Tensor, "batch next_pos"]
