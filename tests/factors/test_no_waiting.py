"""Sums never synchronize with an accelerator while data are added, and change only counts, and tensors in place.

There is no accelerator here: the CPU is treated as one, and operations that would synchronize raise errors.
"""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from kfs.factors import EKFAC, KFAC
from kfs.factors.accumulate import BlockSums, FactorSums, PerDatumSums, Squares, Statistic, Use
from kfs.factors.accumulate.block_sums import RoleSums, read_counts
from kfs.factors.accumulate.inputs import OneHot
from kfs.factors.accumulate.outer_products import OuterProductSum
from kfs.factors.capture import forward
from kfs.factors.layout import Layout
from kfs.factors.rows import RowMap
from kfs.factors.rows.row_map import IndexedRows, StridedRows
from kfs.factors.rules import new_trace
from kfs.factors.settings import Settings
from kfs.problem.data import Batch
from kfs.problem.risk import EmpiricalRisk
from kfs.runtime import sync
from tests.operators.contract import close

VOCABULARY, N, LENGTH = 7, 4, 6
# Their results are on the host, or their sizes depend on values.
WAITING = ("_local_scalar_dense", "nonzero", "unique", "is_nonzero", "masked_select", "bincount", "repeat_interleave")


class NoWaiting(TorchDispatchMode):
    """Refuses operations that would synchronize."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        indices = args[1] if name in {"index", "index_put", "index_put_", "_index_put_impl_"} else []
        masks = [i for i in indices if i is not None and i.dtype == torch.bool]
        if name.lstrip("_").startswith(tuple(one.lstrip("_") for one in WAITING)) or masks:
            raise AssertionError(f"{func} waits")
        return func(*args, **(kwargs or {}))


class Net(nn.Module):
    """Tokens with padding, positions, a normalization, convolutions with and without groups, and linear maps."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 4, padding_idx=0)
        self.positions = nn.Parameter(torch.randn(LENGTH, 4))
        self.norm = nn.LayerNorm(4)
        self.wide = nn.Conv1d(4, 3, 3, padding=1)
        self.strided = nn.Conv1d(3, 6, 2, stride=2, groups=3)
        self.head = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.tokens(x) + self.positions)
        h = self.strided(self.wide(h.transpose(1, 2)).tanh())
        result: Tensor = self.head(h.transpose(1, 2)).mean(1)
        return result


class Routed(nn.Module):
    """Sends some examples to an expert."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.expert = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.all(x).tanh()
        chosen = x[:, 0] > 0
        result: Tensor = h.index_add(0, chosen.nonzero().flatten(), self.expert(h[chosen]))
        return result


def problem() -> tuple[EmpiricalRisk, list[Batch]]:
    """A model, and three batches of one shape, with equal numbers of positions, of which different numbers count."""
    torch.manual_seed(0)
    X, y = torch.randint(VOCABULARY, (3 * N, LENGTH)), torch.randn(3 * N, 3, dtype=torch.float64)
    X[N : 2 * N, :3] = 0
    risk = EmpiricalRisk(Net().double(), nn.MSELoss(), (X, y))
    return risk, [Batch(X[first : first + N], y[first : first + N], first) for first in range(0, 3 * N, N)]


def squares_of(K: KFAC) -> PerDatumSums:
    """Sums of squared gradients in the eigenbases of some factors."""
    squares = {}
    for block in K.blocks.values():
        A, B = (computed if computed.ndim == 3 else computed.unsqueeze(0) for computed in (block.A, block.B))
        Q_A = None if block.is_diagonal("A") else torch.linalg.eigh(A)[1]
        squares[block.layout.key] = Squares(
            torch.zeros(*block.layout.matrix_shape).double(), Q_A, torch.linalg.eigh(B)[1]
        )
    layouts = {block.layout.key: block.layout for block in K.blocks.values()}
    return PerDatumSums(K.settings, layouts, squares)


def sums_of(kind: str, risk: EmpiricalRisk) -> Statistic:
    if kind == "squares":
        return squares_of(KFAC(risk))
    fisher, sharing = kind.split(", ")
    return FactorSums(Settings(fisher=fisher, sharing=sharing))  # type: ignore[arg-type]


KINDS = [*map(", ".join, product(("type-2", "forward-only"), ("expand", "reduce"))), "squares"]


class Passes:
    """Forward and backward passes of batches, with two columns of vectors."""

    def __init__(self, risk: EmpiricalRisk, sums: Statistic) -> None:
        self.risk, self.sums = risk, sums
        self.trace = new_trace(risk.params)

    def add(self, batch: Batch) -> None:
        f, one = forward(self.risk, batch, self.trace, [self.sums])
        generator = torch.Generator().manual_seed(batch.first)
        vectors = torch.randn(2, 1, *f.shape, generator=generator, dtype=f.dtype)
        one.send_back(f, iter(vectors))


def tensors(value: Any) -> Iterator[Tensor]:
    """Iterate over all tensors of a state."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for one in value.values() if isinstance(value, dict) else value:
            yield from tensors(one)


def behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the CPU as an accelerator."""
    monkeypatch.setattr(sync, "is_asynchronous", lambda device: True)  # noqa: ARG005


def assert_same(one: Any, other: Any) -> None:
    """Compare all tensors of two states."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        one, other = list(one.values()), list(other.values())
    if isinstance(one, list | tuple):
        for mine, theirs in zip(one, other, strict=True):
            assert_same(mine, theirs)
    elif isinstance(one, Tensor | float):
        close(torch.as_tensor(one).double(), torch.as_tensor(other).double())
    else:
        assert one == other


@pytest.mark.parametrize("kind", KINDS)
def test_no_waiting(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes neither synchronize nor move tensors, and give the same sums as those that may read numbers."""
    risk, batches = problem()
    expected = Passes(risk, sums_of(kind, risk))
    found = Passes(risk, sums_of(kind, risk))
    for batch in batches:
        expected.add(batch)
    behind(monkeypatch)
    found.add(batches[0])  # this pass makes the plans
    places = [t.data_ptr() for t in tensors(found.sums.state())]
    before = found.sums.counts()
    differences = []
    for batch in batches[1:]:
        with NoWaiting():
            found.add(batch)
        after = found.sums.counts()
        differences.append({key: after[key] - before[key] for key in after})
        before = after
    # Batches of one shape add the same counts on the host, however many positions count.
    assert differences[0] == differences[1]
    assert [t.data_ptr() for t in tensors(found.sums.state())] == places
    assert_same(found.sums.state(), expected.sums.state())


def test_waiting_is_noticed() -> None:
    """The test above relies on this."""
    x = torch.arange(4)
    wrong: list[Callable[[], Any]] = [
        lambda: x.sum().item(),
        lambda: x[x > 1],
        lambda: torch.unique(x),
        x.nonzero,
        lambda: bool(x[0] > 0),
        lambda: x.clone().index_put_((x > 1,), x[0]),
    ]
    for function in wrong:
        with pytest.raises(AssertionError, match="waits"), NoWaiting():
            function()
    with NoWaiting():
        x[x]


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_counts_of_a_replayed_pass(sharing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replayed pass runs kernels but no Python: counts on the host are added, those on the device are read again."""
    risk, batches = problem()
    expected = Passes(risk, FactorSums(Settings(sharing=sharing)))
    for batch in batches:
        expected.add(batch)
    behind(monkeypatch)
    sums = FactorSums(Settings(sharing=sharing))
    found = Passes(risk, sums)
    found.add(batches[0])
    before = sums.counts()
    found.add(batches[1])
    recorded = {key: count - before[key] for key, count in sums.counts().items()}
    read_counts(sums.blocks.values())
    # What Python counts in the last pass is taken back.
    unchanged = sums.counts()
    found.add(batches[2])
    sums.add_counts({key: unchanged[key] - count for key, count in sums.counts().items()})
    assert sums.counts() == unchanged
    for block in sums.blocks.values():
        for role in block.roles.values():
            role.counts_are_read = True  # a replay does not announce that it has counted
    sums.add_counts(recorded)
    sums.complete()
    expected_sums = expected.sums
    assert isinstance(expected_sums, FactorSums)
    expected_sums.complete()
    assert_same(sums.state(), expected_sums.state())


def test_one_question_for_all_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts of all blocks are read together, and only at the end."""
    asked: list[int] = []
    numbers = sync.numbers

    def noted(found: list[Tensor]) -> list[float]:
        asked.append(len(found))
        return numbers(found)

    monkeypatch.setattr(sync, "numbers", noted)
    behind(monkeypatch)

    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = (nn.Embedding(VOCABULARY, 3, padding_idx=0) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = (self.one(x) * self.two(x)).sum(1)
            return result

    X = torch.tensor([[0, 1, 2], [3, 0, 0]])
    y = torch.randn(2, 3, dtype=torch.float64)
    passes = Passes(EmpiricalRisk(Tables().double(), nn.MSELoss(), (X, y)), FactorSums(Settings()))
    sums = passes.sums
    assert isinstance(sums, FactorSums)
    for _ in range(2):
        passes.add(Batch(X, y, 0))
    assert not asked
    read_counts(sums.blocks.values())
    for block in sums.blocks.values():
        block.complete()
        assert block.terms == 6  # three positions count, in each of two passes
    assert asked == [2]
    # A block whose counts were not read yet is right as well.
    passes = Passes(passes.risk, FactorSums(Settings()))
    passes.add(Batch(X, y, 0))
    for settle in (False, True):
        for block in passes.sums.blocks.values():  # type: ignore[attr-defined]
            if settle:
                block.complete()
            assert block.terms == 3


def test_data_without_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `reduce`, examples without any position do not count: the number of others is on the device, too."""
    torch.manual_seed(0)
    X = torch.randn(9, 3, dtype=torch.float64)
    risk = EmpiricalRisk(Routed().double(), nn.MSELoss(), (X, X))
    expected = KFAC(risk, sharing="reduce")
    behind(monkeypatch)
    found = KFAC(risk, sharing="reduce")
    assert found.blocks["expert"].sums.terms == int((X[:, 0] > 0).sum())
    close(found.to_dense(), expected.to_dense())


def test_inverse_squares_stay_where_they_are() -> None:
    input_sum, gradient_sum = (OuterProductSum.zeros(2, 1, False, False, torch.float64, "cpu") for _ in range(2))
    role = RoleSums(input_sum, gradient_sum, inverse_squares=0.5)  # like a file
    role.add_positions(torch.tensor([1.0, 0.0, 2.0]))
    where = role.inverse_squares
    assert isinstance(where, Tensor)
    role.add_positions(torch.tensor([2.0]))
    assert role.inverse_squares is where
    assert float(where) == 0.5 + 1 + 0.25 + 0.25


def test_a_role_without_inputs() -> None:
    """A table whose second role has seen only zeros: there is nothing to rescale by, and all numbers are finite."""
    input_sum, gradient_sum = (OuterProductSum.zeros(2, 1, False, False, torch.float64, "cpu") for _ in range(2))
    gradient_sum.add(torch.ones(3, 2, dtype=torch.float64))
    other = RoleSums(gradient_sum, gradient_sum, 3.0)
    layout = Layout("W", (2, 2), (0, 2), (0, 1), 1)
    block = BlockSums(layout, "expand", roles={"A": RoleSums(input_sum, gradient_sum, 3.0), "B": other})
    close(block.side_total("A")[0], torch.full((2, 2), 3.0).double())
    close(block.side_total("B")[0], torch.full((2, 2), 6.0).double())


@pytest.mark.parametrize("basis", [False, True])
@pytest.mark.parametrize("owners", ["batch first", "batch last", "listed", "no tokens"])
def test_squares_of_embeddings(owners: str, basis: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each example's gradient for a token is a sum over its positions; squares are added up over examples."""
    torch.manual_seed(1)
    inputs = OneHot(VOCABULARY, torch.float64, padding=2)
    shape = (LENGTH, N) if owners == "batch last" else (N, 0) if owners == "no tokens" else (N, LENGTH)
    x, g = torch.randint(4, shape), torch.randn(*shape, 3, dtype=torch.float64)
    own: RowMap
    data = torch.arange(N).unsqueeze(1).expand(N, shape[1])
    if owners == "listed":
        data = torch.randint(N - 1, shape)  # one example has no rows
        own = IndexedRows(data.flatten(), N)
    elif owners == "batch last":
        data = torch.arange(N).expand(shape)
        own = StridedRows(N, 1)
    else:
        own = StridedRows(N, max(shape[1], 1))
    Q = torch.linalg.qr(torch.randn(1, 3, 3, dtype=torch.float64))[0]
    expected = torch.zeros(3, VOCABULARY, dtype=torch.float64)
    for datum, token in product(range(N), range(VOCABULARY)):
        total = torch.zeros(3, dtype=torch.float64)
        for place in product(*map(range, shape)):
            if data[place] == datum and x[place] == token != 2:
                total += g[place]
        expected[:, token] += (Q[0].T @ total if basis else total).square()
    monkeypatch.setattr("kfs.factors.accumulate.inputs.at_a_time", lambda *_: 3)
    for there in (False, True):
        monkeypatch.setattr(sync, "is_asynchronous", lambda _, there=there: there)
        use = Use(inputs, x, own, ones=False)
        for _ in range(2):  # the second column uses a result that the first one has cached
            found = torch.zeros(1, 3, VOCABULARY, dtype=torch.float64)
            inputs.add_squares(found, use, g, None, Q if basis else None)
            close(found[0], expected)


@pytest.mark.parametrize("make", [KFAC, EKFAC])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_whole_computations(make: Any, sharing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    risk, _ = problem()
    expected = make(risk, sharing=sharing).to_dense()
    behind(monkeypatch)
    close(make(risk, sharing=sharing).to_dense(), expected)
