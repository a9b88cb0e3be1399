"""Per-example gradients as rows, against autograd for single examples."""

from collections.abc import Iterator
from functools import cache, partial

import pytest
import torch
from torch import Tensor

from kfs.factors.per_example import GradientBatch, per_datum
from tests.factors.arrangements import ARRANGEMENTS, SUMS, Instance, N, Problem, Sets, join_sets, set_of
from tests.factors.one_by_one import close, flat, gradients
from tests.factors.problems import KNOWN

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")  # PyTorch's own
PROBLEMS = (
    *(problem for problem in ARRANGEMENTS if problem.name != "spatial axis"),  # an example has no rows of its own there
    *KNOWN,
    *(Problem(f"sets, {how}", partial(Sets, how), set_of([2, 1, 3, 2]), join_sets) for how in SUMS[:2]),
)


@pytest.fixture(autouse=True)
def _groups(request: pytest.FixtureRequest) -> None:
    """Let models with `torch._grouped_mm` run in float64. Others run without this slower mode."""
    if "grouped" in request.node.name:
        request.getfixturevalue("grouped_in_double")


@cache
def instance(problem: Problem) -> Instance:
    """Make a problem once."""
    return problem.instance(N)


def collected(batches: Iterator[GradientBatch]) -> dict[str, Tensor]:
    """Concatenate the gradients of all batches."""
    parts = [batch.tensors() for batch in batches]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_every_model(problem: Problem) -> None:
    """Gradients, their inner products and their norms, for any row map."""
    one = instance(problem)
    expected = gradients(one)
    G = flat(expected)
    (batch,) = per_datum(one.risk())
    for name, g in batch.tensors().items():
        close(g, expected[name])
    close(batch.inner(batch), G @ G.T)
    close(batch.squared_norms(), G.square().sum(1))
    for block in batch.blocks.values():
        by_rows = sum((torch.cat(list(part.matrices())) for part in block.parts), torch.zeros(()))
        assert not block.parts or torch.allclose(by_rows, block.dense(), rtol=1e-12, atol=1e-12)
