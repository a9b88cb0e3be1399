"""Data: every pass is the same, users' generators do not change, and data that change, or are invalid, are refused."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from kfs import EKFAC, KFAC
from kfs.errors import DataError
from kfs.operators import GGN, Fisher, Hessian, Jacobian
from kfs.problem import risk as risk_module
from kfs.problem.data import can_be_cut, cut, fingerprint, values_digest
from kfs.problem.risk import EmpiricalRisk
from tests.operators.contract import close
from tests.operators.problems import PROBLEMS


@pytest.mark.parametrize("progress", [False, True])
def test_loaders_with_a_generator_are_repeatable_and_leave_it_alone(progress: bool) -> None:
    _, model, X, y = PROBLEMS[1].make()
    generator = torch.Generator().manual_seed(5)
    torch.rand(3, generator=generator)
    state = generator.get_state()
    loader = DataLoader(TensorDataset(X, y), batch_size=2, shuffle=True, generator=generator)
    risk = EmpiricalRisk(model, PROBLEMS[1].loss, loader, progress=progress)
    J = Jacobian(risk)
    close(J.T.to_dense().T, J.to_dense())
    F = Fisher(risk, "type-1")
    close(F.to_dense(), F.to_dense().T)
    assert torch.equal(generator.get_state(), state)


class OneAtATime:
    """Restarts its only iterator, as a `DataLoader` with persistent workers does."""

    def __init__(self, *batches: Any) -> None:
        self.batches, self.position = batches, 0

    def __iter__(self) -> Iterator[Any]:
        self.position = 0
        return self.rest()

    def rest(self) -> Iterator[Any]:
        while self.position < len(self.batches):
            self.position += 1
            yield self.batches[self.position - 1]


def test_data_are_iterated_once_at_a_time() -> None:
    whole, model, X, y = PROBLEMS[0].make()
    v = torch.ones(31, dtype=torch.float64)
    for kind in (GGN, Hessian, Jacobian):
        for settings in ({}, {"memory": 10_000}):
            risk = EmpiricalRisk(model, PROBLEMS[0].loss, OneAtATime((X[:2], y[:2]), (X[2:], y[2:])))
            close(kind(risk, **settings) @ v, kind(whole) @ v)  # type: ignore[arg-type]
    diagonal = GGN(EmpiricalRisk(model, PROBLEMS[0].loss, OneAtATime((X[:2], y[:2]), (X[2:], y[2:])))).diagonal()
    close(diagonal, GGN(whole).diagonal())


@pytest.mark.parametrize("num_batches", [0, 1])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_empty_data_are_refused_everywhere(num_batches: int, reduction: str) -> None:
    _, model, X, y = PROBLEMS[0].make()
    risk = EmpiricalRisk(model, nn.MSELoss(reduction=reduction), [(X[:0], y[:0])] * num_batches)
    v = torch.ones(31, dtype=torch.float64)
    for call in (
        risk.value,
        risk.gradient,
        lambda: GGN(risk) @ v,
        lambda: Hessian(risk) @ v,
        lambda: Fisher(risk) @ v,
        GGN(risk).diagonal,
        lambda: Jacobian(risk),
        lambda: GGN(risk, memory=10**6),
    ):
        with pytest.raises(DataError, match="data set is empty"):
            call()


def test_means_over_other_targets_than_before_are_refused() -> None:
    _, model, X, y = PROBLEMS[1].make()
    v = torch.ones(31, dtype=torch.float64)
    masked, weight = y.clone(), torch.ones(3, dtype=torch.float64)
    risks = [
        EmpiricalRisk(model, nn.CrossEntropyLoss(), [(X[:2], masked[:2]), (X[2:], masked[2:])]),
        EmpiricalRisk(model, nn.CrossEntropyLoss(weight=weight), (X, y)),
    ]
    operators = [GGN(risk, reuse=reuse) for risk in risks for reuse in (False, True)]
    for operator in operators:
        operator @ v
    masked[3:] = -100  # not in the first batch, which may not change at all
    weight.mul_(2)
    for call in (*(risk.value for risk in risks), *(risk.gradient for risk in risks)):
        with pytest.raises(DataError, match=r"mean was over 5 targets at first, and is over .* now.*new EmpiricalRisk"):
            call()
    for operator in operators:
        with pytest.raises(DataError, match="mean was over"):
            operator @ v


def test_sums_do_not_care_what_counts() -> None:
    _, model, X, y = PROBLEMS[1].make()
    loss, masked = nn.CrossEntropyLoss(reduction="sum"), y.clone()
    risk = EmpiricalRisk(model, loss, [(X[:2], masked[:2]), (X[2:], masked[2:])])
    for masked[3] in (1, -100):
        assert risk.value() == pytest.approx(loss(model(X), masked).item())
    assert EmpiricalRisk(model, loss, (X, torch.full_like(y, -100))).value() == 0


@pytest.mark.parametrize("wrong", [lambda batch: batch[1], lambda batch: batch[:1], lambda batch: (*batch, 3)])
def test_unpack_returns_a_pair(wrong: Any) -> None:
    X, y = torch.randn(2, 3, dtype=torch.float64), torch.randn(2, 2, dtype=torch.float64)
    with pytest.raises(DataError, match=r"unpack= returned a (Tensor|tuple), expected a pair"):
        EmpiricalRisk(nn.Linear(3, 2).double(), nn.MSELoss(), [(X, y)], unpack=wrong).value()


class Drawn:
    """Data that NumPy samples from other data, again in every pass."""

    def __init__(self, draw: Callable[[np.random.Generator, Tensor, Tensor], Any]) -> None:
        self.draw, self.generator = draw, np.random.default_rng(0)
        self.X, self.y = torch.randn(6, 3, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)

    def __iter__(self) -> Iterator[Any]:
        yield self.draw(self.generator, self.X, self.y)


def shuffled(generator: np.random.Generator, X: Tensor, y: Tensor) -> Any:
    order = torch.from_numpy(generator.permutation(len(X)))
    return X[order], y[order]


def augmented(generator: np.random.Generator, X: Tensor, y: Tensor) -> Any:
    return X + torch.from_numpy(generator.standard_normal(X.shape)), y


def relabeled(generator: np.random.Generator, X: Tensor, y: Tensor) -> Any:
    return X, y + torch.from_numpy(generator.standard_normal(y.shape))


CALLS: dict[str, Callable[[EmpiricalRisk], Any]] = {
    "value": lambda risk: risk.value(),
    "gradient": lambda risk: risk.gradient(),
    "GGN": lambda risk: GGN(risk) @ torch.ones(8, dtype=torch.float64),
    "Jacobian": Jacobian,
    "KFAC": KFAC,
    "EKFAC": EKFAC,
}


@pytest.mark.parametrize("draw", [shuffled, augmented, relabeled])
@pytest.mark.parametrize("call", CALLS)
def test_data_that_somebody_else_draws_are_refused(call: str, draw: Any) -> None:
    risk = EmpiricalRisk(nn.Linear(3, 2).double(), nn.MSELoss(), Drawn(draw))
    risk.value()
    with pytest.raises(DataError, match=r"different values than in the first pass.*list\(data\).*a new EmpiricalRisk"):
        CALLS[call](risk)
    once = EmpiricalRisk(nn.Linear(3, 2).double(), nn.MSELoss(), list(Drawn(draw)))
    once.value()
    CALLS[call](once)


def test_eigenvalues_need_the_data_of_the_factors() -> None:
    """EKFAC makes two passes. If their data differ, it raises an error."""
    with pytest.raises(DataError, match="different values"):
        EKFAC(EmpiricalRisk(nn.Linear(3, 2).double(), nn.MSELoss(), Drawn(augmented)))


def test_data_that_are_changed_in_place_need_a_new_risk() -> None:
    X, y, model = torch.randn(4, 3).double(), torch.randn(4, 2).double(), nn.Linear(3, 2).double()
    risk = EmpiricalRisk(model, nn.MSELoss(), (X, y))
    before = risk.value()
    X[2, 1] += 1
    with pytest.raises(DataError, match="a new EmpiricalRisk"):
        risk.value()
    assert EmpiricalRisk(model, nn.MSELoss(), (X, y)).value() != before
    X[2, 1] -= 1
    assert risk.value() == pytest.approx(before)
    batches = [(X, y)]
    risk = EmpiricalRisk(model, nn.MSELoss(), batches)
    risk.value()
    batches[0] = (X[:3], y[:3])
    with pytest.raises(DataError, match=r"had the tensors torch\.float64 \[4, 3\], .*has torch\.float64 \[3, 3\]"):
        risk.value()


def test_only_complete_passes_are_remembered() -> None:
    """Data may be corrected after a first attempt that failed."""
    X, y = torch.full((4, 3), torch.nan, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    risk = EmpiricalRisk(nn.Linear(3, 2).double(), nn.MSELoss(), (X, y))
    with pytest.raises(DataError, match="example 0 is not finite"):
        risk.value()
    X.zero_()
    assert risk.value() > 0


def test_empty_batches_do_not_hide_the_first_one() -> None:
    X, y = torch.randn(4, 3).double(), torch.randn(4, 2).double()
    risk = EmpiricalRisk(nn.Linear(3, 2).double(), nn.MSELoss(), [(X[:0], y[:0]), (X, y)])
    risk.value()
    X[0, 0] += 1
    with pytest.raises(DataError, match="different values"):
        risk.value()


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


# A batch, and a version with a small change that leaves the sum of its values as it is.
BATCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "permuted": (lambda: numbers(5, 3), lambda x: x[[1, 0, 2, 3, 4]]),
    "large": (lambda: numbers(500, 30), lambda x: x.flip(0)),
    "permuted columns": (lambda: numbers(3, 4, 50, 50), lambda x: x.transpose(2, 3)),
    "not contiguous": (lambda: numbers(60, 50).T, lambda x: x.flip(1)),
    "expanded": (lambda: numbers(1, 50).expand(60, 50), lambda x: x.flip(1)),
    "integers": (lambda: torch.arange(6), lambda x: x.flip(0)),
    "booleans": (lambda: torch.arange(6) > 3, lambda x: x.flip(0)),
    "bytes": (lambda: torch.arange(6, dtype=torch.uint8), lambda x: x.flip(0)),
    "half": (lambda: numbers(6).half(), lambda x: x.flip(0)),
    "bfloat16": (lambda: numbers(3000).bfloat16(), lambda x: x.flip(0)),
    "complex": (lambda: torch.complex(numbers(6), numbers(6).flip(0)), lambda x: x.conj()),
    "imaginary part of a conjugate": (lambda: torch.complex(numbers(6), -numbers(6)).conj().imag, lambda x: -x),
    "NaN": (lambda: torch.tensor([1.0, torch.nan, 2.0]), lambda x: x.flip(0)),
    "infinity": (lambda: torch.tensor([torch.inf, -torch.inf]), lambda x: x.flip(0)),
    "a number": (lambda: torch.tensor(1.0), lambda x: -x),
    "gradients": (lambda: numbers(3).requires_grad_() * 2, lambda x: x.flip(0)),
    "nested": (
        lambda: {"a": (numbers(3), [numbers(2), {"b": torch.arange(3)}]), "c": "words"},
        lambda x: {"a": (x["a"][0], [x["a"][1][0], {"b": x["a"][1][1]["b"].flip(0)}]), "c": "words"},
    ),
    "two tensors": (lambda: (numbers(3), 2 * numbers(3)), lambda x: (x[1], x[0])),
    "other dtype": (lambda: torch.zeros(3), lambda x: x.int()),
    "other shape": (lambda: torch.zeros(6), lambda x: x.reshape(2, 3)),
    "empty": (lambda: torch.zeros(0, 3), lambda x: x.reshape(3, 0)),
    "sparse": (lambda: numbers(3, 2).to_sparse(), lambda x: torch.cat([x, x])),
}


@pytest.mark.parametrize("name", BATCHES)
def test_fingerprints(name: str) -> None:
    make, change = BATCHES[name]
    y = torch.zeros(1)
    assert fingerprint(make(), y) == fingerprint(make(), y)
    assert fingerprint(change(make()), y) != fingerprint(make(), y)
    assert fingerprint(make(), y + 1) != fingerprint(make(), y)


class Words:
    """Data without tensors, and without order."""


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_has_no_fingerprint_is_left_out() -> None:
    y = torch.zeros(1)
    ragged = torch.nested.nested_tensor([numbers(3), numbers(2)])
    things: list[Any] = [None, 3, "words", Words(), ["a", ("b",)], {}, ragged]
    for x in things:
        assert fingerprint(x, y) == fingerprint(None, y) != fingerprint(None, y + 1)


def test_the_device_is_asked_once_per_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """For any number of tensors in a batch, samples of them are copied to the CPU together."""
    calls = []
    original = Tensor.cpu

    def counted(t: Tensor) -> Tensor:
        calls.append(t)
        return original(t)

    monkeypatch.setattr(Tensor, "cpu", counted)
    fingerprint({"a": numbers(3), "b": (numbers(5000), torch.arange(3))}, torch.zeros(3))
    assert len(calls) == 1
    assert calls[0].numel() < 20_000  # of 40,000 bytes


def test_one_batch_is_looked_at_in_every_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = []

    def noted(x: Any, y: Tensor) -> Any:
        looked_at.append(x)
        return fingerprint(x, y)

    monkeypatch.setattr(risk_module, "fingerprint", noted)
    batches = [(numbers(3, 2), numbers(3, 2)), (2 * numbers(3, 2), numbers(3, 2))]
    risk = EmpiricalRisk(nn.Linear(2, 2).double(), nn.MSELoss(), batches)
    for passes in (1, 2, 3):
        risk.value()
        assert len(looked_at) == passes
        assert looked_at[-1] is batches[0][0]


class Special(Tensor):
    """An object whose behavior is unknown."""


def test_values_of_parameters_are_told_apart() -> None:
    """This holds for any precision in which values differ, but not for tensors without values or plain storage."""
    a, b = torch.rand(3), torch.rand(2, 1000)
    assert values_digest([a, b]) == values_digest([a.double(), nn.Parameter(b)])
    assert len({values_digest(tensors) for tensors in ([a, b], [b, a], [a], [a, b + 1])}) == 4
    assert values_digest([a.to("meta")]) == values_digest([a.as_subclass(Special)]) == ""


def test_batches_have_random_numbers_of_their_own() -> None:
    """Random numbers of a data set are the same in every pass, and differ between batches."""

    class Noisy:
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            for _ in range(3):
                yield torch.rand(2, 3), torch.zeros(2, 1)

    risk = EmpiricalRisk(nn.Linear(3, 1), nn.MSELoss(), Noisy())
    first, second = ([batch.x for batch in risk.batches()] for _ in range(2))
    assert all(map(torch.equal, first, second))
    assert len({tuple(x.flatten().tolist()) for x in first}) == 3


@pytest.mark.parametrize("length", [1021, 1022, 5000])
def test_fingerprints_see_all_parts_of_large_tensors(length: int) -> None:
    """Of many numbers, a sample is used that is spread over all of them."""
    y = torch.zeros(2)
    x = torch.arange(float(length))
    digests = {fingerprint(x, y).digest}
    for part in torch.arange(length).chunk(10):
        other = x.clone()
        other[part] += 1
        digests.add(fingerprint(other, y).digest)
    assert len(digests) == 11


def test_the_given_batch_axis_is_cut() -> None:
    """If the lengths of several axes are the number of examples, the given one is used, or else the first."""
    x = torch.arange(9).reshape(3, 3)
    assert torch.equal(cut(x, 3, [2, 0]), x[[2, 0]])
    assert torch.equal(cut(x, 3, [2, 0], batch_axis=1), x[:, [2, 0]])
    assert torch.equal(cut(x[:2], 3, [2, 0]), x[:2, [2, 0]])


def test_indices_of_data_are_not_cut() -> None:
    """A batch whose inputs contain indices of examples, such as the edges of a graph, cannot be cut to few examples."""
    X = torch.randn(6, 2)
    assert can_be_cut(X, 6, 4)
    assert can_be_cut((X, torch.tensor([[0, 3], [1, 2]]).flatten()), 6, 4)
    assert not can_be_cut((X, torch.tensor([[0, 3], [1, 5]]).flatten()), 6, 4)
    assert not can_be_cut(torch.randn(5, 2), 6, 4)
