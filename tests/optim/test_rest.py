"""The user's own optimizer for parameters that KFAC does not train: it steps when KFAC does, and sees only these."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfs.errors import KfsWarning, ModelError
from kfs.optim import KFAC
from tests.optim.training import Layers, data, mlp, weights

LOSS = nn.CrossEntropyLoss()
X, Y = data()


def groups(model: Layers) -> list[dict[str, Any]]:
    """Let the other optimizer train the last layer."""
    return [{"params": model[:4].parameters()}, {"params": model[4].parameters(), "method": "adamw"}]


class Noted(torch.optim.SGD):
    """Notes which parameters had gradients in its steps."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[list[Tensor]] = []
        self.fails = False

    def step(self, closure: Any = None) -> Any:
        """Take a step, or fail."""
        self.seen.append([p for group in self.param_groups for p in group["params"] if p.grad is not None])
        if self.fails:
            raise ValueError("failed")
        return super().step(closure)


def backward(model: nn.Module, optimizer: KFAC) -> None:
    optimizer.zero_grad()
    LOSS(model(X), Y).backward()


@pytest.mark.parametrize("options", [{}, {"quadratic_model": True}])
def test_it_takes_its_own_steps(options: dict[str, Any]) -> None:
    """The last layer is trained as by SGD, with its own schedule; the others as beside AdamW."""
    model, other = mlp(), mlp()
    rest = Noted(model.parameters(), lr=0.1, momentum=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(rest, 1, 0.5)
    optimizer = KFAC(model, LOSS, groups(model), rest=rest, **options)
    expected = torch.optim.SGD(other[4].parameters(), lr=0.1, momentum=0.5)
    for step in range(3):
        before = [p.detach().clone() for p in model[4].parameters()]

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = LOSS(model(X), Y)
            loss.backward()
            return loss

        other.load_state_dict(model.state_dict())
        other.zero_grad()
        LOSS(other(X), Y).backward()
        for group in expected.param_groups:
            group["lr"] = 0.1 * 0.5**step
        expected.step()
        optimizer.step(closure)
        schedule.step()
        for p, q, old in zip(model[4].parameters(), other[4].parameters(), before, strict=True):
            if not options:  # A quadratic model may shorten steps.
                torch.testing.assert_close(p, q)
            assert not torch.equal(p, old)
    assert rest.seen == 3 * [list(model[4].parameters())]
    assert all(p not in rest.state for p in model[:4].parameters())
    assert all("exp_avg" not in state for state in optimizer.state.values())
    assert "Noted trains, as asked for: 4.weight, 4.bias." in str(optimizer.report())


def test_the_others_are_trained_as_before() -> None:
    """What KFAC trains does not depend on who trains the rest, in the first step."""
    model, other = mlp(), mlp()
    for one, rest in ((model, None), (other, torch.optim.SGD(other.parameters(), lr=0.1))):
        optimizer = KFAC(one, LOSS, groups(one), rest=rest)
        backward(one, optimizer)
        optimizer.step()
    assert torch.equal(weights(model[:4]), weights(other[:4]))
    assert not torch.equal(weights(model[4]), weights(other[4]))


def test_uncovered_parameters() -> None:
    """They are found in the first step, which trains them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.utils.parametrizations.weight_norm(nn.Linear(5, 3))).double()
    rest = Noted(model.parameters(), lr=0.1)
    optimizer = KFAC(model, LOSS, rest=rest)
    backward(model, optimizer)
    with pytest.warns(KfsWarning, match="trained by Noted"):
        optimizer.step()
    names = {id(p): n for n, p in model.named_parameters()}
    assert {names[id(p)] for p in rest.seen[0]} == optimizer.uncovered.keys()
    assert optimizer.uncovered
    assert all(p.grad is not None for p in model.parameters())


def test_parameters_that_kfac_does_not_have() -> None:
    """They are trained, too, and `zero_grad` resets their gradients."""
    model = mlp()
    rest = Noted(model.parameters(), lr=0.1)
    optimizer = KFAC(model, LOSS, model[:4].parameters(), rest=rest)
    before = weights(model[4])
    backward(model, optimizer)
    optimizer.step()
    assert rest.seen == [list(model[4].parameters())]
    assert not torch.equal(weights(model[4]), before)
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("device", ["cpu", "accelerator"])
def test_skipped_steps_are_skipped(device: str, alone: bool, request: pytest.FixtureRequest) -> None:
    """A gradient that is not finite may belong to a parameter that only the other optimizer has."""
    if device == "accelerator":
        request.getfixturevalue("tapes")
    model = mlp()
    rest = Noted(model.parameters(), lr=0.1)
    params = model[:4].parameters() if alone else groups(model)
    optimizer = KFAC(model, LOSS, params, rest=rest, factors_every=5)
    for step in range(8):
        backward(model, optimizer)
        before = weights(model)
        if step in {3, 5}:
            model[4].weight.grad[0, 0] = torch.nan
        optimizer.step()
        assert torch.equal(before, weights(model)) == (step in {3, 5})
    assert len(rest.seen) == 6
    assert optimizer.events.skipped_steps == 2


def test_products_that_are_not_finite() -> None:
    model = mlp()
    rest = Noted(model.parameters(), lr=0.1)
    optimizer = KFAC(model, LOSS, groups(model), rest=rest, factors_every=100)
    backward(model, optimizer)
    optimizer.step()
    average = optimizer.preconditioner.curvature.averages["2.weight", (0, 5)]
    average.inverse.A.values.fill_(torch.inf)  # type: ignore[union-attr]
    average.changed = False
    backward(model, optimizer)
    before = weights(model)
    optimizer.step()
    assert torch.equal(before, weights(model))
    assert len(rest.seen) == 1


def test_gradients_come_back_after_an_error() -> None:
    model = mlp()
    rest = Noted(model.parameters(), lr=0.1)
    optimizer = KFAC(model, LOSS, groups(model), rest=rest)
    backward(model, optimizer)
    grads = [p.grad for p in model.parameters()]
    rest.fails = True
    with pytest.raises(ValueError, match="failed"):
        optimizer.step()
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    assert optimizer.steps == 1  # KFAC has taken its step.


def test_its_state_is_its_own() -> None:
    """Training goes on, to the bit, from both states."""
    model, other = mlp(), mlp()

    def make(one: Layers) -> tuple[KFAC, torch.optim.Optimizer]:
        rest = torch.optim.Adam(one.parameters(), lr=0.01)
        return KFAC(one, LOSS, groups(one), rest=rest), rest

    (optimizer, rest), (resumed, again) = make(model), make(other)
    for _ in range(3):
        backward(model, optimizer)
        optimizer.step()
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    again.load_state_dict(copy.deepcopy(rest.state_dict()))  # PyTorch does not copy tensors.
    for _ in range(3):
        for one, its in ((model, optimizer), (other, resumed)):
            backward(one, its)
            its.step()
    assert torch.equal(weights(model), weights(other))


@pytest.mark.parametrize("wrong", [torch.optim.SGD, 0.1, "adamw"])
def test_not_an_optimizer(wrong: Any) -> None:
    model = mlp()
    with pytest.raises(ModelError, match=r"rest is a .*rest=torch\.optim\.AdamW"):
        KFAC(model, LOSS, rest=wrong)
    assert not model._forward_hooks


def test_another_kfac() -> None:
    model, other = mlp(), mlp()
    with pytest.raises(ModelError, match="rest is a KFAC"):
        KFAC(model, LOSS, rest=KFAC(other, LOSS))
    assert not model._forward_hooks


def test_an_optimizer_that_needs_a_closure() -> None:
    model = mlp()
    with pytest.raises(ModelError, match="rest is a LBFGS"):
        KFAC(model, LOSS, rest=torch.optim.LBFGS(model.parameters()))
    assert not model._forward_hooks


def test_rejected_trials_take_all_steps_back() -> None:
    """A quadratic model rejects a step of the other optimizer, also for parameters that only that one has."""
    model = mlp()
    rest = torch.optim.SGD(model.parameters(), lr=1000.0)
    optimizer = KFAC(model, LOSS, model[:4].parameters(), rest=rest, quadratic_model=True)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = LOSS(model(X), Y)
        loss.backward()
        return loss

    first = float(optimizer.step(closure).detach())
    assert optimizer.events.shortened_steps + optimizer.events.rejected_steps == 1
    assert float(closure().detach()) <= first


def test_missing_parameters() -> None:
    """Those of groups are missed at once, others before anything is learned from the step that finds them."""
    model = mlp()
    rest = torch.optim.SGD(model[:4].parameters(), lr=0.1)
    with pytest.raises(ModelError, match=r"'4\.weight', '4\.bias', and the optimizer rest= does not have them.*leave"):
        KFAC(model, LOSS, groups(model), rest=rest)
    assert not model._forward_hooks
    optimizer = KFAC(model, LOSS, model[:4].parameters(), rest=rest)
    with pytest.raises(ModelError, match=r"'4\.weight'"):
        optimizer.add_param_group({"params": model[4].parameters(), "method": "adamw"})
    assert len(optimizer.param_groups) == 1

    torch.manual_seed(0)
    normed = nn.Sequential(nn.Linear(4, 5), nn.utils.parametrizations.weight_norm(nn.Linear(5, 3))).double()
    optimizer = KFAC(normed, LOSS, rest=torch.optim.SGD(normed[0].parameters(), lr=0.1))
    before = weights(normed)
    backward(normed, optimizer)
    with pytest.raises(ModelError, match=r"original0.*add_param_group"):
        optimizer.step()
    assert torch.equal(before, weights(normed))
    assert optimizer.steps == 0
    assert not optimizer.uncovered
    assert not optimizer.preconditioner.curvature.averages


def test_closing_frees_recordings(request: pytest.FixtureRequest) -> None:
    """A closed optimizer refuses steps; its state stays available."""
    tapes = request.getfixturevalue("tapes")
    model = mlp()
    optimizer = KFAC(model, LOSS, factors_every=2, inverses_every=1)
    for _ in range(12):
        backward(model, optimizer)
        optimizer.step()
    recorded = [tape for one in tapes for tape in one.made]
    assert recorded
    state = optimizer.state_dict()
    for _ in range(2):
        optimizer.close()
        assert all(tape.freed for tape in recorded)
        assert not model._forward_hooks
    assert optimizer.state_dict().keys() == state.keys()
    LOSS(model(X), Y).backward()
    with pytest.raises(ModelError, match="closed"):
        optimizer.step()


@pytest.mark.parametrize("enabled", [False, True])
def test_gradient_scalers(enabled: bool) -> None:
    """They divide gradients of the parameters that KFAC has; those of others would stay multiplied."""
    model, other = mlp(), mlp()
    plain = KFAC(other, LOSS, groups(other), rest=torch.optim.SGD(other.parameters(), lr=0.1))
    backward(other, plain)
    plain.step()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=enabled)
    rest = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = KFAC(model, LOSS, model[:4].parameters(), rest=rest)
    before = weights(model)
    scaler.scale(LOSS(model(X), Y)).backward()
    if enabled:
        with pytest.raises(ModelError, match=r'GradScaler divides.*"method": "adamw"'):
            scaler.step(optimizer)
        assert torch.equal(weights(model), before)
        assert optimizer.steps == 0
        optimizer.close()
        optimizer = KFAC(model, LOSS, groups(model), rest=rest)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer.zero_grad()
        scaler.scale(LOSS(model(X), Y)).backward()
    scaler.step(optimizer)
    torch.testing.assert_close(weights(model), weights(other))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("steps", [0, 2])
def test_all_parameters_of_kfac_may_be_frozen(reduction: str, steps: int) -> None:
    """The other optimizer goes on with its own."""
    model, loss = mlp(), nn.CrossEntropyLoss(reduction=reduction)
    rest = Noted(model.parameters(), lr=0.01)
    optimizer = KFAC(model, loss, model[:4].parameters(), rest=rest)
    for step in range(steps + 2):
        model[:4].requires_grad_(step < steps)
        optimizer.zero_grad()
        loss(model(X), Y).backward()
        before, others = weights(model[:4]), weights(model[4])
        optimizer.step()
        assert torch.equal(before, weights(model[:4])) == (step >= steps)
        assert not torch.equal(others, weights(model[4]))
    optimizer.zero_grad()
    with pytest.raises(ModelError, match="No parameter has a gradient"):
        optimizer.step()
