"""Parameters in the shape the reader wants, over memory in the shape matrix multiplication wants.

A contiguous `W_Q[head, d_model, d_head]` would be copied into a matrix by every product with it, a
copy of the whole weight per step. So the memory is a matrix, `[(head d_head), d_model]`, and `W_Q`
a strided view of it. The functions below undo the view; for any layout a checkpoint has they are
views themselves.
"""

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn


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


class JoinedProjection:
    """One matrix and bias for several projections whose parameters adjoin in memory.

    Queries, keys and values made here, or cut from one matrix of a checkpoint, adjoin: one product
    serves all three. The views are remembered for as long as the parameters stay where they are;
    copies of a model make their own.

    Args:
        weights, biases: names of the parameters, in the order in which they adjoin.
    """

    def __init__(self, weights: tuple[str, ...], biases: tuple[str, ...]) -> None:
        self.names = weights, biases
        self.chosen = itemgetter(*weights, *biases)
        self.forget()

    def forget(self) -> None:
        """Do not keep memory alive that the parameters leave."""
        self.places: list[tuple[int, tuple[int, ...]]] = []
        self.views: tuple[Tensor, Tensor] | None = None

    def __reduce__(self) -> tuple[type, tuple[tuple[str, ...], ...]]:
        return JoinedProjection, self.names

    def of(
        self, parameters: Mapping[str, Any]
    ) -> tuple[Float[Tensor, "d_out d_in"], Float[Tensor, " d_out"]] | None:
        """(matrix, bias) for `F.linear`, or None when the parameters lie apart."""
        try:
            chosen = self.chosen(parameters)
            places = [(parameter.data_ptr(), parameter.stride()) for parameter in chosen]
        except (RuntimeError, AttributeError, KeyError):
            return None  # tensors of torch.func have no memory; parametrised weights are elsewhere
        if places != self.places:
            n = len(self.names[0])
            weight, bias = side_by_side(chosen[:n]), side_by_side(chosen[n:])
            self.views = None
            if weight is not None and bias is not None:
                self.views = in_matrix(weight).detach(), bias.detach().flatten()
            self.places = places
        return self.views
