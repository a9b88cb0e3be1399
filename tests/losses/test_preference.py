"""Losses of preferences: the GGN and the Fisher by definition, draws, and bad input."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kfs
from kfs.basics.ggns import vec_ggn
from kfs.basics.hessians import vec_hessian
from kfs.errors import LossError, ShapeError
from kfs.losses import DPO, RewardPair
from kfs.optim import KFAC as Optimizer  # noqa: N811 (both are called KFAC)

N = 7


class Rewards(nn.Module):
    """Reads pairs of answers `[N, 2, features]`, and returns a number for each of them, `[N, 2]`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(3, 4).double(), nn.Linear(4, 1).double()

    def forward(self, answers: Tensor) -> Tensor:
        rows = self.body(answers.flatten(0, 1)).tanh()  # all answers are rows of one batch
        rewards: Tensor = self.head(rows)
        return rewards.reshape(-1, 2)


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(N, 2, 3).double(), torch.randn(N).double()


def written_out(f: Tensor, y: Tensor, beta: float, smoothing: float) -> Tensor:
    """The negative log-likelihood of preferences, without `logsigmoid`."""
    right = 1 / (1 + torch.exp(-beta * (f[:, 0] - f[:, 1] - y)))
    return -((1 - smoothing) * right.log() + smoothing * (1 - right).log())


LOSSES: list[tuple[Any, float, float]] = [
    (RewardPair, 1.0, 0.0),
    (lambda reduction: RewardPair(reduction, label_smoothing=0.1), 1.0, 0.1),
    (lambda reduction: DPO(reduction=reduction), 0.1, 0.0),
    (lambda reduction: DPO(0.5, label_smoothing=0.2, reduction=reduction), 0.5, 0.2),
]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("make", "beta", "smoothing"), LOSSES)
def test_curvature_by_definition(make: Any, beta: float, smoothing: float, reduction: str) -> None:
    X, y = data()
    model, loss = Rewards(), make(reduction=reduction)
    risk = kfs.EmpiricalRisk(model, loss, (X, y), params=["body.weight"])
    f = model(X)
    value = written_out(f, y, beta, smoothing).sum() / (N if reduction == "mean" else 1)
    assert risk.value() == pytest.approx(value.item(), rel=1e-12)
    ggn = vec_ggn(value, f, model.body.weight)
    torch.testing.assert_close(kfs.GGN(risk).to_dense(), ggn)
    torch.testing.assert_close(kfs.Hessian(risk).to_dense(), vec_hessian(value, model.body.weight))
    # The likelihood is that of the preference: the expectation over both answers, written out.
    fisher = torch.zeros_like(ggn)
    for n in range(N):
        right = torch.sigmoid(beta * (f[n, 0] - f[n, 1] - y[n]))
        for probability, label in ((right, 0.0), (1 - right, 1.0)):
            one = written_out(f[n : n + 1], y[n : n + 1], beta, label).sum()
            (g,) = torch.autograd.grad(one, model.body.weight, retain_graph=True)
            fisher += probability.detach() * g.flatten().outer(g.flatten())
    fisher *= risk.reduction_factor
    torch.testing.assert_close(kfs.Fisher(risk).to_dense(), fisher)
    torch.testing.assert_close(fisher, ggn)  # with label smoothing, too
    without_margin = written_out(f, 0 * y, beta, smoothing).sum() * risk.reduction_factor
    assert not torch.allclose(vec_ggn(without_margin, f, model.body.weight), ggn, rtol=1e-4)


def test_kfac_of_a_reward_model() -> None:
    """For the last layer, whose inputs are differences of two rows, KFAC is compared with the sum that defines it."""
    X, y = data()
    model = Rewards()
    risk = kfs.EmpiricalRisk(model, RewardPair(), (X, y))
    K = kfs.KFAC(risk, fisher="type-2")
    f = model(X).detach()
    u = f[:, 0] - f[:, 1] - y
    rows = torch.cat([model.body(X).tanh(), torch.ones(N, 2, 1).double()], -1).detach()
    A = torch.einsum("nsi,nsj->ij", rows, rows) / N
    B = 2 * (u.sigmoid() * (-u).sigmoid()).sum() / (2 * N)  # two positions, whose gradients are opposite numbers
    torch.testing.assert_close(K.blocks["head"].A, A)
    torch.testing.assert_close(K.blocks["head"].B, B.reshape(1, 1))
    many = kfs.KFAC(risk, fisher="mc", mc_samples=3000)
    torch.testing.assert_close(many.blocks["head"].B, B.reshape(1, 1), rtol=0.05, atol=0)  # noise of draws


@pytest.mark.parametrize("fisher", ["type-2", "mc", "empirical"])
def test_training(fisher: Any) -> None:
    X, y = data()
    model, loss = Rewards(), RewardPair()
    optimizer = Optimizer(model, loss, lr=0.5, fisher=fisher)
    values = []
    for _ in range(20):
        optimizer.zero_grad()
        f = model(X)
        optimizer.targets(y)
        value = loss(f, y)
        value.backward()
        optimizer.step()
        values.append(value.item())
    assert values == sorted(values, reverse=True)
    assert values[-1] < 0.97 * values[0]


def test_another_loss_is_noticed() -> None:
    """Gradients with respect to the two rewards have opposite signs; those of a square loss have not."""
    X, y = data()
    model = Rewards()
    optimizer = Optimizer(model, RewardPair(), fisher="empirical")
    f = model(X)
    optimizer.targets(y)

    def step() -> None:
        (f - 3).square().mean().backward()
        optimizer.step()

    with pytest.raises(LossError, match="not that of RewardPair"):
        step()


@pytest.mark.parametrize(
    ("loss", "f", "y", "message"),
    [
        (RewardPair(), (4, 1), (4,), r"two numbers for each pair, \[N, 2\]"),
        (RewardPair(), (4, 2), (4, 2), "pass zeros if there are none"),
        (RewardPair(), (8,), (8,), r"wrap it in a module with inputs \[N, 2, ...\]"),
        (DPO(), (4, 2), (4, 2), "differences chosen - rejected of the reference model's"),
    ],
)
def test_shapes(loss: RewardPair, f: tuple[int, ...], y: tuple[int, ...], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        loss.check(torch.zeros(f), torch.zeros(y))


def test_settings() -> None:
    with pytest.raises(LossError, match=r"beta is 0.*Use a positive number"):
        DPO(0.0)
    for smoothing in (-0.1, 1.0):
        with pytest.raises(LossError, match="label_smoothing is"):
            RewardPair(label_smoothing=smoothing)


def test_quantities() -> None:
    """The log-probability is that of the chosen answer; the margin is the logit."""
    _, y = data()
    f = torch.randn(N, 2, dtype=torch.float64, requires_grad=True)
    loss = DPO(0.5, label_smoothing=0.2)
    right = torch.sigmoid(0.5 * (f[:, 0] - f[:, 1] - y))
    (log_probability,) = torch.autograd.grad(right.log().sum(), f, retain_graph=True)
    (margin,) = torch.autograd.grad((right / (1 - right)).log().sum(), f)
    torch.testing.assert_close(loss.log_probability_gradient(f.detach(), y), log_probability)
    torch.testing.assert_close(loss.margin_gradient(f.detach(), y), margin)
