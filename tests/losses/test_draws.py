"""Draws, exactly: for given random numbers, a drawn gradient is that of a target with the right probability.

Nothing is estimated here. If there are finitely many labels, an evenly spaced grid of uniform numbers gives every label
in proportion to its probability, so averages over the grid are expectations. Other targets use SciPy's quantiles.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, func, nn

from kfs.losses import TokenCrossEntropy, describe
from kfs.losses.draws import Draws
from tests.losses.cases import CASES, Case
from tests.losses.test_losses import close, dense, squared

CPU = torch.device("cpu")
GRID = 20  # probabilities below are multiples of 1 / GRID
PROBABILITIES = torch.tensor([[2, 5, 13], [1, 18, 1], [6, 6, 8], [11, 8, 1]], dtype=torch.float64) / GRID
W3 = torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64)


@dataclass(frozen=True)
class Given(Draws):
    """Uniform numbers chosen by a test: one for all examples and entries, or one per example."""

    numbers: Tensor

    def uniform(self, num_data: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
        return self.numbers.reshape(-1, *[1] * len(shape)).expand(num_data, *shape)


@pytest.mark.parametrize(
    ("module", "f", "y"),
    [
        (nn.BCEWithLogitsLoss(), PROBABILITIES[:, :1].logit(), PROBABILITIES[:, 1:2]),
        (nn.BCEWithLogitsLoss(), PROBABILITIES[:, 0].logit(), torch.tensor([0.0, 1.0, 1.0, 0.0]).double()),
        (nn.BCEWithLogitsLoss(W3[2], pos_weight=W3[0]), PROBABILITIES[:, 1:2].logit(), PROBABILITIES[:, :1].round()),
        (nn.CrossEntropyLoss(), PROBABILITIES.log(), torch.tensor([0, 1, 2, 0])),
        (nn.CrossEntropyLoss(W3, label_smoothing=0.2), PROBABILITIES.log() + 1, torch.tensor([0, -100, 2, 1])),
        (nn.CrossEntropyLoss(W3), PROBABILITIES.log().unsqueeze(2), PROBABILITIES.flip(1).unsqueeze(2)),
        (TokenCrossEntropy(), PROBABILITIES.log().unsqueeze(1), torch.tensor([[0], [1], [-100], [2]])),
    ],
    ids=["bce", "bce-scalar", "bce-weight", "ce", "ce-smooth", "ce-probabilities", "masked-lm"],
)
def test_expected_outer_products_of_drawn_gradients_are_the_fisher(module: Any, f: Tensor, y: Tensor) -> None:
    loss = describe(module)
    grid = [Given(0, 0, 0, torch.tensor((place + 0.5) / GRID).double()) for place in range(GRID)]
    g = torch.stack([loss.sampled_gradient(f, y, given) for given in grid])
    close(squared(g) / GRID, dense(loss, f, y))  # the Fisher equals the Hessian for these losses
    close(g.mean(0), torch.zeros_like(f))


@pytest.mark.parametrize("name", ["bce", "bce-weight", "bce-scalar", "ce-sequence", "ce-weight", "ce-smooth"])
def test_drawn_gradients_are_those_of_a_label(name: str) -> None:
    """A draw is the unweighted gradient for one of the labels, times the root of the entry's weight."""
    loss, f, y = next(case for case in CASES if case.name == name).make()
    binary = name.startswith("bce")
    plain = describe(nn.BCEWithLogitsLoss() if binary else nn.CrossEntropyLoss())
    labels = (torch.zeros_like(f), torch.ones_like(f)) if binary else [torch.full(y.shape, k) for k in range(3)]
    possible = torch.stack([func.grad(lambda f, y=y: plain.criterion(f, y).sum())(f) for y in labels])
    # Both Hessians are the same matrix, times the weight of an entry.
    diagonals = [dense(of, f, y).diagonal(dim1=1, dim2=2).reshape(f.shape) for of, y in ((loss, y), (plain, labels[0]))]
    possible = (diagonals[0] / diagonals[1]).sqrt() * possible
    drawn = torch.stack([loss.sampled_gradient(f, y, Draws(0, 0, m)) for m in range(30)])
    distances = (drawn.unsqueeze(1) - possible).abs()  # [draws, labels, *f.shape]
    distances = distances if binary else distances.amax(3)
    nearest = distances.min(1)
    assert nearest.values.max() < 1e-12
    assert nearest.indices.unique().tolist() == list(range(len(labels)))


@pytest.mark.parametrize("name", ["poisson", "poisson-full", "poisson-rate", "mse", "mse-tensor", "half-square-error"])
def test_drawn_gradients_are_those_of_scipys_quantiles(name: str) -> None:
    """With the same uniform numbers, SciPy gives the same counts; with the same normal numbers, targets are known."""
    loss, f, y = next(case for case in CASES if case.name == name).make()
    for sample in range(10):
        draws = Draws(3, 7, sample)
        if name.startswith("poisson"):
            u = draws.uniform(len(f), tuple(f.shape[1:]), CPU)
            target = torch.from_numpy(stats.poisson.ppf(u, f if name == "poisson-rate" else f.exp()))
        else:
            target = f + draws.normal(len(f), tuple(f.shape[1:]), CPU)
        expected = func.grad(lambda f, target=target: loss.criterion(f, target).sum())(f)
        close(loss.sampled_gradient(f, y, draws), expected)


@pytest.mark.parametrize("case", [case for case in CASES if case.name.startswith("gaussian")], ids=str)
def test_drawn_gradients_of_normal_targets(case: Case) -> None:
    loss, f, y = case.make()
    assert isinstance(case.loss, nn.GaussianNLLLoss)
    deviation = f[:, 1].clamp(min=case.loss.eps).sqrt()
    for sample in range(10):
        draws = Draws(3, 7, sample)
        target = f[:, 0] + deviation * draws.normal(len(f), (3,), CPU)
        expected = func.grad(lambda f, target=target: loss.criterion(f, target).sum())(f)
        close(loss.sampled_gradient(f, y, draws), expected)


@pytest.mark.parametrize("classes", [900, 1005])
def test_labels_are_drawn_evenly_where_probabilities_do_not_sum_to_one(classes: int) -> None:
    """The sum of rounded probabilities is not one; equally likely classes still have intervals of equal width."""
    f, y = torch.zeros(classes, classes, dtype=torch.bfloat16), torch.zeros(classes, dtype=torch.int64)
    total = f[0].softmax(0).double().sum()
    assert (total > 1.002) if classes == 900 else (total < 0.998)
    middles = (torch.arange(classes).double() + 0.5) / classes  # each in the middle of a class's interval
    g = describe(nn.CrossEntropyLoss()).sampled_gradient(f, y, Given(0, 0, 0, middles))
    assert torch.equal(g.argmin(1), torch.arange(classes))
