"""Singular vectors of a model's weights, read as tokens (Millidge and Black 2022, "The singular
value decompositions of transformer weight matrices are highly interpretable")."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

VECTOR_TYPES = ("OV", "w_in", "w_out")


class SVDInterpreter:
    """Which tokens the singular vectors of a head or an MLP point at."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def get_singular_vectors(
        self,
        vector_type: str,
        layer_index: int,
        num_vectors: int = 10,
        head_index: int | None = None,
    ) -> Float[Tensor, "d_vocab_out 1 num_vectors"]:
        """The logits of every token along the largest singular vectors of a weight.

        Args:
            vector_type: "OV": directions a head writes; "w_in": directions the MLP's neurons read,
                the weights of its norm included; "w_out": directions the MLP writes.
            head_index: which head, for "OV" only.
        Raises: ValueError for a type, layer or head that is not there, and for more vectors than
            the matrix has. The sign of a singular vector is arbitrary.
        """
        matrix = self._matrix(vector_type, layer_index, head_index)
        directions = matrix if vector_type == "OV" else right_vectors(matrix)
        rank = directions.shape[-1]
        if not 1 <= num_vectors <= rank:
            raise ValueError(f"num_vectors={num_vectors}: this matrix has {rank} singular vectors")
        chosen = directions[:, :num_vectors]
        return (self.model.W_U.detach().to(chosen).T @ chosen)[:, None]

    def _matrix(self, vector_type: str, layer: int, head: int | None) -> Tensor:
        """The weight as a map into the stream [in, d_model]; for "OV" its right singular vectors,
        which its factors have cheaply."""
        cfg = self.model.cfg
        if vector_type not in VECTOR_TYPES:
            raise ValueError(
                f"vector_type must be one of {list(VECTOR_TYPES)}, got {vector_type!r}"
            )
        if not 0 <= layer < cfg.n_layers:
            raise ValueError(f"layer_index={layer}: the model has {cfg.n_layers} layers")
        block = self.model.blocks[layer]
        if vector_type == "OV":
            if head is None or not 0 <= head < cfg.n_heads:
                raise ValueError(f"head_index={head}: the model has {cfg.n_heads} heads")
            return block.attn.OV[head].V.detach().float()
        if head is not None:
            raise ValueError(f"head_index={head}: {vector_type!r} is a weight of the MLP")
        if cfg.attn_only or not hasattr(block.mlp, "W_in"):
            raise ValueError(f"layer {layer} has no MLP with one {vector_type!r} matrix")
        if vector_type == "w_out":
            return block.mlp.W_out.detach().float()
        weight = block.mlp.W_in.detach().float()
        if (scale := getattr(block.ln2, "w", None)) is None:
            return weight.T
        return (weight * (scale.detach().float() + block.ln2.offset)[:, None]).T


def right_vectors(
    matrix: Float[Tensor, "d_in d_model"],
) -> Float[Tensor, "d_model rank"]:
    """Right singular vectors, as columns."""
    return torch.linalg.svd(matrix, full_matrices=False).Vh.T
