"""Parameters in the shape the reader wants, over memory in the shape matrix multiplication wants.

A contiguous `W_Q[head, d_model, d_head]` would be copied into a matrix by every product with it, a
copy of the whole weight per step. So the memory is a matrix, `[(head d_head), d_model]`, and `W_Q`
a strided view of it. The functions below undo the view; for any layout a checkpoint has they are
views themselves.
"""

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from transformer_lens_lite.hooks import Component

Views = TypeVar("Views")


def in_projections(n_heads: tuple[int, ...], d_model: int, d_head: int) -> list[nn.Parameter]:
    """Uninitialised [head, d_model, d_head] weights over adjacent rows of one [(head d_head),
    d_model]."""
    matrix = torch.empty(sum(n_heads) * d_head, d_model)
    heads = matrix.view(-1, d_head, d_model).transpose(1, 2)
    return [nn.Parameter(part) for part in heads.split(n_heads)]


def out_projection(n_heads: int, d_head: int, d_model: int) -> nn.Parameter:
    """An uninitialised [head, d_head, d_model] over memory [d_model, (head d_head)]."""
    matrix = torch.empty(d_model, n_heads * d_head)
    return nn.Parameter(matrix.view(d_model, n_heads, d_head).permute(1, 2, 0))


def transposed(d_in: int, d_out: int) -> nn.Parameter:
    """An uninitialised [d_in, d_out] over memory [d_out, d_in], as torch's linear layers keep
    it."""
    return nn.Parameter(torch.empty(d_out, d_in).T)


def in_matrix(weight: Float[Tensor, "head d_model d_head"]) -> Float[Tensor, "head_d_head d_model"]:
    """The matrix `F.linear` takes to project d_model onto all heads: a view, for every layout we
    load."""
    return weight.mT.reshape(-1, weight.shape[1])


def out_matrix(
    weight: Float[Tensor, "head d_head d_model"],
) -> Float[Tensor, "d_model head_d_head"]:
    """The matrix `F.linear` takes to project all heads back onto d_model: a view."""
    return weight.reshape(-1, weight.shape[2]).mT


def matmul_ready(
    weight: Float[Tensor, "head d_model d_head"],
) -> Float[Tensor, "head d_model d_head"]:
    """The same numbers over memory whose `in_matrix` is a view; itself when that is so already."""
    heads_merge = weight.stride(0) == weight.stride(2) * weight.shape[2]
    if weight.shape[0] == 1 or heads_merge:
        return weight
    return weight.transpose(1, 2).contiguous().transpose(1, 2)


def side_by_side(parts: Sequence[Tensor]) -> Tensor | None:
    """Tensors that follow each other in one memory, as one along the first axis; None where they do
    not."""
    first, storage = parts[0], parts[0].untyped_storage().data_ptr()
    stride, start, rows = first.stride(), first.storage_offset(), 0
    for part in parts:
        if (
            part.storage_offset() != start + rows * stride[0]
            or part.stride() != stride
            or part.untyped_storage().data_ptr() != storage
        ):
            return None
        rows += part.shape[0]
    return first.as_strided((rows, *first.shape[1:]), stride, start)


def joined_projection(
    *weights_and_biases: Float[Tensor, "..."],
) -> tuple[Float[Tensor, "d_out d_in"], Float[Tensor, " d_out"]] | None:
    """One matrix and bias for `F.linear`, of several projections whose weights, and whose biases,
    adjoin in memory; None where they lie apart.

    Queries, keys and values made here, or cut from one matrix of a checkpoint, adjoin: one product
    serves all three.
    """
    n = len(weights_and_biases) // 2
    weight, bias = side_by_side(weights_and_biases[:n]), side_by_side(weights_and_biases[n:])
    return None if weight is None or bias is None else (in_matrix(weight), bias.flatten())


def transposes(
    *weights: Float[Tensor, "_d_in _d_out"],
) -> tuple[Float[Tensor, "_d_out _d_in"], ...]:
    """What `F.linear` takes of each."""
    return tuple(weight.T for weight in weights)


class Remembered(Generic[Views]):
    """What products take of some parameters of a module, for as long as those stay where they are.

    They are views; but in a small model's step, a view of a parameter costs a third of the product
    it is for. Copies of a model make their own.

    Args:
        make: the views, of the parameters.
        names: of the parameters, as `make` takes them.
    """

    def __init__(self, make: Callable[..., Views], *names: str) -> None:
        self.make = make
        self.names = names
        self.forget()

    def forget(self) -> None:
        """Do not keep memory alive that the parameters leave."""
        # where the parameters were: address, shape and strides; and the views
        self.known: tuple[list[Tensor], Views] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Remembered, (self.make, *self.names)

    def of(self, module: nn.Module) -> Views:
        """The views; with their graph where gradients are wanted."""
        kept = self.kept(module)
        return self.make(*(getattr(module, name) for name in self.names)) if kept is None else kept

    def kept(self, module: nn.Module) -> Views | None:
        """The views, remembered. None where nothing can be: a gradient is wanted, a graph is being
        compiled, tensors are torch.func's and have no memory, or parametrised and elsewhere."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return None
        known = self.known  # read once: other threads may replace it
        try:
            own: Callable[[str], Any] = module._parameters.__getitem__
            if known is not None and all(map(Tensor.is_set_to, map(own, self.names), known[0])):
                return known[1]
            chosen = [own(name) for name in self.names]
            if not all(isinstance(each, nn.Parameter) for each in chosen):
                return None  # handed in for one call, perhaps with tangents
            there = [each.detach() for each in chosen]
            views = self.make(*there)
            # some layouts take a copy, which would become stale
            self.known = (there, views) if lie_in(views, chosen) else None
        except (RuntimeError, TypeError, KeyError):
            return None
        return views


def lie_in(views: Any, parameters: Sequence[Tensor]) -> bool:
    """Whether a tensor, or several in a tuple, are in the memory of these; None is nowhere else."""
    memory = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    several = views if isinstance(views, tuple) else (views,)
    return all(each is None or each.untyped_storage().data_ptr() in memory for each in several)


class Projecting(Component):
    """A component that remembers views of its parameters."""

    def weights_leave(self) -> None:
        for value in vars(self).values():
            if isinstance(value, Remembered):
                value.forget()

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self.weights_leave()
        return super()._apply(*args, **kwargs)
