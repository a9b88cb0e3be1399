"""The optimizer: steps that do not depend on batch size and reduction, options, groups, and unchanged state."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from kfs import EKFAC, EmpiricalRisk, Relative
from kfs.errors import KfsWarning, LossError
from kfs.losses import HalfSquaredError
from kfs.optim import KFAC
from tests.optim.training import data, mlp, one_step, train, weights

EXACT: dict[str, Any] = {"fisher": "type-2", "lr": 0.5, "factors_every": 1, "noise": None}


@pytest.mark.parametrize(
    "options", [{}, {"damping_unit": "absolute"}, {"eigen": True, "trust": None}, {"trust": None}, {"kl_clip": 1e-3}]
)
def test_batch_size_and_reduction_do_not_matter(options: dict[str, Any]) -> None:
    """Twice the data, or a sum instead of a mean, give the same step; a mean declared as a sum is refused."""
    X, y = data()
    options = EXACT | options
    expected = one_step(mlp(), nn.CrossEntropyLoss(), X, y, **options)
    twice = one_step(mlp(), nn.CrossEntropyLoss(), X.repeat(2, 1), y.repeat(2), **options)
    total = one_step(mlp(), nn.CrossEntropyLoss(reduction="sum"), X, y, **options)
    torch.testing.assert_close(twice, expected)
    torch.testing.assert_close(total, expected)
    model = mlp()
    wrong = KFAC(model, nn.CrossEntropyLoss(reduction="sum"), **options)
    with pytest.raises(LossError, match="is a mean"):
        train(model, wrong, [(X, y)], nn.CrossEntropyLoss())


@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.MSELoss(reduction="sum"), HalfSquaredError(reduction="sum")])
def test_all_square_losses_make_the_same_step(loss: Any) -> None:
    """They differ by known factors."""
    X, y = data()[0], torch.randn(12, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    model = mlp()
    optimizer = KFAC(model, HalfSquaredError(), **EXACT)
    train(model, optimizer, [(X, y)], HalfSquaredError())
    other = mlp()
    train(other, KFAC(other, loss, **EXACT), [(X, y)], loss)
    torch.testing.assert_close(weights(other), weights(model))


@pytest.mark.parametrize("factors", [1, 3])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("eigen", [False, True])
def test_accumulated_gradients(factors: int, reduction: str, eigen: bool) -> None:
    """Parts of a batch in sequence equal the batch, also if factors are computed only in some steps."""
    X, y = data()
    loss = nn.CrossEntropyLoss(reduction=reduction)
    whole, parts = mlp(), mlp()
    options = EXACT | {"factors_every": factors, "eigen": eigen}
    train(whole, KFAC(whole, loss, **options), [(X, y)] * 4, loss)
    optimizer = KFAC(parts, loss, **options)
    for _ in range(4):
        optimizer.zero_grad()
        for place in (slice(0, 4), slice(4, 8), slice(8, 12)):
            value = loss(parts(X[place]), y[place])
            (value / 3 if reduction == "mean" else value).backward()
        optimizer.step()
    torch.testing.assert_close(weights(parts), weights(whole))


@pytest.mark.parametrize("fisher", ["mc", "empirical", "type-2", "forward-only"])
@pytest.mark.parametrize("eigen", [False, True])
def test_every_curvature_trains(fisher: Any, eigen: bool) -> None:
    """The loss falls considerably within a few steps, in float32 and with default settings."""
    if fisher == "forward-only" and eigen:
        pytest.skip("there are no gradients to correct eigenvalues with")
    X, y = data(64, torch.float32)
    model, loss = mlp(torch.float32), nn.CrossEntropyLoss()
    values = train(model, KFAC(model, loss, fisher=fisher, eigen=eigen), [(X, y)] * 80, loss)
    assert values[-1] < 0.5 * values[0]


def test_averages_have_no_bias() -> None:
    """If all batches are equal, factors stay those of the first step, for any decay."""
    X, y = data()
    loss, decays = nn.CrossEntropyLoss(), (0.5, 0.99)
    for decay in decays:
        model = mlp()
        optimizer = KFAC(model, loss, lr=0.0, fisher="type-2", decay=decay, factors_every=1)
        seen = []
        for _ in range(3):
            train(model, optimizer, [(X, y)], loss)
            average = optimizer.preconditioner.curvature.averages["0.weight", (0, 6)]
            seen.append(average.factors.B.to_dense() / average.weight)
        torch.testing.assert_close(seen[0], seen[2])


def test_eigenvalues_are_those_of_ekfac() -> None:
    """If parameters stay fixed, running eigenvalues are EKFAC's; they start from those of the factors, which differ."""
    X, y = data(30)
    model, loss = mlp(), nn.CrossEntropyLoss()
    optimizer = KFAC(model, loss, lr=0.0, fisher="type-2", eigen=True, decay=0.0, factors_every=1)
    E = EKFAC(EmpiricalRisk(model, loss, (X, y)))
    for steps, same in ((1, False), (2, True)):
        train(model, optimizer, [(X, y)], loss)
        for block in E.blocks.values():
            average = optimizer.preconditioner.curvature.averages[block.layout.key]
            assert average.eigen is not None
            exact = torch.linalg.eigvalsh(E.submatrix(block.layout.params).to_dense())
            mine = average.eigen.values.flatten().sort().values
            assert torch.allclose(mine, exact, atol=1e-12) == same, steps


def test_trust_region_and_kl_clip_shorten_steps() -> None:
    """Both shorten a step to a known length, and have no effect if they are None."""
    X, y = data()
    model, loss = mlp(), nn.CrossEntropyLoss()
    options = EXACT | {"trust": None, "momentum": 0.0}
    start = weights(model)
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss(model(X), y), list(model.parameters()))])
    free = one_step(model, loss, X, y, **options) - start
    clipped = one_step(mlp(), loss, X, y, **options | {"kl_clip": 1e-6}) - start
    # The step is -lr times the natural gradient D, so the squared length of lr D in the curvature is -lr g @ step.
    torch.testing.assert_close(
        -EXACT["lr"] * gradient @ clipped * (clipped.norm() / free.norm()), gradient.new_tensor(1e-6)
    )
    torch.testing.assert_close(clipped / clipped.norm(), free / free.norm())
    trusted, x = mlp(), X
    one_step(trusted, loss, X, y, **options | {"trust": 1e-2})
    for layer, before in zip(trusted, mlp(), strict=True):
        if isinstance(layer, nn.Linear):
            assert isinstance(before, nn.Linear)
            step = torch.cat([layer.weight - before.weight, (layer.bias - before.bias).unsqueeze(1)], 1)
            rows, columns = step.shape
            size = torch.cat([x, torch.ones_like(x[:, :1])], 1).square().mean().sqrt()
            bound = EXACT["lr"] * 1e-2 * max(1.0, rows / columns) ** 0.5 / size
            # Their natural steps are much longer than the radius, so the shortened steps end near the boundary.
            assert 0.99 * bound <= torch.linalg.matrix_norm(step.detach(), 2) <= bound
        x = before(x)


def test_parameter_groups() -> None:
    """Learning rate, weight decay and method are those of a parameter's group."""
    X, y = data()
    model, loss = mlp(), nn.CrossEntropyLoss()
    before = [p.detach().clone() for p in model.parameters()]
    groups = [
        {"params": [model[0].weight, model[0].bias], "lr": 0.0},
        {"params": [model[2].weight], "weight_decay": 0.5},
        {"params": [model[2].bias]},
        {"params": list(model[4].parameters()), "method": "adamw", "lr": 1.0},
    ]
    optimizer = KFAC(model, loss, groups, **EXACT)
    train(model, optimizer, [(X, y)], loss)
    plain = mlp()
    train(plain, KFAC(plain, loss, **EXACT), [(X, y)], loss)
    after = [p.detach() for p in model.parameters()]
    assert torch.equal(after[0], before[0])
    assert torch.equal(after[1], before[1])
    torch.testing.assert_close(after[2], plain[2].weight.detach() - 0.5 * 0.5 * before[2])
    torch.testing.assert_close(after[3], plain[2].bias.detach())
    torch.testing.assert_close((after[4] - before[4]).abs(), torch.full_like(after[4], 0.001))  # Adam's first step
    assert not optimizer.uncovered


class Odd(nn.Module):
    """A network with a parameter that is used by an operation without rule."""

    def __init__(self) -> None:
        """Make the parameters."""
        super().__init__()
        self.linear, self.odd = nn.Linear(4, 3), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        """Use the parameters."""
        return torch.atan2(self.linear(x), self.odd)


def test_uncovered_parameters_are_announced_once() -> None:
    """They are trained by AdamW, and a single warning says why."""
    X, y = data(dtype=torch.float32)
    model, loss = Odd(), nn.CrossEntropyLoss()
    before = model.odd.detach().clone()
    optimizer = KFAC(model, loss)
    with pytest.warns(KfsWarning, match="'odd'.*atan2") as caught:
        train(model, optimizer, [(X, y)] * 3, loss)
    assert len(caught) == 1
    assert set(optimizer.uncovered) == {"odd"}
    assert (model.odd.detach() - before).abs().min() > 1e-4


def test_thawed_layers_get_curvature() -> None:
    """A frozen layer is not changed, and has factors from the first step in which it is trained."""
    X, y = data()
    model, loss = mlp(), nn.CrossEntropyLoss()
    model[0].requires_grad_(False)
    optimizer = KFAC(model, loss, **EXACT | {"factors_every": 100})
    frozen = model[0].weight.clone()
    train(model, optimizer, [(X, y)] * 3, loss)
    assert torch.equal(model[0].weight, frozen)
    assert ("0.weight", (0, 6)) not in optimizer.preconditioner.curvature.averages
    model[0].requires_grad_(True)
    train(model, optimizer, [(X, y)], loss)
    assert not torch.equal(model[0].weight, frozen)
    assert ("0.weight", (0, 6)) in optimizer.preconditioner.curvature.averages
    model[0].bias.requires_grad_(False)  # the block is another one now
    train(model, optimizer, [(X, y)], loss)
    assert optimizer.preconditioner.curvature.averages["0.weight", (0, 6)].layout.bias is None


def test_batch_of_one_and_ignored_targets() -> None:
    """A single example is enough; a batch in which all targets are ignored has no effect."""
    X, y = data(1)
    model, loss = mlp(), nn.CrossEntropyLoss()
    values = train(model, KFAC(model, loss), [(X, y)] * 10, loss)
    assert values[-1] < values[0]
    for reduction in ("mean", "sum"):
        model, loss = mlp(), nn.CrossEntropyLoss(reduction=reduction)
        before = weights(model)
        optimizer = KFAC(model, loss)
        train(model, optimizer, [(X, torch.full_like(y, -100))], loss)
        assert torch.equal(weights(model), before)
        values = train(model, optimizer, [(X, y)] * 10, loss)
        assert values[-1] < values[0]


def test_ignored_targets_do_not_count() -> None:
    """Factors are those of the targets that count, even if the loss is a function and targets are not known."""
    X, y = data()
    y = torch.where(torch.arange(12) % 3 == 0, -100, y)
    counts = y >= 0
    factors = []
    for inputs, labels in ((X, y), (X[counts], y[counts])):
        model = mlp()
        optimizer = KFAC(model, nn.CrossEntropyLoss(), **EXACT)
        train(model, optimizer, [(inputs, labels)], F.cross_entropy)
        assert optimizer.preconditioner.unit == 1.0
        both = optimizer.preconditioner.curvature.averages["4.weight", (0, 3)].factors
        factors.append((both.A.to_dense(), both.B.to_dense()))
    torch.testing.assert_close(*factors)


def test_nothing_else_changes() -> None:
    """Gradients, the random state, hooks and flags are as without the optimizer; `close()` removes its hooks."""
    X, y = data()
    model, plain, loss = mlp(), mlp(), nn.CrossEntropyLoss()
    optimizer = KFAC(model, loss)
    random = torch.get_rng_state()
    loss(model(X), y).backward()
    loss(plain(X), y).backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    optimizer.step()
    assert torch.equal(torch.get_rng_state(), random)
    for p, q, g in zip(model.parameters(), plain.parameters(), gradients, strict=True):
        assert q.grad is not None
        assert torch.equal(g, q.grad)
        assert p.grad is not None
        assert torch.equal(p.grad, g)
    optimizer.close()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert not loss._forward_pre_hooks


def test_hooks_go_with_the_optimizer() -> None:
    """A deleted optimizer leaves no hooks behind."""
    model, loss = mlp(), nn.CrossEntropyLoss()
    optimizer = KFAC(model, loss)
    del optimizer
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    KFAC(model, loss).close()


def test_relative_damping_may_be_said_in_two_ways() -> None:
    X, y = data()
    loss = nn.CrossEntropyLoss()

    def step(damping: Any, unit: Any) -> Tensor:
        return one_step(mlp(), loss, X, y, damping=damping, damping_unit=unit)

    expected = step(0.25, "relative")
    for unit in ("relative", "absolute"):  # the string includes the unit
        assert torch.equal(step(Relative(0.25), unit), expected)
    assert not torch.allclose(step(0.25, "absolute"), expected)
