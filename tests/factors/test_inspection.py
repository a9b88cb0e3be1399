"""The table of covered parameters, in Python and on the command line."""

import json
import sys
import types

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import kfs
from kfs.cli import app
from kfs.errors import DataError
from kfs.factors import inspect, inspection
from kfs.runtime.nested import mapped
from tests.factors.models import Function
from tests.factors.test_meta import CASES


def test_inspection(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(
        nn.Embedding(7, 4), nn.Flatten(), nn.Linear(8, 2), Function(lambda m, x: x @ m.s.diag(), s=torch.randn(2))
    )
    sample = torch.randint(7, (3, 2))
    table = kfs.inspect(model, sample)
    rows = {row.parameter: row for row in table.rows}
    assert (rows["0.weight"].A, rows["0.weight"].B) == ("diagonal 7", "dense 4x4")
    assert (rows["2.weight"].A, rows["2.weight"].B, rows["2.bias"].nbytes) == ("dense 9x9", "dense 2x2", 0)
    assert rows["2.weight"].nbytes == 4 * (9 * 9 + 2 * 2)
    assert table.uncovered == {"3.s": "it is used by matmul before it meets the batch, for which there is no rule"}
    assert "3.s" in str(table)
    assert "dense 9x9" in str(table)
    large = inspect(nn.Linear(40_000, 2), torch.zeros(2, 40_000))  # nothing is computed
    assert large.nbytes > 5 * 2**30
    assert "6.0 GiB" in str(large)
    assert inspect(nn.Linear(30, 30), torch.zeros(2, 30), max_dim=30).rows[0].A == "diagonal 31"
    with pytest.raises(DataError, match="no tensor with a batch axis"):
        inspect(model, {"x": 3})

    module = types.ModuleType("made_here")
    module.good = (nn.Linear(3, 2), torch.zeros(4, 3))  # type: ignore[attr-defined]
    module.make = lambda: (model, sample)  # type: ignore[attr-defined]
    module.bad = [1, 2, 3]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "made_here", module)
    runner = CliRunner()
    good = runner.invoke(app, ["inspect", "made_here:good"])
    assert good.exit_code == 0
    assert "linear" in good.stdout
    some = runner.invoke(app, ["inspect", "made_here:make", "--json", "--max-dim", "8"])
    assert some.exit_code == 1
    assert json.loads(some.stdout)[1]["A"] == "diagonal 9"
    for wrong, message in {
        "made_here:bad": "pair (model, sample)",
        "made_here:none": "cannot be imported",
        "": "cannot be",
    }.items():
        failed = runner.invoke(app, ["inspect", wrong])
        assert failed.exit_code == 2
        assert message in failed.stderr


NUM_DATA = 9


def repeated(t: Tensor) -> Tensor:
    """Return a batch of many examples, from one with three."""
    return t.repeat(NUM_DATA // 3, *[1] * (t.ndim - 1)) if t.ndim and len(t) == 3 else t


@pytest.mark.parametrize("name", CASES)
def test_a_few_data_are_enough(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table equals that of the whole sample."""
    make, sample = CASES[name]
    model = make().eval()
    sample = mapped(sample, repeated)
    if isinstance(sample, Tensor) and sample.is_floating_point():
        sample = sample.to(next(model.parameters()).dtype)
    few = inspect(model, sample, max_dim=4)
    monkeypatch.setattr(inspection, "_audited_part", lambda batch, *_: batch)
    assert few == inspect(model, sample, max_dim=4)


class Counting(nn.Module):
    """Two experts: one for positive numbers, one for negative ones. Records its numbers of examples."""

    def __init__(self) -> None:
        super().__init__()
        self.positive, self.negative = nn.Linear(3, 2), nn.Linear(3, 2)
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        result: Tensor = self.positive(x)
        if bool((x < 0).all(1).any()):
            result = torch.where((x < 0).all(1, keepdim=True), self.negative(x), result)
        return result


def test_all_data_are_looked_at_where_a_few_do_not_use_everything() -> None:
    X = torch.rand(NUM_DATA, 3) + 0.1
    model = Counting()
    assert list(inspect(model, X, params=["positive.weight"]).uncovered) == []
    assert model.seen[-1] < NUM_DATA
    X[0] *= -1  # the audit evaluates the last examples
    table = inspect(model, X)
    assert model.seen[-2:] == [table.audit.num_data, NUM_DATA]  # type: ignore[union-attr]
    assert not table.uncovered
    assert {row.A for row in table.rows} == {"dense 4x4"}
    inspect(model, X, audit=False)
    assert model.seen[-1] == NUM_DATA


def test_batches_that_cannot_be_cut_are_looked_at_as_a_whole() -> None:
    """An index may exceed the first few examples, although it did not in an earlier sample of the same shape."""

    class Gathers(Counting):
        def forward(self, x: Tensor, index: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x + 0 * index[:, None])

    model = Gathers()
    X = torch.rand(NUM_DATA, 3) + 0.1
    zeros = torch.zeros(NUM_DATA, dtype=torch.long)
    inspect(model, (X, zeros), params=["positive.weight"])
    model.seen.clear()
    inspect(model, (X, zeros), params=["positive.weight"])
    inspect(model, (X, torch.arange(NUM_DATA)), params=["positive.weight"])
    assert model.seen == [4, NUM_DATA]
