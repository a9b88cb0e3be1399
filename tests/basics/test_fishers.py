"""Monte Carlo, exact and empirical Fisher, their products, and their relations to each other and to the GGN."""

from collections.abc import Callable
from math import sqrt
from typing import Any

import pytest
import torch
from torch import Tensor, func, nn

from kfs.basics._per_datum import Params
from kfs.basics.emp_fisher_product import empirical_fisher_vp
from kfs.basics.emp_fishers import empirical_fisher, vec_empirical_fisher
from kfs.basics.exact_fishers import (
    expected_labels,
    type1_fisher,
    type2_fisher,
    vec_type1_fisher,
    vec_type2_fisher,
)
from kfs.basics.fisher_kl_metric import kl_divergence
from kfs.basics.flattening import cvec, matricize, rvec
from kfs.basics.ggns import ggn
from kfs.basics.mc_fisher_convergence import one_sample_variance
from kfs.basics.mc_fisher_product import mc_fisher_vp
from kfs.basics.mc_fishers import mc_fisher, vec_mc_fisher
from kfs.basics.reduction_factors import reduction_factor
from kfs.errors import DataError, LossError, ShapeError
from tests.basics.cases import CASES, LIKELIHOODS, Case, assert_close, mlp

Fisher = Callable[[nn.Module, Any, Tensor, Tensor, Params], Tensor]


def parameter_pairs(model: nn.Module) -> list[tuple[str, str]]:
    """The first weight with itself, its bias and the last weight; both biases (some have equal shapes); a bias."""
    W1, b1, W2, b2 = (name for name, _ in model.named_parameters())
    return [(W1, W1), (W1, b1), (W1, W2), (b1, b2), (b1, b1)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_empirical_fisher_is_built_from_pytorchs_own_loss(case: Case) -> None:
    model, loss, X, y = case.make()
    named = dict(model.named_parameters())

    def datum_loss(params: dict[str, Tensor], x: Tensor, target: Tensor) -> Tensor:
        """The loss on a data set of one example, without its reduction: PyTorch's value for reduction="sum"."""
        summed = type(loss)(**{**settings(loss), "reduction": "sum"})
        value: Tensor = summed(func.functional_call(model, params, x.unsqueeze(0)), target.unsqueeze(0))
        return value / 2 if isinstance(loss, nn.MSELoss) else value

    gradients = func.vmap(func.grad(datum_loss), (None, 0, 0))({k: p.detach() for k, p in named.items()}, X, y)
    R = reduction_factor(loss, y)
    for rows, columns in parameter_pairs(model):
        g1, g2 = gradients[rows].flatten(1), gradients[columns].flatten(1)
        expected = R * (g1.T @ g2)
        E = empirical_fisher(model, loss, X, y, (rows, columns))
        assert_close(matricize(E, named[rows].ndim, rvec), expected)
        for vec in (cvec, rvec):
            matrix = vec_empirical_fisher(model, loss, X, y, (named[rows], named[columns]), vec)
            assert_close(matrix, matricize(E, named[rows].ndim, vec))
        v = torch.randn_like(named[columns])
        product = empirical_fisher_vp(model, loss, X, y, (rows, columns), v)
        assert_close(product, torch.tensordot(E, v, dims=v.ndim))


def settings(loss: nn.Module) -> dict[str, Any]:
    if isinstance(loss, nn.MSELoss):
        return {}
    assert isinstance(loss, nn.CrossEntropyLoss)
    return {"weight": loss.weight, "ignore_index": loss.ignore_index, "label_smoothing": loss.label_smoothing}


@pytest.mark.parametrize("case", LIKELIHOODS, ids=str)
def test_both_exact_fishers_are_the_ggn(case: Case) -> None:
    model, loss, X, y = case.make()
    named = dict(model.named_parameters())
    prediction = model(X)
    risk = loss(prediction, y)
    for rows, columns in parameter_pairs(model):
        G = ggn(risk, prediction, named[rows], named[columns])
        one = type1_fisher(model, loss, X, y, (rows, columns))
        two = type2_fisher(model, loss, X, y, (rows, columns))
        assert_close(one, G)
        assert_close(two, G)
        for vec in (cvec, rvec):
            pair, ndim = (rows, columns), named[rows].ndim
            assert_close(vec_type1_fisher(model, loss, X, y, pair, vec), matricize(one, ndim, vec))
            assert_close(vec_type2_fisher(model, loss, X, y, pair, vec), matricize(two, ndim, vec))
    W = parameter_pairs(model)[0][0]
    E = empirical_fisher(model, loss, X, y, W)
    assert (E - type2_fisher(model, loss, X, y, W)).abs().max() > 1e-3  # far beyond round-off


def test_label_rules_have_the_likelihoods_moments() -> None:
    f = torch.randn(2, 2, dtype=torch.float64)
    weights, labels = zip(*expected_labels(nn.MSELoss(), f), strict=True)
    w, y = torch.stack(weights), torch.stack(labels).flatten(1) - f.flatten()
    one, two, three = w.sum(), torch.einsum("k,ki,kj->ij", w, y, y), torch.einsum("k,ki,kj,kl->ijl", w, y, y, y)
    assert_close(one, torch.tensor(1.0, dtype=torch.float64))
    assert_close(w @ y, torch.zeros(4, dtype=torch.float64))
    assert_close(two, torch.eye(4, dtype=torch.float64))
    assert_close(three, torch.zeros(4, 4, 4, dtype=torch.float64))

    pairs = list(expected_labels(nn.CrossEntropyLoss(), f))
    assert len({tuple(label.tolist()) for _, label in pairs}) == 4
    for weight, label in pairs:
        assert_close(weight, f.softmax(0)[label[0], 0] * f.softmax(0)[label[1], 1])


def test_too_many_labels_are_refused() -> None:
    with pytest.raises(DataError, match="10 classes at 5 positions have 100000 combinations"):
        next(expected_labels(nn.CrossEntropyLoss(), torch.zeros(10, 5)))
    assert next(expected_labels(nn.CrossEntropyLoss(), torch.zeros(10, 4)))[1].shape == (4,)


@pytest.mark.parametrize("case", LIKELIHOODS, ids=str)
def test_monte_carlo_fisher_has_the_right_mean(case: Case) -> None:
    """The average over draws comes close to the GGN; wrong variants, in scale or in labels, do not."""
    model, loss, X, y = case.make()
    W = parameter_pairs(model)[0][0]
    prediction = model(X)
    G = ggn(loss(prediction, y), prediction, model.get_parameter(W))
    M = 300
    F = mc_fisher(model, loss, X, y, W, M)

    def error(matrix: Tensor) -> float:
        return float((matrix - G).norm() / G.norm())

    # A squared normal has variance 2, so an average of M outer products errs by about sqrt(2 / M) of its size.
    tolerance = 4 * sqrt(2 / M)
    assert error(F) < tolerance
    for wrong in (F / 2, 2 * F, F / len(X), F * len(X), empirical_fisher(model, loss, X, y, W)):
        assert error(wrong) > tolerance


@pytest.mark.parametrize("case", [c for c in LIKELIHOODS if isinstance(c.loss, nn.CrossEntropyLoss)], ids=str)
def test_monte_carlo_fisher_converges_like_one_over_root_m(case: Case) -> None:
    model, loss, X, y = case.make()
    b = parameter_pairs(model)[-1][0]
    F, V = type1_fisher(model, loss, X, y, b), one_sample_variance(model, loss, X, y, b)
    for M, repeats in ((1, 160), (16, 40)):
        draws = torch.stack([mc_fisher(model, loss, X, y, b, M, seed) for seed in range(repeats)])
        mean_square = ((draws - F) ** 2).flatten(1).sum(1).mean().item()
        # A squared error fluctuates by about its own size, more for M = 1; the mean of many by some 15 percent.
        assert V / M / 1.5 < mean_square < V / M * 1.5


@pytest.mark.parametrize("fisher", [mc_fisher, type1_fisher, type2_fisher, empirical_fisher])
def test_an_example_without_labels_contributes_nothing(fisher: Fisher) -> None:
    model, loss, X, _ = CASES[6].make()
    y = torch.tensor([[0, 1], [-100, -100]])
    both, first = (fisher(model, loss, X[:n], y[:n], "columns.weight") for n in (2, 1))
    assert_close(both, first)  # the mean is over the labels that are not ignored
    summed = nn.CrossEntropyLoss(reduction="sum")
    assert one_sample_variance(model, summed, X[1:2], y[1:], "columns.weight") == 0


class Routed(nn.Module):
    """Sends each example through one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = [(self.left if row[0] > 0 else self.right)(row) for row in x]
        return torch.stack(rows)


def test_data_that_do_not_use_a_parameter_count_as_zero() -> None:
    model, loss = Routed().double(), nn.MSELoss()
    X, y = torch.randn(2, 6, 3, dtype=torch.float64)
    used = X[:, 0] > 0
    assert 0 < used.sum() < 6
    prediction = model(X)
    G = ggn(loss(prediction, y), prediction, model.left.weight)
    for fisher in (type1_fisher, type2_fisher):
        assert_close(fisher(model, loss, X, y, "left.weight"), G)
    E = empirical_fisher(model, loss, X, y, "left.weight")
    assert_close(E, empirical_fisher(model, loss, X[used], y[used], "left.weight") * used.sum() / 6)


def test_convergence_constant_needs_finitely_many_labels() -> None:
    model, X = mlp(), torch.rand(2, 3)
    with pytest.raises(LossError, match="infinitely many labels"):
        one_sample_variance(model, nn.MSELoss(), X, X, "0.weight")


@pytest.mark.parametrize("case", LIKELIHOODS, ids=str)
def test_monte_carlo_matrix_product_and_blocks_use_the_same_draws(case: Case) -> None:
    model, loss, X, y = case.make()
    named = dict(model.named_parameters())
    for rows, columns in parameter_pairs(model):
        F = mc_fisher(model, loss, X, y, (rows, columns), mc_samples=3, seed=7)
        v = torch.randn_like(named[columns])
        product = mc_fisher_vp(model, loss, X, y, (rows, columns), v, mc_samples=3, seed=7)
        assert_close(product, torch.tensordot(F, v, dims=v.ndim))
        for vec in (cvec, rvec):
            matrix = vec_mc_fisher(model, loss, X, y, (rows, columns), 3, 7, vec)
            swapped = vec_mc_fisher(model, loss, X, y, (columns, rows), 3, 7, vec)
            assert_close(matrix, swapped.T)
            assert_close(matrix, matricize(F, named[rows].ndim, vec))
        other = mc_fisher(model, loss, X, y, (rows, columns), mc_samples=3, seed=8)
        assert not torch.allclose(F, other)


# The divergence is over all positions, the Fisher over those whose label is known.
@pytest.mark.parametrize("case", [case for case in LIKELIHOODS if case.name != "ce-ignored"], ids=str)
def test_fisher_is_the_metric_of_the_kl_divergence(case: Case) -> None:
    model, loss, X, y = case.make()
    W = parameter_pairs(model)[0][0]
    R = reduction_factor(loss, y)
    F = type2_fisher(model, loss, X, y, W) / (len(X) * R)
    here, start = model(X).detach(), model.get_parameter(W).detach()

    def mean_kl(delta: Tensor) -> Tensor:
        there = func.functional_call(model, {W: start + delta}, X)
        return torch.stack([kl_divergence(loss, f, g) for f, g in zip(here, there, strict=True)]).mean()

    assert_close(func.hessian(mean_kl)(torch.zeros_like(start)), F)
    step = torch.randn_like(start)
    quadratic = 0.5 * (torch.tensordot(F, step) * step).sum()
    rest = [(mean_kl(t * step) - t**2 * quadratic).abs().item() for t in (2e-3, 1e-3)]
    assert rest[0] / rest[1] == pytest.approx(8, rel=0.05)  # a t^3 term, up to a relative O(t)


def test_kl_divergence_is_that_of_torch_distributions() -> None:
    f, g = torch.randn(2, 3, 4, dtype=torch.float64)
    normals = [torch.distributions.Normal(mean, 1.0) for mean in (f, g)]
    assert_close(kl_divergence(nn.MSELoss(), f, g), torch.distributions.kl_divergence(*normals).sum())
    categoricals = [torch.distributions.Categorical(logits=logits.T) for logits in (f, g)]
    expected = torch.distributions.kl_divergence(*categoricals).sum()
    assert_close(kl_divergence(nn.CrossEntropyLoss(), f, g), expected)
    with pytest.raises(ShapeError, match="other has shape"):
        kl_divergence(nn.MSELoss(), f, g[0])
