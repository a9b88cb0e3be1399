"""Decisions on an accelerator without the host, tested on the CPU: stacks of inverses, failures, bad gradients.

Tapes stand in for CUDA graphs (see `tests.factors.tape`). `test_devices` runs the checks of `tests.optim.unseen` on
a GPU.
"""

import copy

import pytest
import torch
from torch import nn

from kfs.factors.blocks.decompositions import inverse_by_halves
from kfs.optim import KFAC
from tests.optim.training import data, mlp, train, weights
from tests.optim.unseen import check_bad_gradients, check_failures

LOSS = nn.CrossEntropyLoss()
pytestmark = pytest.mark.usefixtures("tapes")


def test_bad_gradients_are_not_looked_at() -> None:
    """In a recorded update, nothing changes if gradients are not finite."""
    check_bad_gradients("cpu", steps=8)


def test_failures_that_nobody_waited_for() -> None:
    """An inverse that cannot be computed does not replace the last one, and is reported later."""
    check_failures("cpu")


def test_failures_before_another_state_was_loaded() -> None:
    """They do not belong to the loaded blocks."""
    X, y = data()
    model = mlp()
    optimizer = KFAC(model, LOSS, fisher="type-2", factors_every=10, inverses_every=1)
    train(model, optimizer, [(X, y)] * 11, LOSS)
    saved = copy.deepcopy(optimizer.state_dict())
    average = optimizer.preconditioner.curvature.averages["2.weight", (0, 5)]
    average.factors.A.values.neg_()
    average.changed = True
    train(model, optimizer, [(X, y)], LOSS)
    optimizer.load_state_dict(saved)
    train(model, optimizer, [(X, y)] * 11, LOSS)
    assert optimizer.events.failed_inverses == 0


def test_one_of_several_blocks_fails() -> None:
    """If one of several new blocks fails in a joint inversion, they are inverted one at a time."""
    X, y = data()
    layers = [layer for _ in range(3) for layer in (nn.Linear(4, 4), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(4, 3)).double()
    optimizer = KFAC(model, LOSS, fisher="type-2", factors_every=1, inverses_every=1)
    train(model, optimizer, [(X, y)], LOSS)
    for average in optimizer.preconditioner.curvature.averages.values():
        average.inverse = None
    bad = optimizer.preconditioner.curvature.averages["2.weight", (0, 4)]
    bad.factors.A.values.fill_(torch.nan)
    optimizer.preconditioner.curvature.inverses.forget()
    train(model, optimizer, [(X, y)], LOSS)
    assert optimizer.events.failed_inverses == 1
    assert bad.failed
    assert bad.inverse is None
    assert all(a.inverse is not None for a in optimizer.preconditioner.curvature.averages.values() if a is not bad)


@pytest.mark.parametrize("size", [1, 3, 9, 16, 37])
def test_inverses_by_halves(size: int) -> None:
    """Results equal those of `torch.linalg.inv`, and flags mark matrices that are not positive definite."""
    torch.manual_seed(0)
    x = torch.randn(3, 2 * size + 1, size, dtype=torch.float64)
    M = x.mT @ x
    M[1] *= -1
    result, good = inverse_by_halves(M, smallest=4)
    assert good.tolist() == [True, False, True]
    torch.testing.assert_close(result[::2], torch.linalg.inv(M[::2]))
    wrong = inverse_by_halves(M + 0.01 * M.mean(), smallest=4)[0]
    assert not torch.allclose(wrong[0], torch.linalg.inv(M[0]))
    assert not inverse_by_halves(M * torch.nan, smallest=4)[1].any()


def test_inverses_by_halves_are_as_precise_as_others() -> None:
    """In float32, with a condition number of 10,000 and a dominant mean, as in factors of inputs."""
    torch.manual_seed(0)
    x = 0.1 * torch.randn(500, 64, dtype=torch.float64) + torch.randn(64, dtype=torch.float64)
    M = x.mT @ x
    M += torch.linalg.matrix_norm(M, 2) / 1e4 * torch.eye(64)
    exact = torch.linalg.inv(M)
    result, good = inverse_by_halves(M.float().unsqueeze(0), smallest=4)
    assert good.all()
    # float32 rounds to 6e-8. A condition number of 1e4 amplifies this to about 6e-4.
    assert (result - exact).norm() < 1e-3 * exact.norm()
    # With inverses of blocks in place of their Cholesky factors, the more obvious algorithm, the test fails.
    single = M.float()
    P = single[:32, :32]
    Q = single[32:, :32]
    R = single[32:, 32:]
    schur = R - Q @ torch.linalg.inv(P) @ Q.T
    assert (torch.linalg.inv(schur) - exact[32:, 32:]).norm() > 1e-3 * exact.norm()


def equal_layers() -> nn.Sequential:
    """Return a network with three layers of one size, whose inverses are stacked."""
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(4, 4), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(4, 3)).double()


def test_different_settings_in_a_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of one size may have their own damping and trust region."""
    X, y = data()
    results = []
    for _ in range(2):
        model = equal_layers()
        groups = [
            {"params": model[i].parameters(), "damping": 0.001 * (i + 1), "trust": 0.01 * (i + 1) if i else None}
            for i in range(0, 7, 2)
        ]
        optimizer = KFAC(model, LOSS, groups, fisher="type-2", factors_every=1, inverses_every=1)
        train(model, optimizer, [(X, y)] * 6, LOSS)
        results.append(weights(model))
        monkeypatch.undo()  # The second time, the CPU does not count as an accelerator, so there are no recordings.
    torch.testing.assert_close(*results, rtol=1e-8, atol=1e-9)
    same = equal_layers()
    train(same, KFAC(same, LOSS, fisher="type-2", factors_every=1, inverses_every=1), [(X, y)] * 6, LOSS)
    assert not torch.allclose(weights(same), results[0])


def test_inverses_of_some_blocks_of_a_stack() -> None:
    """Blocks that are not adjacent are written one at a time, and the others do not change."""
    X, y = data()
    model = equal_layers()
    optimizer = KFAC(model, LOSS, fisher="type-2", factors_every=100, inverses_every=1)
    train(model, optimizer, [(X, y)] * 3, LOSS)
    averages = [optimizer.preconditioner.curvature.averages[f"{i}.weight", (0, 4)] for i in (0, 2, 4)]
    inverses = [average.inverse for average in averages]
    assert all(inverse is not None for inverse in inverses)
    before = [inverse.to_dense().clone() for inverse in inverses if inverse is not None]
    for average in averages:
        average.factors.A.values.mul_(2)
    for average in averages[::2]:
        average.changed = True
    train(model, optimizer, [(X, y)], LOSS)
    after = [inverse.to_dense() for inverse in inverses if inverse is not None]
    assert [torch.equal(a, b) for a, b in zip(after, before, strict=True)] == [False, True, False]
