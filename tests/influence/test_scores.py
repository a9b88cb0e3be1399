"""Scores against brute force: gradients by autograd for single examples, and the inverse of the dense matrix."""

from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import kfs
from kfs.factors import BlockDiagonal
from tests.factors.arrangements import ARRANGEMENTS, Instance, Problem
from tests.factors.one_by_one import close, flat, gradients
from tests.factors.problems import KNOWN

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")  # PyTorch's own
N = 4
DAMPING = 0.3
# In this problem, an example has no rows of its own.
PROBLEMS = [problem for problem in (*ARRANGEMENTS, *KNOWN) if problem.name != "spatial axis"]
# Operators alternate, so that each kind is tested with many models.
KINDS: tuple[tuple[Any, Any], ...] = (
    (kfs.EKFAC, "exact"),
    (kfs.KFAC, "exact"),
    (kfs.KFAC, "factored"),
    (kfs.EKFAC, "exact"),
    (kfs.KFAC, "per-factor"),
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


def brute_force(inverse: BlockDiagonal, queries: Tensor, train: Tensor) -> Tensor:
    """Multiply flat gradients with the dense inverse."""
    return queries @ inverse.to_dense() @ train.T


@pytest.mark.parametrize("place", range(len(PROBLEMS)), ids=lambda place: PROBLEMS[place].name)
def test_every_model(place: int) -> None:
    """Scores, self-scores and their parts, for any row map, in unequal batches."""
    one = instance(PROBLEMS[place])
    make, method = KINDS[place % len(KINDS)]
    train, queries = one.risk([0], [1, 2, 3]), one.risk([2, 0, 1], [3])
    K = make(one.risk())
    influence = kfs.Influence(K, DAMPING, method)
    G = flat(gradients(one))
    if method == "exact":
        identity = DAMPING * torch.eye(G.shape[1], dtype=G.dtype)
        close(influence.inverse.to_dense(), torch.linalg.inv(K.to_dense() + identity))
    expected = brute_force(influence.inverse, G[[2, 0, 1, 3]], G)
    scores = influence.scores(queries, train)
    close(scores, expected)
    close(influence.self_scores(train), brute_force(influence.inverse, G, G).diagonal())
    by_block = influence.scores(queries, train, by="block")
    close(torch.stack(list(by_block.values())).sum(0), expected)


BATCHES = ([[0], [1], [2], [3]], [[0, 1, 2], [3]], [[0, 1, 2, 3]])


@pytest.mark.parametrize("name", ["linear", "operators: cnn", "experts, masks", "siamese"])
def test_batches_do_not_matter(name: str) -> None:
    """This includes batches of queries and of training data, and the number of queries that fit into memory."""
    one = instance(next(problem for problem in PROBLEMS if problem.name == name))
    influence = kfs.Influence(kfs.EKFAC(one.risk()), DAMPING)
    G = flat(gradients(one))
    expected = brute_force(influence.inverse, G, G)
    for of_queries, of_train in product(BATCHES, BATCHES):
        queries, train = one.risk(*of_queries), one.risk(*of_train)
        close(influence.scores(queries, train), expected)
        top = influence.top(queries, train, 4, memory=1)
        close(top.helpful.values, expected.sort(1, descending=True).values)
