"""Replayed passes and state on the host: structures of batches, attributes of models, memory that others free."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from kfs.factors import KFAC
from kfs.problem.risk import EmpiricalRisk
from kfs.runtime import cuda_graphs, sync
from kfs.runtime.cuda_graphs import shape_of
from tests.factors.tape import Tapes
from tests.factors.test_replay import FISHERS, make_risk, same_factors

N = 4


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tapes]]:
    """Record all passes on tapes: one recorder for each computation."""
    made: list[Tapes] = []

    def recorder_for(*_: Any) -> Callable[[], Tapes]:
        made.append(Tapes())
        return lambda one=made[-1]: one  # type: ignore[misc]

    monkeypatch.setattr(cuda_graphs, "recorder_for", recorder_for)
    monkeypatch.setattr("kfs.runtime.sync.is_asynchronous", lambda _: True)
    sync._constants.clear()
    yield made
    sync._constants.clear()


def inputs(num_data: int = N, *shape: int) -> Tensor:
    return torch.randn(num_data, *shape, 3, dtype=torch.float64)


def labels(num_data: int = N) -> Tensor:
    return torch.randint(3, (num_data,))


class Net(nn.Module):
    """Sums its inputs in different ways."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: Any, shift: Any = None, scale: Any = None) -> Tensor:
        h = self.first(x) if shift is None else self.first(x) + self.second(shift)
        h = h if scale is None else h * self.second(scale)
        result: Tensor = self.head(torch.tanh(h))
        return result


class Typed(Net):
    """Reads the type of a number, and its sign."""

    def forward(self, x: Tensor, kind: Any) -> Tensor:  # type: ignore[override]
        factors = {"True": 1.0, "1": 2.0, "1.0": 3.0, "0.0": 4.0, "-0.0": 5.0}
        return super().forward(x, x) * factors[repr(kind)]


class Pair(NamedTuple):
    """One argument with two tensors."""

    x: Tensor
    shift: Tensor


class Either(Net):
    """Two arguments, or one with two tensors."""

    def forward(self, x: Any, shift: Any = None, scale: Any = None) -> Tensor:
        return 2 * super().forward(*x) if isinstance(x, Pair) else super().forward(x, shift)


def risk_of(model: Callable[[], nn.Module], batches: Callable[[], list[Any]]) -> EmpiricalRisk:
    torch.manual_seed(0)
    return EmpiricalRisk(model().double().eval(), nn.CrossEntropyLoss(), batches())


def several(*xs: Callable[[], Any]) -> list[Any]:
    """Return six batches of each kind, in order of kinds."""
    return [(x(), labels()) for x in xs for _ in range(6)]


STRUCTURES: dict[str, tuple[Any, list[Callable[[], Any]]]] = {
    "None": (Net, [lambda: (inputs(), inputs(), None), lambda: (inputs(), None, inputs())]),
    "keys": (Net, [lambda: {"x": inputs(), "shift": inputs()}, lambda: {"shift": inputs(), "x": inputs()}]),
    "types": (Typed, [lambda: (inputs(), True), lambda: (inputs(), 1), lambda: (inputs(), 1.0)]),
    "signs": (Typed, [lambda: (inputs(), 0.0), lambda: (inputs(), -0.0)]),
    "tuples": (Either, [lambda: (inputs(), inputs()), lambda: Pair(inputs(), inputs())]),
}


@pytest.mark.parametrize("kind", STRUCTURES)
def test_structures(kind: str, tapes: list[Tapes], monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches whose tensors have the same shapes, but whose structure differs."""
    model, xs = STRUCTURES[kind]
    K = KFAC(risk_of(model, lambda: several(*xs)), "mc")
    assert len(tapes[0].made) >= 1
    monkeypatch.undo()
    same_factors(K, KFAC(risk_of(model, lambda: several(*xs)), "mc"))


@pytest.mark.parametrize("fisher", FISHERS)
def test_fishers(fisher: Any, tapes: list[Tapes], monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes compute the same without Python."""
    K = KFAC(make_risk(), fisher)
    assert len(tapes[0].made) == 1
    monkeypatch.undo()
    same_factors(K, KFAC(make_risk(), fisher))


class Pieces(list[Any]):
    """A list that models recognize by its type."""


class TestWhatBelongsToOthers:
    """Inputs and attributes of a model."""

    def test_inputs_are_not_changed(self, tapes: list[Tapes]) -> None:
        """A list of another type is not copied, so a replay would overwrite the user's data."""

        class Listed(Net):
            def forward(self, x: Any, shift: Any = None, scale: Any = None) -> Tensor:
                return super().forward(*x)

        batches = several(lambda: Pieces([inputs(), inputs()]))
        before = [t.clone() for x, _ in batches for t in x]
        KFAC(risk_of(Listed, lambda: batches))
        assert all(map(torch.equal, before, [t for x, _ in batches for t in x]))
        assert not tapes[0].made

    def test_batch_sizes_of_packed_sequences(self) -> None:
        """They are on the CPU, and a graph would not read them again."""
        risk = make_risk(1)
        packed = pack_sequence([inputs(3), inputs(2)])._replace(batch_sizes=torch.ones(2, device="meta"))
        assert shape_of((packed, next(iter(risk.batches())).y)) is None

    def test_tensors_of_other_types(self) -> None:
        class Marked(Tensor):
            pass

        marked = inputs().as_subclass(Marked)
        assert shape_of((marked, next(iter(make_risk(1).batches())).y)) is None

    def test_attributes(self, tapes: list[Tapes], monkeypatch: pytest.MonkeyPatch) -> None:
        """A model that keeps the last activation holds the right one, not memory of a graph."""

        class Keeps(Net):
            last: Tensor | None = None

            def forward(self, x: Any, shift: Any = None, scale: Any = None) -> Tensor:
                f = super().forward(x, x)
                f = f if self.last is None else f + self.last.mean()
                self.last = f.detach()
                return f

        def make() -> EmpiricalRisk:
            return risk_of(Keeps, lambda: several(inputs))

        risk = make()
        K = KFAC(risk, audit=False)
        assert not tapes[0].made
        model = risk.model
        assert isinstance(model, Keeps)
        assert model.last is not None
        assert model.last.isfinite().all()
        monkeypatch.undo()
        same_factors(K, KFAC(make(), audit=False))

    def test_hooks(self, tapes: list[Tapes]) -> None:
        """Hooks run in every pass."""
        risk = risk_of(Net, lambda: several(lambda: (inputs(), inputs())))
        outputs: list[Tensor] = []
        assert isinstance(risk.model, nn.Module)
        risk.model.register_forward_hook(lambda *args: outputs.append(args[-1]))
        KFAC(risk, audit=False)
        assert not tapes[0].made
        assert len(outputs) == risk.num_batches
        assert all(output.isfinite().all() for output in outputs)

    def test_hooks_of_the_first_pass(self, tapes: list[Tapes]) -> None:
        """A hook that the model registers in its first call runs in every pass."""
        outputs: list[Tensor] = []

        class Hooked(Net):
            def forward(self, x: Any, shift: Any = None, scale: Any = None) -> Tensor:
                if not self.head._forward_hooks:
                    self.head.register_forward_hook(lambda *args: outputs.append(args[-1]))
                return super().forward(x, shift, scale)

        risk = risk_of(Hooked, lambda: several(lambda: (inputs(), inputs())))
        KFAC(risk, audit=False)
        assert not tapes[0].made
        assert len(outputs) == risk.num_batches
        assert all(output.isfinite().all() for output in outputs)

    def test_sizes_as_attributes(self, tapes: list[Tapes]) -> None:
        """Values that are the same in every pass have no effect."""

        class Sizes(Net):
            def forward(self, x: Any, shift: Any = None, scale: Any = None) -> Tensor:
                self.sizes = [1000 * len(x), "rows"]
                return super().forward(x, x)

        KFAC(risk_of(Sizes, lambda: several(inputs)))
        assert len(tapes[0].made) == 1


class Positions(nn.Module):
    """Caches factors for positions, and recomputes them if the length of sequences changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(3, 4), nn.Linear(4, 3)
        self.length = 0

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] != self.length:
            self.length = x.shape[1]
            self.factors = torch.arange(1.0, 1.0 + self.length).to(x).unsqueeze(1).cos()
        result: Tensor = self.head(torch.tanh(self.first(x) * self.factors)).mean(1)
        return result


class TestFreedMemory:
    """Memory that a graph reads must not be freed before the graph."""

    # The model's factors for length 5 are replaced after they were recorded; or constants of many other sizes push the
    # recorded ones out of the cache.
    @pytest.mark.parametrize("others", [[(N, 6)], [(n, 5) for n in range(5, 90)]], ids=["model", "constants"])
    def test_replaced(self, others: list[Any], tapes: list[Tapes], monkeypatch: pytest.MonkeyPatch) -> None:
        sizes = [(N, 5)] * 4 + others + [(N, 5)] * 5

        def make() -> EmpiricalRisk:
            return risk_of(Positions, lambda: [(inputs(*size), labels(size[0])) for size in sizes])

        K = KFAC(make(), "mc")
        assert len(tapes[0].made) == 1
        monkeypatch.undo()
        same_factors(K, KFAC(make(), "mc"))

    def test_model_afterwards(self, tapes: list[Tapes]) -> None:
        """Factors that were computed during recording are memory of the graph: the model keeps its earlier ones."""
        sizes = [(N, 5), (N, 5), (2, 6), (N, 5), *[(N, 5)] * 5, (2, 5)]
        risk = risk_of(Positions, lambda: [(inputs(*size), labels(size[0])) for size in sizes])
        KFAC(risk, "mc", audit=False)
        assert len(tapes[0].made) == 1
        model = risk.model
        assert isinstance(model, Positions)
        assert model(inputs(2, 5)).isfinite().all()
