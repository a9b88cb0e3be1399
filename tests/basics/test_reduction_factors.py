from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from kfs.basics.reduction_factors import Loss, criterion, reduction_factor
from kfs.errors import DataError, DtypeError, LossError, ShapeError
from tests.basics.cases import CASES, Case, assert_close, shapes


def risk(loss: Loss, predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The paper's empirical risk, from our reduction factor and criterion."""
    c = criterion(loss)
    total = torch.stack([c(f, y) for f, y in zip(predictions, targets, strict=True)]).sum()
    return reduction_factor(loss, targets) * total


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@given(num_data=st.integers(1, 4), shape=shapes)
def test_mse_is_pytorchs(reduction: str, num_data: int, shape: tuple[int, ...]) -> None:
    f, y = torch.randn(2, num_data, *shape, dtype=torch.float64)
    loss = nn.MSELoss(reduction=reduction)
    assert_close(risk(loss, f, y), loss(f, y))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@given(
    num_data=st.integers(1, 4),
    num_classes=st.integers(2, 4),
    shape=shapes,
    weighted=st.booleans(),
    label_smoothing=st.sampled_from([0.0, 0.3]),
    ignore_index=st.sampled_from([-100, 1]),
    probabilities=st.booleans(),
)
def test_cross_entropy_is_pytorchs(
    reduction: str,
    num_data: int,
    num_classes: int,
    shape: tuple[int, ...],
    weighted: bool,
    label_smoothing: float,
    ignore_index: int,
    probabilities: bool,
) -> None:
    weight = torch.rand(num_classes, dtype=torch.float64) + 0.1 if weighted else None
    loss = nn.CrossEntropyLoss(weight, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction)
    f = torch.randn(num_data, num_classes, *shape, dtype=torch.float64)
    if probabilities and ignore_index >= 0:
        with pytest.raises(LossError, match="ignore_index=1, which is for labels"):
            risk(loss, f, torch.rand_like(f).softmax(1))
        return
    if probabilities:
        y = torch.rand_like(f).softmax(1)
    else:
        y = torch.randint(num_classes, (num_data, *shape))
        y.view(-1)[0] = 0  # a label that is not ignored
        if y.numel() > 1:
            y.view(-1)[1] = ignore_index
    assert_close(risk(loss, f, y), loss(f, y))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_risk_is_pytorchs_in_every_shared_case(case: Case) -> None:
    model, loss, X, y = case.make()
    assert_close(risk(loss, model(X), y), loss(model(X), y))


def test_mean_and_sum_differ_by_the_number_of_targets() -> None:
    y = torch.zeros(5, 2, 3)
    assert reduction_factor(nn.MSELoss(), y) == pytest.approx(2 / 30)
    assert reduction_factor(nn.MSELoss(reduction="sum"), y) == 2
    labels = torch.zeros(5, 4, dtype=torch.long)
    assert reduction_factor(nn.CrossEntropyLoss(), labels) == pytest.approx(1 / 20)
    assert reduction_factor(nn.CrossEntropyLoss(reduction="sum"), labels) == 1


class OtherMSE(nn.MSELoss):
    """A subclass may compute anything."""


REFUSED = [nn.L1Loss(), nn.functional.mse_loss, OtherMSE(), "mse", None]


@pytest.mark.parametrize("loss", REFUSED, ids=["module", "function", "subclass", "string", "None"])
def test_other_losses_are_refused(loss: Any) -> None:
    for call in (lambda: criterion(loss), lambda: reduction_factor(loss, torch.zeros(2, 1))):
        with pytest.raises(LossError, match=r"kfs\.basics defines MSELoss and CrossEntropyLoss.*torch\.nn\.MSELoss"):
            call()


@pytest.mark.parametrize("make", [nn.MSELoss, nn.CrossEntropyLoss])
def test_unreduced_losses_are_refused(make: Any) -> None:
    loss = make(reduction="none")
    for call in (lambda: criterion(loss), lambda: reduction_factor(loss, torch.zeros(2, 1))):
        with pytest.raises(LossError, match=r"reduction='none'.*Choose reduction='mean'"):
            call()


@pytest.mark.parametrize("target", [torch.zeros(0, 3), torch.tensor(1.0)], ids=["empty", "scalar"])
def test_missing_data_are_refused(target: torch.Tensor) -> None:
    with pytest.raises(DataError, match="no example"):
        reduction_factor(nn.MSELoss(), target)


def test_odd_labels_are_refused_where_they_are_counted() -> None:
    weighted = nn.CrossEntropyLoss(torch.tensor([1.0, 10.0]))
    with pytest.raises(DtypeError, match=r"y\.long\(\)"):
        reduction_factor(weighted, torch.tensor([1, 1], dtype=torch.uint8))
    for label in (-1, 2):
        with pytest.raises(DataError, match="but there are 2 classes"):
            reduction_factor(weighted, torch.tensor([0, label]))
    with pytest.raises(ShapeError, match="neither labels nor probabilities"):
        reduction_factor(nn.CrossEntropyLoss(), torch.tensor([0.0, 1.0]))
    with pytest.raises(LossError, match="ignore_index=1"):
        reduction_factor(nn.CrossEntropyLoss(ignore_index=1), torch.rand(2, 3))


def test_a_mean_over_nothing_is_refused() -> None:
    ignored = torch.tensor([-100, -100])
    with pytest.raises(DataError, match="0/0"):
        reduction_factor(nn.CrossEntropyLoss(), ignored)
    with pytest.raises(DataError, match="0/0"):
        reduction_factor(nn.CrossEntropyLoss(torch.tensor([0.0, 1.0])), torch.tensor([0, 0]))
    assert reduction_factor(nn.CrossEntropyLoss(reduction="sum"), ignored) == 1


@pytest.mark.parametrize(
    ("loss", "f", "y", "error", "message"),
    [
        (nn.MSELoss(), torch.zeros(3), torch.zeros(2), ShapeError, r"shape \[3\], .*target has shape \[3\], .*\[2\]"),
        (nn.MSELoss(), torch.zeros(3), torch.tensor(0.0), ShapeError, r"but it has shape \[\]"),
        (nn.CrossEntropyLoss(), torch.zeros(3), torch.tensor([1]), ShapeError, r"target has shape \[\]"),
        (nn.CrossEntropyLoss(), torch.zeros(3), torch.tensor(1.0), ShapeError, r"labels as torch\.int64"),
        (nn.CrossEntropyLoss(), torch.tensor(0.0), torch.tensor(0), ShapeError, "one logit per class"),
        (nn.CrossEntropyLoss(), torch.zeros(3), torch.tensor(1, dtype=torch.int32), DtypeError, r"y\.long\(\)"),
        (nn.CrossEntropyLoss(), torch.zeros(3), torch.tensor(3), DataError, "from 3 to 3, but there are 3 classes"),
        (nn.CrossEntropyLoss(), torch.zeros(0), torch.tensor(0), ShapeError, "one logit per class"),
        (nn.CrossEntropyLoss(torch.ones(2)), torch.zeros(3), torch.tensor(0), ShapeError, r"weight has shape \[2\]"),
        (
            nn.CrossEntropyLoss(torch.ones(3).double()),
            torch.zeros(3),
            torch.tensor(0),
            DtypeError,
            "weight is torch.fl",
        ),
        (nn.MSELoss(), torch.tensor([1]), torch.tensor([1.0]), DtypeError, r"prediction has dtype torch\.int64"),
        (nn.MSELoss(), torch.tensor([1.0]), torch.tensor([1]), DtypeError, r"target has dtype torch\.int64"),
        (nn.CrossEntropyLoss(), [0.0, 0.0], torch.tensor(1), DtypeError, "prediction is a list"),
        (nn.MSELoss(), torch.zeros(3), [0.0, 0.0, 0.0], DtypeError, "target is a list"),
    ],
)
def test_mismatched_data_are_refused(loss: Loss, f: Any, y: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        criterion(loss)(f, y)
