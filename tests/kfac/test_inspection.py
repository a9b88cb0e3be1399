"""The table of what is covered, in Python and on the command line."""

import json
import sys
import types

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import kfs
from kfs.cli import app
from kfs.errors import DataError
from kfs.kfac import inspect
from tests.kfac.models import Function


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
