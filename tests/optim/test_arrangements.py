"""Passes of a training loop find row maps for data along all kinds of axes: factors are those of a risk."""

from typing import Any

import pytest
import torch

from kfs import optim
from kfs.factors import KFAC
from kfs.factors.block import Block
from tests.factors.arrangements import ARRANGEMENTS, Instance, Problem
from tests.operators.contract import close

# Rows of images count; and with fewer nodes than graphs, an optimizer treats nodes as examples.
NOT_HERE = ("spatial axis", "graphs, as many nodes as data")
PROBLEMS = [problem for problem in ARRANGEMENTS if not problem.name.startswith(NOT_HERE)]


def check_pass(one: Instance, optimizer: optim.KFAC, loss: Any, chosen: list[int], **settings: Any) -> None:
    """Compare the factors of one pass with those of a risk."""
    x = one.join([one.xs[n] for n in chosen])
    f = one.model(*x) if isinstance(x, tuple) else one.model(x)
    loss(f, torch.cat([one.ys[n] for n in chosen])).backward()
    sums = optimizer.preconditioner.watch.collect()
    assert sums is not None
    assert not sums.uncovered
    K = KFAC(one.risk(chosen), **settings)
    assert {block.layout.name for block in sums.blocks.values()} == K.blocks.keys()
    for block in sums.blocks.values():
        found, expected = Block(block, K.loss.reduction_factor(K.count)), K.blocks[block.layout.name]
        close(found.A, expected.A)
        close(found.B, expected.B)


@pytest.mark.parametrize(
    ("problem", "fisher"),
    [(problem, ("type-2", "empirical")[place % 2]) for place, problem in enumerate(PROBLEMS)],
    ids=str,
)
def test_factors_of_passes(problem: Problem, fisher: Any) -> None:
    """More examples than an audit uses, and then fewer, in another order."""
    one = problem.instance(9)
    loss = one.loss
    optimizer = optim.KFAC(one.model, loss, fisher=fisher, sharing="reduce", factors_every=1)
    for chosen in (list(range(9)), [4, 2, 8]):
        optimizer.zero_grad()
        check_pass(one, optimizer, loss, chosen, fisher=fisher, sharing="reduce")
    optimizer.close()
