"""Settings in which KFAC is exact, or a known relation must hold: one list for the tests, the kit and the book.

The numbers of examples, positions, classes and features all differ, so that a wrong scale identifies its cause.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from kfs.conformance.case import Case
from kfs.conformance.models import CalledTwice, Hidden, Padded, Pool, Ragged, Renamed, Rows, Table


def vectors(num_data: int, *shape: int) -> Tensor:
    """Return normally distributed inputs `[num_data, *shape]`."""
    return torch.randn(num_data, *shape)


def mlp(
    bias: bool = True, activation: Callable[[], nn.Module] = nn.Tanh, linear: type[nn.Linear] = nn.Linear
) -> nn.Module:
    """Return a network with three linear layers of different widths."""
    sizes = ((4, 5), (5, 2), (2, 3))
    layers = [linear(i, o, bias=bias) for i, o in sizes]
    return nn.Sequential(layers[0], activation(), layers[1], activation(), layers[2])


def _convolutions(conv: Callable[[], nn.Module], features: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(conv(), nn.Tanh(), nn.Flatten(), nn.Linear(features, 3))


def _rows(order: str, combine: str) -> nn.Module:
    return Rows(order, combine)


def _positions(features: int, num_data: int) -> Tensor:
    return vectors(num_data, 7, features)


def sequences(starts: Sequence[int], lengths: Sequence[int], positions: int) -> Tensor:
    """Return sequences that are padded to a common length. The last feature is negative at padded positions.

    Args:
        starts: Start position of each sequence. Padding may be on both sides.
        lengths: Length of each sequence.
        positions: The common length.
    """
    X = torch.randn(len(starts), positions, 5)
    place = torch.arange(positions)
    ends = zip(starts, lengths, strict=True)
    is_real = torch.stack([(start <= place) & (place < start + length) for start, length in ends])
    X[..., -1] = torch.where(is_real, 1.0, -1.0)
    return X


def _frozen() -> nn.Module:
    model = mlp()
    model.get_submodule("0").requires_grad_(False)
    return model


_ONE = "With one example and one position, a sum of Kronecker products has only one term."
_LINEAR = "In a linear network with square loss, gradients of the prediction do not depend on the example."
_EXPAND = "Positions are independent of each other, like further examples."
_REDUCE = "Predictions depend on positions only through their sum."
_FOLDED = " The positions of all examples are rows of one matrix, as if each position were an example."
_MIXED = " The positions of all examples are rows of one matrix, in mixed order."
_RAGGED = " The number of positions differs between examples."
_BOTH = ("mean", "sum")
_MSE = {"fishers": ("type-2",), "losses": ("mse",), "num_data": 5, "reductions": _BOTH}

EXACT: tuple[Case, ...] = (
    Case("one example", "linear", _ONE, mlp, lambda n: vectors(n, 4), reductions=_BOTH),
    Case(
        "one example that counts",
        "linear",
        _ONE + " All other examples have the same input and an ignored label, so the mean divides by one.",
        mlp,
        lambda n: vectors(n, 4),
        num_data=3,
        losses=("ce, ignored labels",),
        reductions=_BOTH,
    ),
    Case(
        "one example, class weights",
        "linear",
        _ONE + " The mean divides by the weight of the label.",
        mlp,
        lambda n: vectors(n, 4),
        losses=("ce, class weights",),
        reductions=_BOTH,
    ),
    Case("one example, first layer frozen", "frozen", _ONE, _frozen, lambda n: vectors(n, 4)),
    Case("one example, no bias", "linear", _ONE, lambda: mlp(bias=False), lambda n: vectors(n, 4)),
    Case(
        "one example, activations in place",
        "linear",
        _ONE + " Activations overwrite the outputs of layers. KFAC needs the gradient of the original output.",
        lambda: mlp(activation=lambda: nn.ReLU(inplace=True)),
        lambda n: vectors(n, 4).abs() + 1,
    ),
    Case("one example, subclass of Linear", "linear", _ONE, lambda: mlp(linear=Renamed), lambda n: vectors(n, 4)),
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
        "sum over positions, two output axes",
        "linear",
        _REDUCE + " The prediction for an example has two axes.",
        lambda: nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 6), Pool("sum", (1,)), nn.Unflatten(1, (2, 3))),
        lambda n: vectors(n, 7, 4),
        outputs=(2, 3),
        sharings=("reduce",),
        positions=7,
        **_MSE,  # type: ignore[arg-type]
    ),
    Case(
        "sum over positions, several labels",
        "linear",
        _REDUCE + " There is one example, with two labels.",
        lambda: nn.Sequential(nn.Linear(4, 6), Pool("sum", (1,)), nn.Unflatten(1, (3, 2))),
        lambda n: vectors(n, 7, 4),
        outputs=(3, 2),
        sharings=("reduce",),
        losses=("ce",),
        reductions=_BOTH,
        positions=7,
    ),
    *(
        Case(
            name,
            "rows",
            why,
            partial(model, "sum" if sharing == "reduce" else "keep"),
            partial(_positions, features),
            outputs=(3,) if sharing == "reduce" else (7, 3),
            sharings=(sharing,),
            positions=7,
            **_MSE,  # type: ignore[arg-type]
        )
        for name, features, model, sharing, why in (
            ("folded positions", 4, partial(_rows, "folded"), "expand", _EXPAND + _FOLDED),
            ("folded positions, summed up", 4, partial(_rows, "folded"), "reduce", _REDUCE + _FOLDED),
            ("rows of mixed data", 4, partial(_rows, "mixed"), "expand", _EXPAND + _MIXED),
            ("rows of mixed data, summed up", 4, partial(_rows, "mixed"), "reduce", _REDUCE + _MIXED),
            ("ragged data", 5, Ragged, "expand", _EXPAND + _RAGGED),
            ("ragged data, summed up", 5, Ragged, "reduce", _REDUCE + _RAGGED),
        )
    ),
    Case(
        "one position, padded",
        "padding",
        _ONE + " All other positions are padding: the model masks them, and their labels are ignored.",
        Padded,
        lambda n: sequences([2] * n, [1] * n, 7),
        outputs=(3, 7),
        losses=("ce, padding",),
        reductions=_BOTH,
        positions=7,
    ),
    Case(
        "a repeated table",
        "table",
        _EXPAND + " The copies of a table for every example are one parameter, not one parameter per example.",
        Table,
        lambda n: vectors(n, 7, 4),
        outputs=(7, 3),
        sharings=("expand",),
        positions=7,
        **_MSE,  # type: ignore[arg-type]
    ),
    Case(
        "a use in a custom function",
        "hidden",
        _REDUCE + " A use of the weight that only autograd sees also counts. An error that says so is also accepted.",
        Hidden,
        lambda n: vectors(n, 8),
        sharings=("reduce",),
        positions=2,
        may_refuse=True,
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
        _REDUCE + " The padding consists of pixels from the opposite side, not of zeros.",
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
        "Each group of channels has its own inputs, so it needs its own pair of factors.",
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

# KFAC is not exact here: there are several examples, and the network is nonlinear.
APPROXIMATE = Case("several examples", "linear", "A usual network.", mlp, lambda n: vectors(n, 4), num_data=6)

# Sequences of different lengths with padding on the right, on the left, and on both sides.
PADDED = Case(
    "padded sequences",
    "padding",
    "Predictions at positions with labels do not depend on padding.",
    Padded,
    lambda _: sequences([0, 4, 1], [4, 2, 3], 6),
    outputs=(3, 6),
    num_data=3,
    losses=("ce, padding",),
    sharings=("expand",),
    positions=6,
)
