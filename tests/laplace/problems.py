"""Small models in float64, and their reference results: Jacobians by autograd, dense matrices, dense inverses."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import kfs
from kfs.operators.linear_operator import LinearOperator


class Tokens(nn.Module):
    """An embedding, attention and a normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm = nn.LayerNorm(4)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        h = h + self.attention(h, h, h, need_weights=False)[0]
        out: Tensor = self.last(self.norm(h).mean(1))
        return out


class Twice(nn.Module):
    """A layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.shared(torch.tanh(self.shared(x))))
        return out


def cnn(**options: Any) -> nn.Module:
    second = nn.Conv2d(2, 4, 3, padding=1, **options)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), second, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


def mlp(outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs))


def vectors(n: int) -> Tensor:
    return torch.randn(n, 4, dtype=torch.float64)


def images(n: int) -> Tensor:
    return torch.randn(n, 1, 5, 5, dtype=torch.float64)


def tokens(n: int) -> Tensor:
    return torch.randint(5, (n, 3))


@dataclass(frozen=True)
class Problem:
    """A model, and a function that makes inputs."""

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]
    outputs: int = 3


PROBLEMS = [
    Problem("mlp", mlp, vectors),
    Problem("cnn", cnn, images),
    Problem("circular", lambda: cnn(padding_mode="circular"), images),
    Problem("groups", lambda: cnn(groups=2), images),
    Problem("tokens", Tokens, tokens),
    Problem("twice", Twice, vectors, outputs=2),
]


def trained(problem: Problem) -> nn.Module:
    """Return the model with fixed parameters. The tests do not depend on a minimum of the loss."""
    torch.manual_seed(1)
    return problem.make().double().eval()


def classification(problem: Problem, num_data: int = 8, reduction: str = "mean") -> kfs.EmpiricalRisk:
    model = trained(problem)
    X = problem.inputs(num_data)
    y = torch.randint(problem.outputs, (num_data,))
    return kfs.EmpiricalRisk(model, nn.CrossEntropyLoss(reduction=reduction), [(X[:5], y[:5]), (X[5:], y[5:])])


def regression(num_data: int = 8, reduction: str = "mean") -> kfs.EmpiricalRisk:
    torch.manual_seed(1)
    model = mlp(2).double()
    data = vectors(num_data), torch.randn(num_data, 2, dtype=torch.float64)
    return kfs.EmpiricalRisk(model, nn.MSELoss(reduction=reduction), data)


def jacobian(model: nn.Module, X: Tensor, names: list[str]) -> Tensor:
    """Return the Jacobian of every example, `[n, outputs, parameters]`, by a loop over outputs."""
    params = dict(model.named_parameters())
    rows = []
    for x in X:
        f = model(x.unsqueeze(0))[0]
        gradients = [torch.autograd.grad(one, [params[n] for n in names], retain_graph=True) for one in f]
        rows.append(torch.stack([torch.cat([g.flatten() for g in one]) for one in gradients]))
    return torch.stack(rows)


def dense_covariance(K: LinearOperator, scale: float, prior: Tensor | float) -> Tensor:
    """Invert the posterior's precision as a matrix."""
    size = K.shape[0]
    diagonal = torch.as_tensor(prior, dtype=torch.float64).expand(size)
    inverse: Tensor = torch.linalg.inv(scale * K.to_dense() + torch.diag(diagonal))
    return inverse


def dense_variance(risk: kfs.EmpiricalRisk, covariance: Tensor, X: Tensor) -> Tensor:
    """Multiply Jacobians with a covariance of parameters."""
    assert isinstance(risk.model, nn.Module)
    J = jacobian(risk.model, X, list(risk.params))
    return J @ covariance @ J.transpose(1, 2)


def close(a: Any, b: Any, tolerance: float = 1e-9) -> None:
    both = [torch.as_tensor(one, dtype=torch.float64) for one in (a, b)]
    torch.testing.assert_close(*both, rtol=tolerance, atol=tolerance)
