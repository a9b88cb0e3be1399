"""Operators from given tensors: a dense matrix, or a weighted sum of outer products of vectors."""

import torch
from torch import Tensor

from kfs.display.describe import counted
from kfs.errors import DtypeError, ShapeError
from kfs.operators.linear_operator import LinearOperator
from kfs.operators.space import Columns, Space, Vector


class Dense(LinearOperator):
    """A dense matrix as an operator, which can be combined with other operators.

    The operator counts as symmetric if the matrix equals its transpose up to round-off.

    Args:
        matrix: `[rows, columns]`.
        domain: Space of input vectors, such as `G.domain` of another operator. By default flat vectors.
        codomain: Space of output vectors. By default the domain if the matrix is square, and flat vectors if not.

    Raises:
        ShapeError: If the matrix is not two-dimensional, or does not match the spaces.
        DtypeError: If the matrix has integers or complex numbers.

    Example:
        >>> A = Dense(torch.tensor([[2.0, 1.0], [1.0, 3.0]]))
        >>> A
        Dense: 2 x 2, float32 on cpu, symmetric
        >>> (A @ torch.tensor([1.0, 0.0])).tolist()
        [2.0, 1.0]
    """

    def __init__(self, matrix: Tensor, domain: Space | None = None, codomain: Space | None = None) -> None:
        if not isinstance(matrix, Tensor) or matrix.ndim != 2:
            found = f"shape {list(matrix.shape)}" if isinstance(matrix, Tensor) else f"a {type(matrix).__name__}"
            raise ShapeError(f"The matrix is {found}.", "Pass a tensor of shape [rows, columns].")
        _check_floating(matrix, "The matrix is")
        rows, columns = matrix.shape
        domain = domain or _flat(columns, matrix)
        codomain = codomain or (domain if rows == columns else _flat(rows, matrix))
        super().__init__(domain, codomain)
        if self.shape != (rows, columns) or not self.dtype == domain.dtype == matrix.dtype:
            raise ShapeError(
                f"The matrix has shape {[rows, columns]} and {matrix.dtype}, but the spaces are for "
                f"{list(self.shape)} and {self.dtype}.",
                "Pass spaces of the right size and dtype, or none.",
            )
        self.matrix = matrix.detach()
        self.symmetric = domain == codomain and _is_symmetric(self.matrix)

    def multiply(self, columns: Columns) -> Columns:
        """Multiply columns by the matrix."""
        return self.codomain.unflatten(self.domain.flatten(columns) @ self.matrix.T)

    def multiply_transposed(self, columns: Columns) -> Columns:
        """Multiply columns by the transposed matrix."""
        return self.domain.unflatten(self.codomain.flatten(columns) @ self.matrix)


class OuterProducts(LinearOperator):
    """A sum of outer products, `sum_k weights[k] v_k v_k^T`, such as an empirical Fisher of stored gradients.

    Args:
        vectors: Several vectors: columns `[size, n]`, or a dictionary of tensors `[n, *shape]`.
        weights: One number for each vector, `[n]`. By default ones.
        space: Space of the vectors, such as `G.domain` of another operator. By default it is derived from `vectors`.

    Raises:
        ShapeError: If only a single vector is given, or the number of weights is not the number of vectors.
        DtypeError: If vectors have another type, or integers or complex numbers.

    Example:
        >>> A = OuterProducts(torch.tensor([[1.0, 0.0], [2.0, 1.0]]), torch.tensor([1.0, 10.0]))
        >>> A
        OuterProducts of 2 vectors: 2 x 2, float32 on cpu, symmetric
        >>> A.to_dense().tolist()
        [[1.0, 2.0], [2.0, 14.0]]
    """

    symmetric = True

    def __init__(self, vectors: Vector, weights: Tensor | None = None, space: Space | None = None) -> None:
        space = space or _space_of(vectors)
        super().__init__(space, space)
        columns, form = space.read(vectors)
        if form not in {"matrix", "dicts", "lists"}:
            raise ShapeError(
                f"The vectors are a single {form}.", "Pass columns [size, n], or tensors [n, *shape] by name."
            )
        self.vectors = space.flatten(columns)  # [n, size]
        _check_floating(self.vectors, "The vectors are")
        self.weights = self.vectors.new_ones(len(self.vectors)) if weights is None else weights.detach()
        if self.weights.shape != (len(self.vectors),) or self.weights.dtype != space.dtype:
            raise ShapeError(
                f"weights has shape {list(self.weights.shape)} and {self.weights.dtype}, for {len(self.vectors)} "
                f"vectors of {space.dtype}.",
                "Pass one number for each vector, of their dtype.",
            )

    @property
    def of(self) -> str:
        """Number of vectors, as text."""
        return counted(len(self.vectors), "vector")

    def multiply(self, columns: Columns) -> Columns:
        """Sum the vectors, weighted by their weights and their inner products with the columns."""
        inner = self.domain.flatten(columns) @ self.vectors.T
        return self.domain.unflatten((inner * self.weights) @ self.vectors)

    def multiply_transposed(self, columns: Columns) -> Columns:
        """Multiply columns by the operator, which is symmetric."""
        return self.multiply(columns)


def _check_floating(t: Tensor, subject: str) -> None:
    if not t.is_floating_point():
        raise DtypeError(f"{subject} {t.dtype}.", "Convert to real numbers first, such as with .double().")


def _is_symmetric(matrix: Tensor) -> bool:
    """Return whether a square matrix equals its transpose, up to round-off from computing it as a product."""
    if not matrix.numel():
        return True
    asymmetry = (matrix - matrix.T).abs().max()
    return bool(asymmetry <= 10 * torch.finfo(matrix.dtype).eps * matrix.abs().max())


def _flat(size: int, like: Tensor) -> Space:
    return Space({"x": (size,)}, like.dtype, like.device)


def _space_of(vectors: object) -> Space:
    """Return a space for vectors that are given as a matrix of columns or as a dictionary."""
    if isinstance(vectors, Tensor):
        return _flat(len(vectors), vectors)
    if not isinstance(vectors, dict) or not vectors or not all(isinstance(t, Tensor) for t in vectors.values()):
        raise DtypeError(
            f"Outer products of a {type(vectors).__name__} need a space.",
            "Pass columns [size, n], or a dictionary of tensors [n, *shape].",
        )
    some = next(iter(vectors.values()))
    return Space({name: t.shape[1:] for name, t in vectors.items()}, some.dtype, some.device)
