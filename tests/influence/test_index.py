"""An index: its scores against brute force, for all stored forms, and the error of compression."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kfs
from kfs.errors import ModelError
from kfs.factors import exact_blocks
from kfs.factors.accumulate import UnitVectors
from kfs.influence import stored
from kfs.influence.ways import truncated
from tests.factors.one_by_one import close, flat, gradients
from tests.factors.test_gradient_streams import uncovered_model
from tests.influence.test_influence import both
from tests.influence.test_scores import DAMPING, PROBLEMS, brute_force, instance

# Rows, unit vectors, groups, several uses, ragged rows, matrices, tables of experts.
MODELS = (
    "linear",
    "embedding",
    "operators: cnn",
    "convolution: groups",
    "tied",
    "graphs, no multiple",
    "operators: transformer",
    "many positions",
)
KINDS: tuple[tuple[Any, Any], ...] = (
    (kfs.EKFAC, "exact"),
    (kfs.KFAC, "exact"),
    (kfs.KFAC, "factored"),
    (exact_blocks, "exact"),
)


def made(name: str) -> Any:
    return instance(next(problem for problem in PROBLEMS if problem.name == name))


@pytest.mark.parametrize("place", range(2 * len(MODELS)), ids=lambda place: MODELS[place % len(MODELS)])
def test_all_numbers(place: int, tmp_path: Path) -> None:
    """Scores of an index without compression equal those of brute force, from files and from memory."""
    one = made(MODELS[place % len(MODELS)])
    # Exact blocks have no groups, and their parameters no repeated uses.
    kinds = KINDS if place % len(MODELS) in {0, 1} else KINDS[:3]
    make, method = kinds[(place + place // len(MODELS)) % len(kinds)]
    train, queries = one.risk([0], [1, 2, 3]), one.risk([2, 0, 1], [3])
    influence = kfs.Influence(make(one.risk()), DAMPING, method)
    G = flat(gradients(one))
    expected = brute_force(influence.inverse, G[[2, 0, 1, 3]], G)
    file = tmp_path / "index" if place % 2 else None
    index = influence.index(train, dtype=torch.float64, file=file, shard_bytes=0)
    close(index.scores(queries), expected)
    close(index.self_scores(), brute_force(influence.inverse, G, G).diagonal())
    close(torch.stack(list(index.scores(queries, by="block").values())).sum(0), expected)
    top = index.top(queries, 2, memory=1)
    close(top.helpful.values, expected.sort(1, descending=True).values[:, :2])
    for normalize in ("self", "cosine"):
        close(index.scores(queries, normalize=normalize), influence.scores(queries, train, normalize=normalize))
    assert index.error < 1e-12  # round-off of float64
    assert index.nbytes > 0


def test_parameters_that_no_rule_covers() -> None:
    """Their gradients are matrices, by autograd; damping inverts a diagonal."""
    X, y = torch.randn(6, 3, dtype=torch.float64), torch.randint(3, (6,))
    risk = kfs.EmpiricalRisk(uncovered_model(), nn.CrossEntropyLoss(), [(X[:4], y[:4]), (X[4:], y[4:])])
    influence = kfs.Influence(kfs.KFAC(risk, uncovered="diagonal"), 0.3)
    index = influence.index(risk, dtype=torch.float64, compression="projected", rank=4)
    assert index.forms["V"] == "projected"
    whole = influence.index(risk, dtype=torch.float64)
    assert whole.forms["V"] == "rotated"
    close(whole.scores(risk), influence.scores(risk, risk))
    low = influence.index(risk, dtype=torch.float64, rank=100)
    close(low.scores(risk), influence.scores(risk, risk))


def matrices(one: Any, G: Tensor, layout: Any) -> Tensor:
    """Return gradients of a block as matrices, `[n, groups, d_B, d_A]`."""
    by_name, start = {}, 0
    for name, p in one.risk().params.items():
        by_name[name] = G[:, start : start + p.numel()].reshape(len(G), *p.shape)
        start += p.numel()
    return layout.matrix(by_name)  # type: ignore[no-any-return]


def by_blocks(influence: kfs.Influence, one: Any, queries: Tensor, change: Any) -> Tensor:
    """Compute scores from the dense inverse of every block, with changed matrices of training data."""
    G = flat(gradients(one))
    total = torch.zeros(len(queries), len(G), dtype=G.dtype)
    for stack in influence.inverse.stacks:
        for layout, part in stack.slices():
            structure: Any = stack.structure[part]
            dense = structure.to_dense()
            M, P = (matrices(one, rows, layout) for rows in (G, queries))
            changed = change(M, structure, dense)
            for group in range(layout.groups):
                total += P[:, group].flatten(1) @ dense[group] @ changed[:, group].flatten(1).T
    return total


@pytest.mark.parametrize("name", ["operators: cnn", "convolution: groups", "many positions", "operators: transformer"])
@pytest.mark.parametrize("method", ["exact", "factored"])
def test_low_rank(name: str, method: Any) -> None:
    """Every matrix is replaced by its best approximation of rank one, by LAPACK, in a loop."""
    one = made(name)
    influence = kfs.Influence(kfs.KFAC(one.risk()), DAMPING, method)
    index = influence.index(one.risk([0], [1, 2, 3]), rank=1, dtype=torch.float64)
    compressed = {name for name, form in index.forms.items() if form == "low rank"}
    assert compressed
    shapes = {layout.name: layout.matrix_shape for stack in influence.K.stacks for layout in stack.layouts}

    def change(M: Tensor, *_: Any) -> Tensor:
        sizes = {shapes[block] for block in compressed}
        if tuple(M.shape[1:]) not in sizes:
            return M
        result = torch.zeros_like(M)
        for n in range(len(M)):
            for group in range(M.shape[1]):
                U, s, Vh = torch.linalg.svd(M[n, group], full_matrices=False)
                result[n, group] = s[0] * torch.outer(U[:, 0], Vh[0])
        return result

    G = flat(gradients(one))
    expected = by_blocks(influence, one, G, change)
    full = by_blocks(influence, one, G, lambda M, *_: M)
    close(index.scores(one.risk()), expected)
    assert float((expected - full).norm()) > 1e-6 * float(full.norm())
    # Examples 1 to 3 are compared within their batch; example 0 is alone.
    others = ~torch.eye(3, dtype=torch.bool)
    wrong = (expected - full)[1:, 1:][others].square().sum() + (expected - full)[0, 0].square()
    norm = full[1:, 1:][others].square().sum() + full[0, 0].square()
    assert index.error == pytest.approx(float((wrong / norm).sqrt()), rel=1e-6)


@pytest.mark.parametrize("name", ["operators: cnn", "convolution: groups", "linear", "operators: transformer"])
@pytest.mark.parametrize(("make", "method"), KINDS[:3])
def test_projected(name: str, make: Any, method: Any) -> None:
    """In the eigenbasis, all coordinates are set to zero except for those with the smallest eigenvalues."""
    one = made(name)
    influence = kfs.Influence(make(one.risk()), DAMPING, method)
    index = influence.index(one.risk([0, 1], [2, 3]), rank=2, compression="projected", dtype=torch.float64)
    assert "projected" in index.forms.values()
    shapes = {layout.name: layout.matrix_shape for stack in influence.K.stacks for layout in stack.layouts}
    exact = {shapes[block] for block, form in index.forms.items() if form != "projected"}

    def change(M: Tensor, structure: Any, dense: Tensor) -> Tensor:
        if tuple(M.shape[1:]) in exact:
            return M
        basis = structure.eigenbasis()
        Q = torch.stack([torch.kron(b, a) for b, a in zip(basis.Q_B.to_dense(), basis.Q_A.to_dense(), strict=True)])
        inside = torch.einsum("ngi,gij->ngj", M.flatten(2), Q)
        values = basis.values.flatten(1)  # some are equal, and their order is arbitrary
        close(torch.einsum("gij,gj,gkj->gik", Q, values, Q), dense)
        keep = torch.zeros_like(values).flatten()
        keep[values.flatten().topk(2, largest=False).indices] = 1
        return torch.einsum("ngj,gij->ngi", inside * keep.reshape(values.shape), Q).reshape(M.shape)

    G = flat(gradients(one))
    expected = by_blocks(influence, one, G, change)
    close(index.scores(one.risk()), expected)
    close(index.scores(one.risk(), memory=1), expected)
    close(index.self_scores(), brute_force(influence.inverse, G, G).diagonal())
    full = by_blocks(influence, one, G, lambda M, *_: M)
    assert float((expected - full).norm()) > 1e-6 * float(full.norm())


def test_wrong_coordinates_show_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeping the least important coordinates gives a larger reported error than keeping the most important ones."""
    queries, train = both()
    influence = kfs.Influence(kfs.EKFAC(train))
    settings: Any = {"rank": 3, "compression": "projected", "dtype": torch.float64}
    right = influence.index(train, **settings)
    assert 0 < right.error < 1
    better = influence.index(train, **settings | {"rank": 6})
    assert better.error < right.error
    least = lambda structure, rank: structure.values.flatten().topk(rank).indices  # noqa: E731
    monkeypatch.setattr("kfs.influence.index.leading_coordinates", least)
    wrong = influence.index(train, **settings)
    assert wrong.error > 1.2 * right.error
    full = influence.scores(queries, train)
    errors = [float((index.scores(queries) - full).norm()) for index in (better, right, wrong)]
    assert errors == sorted(errors)


def test_dtypes() -> None:
    """Smaller dtypes have a larger error, of the size of their round-off."""
    queries, train = both()
    influence = kfs.Influence(kfs.EKFAC(train))
    expected = influence.scores(queries, train)
    found = [influence.index(train, dtype=dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16)]
    # Some multiples of each dtype's round-off, since a score is a sum of products: 1e-16, 6e-8 and 4e-3.
    for index, eps in zip(found, (1e-14, 1e-6, 3e-2), strict=True):
        assert index.error <= eps
        assert float((index.scores(queries) - expected).norm() / expected.norm()) <= eps
    assert [index.error for index in found] == sorted(index.error for index in found)
    sizes = [index.nbytes for index in found]
    # Self-scores of six examples are kept in float64.
    assert sizes[0] - 48 == 2 * (sizes[1] - 48) == 4 * (sizes[2] - 48)


def test_quantities_and_layers() -> None:
    queries, train = both()
    influence = kfs.Influence(kfs.EKFAC(train))
    index = influence.index(train, of_train="margin", dtype=torch.float64)
    close(
        index.scores(queries, of="log-probability"),
        influence.scores(queries, train, of="log-probability", of_train="margin"),
    )
    top = index.top(queries, 2, of="margin")
    assert torch.equal(
        top.helpful.indices, influence.top(queries, train, 2, of="margin", of_train="margin").helpful.indices
    )
    parts, expected = index.scores(queries, by="layer"), influence.scores(queries, train, by="layer", of_train="margin")
    for name in ("0", "2"):
        close(parts[name], expected[name])


def test_what_is_smallest_is_stored() -> None:
    """Rows of many positions are larger than a matrix; a rank that saves no memory is not used."""
    one = made("many positions")
    influence = kfs.Influence(kfs.KFAC(one.risk()), DAMPING)
    (batch,) = kfs.per_datum(one.risk())
    for rank in (None, 1000):
        for name, form in influence.index(one.risk(), rank=rank).forms.items():
            groups, d_B, d_A = batch.blocks[name].layout.matrix_shape
            assert groups == 1
            assert form == ("rotated" if batch.blocks[name].shared * (d_A + d_B) > d_A * d_B else "rows")
    factored = kfs.Influence(kfs.KFAC(one.risk()), DAMPING, "factored")
    assert set(factored.index(one.risk()).forms.values()) == {"matrices", "rows"}
    close(factored.index(one.risk(), dtype=torch.float64).scores(one.risk()), factored.scores(one.risk(), one.risk()))
    _, train = both()
    assert set(kfs.Influence(kfs.EKFAC(train)).index(train, rank=2).forms.values()) == {"rows"}


def test_unit_vectors_stay_indices() -> None:
    one = made("embedding")
    influence = kfs.Influence(kfs.EKFAC(one.risk()), DAMPING)
    (batch, *_) = kfs.per_datum(one.risk(), blocks=influence.K)
    (block,) = [block for block in batch.blocks.values() if any(any(use.units) for use in block.uses)]
    state = stored.Stored("rows").state(block, torch.bfloat16, influence.inverse.stacks[0].structure)
    sides = [side for use in state["uses"] for side in use.values()]
    assert any("index" in side for side in sides)
    again = stored.restored(state, block.layout, 4, torch.float64, block.device)
    assert any(isinstance(side, UnitVectors) for part in again.parts for side in (part.x, part.g))


def test_singular_vectors_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a few examples give the same result; the norm of the remainder is the norm of the difference."""
    one = made("operators: cnn")
    (batch,) = kfs.per_datum(one.risk())
    for name, block in batch.blocks.items():
        at_once = truncated(block, 1)
        monkeypatch.setattr("kfs.influence.ways.at_a_time", lambda *_: 1)
        in_parts = truncated(block, 1)
        monkeypatch.undo()
        close(in_parts.kept.dense(), at_once.kept.dense())
        close(at_once.left_out, (block.dense() - at_once.kept.dense()).flatten(1).norm(dim=1))
        assert name != "0" or float(at_once.left_out.max()) > 1e-3
    everything = truncated(block, 100)
    assert everything.kept is block
    assert not everything.left_out.any()


def test_refused() -> None:
    _, train = both()
    influence = kfs.Influence(exact_blocks(train))
    with pytest.raises(ModelError, match=r"inverse of block '0' is a Dense matrix, which has no basis"):
        influence.index(train, rank=1, compression="projected")
    with pytest.raises(ModelError, match=r"rank is 0. Use a positive integer"):
        influence.index(train, rank=0)
    with pytest.raises(ModelError, match=r"compression is 'svd'"):
        influence.index(train, rank=1, compression="svd")  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"dtype is torch.float16. Use torch.float32"):
        influence.index(train, dtype=torch.float16)
    with pytest.raises(ModelError, match=r"shard_bytes is -1"):
        influence.index(train, shard_bytes=-1)
    with pytest.raises(ModelError, match=r"no scores by token.*Find training data with index.top"):
        influence.index(train).scores(train, by="token")  # type: ignore[call-overload]
    with pytest.raises(ModelError, match=r"by is 'tokens'"):
        influence.index(train).scores(train, by="tokens")  # type: ignore[call-overload]
    with pytest.raises(ModelError, match=r"query_rank is None. Use a positive integer.$"):
        influence.query_error(train, train, None)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"query_rank is True"):
        influence.scores(train, train, query_rank=True)


def test_looks() -> None:
    _, train = both()
    text = str(kfs.Influence(kfs.EKFAC(train)).index(train))
    assert text.startswith("Index of 6 gradients of Sequential with CrossEntropyLoss (mean): 2 blocks, float32\n")
    assert "B in memory, 1 shard, relative error of scores below 1e-05" in text
    rough = kfs.Influence(kfs.EKFAC(train)).index(train, dtype=torch.bfloat16)
    assert "relative error of scores 0.00" in repr(rough)
