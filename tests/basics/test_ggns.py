"""Linearization, GGN products and GGNs, and the worked examples."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, func

from kfs.basics.flattening import Vec, cvec, rvec
from kfs.basics.ggn_product import ggnvp, mixed_ggnvp
from kfs.basics.ggn_rosenbrock import (
    linearized_rosenbrock,
    rosenbrock_ggn,
    rosenbrock_hessian,
    rosenbrock_inner,
    rosenbrock_outer,
)
from kfs.basics.ggns import ggn, vec_ggn
from kfs.basics.ggns_linear_regression import linear_regression_ggn
from kfs.basics.hessians import hessian
from kfs.basics.linearization import linearize
from kfs.errors import DtypeError, FlatteningError, GraphError, ShapeError
from tests.basics.cases import CASES, Case, assert_close, leaf, shapes, smooth_function


def test_a_prediction_without_a_graph_is_refused() -> None:
    a = leaf((3,))
    b = a**2
    with pytest.raises(GraphError, match="b is not part of a computation graph"):
        ggnvp((b**2).sum(), b.detach(), a, torch.ones_like(a))


@given(in_shape=shapes, out_shape=shapes)
def test_linearization_is_the_tangent(in_shape: tuple[int, ...], out_shape: tuple[int, ...]) -> None:
    f, anchor = smooth_function(in_shape, out_shape), leaf(in_shape)
    tangent = linearize(f, anchor)
    point = torch.randn(in_shape, dtype=torch.float64)
    value, slope = func.jvp(f, (anchor.detach(),), (point - anchor.detach(),))[:2]
    assert_close(tangent(point), value + slope)
    assert_close(func.jacfwd(f)(anchor.detach()), func.jacrev(tangent)(point))
    assert anchor.grad is None


def test_linearization_works_without_grad_mode_and_checks_its_argument() -> None:
    with torch.no_grad():
        tangent = linearize(torch.exp, torch.zeros(2))
        assert_close(tangent(torch.ones(2)), torch.full((2,), 2.0))
    with pytest.raises(ShapeError, match="a has shape"):
        tangent(torch.ones(3))
    with pytest.raises(DtypeError, match=r"anchor has dtype torch\.int64"):
        linearize(torch.exp, torch.zeros(2, dtype=torch.long))
    with pytest.raises(GraphError, match="value is not part of a computation graph"):
        linearize(lambda a: torch.ones(2), torch.zeros(2))  # noqa: ARG005
    with pytest.raises(DtypeError, match="value is a tuple"):
        linearize(lambda a: (a, a), torch.zeros(2))  # type: ignore[arg-type, return-value]


@given(shape1=shapes, shape2=shapes, mid_shape=shapes)
def test_ggn_is_jacobian_hessian_jacobian(
    shape1: tuple[int, ...], shape2: tuple[int, ...], mid_shape: tuple[int, ...]
) -> None:
    h1, h2, g = smooth_function(shape1, mid_shape), smooth_function(shape2, mid_shape), smooth_function(mid_shape, ())

    def h(a1: Tensor, a2: Tensor) -> Tensor:
        return h1(a1) * h2(a2)

    a = (leaf(shape1), leaf(shape2))
    b = h(*a)
    c = g(b)
    J = func.jacrev(h, argnums=(0, 1))(*(t.detach() for t in a))
    H = func.hessian(g)(b.detach()).reshape(b.numel(), b.numel())
    for i, rows in enumerate(a):
        for j, columns in enumerate(a):
            left, right = J[i].reshape(b.numel(), -1), J[j].reshape(b.numel(), -1)
            expected = (left.T @ H @ right).reshape((*rows.shape, *columns.shape))
            # Entries grow with products of several sums: allow round-off relative to the largest one, and ten times
            # that for products, which add up several of them.
            atol = 1e-12 * max(1.0, expected.abs().max().item())
            assert_close(ggn(c, b, rows, columns), expected, atol)
            v = torch.randn_like(columns)
            product = torch.tensordot(expected, v, dims=v.ndim)
            assert_close(mixed_ggnvp(c, b, rows, columns, v), product, 10 * atol)
            if i == j:
                assert_close(ggn(c, b, rows), expected, atol)
                assert_close(ggnvp(c, b, rows, v), product, 10 * atol)
            for vec, order in ((cvec, "F"), (rvec, "C")):
                matrix = np.reshape(expected.numpy(), (rows.numel(), columns.numel()), order=order)  # type: ignore[call-overload]
                assert_close(vec_ggn(c, b, rows, columns, vec), torch.from_numpy(matrix.copy()), atol)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ggn_of_a_network_is_the_linearized_risks_hessian(case: Case) -> None:
    model, loss, X, y = case.make()
    name, W = next(iter(model.named_parameters()))
    prediction = model(X)
    G = ggn(loss(prediction, y), prediction, W)

    tangent = linearize(lambda w: func.functional_call(model, {name: w}, X), W)
    assert_close(G, func.hessian(lambda w: loss(tangent(w), y))(W.detach()))
    assert (G - hessian(loss(prediction, y), W)).abs().max() > 1e-4  # far beyond round-off


def test_parameters_and_predictions_of_two_dtypes_are_refused() -> None:
    a = torch.ones(2, requires_grad=True)
    b = a.double() ** 2
    with pytest.raises(DtypeError, match=r"a1 is torch\.float32 on cpu, but b is torch\.float64"):
        ggn((b**2).sum(), b, a)


def test_linearization_does_not_follow_later_changes_of_the_anchor() -> None:
    anchor = torch.zeros(2)
    tangent = linearize(torch.exp, anchor)
    anchor += 1
    assert_close(tangent(torch.zeros(2)), torch.ones(2))
    assert not tangent(torch.zeros(2)).requires_grad


def test_rosenbrock_points_are_checked() -> None:
    for point, alpha in ((torch.zeros(3), 1.0), (torch.zeros(2), -1.0)):
        with pytest.raises(ShapeError, match=r"point of shape \[2\] and alpha > 0"):
            rosenbrock_ggn(point, alpha)


def test_an_outer_function_without_curvature_has_no_ggn() -> None:
    a = leaf((3,))
    b = a**3
    assert_close(ggn(b.sum(), b, a), torch.zeros(3, 3, dtype=torch.float64))


def test_a_wrong_split_is_refused() -> None:
    a = leaf((3,))
    b = torch.sin(a)
    c = (b**2).sum()
    v = torch.ones_like(a)
    with pytest.raises(GraphError, match="was not computed from"):
        ggnvp(c, torch.cos(a), a, v)
    with pytest.raises(GraphError, match="was not computed from"):
        ggn(c, b, leaf((3,)))
    with pytest.raises(ShapeError, match="c has shape"):
        ggn(b**2, b, a)
    with pytest.raises(ShapeError, match="v has shape"):
        ggnvp(c, b, a, v[:2])
    with pytest.raises(FlatteningError, match="cvec and rvec"):
        vec_ggn(c, b, a, vec="fvec")  # type: ignore[arg-type]
    with pytest.raises(DtypeError, match="a2 is a function"):
        vec_ggn(c, b, a, cvec)  # type: ignore[arg-type]


@pytest.mark.parametrize("vec", ["rvec", rvec])
def test_the_papers_order_of_arguments_is_refused(vec: str | Vec) -> None:
    """The printed listings have the prediction last; the error says what to write."""
    p = leaf((3, 2))
    output = torch.sin(p)
    loss = (output**2).sum()
    with pytest.raises(DtypeError, match=r"printed order is vec_ggn\(.* Here: vec_ggn\(loss, output, p, vec=rvec\)"):
        vec_ggn(loss, p, output, vec)  # type: ignore[arg-type]
    with pytest.raises(GraphError, match=r"printed order is ggn\(.* Here: ggn\(loss, output, p\)"):
        ggn(loss, p, output)
    with pytest.raises(GraphError, match=r"printed order is ggnvp\(.* Here: ggnvp\(loss, output, p, v\)"):
        ggnvp(loss, p, output, torch.ones_like(p))
    pair: Any = (p, p)  # an off-diagonal block, as the paper writes it
    with pytest.raises(DtypeError, match=r"printed order is ggn\(.* or ggn\(loss, output, p1, p2\)"):
        ggn(loss, pair, output)
    with pytest.raises(DtypeError, match=r"printed order is ggnvp\(.* or mixed_ggnvp\(loss, output, p1, p2, v\)"):
        ggnvp(loss, pair, output, torch.ones_like(p))


def test_an_intermediate_result_may_be_the_variable() -> None:
    """The check of the order must accept a variable that was computed, if it was not computed from the prediction."""
    x = leaf((3,))
    a = torch.sin(x)
    b = a**2
    c = (b**2).sum()
    expected = torch.diag(8 * a.detach() ** 2)
    assert_close(ggn(c, b, a), expected)
    assert_close(ggnvp(c, b, a, torch.ones_like(a)), expected.diagonal())
    assert_close(ggn(c, a, a), torch.diag(12 * a.detach() ** 2))


@given(x=st.tuples(*[st.floats(-2, 2)] * 2), anchor=st.tuples(*[st.floats(-2, 2)] * 2), alpha=st.floats(0.1, 20))
def test_rosenbrock_closed_forms(x: tuple[float, float], anchor: tuple[float, float], alpha: float) -> None:
    p, q = torch.tensor(x, dtype=torch.float64), torch.tensor(anchor, dtype=torch.float64)

    def f(x: Tensor) -> Tensor:
        return (1 - x[0]) ** 2 + alpha * (x[1] - x[0] ** 2) ** 2  # the usual definition of the function

    tangent = linearize(lambda x: rosenbrock_inner(x, alpha), q)
    atol = 1e-10  # values reach several thousand here
    assert_close(rosenbrock_outer(rosenbrock_inner(p, alpha)), f(p), atol)
    assert_close(rosenbrock_hessian(p, alpha), func.hessian(f)(p), atol)
    assert_close(linearized_rosenbrock(p, q, alpha), rosenbrock_outer(tangent(p)), atol)
    assert_close(rosenbrock_ggn(q, alpha), func.hessian(lambda x: rosenbrock_outer(tangent(x)))(p), atol)


@pytest.mark.parametrize("vec", [cvec, rvec])
def test_linear_regression_is_a_kronecker_product(vec: Vec) -> None:
    W, X, Y = leaf((2, 3)), torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    prediction = X @ W.T
    loss = 0.5 * ((prediction - Y) ** 2).sum()
    closed_form = linear_regression_ggn(X, 2, vec)
    assert_close(vec_ggn(loss, prediction, W, vec=vec), closed_form)
    assert not torch.allclose(vec_ggn(loss, prediction, W, vec=cvec if vec is rvec else rvec), closed_form)
    with pytest.raises(ShapeError, match="expected a matrix"):
        linear_regression_ggn(X[0], 2, vec)
    with pytest.raises(FlatteningError, match="cvec and rvec"):
        linear_regression_ggn(X, 2, "fvec")  # type: ignore[arg-type]
