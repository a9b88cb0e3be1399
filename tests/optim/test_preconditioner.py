"""The preconditioner: its gradients are natural gradients, beside any optimizer, and everything else stays."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kfs
from kfs.errors import KfsWarning, LossError, ModelError, SolverError, StorageError
from kfs.optim import KFAC, Preconditioner
from kfs.optim.safety import Events
from tests.factors.test_no_waiting import NoWaiting
from tests.optim.test_report import Mixed
from tests.optim.training import Layers, data, mlp, weights

LOSS = nn.CrossEntropyLoss()
X, Y = data()
EXACT: dict[str, Any] = {"fisher": "type-2", "trust": None}


class Tied(nn.Module):
    """An embedding whose transpose computes logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.hidden = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.hidden(self.embedding(x.argmax(1))))
        return nn.functional.linear(hidden, self.embedding.weight)


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(9, 3))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": mlp,
    "convolutions": convolutions,
    "tied": Tied,
    "uncovered": lambda: nn.Sequential(nn.Linear(4, 5), nn.utils.parametrizations.weight_norm(nn.Linear(5, 3))),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(2)
    return MODELS[name]().double()


def backward(model: nn.Module, x: Tensor = X, y: Tensor = Y) -> None:
    LOSS(model(x), y).backward()


def value(model: nn.Module, x: Tensor = X) -> float:
    with torch.no_grad():
        return float(LOSS(model(x), Y))


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def train(model: nn.Module, preconditioner: Preconditioner, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for i in range(steps):
        optimizer.zero_grad()
        part = slice(i % 3, 9 + i % 3)
        backward(model, X[part], Y[part])
        preconditioner.step()
        optimizer.step()


@pytest.mark.filterwarnings("ignore::kfs.errors.KfsWarning")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"eigen": True, "inverses_every": 2},
        {"fisher": "empirical", "kl_clip": 1e-3, "factors_every": 2},
        {"fisher": "type-2", "trust": 0.3, "damping_method": "exact", "damping": kfs.Relative(0.1)},
        {"fisher": "forward-only", "sharing": "reduce", "damping_unit": "absolute"},
    ],
)
@pytest.mark.parametrize("name", ["linear", "convolutions", "tied"])
def test_with_sgd_it_is_kfac_without_momentum(name: str, options: dict[str, Any]) -> None:
    """Ten steps with another batch each, with a learning rate of one, for which `kl_clip` has the same meaning."""
    model, other = made(name), made(name)
    kfac = KFAC(model, LOSS, momentum=0.0, noise=None, **options)
    for i in range(10):
        kfac.zero_grad()
        part = slice(i % 3, 9 + i % 3)
        backward(model, X[part], Y[part])
        kfac.step()
    preconditioner = Preconditioner(other, LOSS, **options)
    before = weights(other)
    train(other, preconditioner, torch.optim.SGD(other.parameters(), lr=1.0), 10)
    torch.testing.assert_close(weights(other), weights(model), rtol=1e-10, atol=1e-12)
    assert (weights(other) - before).norm() > 1e-3
    assert preconditioner.steps == 10
    assert preconditioner.events == kfac.events == Events()


@pytest.mark.parametrize("factors_every", [1, 3])
def test_losses_that_are_sums(factors_every: int) -> None:
    """Natural gradients are those of the mean over examples, also in steps without factors."""
    found = []
    for reduction in ("mean", "sum"):
        model, loss = mlp(), nn.CrossEntropyLoss(reduction=reduction)
        preconditioner = Preconditioner(model, loss, damping=0.1, trust=None, factors_every=factors_every)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(5):
            optimizer.zero_grad()
            loss(model(X[i:]), Y[i:]).backward()
            preconditioner.step()
            optimizer.step()
        found.append(weights(model))
    torch.testing.assert_close(*found)


def test_learning_rates_are_those_of_sgd() -> None:
    model, other = mlp(), mlp()
    kfac = KFAC(model, LOSS, lr=0.3, momentum=0.0, noise=None)
    preconditioner = Preconditioner(other, LOSS)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.3)
    for _ in range(5):
        kfac.zero_grad()
        optimizer.zero_grad()
        backward(model)
        backward(other)
        kfac.step()
        preconditioner.step()
        optimizer.step()
    torch.testing.assert_close(weights(other), weights(model), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["linear", "convolutions", "tied"])
@pytest.mark.parametrize("eigen", [False, True])
def test_natural_gradients_are_products_with_inverses(name: str, eigen: bool) -> None:
    """The first natural gradient is the gradient, multiplied by an inverse of `kfs.KFAC`."""
    model = made(name)
    risk = kfs.EmpiricalRisk(model, LOSS, (X, Y))
    # Eigenvalues are corrected from the second step on. Until then, they are those of the factors.
    method: Any = "exact" if eigen else "factored"
    expected = kfs.KFAC(risk, "type-2").inverse(damping=kfs.Relative(0.05), method=method) @ risk.gradient()
    preconditioner = Preconditioner(model, LOSS, damping=0.05, eigen=eigen, **EXACT)
    backward(model)
    preconditioner.step()
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[n])


@pytest.mark.parametrize("kind", ["SGD", "AdamW", "Muon"])
def test_other_optimizers_may_train_the_rest(kind: str) -> None:
    """Their gradients stay as they are, to the bit, and the loss falls."""
    model = mlp()
    if not hasattr(torch.optim, kind):
        pytest.skip("This version of PyTorch does not have it.")
    make = getattr(torch.optim, kind)
    mine = [*model[0].parameters(), *model[2].parameters()]
    preconditioner = Preconditioner(model, LOSS, mine)
    # Muon trains matrices only.
    others = [torch.optim.SGD(mine, lr=0.5), make([model[4].weight], lr=0.01), torch.optim.SGD([model[4].bias], lr=0.1)]
    first = value(model)
    for _ in range(20):
        model.zero_grad()
        backward(model)
        before = gradients(model)
        preconditioner.step()
        for place, (g, old) in enumerate(zip(gradients(model), before, strict=True)):
            assert torch.equal(g, old) == (place >= 4)
        for optimizer in others:
            optimizer.step()
    assert value(model) < 0.9 * first
    assert preconditioner.uncovered == {}


def test_uncovered_parameters_keep_their_gradients() -> None:
    model = made("uncovered")
    preconditioner = Preconditioner(model, LOSS)
    backward(model)
    before = gradients(model)
    with pytest.warns(KfsWarning, match="gradients are left as they are") as caught:
        preconditioner.step()
    assert caught[0].filename == __file__
    assert "1.parametrizations.weight.original0" in preconditioner.uncovered
    now = zip(dict(model.named_parameters()), gradients(model), before, strict=True)
    changed = {name for name, g, old in now if not torch.equal(g, old)}
    assert changed == dict(model.named_parameters()).keys() - preconditioner.uncovered.keys()
    assert "Not covered: " in str(preconditioner.report())


@pytest.mark.parametrize("options", [{}, {"kl_clip": 0.1}])
@pytest.mark.filterwarnings("ignore::kfs.errors.KfsWarning")
def test_nothing_is_covered(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Mixed().double()
    preconditioner = Preconditioner(model, LOSS, [model.bend], **options)
    for _ in range(2):
        model.zero_grad()
        LOSS(model(torch.randint(5, (12, 4))), Y).backward()
        before = gradients(model)
        preconditioner.step()
        assert all(map(torch.equal, gradients(model), before))
    assert preconditioner.uncovered.keys() == {"bend"}
    assert preconditioner.steps == 2


def test_parameters_without_gradients() -> None:
    """They count as zero: the gradients of a layer's other parameters are those of the whole block."""
    model = mlp()
    preconditioner = Preconditioner(model, LOSS, factors_every=1)
    backward(model)
    preconditioner.step()
    model.zero_grad()
    backward(model)
    model[2].bias.grad = None
    model[4].weight.grad = None
    preconditioner.step()
    assert model[2].bias.grad is None
    assert model[4].weight.grad is None


def test_groups_have_their_own_damping() -> None:
    """It may change by a schedule."""
    model = mlp()
    groups = [{"params": model[0].parameters(), "damping": 10.0}, {"params": model[2:].parameters(), "trust": None}]
    preconditioner = Preconditioner(model, LOSS, groups, inverses_every=1, **{**EXACT, "trust": 0.1})
    backward(model)
    preconditioner.step()
    assert [group["damping"] for group in preconditioner.param_groups] == [10.0, 0.003]
    assert [group["trust"] for group in preconditioner.param_groups] == [0.1, None]
    rows = preconditioner.report().blocks
    assert rows[0].damping > 100 * rows[1].damping  # type: ignore[operator]
    preconditioner.param_groups[0]["damping"] = -1.0
    model.zero_grad()
    backward(model)
    with pytest.raises(ModelError, match="damping is -1"):
        preconditioner.step()


def test_groups_of_an_optimizer() -> None:
    """They stay as they are, and may differ in what only the optimizer uses."""
    model = mlp()
    groups = [{"params": model[:2].parameters(), "momentum": 0.5, "lr": 0.1}, {"params": model[2:].parameters()}]
    Preconditioner(model, LOSS, groups).close()
    optimizer = torch.optim.SGD(groups, lr=1.0, momentum=2.0)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 6
    before = [group | {"params": list(group["params"])} for group in optimizer.param_groups]
    preconditioner = Preconditioner(model, LOSS, optimizer.param_groups)
    train(model, preconditioner, optimizer, 2)
    preconditioner.param_groups[0]["damping"] = 0.1
    assert optimizer.param_groups == before
    assert preconditioner.params.groups["0.weight"]["damping"] == 0.1


def test_gradients_may_be_accumulated_and_clipped() -> None:
    """Two halves of a batch are the batch."""
    model, other = mlp(), mlp()
    for one, parts in ((model, 1), (other, 2)):
        preconditioner = Preconditioner(one, LOSS)
        optimizer = torch.optim.SGD(one.parameters(), lr=1.0)
        for _ in range(4):
            optimizer.zero_grad()
            for x, y in zip(X.chunk(parts), Y.chunk(parts), strict=True):
                (LOSS(one(x), y) / parts).backward()
            preconditioner.step()
            nn.utils.clip_grad_norm_(one.parameters(), 0.01)
            optimizer.step()
    torch.testing.assert_close(weights(model), weights(other))


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("zero", [None, False])
def test_second_calls_are_errors(clip: bool, zero: bool | None) -> None:
    """Natural gradients are not multiplied again. A new backward pass, or another tensor, is fine."""
    model = mlp()
    preconditioner = Preconditioner(model, LOSS)
    backward(model)
    preconditioner.step()
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    before = gradients(model)
    with pytest.raises(ModelError, match="natural gradient already"):
        preconditioner.step()
    assert all(map(torch.equal, gradients(model), before))
    model.zero_grad(set_to_none=zero is None)
    backward(model)
    preconditioner.step()
    assert preconditioner.steps == 2


def test_without_gradients_or_passes() -> None:
    model = mlp()
    preconditioner = Preconditioner(model, LOSS)
    with pytest.raises(ModelError, match="No parameter has a gradient"):
        preconditioner.step()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(ModelError, match="No forward and backward pass"):
        preconditioner.step()


def test_gradients_that_are_not_finite_stay() -> None:
    """Nothing is learned from them, and the event is counted."""
    model = mlp()
    preconditioner = Preconditioner(model, LOSS, factors_every=1)
    train(model, preconditioner, torch.optim.SGD(model.parameters(), lr=0.1), 3)
    state = copy.deepcopy(preconditioner.state_dict()["curvature"]["averages"])
    for value in (torch.inf, 1e9):
        model.zero_grad()
        backward(model)
        model[0].weight.grad[0, 0] = value
        before = gradients(model)
        preconditioner.step()
        assert all(map(torch.equal, gradients(model), before))
    now = preconditioner.state_dict()["curvature"]["averages"]
    assert all(a["weight"] == b["weight"] for a, b in zip(state, now, strict=True))
    assert preconditioner.events == Events(skipped_steps=1, refused_gradients=1)


def test_products_that_are_not_finite() -> None:
    model = mlp()
    preconditioner = Preconditioner(model, LOSS, factors_every=100)
    train(model, preconditioner, torch.optim.SGD(model.parameters(), lr=0.1), 2)
    for average in preconditioner.curvature.averages.values():
        average.inverse.A.values.fill_(torch.inf)  # type: ignore[union-attr]
        average.changed = False
    model.zero_grad()
    backward(model)
    before = gradients(model)
    preconditioner.step()
    assert all(map(torch.equal, gradients(model), before))
    assert preconditioner.events.skipped_steps == 1


def test_a_run_that_diverges() -> None:
    model = mlp()
    preconditioner = Preconditioner(model, LOSS)
    train(model, preconditioner, torch.optim.SGD(model.parameters(), lr=0.1), 2)
    with torch.no_grad():
        model[0].weight.fill_(torch.nan)
    model.zero_grad()
    backward(model)
    with pytest.raises(SolverError, match=r"'0\.weight' is not finite.*Step 1 was fine \(damping 0\.003\)"):
        preconditioner.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_in_low_precision(dtype: torch.dtype) -> None:
    model = mlp(dtype)
    x = X.to(dtype)
    preconditioner = Preconditioner(model, LOSS)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    first = value(model, x)
    for _ in range(20):
        optimizer.zero_grad()
        LOSS(model(x), Y).backward()
        preconditioner.step()
        assert all(p.grad is not None and p.grad.dtype == dtype for p in model.parameters())
        optimizer.step()
    assert value(model, x) < 0.9 * first


def test_sparse_gradients_become_dense() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 4, sparse=True), nn.Flatten(), nn.Linear(8, 3)).double()
    other = nn.Sequential(nn.Embedding(6, 4), nn.Flatten(), nn.Linear(8, 3)).double()
    other.load_state_dict(model.state_dict())
    x = torch.arange(24).reshape(12, 2) % 6
    for one in (model, other):
        preconditioner = Preconditioner(one, LOSS)
        LOSS(one(x), Y).backward()
        preconditioner.step()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.parametrize("device", ["cpu", "accelerator"])
def test_expanded_gradients_are_replaced(device: str, request: pytest.FixtureRequest) -> None:
    if device == "accelerator":
        request.getfixturevalue("tapes")
    model, other = mlp(), mlp()
    for one in (model, other):
        preconditioner = Preconditioner(one, LOSS)
        backward(one)
        one[4].bias.grad = torch.ones(1).double().expand(3)
        if one is other:
            one[4].bias.grad = one[4].bias.grad.clone()
        preconditioner.step()
        with pytest.raises(ModelError, match="natural gradient already"):
            preconditioner.step()
    assert all(map(torch.equal, gradients(model), gradients(other)))


def test_gradient_scalers() -> None:
    """Scaled gradients are an error; after `unscale_`, steps are those without a scaler."""
    model, other = mlp(), mlp()
    plain = Preconditioner(other, LOSS)
    backward(other)
    plain.step()
    preconditioner = Preconditioner(model, LOSS)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(LOSS(model(X), Y)).backward()
    before = gradients(model)
    with pytest.raises(LossError, match=r"multiplied by 1024.*unscale_"):
        preconditioner.step()
    assert all(map(torch.equal, gradients(model), before))
    assert preconditioner.steps == 0
    for found in (False, True):
        optimizer.zero_grad()
        scaler.scale(LOSS(model(X), Y)).backward()
        if found:
            model[0].weight.grad[0, 0] = torch.inf
        scaler.unscale_(optimizer)
        preconditioner.step()
        if not found:
            for p, q in zip(model.parameters(), other.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad)
        scaler.step(optimizer)
        scaler.update()
    assert weights(model).isfinite().all()
    assert preconditioner.events.skipped_steps == 1


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("overflows", [False, True])
def test_unscaled_gradients_from_the_first_step_on(by_hand: bool, overflows: bool) -> None:
    """Natural gradients are those without a scaler. The first gradient may overflow in one of the layers."""
    model, other = mlp(), mlp()
    plain, preconditioner = Preconditioner(other, LOSS), Preconditioner(model, LOSS)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(1 + overflows):
        optimizer.zero_grad()
        scaler.scale(LOSS(model(X), Y)).backward()
        if step < overflows:
            model[0].weight.grad.fill_(torch.inf)
        if by_hand:
            for p in model.parameters():
                p.grad = None if p.grad is None else p.grad / 1024
        else:
            scaler.unscale_(optimizer)
            scaler.update()
        preconditioner.step()
    backward(other)
    plain.step()
    assert preconditioner.events.skipped_steps == overflows
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_discarded_backward_passes_leave_no_trace() -> None:
    """Labels are drawn as if they had not been."""
    found = []
    for discards in (False, True):
        model = mlp()
        preconditioner = Preconditioner(model, LOSS)
        if discards:
            backward(model)
            model.zero_grad()
        train(model, preconditioner, torch.optim.SGD(model.parameters(), lr=0.1), 2)
        found.append(weights(model))
    assert torch.equal(*found)


def test_settings_of_groups_are_saved() -> None:
    model, other = mlp(), mlp()
    preconditioner = Preconditioner(
        model, LOSS, [{"params": model[:2].parameters()}, {"params": model[2:].parameters()}]
    )
    preconditioner.param_groups[1].update(damping=0.5, trust=None)
    state = preconditioner.state_dict()
    with pytest.raises(StorageError, match="2 parameter groups, but this preconditioner has 1"):
        Preconditioner(other, LOSS).load_state_dict(state)
    mine = [{"params": other[:2].parameters(), "damping": 9.0}, {"params": other[2:].parameters()}]
    resumed = Preconditioner(other, LOSS, mine)
    resumed.load_state_dict(state)
    assert [(group["damping"], group["trust"]) for group in resumed.param_groups] == [(0.003, 0.03), (0.5, None)]


def test_states_with_wider_factors_are_errors() -> None:
    model, other = mlp(), mlp()
    preconditioner = Preconditioner(model, LOSS)
    train(model, preconditioner, torch.optim.SGD(model.parameters(), lr=0.1), 1)
    state = preconditioner.state_dict()
    with pytest.raises(StorageError, match="dense factors of width 7, wider than max_dim=5"):
        Preconditioner(other, LOSS, max_dim=5).load_state_dict(state)


@pytest.mark.filterwarnings("ignore:Factors wider than max_dim")
@pytest.mark.parametrize("device", ["cpu", "accelerator"])
@pytest.mark.parametrize(
    ("saved", "options"),
    [({"max_dim": 4}, {}), ({"max_dim": 4}, {"eigen": True}), ({"fisher": "forward-only"}, {})],
)
def test_averages_of_other_kinds_start_again(
    saved: dict[str, Any], options: dict[str, Any], device: str, request: pytest.FixtureRequest
) -> None:
    """A state with diagonal factors, or identities, may be loaded where these are dense."""
    if device == "accelerator":
        request.getfixturevalue("tapes")
    model, other = mlp(), mlp()
    preconditioner = Preconditioner(model, LOSS, **saved, **options, factors_every=1)
    train(model, preconditioner, torch.optim.SGD(model.parameters(), lr=0.1), 2)
    resumed = Preconditioner(other, LOSS, **options, factors_every=1)
    resumed.load_state_dict(preconditioner.state_dict())
    train(other, resumed, torch.optim.SGD(other.parameters(), lr=0.1), 2)
    factors = [average.factors for average in resumed.curvature.averages.values()]
    assert {(K.A.kind, K.B.kind) for K in factors} == {("dense", "dense")}
    assert resumed.events == Events()


def test_the_model_has_changed() -> None:
    model = mlp()
    preconditioner = Preconditioner(model, LOSS)
    model.append(nn.Linear(3, 3).double())
    backward(model)
    with pytest.raises(ModelError, match=r"Make a new preconditioner \(close\(\) the old one first\)\.$"):
        preconditioner.step()


def test_another_loss_is_an_error() -> None:
    model = mlp()
    preconditioner = Preconditioner(model, LOSS)
    (LOSS(model(X), Y) * len(X)).backward()
    with pytest.raises(LossError, match="is a sum"):
        preconditioner.step()


@pytest.mark.parametrize("eigen", [False, True])
def test_states_resume_bit_by_bit(eigen: bool, tmp_path: Any) -> None:
    options: dict[str, Any] = {"eigen": eigen, "factors_every": 2, "inverses_every": 3}
    model = mlp()
    preconditioner, optimizer = Preconditioner(model, LOSS, **options), torch.optim.Adam(model.parameters(), 0.01)
    train(model, preconditioner, optimizer, 5)
    torch.save(
        {"model": model.state_dict(), "p": preconditioner.state_dict(), "o": optimizer.state_dict()}, tmp_path / "s.pt"
    )
    train(model, preconditioner, optimizer, 6)
    state = torch.load(tmp_path / "s.pt", weights_only=True)
    other = mlp()
    resumed, again = Preconditioner(other, LOSS, **options), torch.optim.Adam(other.parameters(), 0.01)
    other.load_state_dict(state["model"])
    again.load_state_dict(state["o"])
    resumed.load_state_dict(state["p"])
    assert resumed.steps == 5
    train(other, resumed, again, 6)
    assert torch.equal(weights(model), weights(other))


def test_states_of_others_are_errors() -> None:
    model = mlp()
    preconditioner = Preconditioner(model, LOSS)
    train(model, preconditioner, torch.optim.SGD(model.parameters(), lr=0.1), 1)
    state = preconditioner.state_dict()
    small = nn.Linear(4, 3).double()
    other = Preconditioner(small, LOSS)
    with pytest.raises(StorageError, match="does not have"):
        other.load_state_dict(state)
    with pytest.raises(StorageError, match="not one of"):
        preconditioner.load_state_dict(torch.optim.SGD(model.parameters()).state_dict())
    with pytest.raises(StorageError, match="not one of"):
        preconditioner.load_state_dict(None)  # type: ignore[arg-type]
    with pytest.raises(StorageError, match="unit"):
        preconditioner.load_state_dict({name: value for name, value in state.items() if name != "unit"})
    backward(small)
    other.step()
    assert other.steps == 1


def test_closing() -> None:
    """Hooks are gone, recordings are freed, and steps are errors; closing again does nothing."""
    model = mlp()
    hooks = len(model._forward_hooks), len(model._forward_pre_hooks), len(LOSS._forward_pre_hooks)
    preconditioner = Preconditioner(model, LOSS)
    train(model, preconditioner, torch.optim.SGD(model.parameters(), lr=0.1), 2)
    for _ in range(2):
        preconditioner.close()
        assert (len(model._forward_hooks), len(model._forward_pre_hooks), len(LOSS._forward_pre_hooks)) == hooks
    backward(model)
    with pytest.raises(ModelError, match="preconditioner was closed"):
        preconditioner.step()
    another = Preconditioner(model, LOSS)
    model.zero_grad()
    backward(model)
    another.step()


def test_another_optimizer_takes_the_model_over() -> None:
    model = mlp()
    preconditioner = Preconditioner(model, LOSS)
    with pytest.warns(KfsWarning, match="takes the model over") as caught:
        optimizer = KFAC(model, LOSS)
    assert caught[0].filename == __file__
    backward(model)
    with pytest.raises(ModelError, match="taken over"):
        preconditioner.step()
    optimizer.step()


def test_it_does_not_outlive_its_user() -> None:
    model = mlp()
    preconditioner = Preconditioner(model, LOSS)
    train(model, preconditioner, torch.optim.SGD(model.parameters(), lr=0.1), 1)
    reference = weakref.ref(preconditioner)
    del preconditioner
    gc.collect()
    assert reference() is None
    assert not model._forward_hooks


def test_copies_are_errors() -> None:
    preconditioner = Preconditioner(mlp(), LOSS)
    with pytest.raises(ModelError, match="cannot be copied"):
        copy.deepcopy(preconditioner)
    with pytest.raises(ModelError, match="cannot be copied"):
        pickle.dumps(preconditioner)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda model: Preconditioner(model.parameters(), LOSS), ModelError, "Preconditioner needs the model"),
        (Preconditioner, LossError, "Preconditioner needs the loss"),
        (lambda model: Preconditioner(model, 0.1), LossError, r"Preconditioner\(model, .*damping=0\.1"),
        (lambda model: Preconditioner(model, LOSS, damping=-1.0), ModelError, "damping is -1"),
        (lambda model: Preconditioner(model, LOSS, []), ModelError, "no parameters"),
        (lambda model: Preconditioner(model, LOSS, [*model[0].parameters()] * 2), ModelError, "more than once"),
        (lambda m: Preconditioner(m, LOSS, 2 * [{"params": [m[0].bias]}]), ModelError, "more than once"),
        (lambda model: Preconditioner(model, LOSS, mlp().parameters()), ModelError, "not parameters of the model"),
        (lambda model: Preconditioner(model, LOSS, eigen=True, fisher="forward-only"), ModelError, "Corrected"),
        (lambda model: Preconditioner(model, LOSS, [{"params": model.parameters(), "decay": 1}]), ModelError, "decay"),
    ],
)
def test_bad_calls(call: Callable[[Layers], object], error: type[Exception], match: str) -> None:
    """Nothing is registered before everything is checked."""
    model = mlp()
    with pytest.raises(error, match=match):
        call(model)
    assert not model._forward_hooks
    KFAC(model, LOSS)


def test_reports() -> None:
    torch.manual_seed(0)
    model = Mixed().double()
    preconditioner = Preconditioner(model, LOSS)
    x = torch.randint(5, (12, 4))
    LOSS(model(x), Y).backward()
    with pytest.warns(KfsWarning, match="bend"):
        preconditioner.step()
    report = preconditioner.report()
    assert report.uncovered.keys() == {"bend"}
    assert report.lr == ()
    assert "Not covered: 'bend'" in str(report)
    assert repr(preconditioner).startswith("Preconditioner for Mixed")
    assert "AdamW" not in str(report) + repr(preconditioner)


@pytest.mark.usefixtures("tapes")
def test_on_an_accelerator() -> None:
    """Gradients are masked on the device, and events are counted later."""
    model, other = mlp(), mlp()
    preconditioner = Preconditioner(model, LOSS, factors_every=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(9):
        optimizer.zero_grad()
        backward(model)
        if i in {4, 6}:  # The second one is a step with factors.
            model[0].weight.grad[0, 0] = torch.inf
            before = gradients(model)
        preconditioner.step()
        if i in {4, 6}:
            assert all(map(torch.equal, gradients(model), before))
            continue
        optimizer.step()
    assert preconditioner.curvature.damping.events.skipped_steps < 2
    assert preconditioner.events == Events(skipped_steps=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Preconditioner, "_is_steady", lambda *_: False)
        waiting = Preconditioner(other, LOSS, factors_every=3)
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        for i in range(9):
            optimizer.zero_grad()
            backward(other)
            if i in {4, 6}:
                waiting.steps += 1
                waiting.watch.first_datum += len(X) * (i == 6)
                waiting.watch.forget()
                continue
            waiting.step()
            optimizer.step()
    torch.testing.assert_close(weights(model), weights(other))


@pytest.mark.usefixtures("tapes")
def test_steps_do_not_wait() -> None:
    """Once all blocks have inverses, steps do not synchronize, with new factors or without."""
    model = mlp()
    preconditioner = Preconditioner(model, LOSS, fisher="type-2", factors_every=2, inverses_every=3, replay=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, preconditioner, optimizer, 12)
    first = preconditioner.watch.first_datum
    for _ in range(6):
        optimizer.zero_grad()
        backward(model)
        with NoWaiting():
            preconditioner.step()
    assert preconditioner.watch.first_datum == first + 3 * len(X)
