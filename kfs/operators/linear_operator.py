"""The base class of linear operators, and their sums, products, transposes and submatrices.

Operators of a risk live in `kfs.operators.curvature`, operators from given tensors in `kfs.operators.matrices`.

A `LinearOperator` multiplies vectors, can be combined with other operators, and can be converted to a dense matrix or
to an operator of SciPy. Contracts, for operators `A`, `B`, numbers `a` and vectors `v` that fit:

    (A @ B) @ v == A @ (B @ v)          (A + B) @ v == A @ v + B @ v        (a * A) @ v == a * (A @ v)
    A.T.T @ v == A @ v                  A.shift(a) @ v == A @ v + a * v     A.to_dense() @ v == A @ v
    v @ A == A.T @ v                    (A - B) @ v == A @ v - B @ v        (A / a) @ v == (A @ v) / a

A vector may be flat, a dictionary like the risk's parameters, or a list of tensors in their order. Several vectors may
be a matrix of columns, or a dictionary or list of tensors with a leading axis, `[n, *shape]`. The product has the same
form.

`DescribedOperator` prints operators: their formula, model and loss, size, settings and cost.

Example:
    >>> import torch
    >>> from kfs import GGN, EmpiricalRisk, Fisher, Hessian, Jacobian
    >>> risk = EmpiricalRisk(torch.nn.Linear(3, 2), torch.nn.MSELoss(), (torch.rand(10, 3), torch.rand(10, 2)))
    >>> risk
    EmpiricalRisk of Linear with MSELoss (mean)
      2 parameters, 8 numbers, float32 on cpu
      1 batch, not counted yet
    >>> Hessian(risk)
    Hessian of Linear with MSELoss (mean): 8 x 8, float32 on cpu, symmetric
      1 batch, not counted yet
      block_diagonal=False, chunk_size=16
      cost: one pass over the data for a product with up to 16 vectors
    >>> GGN(risk, block_diagonal="layer", reuse=True)
    GGN of Linear with MSELoss (mean): 8 x 8, float32 on cpu, symmetric
      1 batch, not counted yet
      block_diagonal='layer', chunk_size=16, reuse=True
      cost: one pass over the data for a product with up to 16 vectors
    >>> Fisher(risk, "type-1", mc_samples=2)
    Fisher of Linear with MSELoss (mean): 8 x 8, float32 on cpu, symmetric
      1 batch, not counted yet
      kind='type-1', mc_samples=2, seed=0, block_diagonal=False, chunk_size=16, reuse=False
      cost: one pass over the data for a product with up to 16 vectors
    >>> Jacobian(risk)
    Jacobian of Linear with MSELoss (mean): 20 x 8, float32 on cpu
      1 batch, 10 examples
      chunk_size=16
      cost: one pass over the data for a product with up to 16 vectors
    >>> Jacobian(risk).T
    Jacobian.T: 8 x 20, float32 on cpu
      Jacobian of Linear with MSELoss (mean): 20 x 8, float32 on cpu
    >>> 2 * (GGN(risk).shift(0.1) @ Hessian(risk))
    2 * ((GGN + 0.1 * Identity) @ Hessian): 8 x 8, float32 on cpu
      GGN of Linear with MSELoss (mean): 8 x 8, float32 on cpu, symmetric
      Identity: 8 x 8, float32 on cpu, symmetric
      Hessian of Linear with MSELoss (mean): 8 x 8, float32 on cpu, symmetric
    >>> GGN(risk).submatrix(["bias"])
    GGN['bias'; 'bias']: 2 x 2, float32 on cpu, symmetric
      GGN of Linear with MSELoss (mean): 8 x 8, float32 on cpu, symmetric
    >>> GGN(risk).submatrix([0, 3, 5], slice(4))
    GGN[rows; columns]: 3 x 4, float32 on cpu
      GGN of Linear with MSELoss (mean): 8 x 8, float32 on cpu, symmetric
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from math import ceil, prod
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, overload

import torch
from torch import Tensor

from kfs.basics.flattening import VecFunction
from kfs.display.charts import draw_matrix
from kfs.display.describe import Described, Description, kind, number, times, vector
from kfs.display.progress import show_progress
from kfs.distributed import Ranks
from kfs.errors import DtypeError, ShapeError, UnknownAttributeError
from kfs.operators.space import Columns, Index, Space, Vector, check_same, is_index
from kfs.runtime.precision import at_least_float32

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from scipy.sparse.linalg import LinearOperator as ScipyOperator

# Attributes that only block-diagonal operators have, and the replacement for all other operators.
_ELSEWHERE = {
    "diagonal": "kfs.operators.diagonal(A)",
    "eigenvalues": "kfs.operators.eigenvalues(A, k)",
    "frobenius_norm": "kfs.operators.squared_frobenius_norm(A).value.sqrt()",
    "inverse": "kfs.operators.Inverse(A.shift(damping))",
    "logdet": "A.to_dense().logdet()",
    "solve": "kfs.operators.solve(A.shift(damping), b)",
    "trace": "kfs.operators.trace(A)",
}


class DescribedOperator(Described):
    """Base class that describes an operator by its class and its attributes.

    Attributes:
        template: Formula in terms of attributes, such as `"{one} + {other}"`. Empty if the class name is the formula.
        shown: Names of attributes that are settings.
    """

    template: ClassVar[str] = ""
    shown: ClassVar[tuple[str, ...]] = ()
    symmetric: bool
    shape: Any
    dtype: Any
    device: Any

    # Hidden from type checkers, which would otherwise accept any attribute.
    if not TYPE_CHECKING:  # pragma: no branch

        def __getattr__(self, name: str) -> object:
            """Raise an error that names the replacement for attributes that only block-diagonal operators have."""
            if name not in _ELSEWHERE:
                return super().__getattribute__(name)  # the usual error
            raise UnknownAttributeError(
                f"{self.formula} has no {name!r}: it is not made of blocks with a known structure.",
                f"Use {_ELSEWHERE[name]}.",
            )

    @property
    def formula(self) -> str:
        """Formula of the operator, such as `"GGN + 0.1 * Identity"`."""
        is_sum = " + " in self.template
        values = {}
        for name, value in vars(self).items():
            has_brackets = f"({{{name}}})" in self.template
            values[name] = _part(value, is_sum or has_brackets)
        return self.template.format(**values) or type(self).__name__

    @property
    def of(self) -> str:
        """Short description of the operator's source, such as model and loss. Empty if there is none."""
        risk = getattr(self, "risk", None)
        return "" if risk is None else str(risk.about)

    @property
    def about(self) -> str:
        """Formula, model and loss, size, dtype and device in one line."""
        of = f" of {self.of}" if self.of else ""
        symmetric = ", symmetric" if self.symmetric else ""
        return f"{self.formula}{of}: {times(self.shape)}, {kind(self.dtype, self.device)}{symmetric}"

    def describe(self) -> Description:
        """Describe the operator and its parts."""
        risk = getattr(self, "risk", None)
        facts = [part.about for part in self._leaves() if part is not self]
        if risk is not None:
            facts.append(risk.about_data)
            facts.append(", ".join(f"{name}={getattr(self, name)!r}" for name in self.shown))
            facts.append(f"cost: one pass over the data for {self.columns_at_once}")
        return Description(self.about, tuple(dict.fromkeys(facts)))

    @property
    def columns_at_once(self) -> str:
        """Number of vectors that are multiplied at once, in words."""
        chunk_size: int = getattr(self, "chunk_size", 1)
        return f"a product with {f'up to {chunk_size} vectors' if chunk_size > 1 else 'one vector'}"

    def _leaves(self) -> "list[DescribedOperator]":
        """Return the leaves of the operator's expression tree: the operator itself if it has no template."""
        parts = [value for value in vars(self).values() if isinstance(value, DescribedOperator)]
        return [leaf for part in parts for leaf in part._leaves()] if self.template else [self]


def _part(value: object, bare: bool) -> Any:
    """Return a value for a template. Formulas of operators get parentheses if needed, unless `bare` is set."""
    if not isinstance(value, DescribedOperator):
        return value
    return value.formula if bare else bracketed(value)


def bracketed(A: DescribedOperator) -> str:
    """Return the operator's formula, in parentheses if it is not a single term."""
    return f"({A.formula})" if " " in A.formula else A.formula


def listed(settings: Mapping[str, object]) -> str:
    """Return settings as one line of text, with operators as formulas and vectors as sizes.

    Example:
        >>> import torch
        >>> listed({"tolerance": 1e-5, "start": {"W": torch.ones(2, 3)}})
        'tolerance=1e-05, start=(1 tensor, 6 numbers, float32 on cpu)'
    """
    return ", ".join(f"{name}={_setting(value)}" for name, value in settings.items())


def _setting(value: object) -> str:
    if isinstance(value, DescribedOperator):
        return value.formula
    return f"({vector(value)})" if isinstance(value, (Tensor, dict, list)) else number(value)


_ALONE = Ranks()


class LinearOperator(DescribedOperator, ABC):
    """A linear map between two spaces of named tensors.

    Attributes:
        domain: Space of input vectors.
        codomain: Space of output vectors.
        symmetric: Whether the operator equals its transpose.
        chunk_size: Number of columns to multiply at once. More columns are faster and take more memory.
    """

    symmetric = False
    chunk_size = 16
    __array_ufunc__ = None  # so that `array @ A` calls `__rmatmul__`, which names the valid types

    _parts: "tuple[LinearOperator, ...]" = ()

    def __init__(self, domain: Space, codomain: Space, *parts: "LinearOperator") -> None:
        self.domain, self.codomain, self._parts = domain, codomain, parts

    @abstractmethod
    def multiply(self, columns: Columns) -> Columns:
        """Multiply at most `chunk_size` columns of the domain by the operator."""

    @abstractmethod
    def multiply_transposed(self, columns: Columns) -> Columns:
        """Multiply columns of the codomain by the transpose."""

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows and columns of the matrix."""
        return self.codomain.size, self.domain.size

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the matrix."""
        return self.codomain.dtype

    @property
    def device(self) -> torch.device:
        """Device of the matrix."""
        return self.codomain.device

    @overload
    def __matmul__(self, v: Tensor) -> Tensor: ...
    @overload
    def __matmul__(self, v: dict[str, Tensor]) -> dict[str, Tensor]: ...
    @overload
    def __matmul__(self, v: list[Tensor]) -> list[Tensor]: ...
    @overload
    def __matmul__(self, v: "LinearOperator") -> "LinearOperator": ...
    def __matmul__(self, v: "Vector | LinearOperator") -> "Vector | LinearOperator":
        """Multiply a flat vector, a matrix of columns, a dictionary or a list, or compose with another operator."""
        if isinstance(v, LinearOperator):
            return self._composed_with(v)
        with self._ranks.agreed("a vector", is_short=True):
            columns, form = self.domain.read(v)
        num_columns = len(next(iter(columns.values())))
        if num_columns == 0:
            empty = torch.zeros(0, self.codomain.size, dtype=self.dtype, device=self.device)
            return self.codomain.write(self.codomain.unflatten(empty), form)
        if num_columns <= self.chunk_size:
            return self.codomain.write(self.multiply(columns), form)
        # Split the columns into chunks of about equal size. A small last chunk would cost as much as a full one.
        parts = []
        num_chunks = ceil(num_columns / self.chunk_size)
        size = ceil(num_columns / num_chunks)
        with show_progress(f"product with {self.formula}", num_chunks, unit="chunk") as line:
            for start in range(0, num_columns, size):
                parts.append(self.multiply({n: t[start : start + size] for n, t in columns.items()}))
                line.advance()
        result = {name: torch.cat([part[name] for part in parts]) for name in self.codomain.shapes}
        return self.codomain.write(result, form)

    @overload
    def __rmatmul__(self, v: Tensor) -> Tensor: ...
    @overload
    def __rmatmul__(self, v: dict[str, Tensor]) -> dict[str, Tensor]: ...
    @overload
    def __rmatmul__(self, v: list[Tensor]) -> list[Tensor]: ...
    def __rmatmul__(self, v: Vector) -> Vector:
        """Compute `v @ A`. A matrix `v` has one vector in each row, `[n, rows of A]`."""
        if isinstance(v, Tensor) and v.ndim == 2:
            rows: Tensor = self.T @ v.T
            return rows.T
        product: Vector = self.T @ v  # type: ignore[operator]
        return product

    @property
    def _ranks(self) -> Ranks:
        """The ranks that share the product: the ranks of a part, or this process alone."""
        for part in self._parts:
            if part._ranks.are_several:
                return part._ranks
        return _ALONE

    def _composed_with(self, other: "LinearOperator") -> "LinearOperator":
        """Return the operator that applies `other` first, and then this operator."""
        return Product(self, other)

    @property
    def T(self) -> "LinearOperator":  # noqa: N802 (as in NumPy and PyTorch)
        """The transpose."""
        return self if self.symmetric else Transposed(self)

    def __add__(self, other: "LinearOperator") -> "LinearOperator":
        return Sum(self, other)

    def __radd__(self, other: object) -> "LinearOperator":
        """Support `sum([A, B, C])`, which starts with zero."""
        return self if isinstance(other, Real) and other == 0 else Sum(self, other)  # type: ignore[arg-type]

    def __sub__(self, other: "LinearOperator") -> "LinearOperator":
        return self + (-1.0 * other)

    def __mul__(self, factor: float) -> "LinearOperator":
        return Scaled(self, factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> "LinearOperator":
        number = _number(divisor)
        if number == 0:
            raise DtypeError("An operator cannot be divided by zero.", "Divide by another number.")
        return self * (1 / number)

    def __neg__(self) -> "LinearOperator":
        return self * -1.0

    def shift(self, delta: float) -> "LinearOperator":
        """Return the operator plus `delta` times the identity."""
        return Sum(self, Scaled(Identity(self.domain), delta))

    def submatrix(self, rows: Index, columns: Index | None = None) -> "LinearOperator":
        """Return the block with the given rows and columns.

        Args:
            rows: Names of parameters in the order of the block's rows; or indices into flat vectors: integers, a mask
                or a slice.
            columns: Names or indices, as for `rows`. If not given, they equal `rows`.

        Raises:
            ModelError: If a parameter does not exist, or no parameter is named.
            ShapeError: If an index is out of range, or the argument has no valid type.
        """
        rows = rows if is_index(rows) else _names(rows)
        columns = rows if columns is None else columns
        if is_index(rows) or is_index(columns):
            return IndexedSubmatrix(self, self.codomain.index(rows), self.domain.index(columns))
        return self._block_of(_names(rows), _names(columns))

    def _block_of(self, rows: Collection[str], columns: Collection[str]) -> "LinearOperator":
        """Return the block with the rows and columns of the named parameters."""
        return Submatrix(self, rows, columns)

    def to_dense(self, flattening: str | VecFunction = "rvec") -> Tensor:
        """Return the dense matrix, computed from products with all columns of the identity.

        Args:
            flattening: How to flatten each parameter: `"rvec"` (as in flat vectors) or `"cvec"`, or one of the
                functions of `kfs.basics.flattening` with these names.

        Returns:
            A matrix with this operator's shape.
        """
        rows, columns = self.codomain.order(flattening), self.domain.order(flattening)
        dense = self @ torch.eye(self.shape[1], dtype=self.dtype, device=self.device)
        return dense[rows][:, columns]

    def plot(self, names: Iterable[str] | None = None, *, most: int = 2000) -> "list[Axes]":
        """Draw the dense matrix as a heat map in a new figure.

        Args:
            names: Parameters to draw the rows and columns of. If not given, all parameters are drawn.
            most: Largest number of rows or columns that is drawn.

        Returns:
            A list with the matplotlib axes.

        Raises:
            ShapeError: If the matrix has more than `most` rows or columns.
        """
        if names is not None:
            names = [names] if isinstance(names, str) else list(names)
            rows = names if self.codomain == self.domain else list(self.codomain.shapes)
            with self._ranks.agreed("names to plot", is_short=True):
                block = self.submatrix(rows, names)
            return block.plot(most=most)
        with self._ranks.agreed("plot", is_short=True):
            if max(self.shape) > most:
                raise ShapeError(
                    f"{self.formula} is {times(self.shape)}, which is too large to draw with most={most}: the dense "
                    "matrix would be computed.",
                    "Name some parameters, A.plot(['0.weight']), choose some entries, A.submatrix(slice(100)).plot(), "
                    "or pass a larger most=.",
                )
        rows_of, columns_of = (
            {name: prod(shape) for name, shape in space.shapes.items()} for space in (self.codomain, self.domain)
        )
        return [draw_matrix(f"{self.formula}, {times(self.shape)}", self.to_dense(), rows_of, columns_of)]

    def to_scipy(self, after_product: Callable[[], None] = lambda: None) -> "ScipyOperator":
        """Return a SciPy operator for NumPy vectors, which computes products with this operator's device and dtype.

        Args:
            after_product: Callback that is called after every product, for example to count products.
        """
        from scipy.sparse.linalg import LinearOperator as ScipyOperator  # noqa: PLC0415 (slow to import)

        # NumPy does not support bfloat16, and SciPy's algorithms do not support half precision.
        wide = at_least_float32(self.dtype)

        def product(operator: LinearOperator):  # type: ignore[no-untyped-def]
            def call(v):  # type: ignore[no-untyped-def]
                t = torch.as_tensor(v, dtype=self.dtype, device=self.device)
                result = (operator @ t).cpu().to(wide).numpy()
                after_product()
                return result

            return call

        forward, backward = product(self), product(self.T)
        dtype = torch.empty(0, dtype=wide).numpy().dtype
        return ScipyOperator(
            self.shape, matvec=forward, matmat=forward, rmatvec=backward, rmatmat=backward, dtype=dtype
        )


class Identity(LinearOperator):
    """The identity operator. `A.shift(a)` is `A + a * Identity(A.domain)`."""

    symmetric = True

    def __init__(self, space: Space) -> None:
        super().__init__(space, space)

    def multiply(self, columns: Columns) -> Columns:
        """Return copies of the columns, so that in-place changes of a product do not change the input."""
        return {name: t.clone() for name, t in columns.items()}

    def multiply_transposed(self, columns: Columns) -> Columns:
        """Return copies of the columns."""
        return self.multiply(columns)


class Transposed(LinearOperator):
    """The transpose of an operator."""

    template = "{base}.T"

    def __init__(self, base: LinearOperator) -> None:
        super().__init__(base.codomain, base.domain, base)
        self.base, self.chunk_size = base, base.chunk_size

    def multiply(self, columns: Columns) -> Columns:
        """Multiply columns by the transpose of `base`."""
        return self.base.multiply_transposed(columns)

    def multiply_transposed(self, columns: Columns) -> Columns:
        """Multiply columns by `base`."""
        return self.base.multiply(columns)

    @property
    def T(self) -> LinearOperator:  # noqa: N802
        """The operator `base`, without a transpose."""
        return self.base


class Scaled(LinearOperator):
    """The product of a number and an operator."""

    template = "{factor:g} * {base}"

    def __init__(self, base: LinearOperator, factor: float) -> None:
        super().__init__(base.domain, base.codomain, base)
        self.base, self.factor = base, _number(factor)
        self.symmetric, self.chunk_size = base.symmetric, base.chunk_size

    def multiply(self, columns: Columns) -> Columns:
        """Multiply columns by `base`, then scale them."""
        return {name: self.factor * t for name, t in self.base.multiply(columns).items()}

    def multiply_transposed(self, columns: Columns) -> Columns:
        """Multiply columns by the transpose of `base`, then scale them."""
        return {name: self.factor * t for name, t in self.base.multiply_transposed(columns).items()}


class Sum(LinearOperator):
    """The sum of two operators on the same spaces."""

    template = "{one} + {other}"

    def __init__(self, one: LinearOperator, other: LinearOperator) -> None:
        if not isinstance(other, LinearOperator):
            raise DtypeError(
                f"A {type(other).__name__} cannot be added to an operator, or subtracted from it.",
                "Pass an operator. To add a multiple of the identity, write A.shift(number).",
            )
        check_same(one.domain, other.domain, "added")
        check_same(one.codomain, other.codomain, "added")
        super().__init__(one.domain, one.codomain, one, other)
        self.one, self.other = one, other
        self.symmetric = one.symmetric and other.symmetric
        self.chunk_size = min(one.chunk_size, other.chunk_size)

    def multiply(self, columns: Columns) -> Columns:
        """Multiply columns by both operators, and add the results."""
        one, other = self.one.multiply(columns), self.other.multiply(columns)
        return {name: one[name] + other[name] for name in one}

    def multiply_transposed(self, columns: Columns) -> Columns:
        """Multiply columns by both transposes, and add the results."""
        one, other = self.one.multiply_transposed(columns), self.other.multiply_transposed(columns)
        return {name: one[name] + other[name] for name in one}


class Product(LinearOperator):
    """The matrix product of two operators."""

    template = "{left} @ {right}"

    def __init__(self, left: LinearOperator, right: LinearOperator) -> None:
        check_same(left.domain, right.codomain, "multiplied")
        super().__init__(right.domain, left.codomain, left, right)
        self.left, self.right = left, right
        self.chunk_size = min(left.chunk_size, right.chunk_size)

    def multiply(self, columns: Columns) -> Columns:
        """Multiply columns by the right operator, then by the left one."""
        return self.left.multiply(self.right.multiply(columns))

    def multiply_transposed(self, columns: Columns) -> Columns:
        """Multiply columns by the left transpose, then by the right one."""
        return self.right.multiply_transposed(self.left.multiply_transposed(columns))


class Submatrix(LinearOperator):
    """A submatrix of an operator, with rows and columns chosen by parameter names."""

    template = "{base}[{codomain.listed}; {domain.listed}]"

    def __init__(self, base: LinearOperator, rows: Iterable[str], columns: Iterable[str]) -> None:
        super().__init__(base.domain.subspace(columns), base.codomain.subspace(rows), base)
        self.base, self.chunk_size = base, base.chunk_size
        self.symmetric = base.symmetric and self.domain == self.codomain

    def multiply(self, columns: Columns) -> Columns:
        """Pad columns with zeros, multiply them by `base`, and keep the chosen rows."""
        result = self.base.multiply(self.base.domain.padded(columns))
        return {name: result[name] for name in self.codomain.shapes}

    def multiply_transposed(self, columns: Columns) -> Columns:
        """Pad columns with zeros, multiply them by the transpose of `base`, and keep the chosen columns."""
        result = self.base.multiply_transposed(self.base.codomain.padded(columns))
        return {name: result[name] for name in self.domain.shapes}


class IndexedSubmatrix(LinearOperator):
    """A submatrix of an operator, with rows and columns chosen by indices into flat vectors; indices may repeat."""

    template = "{base}[rows; columns]"

    def __init__(self, base: LinearOperator, rows: Tensor, columns: Tensor) -> None:
        domain = Space({"entries": (len(columns),)}, base.domain.dtype, base.domain.device)
        super().__init__(domain, Space({"entries": (len(rows),)}, base.codomain.dtype, base.codomain.device), base)
        self.base = base
        self.rows = rows
        self.columns = columns
        self.chunk_size = base.chunk_size
        self.symmetric = base.symmetric and torch.equal(rows, columns)

    def multiply(self, columns: Columns) -> Columns:
        """Pad columns with zeros, multiply them by `base`, and keep the chosen rows."""
        result = self.base.multiply(self.base.domain.scattered(columns["entries"], self.columns))
        return {"entries": self.base.codomain.flatten(result)[:, self.rows]}

    def multiply_transposed(self, columns: Columns) -> Columns:
        """Pad columns with zeros, multiply them by the transpose of `base`, and keep the chosen columns."""
        result = self.base.multiply_transposed(self.base.codomain.scattered(columns["entries"], self.rows))
        return {"entries": self.base.domain.flatten(result)[:, self.columns]}


def _names(chosen: Index) -> Collection[str]:
    if isinstance(chosen, str):
        return [chosen]
    if isinstance(chosen, Iterable):
        return chosen if isinstance(chosen, set | frozenset) else [*chosen]
    raise ShapeError(
        f"{chosen!r} does not choose rows or columns.",
        "Give a parameter's name, or several; or entries as a list of integers ([3] for one), a mask or a slice.",
    )


def _number(factor: object) -> float:
    if isinstance(factor, Real) or (isinstance(factor, Tensor) and factor.numel() == 1):
        return float(factor)
    raise DtypeError(
        f"An operator cannot be scaled or shifted by a {type(factor).__name__}.",
        "Pass a number. To multiply by a vector or another operator, write A @ B.",
    )
