"""Settings in which KFAC is exact, or a known relation must hold: one list for our tests, the kit and the book.

Numbers of data, positions, classes and features all differ, so that a wrong scale tells where it comes from.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

Data = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Setting:
    """A model in float64 and evaluation mode, a loss, and batches."""

    model: nn.Module
    loss: nn.Module
    data: Data


@dataclass(frozen=True)
class Case:
    """A setting, and why KFAC is exact there.

    Attributes:
        name: What to call it.
        layer: Tag: which kind of layer it is about.
        why: Why KFAC is exact, or what the case is good for.
        model: Makes the model.
        inputs: Makes some inputs, given their number.
        outputs: Shape of the prediction for one datum.
        num_data: How many data.
        sharings: For which weight sharing KFAC is exact.
        fishers: For which Fisher it is exact.
        losses: For which losses: `"mse"`, `"ce"`, `"ce, ignored labels"` or `"ce, class weights"`.
        reductions: For which reductions it is checked.
        positions: How many positions share a weight.
        batches: Sizes of the batches.
        within_groups: Into how many groups the first layer's channels fall; entries between them are not compared.
        tied: Names that may stand for another one, since their parameters are the same.
    """

    name: str
    layer: str
    why: str
    model: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]
    outputs: tuple[int, ...] = (3,)
    num_data: int = 1
    sharings: tuple[str, ...] = ("expand", "reduce")
    fishers: tuple[str, ...] = ("type-2", "empirical")
    losses: tuple[str, ...] = ("mse", "ce")
    reductions: tuple[str, ...] = ("mean",)
    positions: int = 1
    batches: tuple[int, ...] = ()
    within_groups: int = 1
    tied: dict[str, str] = field(default_factory=dict)

    def setting(self, loss: str = "mse", reduction: str = "mean") -> Setting:
        """Make model, loss and data; the same every time, and without touching the global random state."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self.model().double().eval()
            X = self.inputs(self.num_data)
            X = X.double() if X.is_floating_point() else X
            numbers = torch.randn(self.num_data, *self.outputs, dtype=torch.float64)
            labels = torch.randint(self.outputs[0], (self.num_data, *self.outputs[1:]))
        y = numbers if loss == "mse" else labels
        if loss == "ce, ignored labels":
            X, y = X[:1].expand_as(X).clone(), labels.clone()
            y[1:] = -1
        sizes = list(self.batches or [self.num_data])
        weight = torch.arange(1.0, self.outputs[0] + 1, dtype=torch.float64) if loss == "ce, class weights" else None
        ignored = -1 if loss == "ce, ignored labels" else -100
        cross_entropy = nn.CrossEntropyLoss(weight, ignore_index=ignored, reduction=reduction)
        criterion = nn.MSELoss(reduction=reduction) if loss == "mse" else cross_entropy
        return Setting(model, criterion, list(zip(X.split(sizes), y.split(sizes), strict=True)))


class Pool(nn.Module):
    """Sums or averages over some axes."""

    def __init__(self, kind: str, axes: tuple[int, ...]) -> None:
        """Say how and over what."""
        super().__init__()
        self.kind, self.axes = kind, axes

    def forward(self, x: Tensor) -> Tensor:
        """Sum or average."""
        return x.sum(self.axes) if self.kind == "sum" else x.mean(self.axes)


class CalledTwice(nn.Module):
    """One layer, applied to both halves of its input; both results are added, or are two positions of the output."""

    def __init__(self, combine: str, tied: bool = False) -> None:
        """Say what happens to the two results; `tied` uses two modules with one weight."""
        super().__init__()
        self.first = nn.Linear(4, 3, bias=not tied)
        self.second = nn.Linear(4, 3, bias=False) if tied else self.first
        self.second.weight = self.first.weight
        self.combine = combine

    def forward(self, x: Tensor) -> Tensor:
        """Apply it twice."""
        one, two = self.first(x[:, :4]), self.second(x[:, 4:])
        return one + two if self.combine == "sum" else torch.stack([one, two], 1)


class Renamed(nn.Linear):
    """A linear layer by another name, with code of its own."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (PyTorch's name)
        """Multiply."""
        return F.linear(input, self.weight, self.bias)


def vectors(num_data: int, *shape: int) -> Tensor:
    """Return random inputs."""
    return torch.randn(num_data, *shape)


def mlp(
    bias: bool = True, activation: Callable[[], nn.Module] = nn.Tanh, linear: type[nn.Linear] = nn.Linear
) -> nn.Module:
    """Return three layers of different widths."""
    sizes = ((4, 5), (5, 2), (2, 3))
    layers = [linear(i, o, bias=bias) for i, o in sizes]
    return nn.Sequential(layers[0], activation(), layers[1], activation(), layers[2])


def _convolutions(conv: Callable[[], nn.Module], features: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(conv(), nn.Tanh(), nn.Flatten(), nn.Linear(features, 3))


def _frozen() -> nn.Module:
    model = mlp()
    model.get_submodule("0").requires_grad_(False)
    return model


_ONE = "With one datum and one position, a sum of Kronecker products has one term only."
_LINEAR = "In a linear net with square loss, gradients of the prediction do not depend on the datum."
_EXPAND = "Positions are independent of each other, like further data."
_REDUCE = "Predictions depend on positions through their sum only."
_BOTH = ("mean", "sum")
_MSE = {"fishers": ("type-2",), "losses": ("mse",), "num_data": 5, "reductions": _BOTH}

EXACT: tuple[Case, ...] = (
    Case("one datum", "linear", _ONE, mlp, lambda n: vectors(n, 4), reductions=_BOTH),
    Case(
        "one datum that counts",
        "linear",
        _ONE + " Others have the same input and an ignored label; a mean divides by one.",
        mlp,
        lambda n: vectors(n, 4),
        num_data=3,
        losses=("ce, ignored labels",),
        reductions=_BOTH,
    ),
    Case(
        "one datum, class weights",
        "linear",
        _ONE + " A mean divides by the label's weight.",
        mlp,
        lambda n: vectors(n, 4),
        losses=("ce, class weights",),
        reductions=_BOTH,
    ),
    Case("one datum, first layer frozen", "frozen", _ONE, _frozen, lambda n: vectors(n, 4)),
    Case("one datum, no bias", "linear", _ONE, lambda: mlp(bias=False), lambda n: vectors(n, 4)),
    Case(
        "one datum, activations in place",
        "linear",
        _ONE,
        lambda: mlp(activation=lambda: nn.ReLU(inplace=True)),
        lambda n: vectors(n, 4).abs() + 1,
    ),
    Case("one datum, subclass of Linear", "linear", _ONE, lambda: mlp(linear=Renamed), lambda n: vectors(n, 4)),
    Case(
        "deep linear net",
        "linear",
        _LINEAR,
        lambda: mlp(activation=nn.Identity),
        lambda n: vectors(n, 4),
        **_MSE,  # type: ignore[arg-type]
    ),
    Case(
        "deep linear net, uneven batches",
        "linear",
        _LINEAR,
        lambda: mlp(activation=nn.Identity),
        lambda n: vectors(n, 4),
        batches=(1, 3, 1),
        **_MSE,  # type: ignore[arg-type]
    ),
    Case(
        "independent positions",
        "linear",
        _EXPAND,
        lambda: nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 3)),
        lambda n: vectors(n, 7, 4),
        outputs=(7, 3),
        sharings=("expand",),
        positions=7,
        **_MSE,  # type: ignore[arg-type]
    ),
    Case(
        "sum over positions at the end",
        "linear",
        _REDUCE,
        lambda: nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 3), Pool("sum", (1,))),
        lambda n: vectors(n, 7, 4),
        sharings=("reduce",),
        positions=7,
        **_MSE,  # type: ignore[arg-type]
    ),
    Case(
        "mean over positions in the middle",
        "linear",
        _REDUCE,
        lambda: nn.Sequential(nn.Linear(4, 2), Pool("mean", (1,)), nn.Linear(2, 3)),
        lambda n: vectors(n, 7, 4),
        sharings=("reduce",),
        positions=7,
        **_MSE,  # type: ignore[arg-type]
    ),
    Case(
        "convolution in one dimension",
        "conv1d",
        _ONE,
        _convolutions(lambda: nn.Conv1d(2, 4, 3), 4),
        lambda n: vectors(n, 2, 3),
    ),
    Case(
        "convolution",
        "conv2d",
        _ONE,
        _convolutions(lambda: nn.Conv2d(2, 4, (2, 3)), 4),
        lambda n: vectors(n, 2, 2, 3),
    ),
    Case(
        "convolution, strided, padded and dilated",
        "conv2d",
        _ONE,
        _convolutions(lambda: nn.Conv2d(2, 4, 2, stride=3, padding=(0, 1), dilation=(2, 1)), 4),
        lambda n: vectors(n, 2, 3, 1),
    ),
    Case(
        "convolution, averaged",
        "conv2d",
        _REDUCE,
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), Pool("mean", (2, 3)), nn.Linear(4, 3)),
        lambda n: vectors(n, 2, 3, 4),
        sharings=("reduce",),
        positions=12,
        **_MSE,  # type: ignore[arg-type]
    ),
    Case(
        "circular padding",
        "conv2d",
        _REDUCE + " What is beyond the border comes from the opposite side, not from zeros.",
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular"), Pool("mean", (2, 3)), nn.Linear(4, 3)
        ),
        lambda n: vectors(n, 2, 5, 4),
        sharings=("reduce",),
        positions=20,
        **_MSE,  # type: ignore[arg-type]
    ),
    Case(
        "groups of channels",
        "conv2d",
        "Each group of channels has inputs of its own, so that it needs a factor pair of its own.",
        _convolutions(lambda: nn.Conv2d(4, 6, 2, groups=2), 6),
        lambda n: vectors(n, 4, 2, 2),
        within_groups=2,
    ),
    Case(
        "called twice, results added",
        "repeated",
        _REDUCE + " A second call is a further position.",
        lambda: CalledTwice("sum"),
        lambda n: vectors(n, 8),
        sharings=("reduce",),
        positions=2,
        tied={"second": "first"},
        **_MSE,  # type: ignore[arg-type]
    ),
    Case(
        "called twice, results kept",
        "repeated",
        _EXPAND + " A second call is a further position.",
        lambda: CalledTwice("stack"),
        lambda n: vectors(n, 8),
        outputs=(2, 3),
        sharings=("expand",),
        positions=2,
        tied={"second": "first"},
        **_MSE,  # type: ignore[arg-type]
    ),
    Case(
        "two modules with one weight",
        "tied",
        _REDUCE + " Both modules use the same parameter.",
        lambda: CalledTwice("sum", tied=True),
        lambda n: vectors(n, 8),
        sharings=("reduce",),
        positions=2,
        tied={"second": "first", "second.weight": "first.weight"},
        **_MSE,  # type: ignore[arg-type]
    ),
)

# Nothing is exact here: several data, nonlinear.
APPROXIMATE = Case("several data", "linear", "A usual net.", mlp, lambda n: vectors(n, 4), num_data=6)
