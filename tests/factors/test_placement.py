"""The blocks that uses belong to, over batches, steps and processes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from kfs import KFAC, Checkpoint, EmpiricalRisk, optim
from kfs.errors import KfsWarning
from kfs.factors.accumulate.outer_products import OuterProductSum
from tests.factors.models import Function
from tests.operators.contract import close


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


class Steps:
    """Trains a model that computes in different ways; a call is a step, and `how` selects the way."""

    def __init__(self, compute: Any, outputs: int, **params: Tensor) -> None:
        self.outputs = outputs
        self.model = Function(compute, **params)
        self.loss = nn.MSELoss()
        self.optimizer = optim.KFAC(self.model, self.loss, factors_every=1)

    def __call__(self, how: str) -> None:
        self.model.how = how  # type: ignore[assignment]
        self.optimizer.zero_grad()
        self.loss(self.model(normal(8, 3)), normal(8, self.outputs)).backward()
        self.optimizer.step()

    @property
    def uncovered(self) -> set[str]:
        return set(self.optimizer.uncovered)


def test_other_uses_of_a_weight_in_a_later_step() -> None:
    """Every step chooses blocks anew: rows that are used apart get curvature, too."""

    def compute(m: Any, x: Tensor) -> Tensor:
        if m.how == "apart":
            return torch.cat([F.linear(x, m.W[:2], m.b[:2]), F.linear(x, m.W[2:], m.b[2:])], 1)
        return F.linear(x, m.W, m.b)

    step = Steps(compute, 4, W=normal(4, 3), b=normal(4))
    for how in ("together", "apart", "together"):
        step(how)
        assert not step.uncovered
        averages = step.optimizer.state_dict()["kfac"]["curvature"]["averages"]
        rows = [tuple(average["layout"]["rows"]) for average in averages]
        assert rows == ([(0, 2), (2, 4)] if how == "apart" else [(0, 4)])


def test_plans_that_fit_one_by_one_but_not_together() -> None:
    """A weight that is used as a whole in one step and by rows in another cannot be used in both ways in a third."""

    def compute(m: Any, x: Tensor) -> Tensor:
        whole = F.linear(x, m.W) if "whole" in m.how else 0.0
        parts = torch.cat([F.linear(x, m.W[:2]), F.linear(x, m.W[2:])], 1) if "parts" in m.how else 0.0
        return torch.as_tensor(whole + parts)

    step = Steps(compute, 4, W=normal(4, 3))
    step("whole")
    step("parts")
    assert not step.uncovered
    with pytest.warns(KfsWarning, match="does not fit together"):
        step("whole and parts")
    assert step.uncovered == {"W"}


def test_blocks_of_a_checkpoint_are_known(tmp_path: Path) -> None:
    """Completed batches determine the blocks, also after a restart of the process."""

    def compute(m: Any, x: Tensor) -> Tensor:
        return F.linear(x, m.W) if float(x.detach().sum()) > 0 else F.linear(x, m.W, m.b)

    model = Function(compute, W=normal(2, 3), b=normal(2))
    X, y = torch.rand(4, 3, dtype=torch.float64), normal(4, 2)

    class Batches:
        stops = True

        def __iter__(self) -> Any:
            yield X, y
            if self.stops:
                raise KeyboardInterrupt
            yield -X, y

    def compute_factors(batches: Batches, **settings: Any) -> KFAC:
        return KFAC(EmpiricalRisk(model, nn.MSELoss(), batches), **settings)

    checkpoint_file, batches = Checkpoint(tmp_path / "c", batches=1), Batches()
    with pytest.raises(KeyboardInterrupt):
        compute_factors(batches, checkpoint=checkpoint_file)
    batches.stops = False
    resumed, expected = compute_factors(batches, checkpoint=checkpoint_file), compute_factors(batches)
    assert list(resumed.blocks) == list(expected.blocks) == ["W", "b"]
    close(resumed.to_dense(), expected.to_dense())


def test_a_bias_that_is_added_by_itself_in_another_step() -> None:
    """Each use has curvature in a step of its own; in one step they contradict each other."""

    def compute(m: Any, x: Tensor) -> Tensor:
        z: Tensor = x @ m.W.T + m.b if m.how == "apart" else F.linear(x, m.W, m.b)
        return z.tanh() + m.b if m.how == "both" else z

    step = Steps(compute, 2, W=normal(2, 3), b=normal(2))
    step("apart")
    step("joint")
    assert not step.uncovered
    with pytest.warns(KfsWarning, match="does not fit together with its other uses"):
        step("both")
    assert step.uncovered == {"W", "b"}


def test_data_that_cannot_be_added_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """This is also true if an error, such as a lack of memory, comes after the first block."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    one, other = (KFAC(EmpiricalRisk(model, nn.MSELoss(), (normal(5, 3), normal(5, 2)))) for _ in range(2))
    before, plus, calls = one.to_dense(), OuterProductSum.plus, []

    def fails_later(self: OuterProductSum, more: OuterProductSum) -> OuterProductSum:
        calls.append(more)
        if len(calls) == 3:
            raise MemoryError
        return plus(self, more)

    monkeypatch.setattr(OuterProductSum, "plus", fails_later)
    with pytest.raises(MemoryError):
        one.merge(other)
    close(one.to_dense(), before)
    assert one.num_data == 5
