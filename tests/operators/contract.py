"""The contract of every linear operator, given its dense value."""

import torch
from torch import Tensor

from kfs.operators import LinearOperator

# Float64 round-off of some ten thousand operations per entry.
TOLERANCE = 1e-10


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE, atol=TOLERANCE)


def check_contract(A: LinearOperator, dense: Tensor) -> None:
    """Check products in all forms, transpose, linearity, algebra, flattenings and SciPy against a dense matrix."""
    assert A.shape == dense.shape
    rows, columns = A.shape
    v, w = torch.randn(2, columns, dtype=A.dtype)
    V = torch.randn(columns, 3, dtype=A.dtype)
    u = torch.randn(rows, dtype=A.dtype)

    close(A @ v, dense @ v)
    close(A @ V, dense @ V)
    assert (A @ V[:, :0]).shape == (rows, 0)
    close(A.T @ u, dense.T @ u)
    close(A.T.T @ v, dense @ v)
    if A.symmetric:
        close(dense, dense.T)
    close(A @ (2 * v - w), 2 * (A @ v) - A @ w)

    as_dict = {name: t.squeeze(0) for name, t in A.domain.unflatten(v.unsqueeze(0)).items()}
    answer = A @ as_dict
    assert list(answer) == list(A.codomain.shapes)
    assert {name: t.shape for name, t in answer.items()} == A.codomain.shapes
    close(torch.cat([t.flatten() for t in answer.values()]), dense @ v)

    check_forms(A, dense, V)

    close(A.to_dense(), dense)
    places_rows, places_columns = A.codomain.order("cvec"), A.domain.order("cvec")
    close(A.to_dense("cvec"), dense[places_rows][:, places_columns])
    close(torch.from_numpy(A.to_scipy() @ v.numpy()), dense @ v)
    close(torch.from_numpy(A.to_scipy().T @ u.numpy()), dense.T @ u)

    close((A + 2 * A) @ v, 3 * (dense @ v))
    close((A - A) @ v, torch.zeros(rows, dtype=A.dtype))
    close((-A) @ v, -(dense @ v))
    close((A / 4) @ v, (dense @ v) / 4)
    close((A - 3 * A) @ v, -2 * (dense @ v))
    close(u @ A, dense.T @ u)
    close(torch.stack([u, 2 * u]) @ A, torch.stack([u, 2 * u]) @ dense)
    close((A.T @ A) @ v, dense.T @ (dense @ v))
    close((A.T @ A).T @ v, dense.T @ (dense @ v))
    close((A.T @ A).shift(0.5).T @ v, dense.T @ (dense @ v) + 0.5 * v)
    close((2 * A).T @ u, 2 * (dense.T @ u))
    close((A + A).T @ u, 2 * (dense.T @ u))
    if rows == columns and A.domain == A.codomain:
        close(A.shift(0.5) @ v, dense @ v + 0.5 * v)
    for name in list(A.domain.shapes)[:2]:
        row_names = list(A.codomain.shapes)[-1:]
        block = A.submatrix(row_names, [name])
        row_start = rows - A.codomain.sizes[row_names[0]]
        start = sum(
            size
            for n, size in A.domain.sizes.items()
            if list(A.domain.shapes).index(n) < list(A.domain.shapes).index(name)
        )
        expected = dense[row_start:, start : start + A.domain.sizes[name]]
        close(block.to_dense(), expected)
        close(block.T.to_dense(), expected.T)
    check_index(A, dense)


def check_forms(A: LinearOperator, dense: Tensor, V: Tensor) -> None:
    """Check dictionaries and lists, of single vectors and of several, multiplied from both sides."""
    several = A.domain.unflatten(V.T)
    product, transposed = dense @ V, dense.T @ torch.ones_like(dense[:, 0])
    answers = A @ several
    assert list(answers) == list(A.codomain.shapes)
    assert {name: t.shape for name, t in answers.items()} == {n: (V.shape[1], *s) for n, s in A.codomain.shapes.items()}
    close(torch.cat([t.flatten(1) for t in answers.values()], 1), product.T)
    in_order = A @ list(several.values())
    assert isinstance(in_order, list)
    close(torch.cat([t.flatten(1) for t in in_order], 1), product.T)
    single = A @ [t[0] for t in several.values()]
    assert [t.shape for t in single] == list(A.codomain.shapes.values())
    close(torch.cat([t.flatten() for t in single]), product[:, 0])
    assert all(len(t) == 0 for t in (A @ {name: t[:0] for name, t in several.items()}).values())
    one_axis = A @ {name: t[:1] for name, t in several.items()}
    assert all(len(t) == 1 for t in one_axis.values())  # one vector with an axis for several keeps this axis
    ones = {name: torch.ones(shape, dtype=A.dtype) for name, shape in A.codomain.shapes.items()}
    for left in (ones @ A, dict(zip(A.domain.shapes, list(ones.values()) @ A, strict=True))):
        close(torch.cat([t.flatten() for t in left.values()]), transposed)


def check_index(A: LinearOperator, dense: Tensor) -> None:
    """Check submatrices by integers, masks and slices."""
    rows, columns = A.shape
    some = torch.tensor([rows - 1, 0, -1])
    mask = torch.arange(columns) % 2 == 0
    close(A.submatrix(some, mask).to_dense(), dense[some][:, mask])
    close(A.submatrix(some, mask).T.to_dense(), dense[some][:, mask].T)
    close(A.submatrix(slice(1, None, 2), [0]).to_dense(), dense[1::2, :1])
    close(A.submatrix(range(1), list(A.domain.shapes)).to_dense(), dense[:1])
    if A.domain == A.codomain:
        block = A.submatrix([0, columns - 1])
        assert block.symmetric == A.symmetric
        close(block.to_dense(), dense[[0, -1]][:, [0, -1]])
