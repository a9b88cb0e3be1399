"""Value, gradient and products of several ranks equal those of one process with all data."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import kfs
from kfs.distributed import Ranks
from kfs.errors import DataError, KfsError
from kfs.laplace import posterior
from kfs.operators import trace
from tests.distributed.pool import Pool
from tests.distributed.problems import NUM_DATA, batches, bits, is_first, problem, risk_of_all, risk_of_own

MODELS = ("mlp", "convolution", "experts", "tokens")
CLOSE: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-14}  # sums of 23 examples in another order


def compare_risks(name: str) -> tuple[float, str]:
    risk = risk_of_own(name)
    value, gradient = risk.value(), risk.gradient()
    plural = "" if risk.num_batches == 1 else "es"
    assert risk.about_data == f"{risk.num_batches} batch{plural}, 23 examples"
    if is_first():
        one = risk_of_all(name)
        assert value == pytest.approx(one.value(), rel=1e-13)
        assert (risk.num_data, risk.reduction_factor) == (one.num_data, one.reduction_factor)
        for parameter, g in one.gradient().items():
            torch.testing.assert_close(gradient[parameter], g, **CLOSE)
    return value, bits(gradient.values())


@pytest.mark.parametrize("name", MODELS)
def test_value_and_gradient(ranks: Pool, name: str) -> None:
    """All ranks have the same bits."""
    assert len(set(ranks(4, compare_risks, name))) == 1


OPERATORS: dict[str, Callable[[kfs.EmpiricalRisk], Any]] = {
    "Hessian": kfs.Hessian,
    "blocks of the Hessian": lambda risk: kfs.Hessian(risk, block_diagonal="layer"),
    "GGN": kfs.GGN,
    "GGN, graphs reused": lambda risk: kfs.GGN(risk, reuse=True),
    "GGN with little memory": lambda risk: kfs.GGN(risk, memory=2000),
    "Fisher": kfs.Fisher,
    "Monte Carlo Fisher": lambda risk: kfs.Fisher(risk, "mc", mc_samples=2, seed=3),
    "empirical Fisher": lambda risk: kfs.Fisher(risk, "empirical"),
}


def products(risk: kfs.EmpiricalRisk, name: str) -> list[torch.Tensor]:
    A = OPERATORS[name](risk)
    v = torch.linspace(-1, 1, A.shape[1], dtype=torch.float64)
    found = [A @ v, A @ torch.stack([v, v.flip(0), v**2], 1)]
    if name == "GGN":
        first = next(iter(risk.params))
        found += [A.diagonal(), A.submatrix([first]).to_dense(), trace(A, products=6).value]
    return found


def compare_products(problem_name: str) -> str:
    results = []
    for name in OPERATORS:
        found = products(risk_of_own(problem_name), name)
        if is_first():
            for one, other in zip(found, products(risk_of_all(problem_name), name), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13, msg=name)
        results += found
    return bits(results)


@pytest.mark.parametrize(("name", "size"), [("mlp", 3), ("experts", 2)])
def test_products(ranks: Pool, name: str, size: int) -> None:
    """All ranks have the same bits."""
    assert len(set(ranks(size, compare_products, name))) == 1


def compare_jacobians() -> str:
    J = kfs.Jacobian(risk_of_own("mlp"))
    v = torch.linspace(-1, 1, J.shape[1], dtype=torch.float64)
    u = torch.linspace(-1, 1, J.shape[0], dtype=torch.float64)
    found = [J @ v, J.T @ u]
    if is_first():
        one = kfs.Jacobian(risk_of_all("mlp"))
        assert J.shape == one.shape
        torch.testing.assert_close(found, [one @ v, one.T @ u], **CLOSE)
    return bits(found)


def test_jacobians(ranks: Pool) -> None:
    """Rank 0 has no data."""
    assert len(set(ranks(3, compare_jacobians))) == 1


def compare_posteriors() -> None:
    risk, one = risk_of_own("convolution"), risk_of_all("convolution")
    found = posterior(kfs.KFAC(risk), risk, prior_precision=2.0, noise=0.5)
    expected = posterior(kfs.KFAC(one), one, prior_precision=2.0, noise=0.5)
    torch.testing.assert_close(found.log_marginal_likelihood(), expected.log_marginal_likelihood(), rtol=1e-10, atol=0)


def test_marginal_likelihood(ranks: Pool) -> None:
    ranks(2, compare_posteriors)


def error_of(call: Callable[[], object]) -> str:
    with pytest.raises((KfsError, TypeError)) as caught:
        call()
    return f"{type(caught.value).__name__}: {caught.value}"


def with_a_bad_datum() -> list[str]:
    model, loss, X, y = problem("mlp")
    X[20, 1] = torch.nan
    risk = kfs.EmpiricalRisk(model, loss, kfs.shard(batches(X, y, 4), dist.group.WORLD))
    v = torch.ones(43, dtype=torch.float64)
    calls = [risk.value, risk.gradient, lambda: kfs.Hessian(risk) @ v, kfs.GGN(risk).diagonal]
    errors = [error_of(call) for call in calls]
    # No state is left behind, and the next computation works as usual.
    assert all(p.grad is None for p in model.parameters())
    assert Ranks(dist.group.WORLD).gather("ranks", dist.get_rank()) == [0, 1]
    return errors


def test_errors_name_the_datum_on_all_ranks(ranks: Pool) -> None:
    one, other = ranks(2, with_a_bad_datum)
    assert one == other
    assert len(set(one)) == 1
    assert one[0].startswith("DataError: The prediction for example 20 is not finite.")


def with_other_vectors(bits_differ: bool) -> list[str]:
    risk = risk_of_own("mlp")
    J = kfs.Jacobian(risk)
    v = torch.linspace(-1, 1, 43, dtype=torch.float64)
    u = torch.linspace(-1, 1, J.shape[0], dtype=torch.float64)
    if dist.get_rank() == 1:
        v = v + 1e-15 * (v == v[3]) if bits_differ else v.flip(0)
        u = u.flip(0)
    return [error_of(call) for call in (lambda: kfs.Hessian(risk) @ v, lambda: J @ v, lambda: J.T @ u)]


@pytest.mark.parametrize("bits_differ", [False, True])
def test_vectors_must_be_the_same(ranks: Pool, bits_differ: bool) -> None:
    one, other = ranks(2, with_other_vectors, bits_differ)
    assert one == other
    for text in one:
        assert text.startswith("DistributedError: The vectors to multiply with differ between processes: ")


def declared(num_data: int) -> Any:
    model, loss, X, y = problem("mlp")
    own = slice(0, 15) if dist.get_rank() == 0 else slice(15, NUM_DATA)
    loader = Counting(batches(X[own], y[own], 4))
    risk = kfs.EmpiricalRisk(model, loss, loader, num_data=len(y[own]) + num_data, group=dist.group.WORLD)
    assert risk.about_data == f"{len(loader.batches)} batches, not counted yet"
    if num_data == 0:
        factor = risk.reduction_factor
        return factor, risk.num_data, loader.given
    with pytest.raises(DataError) as caught:
        risk.value()
    return str(caught.value)


class Counting:
    """Counts the batches that were requested."""

    def __init__(self, raw: list[Any]) -> None:
        self.batches = raw
        self.given = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            self.given += 1
            yield batch


def test_announced_numbers_of_data(ranks: Pool) -> None:
    """The number of examples is known without a pass over all data."""
    for factor, num_data, given in ranks(2, declared, 0):
        assert (factor, num_data, given) == (1 / NUM_DATA, NUM_DATA, 1)
    one, other = ranks(2, declared, 1)
    assert one == other == "num_data is 16, but the data have 15 targets. " + one.partition("targets. ")[2]


class Normalized(torch.nn.Module):
    """Has units that can be permuted, a buffer, and a mode."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = torch.nn.Linear(4, 5)
        self.norm = torch.nn.BatchNorm1d(5)
        self.last = torch.nn.Linear(5, 3)
        self.register_buffer("offset", torch.zeros(3))
        self.double().eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(torch.tanh(self.norm(self.first(x)))) + self.offset
        return y


def permute_units(model: Any) -> None:
    """Permute units: the model computes the same function, and sums over bits are equal."""
    for t in (model.first.weight, model.first.bias, *model.norm.parameters(), *model.norm.buffers()):
        t.data.copy_(t.data.flip(0) if t.ndim else t.data)
    model.last.weight.data.copy_(model.last.weight.data.flip(1))


def negate_units(model: Any) -> None:
    """Flip the signs of an even number of weights."""
    model.last.weight.data[:, :2] *= -1


def _typo(is_there: bool) -> dict[str, Any]:
    return {"sede": 1} if is_there else {}


FAULTS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "other parameters": (lambda model: model.last.bias.data.add_(1e-15), "Parameters differ .*'last.bias' of rank 1 "),
    "permuted units": (permute_units, "Parameters differ .*'first.weight', 'first.bias', 'last.weight' of rank 1 "),
    "negated units": (negate_units, "Parameters differ .*'last.weight' of rank 1 differs from rank 0"),
    "running statistics": (
        lambda model: model.norm.running_mean.add_(1),
        r"Buffers differ .*'norm.running_mean' of rank 1 .* for b in model.buffers\(\): torch.distributed.broadcast",
    ),
    "a mode": (lambda model: model.first.train(), "Modes of modules differ .* first='eval', .* first='train'"),
    "another loss": (lambda _: torch.nn.CrossEntropyLoss(ignore_index=2), "Losses differ .* ignore_index=2"),
}
SETTINGS: dict[str, Callable[[kfs.EmpiricalRisk, bool], Any]] = {
    "a typo in fisher": lambda risk, other: kfs.KFAC(risk, fisher="typo" if other else "mc"),  # type: ignore[arg-type]
    "an unknown argument": lambda risk, other: kfs.EKFAC(risk, **_typo(other)),
    "seed": lambda risk, other: kfs.KFAC(risk, "mc", seed=int(other)),
    "a typo in kind": lambda risk, other: kfs.Fisher(risk, "typo" if other else "mc"),  # type: ignore[arg-type]
    "seed of draws": lambda risk, other: kfs.Fisher(risk, "mc", seed=int(other)).diagonal(),
    "blocks": lambda risk, other: kfs.GGN(risk, block_diagonal=other) @ risk.gradient(),
    "a short vector": lambda risk, other: kfs.GGN(risk) @ torch.ones(53 - other, dtype=torch.float64),
    "memory": lambda risk, other: kfs.Hessian(risk, memory=-1 if other else None),
    "a structure": lambda risk, other: kfs.compare(risk, ["KFACK" if other else "KFAC"]),
    "a prior": lambda risk, other: kfs.laplace.log_marginal_likelihood(kfs.KFAC(risk), risk, -1.0 if other else 1.0),
    "quantity": lambda risk, other: list(kfs.per_datum(risk, "margin" if other else "loss")),
}
COMPUTATIONS: dict[str, Callable[[kfs.EmpiricalRisk], Any]] = {
    "value": lambda risk: risk.value(),
    "gradient": lambda risk: risk.gradient(),
    "GGN": lambda risk: kfs.GGN(risk) @ torch.ones(53, dtype=torch.float64),
    "Hessian": lambda risk: kfs.Hessian(risk) @ torch.ones(53, dtype=torch.float64),
    "Fisher": lambda risk: kfs.Fisher(risk).diagonal(),
    "Jacobian": kfs.Jacobian,
    "KFAC": kfs.KFAC,
    "EKFAC": kfs.EKFAC,
    "per_datum": kfs.per_datum,
}


def with_faults() -> dict[str, str]:
    """Return the errors of all computations for each mistake on the last rank."""
    second = dist.get_rank() == 1
    torch.manual_seed(0)
    X, y = torch.randn(12, 4, dtype=torch.float64), torch.randint(2, (12,))

    def risk_with(fault: Callable[[Any], Any]) -> kfs.EmpiricalRisk:
        model = Normalized()
        loss = fault(model) if second else None
        loss = loss if isinstance(loss, torch.nn.Module) and loss is not model.first else torch.nn.CrossEntropyLoss()
        return kfs.EmpiricalRisk(model, loss, kfs.shard((X, y), dist.group.WORLD))

    def compute_with(compute: Callable[[kfs.EmpiricalRisk], Any], change: Callable[[Any], Any]) -> Any:
        return compute(risk_with(change))

    found = {}
    for fault, (change, _) in FAULTS.items():
        for name, compute in COMPUTATIONS.items():
            found[f"{fault}: {name}"] = error_of(partial(compute_with, compute, change))
    for name, call in SETTINGS.items():
        risk = risk_with(lambda _: None)
        found[name] = error_of(partial(call, risk, second))
    # The risk itself refuses dropout in training mode, on one rank alone.
    dropout = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Dropout()).double().train(second)
    found["dropout"] = error_of(
        lambda: kfs.EmpiricalRisk(dropout, torch.nn.CrossEntropyLoss(), kfs.shard((X, y), dist.group.WORLD))
    )
    return found


def test_what_differs_is_named_by_all_ranks(ranks: Pool) -> None:
    """Every computation compares parameters, buffers, modes, losses and settings; all ranks raise the same error."""
    one, other = ranks(2, with_faults)
    assert one == other
    for fault, (_, text) in FAULTS.items():
        for name in COMPUTATIONS:
            assert re.search(text, one[f"{fault}: {name}"]), (fault, name, one[f"{fault}: {name}"])
    for name, text in {
        "a typo in fisher": "ModelError: .*typo",
        "an unknown argument": "sede",
        "seed": "Settings differ .* rank 0 has seed=0, and rank 1 has seed=1",
        "a typo in kind": "LossError: kind is 'typo'",
        "seed of draws": "Settings differ .* seed=0, and rank 1 has seed=1",
        "blocks": "Settings differ .* block_diagonal=False, and rank 1 has block_diagonal=True",
        "a short vector": r"ShapeError: The vector has shape \[52\]",
        "memory": "ModelError: memory is -1",
        "a structure": "KFACK",
        "a prior": "ModelError: .*-1.0",
        "quantity": "Settings differ .* of='loss', and rank 1 has of='margin'",
        "dropout": r"ModelError: Module '1' \(Dropout\) is in training mode",
    }.items():
        assert re.search(text, one[name]), (name, one[name])


def with_wrong_arguments() -> dict[str, str]:
    """Return the errors of calls with a wrong argument on the last rank."""
    risk = risk_of_own("mlp")
    G, H, J, K = kfs.GGN(risk), kfs.Hessian(risk), kfs.Jacobian(risk), kfs.KFAC(risk)
    size = G.shape[0]
    shifted = G.shift(0.1)
    bad = dist.get_rank() == 1
    v = torch.ones(3 if bad else size, dtype=torch.float64)
    products: dict[str, Any] = {
        "scaled": 2 * G,
        "sum": kfs.operators.Identity(G.domain) + H,
        "product": G @ H,
        "part": G.submatrix(list(G.domain.shapes)),
        "entries": G.submatrix(slice(size)),
        "inverse": kfs.operators.Inverse(shifted),
        "nested": -(2 * (G + H)) / 3,
    }
    calls: dict[str, Callable[[], object]] = {name: partial(A.__matmul__, v) for name, A in products.items()}
    calls["transposed"] = lambda: J.T @ torch.ones(3 if bad else J.shape[0], dtype=torch.float64)
    calls["solve"] = lambda: kfs.operators.solve(shifted, v)
    calls["lsmr"] = lambda: kfs.operators.lsmr(shifted, v)
    calls["neumann"] = lambda: kfs.operators.neumann(shifted, v, scale=0.1, terms=2)
    calls["eigenvalues"] = lambda: kfs.operators.eigenvalues(G, -1 if bad else 2)
    calls["trace"] = lambda: trace(G, products=1 if bad else 6)
    calls["diagonal"] = lambda: kfs.operators.diagonal(G, products=1 if bad else 6)
    calls["probes"] = lambda: trace(G, products=6, probes="typo" if bad else "normal")  # type: ignore[arg-type]
    calls["density"] = lambda: kfs.operators.spectral_density(G, num_vectors=1, probes="typo" if bad else "normal")  # type: ignore[arg-type]
    calls["plot"] = lambda: G.plot(most=2 if bad else 1000)
    calls["names"] = lambda: G.plot(["typo" if bad else "0.weight"])
    settings: dict[str, Any] = {
        "prune": ({"keep": 0.5}, {"keep": 0.6}),
        "prune, update": ({"update": True}, {"update": False}),
    }
    settings["prune, damping"] = ({}, {"damping": 0.1})
    model = problem("mlp")[0]
    for name, both in settings.items():
        calls[name] = partial(kfs.compress.prune, model, K, **both[bad])
    calls["prune, keep"] = partial(kfs.compress.prune, model, K, 7.0)
    return {name: error_of(call) for name, call in calls.items()}


def test_wrong_arguments_of_one_rank_are_errors_of_all(ranks: Pool) -> None:
    """No rank waits for another one that has refused its arguments; settings that differ are named."""
    first, second = ranks(2, with_wrong_arguments)
    assert first == second
    assert all("Error: " in text for text in first.values()), first
    for name, values in {"": ("keep=0.5", "keep=0.6"), ", update": ("update=True", "update=False")}.items():
        expected = "DistributedError: Settings differ between processes: rank 0 has {}, and rank 1 has {}"
        assert first[f"prune{name}"].startswith(expected.format(*values))
    assert "damping=None, and rank 1 has damping=0.1" in first["prune, damping"]


def local_errors() -> str:
    """Return the error of a computation without exchanges, which is not run on rank 1."""
    risk = risk_of_own("convolution")
    K = kfs.KFAC(risk)
    return "" if dist.get_rank() else error_of(lambda: kfs.laplace.tune_prior(K, risk))  # noise is missing


def test_tune_prior_waits_for_nobody(ranks: Pool) -> None:
    assert "its posterior depends on the noise" in ranks(2, local_errors)[0]
