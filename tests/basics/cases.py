"""Shapes, functions of any shape, and small networks with losses and data, shared by the tests of the definitions."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from kfs.basics.reduction_factors import Loss
from kfs.verification import ROUND_OFF

# Shapes from scalars to rank three; sides differ from each other often enough to reveal mixed-up axes.
shapes = st.lists(st.integers(1, 3), max_size=3).map(tuple)


def assert_close(actual: Tensor, expected: Tensor, atol: float = ROUND_OFF) -> None:
    """Compare shape, dtype and entries."""
    torch.testing.assert_close(actual, expected, rtol=ROUND_OFF, atol=atol)


def smooth_function(in_shape: tuple[int, ...], out_shape: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    """Return a nonlinear function between tensors of the given shapes; every output depends on every input."""
    shift, scale = torch.randn(2, *out_shape, *in_shape, dtype=torch.float64)
    axes = tuple(range(-len(in_shape), 0))

    def f(a: Tensor) -> Tensor:
        terms = torch.sin(scale * a + shift)
        return terms.sum(axes) + terms.cos().sum(axes) if axes else terms + terms.cos()

    return f


def leaf(shape: tuple[int, ...]) -> Tensor:
    """Return a random leaf of a computation graph."""
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


class Parallel(nn.Module):
    """A network that predicts a matrix: linear maps act on all rows and on all columns, with shared weights."""

    def __init__(self) -> None:
        super().__init__()
        self.columns = nn.Linear(3, 2)
        self.rows = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.columns(x))
        prediction: Tensor = self.rows(hidden.transpose(1, 2)).transpose(1, 2)
        return prediction


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 3))


@dataclass(frozen=True)
class Case:
    """A network, a loss and data, small enough for dense matrices."""

    name: str
    make_model: Callable[[], nn.Module]
    loss: Loss
    make_data: Callable[[], tuple[Tensor, Tensor]]
    is_likelihood: bool = True

    def make(self) -> tuple[nn.Module, Loss, Tensor, Tensor]:
        """Return model, loss, inputs and targets, the same in every call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            model = self.make_model().double()
            X, y = self.make_data()
        return model, self.loss, X, y

    def __str__(self) -> str:
        return self.name


def _inputs(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _labels_with_a_gap() -> Tensor:
    labels = torch.randint(2, (3, 2))
    labels[1, 0] = -100
    return labels


WEIGHT = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
CASES = [
    Case("mse-mean", mlp, nn.MSELoss(), lambda: (_inputs(4, 3), _inputs(4, 3))),
    Case("mse-sum", mlp, nn.MSELoss(reduction="sum"), lambda: (_inputs(4, 3), _inputs(4, 3))),
    Case("mse-matrix", Parallel, nn.MSELoss(), lambda: (_inputs(3, 2, 3), _inputs(3, 2, 2))),
    Case("ce-mean", mlp, nn.CrossEntropyLoss(), lambda: (_inputs(4, 3), torch.randint(3, (4,)))),
    Case("ce-sum", mlp, nn.CrossEntropyLoss(reduction="sum"), lambda: (_inputs(4, 3), torch.randint(3, (4,)))),
    Case("ce-sequence", Parallel, nn.CrossEntropyLoss(), lambda: (_inputs(3, 2, 3), torch.randint(2, (3, 2)))),
    Case("ce-ignored", Parallel, nn.CrossEntropyLoss(), lambda: (_inputs(3, 2, 3), _labels_with_a_gap())),
    Case("ce-probabilities", mlp, nn.CrossEntropyLoss(), lambda: (_inputs(4, 3), _inputs(4, 3).softmax(1))),
    Case(
        "ce-weighted-probabilities",
        mlp,
        nn.CrossEntropyLoss(WEIGHT),
        lambda: (_inputs(4, 3), _inputs(4, 3).softmax(1)),
        False,
    ),
    Case("ce-weighted", mlp, nn.CrossEntropyLoss(WEIGHT), lambda: (_inputs(4, 3), torch.randint(3, (4,))), False),
    Case(
        "ce-smoothed",
        mlp,
        nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.2),
        lambda: (_inputs(4, 3), torch.tensor([0, 1, -100, 2])),
        False,
    ),
]
LIKELIHOODS = [case for case in CASES if case.is_likelihood]
