"""`num_data=`: operators need no pass to count examples, and a wrong number is always noticed."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfs import GGN, KFAC, EmpiricalRisk, Hessian, Jacobian
from kfs.errors import DataError
from tests.operators.contract import close


class Loader:
    """Batches that count how often they are requested."""

    def __init__(self, batches: list[tuple[Tensor, Tensor]]) -> None:
        self.batches = batches
        self.asked = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in self.batches:
            self.asked += 1
            yield batch


def loader() -> Loader:
    torch.manual_seed(0)
    return Loader([(torch.randn(n, 3).double(), torch.randn(n, 2).double()) for n in (3, 2, 4)])


LOSSES: list[nn.Module] = [nn.MSELoss(), nn.MSELoss(reduction="sum"), nn.SmoothL1Loss()]


@pytest.mark.parametrize("loss", LOSSES, ids=str)
@pytest.mark.parametrize("make", [GGN, Hessian, Jacobian, KFAC])
def test_results_are_the_same_without_counting(make: Any, loss: nn.Module) -> None:
    if make in {KFAC, GGN} and isinstance(loss, nn.SmoothL1Loss):
        pytest.skip("it has no second derivative of that kind")
    model = nn.Linear(3, 2).double()
    counted, declared = loader(), loader()
    risk = EmpiricalRisk(model, loss, counted)
    known = EmpiricalRisk(model, loss, declared, num_data=9)
    expected, actual = make(risk), make(known)
    v = torch.randn(8, dtype=torch.float64)
    close(actual @ v, expected @ v)
    # One batch is requested instead of three, to find the size of a target.
    saved = 0 if make is KFAC else 2
    assert counted.asked - declared.asked == saved
    close(actual @ v, expected @ v)
    assert known.num_data == risk.num_data == 9
    assert known.reduction_factor == pytest.approx(risk.reduction_factor)


@pytest.mark.parametrize("wrong", [8, 10])
def test_wrong_numbers_are_refused(wrong: int) -> None:
    model = nn.Linear(3, 2).double()
    v = torch.randn(8, dtype=torch.float64)
    for use in (lambda r: GGN(r) @ v, KFAC, lambda r: r.value(), lambda r: r.gradient()):
        risk = EmpiricalRisk(model, nn.MSELoss(), loader(), num_data=wrong)
        with pytest.raises(DataError, match=rf"num_data is {wrong}, but the data have 9 targets"):
            use(risk)


@pytest.mark.parametrize("number", [0, -1, 2.0, True, "9"])
def test_what_is_no_number_is_refused(number: Any) -> None:
    with pytest.raises(DataError, match="Pass a positive integer"):
        EmpiricalRisk(nn.Linear(3, 2), nn.MSELoss(), loader(), num_data=number)


def test_targets_that_do_not_count() -> None:
    """The first batch does not reveal ignored labels in others, so the complete pass raises an error afterwards."""
    X, y = torch.randn(9, 3).double(), torch.tensor([0, 1, 1, 0, 1, 0, 0, 1, 1])
    model, v = nn.Linear(3, 2).double(), torch.randn(8, dtype=torch.float64)

    def risk_of(labels: Tensor, **settings: Any) -> EmpiricalRisk:
        data = list(zip(X.split(3), labels.split(3), strict=True))
        return EmpiricalRisk(model, nn.CrossEntropyLoss(), data, **settings)

    close(GGN(risk_of(y, num_data=9)) @ v, GGN(risk_of(y)) @ v)
    later, all_of_the_first = y.clone(), y.clone()
    later[5] = -100
    all_of_the_first[:3] = -100
    with pytest.raises(DataError, match=r"divides by 8, but by 9 when.*Leave num_data out"):
        GGN(risk_of(later, num_data=9)) @ v
    # If all labels of the first batch are ignored, the examples are counted.
    close(GGN(risk_of(all_of_the_first, num_data=9)) @ v, GGN(risk_of(all_of_the_first)) @ v)
