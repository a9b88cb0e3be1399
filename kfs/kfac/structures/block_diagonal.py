"""Block-diagonal operators: one structured block per parameter (with its bias), and everything that blocks can do.

Contracts, for such an operator `K`, a vector `v` and numbers `d`, `p`:

    K.inverse(d) @ (K.shift(d) @ v) == v           K.power(-1.0) @ v == K.inverse() @ v
    K.to_dense().logdet() == K.logdet()            K.to_dense().trace() == K.trace()
    values, Q = K.eigh(); Q @ (values * (Q.T @ v)) == K @ v
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar, overload

import torch
from torch import Tensor

from kfs import storage
from kfs.errors import DtypeError, ModelError, SolverError
from kfs.kfac.structures import decompositions
from kfs.kfac.structures.damping import METHODS, Method, damped_inverse
from kfs.kfac.structures.dense import Dense
from kfs.kfac.structures.eigenbasis import Eigenbasis
from kfs.kfac.structures.kronecker import Kronecker
from kfs.kfac.structures.stack import Group, check_cover
from kfs.kfac.structures.structure import Structure
from kfs.operators.interface import LinearOperator
from kfs.operators.probes import normal
from kfs.operators.space import Columns, Space, Vector

Damping = float | Mapping[str, float]
Answer = TypeVar("Answer")


class BlockDiagonal(LinearOperator):
    """An operator with structured blocks on its diagonal, and zeros elsewhere.

    Args:
        space: What it acts on.
        groups: The blocks. They cover every parameter once. Nothing if a subclass makes them later.
    """

    def __init__(self, space: Space, groups: list[Group] | None) -> None:
        """Store the blocks."""
        super().__init__(space, space)
        self._groups = groups

    @property
    def groups(self) -> list[Group]:
        """The blocks, those of one structure and size together."""
        assert self._groups is not None  # noqa: S101 (subclasses that make them later override this)
        return self._groups

    @property
    def symmetric(self) -> bool:  # type: ignore[override]
        """Whether all blocks are."""
        return all(group.structure.symmetric for group in self.groups)

    @property
    def structures(self) -> dict[str, Structure]:
        """The structure of each block, by its name: one unit, or one for each group of channels."""
        return {layout.name: group.structure[units] for group in self.groups for layout, units in group.parts()}

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(group.structure.nbytes for group in self.groups)

    def multiply(self, columns: Columns) -> Columns:
        """Multiply block by block."""
        return self._multiplied(columns, lambda structure: structure)

    def multiply_transposed(self, columns: Columns) -> Columns:
        """Multiply with the transposed blocks."""
        return self._multiplied(columns, lambda structure: structure.transposed())

    @overload
    def __matmul__(self, v: Tensor) -> Tensor: ...
    @overload
    def __matmul__(self, v: dict[str, Tensor]) -> dict[str, Tensor]: ...
    @overload
    def __matmul__(self, v: LinearOperator) -> LinearOperator: ...
    def __matmul__(self, v: Vector | LinearOperator) -> Vector | LinearOperator:
        """Multiply vectors; or operators, block by block if both have the same blocks of a structure that allows it."""
        if isinstance(v, BlockDiagonal):
            combined = self._combined(v, lambda one, other: one.product(other))
            if combined is not None:
                return combined
        return super().__matmul__(v)  # type: ignore[operator]

    @property
    def T(self) -> LinearOperator:  # noqa: N802
        """The transpose."""
        return self if self.symmetric else self._mapped(lambda structure: structure.transposed())

    def __add__(self, other: LinearOperator) -> LinearOperator:
        """Add another operator, block by block if both have the same blocks of a structure that allows it."""
        combined = self._combined(other, lambda one, two: one.plus(two)) if isinstance(other, BlockDiagonal) else None
        return super().__add__(other) if combined is None else combined

    def __sub__(self, other: LinearOperator) -> LinearOperator:
        """Subtract another operator."""
        return self + (-1.0 * other) if isinstance(other, LinearOperator) else super().__sub__(other)

    def __mul__(self, factor: float) -> LinearOperator:
        """Scale all blocks."""
        scaled = super().__mul__(factor)  # checks the number
        return self._mapped(lambda structure: structure.scaled(scaled.factor))  # type: ignore[attr-defined]

    __rmul__ = __mul__

    def __neg__(self) -> LinearOperator:
        """Change the sign."""
        return self * -1.0

    def shift(self, delta: float) -> LinearOperator:
        """Add a multiple of the identity."""
        return self._mapped(lambda structure: structure.shift(float(delta))) if self.symmetric else super().shift(delta)

    def inverse(self, damping: Damping = 0.0, method: Method = "exact") -> "BlockDiagonal":
        """Invert, after damping.

        Args:
            damping: What is added to the curvature; one number, or one for every block, by name.
            method: `"exact"` adds `damping` times the identity, to round-off. `"factored"` adds to both factors such
                that their product has about this much more (Martens & Grosse, 2015), and takes Cholesky factors only.
                `"per-factor"` adds `damping` to each factor.

        Returns:
            An operator with the same abilities as this one.

        Raises:
            SolverError: If a block is singular, has NaN in it, or is not positive semi-definite.

        Example:
            >>> from kfs import KFAC, EmpiricalRisk
            >>> model = torch.nn.Linear(3, 2)
            >>> risk = EmpiricalRisk(model, torch.nn.MSELoss(), (torch.rand(9, 3), torch.rand(9, 2)))
            >>> step = KFAC(risk).inverse(damping=1e-3) @ risk.gradient()
            >>> step["weight"].shape
            torch.Size([2, 3])
        """
        if method not in METHODS:
            raise ModelError(f"method is {method!r}.", f"Choose from {', '.join(map(repr, METHODS))}.")
        if damping:
            self._check_symmetric("inverted with damping")
        dampings = self._dampings(damping)
        return self._named(lambda group: damped_inverse(group.structure, dampings(group), method))

    def power(self, exponent: float, damping: Damping = 0.0) -> "BlockDiagonal":
        """Raise to a power, after adding `damping` times the identity.

        Args:
            exponent: Any number; a negative one needs blocks that are not singular, or damping.
            damping: One number, or one for every block, by name.
        """
        self._check_symmetric("raised to a power")
        dampings = self._dampings(damping)
        return self._named(lambda group: group.structure.power(float(exponent), dampings(group)))

    def trace(self) -> Tensor:
        """Return the sum of all eigenvalues."""
        return self._sum(lambda structure: structure.trace())

    def logdet(self) -> Tensor:
        """Return the logarithm of the determinant: minus infinity for a singular operator, NaN for a negative one."""
        sign, log = self._slogdet()
        return torch.where(sign < 0, torch.nan, log)

    def det(self) -> Tensor:
        """Return the determinant. It overflows easily; `logdet` does not."""
        sign, log = self._slogdet()
        return sign * log.exp()

    def squared_frobenius_norm(self) -> Tensor:
        """Return the sum of all squared entries."""
        return self._sum(lambda structure: structure.squared_norm())

    def frobenius_norm(self) -> Tensor:
        """Return the root of the sum of all squared entries."""
        return self.squared_frobenius_norm().sqrt()

    def diagonal(self) -> Tensor:
        """Return the diagonal as a flat vector."""
        return self._flat(lambda structure: structure.diagonal())

    def eigenvalues(self) -> Tensor:
        """Return all eigenvalues, in ascending order."""
        self._check_symmetric("decomposed")
        parts = [self._call(group, lambda g: g.structure.eigenvalues()).flatten() for group in self.groups]
        return torch.cat([part.to(self.device) for part in parts]).sort().values

    def eigh(self) -> "tuple[Tensor, BlockDiagonal]":
        """Decompose: return eigenvalues as a flat vector, and an orthogonal operator whose columns belong to them."""
        self._check_symmetric("decomposed")
        bases = [self._call(group, lambda g: g.structure.eigenbasis()) for group in self.groups]
        values: list[Group] = []
        vectors: list[Group] = []
        for group, basis in zip(self.groups, bases, strict=True):
            if isinstance(basis, Dense):
                with _naming(group.names):
                    entries, Q = decompositions.eigh(basis.matrix)
                entries = entries.reshape(-1, basis.rows, basis.columns)
                rotation: Structure = Dense(Q, basis.rows, basis.columns, symmetric=False)
            else:
                assert isinstance(basis, Eigenbasis)  # noqa: S101 (there is no third kind)
                entries, rotation = basis.values, Kronecker(basis.Q_A, basis.Q_B)
            values.append(Group(group.layouts, Eigenbasis.of_diagonal(entries)))
            vectors.append(Group(group.layouts, rotation))
        return BlockDiagonal(self.domain, values).diagonal(), BlockDiagonal(self.domain, vectors)

    def sample(self, num_samples: int = 1, *, damping: Damping = 0.0, seed: int = 0) -> Tensor:
        """Draw from the normal distribution whose precision (inverse covariance) is this operator plus damping.

        Args:
            num_samples: How many.
            damping: Added times the identity: the precision of a prior, say.
            seed: Equal seeds give equal draws.

        Returns:
            Columns, `[size, num_samples]`.
        """
        noise = normal(num_samples * self.shape[0], self.dtype, seed).reshape(num_samples, -1).T
        return self.power(-0.5, damping) @ noise.to(self.device)

    def to_dense(self, flattening: str = "rvec") -> Tensor:
        """Form the matrix, block by block.

        Args:
            flattening: How each parameter is flattened, `"rvec"` (as flat vectors are) or `"cvec"`.
        """
        order = self.domain.order(flattening)
        dense = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        places = self.domain.unflatten(torch.arange(self.shape[0], device=self.device).unsqueeze(0))
        for group in self.groups:
            index = group.read(places).flatten(1)  # [U, d_B * d_A]
            blocks = group.structure.to_dense().to(dense)
            dense[index.unsqueeze(2), index.unsqueeze(1)] = blocks
        return dense[order][:, order]

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """Move all blocks to a device, or convert them, in place."""
        self._groups = [Group(group.layouts, group.structure.to(device, dtype)) for group in self.groups]
        self._move_space(device, dtype)
        return self

    def _move_space(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        old = self.domain
        space = Space(old.shapes, dtype or old.dtype, old.device if device is None else torch.device(device))
        self.domain = self.codomain = space

    def save(self, path: str | Path) -> None:
        """Write everything to a file that `kfs.load` reads, in the safetensors format.

        The file is complete or not there at all, and an older one is replaced at once. Its header is readable: the
        library's version, parameters with their shapes and, of `KFAC` and `EKFAC`, loss, kind of Fisher, sharing,
        number of data and seed.

        Args:
            path: Where; `"k.safetensors"`, say.

        Raises:
            StorageError: If the file cannot be written.
        """
        kind = next(cls.__name__ for cls in type(self).__mro__ if cls.__name__ in {"EKFAC", "KFAC", "BlockDiagonal"})
        storage.write(path, {"kind": kind} | self._about(), self._state() | self._state_of_space())

    def _about(self) -> dict[str, Any]:
        """Return what people want to see in a file's header."""
        return {"parameters": {name: list(shape) for name, shape in self.domain.shapes.items()}}

    def _state(self) -> dict[str, Any]:
        """Return everything but the space, for a file."""
        return {"groups": [group.state() for group in self.groups]}

    def _state_of_space(self) -> dict[str, Any]:
        shapes = [[name, list(shape)] for name, shape in self.domain.shapes.items()]
        return {"space": {"shapes": shapes, "dtype": str(self.dtype).removeprefix("torch.")}}

    @classmethod
    def _from_state(cls, state: Any, space: Space) -> "BlockDiagonal":
        """Undo `_state`."""
        groups = [Group.from_state(part) for part in state["groups"]]
        check_cover([layout for group in groups for layout in group.layouts], space)
        return cls(space, groups)

    def _multiplied(self, columns: Columns, of: Callable[[Structure], Structure]) -> Columns:
        columns = {name: t.contiguous() for name, t in columns.items()}
        result = {name: torch.empty_like(t) for name, t in columns.items()}
        for group in self.groups:
            structure = of(group.structure)
            M = group.read(columns)
            product = structure.multiply(M.to(structure.like))
            group.write(product.to(M), result)
        return result

    def _mapped(self, function: Callable[[Structure], Structure]) -> "BlockDiagonal":
        return self._named(lambda group: function(group.structure))

    def _named(self, function: Callable[[Group], Structure]) -> "BlockDiagonal":
        """Apply a function to all groups, with errors that name the block."""
        groups = [Group(group.layouts, self._call(group, function)) for group in self.groups]
        return BlockDiagonal(self.domain, groups)

    def _call(self, group: Group, function: Callable[[Group], Answer]) -> Answer:
        with _naming(group.names):
            return function(group)

    def _combined(
        self, other: "BlockDiagonal", function: Callable[[Structure, Structure], Structure | None]
    ) -> "BlockDiagonal | None":
        """Combine block by block; nothing if blocks differ, or one pair of them has no simple combination."""
        if self.domain != other.domain or [g.layouts for g in self.groups] != [g.layouts for g in other.groups]:
            return None
        groups = []
        for mine, theirs in zip(self.groups, other.groups, strict=True):
            with _naming(mine.names):
                structure = function(mine.structure, theirs.structure)
            if structure is None:
                return None
            groups.append(Group(mine.layouts, structure))
        return BlockDiagonal(self.domain, groups)

    def _sum(self, function: Callable[[Structure], Tensor]) -> Tensor:
        parts = [self._call(group, lambda g: function(g.structure)).sum() for group in self.groups]
        return torch.stack([part.to(self.device) for part in parts]).sum()

    def _slogdet(self) -> tuple[Tensor, Tensor]:
        parts = [self._call(group, lambda g: g.structure.slogdet()) for group in self.groups]
        sign = torch.cat([sign.to(self.device) for sign, _ in parts]).prod()
        return sign, torch.cat([log.to(self.device) for _, log in parts]).sum()

    def _flat(self, function: Callable[[Structure], Tensor]) -> Tensor:
        """Collect one number for every parameter entry, `[U, d_B, d_A]` for each group."""
        zeros = torch.zeros(1, self.shape[0], dtype=self.dtype, device=self.device)
        columns = {name: t.clone() for name, t in self.domain.unflatten(zeros).items()}
        for group in self.groups:
            entries = self._call(group, lambda g: function(g.structure))
            group.write(entries.unsqueeze(1).to(zeros), columns)
        return self.domain.flatten(columns).squeeze(0)

    def _dampings(self, damping: Damping) -> Callable[[Group], Tensor]:
        """Return what gives each unit's damping, `[U]`."""
        names = {layout.name for group in self.groups for layout in group.layouts}
        by_name = damping if isinstance(damping, Mapping) else dict.fromkeys(names, damping)
        if set(by_name) != names:
            missing, extra = sorted(names - set(by_name)), sorted(set(by_name) - names)
            raise ModelError(
                f"damping lacks the blocks {missing} and has {extra} too many.",
                "Give one number, or one for every block.",
            )
        for value in by_name.values():
            if not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
                raise DtypeError(f"A damping is {value!r}.", "Use a finite number that is not negative.")

        def of(group: Group) -> Tensor:
            like = group.structure.like
            return torch.tensor([by_name[name] for name in group.names], dtype=like.dtype, device=like.device)

        return of

    def _check_symmetric(self, verb: str) -> None:
        if not self.symmetric:
            raise ModelError(
                f"The operator is not symmetric, so it cannot be {verb}.", "Apply this before multiplying operators."
            )


@contextmanager
def _naming(names: list[str]) -> Iterator[None]:
    """Name the block in errors about units."""
    try:
        yield
    except decompositions.UnitError as error:
        raise SolverError(
            f"A factor of block {names[error.unit]!r} {error.cause}.",
            "Look at its data and gradients; for singular factors, pass damping.",
        ) from error
