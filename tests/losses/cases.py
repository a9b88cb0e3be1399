"""Every loss with its settings, predictions and targets, in float64."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical, Independent, Normal

from kfs.losses import DPO, Custom, HalfSquaredError, Loss, RewardPair, TokenCrossEntropy, describe


@dataclass(frozen=True)
class Case:
    """A loss as users write it, with data.

    Attributes:
        name: For the test's id.
        loss: A module, a function or a description, with reduction "mean".
        data: Makes predictions and targets.
        value: PyTorch's own value; `None` if the loss itself can be called with predictions and targets.
        fisher: Whether there is a Fisher matrix; "equal" if it equals the Hessian.
        convex: Whether the Hessian has a symmetric factor.
    """

    name: str
    loss: object
    data: Callable[[], tuple[Tensor, Tensor]]
    value: Callable[[Tensor, Tensor], Tensor] | None = None
    fisher: str = "equal"
    convex: bool = True

    def make(self) -> tuple[Loss, Tensor, Tensor]:
        """Return description, predictions and targets, the same in every call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            f, y = self.data()
        return describe(self.loss), f, y

    def pytorch(self, f: Tensor, y: Tensor) -> Tensor:
        """PyTorch's value of the loss."""
        return self.value(f, y) if self.value else self.loss(f, y)  # type: ignore[operator]

    def __str__(self) -> str:
        return self.name


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def with_gaps(labels: Tensor) -> Tensor:
    labels.view(-1)[::4] = -100
    return labels


W3 = torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64)


def log_cosh(f: Tensor, y: Tensor) -> Tensor:
    return torch.cosh(f - y).log().sum()


def double_well(f: Tensor, y: Tensor) -> Tensor:
    return ((f**2 - y) ** 2).sum()


def my_cross_entropy(f: Tensor, y: Tensor) -> Tensor:
    return -f.log_softmax(0).gather(0, y.unsqueeze(0)).sum()


def half_square(f: Tensor, y: Tensor) -> Tensor:
    return 0.5 * ((f - y) ** 2).sum()


def mean_of(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda f, y: torch.stack([function(a, b) for a, b in zip(f, y, strict=True)]).mean()


def heteroscedastic() -> tuple[Tensor, Tensor]:
    return torch.stack([normal(4, 3), normal(4, 3).exp()], 1), normal(4, 3)


def gaussian_value(f: Tensor, y: Tensor) -> Tensor:
    value: Tensor = nn.GaussianNLLLoss()(f[:, 0], y, f[:, 1])
    return value


def clamped_value(f: Tensor, y: Tensor) -> Tensor:
    value: Tensor = nn.GaussianNLLLoss(eps=0.9)(f[:, 0], y, f[:, 1])
    return value


def causal_value(f: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(f[:, :-1].reshape(-1, 3), y[:, 1:].reshape(-1))


def flattened(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Apply a loss of logits and probabilities to all positions that have probabilities."""

    def value(f: Tensor, y: Tensor) -> Tensor:
        there = (y != 0).any(-1)
        return loss(f[there], y[there])

    return value


def soft_targets(*shape: int) -> Tensor:
    """Distributions that differ between positions; the last position of the first example has none."""
    y = normal(*shape).softmax(-1)
    y[0, -1] = 0
    return y


def pair_value(f: Tensor, y: Tensor) -> Tensor:
    return -((f[:, 0] - f[:, 1] - y).sigmoid().log()).mean()


def dpo_value(f: Tensor, y: Tensor) -> Tensor:
    """The loss as TRL writes it, with `beta=0.3` and `label_smoothing=0.2`."""
    logits = 0.3 * ((f[:, 0] - f[:, 1]) - y)
    logsigmoid = nn.functional.logsigmoid
    return (-logsigmoid(logits) * 0.8 - logsigmoid(-logits) * 0.2).mean()


CASES = [
    Case("mse", nn.MSELoss(), lambda: (normal(4, 3), normal(4, 3))),
    Case("mse-scalar", nn.MSELoss(), lambda: (normal(4), normal(4))),
    Case(
        "half-square-error",
        HalfSquaredError(),
        lambda: (normal(4, 3), normal(4, 3)),
        lambda f, y: 0.5 * (f - y).square().sum(1).mean(),
    ),
    Case("mse-tensor", nn.MSELoss(), lambda: (normal(3, 2, 2), normal(3, 2, 2))),
    Case("ce", nn.CrossEntropyLoss(), lambda: (normal(4, 3), torch.randint(3, (4,)))),
    Case("ce-sequence", nn.CrossEntropyLoss(), lambda: (normal(4, 3, 2), with_gaps(torch.randint(3, (4, 2))))),
    Case("ce-weight", nn.CrossEntropyLoss(W3), lambda: (normal(4, 3), with_gaps(torch.randint(3, (4,))))),
    Case(
        "ce-smooth", nn.CrossEntropyLoss(W3, label_smoothing=0.2), lambda: (normal(3, 3, 2), torch.randint(3, (3, 2)))
    ),
    Case("ce-probabilities", nn.CrossEntropyLoss(W3), lambda: (normal(4, 3, 2), normal(4, 3, 2).softmax(1))),
    Case("bce", nn.BCEWithLogitsLoss(), lambda: (normal(4, 3), normal(4, 3).sigmoid())),
    Case(
        "bce-weight",
        nn.BCEWithLogitsLoss(W3, pos_weight=2 * W3),
        lambda: (normal(4, 3), normal(4, 3).sigmoid().round()),
    ),
    Case("bce-scalar", nn.BCEWithLogitsLoss(pos_weight=W3[2]), lambda: (normal(4), normal(4).sigmoid().round())),
    Case("poisson", nn.PoissonNLLLoss(), lambda: (normal(4, 3), normal(4, 3).exp().floor())),
    Case("poisson-full", nn.PoissonNLLLoss(full=True), lambda: (normal(4, 3) + 2, 10 * normal(4, 3).exp().floor())),
    Case(
        "poisson-rate",
        nn.PoissonNLLLoss(log_input=False),
        lambda: (normal(4, 3).exp(), normal(4, 3).exp().ceil()),
        fisher="other",
    ),
    Case("gaussian", nn.GaussianNLLLoss(), heteroscedastic, gaussian_value, fisher="other", convex=False),
    Case(  # about half of the variances are below eps
        "gaussian-clamped",
        nn.GaussianNLLLoss(eps=0.9),
        heteroscedastic,
        clamped_value,
        fisher="other",
        convex=False,
    ),
    Case("huber", nn.HuberLoss(delta=0.7), lambda: (normal(4, 3), normal(4, 3)), fisher="none"),
    Case("smooth-l1", nn.SmoothL1Loss(beta=0.7), lambda: (normal(4, 3), normal(4, 3)), fisher="none"),
    Case(
        "masked-lm",
        TokenCrossEntropy(),
        lambda: (normal(3, 2, 3), with_gaps(torch.randint(3, (3, 2)))),
        lambda f, y: nn.functional.cross_entropy(f.reshape(-1, 3), y.reshape(-1)),
    ),
    Case(
        "causal-lm",
        TokenCrossEntropy(shift=True),
        lambda: (normal(3, 4, 3), with_gaps(torch.randint(3, (3, 4)))),
        causal_value,
    ),
    Case(
        "soft-tokens",
        TokenCrossEntropy(),
        lambda: (normal(3, 4, 3), soft_targets(3, 4, 3)),
        flattened(nn.functional.cross_entropy),
    ),
    Case(
        "soft-tokens-shifted",
        TokenCrossEntropy(shift=True, weight=W3),
        lambda: (normal(3, 4, 3), soft_targets(3, 4, 3)),
        lambda f, y: flattened(lambda f, y: nn.functional.cross_entropy(f, y, W3))(f[:, :-1], y[:, 1:]),
    ),
    Case(
        "soft-tokens-smooth",
        TokenCrossEntropy(label_smoothing=0.2),
        lambda: (normal(3, 4, 3), normal(3, 4, 3).softmax(2)),
        lambda f, y: nn.functional.cross_entropy(f.flatten(0, 1), y.flatten(0, 1), label_smoothing=0.2),
    ),
    Case(
        "kl",
        nn.KLDivLoss(reduction="batchmean"),
        lambda: (normal(4, 3).log_softmax(1), normal(4, 3).softmax(1)),
    ),
    Case(
        "kl-tokens-mean",
        nn.KLDivLoss(),
        lambda: (normal(3, 2, 3).log_softmax(2), soft_targets(3, 2, 3)),
        lambda f, y: nn.functional.kl_div(f, y, reduction="none").mean(),  # without PyTorch's warning about "mean"
    ),
    Case(
        "kl-log-target",
        nn.KLDivLoss(reduction="batchmean", log_target=True),
        lambda: (normal(3, 2, 3).log_softmax(2), normal(3, 2, 3).log_softmax(2)),
    ),
    Case("reward-pair", RewardPair(), lambda: (normal(4, 2), normal(4).abs()), pair_value),
    Case("dpo", DPO(0.3, label_smoothing=0.2), lambda: (3 * normal(4, 2), normal(4)), dpo_value),
    Case("log-cosh", log_cosh, lambda: (normal(4, 3), normal(4, 3)), mean_of(log_cosh), fisher="none"),
    Case(
        "double-well",
        double_well,
        lambda: (normal(4, 3), normal(4, 3).exp()),
        mean_of(double_well),
        fisher="none",
        convex=False,
    ),
    Case(
        "my-ce",
        Custom(my_cross_entropy, likelihood=lambda f: Categorical(logits=f)),
        lambda: (normal(4, 3), torch.randint(3, (4,))),
        nn.CrossEntropyLoss(),
    ),
    Case(
        "my-bernoulli",
        Custom(nn.functional.binary_cross_entropy_with_logits, likelihood=lambda f: Bernoulli(logits=f)),
        lambda: (normal(5), normal(5).sigmoid().round()),
        nn.BCEWithLogitsLoss(),
    ),
    Case(
        "my-square",
        Custom(half_square, likelihood=lambda f: Independent(Normal(f, torch.ones_like(f)), 1)),
        lambda: (normal(4, 3), normal(4, 3)),
        mean_of(half_square),
        fisher="draws",
    ),
]
