"""A matrix kept as a product of two narrow ones: what a head reads and writes, without building
it."""

from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Inexact
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


class FactoredMatrix:
    """`A @ B` as its factors, A [..., ldim, mdim] and B [..., mdim, rdim].

    Leading axes are broadcast against each other. `@` from either side takes tensors, vectors and
    other factored matrices, and keeps the narrower of the possible factorisations.

    Raises: ValueError when the factors do not fit each other.
    """

    def __init__(
        self,
        A: Inexact[Tensor, "*left ldim mdim"],
        B: Inexact[Tensor, "*right mdim_of_B rdim"],
    ) -> None:
        if A.ndim < 2 or B.ndim < 2 or A.shape[-1] != B.shape[-2]:
            raise ValueError(
                f"A {list(A.shape)} and B {list(B.shape)} do not fit: the last axis of A must be "
                "the last but one of B"
            )
        try:
            leading = torch.broadcast_shapes(A.shape[:-2], B.shape[:-2])
        except RuntimeError:
            raise ValueError(
                f"the leading axes of A {list(A.shape)} and B {list(B.shape)} do not broadcast"
            ) from None
        self.A = A.expand(*leading, *A.shape[-2:])
        self.B = B.expand(*leading, *B.shape[-2:])
        self.ldim, self.mdim = A.shape[-2:]
        self.rdim = B.shape[-1]
        self.has_leading_dims = bool(leading)
        self.shape = torch.Size((*leading, self.ldim, self.rdim))

    @property
    def ndim(self) -> int:
        """Axes of the product."""
        return len(self.shape)

    @property
    def pair(self) -> tuple[Tensor, Tensor]:
        """(A, B)."""
        return self.A, self.B

    @property
    def AB(self) -> Inexact[Tensor, "*leading ldim rdim"]:
        """The product itself."""
        return self.A @ self.B

    @property
    def BA(self) -> Inexact[Tensor, "*leading mdim mdim"]:
        """The factors the other way round; ValueError unless the product is square."""
        self._check_square("BA")
        return self.B @ self.A

    @property
    def T(self) -> "FactoredMatrix":
        """The transpose."""
        return FactoredMatrix(self.B.mT, self.A.mT)

    def _check_square(self, name: str) -> None:
        if self.ldim != self.rdim:
            raise ValueError(f"{name} needs a square product, this one is {list(self.shape)}")

    # -- products --

    def __matmul__(self, other: Any) -> "FactoredMatrix | Tensor":
        if isinstance(other, FactoredMatrix):
            return (self @ other.A) @ other.B
        if not isinstance(other, Tensor):
            return NotImplemented
        self._check_fits(other.shape[-2] if other.ndim > 1 else other.shape[0], self.rdim, other)
        if other.ndim == 1:
            return (self.A @ (self.B @ other)[..., None]).squeeze(-1)
        if self.mdim < self.rdim:
            return FactoredMatrix(self.A, self.B @ other)
        return FactoredMatrix(self.AB, other)

    def __rmatmul__(self, other: Any) -> "FactoredMatrix | Tensor":
        if not isinstance(other, Tensor):
            return NotImplemented
        self._check_fits(other.shape[-1], self.ldim, other)
        if other.ndim == 1:
            return ((other @ self.A)[..., None, :] @ self.B).squeeze(-2)
        if self.mdim < self.ldim:
            return FactoredMatrix(other @ self.A, self.B)
        return FactoredMatrix(other, self.AB)

    def _check_fits(self, given: int, wanted: int, other: Tensor) -> None:
        if given != wanted:
            raise ValueError(f"{list(self.shape)} and {list(other.shape)} cannot be multiplied")

    def __mul__(self, scalar: float | Tensor) -> "FactoredMatrix":
        if isinstance(scalar, Tensor) and scalar.numel() != 1:
            raise ValueError(f"a scalar is wanted, got a tensor of shape {list(scalar.shape)}")
        return FactoredMatrix(self.A * scalar, self.B)

    __rmul__ = __mul__

    # -- decompositions --

    @cached_property
    def _reduced(self) -> tuple[Tensor, Tensor, Tensor]:
        """Orthonormal bases of A's columns and of B's rows, and the small matrix between them."""
        wide = torch.float32 if self.A.dtype in HALF else self.A.dtype
        left, left_triangle = torch.linalg.qr(self.A.to(wide))
        right, right_triangle = torch.linalg.qr(self.B.to(wide).mT)
        return left, left_triangle @ right_triangle.mT, right

    @cached_property
    def _svd(self) -> tuple[Tensor, Tensor, Tensor]:
        left, core, right = self._reduced
        u, s, vh = torch.linalg.svd(core, full_matrices=False)
        dtype = self.A.dtype
        return (left @ u).to(dtype), s.to(dtype), (right @ vh.mT).to(dtype)

    def svd(
        self,
    ) -> tuple[
        Float[Tensor, "*leading ldim rank"],
        Float[Tensor, "*leading rank"],
        Float[Tensor, "*leading rdim rank"],
    ]:
        """U, S and V of the product, `AB = U @ diag(S) @ V.T`; rank is the least of the three
        dimensions.

        Computed once, from the factors: the product is never built.
        """
        return self._svd

    @property
    def U(self) -> Float[Tensor, "*leading ldim rank"]:
        """Left singular vectors, as columns."""
        return self._svd[0]

    @property
    def S(self) -> Float[Tensor, "*leading rank"]:
        """Singular values."""
        return self._svd[1]

    @property
    def V(self) -> Float[Tensor, "*leading rdim rank"]:
        """Right singular vectors, as columns."""
        return self._svd[2]

    @property
    def Vh(self) -> Float[Tensor, "*leading rdim rank"]:
        """What classic code calls V: it is not transposed, despite the name."""
        return self.V

    @property
    def eigenvalues(self) -> Inexact[Tensor, "*leading mdim"]:
        """Eigenvalues of the product that are not zero for want of rank, from the small BA."""
        small = self.BA
        return torch.linalg.eigvals(small.float() if small.dtype in HALF else small)

    def norm(self) -> Float[Tensor, "*leading"]:
        """The Frobenius norm."""
        return torch.linalg.matrix_norm(self._reduced[1]).to(self.A.dtype)

    def make_even(self) -> "FactoredMatrix":
        """The same product from factors of equal size: U √S and √S Vᵀ."""
        u, s, v = self._svd
        root = s.sqrt()
        return FactoredMatrix(u * root[..., None, :], root[..., :, None] * v.mT)

    def collapse_l(self) -> Float[Tensor, "*leading rank rdim"]:
        """S Vᵀ: the product without the rotation on its left, so with the same norms and inner
        products of what comes out."""
        _, s, v = self._svd
        return s[..., :, None] * v.mT

    def collapse_r(self) -> Float[Tensor, "*leading ldim rank"]:
        """U S: the product without the rotation on its right."""
        u, s, _ = self._svd
        return u * s[..., None, :]

    # -- parts --

    def unsqueeze(self, k: int) -> "FactoredMatrix":
        """A new leading axis at `k`, counted from the left."""
        if not 0 <= k <= self.ndim - 2:
            raise IndexError(f"k={k}: a leading axis goes to a place from 0 to {self.ndim - 2}")
        return FactoredMatrix(self.A.unsqueeze(k), self.B.unsqueeze(k))

    def get_corner(self, k: int = 3) -> Tensor:
        """The first `k` entries along every axis of the product."""
        first: tuple[slice, ...] = (slice(k),) * (self.ndim - 1)
        columns = (*first[:-1], slice(None), slice(k))
        return self.A[first] @ self.B[columns]

    def __getitem__(self, index: Any) -> "FactoredMatrix":
        """Index leading axes, then perhaps rows, then perhaps columns; an integer row or column
        stays as an axis of length 1."""
        n_leading = self.ndim - 2
        parts = list(index) if isinstance(index, tuple) else [index]
        if any(part is Ellipsis for part in parts):
            at = next(i for i, part in enumerate(parts) if part is Ellipsis)
            parts[at : at + 1] = [slice(None)] * (self.ndim - len(parts) + 1)
        if len(parts) > self.ndim or any(part is None for part in parts):
            raise IndexError(f"{index!r} is no index into a matrix of shape {list(self.shape)}")
        leading, rest = tuple(parts[:n_leading]), parts[n_leading:]
        sizes = self.shape[-2:]
        kept = [as_axis(part, size) for part, size in zip(rest, sizes, strict=False)]
        rows, columns = (*kept, slice(None), slice(None))[:2]
        A, B = (self.A[leading], self.B[leading]) if leading else (self.A, self.B)
        return FactoredMatrix(A[..., rows, :], B[..., :, columns])

    def __repr__(self) -> str:
        return f"FactoredMatrix: Shape({self.shape}), Hidden Dim({self.mdim})"


def as_axis(index: Any, size: int) -> Any:
    """An index into an axis of `size` that keeps the axis."""
    if not isinstance(index, int) or isinstance(index, bool):
        return index
    if not -size <= index < size:
        raise IndexError(f"index {index} into an axis of {size}")
    return slice(index, index + 1 or None)


def composition_scores(
    left: FactoredMatrix, right: FactoredMatrix, broadcast_dims: bool = True
) -> Float[Tensor, "*scores"]:
    """How much of what `left` writes `right` reads: ‖left right‖ / (‖left‖ ‖right‖), Frobenius
    norms (A Mathematical Framework for Transformer Circuits, Elhage et al. 2021).

    broadcast_dims: every left matrix with every right one, [*left leading, *right leading]; False:
        leading axes are broadcast against each other.
    Raises: ValueError when left's columns are not right's rows.
    """
    if left.rdim != right.ldim:
        raise ValueError(
            f"left {list(left.shape)} and right {list(right.shape)} cannot be composed: the last "
            "axis of left must be the last but one of right"
        )
    # ‖left right‖ needs neither left's rotation nor right's: [mdim, rdim] and [ldim, mdim] will do
    out, into = left.collapse_l(), right.collapse_r()
    norms_left, norms_right = left.norm(), right.norm()
    if not broadcast_dims:
        return torch.linalg.matrix_norm(out @ into) / (norms_left * norms_right)
    n_left = left.ndim - 2
    rows = out.flatten(0, -3) if n_left else out[None]  # left by left: all products are many
    every = [torch.linalg.matrix_norm(each @ into) for each in rows]
    norms = torch.stack(every).view(left.shape[:-2] + right.shape[:-2])
    return norms / (norms_left.view(left.shape[:-2] + (1,) * (right.ndim - 2)) * norms_right)
