"""All loss descriptions against PyTorch's own values, automatic differentiation, and their own draws."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, func, nn
from torch.autograd.functional import hessian
from torch.distributions import Bernoulli, Categorical, Independent, Normal

from kfs.errors import DataError, DtypeError, LossError, ShapeError
from kfs.losses import Custom, Loss, RewardPair, TokenCrossEntropy, describe
from kfs.losses.binary import BinaryCrossEntropy
from kfs.losses.draws import Draws
from kfs.losses.gaussian import Gaussian
from tests.losses.cases import CASES, Case, double_well, log_cosh

all_cases = pytest.mark.parametrize("case", CASES, ids=str)
# Round-off of float64, times the few hundred operations behind an entry.
TOLERANCE = 1e-11


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE, atol=TOLERANCE)


def dense(loss: Loss, f: Tensor, y: Tensor) -> Tensor:
    """Every example's Hessian by autodiff, `[N, size, size]`.

    It uses reverse mode twice, because PyTorch clamps variances without gradients, which forward mode does not support.
    """
    size = f[0].numel()
    H = [
        hessian(lambda f, y=y[n : n + 1]: loss.criterion(f.unsqueeze(0), y).sum(), f[n]).reshape(size, size)
        for n in range(len(f))
    ]
    return torch.stack(H)


def squared(S: Tensor) -> Tensor:
    """Sum of outer products of columns `[K, N, ...]`, per example."""
    S = S.reshape(*S.shape[:2], -1)
    return torch.einsum("kni,knj->nij", S, S)


@all_cases
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_value_is_pytorchs(case: Case, reduction: str) -> None:
    loss, f, y = case.make()
    loss.check(f, y)
    mean, total = case.pytorch(f, y), loss.criterion(f, y).sum()
    assert loss.criterion(f, y).shape == (len(f),)
    close(loss.reduction_factor(loss.count(y)) * total, mean)
    if reduction == "sum" and isinstance(case.loss, nn.Module) and not case.value:
        module = copy.copy(case.loss)
        module.reduction = "sum"  # type: ignore[assignment]
        close(describe(module).reduction_factor(loss.count(y)) * total, module(f, y))


@all_cases
def test_deviance_is_the_distance_to_the_smallest_criterion(case: Case) -> None:
    loss, f, y = case.make()
    if isinstance(loss, Custom):
        close(loss.deviance(f, y), loss.criterion(f, y))  # The smallest value is not known.
        return
    if isinstance(loss, Gaussian):  # The variance is fixed: otherwise the criterion would have no minimum.
        right = torch.stack([y, f[:, 1]], 1)
        close(loss.deviance(f, y), loss.criterion(f, y) - loss.criterion(right, y))
        return
    best = f.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([best], max_iter=500, line_search_fn="strong_wolfe", tolerance_grad=1e-12)

    def closure() -> Tensor:
        optimizer.zero_grad()
        total = loss.criterion(best, y).sum()
        total.backward()
        return total

    optimizer.step(closure)
    smallest = loss.criterion(best.detach(), y)
    # With labels, the smallest criterion, zero, is at infinity. Some hundred steps come this close.
    torch.testing.assert_close(loss.deviance(f, y), loss.criterion(f, y) - smallest, rtol=1e-5, atol=1e-5)


@all_cases
def test_counts_add_up(case: Case) -> None:
    loss, _, y = case.make()
    assert loss.count(y[:1]) + loss.count(y[1:]) == pytest.approx(loss.count(y))


@all_cases
def test_derivatives_are_autodiffs(case: Case) -> None:
    loss, f, y = case.make()
    close(loss.gradient(f, y), func.grad(lambda f: loss.criterion(f, y).sum())(f))
    H = dense(loss, f, y)
    v = torch.randn(2, 3, *f.shape, dtype=f.dtype)
    expected = torch.einsum("nij,abnj->abni", H, v.reshape(2, 3, len(f), -1)).reshape(v.shape)
    close(loss.hessian_product(f, y, v), expected)
    close(loss.hessian_product(f, y, v[0, 0]), expected[0, 0])


@all_cases
def test_factors_are_roots_of_the_hessian_where_it_is_convex(case: Case) -> None:
    loss, f, y = case.make()
    if case.convex:
        close(squared(loss.hessian_factor(f, y)), dense(loss, f, y))
    else:
        with pytest.raises(LossError, match="no symmetric factor"):
            loss.hessian_factor(f, y)


@all_cases
def test_fisher_is_the_covariance_of_sampled_gradients(case: Case) -> None:
    loss, f, y = case.make()
    samples = 400
    if case.fisher == "none":
        calls: list[Callable[[], Tensor]] = [
            lambda: loss.fisher_factor(f, y),
            lambda: loss.fisher_product(f, y, f),
            lambda: loss.sampled_gradient(f, y, Draws(0, 0, 0)),
        ]
        for call in calls:
            with pytest.raises(LossError, match=r"no Fisher matrix and no labels to draw.*likelihood="):
                call()
        return
    g = torch.stack([loss.sampled_gradient(f, y, Draws(0, 0, m)) for m in range(samples)])
    assert g.dtype == f.dtype
    covariance = squared(g) / samples
    if case.fisher == "draws":
        with pytest.raises(LossError, match="no closed form here"):
            loss.fisher_factor(f, y)
        F = dense(loss, f, y)
    else:
        F = squared(loss.fisher_factor(f, y))
        if case.fisher == "equal":
            close(F, dense(loss, f, y))
        else:
            assert not torch.allclose(F, dense(loss, f, y), atol=1e-3)
        v = torch.randn(2, *f.shape, dtype=f.dtype)
        product = torch.einsum("nij,anj->ani", F, v.reshape(2, len(f), -1)).reshape(v.shape)
        close(loss.fisher_product(f, y, v), product)
    # Averages of products of fourth moment near 3 err by sqrt(2 / samples); counts have heavier tails.
    scale = F.abs().amax((1, 2), keepdim=True).clamp(min=1e-12)
    assert ((covariance - F) / scale).abs().max() < 8 * (2 / samples) ** 0.5
    mean = g.mean(0).reshape(len(f), -1) / scale.squeeze(2).sqrt()
    assert mean.abs().max() < 5 / samples**0.5


@pytest.mark.parametrize("case", [c for c in CASES if c.fisher != "none"], ids=str)
def test_draws_do_not_depend_on_the_batch_split(case: Case) -> None:
    loss, f, y = case.make()
    together = loss.sampled_gradient(f, y, Draws(5, 10, 1))
    apart = [loss.sampled_gradient(f[n : n + 1], y[n : n + 1], Draws(5, 10 + n, 1)) for n in range(len(f))]
    close(torch.cat(apart), together)
    state = torch.get_rng_state()
    other = loss.sampled_gradient(f, y, Draws(6, 10, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(other, together)


class Sub(nn.MSELoss):
    pass


@pytest.mark.parametrize("loss", [nn.L1Loss(), Sub(), 3, None], ids=str)
def test_unknown_losses_are_refused(loss: Any) -> None:
    with pytest.raises(LossError, match=r"is not supported\. Use one of \['MSELoss'"):
        describe(loss)


def test_bad_settings_are_refused() -> None:
    for make in (nn.MSELoss, nn.CrossEntropyLoss, nn.HuberLoss):
        with pytest.raises(LossError, match="reduction='none'"):
            describe(make(reduction="none"))
    with pytest.raises(LossError, match="beta=0 is the absolute value"):
        describe(nn.SmoothL1Loss(beta=0.0))
    with pytest.raises(LossError, match="negative='drop' is unknown"):
        Custom(log_cosh, negative="drop")  # type: ignore[arg-type]
    with pytest.raises(LossError, match="neither a supported loss module nor a function"):
        Custom(3)  # type: ignore[arg-type]


def test_clipping_drops_the_negative_part() -> None:
    f, y = torch.tensor([[0.1, 3.0]], dtype=torch.float64), torch.ones(1, 2, dtype=torch.float64)
    loss = Custom(double_well, negative="clip")
    H = dense(loss, f, y)
    assert H[0, 0, 0] < 0 < H[0, 1, 1]
    close(squared(loss.hessian_factor(f, y)), H.clamp(min=0))


def nearly_convex(f: Tensor, y: Tensor) -> Tensor:
    """A Hessian with the eigenvalues 1 and -1e-6, for any prediction."""
    return 0.5 * (f[0] ** 2 - 1e-6 * f[1] ** 2) + 0 * y.sum()


def square_of_the_sum(f: Tensor, y: Tensor) -> Tensor:
    """A Hessian of rank one; the solver finds its zero eigenvalues up to round-off, so some are negative."""
    return 0.5 * (f.sum() - y.sum()) ** 2


def test_negative_eigenvalues_are_told_from_round_off() -> None:
    f, y = torch.randn(3, 2, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64)
    with pytest.raises(LossError, match=r"nearly_convex is not convex.*eigenvalue -1\.00e-06"):
        describe(nearly_convex).hessian_factor(f, y)
    f, y = torch.randn(3, 7, dtype=torch.float64), torch.randn(3, 7, dtype=torch.float64)
    ones = torch.ones(3, 7, 7, dtype=torch.float64)
    assert torch.linalg.eigvalsh(ones).min() < 0
    close(squared(describe(square_of_the_sum).hessian_factor(f, y)), ones)


@pytest.mark.parametrize("module", [nn.HuberLoss(delta=0.5), nn.SmoothL1Loss(beta=0.5)])
def test_curvature_at_a_kink_is_that_of_the_linear_side(module: Any) -> None:
    loss = describe(module)
    kinks = torch.tensor([[0.5, -0.5]], dtype=torch.float64)
    y, v = torch.zeros_like(kinks), torch.ones_like(kinks)
    beyond, before = torch.nextafter(kinks, 2 * kinks), torch.nextafter(kinks, y)
    assert torch.equal(loss.hessian_product(kinks, y, v), loss.hessian_product(beyond, y, v))
    assert torch.equal(loss.hessian_product(beyond, y, v), torch.zeros_like(v))
    assert torch.equal(loss.hessian_product(before, y, v), v)


def many(f: Tensor, y: Tensor) -> Tensor:
    return f - y


@pytest.mark.parametrize(
    ("loss", "f", "y", "error", "message"),
    [
        (nn.MSELoss(), torch.zeros(2, 3), torch.zeros(2, 1), ShapeError, "not broadcast"),
        (nn.MSELoss(), torch.zeros(2, 3), torch.zeros(2, 3).long(), DtypeError, "targets have dtype torch.int64"),
        (nn.CrossEntropyLoss(), torch.zeros(2), torch.zeros(2).long(), ShapeError, "no class axis"),
        (nn.CrossEntropyLoss(), torch.zeros(2, 3), torch.zeros(2).int(), DtypeError, "y.long"),
        (nn.CrossEntropyLoss(), torch.zeros(2, 5, 3), torch.zeros(2, 5).long(), ShapeError, "TokenCrossEntropy"),
        (nn.CrossEntropyLoss(ignore_index=1), torch.zeros(2, 3), torch.zeros(2, 3), LossError, "ignore_index=1"),
        (
            nn.CrossEntropyLoss(),
            torch.zeros(2, 3),
            torch.tensor([0, 3]),
            DataError,
            "from 0 to 3, but there are 3 classes",
        ),
        (nn.CrossEntropyLoss(), torch.zeros(2, 3), torch.tensor([0, -1]), DataError, "from -1 to 0"),
        (
            nn.CrossEntropyLoss(torch.ones(2)),
            torch.zeros(2, 3),
            torch.tensor([0, 1]),
            ShapeError,
            "one weight per class",
        ),
        (TokenCrossEntropy(), torch.zeros(2, 3), torch.zeros(2).long(), ShapeError, r"logits \[N, S, C\]"),
        (nn.GaussianNLLLoss(), torch.zeros(2, 3), torch.zeros(2), ShapeError, "stacked along axis 1"),
        (nn.GaussianNLLLoss(), -torch.ones(2, 2), torch.zeros(2), LossError, "negative variance"),
        (many, torch.zeros(2, 3), torch.zeros(2, 3), ShapeError, r"many returned shape \[3\] for one example"),
        (lambda f, y: 1.0, torch.zeros(2, 3), torch.zeros(2, 3), DtypeError, "returned a float"),  # noqa: ARG005
    ],
)
def test_mismatched_data_are_refused(loss: Any, f: Tensor, y: Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        describe(loss).check(f, y)


def test_labels_are_checked_before_their_weights_are_counted() -> None:
    loss = describe(nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0])))
    assert loss.count(torch.tensor([1, 0, -100, 1])) == 5
    for wrong in ([0, 2], [-1, 0]):
        with pytest.raises(DataError, match="but there are 2 classes"):
            loss.count(torch.tensor(wrong))
    with pytest.raises(DtypeError, match=r"y\.long\(\)"):
        loss.count(torch.tensor([0, 1], dtype=torch.uint8))


@pytest.mark.parametrize(
    ("function", "module"),
    [
        (nn.functional.mse_loss, nn.MSELoss()),
        (nn.functional.cross_entropy, nn.CrossEntropyLoss()),
        (nn.functional.binary_cross_entropy_with_logits, nn.BCEWithLogitsLoss()),
        (nn.functional.poisson_nll_loss, nn.PoissonNLLLoss()),
        (nn.functional.huber_loss, nn.HuberLoss()),
        (nn.functional.smooth_l1_loss, nn.SmoothL1Loss()),
    ],
)
def test_functions_of_pytorch_are_their_modules(function: Any, module: nn.Module) -> None:
    """This includes examples with different numbers of counted positions: a mean is over all positions."""
    f = torch.rand(4, 3, 2, dtype=torch.float64)
    y: Tensor = torch.rand(4, 3, 2, dtype=torch.float64)
    if isinstance(module, nn.CrossEntropyLoss):
        y = torch.tensor([[0, 1], [2, -100], [1, 1], [0, 2]])
    loss = describe(function)
    assert type(loss) is type(describe(module))
    close(loss(f, y), function(f, y))


def test_likelihoods_that_cannot_be_summed_or_drawn_are_refused() -> None:
    loss = Custom(log_cosh, likelihood=lambda f: Categorical(logits=f))
    f = torch.zeros(2, 4, 3)  # four labels of three classes per example
    with pytest.raises(LossError, match=r"\[4\] independent labels per example"):
        loss.fisher_factor(f, f)
    rate = describe(nn.PoissonNLLLoss(log_input=False))
    with pytest.raises(LossError, match="negative or infinite rate"):
        rate.sampled_gradient(-torch.ones(2, 1), torch.ones(2, 1), Draws(0, 0, 0))
    Custom(log_cosh).check(torch.zeros(0, 2), torch.zeros(0, 2))  # there are no examples to check


def first_entry(f: Tensor) -> Normal:
    return Normal(f[0], 1.0)


def test_likelihoods_are_those_of_one_datum() -> None:
    f, y = torch.randn(6, 1, dtype=torch.float64), torch.randn(6, 1, dtype=torch.float64)
    ours = Custom(log_cosh, likelihood=first_entry)
    other = Custom(log_cosh, likelihood=lambda f: Independent(Normal(f, torch.ones_like(f)), 1))
    close(ours.sampled_gradient(f, y, Draws(0, 0, 0)), other.sampled_gradient(f, y, Draws(0, 0, 0)))
    coin = Custom(log_cosh, likelihood=lambda f: Bernoulli(logits=f[0]))
    close(squared(coin.fisher_factor(f, y)).squeeze(2), f.sigmoid() * (-f).sigmoid())


@pytest.mark.parametrize(
    ("loss", "f", "y"),
    [
        (nn.BCEWithLogitsLoss(pos_weight=torch.tensor(0.1)), torch.zeros(2, 1), torch.full((2, 1), 3.0)),
        (nn.CrossEntropyLoss(), torch.zeros(2, 3), torch.full((2, 3), -1.0)),
        (nn.PoissonNLLLoss(log_input=False), torch.ones(2, 1), torch.full((2, 1), -1.0)),
    ],
)
def test_targets_of_negative_curvature_have_no_factor(loss: Any, f: Tensor, y: Tensor) -> None:
    with pytest.raises(LossError, match="negative curvature"):
        describe(loss).hessian_factor(f, y)


def test_settings_and_targets_follow_the_predictions_dtype() -> None:
    f = torch.randn(4, 3, dtype=torch.float64)
    weight = torch.tensor([0.5, 1.0, 3.0])
    losses: list[tuple[Any, Tensor]] = [
        (nn.CrossEntropyLoss(weight), torch.randint(3, (4,))),
        (nn.CrossEntropyLoss(), torch.rand(4, 3).softmax(1)),
        (nn.HuberLoss(), torch.randn(4, 3)),
        (nn.BCEWithLogitsLoss(), torch.rand(4, 3)),
    ]
    for module, y in losses:
        loss = describe(module)
        leaf = f.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss.criterion(leaf, y).sum(), leaf)
        torch.testing.assert_close(loss.gradient(f, y), gradient)


@all_cases
@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_stand_ins_have_the_same_fisher(case: Case, scale: float) -> None:
    """Targets that are read off the gradient give the same Fisher matrix, or an error if there is none."""
    loss, f, y = case.make()
    try:
        expected = squared(loss.fisher_factor(f, y))
    except LossError:
        pytest.skip("there is no Fisher matrix in closed form")
    if y.is_floating_point() and loss.weighs_targets and not isinstance(loss, BinaryCrossEntropy):
        pytest.skip("how much a distribution over weighted classes counts, its gradient does not tell")
    if isinstance(loss, RewardPair):
        with pytest.raises(LossError, match=r"depends on targets.*targets\(y\)"):
            loss.stand_in(f, loss.gradient(f, y))
        return
    stand_in = loss.stand_in(f, scale * loss.gradient(f, y))
    assert loss.count(stand_in) == pytest.approx(loss.count(y))
    assert loss.examples(stand_in) == pytest.approx(loss.examples(y))
    close(squared(loss.fisher_factor(f, stand_in)), expected)
    assert loss.departure(f, scale * loss.gradient(f, y)) < 1e-10


@pytest.mark.parametrize("margin", [1.0, 10.0, 16.0, 17.0, 18.0, 30.0])
def test_round_off_of_sure_predictions_is_no_departure(margin: float) -> None:
    """After training, probabilities of right labels round to one in float32. An additional term is still noticed."""
    torch.manual_seed(0)
    y = torch.randint(10, (64,))
    f = 0.3 * torch.randn(64, 10)
    f[torch.arange(64), y] += margin
    f.requires_grad_()
    (g,) = torch.autograd.grad(nn.functional.cross_entropy(f, y), f)
    loss = describe(nn.CrossEntropyLoss())
    assert loss.departure(f.detach(), g) < 1e-3
    unsure = torch.randn(64, 10)
    assert loss.departure(unsure, loss.gradient(unsure, y) + 0.1) > 0.05


def test_stand_ins_that_do_not_exist() -> None:
    """If curvature depends on targets, they must be known; and predictions must be the inputs of the loss."""
    with pytest.raises(LossError, match="depends on targets"):
        describe(nn.HuberLoss()).stand_in(torch.ones(2, 3), torch.ones(2, 3))
    for shape in ((4,), (4, 3)):
        with pytest.raises(ShapeError, match="stacked along axis 1"):
            describe(nn.GaussianNLLLoss()).stand_in(torch.ones(shape), torch.ones(shape))


@all_cases
def test_stand_ins_have_the_same_ggn(case: Case) -> None:
    """Targets that are read off the gradient give the same GGN, or are refused."""
    loss, f, y = case.make()
    if loss.hessian_needs_targets:
        pytest.skip("the optimizer asks for targets")
    if loss.weighs_targets and y.is_floating_point():
        pytest.skip("how much a distribution over weighted classes counts, its gradient does not tell")
    try:
        stand_in = loss.stand_in(f, loss.gradient(f, y))
    except LossError as error:
        assert "depends on targets" in str(error)  # noqa: PT017
        return
    close(squared(loss.hessian_factor(f, stand_in)), squared(loss.hessian_factor(f, y)))


@all_cases
def test_losses_can_be_called(case: Case) -> None:
    """The value is PyTorch's."""
    loss, f, y = case.make()
    close(loss(f, y), case.pytorch(f, y))
