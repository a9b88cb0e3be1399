"""Training mixtures of experts with stacked weights: steps equal those with experts as separate layers."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfs.optim import KFAC
from tests.factors.test_mixtures import EXPERTS, Mixture, Skips, sent_to
from tests.operators.contract import close
from tests.optim.training import train

pytestmark = pytest.mark.usefixtures("grouped_in_double")


def batches() -> list[tuple[Tensor, Tensor]]:
    """Return batches of one token per example; in the second one, an expert gets no token."""
    choices: list[tuple[list[int], int]] = [([0, 1, 2], 12), ([0, 2], 9), ([1, 2], 8), ([0, 1, 2], 12)]
    inputs = [sent_to(experts, num_data) for experts, num_data in choices]
    return [(X, X.flip(1).tanh()) for X in inputs]


def trained(model: nn.Module, **options: Any) -> tuple[list[float], dict[str, Tensor], KFAC]:
    """Train, and return losses, parameters, and the optimizer."""
    loss = nn.MSELoss()
    optimizer = KFAC(model, loss, lr=0.5, damping=0.1, factors_every=1, inverses_every=1, **options)
    losses = train(model, optimizer, 5 * batches(), loss)
    assert not optimizer.uncovered
    return losses, {name: p.detach() for name, p in model.named_parameters()}, optimizer


@pytest.mark.parametrize("fisher", ["type-2", "empirical", "forward-only"])
@pytest.mark.parametrize("style", ["loop", "skips"])
def test_steps_are_those_of_layers(style: str, fisher: str) -> None:
    """This is also true if an expert has no tokens in some steps, or is skipped."""
    model = Skips("loop") if style == "skips" else Mixture(style)
    losses, params, _ = trained(model, fisher=fisher)
    expected_losses, layers, _ = trained(Mixture("layers"), fisher=fisher)
    assert sum(losses[-4:]) < 0.7 * sum(losses[:4])
    close(torch.tensor(losses), torch.tensor(expected_losses))
    for name in ("up", "down"):
        close(params[name], torch.stack([layers[f"{name}.{e}.weight"] for e in range(EXPERTS)]))


@pytest.mark.parametrize("style", ["capacity", "grouped"])
def test_training_all_experts_at_once(style: str) -> None:
    """In steps without factors, groups are multiplied in float32 at most; here, all steps compute factors."""
    losses, params, optimizer = trained(Mixture(style), fisher="type-2")
    assert sum(losses[-4:]) < 0.7 * sum(losses[:4])
    if style == "grouped":
        expected_losses, expected, _ = trained(Mixture("loop"), fisher="type-2")
        close(torch.tensor(losses), torch.tensor(expected_losses))
        for name, p in params.items():
            close(p, expected[name])
    state = optimizer.state_dict()["kfac"]["curvature"]["averages"]
    assert [tuple(average["layout"]["rows"]) for average in state[:EXPERTS]] == [(e, e + 1) for e in range(EXPERTS)]


def test_an_expert_without_tokens_keeps_its_average() -> None:
    """A step without tokens for an expert does not change its average."""
    model = Mixture("grouped")
    loss = nn.MSELoss()
    optimizer = KFAC(model, loss, factors_every=1)
    first, second = batches()[:2]

    def averages() -> dict[Any, Tensor]:
        found = optimizer.preconditioner.curvature.averages
        return {key: average.factors.to_dense().clone() for key, average in found.items()}

    train(model, optimizer, [first], loss)
    before = averages()
    train(model, optimizer, [second], loss)
    for key, value in averages().items():
        assert torch.equal(value, before[key]) == (key[1] == (1, 2))
