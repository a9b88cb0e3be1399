"""Parameters that some steps do not use, and parameters that affect the loss but not the predictions."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfs.errors import KfsWarning
from kfs.optim import KFAC
from tests.optim.training import weights


class TwoHeads(nn.Module):
    """Returns the prediction of one of two heads, or of both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 3), nn.Linear(6, 3)
        self.double()

    def forward(self, x: Tensor, heads: tuple[str, ...]) -> Any:
        h = self.body(x).tanh()
        outputs = tuple(self.get_submodule(name)(h) for name in heads)
        return outputs if len(outputs) > 1 else outputs[0]


def data(step: int) -> tuple[Tensor, Tensor]:
    """Return the batch of a step."""
    x = torch.randn(8, 5, generator=torch.Generator().manual_seed(step)).double()
    return x, x[:, :3].argmax(1)


def alternate(model: TwoHeads, optimizer: KFAC, steps: range, set_to_none: bool = True) -> None:
    """Train the first head in even steps, and the second one in odd ones."""
    loss = nn.CrossEntropyLoss()
    for step in steps:
        x, y = data(step)
        optimizer.zero_grad(set_to_none)
        loss(model(x, ("second",) if step % 2 else ("first",)), y).backward()
        optimizer.step()


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("every", [1, 2, 4])
@pytest.mark.filterwarnings("error")
def test_heads_that_take_turns_are_both_trained(every: int, set_to_none: bool) -> None:
    """This is also true if the scheduled steps with new factors use only one head."""
    model = TwoHeads()
    optimizer = KFAC(model, nn.CrossEntropyLoss(), factors_every=every)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    alternate(model, optimizer, range(8), set_to_none)
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert optimizer.uncovered == {}
    assert {row.block for row in optimizer.report().blocks} == {"body", "first", "second"}


def test_factors_are_due_until_every_head_has_some() -> None:
    """Then the schedule continues. A training that is resumed in between equals an uninterrupted one."""
    counts = []
    model, resumed = TwoHeads(), TwoHeads()
    optimizer = KFAC(model, nn.CrossEntropyLoss(), factors_every=4)
    for step in range(9):
        before = optimizer.state_dict()["kfac"]["first_datum"]
        alternate(model, optimizer, range(step, step + 1))
        counts.append(optimizer.state_dict()["kfac"]["first_datum"] - before)
        if step == 1:  # The second head waits for factors.
            resumed.load_state_dict(model.state_dict())
            again = KFAC(resumed, nn.CrossEntropyLoss(), factors_every=4)
            again.load_state_dict(optimizer.state_dict())
    alternate(resumed, again, range(2, 9))
    # Scheduled steps are 0, 4 and 8. The second head has its first gradient in step 1, and is used again in step 3.
    assert counts == [8, 0, 8, 8, 8, 0, 0, 0, 8]
    assert torch.equal(weights(model), weights(resumed))


def train_both(model: TwoHeads, optimizer: KFAC, steps: int = 3) -> None:
    """Train both heads at the same time. The first one's output is the prediction."""
    for step in range(steps):
        x, y = data(step)
        optimizer.zero_grad()
        f, g = model(x, ("first", "second"))
        (nn.functional.cross_entropy(f, y) + nn.functional.cross_entropy(g, y)).backward()
        optimizer.step()


@pytest.mark.parametrize("trust", [0.03, None])
@pytest.mark.parametrize("fisher", ["mc", "type-2", "empirical"])
def test_a_head_beside_the_predictions_has_no_curvature(fisher: Any, trust: float | None) -> None:
    """Without curvature, the length of its natural gradient is arbitrary, so AdamW trains it."""
    model = TwoHeads()
    optimizer = KFAC(model, nn.CrossEntropyLoss(), fisher=fisher, trust=trust, lr=0.1)
    with pytest.warns(
        KfsWarning, match=r"trained by AdamW \('second\.weight': the loss depends on it, but predictions"
    ):
        train_both(model, optimizer)
    assert set(optimizer.uncovered) == {"second.weight", "second.bias"}
    assert all(p.isfinite().all() for p in model.parameters())
    assert model.second.weight.norm() < 10


@pytest.mark.filterwarnings("error")
def test_curvature_from_inputs_covers_all_heads() -> None:
    """Forward-only curvature does not need gradients."""
    model = TwoHeads()
    optimizer = KFAC(model, nn.CrossEntropyLoss(), fisher="forward-only")
    train_both(model, optimizer)
    assert optimizer.uncovered == {}


@pytest.mark.filterwarnings("error")
def test_layers_without_gradients_at_first_are_covered() -> None:
    """Below a layer of zeros, gradients and curvature vanish, but only in the first step."""
    model = TwoHeads()
    nn.init.zeros_(model.first.weight)
    optimizer = KFAC(model, nn.CrossEntropyLoss())
    before = model.body.weight.detach().clone()
    for step in range(4):
        x, y = data(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x, ("first",)), y).backward()
        optimizer.step()
    assert optimizer.uncovered == {}
    assert not torch.equal(model.body.weight, before)


def test_a_loss_without_curvature_at_first() -> None:
    """Far from its targets, Huber's loss is linear. Parameters stay covered, and get curvature once there is some."""
    torch.manual_seed(0)
    X = torch.randn(64, 4)
    y = 5 + torch.sin(2 * X[:, :1])
    model, loss = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)), nn.HuberLoss()
    optimizer = KFAC(model, loss, fisher="ggn")
    for _ in range(100):
        optimizer.zero_grad()
        value = loss(model(X), y)
        value.backward()
        optimizer.step()
        assert not optimizer.uncovered
    assert value < 0.1  # 4.5 at first
