"""Hessian products, Hessians, and the Hessians of the criteria with their symmetric factors."""

from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor, func, nn

from kfs.basics.flattening import Vec, cvec, matricize, rvec
from kfs.basics.hessian_ce_loss import ce_hessian
from kfs.basics.hessian_factorizations import hessian_factor
from kfs.basics.hessian_mse_loss import mse_hessian
from kfs.basics.hessian_product import hvp, mixed_hvp
from kfs.basics.hessians import hessian, vec_hessian
from kfs.basics.reduction_factors import criterion
from kfs.errors import DtypeError, FlatteningError, GraphError, LossError, ShapeError
from tests.basics.cases import CASES, Case, assert_close, leaf, shapes, smooth_function


def coupled(shape1: tuple[int, ...], shape2: tuple[int, ...]) -> Any:
    """Return a scalar function of two tensors in which all entries interact."""
    inner, outer = smooth_function(shape1, shape2), smooth_function(shape2, ())

    def c(a1: Tensor, a2: Tensor) -> Tensor:
        return outer(inner(a1) * a2 + a2)

    return c


@given(shape1=shapes, shape2=shapes)
def test_hessians_and_products_are_those_of_torch_func(shape1: tuple[int, ...], shape2: tuple[int, ...]) -> None:
    f = coupled(shape1, shape2)
    a1, a2 = leaf(shape1), leaf(shape2)
    c = f(a1, a2)
    points = (a1.detach(), a2.detach())
    H = func.jacfwd(func.jacrev(f, argnums=(0, 1)), argnums=(0, 1))(*points)
    for i, rows in enumerate((a1, a2)):
        for j, columns in enumerate((a1, a2)):
            expected = H[i][j]
            assert_close(hessian(c, rows, columns), expected)
            v = torch.randn_like(columns)
            product = torch.tensordot(expected, v, dims=v.ndim)
            assert_close(mixed_hvp(c, rows, columns, v), product)
            if i == j:
                assert_close(hessian(c, rows), expected)
                assert_close(hvp(c, rows, v), product)


@given(shape=shapes)
def test_hessian_agrees_with_finite_differences_of_the_gradient(shape: tuple[int, ...]) -> None:
    f, a = smooth_function(shape, ()), leaf(shape)
    H, gradient, step = hessian(f(a), a), func.grad(f), 1e-5
    for index in np.ndindex(*shape):
        e = torch.zeros_like(a)
        e[index] = step
        difference = (gradient(a.detach() + e) - gradient(a.detach() - e)) / (2 * step)
        # Central differences err by step^2 times a fourth derivative of size one, and by eps / step from rounding.
        assert_close(H[(..., *index)], difference, atol=1e-7)


@pytest.mark.parametrize(("vec", "order"), [(cvec, "F"), (rvec, "C")])
@given(shape1=shapes, shape2=shapes)
def test_matrices_are_flattened_tensors(
    vec: Vec, order: Literal["C", "F"], shape1: tuple[int, ...], shape2: tuple[int, ...]
) -> None:
    f = coupled(shape1, shape2)
    a1, a2 = leaf(shape1), leaf(shape2)
    c = f(a1, a2)
    H = func.jacfwd(func.jacrev(f, argnums=0), argnums=1)(a1.detach(), a2.detach()).numpy()
    matrix = np.reshape(H, (a1.numel(), a2.numel()), order=order)
    assert_close(vec_hessian(c, a1, a2, vec), torch.from_numpy(matrix.copy()))
    square = vec_hessian(c, a1, vec=vec)
    assert_close(square, square.T)


def test_independent_and_linear_arguments_have_zero_blocks() -> None:
    a1, a2 = leaf((2,)), leaf((3,))
    c = (a1**3).sum() + a2.sum()
    assert_close(hessian(c, a1, a2), torch.zeros(2, 3, dtype=torch.float64))
    assert_close(hessian(c, a2, a1), torch.zeros(3, 2, dtype=torch.float64))
    assert_close(hessian(c, a2), torch.zeros(3, 3, dtype=torch.float64))


def test_arguments_must_be_independent_variables() -> None:
    x = leaf(())
    h = torch.exp(x)
    c = x * h
    for a1, a2 in ((x, h), (h, x)):
        with pytest.raises(GraphError, match="cannot be varied independently"):
            hessian(c, a1, a2)
    assert_close(hessian(c, h), torch.zeros((), dtype=torch.float64))


def test_products_work_without_grad_mode() -> None:
    a = leaf((3,))
    c = (a**3).sum()
    with torch.no_grad():
        assert_close(hessian(c, a), torch.diag(6 * a))


def test_bad_tensors_are_refused() -> None:
    a = leaf((3,))
    c, v = (a**3).sum(), torch.ones(3, dtype=torch.float64)
    with pytest.raises(ShapeError, match=r"c has shape \[3\], but a Hessian is defined for a scalar.*c\.sum\(\)"):
        hvp(a**3, a, v)
    with pytest.raises(ShapeError, match=r"v has shape \[2\], but a2 has shape \[3\]"):
        hvp(c, a, v[:2])
    with pytest.raises(GraphError, match="c is not part of a computation graph"):
        hvp(c.detach(), a, v)
    for other in (leaf((3,)), a.clone()):
        with pytest.raises(GraphError, match="was not computed from"):
            hessian(c, other)
        with pytest.raises(GraphError, match="computed from"):
            mixed_hvp(c, other, a, v)
        with pytest.raises(GraphError, match="computed from"):
            mixed_hvp(c, a, other, v)
    with pytest.raises(ShapeError, match="defined for a scalar"):
        hessian(a**3, leaf((0,)))
    with pytest.raises(DtypeError, match=r"a1 has dtype torch\.int64"):
        hessian(c, torch.tensor([1, 2, 3]))
    with pytest.raises(DtypeError, match=r"a2 is a function.*vec=cvec or vec=rvec"):
        vec_hessian(c, a, cvec)  # type: ignore[arg-type]
    flattening: Any = "rvec"  # the paper's order
    with pytest.raises(DtypeError, match=r"a2 is a str.*vec=cvec or vec=rvec"):
        vec_hessian(c, a, flattening)
    pair: Any = (a, a)  # an off-diagonal block, as the paper writes it
    with pytest.raises(DtypeError, match=r"a1 is a tuple.*two arguments here"):
        hessian(c, pair)
    with pytest.raises(FlatteningError, match="cvec and rvec"):
        vec_hessian(c, a, vec=torch.ravel)  # type: ignore[arg-type]


@given(shape=shapes)
def test_closed_forms_are_the_criterias_hessians(shape: tuple[int, ...]) -> None:
    f, y = leaf(shape), torch.randn(shape, dtype=torch.float64)
    expected = func.hessian(lambda f: 0.5 * nn.functional.mse_loss(f, y, reduction="sum"))(f.detach())
    assert_close(mse_hessian(f), expected)

    f, labels = leaf((3, *shape)), torch.randint(3, shape)

    def ce(f: Tensor) -> Tensor:
        return nn.functional.cross_entropy(f.unsqueeze(0), labels.unsqueeze(0), reduction="sum")

    assert_close(ce_hessian(f), func.hessian(ce)(f.detach()))


@pytest.mark.parametrize("closed_form", [ce_hessian, mse_hessian])
def test_closed_forms_refuse_integers(closed_form: Any) -> None:
    with pytest.raises(DtypeError, match=r"has dtype torch\.int64"):
        closed_form(torch.tensor([1, 2]))


def test_logits_need_a_class_axis() -> None:
    with pytest.raises(ShapeError, match="one logit per class"):
        ce_hessian(torch.tensor(0.0))


@pytest.mark.parametrize("vec", [cvec, rvec])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_factors_are_square_roots_of_the_criterions_hessian(case: Case, vec: Vec) -> None:
    model, loss, X, y = case.make()
    c = criterion(loss)
    for f, target in zip(model(X).detach(), y, strict=True):
        S = matricize(hessian_factor(loss, f, target), f.ndim, vec)
        H = matricize(func.hessian(lambda f, target=target: c(f, target))(f), f.ndim, vec)
        assert_close(S @ S.T, H)
        if case.name == "ce-mean":
            wrong = f.softmax(0).sqrt().diag() - torch.outer(f.softmax(0).sqrt(), f.softmax(0))
            assert not torch.allclose(wrong @ wrong.T, H)


def test_factors_refuse_the_same_input_as_the_criterion() -> None:
    with pytest.raises(LossError, match="reduction='none'"):
        hessian_factor(nn.MSELoss(reduction="none"), torch.zeros(2), torch.zeros(2))
    with pytest.raises(ShapeError, match="target has shape"):
        hessian_factor(nn.CrossEntropyLoss(), torch.zeros(2), torch.tensor([0]))
    with pytest.raises(LossError, match="negative mass"):
        hessian_factor(nn.CrossEntropyLoss(torch.tensor([-1.0, 1.0])), torch.zeros(2), torch.tensor(0))


def test_factors_convert_probabilities_and_are_detached() -> None:
    f = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    S = hessian_factor(nn.CrossEntropyLoss(), f, torch.tensor([0.5, 0.5], requires_grad=True))
    assert (S.dtype, S.requires_grad) == (torch.float64, False)
    assert not ce_hessian(f).requires_grad
