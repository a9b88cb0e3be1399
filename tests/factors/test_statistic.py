"""Operations on any statistic: several in one pass, reset, files. `tests/distributed` tests sums over ranks."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfs.factors import KFAC
from kfs.factors.accumulate import FactorSums, PerDatumSums, PlannedUse, Receiver, Squares, Statistic, Total, reset
from kfs.factors.accumulate.block_sums import COUNTS
from kfs.factors.capture import CapturedPass, forward
from kfs.factors.compute import sweep
from kfs.factors.rows import RowMap
from kfs.factors.rows.row_map import RowQuery
from kfs.factors.rules import new_trace
from kfs.factors.settings import Settings
from kfs.problem.risk import EmpiricalRisk


class GradientNorms(Statistic):
    """The sum of squared gradients of the outputs of all uses, and the number of their rows, a count on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros((), dtype=torch.float64)
        self.number = 0.0
        self.unfit: list[str] = []

    def adder_of(self, plan: PlannedUse) -> Any:
        def receive(g: Tensor) -> None:
            self.total += g.square().sum()
            self.number += g[..., 0].numel()

        def add(x: Any, row_map: RowMap | None) -> Receiver:  # noqa: ARG001 (an adder)
            return receive

        return add

    def note_conflict(self, plan: PlannedUse) -> None:
        self.unfit.append(plan.operation)

    def tensors(self) -> dict[Any, Total]:
        return {("all",): Total(self.total)}

    def counts(self) -> dict[Any, float]:
        return {("all",): self.number}

    def add_counts(self, more: Any) -> None:
        self.number += more["all",]


class Tied(nn.Module):
    """An embedding whose transpose computes the logits, and a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(5, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.layer(torch.tanh(self.layer(self.table(x)))))
        result: Tensor = h @ self.table.weight.T
        return result


def tied_risk() -> EmpiricalRisk:
    torch.manual_seed(0)
    X, y = torch.randint(5, (7,)), torch.randint(5, (7,))
    return EmpiricalRisk(Tied().double(), nn.CrossEntropyLoss(), [(X[:4], y[:4]), (X[4:], y[4:])])


def squares_of(K: KFAC) -> PerDatumSums:
    layouts = {block.layout.key: block.layout for block in K.blocks.values()}
    zeros = {key: torch.zeros(layout.matrix_shape, dtype=K.dtype) for key, layout in layouts.items()}
    return PerDatumSums(K.settings, layouts, {key: Squares(total) for key, total in zeros.items()})


def run(risk: EmpiricalRisk, statistics: list[Statistic]) -> None:
    """Make a pass over each batch; each example has one row."""
    trace = new_trace(risk.params)
    with risk.untouched(first_order=True), torch.enable_grad():
        for batch in risk.batches():
            f, one = forward(risk, batch, trace, statistics)
            generator = torch.Generator().manual_seed(batch.first)
            one.send_back(f, [torch.randn(2, *f.shape, generator=generator, dtype=f.dtype)])


def values(statistic: Statistic) -> tuple[list[Tensor], list[float]]:
    tensors = [total.tensor.clone() for total in statistic.tensors().values()]
    return tensors, list(statistic.counts().values())


def kinds(risk: EmpiricalRisk) -> list[Statistic]:
    K = KFAC(risk)
    reduced, identity = Settings(sharing="reduce"), Settings(fisher="forward-only", sharing="reduce")
    return [FactorSums(reduced), FactorSums(K.settings), squares_of(K), GradientNorms(), FactorSums(identity)]


@pytest.mark.parametrize("place", range(5))
def test_several_in_one_pass(place: int) -> None:
    """Each statistic has the same value, to the last bit, as in a pass alone. Some of them need rows."""
    risk = tied_risk()
    together, alone = kinds(risk), kinds(risk)[place]
    run(risk, together)
    run(risk, [alone])
    tensors, counts = values(alone)
    assert len(tensors) > 0
    assert sum(float(t.abs().sum()) for t in tensors) > 0
    assert all(map(torch.equal, values(together[place])[0], tensors))
    assert values(together[place])[1] == counts


@pytest.mark.parametrize("place", range(5))
def test_reset(place: int) -> None:
    """After a reset in place, the next data give the same result as alone."""
    risk = tied_risk()
    statistic = kinds(risk)[place]
    run(risk, [statistic])
    expected, where = values(statistic), [total.tensor.data_ptr() for total in statistic.tensors().values()]
    reset(statistic)
    tensors, counts = values(statistic)
    assert not any(map(torch.any, tensors))
    assert not any(counts)
    run(risk, [statistic])
    assert [total.tensor.data_ptr() for total in statistic.tensors().values()] == where
    assert all(map(torch.equal, values(statistic)[0], expected[0]))
    assert values(statistic)[1] == expected[1]


@pytest.mark.parametrize("place", range(4))
def test_files(place: int) -> None:
    """The contents of a file are added to an empty statistic, or to sums over other data."""
    risk = tied_risk()
    one, other, empty = (kinds(risk)[place] for _ in range(3))
    run(risk, [one])
    run(risk, [other])
    state = one.state()
    empty.add(state)
    assert all(map(torch.equal, values(empty)[0], values(one)[0]))
    assert values(empty)[1] == values(one)[1]
    expected = [mine + theirs for mine, theirs in zip(values(one)[0], values(other)[0], strict=True)]
    other.add(state)
    assert all(map(torch.equal, values(other)[0], expected))
    assert values(other)[1] == [2 * count for count in values(one)[1]]


def test_conflicts_reach_all_statistics() -> None:
    """A weight with a bias that is also used as its transpose: one of the uses is in conflict."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = torch.tanh(self.layer(x)) @ self.layer.weight
            return result

    risk = EmpiricalRisk(Both().double(), nn.MSELoss(), (torch.randn(4, 3).double(), torch.randn(4, 3).double()))
    statistics = [FactorSums(Settings()), GradientNorms()]
    run(risk, statistics)
    assert statistics[0].conflicts == {("layer.weight", operation) for operation in statistics[1].unfit}  # type: ignore[attr-defined]
    assert statistics[1].unfit  # type: ignore[attr-defined]


def test_a_pass_without_statistics_finds_row_maps() -> None:
    model, x = Tied(), torch.randint(5, (4,))
    found: list[tuple[str, list[int]]] = []

    def observe(query: RowQuery, row_map: RowMap, receive: Receiver) -> Receiver:
        found.append((query.what[1], row_map.index(query.rows).tolist()))
        return receive

    with CapturedPass(new_trace(dict(model.named_parameters())), [], 4, observer=observe) as one:
        model(one.mark(x))
    assert found == [(f"{name}.weight", [0, 1, 2, 3]) for name in ("table", "layer", "layer", "table")]


def test_sweep_of_a_new_statistic() -> None:
    """One process needs no further code; the audit of the sweep does not affect the statistic."""
    risk, found = tied_risk(), GradientNorms()
    sweep(risk, found, Settings(fisher="empirical"), "norms")
    assert found.number == 4 * 7  # uses, examples
    assert found.total > 0


def test_counts_are_listed_once() -> None:
    """All counts of a role are summed and stored in files."""
    K = KFAC(tied_risk())
    (_, role), *_ = K.blocks["layer"].sums.roles.items()
    for number, name in enumerate(COUNTS):
        setattr(role, name, float(number))
    assert role.plus(role).counts == {name: 2.0 * number for number, name in enumerate(COUNTS)}
    assert tuple(role.state())[2:] == COUNTS
