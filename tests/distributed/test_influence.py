"""Scores with training data that are split over ranks equal those of one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import kfs
from kfs.errors import DataError, DistributedError, ModelError
from tests.distributed.pool import Pool
from tests.distributed.problems import bits, is_first, problem, risk_of_all, risk_of_own

CLOSE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-11}  # inverses enlarge round-off


def queries_of(name: str) -> kfs.EmpiricalRisk:
    model, loss, X, y = problem(name)
    return kfs.EmpiricalRisk(model, loss, (X[2:7], y[2:7]))


def scores_of(train: kfs.EmpiricalRisk, **settings: Any) -> list[Any]:
    queries = queries_of("mlp")
    influence = kfs.Influence(kfs.EKFAC(train, **settings))
    top = influence.top(queries, train, k=4, normalize="self")
    parts = influence.scores(queries, train, by="layer", normalize="cosine", memory=0)
    factored = kfs.Influence(kfs.KFAC(train, **settings), 0.1, "factored")
    return [
        influence.scores(queries, train),
        influence.self_scores(train),
        factored.scores(queries, train),
        factored.self_scores(train),
        *parts.values(),
        *(ranked.values for ranked in (top.helpful, top.harmful)),
        *(ranked.indices for ranked in (top.helpful, top.harmful)),
    ]


def compare_scores(settings: dict[str, Any]) -> str:
    found = scores_of(risk_of_own("mlp"), **settings)
    if is_first():
        torch.testing.assert_close(found, scores_of(risk_of_all("mlp")), **CLOSE)
    return bits(found)


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("settings", [{}, {"placement": "owner"}, {"placement": "owner", "factor_device": "cpu"}])
def test_scores(ranks: Pool, size: int, settings: dict[str, Any]) -> None:
    """Some ranks have no data, and others own no block."""
    assert len(set(ranks(size, compare_scores, settings))) == 1


def compare_tokens() -> str:
    train, queries = risk_of_own("tokens"), queries_of("tokens")
    scores = kfs.Influence(kfs.KFAC(train, placement="owner")).scores(queries, train, by="token")
    if is_first():
        one = risk_of_all("tokens")
        torch.testing.assert_close(scores, kfs.Influence(kfs.KFAC(one)).scores(queries, one, by="token"), **CLOSE)
    return bits([scores])


def test_scores_of_tokens(ranks: Pool) -> None:
    assert len(set(ranks(4, compare_tokens))) == 1


def gradients() -> tuple[list[int], list[float]]:
    train = risk_of_own("experts")
    found = list(kfs.per_datum(train))
    indices = [n for batch in found for n in range(batch.start, batch.stop)]
    return indices, [float(norm) for batch in found for norm in batch.squared_norms()]


def test_gradients_have_their_indices(ranks: Pool) -> None:
    """A rank may have examples of one expert only, or none."""
    found = ranks(4, gradients)
    expected = torch.cat([batch.squared_norms() for batch in kfs.per_datum(risk_of_all("experts"))])
    assert [n for indices, _ in found for n in indices] == list(range(23))
    torch.testing.assert_close(torch.tensor([n for _, norms in found for n in norms], dtype=torch.float64), expected)


def refused(what: str) -> str:
    model, loss, X, y = problem("mlp")
    train, queries = risk_of_own("mlp"), queries_of("mlp")
    influence = kfs.Influence(kfs.KFAC(train))
    second = dist.get_rank() == 1
    if what == "NaN":
        X[20, 0] = torch.nan
        train = kfs.EmpiricalRisk(model, loss, kfs.shard((X, y), dist.group.WORLD))
    other = kfs.EmpiricalRisk(model, loss, (X[second:5], y[second:5]))
    calls: dict[str, Callable[[], object]] = {
        "NaN": lambda: influence.scores(queries, train),
        "split queries": lambda: influence.scores(train, train),
        "only queries split": lambda: influence.scores(train, queries),
        "other queries": lambda: influence.top(other, train),
        "other damping": lambda: kfs.Influence(influence.K, 0.1 + second).self_scores(train),
        "other options": lambda: influence.top(queries, train, 2, of="margin" if second else "loss"),
        "a typo": lambda: influence.scores(queries, train, normalize="cosin" if second else None),  # type: ignore[arg-type]
        "cost": lambda: influence.cost(queries, train),
        "query_error": lambda: influence.query_error(queries, train, 1),
    }
    with pytest.raises((DataError, DistributedError, ModelError)) as caught:
        calls[what]()
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("NaN", "example 20 "),
        ("split queries", "Scores of queries cannot be computed from data that are split over 2 processes"),
        ("only queries split", "Scores of queries cannot be computed from data that are split over 2 processes"),
        ("other queries", "Queries differ between processes"),
        ("other damping", "Inverses of the curvature differ between processes: "),
        ("other options", "Options differ between processes: rank 0 has of='loss', and rank 1 has of='margin'"),
        ("a typo", "normalize is 'cosin'"),
        ("index", "An index cannot be computed from data that are split over 2 processes"),
        ("cost", "The cost cannot be computed from data that are split over 2 processes"),
        ("query_error", "The error cannot be computed from data that are split over 2 processes"),
    ],
)
def test_what_is_refused(ranks: Pool, what: str, text: str) -> None:
    one, other = ranks(2, refused, what)
    assert text in one
    assert one == other
