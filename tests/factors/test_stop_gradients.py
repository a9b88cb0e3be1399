"""A tensor that is detached from a parameter is a constant, whether or not the parameter requires gradients.

The oracle is the GGN, computed by backward passes: for one example and one position, KFAC equals its blocks.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from kfs import EKFAC, GGN, KFAC, EmpiricalRisk, inspect
from kfs.errors import DataError, ModelError
from tests.operators.contract import close

LOSS = nn.CrossEntropyLoss()
Params = dict[str, Tensor]


def no_grad(x: Tensor, W: Tensor) -> Tensor:
    with torch.no_grad():
        return F.linear(x, W)


# Second uses of a weight `[3, 3]` that have no gradient.
STOPPED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "detach": lambda x, W: F.linear(x, W.detach()),
    "data": lambda x, W: F.linear(x, W.data),
    "detached view": lambda x, W: F.linear(x, W.T.detach()),
    "view of what was detached": lambda x, W: x @ W.detach()[:, :3].T,
    "without graph": no_grad,
    "elementwise": lambda x, W: x * W.detach()[0],
    "embedding": lambda x, W: F.embedding(torch.ones(len(x), dtype=torch.int64), W.detach()) + x,
}


def function(stopped: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Params, Tensor], Tensor]:
    return lambda p, x: F.linear(F.linear(x, p["W"]).tanh() + stopped(x, p["W"]).sin(), p["V"])


class Module(nn.Module):
    """The same function as a module."""

    def __init__(self, stopped: Callable[[Tensor, Tensor], Tensor], params: Params) -> None:
        super().__init__()
        self.W = nn.Parameter(params["W"].clone())
        self.V = nn.Parameter(params["V"].clone())
        self.stopped = stopped

    def forward(self, x: Tensor) -> Tensor:
        return function(self.stopped)({"W": self.W, "V": self.V}, x)


def values() -> Params:
    return {"W": torch.randn(3, 3, dtype=torch.float64), "V": torch.randn(2, 3, dtype=torch.float64)}


def data(num_data: int = 1) -> tuple[Tensor, Tensor]:
    return torch.randn(num_data, 3, dtype=torch.float64), torch.arange(num_data) % 2


def risks(name: str, params: Params, batch: tuple[Tensor, Tensor]) -> dict[str, EmpiricalRisk]:
    """Return one risk in all forms: functions and modules, with and without `requires_grad`."""
    found = {}
    for case, grads in {"frozen": (False, False), "mixed": (False, True), "trainable": (True, True)}.items():
        given = {n: p.clone().requires_grad_(g) for (n, p), g in zip(params.items(), grads, strict=True)}
        found[f"function, {case}"] = EmpiricalRisk(function(STOPPED[name]), LOSS, batch, params=given)
        module = Module(STOPPED[name], params)
        for (_, p), g in zip(module.named_parameters(), grads, strict=True):
            p.requires_grad_(g)
        found[f"module, {case}"] = EmpiricalRisk(module, LOSS, batch, params=["W", "V"])
        other = Module(STOPPED[name], {n: 0 * p for n, p in params.items()}).requires_grad_(False)
        found[f"module with other values, {case}"] = EmpiricalRisk(other, LOSS, batch, params=given)
    return found


def exact_blocks(name: str, params: Params, X: Tensor, y: Tensor) -> Params:
    """Differentiate the only prediction entry by entry, and the criterion twice."""
    leaves = {n: p.clone().requires_grad_() for n, p in params.items()}
    f = function(STOPPED[name])(leaves, X)[0]
    H = torch.autograd.functional.hessian(lambda f: LOSS(f, y[0]), f.detach())
    blocks = {}
    for n, leaf in leaves.items():
        J = torch.stack([torch.autograd.grad(entry, leaf, retain_graph=True)[0].flatten() for entry in f])
        blocks[n] = J.T @ H @ J
    return blocks


@pytest.mark.parametrize("name", STOPPED)
def test_one_datum(name: str) -> None:
    params, batch = values(), data()
    exact = exact_blocks(name, params, *batch)
    for form, risk in risks(name, params, batch).items():
        K, E, G = KFAC(risk), EKFAC(risk), GGN(risk)
        for weight in ("W", "V"):
            close(K.submatrix([weight]).to_dense(), exact[weight])
            close(E.submatrix([weight]).to_dense(), exact[weight])
            if name != "without graph":  # which forward-mode differentiation does not know
                close(G.submatrix([weight]).to_dense(), exact[weight])
        assert list(K.blocks) == ["W", "V"], form
        assert not inspect(risk.model, batch[0], params=risk.params).uncovered


@pytest.mark.parametrize("name", STOPPED)
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_results_do_not_depend_on_the_form(name: str, sharing: Any) -> None:
    """To the last bit: all forms run the same operations."""
    found = [KFAC(risk, sharing=sharing).to_dense() for risk in risks(name, values(), data(5)).values()]
    assert all(torch.equal(one, found[0]) for one in found)


class Watched(nn.Module):
    """Records which parameters require gradients while it runs, and optionally fails."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3).double(), nn.Linear(3, 2).double()
        self.seen: list[list[bool]] = []
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append([p.requires_grad for p in self.parameters()])
        if self.fails:
            raise KeyError("mine")
        result: Tensor = self.second(self.first(x).tanh())
        return result


def flags(model: nn.Module) -> list[bool]:
    return [p.requires_grad for p in model.parameters()]


def test_flags_are_restored_whatever_happens() -> None:
    X, y = data(4)
    model = Watched()
    model.first.weight.requires_grad_(False)
    model.second.requires_grad_(False)
    before = flags(model)
    risk = EmpiricalRisk(model, LOSS, (X, y), params=["first.weight", "first.bias", "second.weight"])
    given = risk.params
    KFAC(risk)
    # Parameters that were not requested stay frozen.
    assert all(seen == [True, True, True, False] for seen in model.seen)
    assert flags(model) == before
    assert all(p.grad is None for p in model.parameters())
    model.fails = True
    with pytest.raises(KeyError, match="mine"):
        KFAC(risk)
    assert flags(model) == before
    model.fails = False
    for bad, error in (((X * torch.nan, y), DataError), ((X, y[:2]), DataError)):
        with pytest.raises(error):
            KFAC(EmpiricalRisk(model, LOSS, bad, params=["first.weight"]))
        assert flags(model) == before
    assert risk.params is given
    inspect(model, X, params=["second.weight"])
    assert flags(model) == before
    everything = inspect(model.requires_grad_(False), X)
    assert not everything.uncovered
    assert flags(model) == [False] * 4


def test_parameters_of_functions_are_left_alone() -> None:
    params = values()
    risk = EmpiricalRisk(function(STOPPED["detach"]), LOSS, data(4), params=params)
    KFAC(risk)
    assert all(risk.params[name] is p and not p.requires_grad for name, p in params.items())

    def fails(p: Params, x: Tensor) -> Tensor:
        raise KeyError("mine", p, x)

    failing = EmpiricalRisk(fails, LOSS, data(4), params=params)
    with pytest.raises(KeyError, match="mine"):
        KFAC(failing)
    assert all(failing.params[name] is p and not p.requires_grad for name, p in params.items())


class Checkpointed(Watched):
    """Recomputes activations in the backward pass."""

    def __init__(self, saving: bool) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.saving = saving

    def inner(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.first(x).tanh() + F.linear(x, self.first.weight.detach()))
        return result

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if self.saving else self.inner(x)


@pytest.mark.parametrize("frozen", [True, False])
def test_activation_checkpointing(frozen: bool) -> None:
    batch = data(4)
    names = ["first.weight", "first.bias", "second.weight", "second.bias"]
    plain, saving = (
        EmpiricalRisk(Checkpointed(saving).requires_grad_(not frozen), LOSS, batch, params=names)
        for saving in (False, True)
    )
    for columns in (1, 2):
        close(KFAC(saving, columns_at_once=columns).to_dense(), KFAC(plain).to_dense())
    # With other parameter values, a checkpoint would use the module's own ones.
    given = {name: p.detach() + 1 for name, p in saving.params.items()}
    with pytest.raises(ModelError, match="activation checkpointing"):
        KFAC(EmpiricalRisk(Checkpointed(True).requires_grad_(not frozen), LOSS, batch, params=given))


def test_hooks_run_as_for_trainable_models() -> None:
    """Forward hooks run equally often, and change the predictions."""
    batch = data(4)
    names = ["first.weight", "second.weight"]
    found = []
    counts = []
    for frozen in (True, False):
        model = Checkpointed(False).requires_grad_(not frozen)
        calls: list[bool] = []
        model.first.register_forward_hook(lambda *parts, calls=calls: (calls.append(True), 2 * parts[2])[1])
        found.append(KFAC(EmpiricalRisk(model, LOSS, batch, params=names)).to_dense())
        counts.append(len(calls))
    assert torch.equal(*found)
    assert counts[0] == counts[1] > 0
