"""FactoredMatrix against the product it stands for, and what is made of it."""

from typing import Any

import native
import pytest
import torch
from torch import Tensor

from transformer_lens_lite import FactoredMatrix, SVDInterpreter
from transformer_lens_lite.factored_matrix import composition_scores

CLOSE = {"atol": 1e-4, "rtol": 1e-4}
# (leading axes of A, of B, ldim, mdim, rdim)
SHAPES = [
    ((), (), 5, 3, 7),
    ((2,), (2,), 5, 3, 7),
    ((2, 4), (2, 4), 7, 3, 5),
    ((2, 1), (4,), 6, 2, 6),
    ((), (), 3, 9, 4),  # wide inside
]
IDS = [str(shape) for shape in SHAPES]


def make(shape: Any, dtype: torch.dtype = torch.float32) -> FactoredMatrix:
    left, right, n_rows, n_inside, n_columns = shape
    A = torch.randn(*left, n_rows, n_inside, dtype=torch.float64)
    B = torch.randn(*right, n_inside, n_columns, dtype=torch.float64)
    return FactoredMatrix(A.to(dtype), B.to(dtype))


@pytest.fixture(params=SHAPES, ids=IDS)
def matrix(request: pytest.FixtureRequest) -> FactoredMatrix:
    return make(request.param)


def test_what_it_is(matrix: FactoredMatrix) -> None:
    product = matrix.A @ matrix.B
    assert torch.equal(matrix.AB, product)
    assert matrix.shape == product.shape
    assert matrix.ndim == product.ndim
    assert (matrix.ldim, matrix.rdim) == tuple(product.shape[-2:])
    assert matrix.mdim == matrix.A.shape[-1]
    assert matrix.has_leading_dims == (product.ndim > 2)
    torch.testing.assert_close(matrix.T.AB, product.mT)
    assert matrix.pair == (matrix.A, matrix.B)
    torch.testing.assert_close(matrix.get_corner(2), product[(slice(2),) * product.ndim])
    torch.testing.assert_close(matrix.unsqueeze(0).AB, product[None])
    torch.testing.assert_close((matrix * 2.5).AB, 2.5 * product)
    torch.testing.assert_close((torch.tensor([2.5]) * matrix).AB, 2.5 * product)
    assert f"Hidden Dim({matrix.mdim})" in repr(matrix)


def test_decompositions(matrix: FactoredMatrix) -> None:
    product = matrix.AB
    u, s, v = matrix.svd()
    assert (matrix.U is u, matrix.S is s, matrix.V is v, matrix.Vh is v) == (True,) * 4
    rank = min(matrix.ldim, matrix.mdim, matrix.rdim)
    assert (u.shape[-1], s.shape[-1], v.shape[-1]) == (rank,) * 3
    torch.testing.assert_close(u * s[..., None, :] @ v.mT, product, **CLOSE)
    for basis in (u, v):
        identity = torch.eye(rank).expand(*basis.shape[:-2], -1, -1)
        torch.testing.assert_close(basis.mT @ basis, identity, **CLOSE)
    expected = torch.linalg.svdvals(product)[..., :rank]
    torch.testing.assert_close(s, expected, **CLOSE)
    torch.testing.assert_close(matrix.norm(), torch.linalg.matrix_norm(product), **CLOSE)
    even = matrix.make_even()
    torch.testing.assert_close(even.AB, product, **CLOSE)
    torch.testing.assert_close(even.A.norm(dim=-2), even.B.norm(dim=-1), **CLOSE)
    # the collapsed ones have the product's inner products, on the side that is left
    left, right = matrix.collapse_l(), matrix.collapse_r()
    torch.testing.assert_close(left.mT @ left, product.mT @ product, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(right @ right.mT, product @ product.mT, atol=1e-3, rtol=1e-3)


def test_eigenvalues_are_those_of_the_product_that_are_not_zero() -> None:
    matrix = make(((2, 1), (4,), 6, 2, 6), torch.float64)
    found = matrix.eigenvalues
    assert found.shape == (2, 4, 2)
    every = torch.linalg.eigvals(matrix.AB)
    largest = every.abs().sort(-1, descending=True).values
    torch.testing.assert_close(found.abs().sort(-1, descending=True).values, largest[..., :2])
    assert (largest[..., 2:] < 1e-6).all()
    torch.testing.assert_close(found.sum(-1).real, matrix.AB.diagonal(dim1=-2, dim2=-1).sum(-1))
    with pytest.raises(ValueError, match=r"square product.*\[5, 7\]"):
        make(SHAPES[0]).eigenvalues  # noqa: B018


def product_of(x: Any) -> Tensor:
    return x.AB if isinstance(x, FactoredMatrix) else x


def test_products_from_either_side(matrix: FactoredMatrix) -> None:
    full, (n, m) = matrix.AB, matrix.shape[-2:]
    lead = matrix.shape[:-2]
    for right in (torch.randn(m), torch.randn(m, 2), torch.randn(m, 11), torch.randn(*lead, m, 3)):
        torch.testing.assert_close(product_of(matrix @ right), full @ right, **CLOSE)
    for left in (torch.randn(n), torch.randn(2, n), torch.randn(11, n), torch.randn(*lead, 3, n)):
        torch.testing.assert_close(product_of(left @ matrix), left @ full, **CLOSE)
    other = FactoredMatrix(torch.randn(m, 2), torch.randn(2, 6))
    both = matrix @ other
    assert isinstance(both, FactoredMatrix)
    assert both.mdim == min(matrix.mdim, 2) or both.mdim <= 2
    torch.testing.assert_close(both.AB, full @ other.AB, **CLOSE)


def test_products_keep_the_narrower_factors() -> None:
    narrow, wide = make(((), (), 5, 3, 7)), make(((), (), 3, 9, 4))
    assert (narrow @ torch.randn(7, 8)).mdim == 3  # type: ignore[union-attr]
    assert (torch.randn(8, 5) @ narrow).mdim == 3
    assert (wide @ torch.randn(4, 8)).mdim == 4  # type: ignore[union-attr]
    assert (torch.randn(8, 3) @ wide).mdim == 3


def test_indexing() -> None:
    matrix = make(((2, 4), (2, 4), 7, 3, 5))
    full = matrix.AB
    for index in (0, -1, (1,), (1, 2), (slice(None), 3), (..., 2, slice(None)), ..., [1, 0]):
        wanted = index
        if index == (..., 2, slice(None)):
            wanted = (..., slice(2, 3), slice(None))
        torch.testing.assert_close(matrix[index].AB, full[wanted])
    torch.testing.assert_close(matrix[1, 2, 3].AB, full[1, 2, 3:4])
    torch.testing.assert_close(matrix[1, 2, -1, -2].AB, full[1, 2, 6:, 3:4])
    torch.testing.assert_close(matrix[:, 1, 1:3, [0, 4]].AB, full[:, 1, 1:3][..., [0, 4]])
    torch.testing.assert_close(make(SHAPES[0])[2].AB.shape, torch.Size([1, 7]))
    for wrong in ((0, 0, 7), (0, 0, 0, 5), (0,) * 5, (None, 0), 2):
        with pytest.raises(IndexError):
            matrix[wrong]


def test_half_precision_is_decomposed_in_single() -> None:
    matrix = make(SHAPES[1], torch.bfloat16)
    assert {each.dtype for each in matrix.svd()} == {torch.bfloat16}
    product = matrix.A.float() @ matrix.B.float()
    expected = torch.linalg.svdvals(product)[..., :3]
    torch.testing.assert_close(matrix.S.float(), expected, atol=0.1, rtol=0.01)
    assert make(SHAPES[3], torch.bfloat16).eigenvalues.dtype == torch.complex64


def test_gradients_go_through() -> None:
    A = torch.randn(5, 3, requires_grad=True)
    FactoredMatrix(A, torch.randn(3, 7)).norm().backward()
    assert A.grad is not None
    assert (A.grad != 0).all()


def test_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"\[5, 3\] and B \[4, 7\] do not fit"):
        FactoredMatrix(torch.randn(5, 3), torch.randn(4, 7))
    with pytest.raises(ValueError, match="do not broadcast"):
        FactoredMatrix(torch.randn(2, 5, 3), torch.randn(3, 3, 7))
    matrix = make(SHAPES[0])
    for wrong in (torch.randn(6), torch.randn(6, 2)):
        with pytest.raises(ValueError, match="cannot be multiplied"):
            matrix @ wrong
        with pytest.raises(ValueError, match="cannot be multiplied"):
            (wrong if wrong.ndim == 1 else wrong.T) @ matrix
    with pytest.raises(TypeError):
        matrix @ 3  # type: ignore[operator]
    with pytest.raises(ValueError, match="scalar"):
        matrix * torch.randn(2)
    with pytest.raises(IndexError, match="k=-1"):
        matrix.unsqueeze(-1)


# --- of a model's heads ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "grouped_rotary", "one_kv_head", "attn_only"])
def test_QK_and_OV(kind: str) -> None:
    model = native.build(kind)
    qk = torch.einsum("lhdk,lhek->lhde", model.W_Q, model.W_K)
    ov = torch.einsum("lhdk,lhke->lhde", model.W_V, model.W_O)
    torch.testing.assert_close(model.QK.AB, qk, **CLOSE)
    torch.testing.assert_close(model.OV.AB, ov, **CLOSE)
    assert model.QK.mdim == model.OV.mdim == 6
    torch.testing.assert_close(model.blocks[1].attn.QK.AB, qk[1], **CLOSE)
    torch.testing.assert_close(model.blocks[1].attn.OV.AB, ov[1], **CLOSE)


def test_latent_attention_has_neither() -> None:
    model = native.build("latent")
    for name in ("QK", "OV"):
        with pytest.raises(ValueError, match="a norm stands between"):
            getattr(model, name)
        with pytest.raises(ValueError, match="a norm stands between"):
            getattr(model.blocks[0].attn, name)
    with pytest.raises(ValueError, match="latent"):
        model.all_composition_scores("Q")


@pytest.mark.parametrize("kind", ["plain", "grouped_rotary"])
@pytest.mark.parametrize("mode", ["Q", "K", "V"])
def test_composition_scores_of_all_heads(kind: str, mode: str) -> None:
    model = native.build(kind, n_layers=3)
    found = model.all_composition_scores(mode)
    assert found.shape == (3, 4, 3, 4)
    qk, ov = model.QK.AB, model.OV.AB
    reads = {"Q": qk, "K": qk.mT, "V": ov}[mode]
    for left in range(3):
        for right in range(3):
            products = ov[left][:, None] @ reads[right][None]
            expected = products.norm(dim=(-2, -1)) / (
                ov[left].norm(dim=(-2, -1))[:, None] * reads[right].norm(dim=(-2, -1))
            )
            if left >= right:
                expected = torch.zeros(4, 4)
            torch.testing.assert_close(found[left, :, right], expected, **CLOSE)
    assert (found[0, :, 2] > 0.01).all()
    with pytest.raises(ValueError, match="'Q', 'K' or 'V'"):
        model.all_composition_scores("O")


def test_composition_scores_one_by_one() -> None:
    left, right = make(((2,), (2,), 7, 3, 5)), make(((2,), (2,), 5, 4, 6))
    every = composition_scores(left, right)
    assert every.shape == (2, 2)
    torch.testing.assert_close(composition_scores(left, right, False), every.diagonal(), **CLOSE)
    one = composition_scores(left[0], right)
    torch.testing.assert_close(one, every[0], **CLOSE)
    assert composition_scores(left[0], right[1]).shape == ()
    with pytest.raises(ValueError, match="cannot be composed"):
        composition_scores(right, left)


# --- singular vectors as tokens -------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "grouped_rotary", "rms_offset", "ln_pre"])
@pytest.mark.parametrize("what", ["OV", "w_in", "w_out"])
def test_singular_vectors(kind: str, what: str) -> None:
    model = native.build(kind)
    head = 3 if what == "OV" else None
    found = SVDInterpreter(model).get_singular_vectors(what, 1, num_vectors=4, head_index=head)
    assert found.shape == (23, 1, 4)
    block = model.blocks[1]
    scale = 1.0
    if kind != "ln_pre":
        scale = (block.ln2.w + (1.0 if kind == "rms_offset" else 0.0))[:, None]
    matrix = {
        "OV": block.attn.W_V[3] @ block.attn.W_O[3],
        "w_in": (block.mlp.W_in * scale).T,
        "w_out": block.mlp.W_out,
    }[what]
    directions = torch.linalg.svd(matrix).Vh[:4]
    expected = model.W_U.T @ directions.T
    torch.testing.assert_close(found[:, 0].abs(), expected.abs(), atol=1e-3, rtol=1e-3)
    assert not found.requires_grad


def test_singular_vectors_of_what_is_not_there() -> None:
    svd = SVDInterpreter(native.build())
    for arguments, message in {
        ("OV", 2, 4, 0): "layer_index=2",
        ("OV", 0, 4, 4): "head_index=4",
        ("OV", 0, 4, None): "head_index=None",
        ("w_in", 0, 4, 1): "of the MLP",
        ("w_in", 0, 15, None): "num_vectors=15",
        ("OV", 0, 7, 0): "num_vectors=7",
        ("W_in", 0, 4, None): "vector_type",
    }.items():
        with pytest.raises(ValueError, match=message):
            svd.get_singular_vectors(*arguments)
    with pytest.raises(ValueError, match="no MLP"):
        SVDInterpreter(native.build("attn_only")).get_singular_vectors("w_out", 0)
    with pytest.raises(ValueError, match="no MLP"):
        SVDInterpreter(native.build("experts")).get_singular_vectors("w_out", 0)
