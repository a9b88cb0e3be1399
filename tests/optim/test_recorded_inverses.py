"""Inverses on an accelerator: computed in place, and recorded, with the damping of the step."""

from typing import Any

import pytest
import torch
from torch import nn

from kfs.optim import KFAC, inverses
from tests.factors.tape import Tapes
from tests.optim.test_recorded import trained
from tests.optim.training import data, train

pytestmark = pytest.mark.usefixtures("tapes")


def recorded_groups(optimizer: KFAC) -> list[bool]:
    """Return which inverses are recorded."""
    inverses = optimizer.preconditioner.curvature.inverses
    kinds = {} if inverses._replayer is None else inverses._replayer._kinds
    return [first in kinds and bool(kinds[first].recorded) for first in inverses._groups]


def test_inverses_are_recorded() -> None:
    """One recording serves all blocks of a size; inverses are the same without recordings."""
    options: dict[str, Any] = {"fisher": "type-2", "factors_every": 2, "inverses_every": 1}
    weights, optimizer = trained("mlp", **options)
    assert recorded_groups(optimizer) == [True, True, True]
    plain, other = trained("mlp", **options, replay=False)
    assert recorded_groups(other) == [False, False, False]
    # Round-off in float64, which inverses enlarge.
    torch.testing.assert_close(weights, plain, rtol=1e-9, atol=1e-10)
    for key, average in optimizer.preconditioner.curvature.averages.items():
        expected = other.preconditioner.curvature.averages[key]
        assert average.damping is not None
        torch.testing.assert_close(average.damping, expected.damping, rtol=1e-9, atol=0)


def test_large_inverses_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """They give the same results."""
    options: dict[str, Any] = {"fisher": "type-2", "factors_every": 2, "inverses_every": 1}
    weights, _ = trained("mlp", **options)
    monkeypatch.setattr(inverses, "_LARGEST_RECORDED", 5)
    others, optimizer = trained("mlp", **options)
    sizes = [max(a.factors.A.size, a.factors.B.size) for a in optimizer.preconditioner.curvature.averages.values()]
    assert recorded_groups(optimizer) == [size <= 5 for size in sizes]
    torch.testing.assert_close(weights, others, rtol=1e-9, atol=1e-10)


def test_another_damping_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above rejects a recording with a slightly different damping."""
    options: dict[str, Any] = {"fisher": "type-2", "factors_every": 2, "inverses_every": 1, "steps": 12}
    right, _ = trained("mlp", **options)
    monkeypatch.setattr(inverses, "_per_group", lambda some, _: len(some) * [1e-3])
    wrong, _ = trained("mlp", **options)
    assert (right - wrong).norm() > 1e-3 * right.norm()


def test_damping_that_rises(tapes: list[Tapes]) -> None:
    """A replay uses the damping of its own step, not that of the recorded step."""
    _, optimizer = trained("mlp", fisher="type-2", factors_every=1, inverses_every=1)
    assert all(recorded_groups(optimizer))
    before = [a.damping.clone() for a in optimizer.preconditioner.curvature.averages.values() if a.damping is not None]
    made = sum(len(tape.made) for tape in tapes)
    optimizer.preconditioner.curvature.damping.multiply(100.0)
    optimizer.preconditioner.curvature.update_inverses(100, optimizer._params.groups, force=True)
    after = [a.damping for a in optimizer.preconditioner.curvature.averages.values() if a.damping is not None]
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(100 * one, other)
    assert sum(len(tape.made) for tape in tapes) == made


def test_some_blocks_of_a_size(tapes: list[Tapes]) -> None:
    """If the number of inverted blocks changes, the last recording is freed, and results are right."""
    X, y = data()
    layers = [layer for _ in range(3) for layer in (nn.Linear(4, 4), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(4, 3)).double()
    loss = nn.CrossEntropyLoss()
    optimizer = KFAC(model, loss, fisher="type-2", factors_every=1, inverses_every=1)
    train(model, optimizer, [(X, y)] * 8, loss)
    curvature = optimizer.preconditioner.curvature
    same = [curvature.averages[f"{i}.weight", (0, 4)] for i in (0, 2, 4)]
    made = sum(len(one.made) for one in tapes)
    for number in (1, 3):
        damping = 0.01 * number
        curvature.inverses.invert(same[:number], number * [damping])
        for average in same[:number]:
            expected = curvature.inverses.computed([average], [damping]).inverse
            assert average.inverse is not None
            torch.testing.assert_close(average.inverse.to_dense(), expected.to_dense())
    assert sum(len(one.made) for one in tapes) == made
    assert sum(tape.freed for one in tapes for tape in one.made) >= 1
    assert not optimizer.preconditioner.curvature.inverses.failures()


def test_large_blocks_are_inverted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a size are inverted together up to a number of entries; a larger block is inverted alone."""
    X, y = data()
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)), nn.Linear(4, 3)).double()
    optimizer = KFAC(model, nn.CrossEntropyLoss(), fisher="type-2")
    train(model, optimizer, [(X, y)], nn.CrossEntropyLoss())
    averages = optimizer.preconditioner.curvature.averages.values()
    for most, lengths in ((2**25, [1, 5]), (2 * (25 + 16), [1, 1, 2, 2]), (1, [1] * 6)):
        monkeypatch.setattr(inverses, "_NUMBERS", most)
        assert sorted(map(len, inverses.inverted_together(averages))) == lengths
