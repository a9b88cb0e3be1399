"""The paper's errata, each with the printed formula failing and the corrected one holding."""

import pytest
import torch
from torch import Tensor, func, nn

from kfs.basics.flattening import cvec, rvec, unflatten_cvec, unflatten_rvec
from kfs.basics.forward_pass import output_and_intermediates
from kfs.basics.ggn_rosenbrock import linearized_rosenbrock, rosenbrock_inner, rosenbrock_outer
from kfs.basics.ggns import ggn
from kfs.basics.hessians import hessian
from kfs.basics.jacobian_products import vjp
from kfs.basics.jacobians import vec_jacobian
from kfs.basics.linearization import linearize
from kfs.basics.reduction_factors import reduction_factor
from tests.basics.cases import assert_close, leaf


def test_second_derivative_of_a_composition() -> None:
    x = leaf(())
    h = torch.sin(x)
    c = torch.exp(2 * h)
    h1, h2 = torch.cos(x).detach(), -torch.sin(x).detach()
    g1, g2 = 2 * torch.exp(2 * h).detach(), 4 * torch.exp(2 * h).detach()
    assert_close(hessian(c, x), h1 * g2 * h1 + g1 * h2)
    assert_close(ggn(c, h, x), h1 * g2 * h1)
    assert not torch.allclose(hessian(c, x), g1 * h2 * g1 + h1 * g2)  # as printed


def test_cross_entropy_is_averaged_over_labels_not_logits() -> None:
    N, C, S = 4, 3, 5
    f, y = torch.randn(N, C, S, dtype=torch.float64), torch.randint(C, (N, S))
    R = reduction_factor(nn.CrossEntropyLoss(), y)
    assert pytest.approx(1 / (N * S)) == R
    assert pytest.approx(1 / (N * C * S)) != R  # as printed in the cheatsheet
    total = nn.CrossEntropyLoss(reduction="sum")(f, y)
    assert_close(R * total, nn.CrossEntropyLoss()(f, y))

    weight = torch.tensor([0.5, 1.0, 4.0], dtype=torch.float64)
    y[0, :2] = -100
    weighted = nn.CrossEntropyLoss(weight)
    counted = y[y != -100]
    assert reduction_factor(weighted, y) == pytest.approx(1 / weight[counted].sum().item())
    total = nn.CrossEntropyLoss(weight, reduction="sum")(f, y)
    assert_close(reduction_factor(weighted, y) * total, weighted(f, y))


def test_linearized_rosenbrock_constant_and_sign() -> None:
    alpha = 10.0
    x, anchor = torch.randn(2, 2, dtype=torch.float64)
    tangent = linearize(lambda x: rosenbrock_inner(x, alpha), anchor)
    truth = rosenbrock_outer(tangent(x))
    ours = linearized_rosenbrock(x, anchor, alpha)
    assert_close(ours, truth)
    assert not torch.allclose(ours + alpha * anchor[0] ** 4, truth)  # the printed constant is twice as large
    assert not torch.allclose(ours - 4 * alpha * anchor[0] ** 2 * x[1], truth)  # the printed sign is a minus


def test_shapes_in_kronecker_products_with_a_vector() -> None:
    (n1, n2), (m1, m2) = (2, 3), (4, 5)
    A, B = torch.randn(n1, n2, dtype=torch.float64), torch.randn(m1, m2, dtype=torch.float64)
    v = torch.randn(n2 * m2, dtype=torch.float64)
    truth = torch.kron(A, B) @ v
    assert_close(cvec(B @ unflatten_cvec(v, (m2, n2)) @ A.T), truth)
    assert_close(rvec(A @ unflatten_rvec(v, (n2, m2)) @ B.T), truth)
    with pytest.raises(RuntimeError):
        B @ unflatten_cvec(v, (n2, m2))  # as printed
    with pytest.raises(RuntimeError):
        A @ unflatten_rvec(v, (m2, n2))  # as printed


def test_kronecker_structure_needs_the_layers_output() -> None:
    """The Jacobian is that of a layer's output, and the vector is pulled back to that output."""
    first = nn.Linear(3, 3, bias=False)
    model = nn.Sequential(first, nn.Tanh(), nn.Linear(3, 3, bias=False)).double()
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    f, layers = output_and_intermediates(model, x, ["0"])
    layer, vector = layers["0"], torch.randn_like(f)
    pulled_back = vec_jacobian(f, first.weight, cvec).T @ vector
    assert_close(pulled_back, torch.kron(x.detach(), vjp(f, layer.output, vector)))
    assert not torch.allclose(pulled_back, torch.kron(x.detach(), vjp(f, layer.input, vector)))


def test_convexity_of_both_functions_is_not_enough() -> None:
    def inner(x: Tensor) -> Tensor:
        return x**2 - 1

    def outer(h: Tensor) -> Tensor:
        return h**2

    zero = torch.tensor(0.0, dtype=torch.float64)
    assert func.hessian(inner)(zero) > 0
    assert func.hessian(outer)(zero) > 0
    assert func.hessian(lambda x: outer(inner(x)))(zero) < 0
    tangent = linearize(inner, zero)
    assert func.hessian(lambda x: outer(tangent(x)))(zero) >= 0
