"""Soft targets of tokens, and the KL divergence: PyTorch's values, and the GGN by definition."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kfs
from kfs.basics.ggns import vec_ggn
from kfs.errors import LossError, ShapeError
from kfs.losses import TokenCrossEntropy, describe
from kfs.optim import KFAC as Optimizer  # noqa: N811 (both are called KFAC)

N, S, C = 6, 3, 5


class Student(nn.Module):
    """A model of tokens that returns logits, or their logarithms of probabilities."""

    def __init__(self, log: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(2, C).double()
        self.log = log

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layer(x)
        return logits.log_softmax(-1) if self.log else logits


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(N, S, 2).double(), (2 * torch.randn(N, S, C).double()).softmax(-1)


def divisor(reduction: str) -> float:
    return {"sum": 1.0, "mean": N * S * C, "batchmean": N}[reduction]


def definition(divided_by: float) -> Tensor:
    """The GGN, with logits as predictions, of the divergence written out."""
    X, p = data()
    model = Student(log=False)
    logits = model(X)
    loss = (p * (p.log() - (logits.exp() / logits.exp().sum(-1, keepdim=True)).log())).sum() / divided_by
    return vec_ggn(loss, logits, model.layer.weight)


def weight_ggn(model: nn.Module, loss: Any, y: Tensor) -> Tensor:
    risk = kfs.EmpiricalRisk(model, loss, (data()[0], y), params=["layer.weight"])
    dense: Tensor = kfs.GGN(risk).to_dense()
    return dense


@pytest.mark.parametrize("log_target", [False, True])
@pytest.mark.parametrize("reduction", ["sum", "batchmean", "mean"])
@pytest.mark.filterwarnings("ignore:reduction. 'mean':UserWarning")  # PyTorch recommends another reduction
def test_divergence(reduction: str, log_target: bool) -> None:
    """Value and gradient are PyTorch's. The GGN and the Fisher are those at the logits, by definition."""
    X, p = data()
    y = p.log() if log_target else p
    loss = nn.KLDivLoss(reduction=reduction, log_target=log_target)
    model = Student(log=True)
    risk = kfs.EmpiricalRisk(model, loss, (X, y), params=["layer.weight"])
    assert risk.reduction_factor == pytest.approx(1 / divisor(reduction), rel=1e-14)
    own = loss(model(X), y)
    assert risk.value() == pytest.approx(own.item(), rel=1e-12)
    (g,) = torch.autograd.grad(own, model.layer.weight)
    torch.testing.assert_close(risk.gradient()["layer.weight"], g)
    expected = definition(divisor(reduction))
    torch.testing.assert_close(weight_ggn(model, loss, y), expected)
    torch.testing.assert_close(kfs.Fisher(risk).to_dense(), expected)
    torch.testing.assert_close(kfs.GGN(risk, chunk_size=1).to_dense(), expected)


def test_a_linear_criterion_would_have_no_curvature() -> None:
    """PyTorch's criterion is linear in log-probabilities, so that its GGN there is zero, unlike the one at logits."""
    X, p = data()
    model = Student(log=True)
    f = model(X)
    literal = nn.functional.kl_div(f, p, reduction="batchmean")
    # Autograd needs a graph for second derivatives.
    assert not vec_ggn(literal + 0 * f.square().sum(), f, model.layer.weight).any()
    assert definition(N).norm() > 0.1


def test_curvature_is_that_of_the_cross_entropy() -> None:
    """For the same model: logits and soft targets, or log-probabilities and the divergence."""
    _, p = data()
    entropy = weight_ggn(Student(log=False), TokenCrossEntropy(reduction="sum"), p)
    divergence = weight_ggn(Student(log=True), nn.KLDivLoss(reduction="sum"), p)
    torch.testing.assert_close(divergence, entropy)
    torch.testing.assert_close(weight_ggn(Student(log=True), TokenCrossEntropy(reduction="sum"), p), entropy)
    risks = [
        kfs.EmpiricalRisk(Student(log=False), TokenCrossEntropy(reduction="sum"), (data()[0], p)),
        kfs.EmpiricalRisk(Student(log=True), nn.KLDivLoss(reduction="sum"), (data()[0], p)),
    ]
    for fisher in ("ggn", "type-2", "mc", "empirical"):
        one, other = (kfs.KFAC(risk, fisher=fisher).to_dense() for risk in risks)
        torch.testing.assert_close(one, other)
        assert one.norm() > 0.1


def test_positions_without_probabilities_do_not_count() -> None:
    """A mean is over the others, as if PyTorch's loss was given these positions only."""
    X, p = data()
    p[1, 1:] = 0
    model, loss = Student(log=False), TokenCrossEntropy()
    risk = kfs.EmpiricalRisk(model, loss, (X, p), params=["layer.weight"])
    there = p.sum(-1) > 0
    own = nn.functional.cross_entropy(model(X)[there], p[there])
    assert risk.value() == pytest.approx(own.item(), rel=1e-12)
    assert risk.reduction_factor == pytest.approx(1 / (N * S - 2), rel=1e-14)
    logits = model(X[there])
    expected = vec_ggn(nn.functional.cross_entropy(logits, p[there]), logits, model.layer.weight)
    torch.testing.assert_close(kfs.GGN(risk).to_dense(), expected)
    block = kfs.KFAC(risk, fisher="type-2").blocks["layer.weight"]
    assert float(block.A.trace()) == pytest.approx(float(X[there].square().sum()) / (N * S - 2))


def test_shifted_targets() -> None:
    X, p = data()
    model = Student(log=False)
    loss = TokenCrossEntropy(shift=True)
    own = nn.functional.cross_entropy(model(X)[:, :-1].flatten(0, 1), p[:, 1:].flatten(0, 1))
    torch.testing.assert_close(loss(model(X), p), own)
    logits = model(X)
    right = vec_ggn(loss(logits, p), logits, model.layer.weight)
    torch.testing.assert_close(weight_ggn(model, loss, p), right)


@pytest.mark.parametrize(
    ("loss", "f", "y", "error", "message"),
    [
        (nn.KLDivLoss(), torch.randn(3, 5), torch.rand(3, 5).softmax(1), LossError, r"sum to .*log_softmax\(-1\)"),
        (nn.KLDivLoss(), torch.randn(3, 5, 2).log_softmax(1), torch.rand(3, 5, 2).softmax(1), LossError, "last axis"),
        (nn.KLDivLoss(), torch.randn(3, 5).log_softmax(1), -torch.rand(3, 5), LossError, "with log_target=True"),
        (
            nn.KLDivLoss(log_target=True),
            torch.randn(3, 5).log_softmax(1),
            torch.rand(3, 5).softmax(1),
            LossError,
            "log_target=True was given the target",
        ),
        (nn.KLDivLoss(), torch.randn(3, 5).log_softmax(1), torch.rand(3, 4), ShapeError, "Use the same shape"),
        (TokenCrossEntropy(), torch.randn(3, 2, 5), torch.rand(3, 2, 4), ShapeError, r"probabilities \[N, S, C\]"),
        (TokenCrossEntropy(), torch.randn(3, 2, 5), torch.rand(3, 2), ShapeError, r"torch.float32 targets \[3, 2\]"),
    ],
)
def test_bad_input(loss: Any, f: Tensor, y: Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        describe(loss).check(f, y)


def test_values_are_checked_later_on_an_accelerator() -> None:
    loss = describe(nn.KLDivLoss(reduction="batchmean"))
    f, p = torch.randn(3, 5).log_softmax(1), torch.rand(3, 5).softmax(1)
    assert loss.wrong(f, p).tolist() == [False] * 3  # type: ignore[union-attr]
    f[1] += 1
    p[2, 0] = -0.1
    assert loss.wrong(f, p).tolist() == [False, True, True]  # type: ignore[union-attr]
    # Rounding to bfloat16 is harmless.
    assert not loss.wrong(torch.randn(200, 5000).bfloat16().log_softmax(1).float(), torch.rand(200, 5000)).any()  # type: ignore[union-attr]


@pytest.mark.parametrize("fisher", ["type-2", "mc", "empirical"])
@pytest.mark.parametrize("known", [True, False])
def test_training(fisher: Any, known: bool) -> None:
    """The optimizer accepts PyTorch's gradient, with and without knowing the targets, and takes the same steps."""
    X, p = data()
    weights = []
    losses: list[tuple[bool, Any, Callable[[Tensor], Tensor]]] = [
        (True, module := nn.KLDivLoss(reduction="batchmean"), lambda f: module(f, p)),
        (False, TokenCrossEntropy(reduction="sum"), lambda f: nn.functional.cross_entropy(f.mT, p.mT, reduction="sum")),
    ]
    if not known:
        losses[0] = (True, nn.KLDivLoss(reduction="batchmean"), lambda f: (p * (p.log() - f)).sum() / N)
    for log, loss, value in losses:
        model = Student(log)
        optimizer = Optimizer(model, loss, lr=0.1, fisher=fisher, trust=None, noise=None, momentum=0.0)
        for _ in range(3):
            optimizer.zero_grad()
            before = value(model(X))
            if not log and fisher == "empirical":  # whose scale only labels or targets tell
                optimizer.targets(p)
            before.backward()
            optimizer.step()
        assert value(model(X)) < before
        weights.append(model.layer.weight.detach())
        assert not any(vars(optimizer.events).values())
    # The reductions differ by a factor, which the natural gradient does not see, up to damping relative to curvature.
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("known", [True, False])
def test_other_losses_are_noticed(known: bool) -> None:
    """Another reduction, and PyTorch's divergence of logits, which are no log-probabilities."""
    X, p = data()
    for log, reduction, message in (
        (True, "sum", "is a sum, but KLDivLoss was declared"),
        (False, "batchmean", "sum to"),
    ):
        model = Student(log)
        optimizer = Optimizer(model, nn.KLDivLoss(reduction="batchmean"), fisher="type-2")
        f = model(X)
        if known:
            optimizer.targets(p)
        value = nn.functional.kl_div(f, p, reduction=reduction)

        def step(optimizer: Any = optimizer, value: Tensor = value) -> None:
            value.backward()
            optimizer.step()

        with pytest.raises(LossError, match=message):
            step()
