"""Factors and eigenvalues of several ranks equal those of one process with all data."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

import kfs
from kfs.distributed import Ranks
from kfs.errors import DataError, DistributedError, ModelError
from kfs.factors.compute import sweep
from kfs.factors.kfac import KFAC
from kfs.factors.settings import Settings
from tests.distributed.pool import Pool
from tests.distributed.problems import CUTS, batches, bits, is_first, problem, risk_of_all, risk_of_own
from tests.factors.test_statistic import GradientNorms

FISHERS = ("type-2", "ggn", "mc", "empirical", "forward-only")
CLOSE: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-14}  # sums of 23 examples in another order


def compare_factors(name: str, settings: dict[str, Any]) -> str:
    K = KFAC(risk_of_own(name), **settings)
    if is_first():
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
    """Some ranks have no data, or no data for one of the experts."""
    assert len(set(ranks(size, compare_factors, name, {"fisher": "mc"}))) == 1


def compare_norms() -> None:
    found, expected = GradientNorms(), GradientNorms()
    sweep(risk_of_own("mlp"), found, Settings(), "norms")
    if is_first():
        sweep(risk_of_all("mlp"), expected, Settings(), "norms")
        assert found.number == expected.number
        torch.testing.assert_close(found.total, expected.total, **CLOSE)


def test_a_new_statistic(ranks: Pool) -> None:
    """Its tensors and counts are added up by the generic code."""
    ranks(3, compare_norms)


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
    if is_first():
        one = kfs.EKFAC(risk_of_all("tokens"), **settings)
        assert (E.num_data, E.count) == (one.num_data, one.count)
        torch.testing.assert_close(E.to_dense(), one.to_dense(), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(eigenvalues.sort().values, one.eigenvalues().sort().values, rtol=1e-9, atol=1e-13)
    return bits([eigenvalues])


@pytest.mark.parametrize("fisher", ["type-2", "mc"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_eigenvalues(ranks: Pool, fisher: str, sharing: str) -> None:
    assert len(set(ranks(4, compare_eigenvalues, fisher, sharing))) == 1


def compare_more_data() -> None:
    """Compare factors after data were added by one process alone, and by all."""
    model, loss, X, y = problem("mlp")
    settings: dict[str, Any] = {"fisher": "mc"}
    one = KFAC(kfs.EmpiricalRisk(model, loss, (X, y)), **settings)
    own = slice(*CUTS[dist.get_world_size()][dist.get_rank() : dist.get_rank() + 2])
    start = KFAC(kfs.EmpiricalRisk(model, loss, (X[:3], y[:3])), **settings)
    rest = kfs.EmpiricalRisk(model, loss, kfs.shard((X[3:], y[3:]), dist.group.WORLD))
    torch.testing.assert_close(start.update(rest).to_dense(), one.to_dense(), **CLOSE)
    assert start.num_data == one.num_data
    # Results of single processes can still be merged by hand.
    if own.start < own.stop:
        alone = KFAC(kfs.EmpiricalRisk(model, loss, (X[own], y[own])), first_datum=own.start, **settings)
        assert alone.num_data == own.stop - own.start


def test_more_data(ranks: Pool) -> None:
    ranks(3, compare_more_data)


def compare_structures() -> None:
    found = kfs.compare(risk_of_own("mlp"), fisher="type-2")
    if not is_first():
        return
    expected = kfs.compare(risk_of_all("mlp"), fisher="type-2")
    for row, other in zip(found.rows, expected.rows, strict=True):
        assert (row.layer, row.structure, row.nbytes) == (other.layer, other.structure, other.nbytes)
        assert row.frobenius == pytest.approx(other.frobenius, rel=1e-6, abs=1e-12)
        assert row.spectral == pytest.approx(other.spectral, rel=1e-6, abs=1e-12)


def test_all_structures(ranks: Pool) -> None:
    ranks(2, compare_structures)


class Scaled(torch.nn.Module):
    """Has a parameter that no rule covers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)
        self.power = torch.nn.Parameter(torch.tensor([1.5]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(x.abs() ** self.power)
        return result


def compare_diagonals(kind: type[KFAC | kfs.EKFAC]) -> None:
    _, loss, X, y = problem("mlp")
    torch.manual_seed(2)
    model = Scaled().double()
    settings: dict[str, Any] = {"uncovered": "diagonal", "fisher": "mc"}
    found = kind(kfs.EmpiricalRisk(model, loss, kfs.shard((X, y), dist.group.WORLD)), **settings)
    expected = kind(kfs.EmpiricalRisk(model, loss, (X, y)), **settings)
    torch.testing.assert_close(found.to_dense(), expected.to_dense(), rtol=1e-10, atol=1e-13)
    with pytest.raises(ModelError, match="'power'"):
        KFAC(kfs.EmpiricalRisk(model, loss, kfs.shard((X, y), dist.group.WORLD)))


@pytest.mark.parametrize("kind", [KFAC, kfs.EKFAC])
def test_exact_diagonals(ranks: Pool, kind: type[KFAC | kfs.EKFAC]) -> None:
    ranks(3, compare_diagonals, kind)


# The settings of both ranks are named.
DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "settings": ({}, {"mc_samples": 2}),
    "placement": ({}, {"placement": "owner"}),
    "memory": ({"factor_memory": 800}, {"factor_memory": 1000}),
    "one memory": ({}, {"factor_memory": 1000}),
    "little memory": ({"factor_memory": 10}, {"factor_memory": 10}),
}


def differing(what: str) -> str:
    model, loss, X, y = problem("mlp")
    second = dist.get_rank() == 1
    settings: dict[str, Any] = {"fisher": "mc"} | DIFFERENT.get(what, ({}, {}))[second]
    if what == "parameters" and second:
        with torch.no_grad():
            model[0].weight[0, 0] += 1  # type: ignore[index]
    if what == "an example":
        X[20, 1] = torch.nan
    if what == "no data":
        X, y = X[:0], y[:0]
    if what == "no target":
        y[:] = -100
    if what == "a rule" and second:
        model[1] = Odd()  # type: ignore[operator]
    risk = kfs.EmpiricalRisk(model, loss, kfs.shard((X, y), dist.group.WORLD))
    with pytest.raises((DataError, DistributedError, ModelError, ArithmeticError)) as caught:
        KFAC(risk, **settings)
    assert all(p.grad is None for p in model.parameters())
    # The next computation works as usual.
    assert Ranks(dist.group.WORLD).gather("ranks", dist.get_rank()) == [0, 1]
    return f"{type(caught.value).__name__}: {caught.value}"


class Odd(torch.nn.Module):
    """Its `forward` raises an error."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("nothing to divide by")


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("settings", "DistributedError: Settings differ between processes: rank 0 has "),
        ("placement", "DistributedError: Settings differ between processes: rank 0 has "),
        ("memory", "DistributedError: Settings differ between processes: rank 0 has "),
        ("one memory", "DistributedError: Settings differ between processes: rank 0 has factor_memory=None, and "),
        ("little memory", "ModelError: Block '0' needs 400 B, but only 10 B are available for a pass."),
        ("parameters", "DistributedError: Parameters differ between processes: '0.weight' of rank 1 differs "),
        ("an example", "DataError: The prediction for example 20 is not finite."),
        ("no data", "DataError: The data set is empty."),
        ("no target", "DataError: No target counts: "),
        ("a rule", "ZeroDivisionError: nothing to divide by"),
    ],
)
def test_errors_are_the_same_on_all_ranks(ranks: Pool, what: str, text: str) -> None:
    one, other = ranks(2, differing, what)
    assert one == other
    assert one.startswith(text)


def used_differently() -> str:
    """Use a parameter by rows on one rank, and as a matrix on the other."""
    torch.manual_seed(3)
    table = torch.randn(5, 5, dtype=torch.float64)
    first = dist.get_rank() == 0
    inputs: Any = torch.randint(5, (4,)) if first else torch.randn(4, 5, dtype=torch.float64)

    def model(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        table = params["table"]
        return x @ table if x.is_floating_point() else torch.nn.functional.embedding(x, table)

    data = inputs, torch.randint(5, (4,))
    risk = kfs.EmpiricalRisk(model, torch.nn.CrossEntropyLoss(), data, {"table": table}, group=dist.group.WORLD)
    with pytest.raises(ModelError) as caught:
        KFAC(risk)
    return str(caught.value)


def test_blocks_that_do_not_fit_together(ranks: Pool) -> None:
    one, other = ranks(2, used_differently)
    assert one == other
    assert "'table': its use by" in one
    assert "does not fit together with its other uses" in one


def used_on_other_sides(kind: type[KFAC | kfs.EKFAC]) -> None:
    """Multiply with a parameter on one rank, and with its transpose on the other."""
    torch.manual_seed(3)
    W = torch.randn(3, 3, dtype=torch.float64)
    signs = torch.tensor([[1.0]] * 4 + [[-1.0]] * 4, dtype=torch.float64)
    X = torch.rand(8, 3, dtype=torch.float64) * signs
    data = batches(X, torch.randn(8, 3, dtype=torch.float64), 4)

    def model(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return x @ params["W"] if x.sum() > 0 else x @ params["W"].T

    def risk(some: Any, group: Any = None) -> kfs.EmpiricalRisk:
        return kfs.EmpiricalRisk(model, torch.nn.MSELoss(), some, {"W": W}, group=group)

    expected = kind(risk(data), "mc").to_dense()
    own = risk([data[dist.get_rank()]], dist.group.WORLD)
    torch.testing.assert_close(kind(own, "mc").to_dense(), expected, rtol=1e-12, atol=1e-15)
    found = kind(own, "mc", placement="owner", factor_memory=400).to_dense()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)
    if kind is KFAC:
        updated = KFAC(risk(data[:1]), "mc").update(risk(data[1:]))
        torch.testing.assert_close(updated.to_dense(), expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("kind", [KFAC, kfs.EKFAC])
def test_uses_on_other_sides(ranks: Pool, kind: type[KFAC | kfs.EKFAC]) -> None:
    ranks(2, used_on_other_sides, kind)


def test_the_group_belongs_to_the_risk() -> None:
    with pytest.raises(TypeError, match=r"EmpiricalRisk\(..., kfs.shard\(data, group\)\)"):
        KFAC(risk_of_all("mlp"), group=None)  # type: ignore[call-arg]
