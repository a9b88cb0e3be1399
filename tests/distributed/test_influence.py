"""Scores with training data that are split over ranks equal those of one process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import kfs
from kfs.errors import DataError, DistributedError, ModelError, StorageError
from tests.distributed.pool import Pool
from tests.distributed.problems import batches, bits, is_first, problem, risk_of_all, risk_of_own

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


@pytest.mark.parametrize(
    ("size", "settings"),
    [(1, {}), (4, {}), (4, {"placement": "owner"}), (3, {"placement": "owner", "factor_device": "cpu"})],
)
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
        "other processes": lambda: kfs.Influence(kfs.KFAC(train, placement="owner")).scores(queries, queries),
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
        ("other processes", "The blocks are owned by 2 processes, but the risk has another process group"),
        ("cost", "The cost cannot be computed from data that are split over 2 processes"),
        ("query_error", "The error cannot be computed from data that are split over 2 processes"),
    ],
)
def test_what_is_refused(ranks: Pool, what: str, text: str) -> None:
    one, other = ranks(2, refused, what)
    assert text in one
    assert one == other


def sharded(name: str, K_file: str) -> tuple[kfs.EmpiricalRisk, kfs.Influence]:
    """Return the risk of this process, with whole batches of all data, and curvature from a file."""
    model, loss, X, y = problem(name)
    train = kfs.EmpiricalRisk(model, loss, kfs.shard(batches(X, y, 3), dist.group.WORLD))
    return train, kfs.Influence(kfs.load(K_file, group=dist.group.WORLD))


def indexed(K_file: str, file: str | None, settings: dict[str, Any]) -> list[Any]:
    """Return everything that an index computes, made or opened by these processes."""
    train, influence = sharded("mlp", K_file)
    index = influence.index(train, file=file, shard_bytes=1000, **settings)
    queries = queries_of("mlp")
    top = index.top(queries, 4, normalize="self")
    scores = [*index.scores(queries, by="block", normalize="cosine").values(), index.scores(queries)]
    numbers = torch.tensor([index.error, index.nbytes], dtype=torch.float64)
    return [*scores, index.self_scores(), top.helpful.values, top.harmful.indices, numbers]


@pytest.mark.parametrize("settings", [{}, {"rank": 2, "compression": "projected"}])
def test_index(ranks: Pool, settings: dict[str, Any], tmp_path: Path) -> None:
    """Any number of processes makes an index, and any number of processes opens its files; some have no data."""
    K_file = tmp_path / "K"
    kfs.EKFAC(risk_of_all("mlp")).save(K_file)
    (expected,) = ranks(1, indexed, str(K_file), str(tmp_path / "index of 1"), settings)
    files = len(list((tmp_path / "index of 1").iterdir()))
    for made, opened in ((4, 1), (2, 3)):
        folder = str(tmp_path / f"index of {made}")
        for size in (made, opened):
            for found in ranks(size, indexed, str(K_file), folder, settings):
                torch.testing.assert_close(found[:-1], expected[:-1], rtol=1e-10, atol=1e-12)
        assert len(list(Path(folder).iterdir())) >= files
    for found in ranks(3, indexed, str(K_file), None, settings):
        torch.testing.assert_close(found[:-1], expected[:-1], rtol=1e-10, atol=1e-12)


def cannot_write(*_: object) -> None:
    raise StorageError("The file cannot be written.", "Free some memory.")


def begin(K_file: str, folder: str) -> None:
    train, influence = sharded("mlp", K_file)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr("kfs.influence.index.Folder.write", cannot_write)
        with pytest.raises(StorageError, match="cannot be written"):
            influence.index(train, file=folder, shard_bytes=1)


def continued(K_file: str, folder: str) -> Any:
    train, influence = sharded("mlp", K_file)
    try:
        return influence.index(train, file=folder, shard_bytes=1).self_scores()
    except StorageError as error:
        return str(error)


def test_interrupted_index(ranks: Pool, tmp_path: Path) -> None:
    K_file, folder = tmp_path / "K", tmp_path / "index"
    kfs.EKFAC(risk_of_all("mlp")).save(K_file)
    ranks(2, begin, str(K_file), str(folder))
    written = {file.name: file.stat().st_mtime_ns for file in folder.glob("shard-*")}
    assert written
    (refused,) = ranks(1, continued, str(K_file), str(folder))
    assert "The index was begun by 2 processes, and is not complete" in refused
    found = ranks(2, continued, str(K_file), str(folder))
    assert written.items() <= {file.name: file.stat().st_mtime_ns for file in folder.glob("shard-*")}.items()
    torch.testing.assert_close(found[1], ranks(1, continued, str(K_file), str(folder))[0], rtol=0, atol=0)
    file = next(folder.glob("rank-001-*"))
    file.unlink()
    assert all(f"{file} is missing" in text for text in ranks(3, continued, str(K_file), str(folder)))
