"""Misuse raises an error with the cause and the way out, before any state changes."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal
from torch.nn import functional as F  # noqa: N812

from kfs.errors import DataError, KfsWarning, LossError, ModelError, StorageError
from kfs.losses import Custom, HalfSquaredError, TokenCrossEntropy
from kfs.optim import KFAC
from tests.optim.training import data, mlp, train, weights

LOSS = nn.CrossEntropyLoss()


class Mask(nn.Module):
    """Forbids classes."""

    def __init__(self, allowed: Tensor) -> None:
        super().__init__()
        self.allowed = allowed

    def forward(self, f: Tensor) -> Tensor:
        return f.masked_fill(~self.allowed[: len(f)], -torch.inf)


def test_a_closed_optimizer() -> None:
    """It has no hooks, cannot step, and its model may get another optimizer."""
    X, y = data()
    model = mlp()
    first = KFAC(model, LOSS)
    train(model, first, [(X, y)], LOSS)
    first.close()
    assert not model._forward_hooks
    with pytest.raises(ModelError, match="closed"):
        first.step()
    model.zero_grad()
    train(model, KFAC(model, LOSS), [(X, y)], LOSS)


def test_a_model_that_has_changed() -> None:
    """New and replaced parameters are named; new ones may be added to the optimizer."""
    X, y = data()
    model = mlp()
    optimizer = KFAC(model, LOSS)
    train(model, optimizer, [(X, y)], LOSS)
    model[4] = nn.Linear(5, 3).double()
    before = weights(model)
    with pytest.raises(ModelError, match=r"has changed.*4\.weight.*add_param_group"):
        train(model, optimizer, [(X, y)], LOSS)
    assert torch.equal(weights(model), before)
    optimizer.close()
    optimizer = KFAC(model, LOSS)
    model.append(nn.Linear(3, 3).double())
    with pytest.raises(ModelError, match=r"has changed.*5\.weight"):
        train(model, optimizer, [(X, y)], LOSS)
    optimizer.add_param_group({"params": list(model[5].parameters())})
    train(model, optimizer, [(X, y)], LOSS)
    model[5] = nn.Identity()
    with pytest.raises(ModelError, match="were removed"):
        train(model, optimizer, [(X, y)], LOSS)


def test_a_model_that_was_moved() -> None:
    """Statistics on another device are refused with advice."""
    X, y = data()
    model = mlp()
    optimizer = KFAC(model, LOSS)
    train(model, optimizer, [(X, y)], LOSS)
    with pytest.raises(ModelError, match=r"is on cpu, but the optimizer's state is on meta"):
        optimizer._params.check_device(torch.device("meta"))


def test_steps_without_passes() -> None:
    """A step needs gradients and, in steps with new curvature, a pass through the model itself."""
    X, y = data()
    model = mlp()
    optimizer = KFAC(model, LOSS)
    with pytest.raises(ModelError, match=r"No parameter has a gradient.*backward\(\)"):
        optimizer.step()
    value = LOSS(nn.Sequential(*model)(X), y)  # calls the submodules, not the model
    value.backward()
    with pytest.raises(ModelError, match=r"No forward and backward pass.*model\(x\)"):
        optimizer.step()
    model.zero_grad()
    gradients = torch.autograd.grad(LOSS(model(X), y), list(model.parameters()))
    for p, g in zip(model.parameters(), gradients, strict=True):
        p.grad = g
    with pytest.raises(ModelError, match="No forward and backward pass"):
        optimizer.step()
    assert optimizer.steps == 0
    train(model, optimizer, [(X, y)], LOSS)


@pytest.mark.parametrize("seen", [True, False])
def test_another_loss(seen: bool) -> None:
    """A loss that is not the declared one is refused, with or without known targets."""
    X, _ = data()
    y = torch.randn(12, 3, dtype=torch.float64)
    model = mlp()
    optimizer = KFAC(model, LOSS)
    before = weights(model)
    value = 0.5 * (model(X) - y).square().sum(1).mean()
    if seen:
        optimizer.targets(torch.randint(3, (12,)))
    value.backward()
    with pytest.raises(LossError, match="is not that of CrossEntropyLoss"):
        optimizer.step()
    assert torch.equal(weights(model), before)
    assert not optimizer.preconditioner.curvature.averages


def test_a_loss_with_an_additional_term() -> None:
    """There is one warning about a small difference."""
    X, y = data()
    model = mlp()
    optimizer = KFAC(model, LOSS)
    with pytest.warns(KfsWarning, match="differs by") as caught:
        train(model, optimizer, [(X, y)] * 3, lambda f, y: LOSS(f, y) + 0.3 * f.square().mean())
    assert len(caught) == 1
    assert caught[0].filename == train.__code__.co_filename


def test_labels_may_be_smoothed_weighted_or_soft() -> None:
    """All of these are cross-entropies, and none is mistaken for another loss."""
    X, y = data()
    weight = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
    soft = F.one_hot(y, 3).double() * 0.7 + 0.3 * torch.rand(3).double().softmax(0)
    cases: list[tuple[nn.Module, Tensor]] = [
        (nn.CrossEntropyLoss(label_smoothing=0.1), y),
        (nn.CrossEntropyLoss(weight), y),
        (nn.CrossEntropyLoss(), soft),
    ]
    for loss, target in cases:
        for function in (
            loss,
            lambda f, t, loss=loss: F.cross_entropy(f, t, loss.weight, label_smoothing=loss.label_smoothing),
        ):
            model = mlp()
            optimizer = KFAC(model, loss)
            values = train(model, optimizer, [(X, target)] * 10, function)
            assert values[-1] < values[0]


def test_targets_that_are_needed() -> None:
    """For the empirical Fisher of a square loss, the optimizer cannot separate scale and targets, and says so."""
    X, _ = data()
    y = torch.randn(12, 3, dtype=torch.float64)
    model = mlp()
    optimizer = KFAC(model, HalfSquaredError(), fisher="empirical")
    with pytest.raises(LossError, match=r"scale of the gradient is not known.*targets\(y\)"):
        HalfSquaredError()(model(X), y).backward()
    model.zero_grad()
    value = HalfSquaredError()(model(X), y)
    optimizer.targets(y)
    value.backward()
    optimizer.step()
    huber = nn.HuberLoss()
    optimizer.close()
    other = KFAC(model, huber, fisher="mc")
    with pytest.raises(LossError, match="targets, which are unknown"):
        F.huber_loss(model(X), y).backward()
    other.close()


_SKEWED = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)
_SOFT = torch.rand(12, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
_FOURTH = Custom(
    lambda f, y: ((f - y) ** 4 + (f - y) ** 2).sum(), likelihood=lambda f: Independent(Normal(f, torch.ones(())), 1)
)


@pytest.mark.parametrize(
    ("loss", "function", "fisher"),
    [
        (
            nn.BCEWithLogitsLoss(pos_weight=_SKEWED),
            lambda f: F.binary_cross_entropy_with_logits(f, _SOFT, pos_weight=_SKEWED),
            "type-2",
        ),
        (
            nn.CrossEntropyLoss(_SKEWED, label_smoothing=0.9),
            lambda f: F.cross_entropy(f, data()[1], _SKEWED, label_smoothing=0.9),
            "mc",
        ),
        (TokenCrossEntropy(weight=_SKEWED), lambda f: F.cross_entropy(f[:, 0], _SOFT, _SKEWED), "type-2"),
        (nn.PoissonNLLLoss(log_input=False), lambda f: F.poisson_nll_loss(f, _SOFT, log_input=False), "ggn"),
        (_FOURTH, lambda f: ((f - _SOFT) ** 4 + (f - _SOFT) ** 2).sum(1).mean(), "ggn"),
        (Custom(lambda f, y: (f - y).cosh().log().sum()), lambda f: (f - _SOFT).cosh().log().sum(), "ggn"),
        (nn.GaussianNLLLoss(), lambda f: F.gaussian_nll_loss(f[:, 0], _SOFT, f[:, 1]), "ggn"),
    ],
)
def test_curvature_that_depends_on_targets_that_are_not_shown(loss: Any, function: Any, fisher: Any) -> None:
    """Soft or smoothed labels with weights, and targets that affect the Hessian, cannot be read off gradients."""
    X, _ = data()
    model: nn.Module = mlp()
    if isinstance(loss, TokenCrossEntropy):
        model = nn.Sequential(model, nn.Unflatten(1, (1, 3)))
    elif isinstance(loss, nn.PoissonNLLLoss):
        model = nn.Sequential(model, nn.Softplus())
    elif isinstance(loss, nn.GaussianNLLLoss):
        model = nn.Sequential(mlp(classes=6), nn.Softplus(), nn.Unflatten(1, (2, 3)))
    optimizer = KFAC(model, loss, fisher=fisher)
    with pytest.raises(LossError, match=r"depends on targets, which are unknown. Call targets\(y\)"):
        function(model(X)).backward()
    optimizer.close()


@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_weighted_labels_that_are_shown(scale: float) -> None:
    """Labels that explain the gradient are accepted, even if predictions are nearly certain."""
    X, y = data()
    loss = nn.CrossEntropyLoss(_SKEWED)
    results = []
    for function in (loss, lambda f, y: F.cross_entropy(f, y, _SKEWED)):
        model = mlp()
        with torch.no_grad():
            model[4].weight.mul_(scale)
        train(model, KFAC(model, loss, fisher="type-2", trust=None, lr=0.1), [(X, y)] * 3, function)
        results.append(weights(model))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("fisher", ["type-2", "empirical", "forward-only"])
def test_certain_predictions_count(fisher: Any) -> None:
    """If one class is left, the gradient is zero, as for ignored labels; but the prediction counts."""
    X, y = data()
    allowed = torch.ones(12, 3, dtype=torch.bool)
    allowed[:6] = F.one_hot(y[:6], 3).bool()
    y = y.where(torch.arange(12) < 9, -100)
    loss = nn.CrossEntropyLoss()
    results = []
    for function in (loss, F.cross_entropy):
        model = mlp()
        masked = nn.Sequential(model, Mask(allowed))
        train(masked, KFAC(masked, loss, fisher=fisher, trust=None, lr=0.1), [(X, y)] * 3, function)
        results.append(weights(model))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"lr": -1.0}, "lr is -1.0"),
        ({"lr": torch.nan}, "lr is nan"),
        ({"weight_decay": torch.nan}, "weight_decay is nan"),
        ({"trust": 0.0}, "trust is 0.0"),
        ({"kl_clip": 0.0}, "kl_clip is 0.0"),
        ({"damping": "a"}, "damping is 'a'"),
        ({"momentum": 1.0}, "momentum is 1.0"),
        ({"decay": 2.0}, "decay is 2.0"),
        ({"factors_every": 0}, "factors_every is 0"),
        ({"inverses_every": 1.5}, "inverses_every is 1.5"),
        ({"patience": 0}, "patience is 0"),
        ({"damping_method": "none"}, "damping_method is 'none'"),
        ({"damping_unit": "none"}, "damping_unit is 'none'"),
        ({"fisher": "none"}, "fisher"),
        ({"sharing": "none"}, "sharing"),
        ({"eigen": True, "damping_method": "factored"}, "exact damping"),
        ({"eigen": True, "fisher": "forward-only"}, "need gradients"),
        ({"quadratic_model": True, "factors_every": 5}, "every step"),
    ],
)
def test_options(options: dict[str, Any], match: str) -> None:
    """Settings out of range are named, and no hook is left behind."""
    model = mlp()
    with pytest.raises(ModelError, match=match):
        KFAC(model, LOSS, **options)
    assert not model._forward_hooks
    KFAC(model, LOSS)


@pytest.mark.parametrize("name", ["lr", "weight_decay", "damping", "momentum", "trust"])
def test_numbers_that_a_schedule_sets(name: str) -> None:
    """Numbers in groups are checked in every step, before any state changes."""
    model, (X, y) = mlp(), data()
    with pytest.raises(ModelError, match=f"{name} is nan"):
        KFAC(model, LOSS, [{"params": list(model.parameters()), name: torch.nan}])
    optimizer = KFAC(model, LOSS)
    train(model, optimizer, [(X, y)], LOSS)
    before = weights(model)
    usual = optimizer.param_groups[0][name]
    for bad in (torch.nan, -1.0, *([] if name == "trust" else [None])):
        optimizer.param_groups[0][name] = bad
        with pytest.raises(ModelError, match=f"{name} is {bad}"):
            train(model, optimizer, [(X, y)], LOSS)
        assert torch.equal(weights(model), before)
    optimizer.param_groups[0][name] = usual
    train(model, optimizer, [(X, y)], LOSS)
    assert not torch.equal(weights(model), before)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_parameters_twice_in_a_list() -> None:
    """They count once, with a warning of PyTorch."""
    model, other, batch = mlp(), mlp(), data()
    train(model, KFAC(model, LOSS, [*model.parameters(), model[0].weight]), [batch] * 2, LOSS)
    train(other, KFAC(other, LOSS), [batch] * 2, LOSS)
    assert torch.equal(weights(model), weights(other))


def test_what_is_no_model_or_no_loss() -> None:
    """Types of model and loss are checked, and so are parameters and groups."""
    model = mlp()
    with pytest.raises(ModelError, match=r"torch\.nn\.Module"):
        KFAC(lambda x: x, LOSS)  # type: ignore[arg-type]
    with pytest.raises(LossError):
        KFAC(model, nn.NLLLoss())
    with pytest.raises(ModelError, match="not parameters of the model"):
        KFAC(model, LOSS, mlp().parameters())
    with pytest.raises(ModelError, match="the method 'sgd'"):
        KFAC(model, LOSS, [{"params": list(model.parameters()), "method": "sgd"}])
    with pytest.raises(ModelError, match="differ in their momentum"):
        KFAC(
            model,
            LOSS,
            [{"params": list(model[0].parameters()), "momentum": 0.5}, {"params": list(model[2].parameters())}],
        )
    assert not model._forward_hooks


class Constant(nn.Module):
    """Makes data from a number."""

    def forward(self, x: float) -> Tensor:
        """Return one example."""
        return torch.full((1, 4), x)


def test_inputs_and_outputs_without_batch_axis() -> None:
    """The model takes examples, and returns one prediction for each."""
    X, _ = data()
    model = mlp()
    optimizer = KFAC(model, LOSS)
    constant = nn.Sequential(Constant(), nn.Linear(4, 3))
    keeper = KFAC(constant, LOSS)
    with pytest.raises(DataError, match="without any tensor"):
        constant(3.0).sum().backward()
    folded = nn.Sequential(nn.Flatten(0, 1), nn.Linear(2, 2))
    other = KFAC(folded, LOSS)
    with pytest.raises(DataError, match="was called with 5 examples, but its prediction has shape"):
        folded(torch.randn(5, 3, 2)).sum().backward()
    assert folded(torch.randn(5, 3, 2)).shape == (15, 2)  # not used by the training loop
    assert optimizer.steps == other.steps == keeper.steps == 0
    assert model(X).requires_grad

    class Strange(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Any:
            return {"one": self.linear(x), "other": x}

    strange = Strange()
    keeper = KFAC(strange, LOSS)
    with pytest.raises(ModelError, match="2 tensors that have a batch axis, none of them called"):
        strange(X.float())["one"].sum().backward()
    keeper.close()


def test_a_missing_state() -> None:
    with pytest.raises(StorageError, match="not one of"):
        KFAC(mlp(), LOSS).load_state_dict(None)  # type: ignore[arg-type]


def test_states_of_others() -> None:
    """A state of another optimizer, or of another model, is refused before any state changes."""
    X, y = data()
    model = mlp()
    optimizer = KFAC(model, LOSS)
    with pytest.raises(StorageError, match=r"not one of kfs\.optim\.KFAC"):
        optimizer.load_state_dict(torch.optim.SGD(model.parameters(), lr=0.1).state_dict())
    named = nn.Sequential()
    named.add_module("net", mlp())
    other = KFAC(named, LOSS)
    train(named, other, [(X, y)], LOSS)
    with pytest.raises(StorageError, match="this model does not have"):
        optimizer.load_state_dict(other.state_dict())
    assert optimizer.steps == 0


def test_states_of_other_versions() -> None:
    """A state with missing entries is refused before any state changes."""
    X, y = data()
    model = mlp()
    optimizer = KFAC(model, LOSS)
    train(model, optimizer, [(X, y)], LOSS)
    state = optimizer.state_dict()
    new = KFAC(mlp(), LOSS)
    del state["kfac"]["losses"]
    del state["kfac"]["curvature"]["sizes"]
    del state["kfac"]["curvature"]["averages"][1]["uses"]
    with pytest.raises(StorageError, match=r"has no losses, sizes, uses: another version of kfs.*Load it with that"):
        new.load_state_dict(state)
    assert (new.steps, len(new.state)) == (0, 0)


def test_copies() -> None:
    """An optimizer cannot be copied, since both copies would watch the model."""
    optimizer = KFAC(mlp(), LOSS)
    with pytest.raises(ModelError, match="cannot be copied"):
        copy.deepcopy(optimizer)
    with pytest.raises(ModelError, match="load_state_dict"):
        pickle.dumps(optimizer)


def test_refused_groups_are_not_kept() -> None:
    """After a refused group, the optimizer is unchanged."""
    model = mlp()
    optimizer = KFAC(model, LOSS, model[0].parameters())
    with pytest.raises(ModelError, match="not parameters of the model"):
        optimizer.add_param_group({"params": list(mlp().parameters())})
    assert len(optimizer.param_groups) == 1
    optimizer.load_state_dict(optimizer.state_dict())


def test_states_of_other_widths() -> None:
    """Sizes of blocks are compared with the model's."""
    X, y = data()
    narrow, wide = (
        mlp(),
        nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)).double(),
    )
    first, second = KFAC(narrow, LOSS), KFAC(wide, LOSS)
    train(narrow, first, [(X, y)], LOSS)
    with pytest.raises(StorageError, match="this model does not have"):
        second.load_state_dict(first.state_dict())


def test_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process would have its own curvature, so their models would diverge."""
    X, y = data()
    model = mlp()
    optimizer = KFAC(model, LOSS)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for processes in (1, 2):
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda processes=processes: processes)
        if processes == 1:
            train(model, optimizer, [(X, y)], LOSS)
            continue
        with pytest.raises(ModelError, match="There are 2 processes"):
            train(model, optimizer, [(X, y)], LOSS)
