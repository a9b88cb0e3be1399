"""Gradients as rows: their algebra against explicit matrices, and the operation counts that choose between both."""

from itertools import product

import pytest
import torch
from torch import Tensor

from kfs.factors.accumulate.row_products import (
    PlainVectors,
    RowProducts,
    RowVectors,
    UnitVectors,
    cheaper,
    cheaper_within,
    joined_products,
    matrix_inner,
    matrix_inner_by_row,
)
from tests.factors.one_by_one import close


def plain(groups: int, num_data: int, shared: int, size: int, last: float | None = None) -> PlainVectors:
    values = torch.randn(groups, num_data, shared, size - (last is not None), dtype=torch.float64)
    return PlainVectors(values, last)


def unit(num_data: int, shared: int, size: int) -> UnitVectors:
    return UnitVectors(torch.randint(size, (num_data, shared)), size, torch.float64)


def made(kind: str, num_data: int, shared: int) -> RowProducts:
    """Return rows with `d_A = 4`, `d_B = 3`."""
    torch.manual_seed(num_data + shared)
    if kind == "groups":
        return RowProducts(plain(2, num_data, shared, 4), plain(2, num_data, shared, 3))
    x: dict[str, RowVectors] = {
        "plain": plain(1, num_data, shared, 4),
        "bias": plain(1, num_data, shared, 4, 1.0),
        "unused bias": plain(1, num_data, shared, 4, 0.0),
        "tokens": unit(num_data, shared, 4),
        "tokens on the other side": plain(1, num_data, shared, 4),
    }
    g = unit(num_data, shared, 3) if kind == "tokens on the other side" else plain(1, num_data, shared, 3)
    return RowProducts(x[kind], g)


def matrices(rows: RowProducts) -> Tensor:
    """Sum outer products by loops over examples and rows."""
    x, g = rows.x.dense(), rows.g.dense()
    result = torch.zeros(rows.num_data, x.shape[0], g.shape[3], x.shape[3], dtype=torch.float64)
    for n, group, s in product(range(rows.num_data), range(x.shape[0]), range(rows.shared)):
        result[n, group] += torch.outer(g[group, n, s], x[group, n, s])
    return result


KINDS = ("plain", "bias", "unused bias", "tokens", "tokens on the other side")
PAIRS = [*product(KINDS, KINDS), ("groups", "groups")]


@pytest.fixture(params=[False, True], ids=["together", "a few at a time"])
def few(request: pytest.FixtureRequest) -> None:
    """Compute all gradients together, or a few at a time."""
    if request.param:
        request.getfixturevalue("small_chunks")


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(("mine", "theirs"), PAIRS)
@pytest.mark.parametrize("shared", [(1, 1), (2, 5)])
def test_inner_products(mine: str, theirs: str, shared: tuple[int, int]) -> None:
    one, other = made(mine, 3, shared[0]), made(theirs, 4, shared[1])
    G, H = matrices(one), matrices(other)
    close(torch.cat(list(one.matrices())), G)
    close(one.inner(other), torch.einsum("ngij,mgij->nm", G, H))
    same = made(theirs, 3, shared[1])
    close(one.inner_within(same), (G * matrices(same)).flatten(1).sum(1))
    shares = torch.stack(
        [
            torch.einsum("ngij,gmi,gmj->nm", G, other.g.dense()[:, :, t], other.x.dense()[:, :, t])
            for t in range(shared[1])
        ],
        2,
    )
    close(one.inner(other, by_row=True), shares)
    close(matrix_inner_by_row(G, other), shares)
    close(shares.sum(2), one.inner(other))
    if all(isinstance(side, PlainVectors) for side in (other.x, other.g)):
        close(matrix_inner(G, [other, other]), 2 * torch.einsum("ngij,mgij->nm", G, H))


@pytest.mark.parametrize("kind", [*KINDS, "groups"])
def test_other_bases(kind: str) -> None:
    rows = made(kind, 3, 2)
    Q_A, Q_B = (torch.randn(rows.x.groups, d, d, dtype=torch.float64) for d in (4, 3))
    turned = Q_B.transpose(1, 2) @ matrices(rows) @ Q_A
    close(matrices(rows.times(Q_A, Q_B)), turned)
    close(matrices(rows.times(None, None)), matrices(rows))
    assert rows.times(Q_A, None).like.dtype == torch.float64
    assert rows.to(torch.float32).like.dtype == torch.float32
    close(matrices(rows.some(slice(1, 3))), matrices(rows)[1:])


@pytest.mark.parametrize(
    ("first", "second"), [("tokens", "tokens"), ("bias", "bias"), ("bias", "unused bias"), ("plain", "tokens")]
)
def test_joined(first: str, second: str) -> None:
    """Examples with fewer rows are padded with zero rows; unit vectors stay unit vectors."""
    parts = [made(first, 2, 1), made(second, 3, 4)]
    both = joined_products(parts)
    close(matrices(both), torch.cat([matrices(part) for part in parts]))
    assert isinstance(both.x, UnitVectors) == (first == second == "tokens")
    assert joined_products(parts[:1]).num_data == 2
    assert isinstance(RowProducts(unit(2, 1, 4), unit(2, 1, 3)).like, Tensor)


def test_counts() -> None:
    """For one row each, `d_A + d_B` multiplications are fewer than `d_A d_B`; for many rows they are not."""
    one, many = (1, 1), (100, 100)
    assert cheaper((10, 10), one, (30, 20), 600) == "rows"
    assert cheaper((10, 10), many, (30, 20), 600) == "matrices"
    # All pairs by rows: 2 * 2 * 4 * 4 * 5 = 320. By matrices of 6 numbers: 24, and 96 to form them.
    assert cheaper((2, 2), (4, 4), (3, 2), 6) == "matrices"
    # By rows 20. By matrices of 6 numbers: 24 for products, 24 more to form them.
    assert cheaper((2, 2), one, (3, 2), 6) == "rows"
    # Unit vectors are compared by index; a table of a thousand rows is never formed.
    assert cheaper((10, 10), (64, 64), (1, 16), 16_000) == "rows"
    assert cheaper_within(one, (30, 20), 600) == "rows"
    assert cheaper_within(many, (30, 20), 600) == "matrices"
