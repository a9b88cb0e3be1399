"""Models and data that do not match, although their shapes do."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import kfs
from kfs.errors import DataError, KfsWarning, ModelError
from tests.factors.test_gradient_streams import data, mlp

LOSS = nn.CrossEntropyLoss()


def changed(name: str) -> nn.Module:
    """Return a copy of the model in which one entry differs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double().eval()
    if name:
        model.state_dict()[name].mul_(3)
    return model


@pytest.mark.parametrize("name", ["0.weight", "1.running_var"])
def test_queries_of_a_model_with_another_body(name: str) -> None:
    """The curvature covers only the last layer, which is the same in both models."""
    head = ["2.weight", "2.bias"]
    train, queries = (kfs.EmpiricalRisk(model, LOSS, data(8), head) for model in (changed(""), changed(name)))
    influence = kfs.Influence(kfs.KFAC(train))
    with pytest.raises(ModelError, match=rf"'{name}' has another value \(or device\) in queries than in train"):
        influence.scores(queries, train)
    copied = kfs.EmpiricalRisk(deepcopy(train.model), LOSS, data(8), head)
    torch.testing.assert_close(influence.scores(copied, train), influence.scores(train, train))


def test_queries_of_a_model_without_an_entry() -> None:
    with_norm = changed("")
    without = nn.Sequential(with_norm[0], nn.Identity(), with_norm[2])  # type: ignore[index]
    head = ["2.weight", "2.bias"]
    train, queries = (kfs.EmpiricalRisk(model, LOSS, data(8), head) for model in (with_norm, without))
    with pytest.raises(ModelError, match=r"'1.weight' has another value"):
        kfs.Influence(kfs.KFAC(train)).scores(queries, train)


def test_models_that_were_trained_on() -> None:
    """This may be intended: the curvature may be that of a few steps before."""
    model = mlp()
    train = kfs.EmpiricalRisk(model, LOSS, data(8))
    influence = kfs.Influence(kfs.KFAC(train))
    with torch.no_grad():
        model.get_parameter("2.bias").add_(1.0)
    calls: list[Callable[[], object]] = [
        lambda: influence.scores(train, train),
        lambda: influence.top(train, train, 2),
        lambda: influence.self_scores(train),
        lambda: influence.cost(train, train),
        lambda: influence.index(train),
    ]
    for call in calls:
        with pytest.warns(KfsWarning, match=r"curvature was computed at other values") as caught:
            call()
        assert Path(caught[0].filename).name == "test_checks.py"


class Guarded(nn.Module):
    """Predicts zero where a layer returns NaN: the layer gets no gradient, but its input is NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return torch.where(h.isnan(), 0.0, h)


def test_inputs_that_are_not_finite() -> None:
    torch.manual_seed(0)
    X, y = data(8)
    model = Guarded().double()
    influence = kfs.Influence(kfs.KFAC(kfs.EmpiricalRisk(model, LOSS, (X, y))))
    bad = X.clone()
    bad[5, 1] = torch.nan
    train = kfs.EmpiricalRisk(model, LOSS, [(bad[:4], y[:4]), (bad[4:], y[4:])])
    for call in (influence.self_scores, influence.index, lambda risk: list(kfs.per_datum(risk))):
        with pytest.raises(DataError, match=r"gradient of example 5 with respect to block 'layer' is not finite"):
            call(train)


class SameMemory:
    """Batches that are written into the same memory."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        X, y = data(8)
        memory = torch.empty_like(X[:4])
        for part in (slice(0, 4), slice(4, 8)):
            memory.copy_(X[part])
            yield memory, y[part]


def test_batches_in_the_same_memory(tmp_path: Path) -> None:
    model = mlp()
    train = kfs.EmpiricalRisk(model, LOSS, SameMemory())
    usual = kfs.EmpiricalRisk(model, LOSS, data(8))
    influence = kfs.Influence(kfs.EKFAC(usual))
    expected = influence.scores(usual, usual)
    torch.testing.assert_close(influence.scores(train, train), expected)
    for file in (None, tmp_path):
        index = influence.index(train, dtype=torch.float64, file=file)
        torch.testing.assert_close(index.scores(usual), expected)
