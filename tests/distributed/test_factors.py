"""Factors and eigenvalues of several ranks are those of one process that has all data."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import kfs
from kfs.kfac.kfac import KFAC
from tests.distributed.pool import Pool
from tests.distributed.problems import bits, risk_of_all, risk_of_own

FISHERS = ("type-2", "ggn", "mc", "empirical", "forward-only")
CLOSE: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-14}  # sums of 23 data in another order


def compare_factors(name: str, settings: dict[str, Any]) -> str:
    K = KFAC(risk_of_own(name), **settings)
    if dist.get_rank() == 0:
        one = KFAC(risk_of_all(name), **settings)
        assert list(K.blocks) == list(one.blocks)
        assert (K.num_data, K.count) == (one.num_data, one.count)
        for block, expected in zip(K.blocks.values(), one.blocks.values(), strict=True):
            assert block.sums.operations == expected.sums.operations
            assert block.sums.terms == expected.sums.terms
            torch.testing.assert_close(block.A, expected.A, **CLOSE)
            torch.testing.assert_close(block.B, expected.B, **CLOSE)
    assert K.audit is not None
    return bits(s.total for block in K.blocks.values() for s in block.sums.sums)


@pytest.mark.parametrize("fisher", FISHERS)
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_factors_of_tokens(ranks: Pool, fisher: str, sharing: str) -> None:
    """With ignored targets, uneven ranks, and one without data."""
    settings = {"fisher": fisher, "sharing": sharing, "mc_samples": 2 if fisher == "mc" else 1}
    assert len(set(ranks(4, compare_factors, "tokens", settings))) == 1


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", ["mlp", "convolution", "experts", "tokens"])
def test_factors_of_other_models(ranks: Pool, name: str, size: int) -> None:
    """Ranks without data, and without data for one of the experts, among them."""
    assert len(set(ranks(size, compare_factors, name, {"fisher": "mc"}))) == 1


@pytest.mark.parametrize("settings", [{"factor_dtype": torch.float32}, {"max_dim": 4, "joint_bias": False}])
def test_factors_with_other_settings(ranks: Pool, settings: dict[str, Any]) -> None:
    expected = ranks(1, products_of_kfac, settings)[0]
    tolerance = 1e-5 if "factor_dtype" in settings else 1e-12
    for found in ranks(3, products_of_kfac, settings):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def products_of_kfac(settings: dict[str, Any]) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # wide factors keep their diagonal
        K = KFAC(risk_of_own("mlp"), **settings)
    result: torch.Tensor = K @ torch.linspace(-1, 1, K.shape[0], dtype=torch.float64)
    return result


def compare_eigenvalues(fisher: str, sharing: str) -> str:
    settings: dict[str, Any] = {"fisher": fisher, "sharing": sharing}
    E = kfs.EKFAC(risk_of_own("tokens"), **settings)
    eigenvalues = E.eigenvalues()
    if dist.get_rank() == 0:
        one = kfs.EKFAC(risk_of_all("tokens"), **settings)
        assert (E.num_data, E.count) == (one.num_data, one.count)
        torch.testing.assert_close(E.to_dense(), one.to_dense(), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(eigenvalues.sort().values, one.eigenvalues().sort().values, rtol=1e-9, atol=1e-13)
    return bits([eigenvalues])


@pytest.mark.parametrize("fisher", ["type-2", "mc"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_eigenvalues(ranks: Pool, fisher: str, sharing: str) -> None:
    assert len(set(ranks(4, compare_eigenvalues, fisher, sharing))) == 1
