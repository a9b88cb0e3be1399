"""Block-diagonal operators: one structured block per parameter (with its bias), with everything that blocks can do.

Contracts, for such an operator `K`, a vector `v` and numbers `d`, `p`:

    K.inverse(d) @ (K.shift(d) @ v) == v           K.power(-1.0) @ v == K.inverse() @ v
    K.to_dense().logdet() == K.logdet()            K.to_dense().trace() == K.trace()
    values, Q = K.eigh(); Q @ (values * (Q.T @ v)) == K @ v
"""

import warnings
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Literal, Self, overload

import torch
from torch import Tensor

from kfs.describing import number
from kfs.distributed import Same, check_same
from kfs.errors import KfsWarning, ModelError
from kfs.kfac.structures import decompositions
from kfs.kfac.structures.damping import (
    METHODS,
    Damping,
    Method,
    Relative,
    absolute_damping,
    damped_inverse,
    damping_by_name,
    traces_and_rows,
)
from kfs.kfac.structures.dense import Dense
from kfs.kfac.structures.eigenbasis import Eigenbasis
from kfs.kfac.structures.kronecker import Kronecker
from kfs.kfac.structures.kronecker_sum import plus, product
from kfs.kfac.structures.looking import shown
from kfs.kfac.structures.owned_blocks import OwnedBlocks
from kfs.kfac.structures.restriction import restricted
from kfs.kfac.structures.sampling import colored, noise_for
from kfs.kfac.structures.stack import Stack, stacked
from kfs.kfac.structures.structure import Structure
from kfs.operators.formulas import bracketed
from kfs.operators.interface import LinearOperator
from kfs.operators.solve import Vec
from kfs.operators.space import Columns, Space

_SAME_VECTORS = "Broadcast vectors, or draw them from the same seed in all processes."
_LARGE = 256  # rows and columns; with fewer, a product with one column takes longer to read factors than to multiply


class BlockDiagonal(OwnedBlocks):
    """An operator with structured blocks on its diagonal, and zeros elsewhere.

    Args:
        space: What it acts on.
        stacks: The blocks of this process. Those of all processes cover every parameter once. `None` if a subclass
            makes them later.
        ranks: Those that own blocks. By default, this process has all of them.
    """

    def multiply(self, columns: Columns) -> Columns:
        """Multiply block by block."""
        columns = {name: t.contiguous() for name, t in columns.items()}
        check_same(self.ranks, "product", {"The vectors to multiply with": Same(columns, _SAME_VECTORS)})
        # Rows of blocks that others own stay zero.
        fresh = torch.zeros_like if self.ranks.are_several else torch.empty_like
        result = {name: fresh(t) for name, t in columns.items()}
        num_columns = len(next(iter(columns.values())))
        with self.ranks.agreed("product"):
            for stack in self.own_stacks:
                at_once = _columns_at_once(stack.structure, num_columns)
                for start in range(0, num_columns, at_once):
                    some = slice(start, start + at_once)
                    M = stack.read({name: columns[name][some] for name in stack.params})
                    product = stack.structure.multiply(M.to(stack.structure.like))
                    stack.write(product.to(M), {name: result[name][some] for name in stack.params})
        self._add_up(result.values())
        return result

    def multiply_transposed(self, columns: Columns) -> Columns:
        """Multiply with the transposed blocks."""
        return self._map_structures(lambda structure: structure.transposed()).multiply(columns)

    def _composed_with(self, other: LinearOperator) -> LinearOperator:
        """Multiply block by block, if both operators have the same blocks of structures that allow it."""
        made = self._combine_blocks(other, product)
        return super()._composed_with(other) if made is None else made.made_of(self, "@", other)

    @property
    def T(self) -> LinearOperator:  # noqa: N802
        """The transpose."""
        if self.symmetric:
            return self
        return self._map_structures(lambda structure: structure.transposed()).called(f"{bracketed(self)}.T")

    def __add__(self, other: LinearOperator) -> LinearOperator:
        """Add block by block, if both operators have the same blocks of structures that allow it."""
        made = self._combine_blocks(other, plus)
        return super().__add__(other) if made is None else made.made_of(self, "+", other)

    def __mul__(self, factor: float) -> LinearOperator:
        self._check_same(factor=factor)
        scaled = super().__mul__(factor)  # checks the number
        made = self._map_structures(lambda structure: structure.scaled(scaled.factor))  # type: ignore[attr-defined]
        return made.called(f"{number(factor)} * {bracketed(self)}")

    __rmul__ = __mul__

    def shift(self, delta: float | Relative) -> LinearOperator:
        """Add `delta` times the identity: a number, or `kfs.Relative` to each block's mean eigenvalue."""
        self._check_same(delta=delta)
        if isinstance(delta, Relative):
            self._check_symmetric("shifted by relative damping")
            made = self._map_damped(lambda structure, d: structure.shift(d), delta)
        elif not self.symmetric:
            return super().shift(delta)
        else:
            made = self._map_structures(lambda structure: structure.shift(float(delta)))
        return made.called(f"{bracketed(self)}.shift({number(delta)})")

    def _block_of(self, rows: Collection[str], columns: Collection[str]) -> LinearOperator:
        """Return the block with some parameters' rows and columns, with all that this operator can do if they agree."""
        space = self.domain.subspace(rows)
        if space == self.codomain.subspace(columns):
            parts = restricted(self.own_stacks, space.shapes)
            if all(self.ranks.gather("submatrix", parts is not None)):
                made = BlockDiagonal(space, stacked(parts or ()), self.ranks)
                return made.called(f"{bracketed(self)}[{space.listed}; {space.listed}]", self.of)
        return super()._block_of(rows, columns)

    def inverse(self, damping: Damping = 0.0, method: Method = "exact") -> "BlockDiagonal":
        """Invert, after damping.

        Args:
            damping: What is added to the curvature: one number, or one for every block, by name. `kfs.Relative(0.1)`
                in place of a number is a multiple of each block's mean eigenvalue.
            method: `"exact"` adds `damping` times the identity, up to round-off. `"factored"` adds to both factors such
                that their product grows by about as much (Martens & Grosse, 2015). It needs Cholesky factors only, and
                is exact for blocks in which one factor is a single number, or a multiple of the identity.
                `"per-factor"` adds `damping` to each factor. For a sum of two operators, `K1 + K2`, `"factored"` and
                `"per-factor"` damping, and none, have closed forms; inverses with `"exact"` damping, and those of more
                terms, are applied by conjugate gradients.

        Returns:
            An operator with the same methods as this one.

        Raises:
            SolverError: If a block is singular, has NaN in it, or is not positive semi-definite. Of singular factors
                of Kronecker products, inverses without damping are one over round-off, with a warning.

        Example:
            >>> from kfs import KFAC, EmpiricalRisk
            >>> model = torch.nn.Linear(3, 2)
            >>> risk = EmpiricalRisk(model, torch.nn.MSELoss(), (torch.rand(9, 3), torch.rand(9, 2)))
            >>> step = KFAC(risk).inverse(damping=1e-3) @ risk.gradient()
            >>> step["weight"].shape
            torch.Size([2, 3])
            >>> print(KFAC(risk).inverse(damping=1e-3))
            KFAC.inverse(0.001) of Linear with MSELoss (mean): 8 x 8, float32 on cpu, symmetric
              1 block, 112 B
            blocks
            block   matrix  structure                     bytes
            ------  ------  ----------------------------  -----
            weight  2 x 4   eigenvalues and eigenvectors  112 B
        """
        self._check_same(damping=damping, method=method)
        if method not in METHODS:
            raise ModelError(f"method is {method!r}.", f"Choose from {', '.join(map(repr, METHODS))}.")
        if damping:
            self._check_symmetric("inverted with damping")
        made = self._map_damped(lambda structure, d: damped_inverse(structure, d, method), damping)
        how = "" if method == "exact" else f", {method!r}"
        return made.called(f"{bracketed(self)}.inverse({shown(damping)}{how})")

    def solve(self, b: Vec, damping: Damping = 0.0, method: Method = "exact") -> Vec:
        """Return `self.inverse(damping, method) @ b`. To solve for several `b`, keep the inverse."""
        return self.inverse(damping, method) @ b

    def power(self, exponent: float, damping: Damping = 0.0) -> "BlockDiagonal":
        """Raise to a power, after adding `damping` times the identity.

        Args:
            exponent: Any number. A negative one needs damping, or blocks that are not singular.
            damping: One number (or `kfs.Relative`), or one for every block, by name.
        """
        self._check_same(exponent=exponent, damping=damping)
        self._check_symmetric("raised to a power")
        made = self._map_damped(lambda structure, d: structure.power(float(exponent), d), damping)
        return made.called(f"{bracketed(self)}.power({number(exponent)}, {shown(damping)})")

    def trace(self) -> Tensor:
        """Return the sum of all eigenvalues."""
        return self._sum_over_blocks(lambda structure: structure.trace())

    def logdet(self) -> Tensor:
        """Return the logarithm of the determinant; NaN if the determinant is negative.

        That of a singular operator, as most curvature matrices are, is minus infinity, with a warning. Add damping
        first: `K.shift(damping).logdet()`.
        """
        sign, log = self._slogdet()
        if sign == 0:
            warnings.warn(
                f"{self.formula} is singular, up to round-off, so that the logarithm of its determinant is minus "
                "infinity. Add damping: K.shift(damping).logdet().",
                KfsWarning,
                stacklevel=2,
            )
        return torch.where(sign < 0, torch.nan, log)

    def det(self) -> Tensor:
        """Return the determinant. It overflows easily; `logdet` does not."""
        sign, log = self._slogdet()
        return sign * log.exp()

    def squared_frobenius_norm(self) -> Tensor:
        """Return the sum of all squared entries."""
        return self._sum_over_blocks(lambda structure: structure.squared_norm())

    def frobenius_norm(self) -> Tensor:
        """Return the root of the sum of all squared entries."""
        return self.squared_frobenius_norm().sqrt()

    def diagonal(self) -> Tensor:
        """Return the diagonal as a flat vector."""
        zeros = torch.zeros(1, self.shape[0], dtype=self.dtype, device=self.device)
        columns = {name: t.clone() for name, t in self.domain.unflatten(zeros).items()}
        with self.ranks.agreed("diagonal"):
            for stack in self.own_stacks:
                stack.write(stack.structure.diagonal().unsqueeze(1).to(zeros), columns)
        self._add_up(columns.values())
        return self.domain.flatten(columns).squeeze(0)

    def eigenvalues(self) -> Tensor:
        """Return all eigenvalues, in ascending order."""
        self._check_symmetric("decomposed")
        with self.ranks.agreed("eigenvalues"):
            parts = [stack.apply(lambda structure: structure.eigenvalues()) for stack in self.own_stacks]
            values = torch.cat([self._none(), *(part.flatten().to(self.device) for part in parts)])
        return self._joined(values).sort().values

    def eigh(self) -> "tuple[Tensor, BlockDiagonal]":
        """Decompose: return eigenvalues as a flat vector, and an orthogonal operator whose columns belong to them."""
        self._check_symmetric("decomposed")
        with self.ranks.agreed("eigenvectors"):
            pairs = [stack.apply(_eigh) for stack in self.own_stacks]
        diagonal = self._with_structures(Eigenbasis.of_diagonal(values) for values, _ in pairs).diagonal()
        return diagonal, self._with_structures(vectors for _, vectors in pairs)

    @overload
    def sample(
        self, num_samples: int = 1, *, damping: Damping = 0.0, seed: int = 0, form: Literal["matrix"] = "matrix"
    ) -> Tensor: ...
    @overload
    def sample(
        self, num_samples: int = 1, *, damping: Damping = 0.0, seed: int = 0, form: Literal["dict"]
    ) -> dict[str, Tensor]: ...
    def sample(
        self, num_samples: int = 1, *, damping: Damping = 0.0, seed: int = 0, form: Literal["matrix", "dict"] = "matrix"
    ) -> Tensor | dict[str, Tensor]:
        """Draw from the normal distribution whose precision (inverse covariance) is this operator plus damping.

        Args:
            num_samples: Number of draws.
            damping: Added times the identity, such as the precision of a prior.
            seed: Seed for the draws. Those of a block depend on the seed and its name alone.
            form: `"matrix"` for columns of flat vectors, `"dict"` for tensors by the names of parameters.

        Returns:
            Columns, `[size, num_samples]`; or `{name: [num_samples, *shape]}`, the same draws.

        Raises:
            ModelError: If there is no such form.
        """
        self._check_same(num_samples=num_samples, damping=damping, seed=seed, form=form)
        if form not in {"matrix", "dict"}:
            raise ModelError(f"form is {form!r}.", "Choose 'matrix' or 'dict'.")
        columns = {
            name: torch.zeros(num_samples, *shape, dtype=self.dtype, device=self.device)
            for name, shape in self.domain.shapes.items()
        }
        root = self.power(-0.5, damping)
        with self.ranks.agreed("sample"):
            for stack in root.own_stacks:
                noise = noise_for(stack, num_samples, seed)
                stack.write(colored(stack.structure, noise).to(self.device, self.dtype), columns)
        self._add_up(columns.values())
        return self.domain.flatten(columns).T if form == "matrix" else columns

    def to_dense(self, flattening: str = "rvec") -> Tensor:
        """Form the matrix, block by block.

        Args:
            flattening: How each parameter is flattened, `"rvec"` (as flat vectors are) or `"cvec"`.
        """
        order = self.domain.order(flattening)
        dense = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        places = self.domain.unflatten(torch.arange(self.shape[0], device=self.device).unsqueeze(0))
        with self.ranks.agreed("matrix"):
            for stack in self.own_stacks:
                index = stack.read(places).flatten(1)  # [stack, d_B * d_A]
                dense[index.unsqueeze(2), index.unsqueeze(1)] = stack.structure.to_dense().to(dense)
        self._add_up([dense])
        return dense[order][:, order]

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """Move all blocks to a device, or convert them, in place."""
        self._stacks = self._map_structures(lambda structure: structure.to(device, dtype)).own_stacks
        self._move_space(device, dtype)
        self._list_blocks()
        return self

    def _move_space(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        device = self.device if device is None else torch.device(device)
        space = Space(self.domain.shapes, dtype or self.dtype, device)
        self.domain = self.codomain = space

    def _with_structures(self, structures: Iterable[Structure]) -> "BlockDiagonal":
        """Return an operator with the same layouts and other structures, one for each stack."""
        with self.ranks.agreed("blocks"):  # structures may be computed in here
            pairs = zip(self.own_stacks, structures, strict=True)
            stacks = [Stack(stack.layouts, structure) for stack, structure in pairs]
        return BlockDiagonal(self.domain, stacks, self.ranks).called("", self.of)

    def _map_structures(self, function: Callable[[Structure], Structure]) -> "BlockDiagonal":
        """Apply a function to all structures."""
        return self._with_structures(stack.apply(function) for stack in self.own_stacks)

    def _map_damped(self, function: Callable[[Structure, Tensor], Structure], damping: Damping) -> "BlockDiagonal":
        """Apply a function to all structures and their dampings, `[stack]`."""
        numbers = damping_by_name(damping, {block.layout.name for block in self._listed()})
        # Only blocks of zeros need it; ranks do not know whether others have some.
        mean = self.mean_eigenvalue() if any(isinstance(d, Relative) for d in numbers.values()) else 0.0
        return self._with_structures(
            stack.apply(function, absolute_damping(stack, numbers, mean)) for stack in self.own_stacks
        )

    def mean_eigenvalue(self) -> Tensor:
        """Return the mean eigenvalue of all blocks together, without blocks of zeros; NaN if there is no other."""
        with self.ranks.agreed("mean eigenvalue"):
            found = traces_and_rows(self.own_stacks)
        trace, rows = self._joined(found).reshape(-1, 2).sum(0).unbind()
        return trace.div(rows)

    def _combine_blocks(
        self, other: object, function: Callable[[Structure, Structure], Structure | None]
    ) -> "BlockDiagonal | None":
        """Combine two operators block by block. `None` if blocks differ, or if a result has no structure."""
        if not isinstance(other, BlockDiagonal) or self.domain != other.domain:
            return None
        if self.ranks.group is not other.ranks.group:
            return None
        structures: list[Structure | None] = []
        with self.ranks.agreed("combined blocks"):
            mine, theirs = self.own_stacks, other.own_stacks
            same = [stack.layouts for stack in mine] == [stack.layouts for stack in theirs]
            if same:
                structures = [a.apply(function, b.structure) for a, b in zip(mine, theirs, strict=True)]
        if not all(self.ranks.gather("combined blocks", same and None not in structures)):
            return None
        return self._with_structures(structure for structure in structures if structure is not None)

    def _sum_over_blocks(self, function: Callable[[Structure], Tensor]) -> Tensor:
        """Sum one number for every block, `[stack]` for each stack."""
        with self.ranks.agreed("sum over blocks"):
            parts = [stack.apply(function).sum().to(self.device) for stack in self.own_stacks]
            total = torch.stack(parts or [self._none().sum()]).sum()
        return self._joined(total.unsqueeze(0)).sum()

    def _slogdet(self) -> tuple[Tensor, Tensor]:
        """Return sign and logarithm of the determinant."""
        with self.ranks.agreed("log-determinant"):
            parts = [stack.apply(lambda structure: structure.slogdet()) for stack in self.own_stacks]
            signs = torch.cat([self._none(), *(sign.to(self.device) for sign, _ in parts)])
            logs = torch.cat([self._none(), *(log.to(self.device) for _, log in parts)])
        return self._joined(signs).prod(), self._joined(logs).sum()

    def _none(self) -> Tensor:
        """Return no numbers, for a process that owns no block."""
        return torch.zeros(0, dtype=self.dtype, device=self.device)

    def _check_symmetric(self, verb: str) -> None:
        if not self.symmetric:
            raise ModelError(
                f"The operator is not symmetric, so it cannot be {verb}.", "Apply this before multiplying operators."
            )


def _columns_at_once(structure: Structure, num_columns: int) -> int:
    """Return how many columns to multiply together: on a CPU, one of a large block, which then stays in the cache."""
    is_large = min(structure.rows, structure.columns) >= _LARGE
    return 1 if is_large and structure.like.device.type == "cpu" else num_columns


def _eigh(structure: Structure) -> tuple[Tensor, Structure]:
    """Return eigenvalues `[stack, d_B, d_A]`, and eigenvectors as columns of orthogonal blocks."""
    basis = structure.eigenbasis()
    if isinstance(basis, Dense):
        values, vectors = decompositions.eigh(basis.matrix)
        return values.reshape(-1, basis.rows, basis.columns), replace(basis, matrix=vectors, symmetric=False)
    assert isinstance(basis, Eigenbasis)  # noqa: S101 (there is no third structure)
    return basis.values, Kronecker(basis.Q_A, basis.Q_B)
