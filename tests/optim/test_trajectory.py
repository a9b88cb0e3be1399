"""Whole trajectories against the formulas in `reference`: a wrong intermediate result would show within some steps."""

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from kfs.optim import KFAC
from tests.optim.reference import Criterion, QuadraticReference, Reference
from tests.optim.training import Layers, data, train, weights

Batch = tuple[Tensor, Tensor]


def cross_entropy(f: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(f.unsqueeze(0), y.unsqueeze(0))


def binary(f: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(f, y, reduction="sum")


def half_square(f: Tensor, y: Tensor) -> Tensor:
    return 0.5 * (f - y).square().sum()


def batches(steps: int, size: int = 10) -> list[Batch]:
    """Return a batch per step, all of them different."""
    X, y = data(steps * size)
    return list(zip(X.split(size), y.split(size), strict=True))


def two_layers() -> Layers:
    torch.manual_seed(3)
    return Layers(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double()


def single_neuron() -> Layers:
    """Return layers whose steps have one row or one column, so that their spectral norm is exact."""
    torch.manual_seed(3)
    return Layers(nn.Linear(4, 1), nn.Tanh(), nn.Linear(1, 3, bias=False)).double()


def follow(model: nn.Sequential, optimizer: KFAC, reference: Reference, loss: nn.Module, steps: list[Batch]) -> None:
    """Train a model and the reference, and compare them after every step."""
    for X, y in steps:
        train(model, optimizer, [(X, y)], loss)
        reference.step(X, y)
        torch.testing.assert_close(weights(model), weights(reference.model), rtol=1e-8, atol=1e-10)
    assert optimizer.steps == reference.steps
    assert optimizer.damping_scale == reference.damping_scale


def compare(
    model: nn.Sequential, loss: nn.Module, criterion: Criterion, steps: list[Batch], **options: Any
) -> Reference:
    """Train a model with some options, and a copy of it with the reference."""
    reference = Reference(copy.deepcopy(model), criterion, **{"fisher": "type-2"} | options)
    follow(model, KFAC(model, loss, **{"fisher": "type-2", "noise": None} | options), reference, loss, steps)
    return reference


def test_defaults() -> None:
    """All settings have their documented default values.

    One neuron is one block, so its inverses are computed at the documented intervals.
    """
    torch.manual_seed(3)
    model, loss = nn.Sequential(nn.Linear(4, 1)).double(), nn.BCEWithLogitsLoss()
    steps = [(4 * X, (y == 0).double().unsqueeze(1)) for X, y in batches(12, 20)]
    reference = compare(model, loss, binary, steps)
    assert any(reference.shortened)  # otherwise the trust region has no effect


def test_curvature_is_drawn_by_default() -> None:
    """Without `fisher=` and `seed=`, labels are drawn with seed 0."""
    loss, moved = nn.CrossEntropyLoss(), []
    cases: list[dict[str, Any]] = [{}, {"fisher": "mc", "seed": 0}, {"fisher": "mc", "seed": 1}, {"fisher": "type-2"}]
    for options in cases:
        model = two_layers()
        train(model, KFAC(model, loss, **options), batches(2), loss)
        moved.append(weights(model))
    assert torch.equal(moved[0], moved[1])
    assert not torch.allclose(moved[0], moved[2])
    assert not torch.allclose(moved[0], moved[3])


@pytest.mark.parametrize(("every", "steps"), [({"inverses_every": 1}, 6), ({"inverses_every": 4}, 10), ({}, 26)])
def test_intervals_of_inverses_grow(every: dict[str, int], steps: int) -> None:
    """They start with one step and grow by one in two steps, up to the given interval, or ten."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 3)).double()
    options = {"factors_every": 1, "decay": 0.5, "trust": None, **every}
    compare(model, nn.CrossEntropyLoss(), cross_entropy, batches(steps), **options)


def test_inverses_do_not_catch_up() -> None:
    """Steps without a scheduled inverse do not make later inverses more frequent."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 3)).double()
    options = {"factors_every": lambda step: 8 if step < 8 else 1, "inverses_every": 3, "trust": None}
    compare(model, nn.CrossEntropyLoss(), cross_entropy, batches(13), **options)


GENTLE: dict[str, Any] = {"trust": None, "factors_every": 1, "inverses_every": 1, "damping": 0.1}
SETTINGS: dict[str, dict[str, Any]] = {
    "factored": {"momentum": 0.7},
    "exact": {"damping_method": "exact", "weight_decay": 0.1, "momentum": 0.0},
    "absolute": {"damping_unit": "absolute", "factors_every": 2, "decay": 0.3},
    "corrected": {"eigen": True, "decay": 0.6},
    "corrected-empirical": {"eigen": True, "decay": 0.6, "fisher": "empirical"},
    "empirical": {"fisher": "empirical"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name: str) -> None:
    compare(two_layers(), nn.CrossEntropyLoss(), cross_entropy, batches(5), **GENTLE | SETTINGS[name])


@pytest.mark.parametrize("name", ["factored", "corrected-empirical"])
def test_sums(name: str) -> None:
    loss = nn.CrossEntropyLoss(reduction="sum")
    compare(two_layers(), loss, cross_entropy, batches(5), **GENTLE | SETTINGS[name])


@pytest.mark.parametrize("name", ["factored", "corrected-empirical"])
def test_the_square_loss(name: str) -> None:
    """It has its own reduction factor, and counts entries, not examples."""
    target = torch.randn(5, 10, 3, dtype=torch.float64)
    steps = [(X, y) for (X, _), y in zip(batches(5), target, strict=True)]
    compare(two_layers(), nn.MSELoss(), half_square, steps, **GENTLE | SETTINGS[name])


def test_kl_clip() -> None:
    """The length of the step in the metric of the curvature, with all learning rates, is the given one."""
    options = GENTLE | {"kl_clip": 0.02, "lr": 0.2}
    reference = compare(two_layers(), nn.CrossEntropyLoss(), cross_entropy, batches(6), **options)
    assert any(reference.shortened)
    assert not all(reference.shortened)


GROUPS: dict[int, dict[str, Any]] = {
    0: {"lr": 0.2, "damping": 0.05, "trust": 0.5, "weight_decay": 0.3},
    2: {"lr": 0.05, "damping": 0.5, "trust": 0.1, "weight_decay": 0.1},
}


@pytest.mark.parametrize("kl_clip", [None, 1e-4])
@pytest.mark.parametrize("order", [[0, 2], [2, 0]])
def test_groups(order: list[int], kl_clip: float | None) -> None:
    """Each layer has the settings of its own group, in any order of groups."""
    model, loss = single_neuron(), nn.CrossEntropyLoss()
    options: dict[str, Any] = {"kl_clip": kl_clip, "factors_every": 1, "inverses_every": 1}
    reference = Reference(copy.deepcopy(model), cross_entropy, GROUPS, **options)
    groups = [{"params": list(model[place].parameters()), **GROUPS[place]} for place in order]
    optimizer = KFAC(model, loss, groups, fisher="type-2", noise=None, **options)
    follow(model, optimizer, reference, loss, batches(6))
    assert any(reference.shortened)


class Bent(nn.Module):
    """A linear layer, and a parameter that is used in a way that KFAC does not cover."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.bend = nn.Parameter(torch.tensor([1.0, 2.0, -1.0]))

    def forward(self, x: Tensor) -> Any:
        return torch.atan2(self.linear(x), self.bend)


@pytest.mark.filterwarnings("ignore:KFAC does not cover")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_parameters_without_curvature(reduction: str) -> None:
    """Parameters that are not covered, or excluded, follow PyTorch's AdamW; weight decay is proportional to `lr`."""
    torch.manual_seed(3)
    model, loss = Bent().double(), nn.CrossEntropyLoss(reduction=reduction)
    groups = [
        {"params": [model.linear.weight], "lr": 0.0, "weight_decay": 0.1},
        {"params": [model.bend], "lr": 0.2, "weight_decay": 0.3},  # adamw_lr is 0.001
        {"params": [model.linear.bias], "lr": 0.1, "weight_decay": 0.05, "method": "adamw", "adamw_lr": 0.02},
    ]
    optimizer = KFAC(model, loss, groups)
    plain = copy.deepcopy(model)
    adamw = torch.optim.AdamW(
        [
            {"params": [plain.bend], "lr": 0.2 * 0.001, "weight_decay": 0.3 / 0.001},
            {"params": [plain.linear.bias], "lr": 0.1 * 0.02, "weight_decay": 0.05 / 0.02},
        ],
        betas=(0.9, 0.95),
        eps=1e-150,
    )
    for X, y in batches(6):
        train(model, optimizer, [(X, y)], loss)
        train(plain, adamw, [(X, y)], loss)
        torch.testing.assert_close(weights(model), weights(plain))
    assert set(optimizer.uncovered) == {"bend"}


class Deep(nn.Module):
    """Layers of different sizes, and a parameter that KFAC does not cover."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [4, 3, 6, 3, 5, 3]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.bend = nn.Parameter(torch.tensor([1.0, 2.0, -1.0]))

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x).tanh()
        return torch.atan2(x, self.bend)


@pytest.mark.filterwarnings("ignore:KFAC does not cover")
@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.MSELoss()])
@pytest.mark.parametrize("options", [{}, {"eigen": True}, {"quadratic_model": True}])
def test_resuming_after_every_step(options: dict[str, Any], loss: nn.Module) -> None:
    """A training that is resumed after every single step equals an uninterrupted one.

    Inverses are spread over steps, the oldest ones first, so the resumed order of blocks is tested, too. Some batches
    are bad, so events and damping are also resumed.
    """
    torch.manual_seed(3)
    options = {"inverses_every": 4, "patience": 2, "weight_decay": 0.1} | options
    if "quadratic_model" not in options:
        options["factors_every"] = 2
    model = Deep().double()
    other = copy.deepcopy(model)
    optimizer, state = KFAC(model, loss, **options), None
    steps = [(X, F.one_hot(y, 3).double()) for X, y in batches(16, 6)]
    for place in (5, 6):
        steps[place][0][2, 1] = torch.nan
    for X, y in steps:
        take_step(model, optimizer, loss, X, y)
        other = copy.deepcopy(other)
        resumed = KFAC(other, loss, **options)
        if state is not None:
            resumed.load_state_dict(state)
        take_step(other, resumed, loss, X, y)
        assert torch.equal(weights(other), weights(model))
        state = copy.deepcopy(resumed.state_dict())
        resumed.close()
    assert resumed.events == optimizer.events
    assert resumed.events.raised_damping == 1
    assert resumed.damping_scale == optimizer.damping_scale
    assert resumed.steps == optimizer.steps == 14


def take_step(model: nn.Module, optimizer: KFAC, loss: nn.Module, X: Tensor, y: Tensor) -> None:
    """Take one step, with a closure."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        value: Tensor = loss(model(X), y)
        value.backward()
        return value

    optimizer.step(closure)


@pytest.mark.parametrize("lr", [None, 0.5])
def test_quadratic_model(lr: float | None) -> None:
    """Steps minimize the quadratic model with dense curvature; weights decay; damping adapts in every step.

    The default of `lr` is one, and factors are computed in every step.
    """
    options: dict[str, Any] = {"damping": 0.5, "weight_decay": 0.02} | ({} if lr is None else {"lr": lr})
    model, loss = two_layers(), nn.CrossEntropyLoss()
    reference = QuadraticReference(copy.deepcopy(model), cross_entropy, **{"lr": 1.0, **options})
    optimizer = KFAC(model, loss, fisher="type-2", quadratic_model=True, **options)
    for X, y in batches(7):
        take_step(model, optimizer, loss, X, y)
        before = reference.loss(X, y)
        reference.step(X, y)
        reference.adapt_damping(reference.loss(X, y) - before)
        reference.decay_weights()
        torch.testing.assert_close(weights(model), weights(reference.model), rtol=1e-8, atol=1e-10)
        assert optimizer.damping_scale == pytest.approx(reference.damping_scale)
    assert optimizer.damping_scale != 1


@pytest.mark.parametrize(
    ("share", "factor"),
    [(1.5, 0.5), (0.91, 0.5), (0.89, 0.95**5), (0.76, 0.95**5), (0.74, 1.0), (0.26, 1.0), (0.24, 0.95**-5)],
)
def test_damping_follows_the_prediction(share: float, factor: float) -> None:
    """It changes by the ratio of the actual to the predicted change of the loss."""
    model, loss = two_layers(), nn.CrossEntropyLoss(reduction="sum")
    X, y = batches(1)[0]
    reference = QuadraticReference(copy.deepcopy(model), cross_entropy, lr=0.5)
    reference.step(X, y)
    optimizer = KFAC(model, loss, fisher="type-2", quadratic_model=True, lr=0.5)
    calls = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        value: Tensor = loss(model(X), y)
        value.backward()
        calls.append(float(value.detach()))
        return value if len(calls) == 1 else value.new_tensor(calls[0] + share * len(X) * reference.predicted)

    optimizer.step(closure)
    assert len(calls) == 2
    assert optimizer.damping_scale == pytest.approx(factor)
