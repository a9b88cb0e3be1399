"""Factors whose precision or device differs from the model's, and operators that are moved."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kfs.errors import ModelError
from kfs.factors import EKFAC, KFAC, exact_blocks, load
from kfs.factors.accumulate.outer_products import OuterProductSum
from kfs.problem.risk import EmpiricalRisk
from tests.factors.test_kronecker import kfac
from tests.operators.contract import close


def risk_of(dtype: torch.dtype, part: slice = slice(0, 30)) -> EmpiricalRisk:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    X, y = torch.randn(30, 3, dtype=torch.float64), torch.randint(2, (30,))
    return EmpiricalRisk(model.to(dtype), nn.CrossEntropyLoss(), (X[part].to(dtype), y[part]))


@pytest.mark.parametrize("make", [KFAC, EKFAC])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_factors_of_another_precision(make: Any, sharing: Any) -> None:
    expected = make(risk_of(torch.float64), sharing=sharing)
    for model, factors, tolerance in (
        (torch.float32, torch.float64, 1e-5),  # inputs and gradients are rounded to float32
        (torch.float64, torch.float32, 1e-5),
        (torch.float32, torch.bfloat16, 2e-2),  # eight bits
    ):
        K = make(risk_of(model), sharing=sharing, factor_dtype=factors)
        assert {block.A.dtype for block in K.blocks.values()} == {factors}
        v = torch.ones(K.shape[0], dtype=model)
        assert (K @ v).dtype == model
        scale = (expected @ v.double()).norm()
        assert ((K @ v).double() - expected @ v.double()).norm() < tolerance * scale
        inverse = K.inverse(0.1) @ v
        assert (inverse.double() - expected.inverse(0.1) @ v.double()).norm() < 10 * tolerance * inverse.norm()
    if make is KFAC:
        parts = [risk_of(torch.float32, slice(0, 10)), risk_of(torch.float32, slice(10, 30))]
        updated = KFAC(parts[0], sharing=sharing, factor_dtype=torch.bfloat16).update(parts[1])
        assert updated.blocks["0"].A.dtype == torch.bfloat16
        close_to = updated.blocks["0"].A.double() - expected.blocks["0"].A
        assert close_to.norm() < 2e-2 * expected.blocks["0"].A.norm()


def test_bad_precision() -> None:
    for bad in (torch.int64, "float32"):
        with pytest.raises(ModelError, match="factor_dtype"):
            KFAC(risk_of(torch.float64), factor_dtype=bad)  # type: ignore[arg-type]


def test_bad_devices(tmp_path: Path) -> None:
    K = KFAC(risk_of(torch.float64))
    K.save(tmp_path / "k")
    for bad in ("nowhere", "meta"):
        with pytest.raises(ModelError, match="There is no device"):
            KFAC(risk_of(torch.float64), factor_device=bad)
        with pytest.raises(ModelError, match="There is no device"):
            load(tmp_path / "k", bad)


def test_devices_are_stored_by_name() -> None:
    """Device names, as in files."""
    settings = KFAC(risk_of(torch.float64), factor_device=torch.device("cpu")).settings
    assert settings.factor_device == "cpu"


def test_a_sum_elsewhere() -> None:
    """Sums on another device are complete; the transfer itself is tested on a GPU."""
    for diagonal in (False, True):
        for groups in (1, 2):
            mine, other = (OuterProductSum.zeros(3, groups, diagonal, True, torch.float64, "cpu") for _ in range(2))
            assert mine.on(torch.device("cpu")) is mine
            assert mine.on(torch.device("meta")).total.shape == mine.total.shape
            x = torch.randn(2, 5, groups * 3, dtype=torch.float64)
            other.add(x, ones=True)
            mine.merge_in(other)
            mine.merge_in(mine)
            mine.complete()
            for group, total in enumerate(mine.total):
                vectors = x.reshape(10, groups, 3)[:, group]
                with_ones = torch.cat([vectors, torch.ones(10, 1, dtype=torch.float64)], 1)
                expected = sum(torch.outer(v, v) for v in with_ones)
                close(total, torch.as_tensor(expected).diagonal() if diagonal else torch.as_tensor(expected))


@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("size", [3, 200])  # in one product, and in strips
def test_a_sum_that_is_completed_several_times(size: int, diagonal: bool) -> None:
    """A sum is right whenever it is completed, and can be added to afterwards."""
    total = OuterProductSum.zeros(size, 1, diagonal, True, torch.float64, "cpu")
    expected = torch.zeros(size + 1, size + 1, dtype=torch.float64)
    for _ in range(2):
        x = torch.randn(2, 5, size, dtype=torch.float64)
        total.add(x, ones=True)
        for vector in x.flatten(0, 1):
            with_one = torch.cat([vector, torch.ones(1, dtype=torch.float64)])
            expected += torch.outer(with_one, with_one)
        for _ in range(2):
            total.complete()
            close(total.total[0], expected.diagonal() if diagonal else expected)


def test_operators_are_moved_and_converted() -> None:
    risk = risk_of(torch.float64)
    for operator in (kfac(), kfac().inverse(0.1), kfac().inverse(0.1, "factored"), EKFAC(risk), exact_blocks(risk)):
        dense = operator.to_dense()
        assert operator.to(dtype=torch.float32) is operator
        assert operator.dtype == torch.float32
        torch.testing.assert_close(operator.to_dense(), dense.float(), rtol=1e-4, atol=1e-4)
        assert (operator.to("cpu") @ torch.ones(len(dense))).dtype == torch.float32
