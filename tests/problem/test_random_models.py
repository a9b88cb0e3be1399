"""Models that draw random numbers: allowed if predictions do not depend on them, and refused otherwise.

The oracle is the same model without draws.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfs import EKFAC, GGN, KFAC, EmpiricalRisk, Hessian, Jacobian, inspect
from kfs.errors import ModelError
from kfs.problem.isolation import equal_up_to_round_off, seeded
from tests.operators.contract import close

LOSS = nn.CrossEntropyLoss()


class Draws(nn.Module):
    """Draws random numbers in a given way, and counts its calls."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 4).double(), nn.Linear(4, 2).double()
        self.draw = draw
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        result: Tensor = self.second(self.draw(self.first(x)).tanh())
        return result


def nothing(x: Tensor) -> Tensor:
    return x


def unused(x: Tensor) -> Tensor:
    """Draw numbers without using them, as layers with stochastic depth do in evaluation mode."""
    torch.rand([])
    torch.randn_like(x)
    torch.randperm(3)
    return x


def skips(x: Tensor) -> Tensor:
    """Use a number only for control flow, and rarely, as a skipped layer does."""
    return 2 * x if torch.rand([]) < 0.01 else x


def skips_others(x: Tensor) -> Tensor:
    return x if torch.rand_like(x)[0, 0].item() < 0.99 else 2 * x


def waits(x: Tensor) -> Tensor:
    """Draw a number until it is not extreme, which reads it."""
    while not 0.2 < torch.rand(1) < 0.9:
        pass
    return x


def noise(x: Tensor) -> Tensor:
    return x + 1e-6 * torch.randn_like(x)


def data(num_data: int = 7) -> tuple[Tensor, Tensor]:
    return torch.randn(num_data, 3, dtype=torch.float64), torch.randint(2, (num_data,))


def vector(risk: EmpiricalRisk) -> Tensor:
    return torch.ones(sum(p.numel() for p in risk.params.values()), dtype=torch.float64)


# Plain evaluation, autograd, forward mode with and without vmap, double backward, kept graphs, captured passes.
COMPUTATIONS: dict[str, Callable[[EmpiricalRisk], Any]] = {
    "value": lambda risk: torch.tensor(risk.value(), dtype=torch.float64),
    "gradient": lambda risk: torch.cat([g.flatten() for g in risk.gradient().values()]),
    "Hessian": lambda risk: Hessian(risk).to_dense(),
    "GGN": lambda risk: GGN(risk).to_dense(),
    "GGN, one column at once": lambda risk: GGN(risk, chunk_size=1).to_dense(),
    "GGN, some memory": lambda risk: GGN(risk, memory=10_000).to_dense(),
    "GGN, kept graphs": lambda risk: GGN(risk, reuse=True) @ vector(risk),
    "GGN, diagonal": lambda risk: GGN(risk).diagonal(),
    "Jacobian": lambda risk: Jacobian(risk).to_dense(),
    "KFAC": lambda risk: KFAC(risk).to_dense(),
    "EKFAC": lambda risk: EKFAC(risk).to_dense(),
}


@pytest.mark.parametrize("compute", COMPUTATIONS.values(), ids=COMPUTATIONS)
def test_draws_that_are_not_used_change_nothing(compute: Callable[[EmpiricalRisk], Tensor]) -> None:
    X, y = data()
    batches = [(X[:4], y[:4]), (X[4:], y[4:])]
    found, expected = (compute(EmpiricalRisk(Draws(draw), LOSS, batches)) for draw in (unused, nothing))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("draw", [skips, skips_others, noise])
@pytest.mark.parametrize("compute", COMPUTATIONS.values(), ids=COMPUTATIONS)
def test_draws_that_are_used_are_refused(
    compute: Callable[[EmpiricalRisk], Tensor], draw: Callable[[Tensor], Tensor]
) -> None:
    risk = EmpiricalRisk(Draws(draw), LOSS, data())
    state = torch.get_rng_state()
    with pytest.raises(ModelError, match=r"drew random numbers.*model\.eval"):
        compute(risk)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_random_state_is_left_alone() -> None:
    risk = EmpiricalRisk(Draws(unused), LOSS, data())
    state = torch.get_rng_state()
    for compute in COMPUTATIONS.values():
        compute(risk)
    assert torch.equal(torch.get_rng_state(), state)


def test_functions_frozen_models_and_inspection() -> None:
    X, y = data()
    model = Draws(unused)
    params = {name: p.detach() for name, p in model.named_parameters()}

    def function(params: dict[str, Tensor], x: Tensor) -> Tensor:
        result: Tensor = torch.func.functional_call(model, params, (x,))
        return result

    expected = GGN(EmpiricalRisk(Draws(nothing), LOSS, (X, y))).to_dense()
    close(GGN(EmpiricalRisk(function, LOSS, (X, y), params=params)).to_dense(), expected)
    frozen = EmpiricalRisk(Draws(unused).requires_grad_(False), LOSS, (X, y), params=list(params))
    close(GGN(frozen).to_dense(), expected)
    assert inspect(model, X).rows == inspect(Draws(nothing), X).rows
    with pytest.raises(ModelError, match="drew random numbers"):
        inspect(Draws(skips), X)


def test_loops_that_wait_for_a_number_end() -> None:
    X, y = data()
    assert EmpiricalRisk(Draws(waits), LOSS, (X, y)).value() == EmpiricalRisk(Draws(nothing), LOSS, (X, y)).value()


def test_only_the_first_batch_of_a_computation_pays() -> None:
    X, y = data(20)
    batches = list(zip(X.split(4), y.split(4), strict=True))
    models = [Draws(nothing), Draws(unused)]
    risks = [EmpiricalRisk(model, LOSS, batches) for model in models]
    # An audit uses batches of other sizes, for which other random numbers are drawn.
    computations: list[Callable[[EmpiricalRisk], Any]] = [
        EmpiricalRisk.value,
        EmpiricalRisk.gradient,
        lambda risk: KFAC(risk, audit=False),
    ]
    for compute in computations:
        calls = []
        for model, risk in zip(models, risks, strict=True):
            model.calls = 0
            compute(risk)
            calls.append(model.calls)
        assert calls == [len(batches), len(batches) + 2]


def test_models_that_start_to_use_their_draws_are_noticed() -> None:
    """Between computations, since each of them checks again; and within one, if other numbers are drawn."""
    model = Draws(unused)
    risk = EmpiricalRisk(model, LOSS, data())
    for compute in COMPUTATIONS.values():
        model.draw = unused
        compute(risk)
        model.draw = lambda x: unused(x) * (1 + 0.1 * torch.rand([]))
        with pytest.raises(ModelError, match="drew random numbers"):
            compute(risk)

    def depends(x: Tensor) -> Tensor:
        torch.rand([])
        return x + torch.randn_like(x) if len(x) == 3 else x

    X, y = data()
    later = EmpiricalRisk(Draws(depends), LOSS, [(X[:4], y[:4]), (X[4:], y[4:])])
    for compute in COMPUTATIONS.values():
        with pytest.raises(ModelError, match="drew random numbers"):
            compute(later)


def test_equality_up_to_round_off() -> None:
    a = torch.tensor([1.0, -3.0, torch.nan, -torch.inf], dtype=torch.float64)
    assert equal_up_to_round_off(a, a.clone())
    assert equal_up_to_round_off(a, a * (1 + 1e-15))
    assert not equal_up_to_round_off(a, a * (1 + 1e-12))
    assert not equal_up_to_round_off(a, a[:2])
    assert not equal_up_to_round_off(torch.tensor([1, 2]), torch.tensor([1, 3]))
    assert not equal_up_to_round_off(a, torch.tensor([1.0, -3.0, 0.0, -torch.inf], dtype=torch.float64))


def test_seeds_are_for_a_context_alone() -> None:
    state = torch.get_rng_state()
    numbers = []
    for seed in (3, 3, 4):
        with seeded(seed, torch.device("cpu")):
            numbers.append(torch.rand(2))
    assert torch.equal(numbers[0], numbers[1])
    assert not torch.equal(numbers[0], numbers[2])
    assert torch.equal(torch.get_rng_state(), state)
