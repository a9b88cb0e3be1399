"""KFAC on real data: a small net trained on scikit-learn's digits, errors of structures, and their cost."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn

from kfs.factors import EKFAC, KFAC, Comparison, Inspection, compare, inspect
from kfs.operators import GGN, Hessian, solve, spectral_density
from kfs.operators.estimate import Density
from kfs.operators.solve import Solution
from kfs.problem.risk import EmpiricalRisk


@dataclass(frozen=True)
class Digits:
    """Results on digits.

    Attributes:
        accuracy: Share of correct predictions on held-out data.
        factors: KFAC of the net.
        comparison: Errors of structures, layer by layer.
        inspection: Cost of layers.
        density: Eigenvalues of the Hessian.
        solution: Solution of the linear system with the damped GGN and the gradient.
        ratios: Time of a program divided by the time of a forward and backward pass over the same data.
    """

    accuracy: float
    factors: KFAC
    comparison: Comparison
    inspection: Inspection
    density: Density
    solution: Solution[dict[str, Tensor]]
    ratios: dict[str, float]


def load() -> tuple[Tensor, Tensor]:
    """Return images `[1797, 64]` with values from 0 to 1, and labels."""
    from sklearn.datasets import load_digits  # noqa: PLC0415 (optional)

    images, labels = load_digits(return_X_y=True)
    return torch.from_numpy(images).double() / 16, torch.from_numpy(labels).long()


def trained(X: Tensor, y: Tensor, steps: int) -> nn.Module:
    """Return a trained net with two hidden layers; the global random state does not change."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 10)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(X), y).backward()
        optimizer.step()
    return model


def examine(quick: bool = False) -> Digits:
    """Train a net, compare structures and measure times.

    Args:
        quick: Whether to use fewer data and steps.
    """
    X, y = load()
    half = len(X) // 2
    model = trained(X[:half], y[:half], 20 if quick else 150)
    accuracy = float((model(X[half:]).argmax(1) == y[half:]).double().mean())
    few = 100 if quick else 400
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), (X[:few], y[:few]), progress=False)  # the tour shows its own
    return Digits(
        accuracy,
        factors=KFAC(risk),
        comparison=compare(risk, ["diagonal", "KFAC", "EKFAC", "trace-scaled", "optimal Kronecker"]),
        inspection=inspect(model, X[:8]),
        density=spectral_density(Hessian(risk), num_vectors=1 if quick else 4),
        solution=solve(GGN(risk).shift(1e-2), risk.gradient()),
        ratios=_ratios(model, X[:half], y[:half], 3 if quick else 7),
    )


def _ratios(model: nn.Module, X: Tensor, y: Tensor, repeats: int) -> dict[str, float]:
    """Measure times of programs in turn, relative to a forward and backward pass."""
    loss = nn.CrossEntropyLoss()
    risk = EmpiricalRisk(model, loss, (X, y), progress=False)

    def forward_backward() -> None:
        torch.autograd.grad(loss(model(X), y), list(model.parameters()))

    K = KFAC(risk, "mc")
    v = torch.ones(K.shape[0], dtype=K.dtype)
    programs: dict[str, Callable[[], object]] = {
        "forward and backward pass": forward_backward,
        "KFAC, one draw": lambda: KFAC(risk, "mc"),
        "KFAC, type-2 (ten columns)": lambda: KFAC(risk, "type-2"),
        "EKFAC, one draw": lambda: EKFAC(risk, "mc"),
        "factored inverse": lambda: K.inverse(1e-3, "factored"),
        "product with KFAC": lambda: K @ v,
    }
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(repeats):
        for name, program in programs.items():
            start = time.perf_counter()
            program()
            times[name].append(time.perf_counter() - start)
    unit = median(times["forward and backward pass"])
    return {name: median(values) / unit for name, values in times.items()}
