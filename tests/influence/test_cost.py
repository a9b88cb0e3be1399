"""Compressed queries, the error of compression, and the predicted cost of a computation."""

from math import ceil
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import kfs
from kfs.errors import ModelError
from kfs.influence import Cost, QueryError
from kfs.influence.scoring import Stream
from kfs.influence.ways import Sizes, multiplications, work
from tests.factors.one_by_one import close, flat, gradients
from tests.factors.test_gradient_streams import Tied, of_tokens
from tests.influence.test_index import by_blocks, made
from tests.influence.test_influence import both
from tests.influence.test_scores import DAMPING

WIDTH, NUM_DATA = 16, 500


def wide() -> tuple[kfs.EmpiricalRisk, kfs.EmpiricalRisk]:
    """Make a problem with so much training data that compressed queries pay."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)).double()
    X, y = torch.randn(NUM_DATA, WIDTH, dtype=torch.float64), torch.randint(3, (NUM_DATA,))
    batches = list(zip(X.split(200), y.split(200), strict=True))
    loss = nn.CrossEntropyLoss()
    return kfs.EmpiricalRisk(model, loss, (X[:3] + 1, y[:3])), kfs.EmpiricalRisk(model, loss, batches)


def dense_gradients(risk: kfs.EmpiricalRisk) -> dict[str, Tensor]:
    """Differentiate in a loop over examples; weight and bias of a layer are one matrix."""
    model: Any = risk.model
    rows: dict[str, list[Tensor]] = {"0": [], "2": []}
    for batch in risk.batches():
        for x, y in zip(batch.x, batch.y, strict=True):
            value = nn.functional.cross_entropy(model(x[None]), y[None])
            g = torch.autograd.grad(value, list(model.parameters()))
            rows["0"].append(torch.cat([g[0], g[1][:, None]], 1))
            rows["2"].append(torch.cat([g[2], g[3][:, None]], 1))
    return {name: torch.stack(parts) for name, parts in rows.items()}


@pytest.fixture(scope="module")
def problem() -> tuple[kfs.EmpiricalRisk, kfs.EmpiricalRisk, kfs.Influence]:
    queries, train = wide()
    return queries, train, kfs.Influence(kfs.EKFAC(train), DAMPING)


def expected_scores(problem: Any, rank: int | None) -> tuple[Tensor, Tensor]:
    """Truncate the product of the dense inverse and each query's gradient, in both layers.

    Returns:
        Scores, and for every query the norm of the truncated part.
    """
    queries, train, influence = problem
    of_queries, of_train = dense_gradients(queries), dense_gradients(train)
    dense = {stack.layouts[0].name: stack.structure.to_dense()[0] for stack in influence.inverse.stacks}
    total = torch.zeros(3, NUM_DATA, dtype=torch.float64)
    left_out = torch.zeros(3, dtype=torch.float64)
    for name, G in of_queries.items():
        for q, g in enumerate(G):
            P = (dense[name] @ g.flatten()).reshape(g.shape)
            if rank is not None:
                U, s, Vh = torch.linalg.svd(P, full_matrices=False)
                left_out[q] += s[rank:].square().sum()
                P = (U[:, :rank] * s[:rank]) @ Vh[:rank]
            total[q] += of_train[name].flatten(1) @ P.flatten()
    return total, left_out.sqrt()


def relative_norms_left_out(problem: Any, rank: int) -> dict[str, float]:
    """Compare all products of a block with their best approximations of a rank."""
    queries, _, influence = problem
    found = {}
    for stack in influence.inverse.stacks:
        G = dense_gradients(queries)[stack.layouts[0].name]
        P = (G.flatten(1) @ stack.structure.to_dense()[0]).reshape(G.shape)
        U, s, Vh = torch.linalg.svd(P, full_matrices=False)
        nearest = (U[..., :rank] * s[:, None, :rank]) @ Vh[:, :rank]
        found[stack.layouts[0].name] = float((P - nearest).norm() / P.norm())
    return found


@pytest.mark.parametrize("rank", [1, 3])
def test_compressed_queries(problem: Any, rank: int) -> None:
    queries, train, influence = problem
    expected, left_out = expected_scores(problem, rank)
    full, _ = expected_scores(problem, None)
    close(influence.scores(queries, train), full)
    close(influence.scores(queries, train, query_rank=rank), expected)
    close(influence.index(train, dtype=torch.float64).scores(queries, query_rank=rank), expected)
    close(influence.top(queries, train, 4, query_rank=rank).helpful.values, expected.topk(4).values)
    # Matrices of the second layer have three rows.
    second = influence.scores(queries, train, by="layer", query_rank=rank)["2"]
    assert torch.allclose(second, influence.scores(queries, train, by="layer")["2"]) == (rank == 3)

    error = influence.query_error(queries, train, rank)
    assert isinstance(error, QueryError)
    assert list(error.left_out) == ["0", "2"]
    assert error.left_out == pytest.approx(relative_norms_left_out(problem, rank), rel=1e-8, abs=1e-12)
    close(error.bound, left_out)
    first = slice(0, 200)  # the first batch
    measured = (expected - full)[:, first].norm() / full[:, first].norm()
    assert error.measured == pytest.approx(float(measured), rel=1e-8)
    assert error.measured > (1e-3 if rank == 1 else 1e-7)
    norms = torch.cat([batch.squared_norms() for batch in kfs.per_datum(train)]).sqrt()
    assert bool(((expected - full).abs() <= error.bound[:, None] * norms + 1e-12).all())
    assert "relative error of scores, as measured: " in str(error)


def test_all_singular_vectors_are_exact(problem: Any) -> None:
    queries, train, influence = problem
    error = influence.query_error(queries, train, WIDTH)
    assert error.measured < 1e-12
    assert float(error.bound.max()) < 1e-12


def test_compression_that_does_not_pay() -> None:
    """With few training data, and for Kronecker products with one row, scores stay exact."""
    queries, train = both()
    influence = kfs.Influence(kfs.EKFAC(train))
    close(influence.scores(queries, train, query_rank=1), influence.scores(queries, train))
    error = influence.query_error(queries, train, 1)
    assert error.left_out == {}
    assert error.measured == 0
    assert not error.bound.any()


def test_nothing_to_explain() -> None:
    """Zero gradients have no relative error."""
    queries, train = both()
    error = kfs.Influence(kfs.EKFAC(train)).query_error(queries, train, 1, of=lambda f, _: 0 * f.sum())
    assert error.measured == 0


def test_matrices_of_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries with several rows are compressed, too, and all of their blocks if necessary."""
    one = made("operators: cnn")
    influence = kfs.Influence(kfs.KFAC(one.risk()), DAMPING)
    monkeypatch.setattr("kfs.influence.ways.multiplications", lambda way, _: way != "low rank")

    def change(M: Tensor, _: Any, dense: Tensor) -> Tensor:
        """Return the truncated products of the queries, multiplied with the block again, since scores are symmetric."""
        result = torch.zeros_like(M)
        for n in range(len(M)):
            for group in range(M.shape[1]):
                P = (dense[group] @ M[n, group].flatten()).reshape(M[n, group].shape)
                U, s, Vh = torch.linalg.svd(P, full_matrices=False)
                truncated = s[0] * torch.outer(U[:, 0], Vh[0])
                result[n, group] = torch.linalg.solve(dense[group], truncated.flatten()).reshape(P.shape)
        return result

    expected = by_blocks(influence, one, flat(gradients(one)), change).T
    found = influence.scores(one.risk(), one.risk(), query_rank=1)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)  # the oracle multiplies with an inverse again
    assert float((found - influence.scores(one.risk(), one.risk())).norm()) > 1e-6


def test_work_by_phase() -> None:
    sizes = Sizes(queries=2, train=3, rows=4, columns=5, matrix_rows=7, query_rank=6)
    low = work("low rank", sizes)
    assert low.products == 2 * 3 * 4 * 6 * 12
    assert low.queries == 2 * (4 * 35 + 2 * 35 * 12 + 10 * 35 * 5)
    assert low.train == 0
    for way in ("rows", "matrices", "rotated", "low rank"):
        found = work(way, sizes)
        assert found.total == multiplications(way, sizes) == found.queries + found.train + found.products


@pytest.mark.parametrize("most", [1, 2, 3, 5, 7])
def test_queries_of_several_batches_stay_within_memory(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are split and joined, so that the number of queries at a time is the largest that fits into memory."""
    _, train = both()
    X, y = (torch.cat([getattr(batch, part) for batch in train.batches()]) for part in ("x", "y"))
    queries = kfs.EmpiricalRisk(train.model, nn.CrossEntropyLoss(), list(zip(X.split(2), y.split(2), strict=True)))
    influence = kfs.Influence(kfs.EKFAC(train))
    expected = influence.scores(queries, train)
    cost = influence.cost(queries, train)
    each = {phase.name: phase for phase in cost.phases}["queries times the inverse"].nbytes // queries.num_data
    sizes: list[int] = []
    original = Stream.chunks

    def noted(self: Stream) -> Any:
        for chunk in original(self):
            sizes.append(len(chunk))
            yield chunk

    monkeypatch.setattr(Stream, "chunks", noted)
    close(influence.scores(queries, train, memory=most * each), expected)
    assert sizes == [min(most, 6 - start) for start in range(0, 6, most)]


@pytest.mark.parametrize("memory", [1, 5_000, 2**30])
def test_passes(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of passes over the training data and of bytes are those that `cost` predicts."""
    queries, train = both()
    influence = kfs.Influence(kfs.EKFAC(train))
    cost = influence.cost(queries, train, memory=memory)
    assert isinstance(cost, Cost)
    starts: list[int] = []
    original = Stream.train

    def counted(self: Stream) -> Any:
        starts.append(0)
        return original(self)

    monkeypatch.setattr(Stream, "train", counted)
    influence.scores(queries, train, memory=memory)
    assert cost.passes == len(starts)
    each = sum(block.shape[1] * block.shape[2] for block in cost.blocks) * 8
    assert cost.passes == ceil(3 / max(1, min(3, memory // each)))
    by_name = {phase.name: phase for phase in cost.phases}
    assert by_name["queries times the inverse"].nbytes == min(3, max(1, memory // each)) * each
    assert by_name["products"].nbytes == 3 * 6 * 8


def test_operations_are_those_that_run(problem: Any) -> None:
    """PyTorch counts the operations of matrix products, for rows; in-place products of matrices are not counted."""
    queries, train, _ = problem
    influence = kfs.Influence(kfs.KFAC(train), DAMPING, "factored")
    cost = influence.cost(queries, train)
    with FlopCounterMode(display=False) as counter:
        influence.scores(queries, train)
    # No gradient is sent back through the first layer; in addition, a few examples are audited.
    first = 2 * NUM_DATA * WIDTH * (WIDTH + 1)
    assert 0.9 * (cost.flops - first) < counter.get_total_flops() < 1.1 * (cost.flops - first)


@pytest.mark.parametrize("settings", [{}, {"rank": 2}, {"rank": 4, "compression": "projected"}], ids=str)
@pytest.mark.parametrize("name", ["mlp", "operators: cnn", "many positions"])
def test_size_of_an_index(name: str, settings: Any) -> None:
    """`cost` predicts it to the byte, except for self-scores."""
    train = both()[1] if name == "mlp" else made(name).risk()
    influence = kfs.Influence(kfs.EKFAC(train), DAMPING)
    cost = influence.cost(train, train, **settings, dtype=torch.bfloat16)
    index = influence.index(train, **settings, dtype=torch.bfloat16)
    assert cost.index_bytes == index.nbytes - train.num_data * 8
    assert {block.name: block.form for block in cost.blocks} == dict(index.forms)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"rank": 0}, r"rank is 0. Use a positive integer"),
        ({"compression": "svd"}, r"compression is 'svd'"),
        ({"dtype": torch.float16}, r"dtype is torch.float16. Use torch.float32"),
    ],
    ids=str,
)
def test_index_that_does_not_exist_has_no_cost(setting: Any, message: str) -> None:
    """`cost` refuses the same arguments as `index`, also if the compression has no rank."""
    queries, train = both()
    influence = kfs.Influence(kfs.EKFAC(train))
    with pytest.raises(ModelError, match=message):
        influence.cost(queries, train, **setting)
    with pytest.raises(ModelError, match=message):
        influence.index(train, **setting)


def test_tables_cost_no_products() -> None:
    train = of_tokens(Tied(tied=False))
    influence = kfs.Influence(kfs.EKFAC(train))
    cost = influence.cost(train, train)
    by_name = {phase.name: phase for phase in cost.phases}
    # Forward and backward pass of the head alone: two products with 3 x 5 numbers each, for six examples.
    assert by_name["gradients of queries"].flops == 6 * 2 * 2 * 15
    assert "<table>" in cost._repr_html_()
    assert "1 pass over the training data; an index takes" in repr(cost)
