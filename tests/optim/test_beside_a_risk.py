"""Curvature of a watched model: risk and optimizer do not disturb each other, and no work is done twice."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import kfs
from kfs import EmpiricalRisk
from kfs.errors import KfsError
from kfs.operators import GGN
from kfs.optim import KFAC
from kfs.optim import watch as watching
from tests.optim.training import data, mlp, train, weights

LOSS = nn.CrossEntropyLoss()
X, LABELS = data()


def risk(model: nn.Module) -> EmpiricalRisk:
    return EmpiricalRisk(model, LOSS, (X, LABELS))


USES: dict[str, Callable[[nn.Module], Any]] = {
    "KFAC": lambda model: kfs.KFAC(risk(model), fisher="type-2").to_dense(),
    "KFAC, empirical": lambda model: kfs.KFAC(risk(model), fisher="empirical").to_dense(),
    "KFAC, mc": lambda model: kfs.KFAC(risk(model)).to_dense(),
    "EKFAC": lambda model: kfs.EKFAC(risk(model), fisher="type-2").to_dense(),
    "GGN": lambda model: GGN(risk(model)).to_dense(),
    "risk": lambda model: risk(model).value(),
    "inspect": lambda model: str(kfs.inspect(model, X)),
}


def assert_same(a: Any, b: Any) -> None:
    """Compare nested states to the last bit."""
    if isinstance(a, Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_same(one, other)
    else:
        assert a == b


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that grows with all work for watching."""
    done: list[str] = []
    for name in ("Pass", "Audits", "new_trace"):
        made = getattr(watching, name)

        def counted(*args: Any, name: str = name, made: Any = made, **kwargs: Any) -> Any:
            done.append(name)
            return made(*args, **kwargs)

        monkeypatch.setattr(watching, name, counted)
    return done


def trained(model: nn.Module, use: Callable[[nn.Module], Any] | None, when: str, work: list[str]) -> Any:
    """Take three steps, and call a function in the second one.

    Returns:
        The result of the function; parameters; the optimizer's state.
    """
    optimizer = KFAC(model, LOSS, factors_every=1, fisher="type-2")
    result = None

    def pause(now: str) -> None:
        nonlocal result
        if use is not None and now == when and optimizer.steps == 1:
            before = copy.deepcopy(optimizer.state_dict())
            gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
            paid = len(work)
            result = use(model)
            assert len(work) == paid
            assert_same(optimizer.state_dict(), before)
            assert_same([p.grad for p in model.parameters()], gradients)

    for _ in range(3):
        optimizer.zero_grad()
        pause("before")
        f = model(X)
        pause("between")
        LOSS(f, LABELS).backward()
        pause("after")
        optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.close()
    return result, weights(model), state


@pytest.mark.parametrize("when", ["before", "between", "after"])
@pytest.mark.parametrize("use", USES)
def test_neither_disturbs_the_other(use: str, when: str, work: list[str]) -> None:
    """No pass of the risk is watched, the optimizer's state stays, and results are as without the other computation."""
    result, moved, state = trained(mlp(), USES[use], when, work)
    _, expected_weights, expected_state = trained(mlp(), None, when, work)
    assert torch.equal(moved, expected_weights)
    assert_same(state, expected_state)
    model = mlp()
    optimizer = KFAC(model, LOSS, factors_every=1, fisher="type-2")
    train(model, optimizer, [(X, LABELS)], LOSS)
    optimizer.close()
    assert_same(result, USES[use](model))


def test_an_interrupted_computation_for_a_risk(work: list[str]) -> None:
    """After an error, training is watched again."""
    model = mlp()
    optimizer = KFAC(model, LOSS)
    with pytest.raises(KfsError):
        kfs.KFAC(EmpiricalRisk(model, LOSS, (X, LABELS + 5)))
    assert not work
    train(model, optimizer, [(X, LABELS)], LOSS)
    assert "Pass" in work


class Outer(nn.Module):
    """Recomputes a network in the backward pass."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.net, x, use_reentrant=False)


@pytest.mark.parametrize("use", ["KFAC", "EKFAC"])
def test_checkpoints_around_the_watched_model(use: str, work: list[str]) -> None:
    """A network that is recomputed in the backward pass of a risk is not watched either."""
    net = mlp()
    expected = USES[use](net)
    optimizer = KFAC(net, LOSS)
    torch.testing.assert_close(USES[use](Outer(net)), expected)
    assert not work
    assert optimizer.steps == 0


def test_training_through_a_checkpoint(work: list[str]) -> None:
    """A checkpoint around the watched model recomputes it in the backward pass, which is not a separate pass."""
    net, plain = mlp(), mlp()
    options: dict[str, Any] = {"fisher": "empirical", "audit": False, "factors_every": 1}
    train(plain, KFAC(plain, LOSS, **options), [(X, LABELS)] * 3, LOSS)
    work.clear()
    train(Outer(net), KFAC(net, LOSS, **options), [(X, LABELS)] * 3, LOSS)
    assert work.count("Pass") == 3
    torch.testing.assert_close(weights(net), weights(plain))


class CallsItself(nn.Module):
    """Uses its own prediction as input, without gradients, as diffusion models do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.back = nn.Linear(3, 4).double()

    def forward(self, x: Tensor, again: bool = True) -> Any:
        if not again:
            return self.net(x)
        with torch.no_grad():
            hint = self(x, again=False)
        return self.net(x + self.back(hint))


def test_a_model_that_calls_itself_without_gradients() -> None:
    """The inner call is a part of the pass; parameters after it are covered."""
    torch.manual_seed(0)
    model = CallsItself()
    optimizer = KFAC(model, LOSS)
    train(model, optimizer, [(X, LABELS)], LOSS)
    assert not optimizer.uncovered
    assert len(optimizer.preconditioner.curvature.averages) == 4
