"""The paper's errata: the printed formula fails, and the corrected one holds."""

import pytest
import torch
from torch import Tensor, distributions, func, nn

from kfs.basics.emp_fishers import vec_empirical_fisher
from kfs.basics.exact_fishers import vec_type1_fisher
from kfs.basics.flattening import cvec, rvec, unflatten_cvec, unflatten_rvec
from kfs.basics.forward_pass import output_and_intermediates
from kfs.basics.ggn_rosenbrock import linearized_rosenbrock, rosenbrock_ggn, rosenbrock_inner, rosenbrock_outer
from kfs.basics.ggns import ggn, vec_ggn
from kfs.basics.hessian_product import hvp
from kfs.basics.hessians import hessian, vec_hessian
from kfs.basics.jacobian_products import vjp
from kfs.basics.jacobians import vec_jacobian
from kfs.basics.label_sampling import sample_label
from kfs.basics.linearization import linearize
from kfs.basics.mc_fishers import vec_mc_fisher
from kfs.basics.reduction_factors import criterion, reduction_factor
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
    """The Jacobian of a layer's output, and the vector pulled back to that output."""
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


def test_a_hessian_vector_product_has_a_vector() -> None:
    a, v = leaf((3,)), torch.randn(3, dtype=torch.float64)
    b = torch.sin(a).prod()
    H = hessian(b, a)
    assert_close(hvp(b, a, v), H @ v)
    assert hvp(b, a, v).shape != H.shape  # as printed, the product is the matrix


def test_the_jacobian_of_the_rosenbrock_function_is_that_at_the_anchor() -> None:
    alpha = 10.0
    x, anchor = torch.randn(2, 2, dtype=torch.float64)

    def product(point: Tensor) -> Tensor:
        J: Tensor = func.jacrev(rosenbrock_inner)(point, alpha)
        return 2 * J.T @ J

    assert_close(product(anchor), rosenbrock_ggn(anchor, alpha))
    assert not torch.allclose(product(x), rosenbrock_ggn(anchor, alpha))  # as printed, with entries of another point


@pytest.mark.parametrize(("activation", "equal"), [(nn.ReLU(), True), (nn.Sigmoid(), False)])
def test_diagonal_blocks_tell_the_activation_of_the_figures(activation: nn.Module, equal: bool) -> None:
    """With ReLU, as the captions say, diagonal blocks of Hessian and GGN are equal; with Sigmoid they are not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), activation, nn.Linear(4, 4), activation, nn.Linear(4, 3)).double()
    f = model(torch.rand(20, 5, dtype=torch.float64))
    risk = nn.MSELoss()(f, torch.rand(20, 3, dtype=torch.float64))
    for parameter in list(model.parameters())[:-2]:  # the last layer is linear in both networks
        assert torch.allclose(vec_hessian(risk, parameter), vec_ggn(risk, f, parameter)) == equal


class Draws:
    """Would-be gradients of a network's prediction, each with its example's Jacobian, and their sum."""

    M, seed = 7, 3

    def __init__(self, loss: nn.MSELoss | nn.CrossEntropyLoss) -> None:
        self.model, self.loss = nn.Linear(3, 2).double(), loss
        self.X = torch.randn(4, 3, dtype=torch.float64)
        self.y = torch.randn(4, 2, dtype=torch.float64) if isinstance(loss, nn.MSELoss) else torch.randint(2, (4,))
        self.W = self.model.weight
        generator = torch.Generator().manual_seed(self.seed)
        self.J, self.g = [], []  # per example: [2, 6] and [2, M]
        for x in self.X:
            f = self.model(x)
            self.J.append(vec_jacobian(f, self.W).detach())
            labels = [sample_label(loss, f.detach(), generator) for _ in range(self.M)]
            gradients = [func.grad(criterion(loss))(f.detach(), label) for label in labels]
            self.g.append(torch.stack(gradients, dim=1))
        self.fisher = vec_mc_fisher(self.model, loss, self.X, self.y, self.W, self.M, self.seed)
        self.R = reduction_factor(loss, self.y)


@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.CrossEntropyLoss(reduction="sum")], ids=str)
def test_the_self_outer_product_sums_over_draws_already(loss: nn.MSELoss | nn.CrossEntropyLoss) -> None:
    draws = Draws(loss)
    S = [g / draws.M**0.5 for g in draws.g]
    terms = [J.T @ S_n @ S_n.T @ J for J, S_n in zip(draws.J, S, strict=True)]
    assert_close(draws.R * torch.stack(terms).sum(0), draws.fisher)
    printed = draws.R * torch.stack([term for term in terms for _ in range(draws.M)]).sum(0)  # over n and m
    assert_close(printed, draws.M * draws.fisher)


@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.CrossEntropyLoss(reduction="sum")], ids=str)
def test_the_fisher_of_the_cheatsheet_sums_over_draws(loss: nn.MSELoss | nn.CrossEntropyLoss) -> None:
    """Without the sum over m, as printed, one label per example remains, and for no m is it the Fisher."""
    draws = Draws(loss)

    def term(m: int) -> Tensor:
        columns = torch.stack([J.T @ g[:, m] for J, g in zip(draws.J, draws.g, strict=True)], dim=1)
        return draws.R / draws.M * columns @ columns.T

    assert_close(torch.stack([term(m) for m in range(draws.M)]).sum(0), draws.fisher)
    assert not any(torch.allclose(term(m), draws.fisher, rtol=1e-2) for m in range(draws.M))


def test_the_likelihood_of_the_cheatsheet_has_another_minimizer() -> None:
    """The divergence and the expectation over the data's labels have the same minimizer; the printed one differs."""
    p_data = torch.tensor([0.8, 0.2], dtype=torch.float64)
    theta = torch.linspace(0.01, 0.99, 99, dtype=torch.float64)  # the model's probability of the second label
    model = torch.stack([1 - theta, theta], dim=1)
    divergence = distributions.kl_divergence(distributions.Categorical(p_data), distributions.Categorical(model))
    over_data = -(p_data * model.log()).sum(1)
    printed = -(model * model.log()).sum(1)  # the expectation over the model's own labels
    assert theta[divergence.argmin()].item() == pytest.approx(0.2)
    assert theta[over_data.argmin()].item() == pytest.approx(0.2)
    certain = [0.01, 0.99]  # both ends of the interval, up to round-off
    assert min(abs(theta[printed.argmin()].item() - end) for end in certain) < 1e-12
    assert_close(printed, distributions.Categorical(model).entropy())


def test_the_empirical_fisher_has_the_labels_of_the_data() -> None:
    """With drawn labels, as printed, the expectation is the type-I Fisher."""
    torch.manual_seed(0)
    model, loss = nn.Linear(3, 2).double(), nn.MSELoss()
    X, y = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    E = vec_empirical_fisher(model, loss, X, y, model.weight)

    def with_labels(labels: Tensor) -> Tensor:
        f = model(X)
        columns = [vec_jacobian(f_n, model.weight).T @ (f_n - y_n) for f_n, y_n in zip(f, labels, strict=True)]
        V = torch.stack(columns, dim=1).detach()
        return reduction_factor(loss, y) * V @ V.T

    assert_close(with_labels(y), E)
    # 4000 drawn data sets: the error of the mean is about sqrt(2 / 4000 / 5), 1 percent; E differs by more.
    drawn = torch.stack([with_labels(torch.normal(model(X).detach(), 1.0)) for _ in range(4000)]).mean(0)
    F = vec_type1_fisher(model, loss, X, y, model.weight)
    assert (drawn - F).norm() < 0.05 * F.norm()
    assert (E - F).norm() > 0.2 * F.norm()
