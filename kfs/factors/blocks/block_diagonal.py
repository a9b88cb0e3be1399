"""Block-diagonal operators: one structured block per parameter (with its bias), and algebra on them.

The algebra of a single block is in the other files of this folder, text and plots in `kfs.factors.blocks.display`.

Contracts, for a `BlockDiagonal` operator `K`, a vector `v` and numbers `d`, `p`:

    K.inverse(d) @ (K.shift(d) @ v) == v           K.power(-1.0) @ v == K.inverse() @ v
    K.to_dense().logdet() == K.logdet()            K.to_dense().trace() == K.trace()
    values, Q = K.eigh(); Q @ (values * (Q.T @ v)) == K @ v

Every method computes with the blocks of this process, by `_own`, `_write`, `_numbers` or `_map_structures`. There, the
distribution of the operator (`kfs.distributed.distribution`) turns the results into those of all blocks. Blocks may be
in host memory while the operator is on a GPU: `_own` then copies one stack after the other there, and new blocks back.
"""

import hashlib
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, TypeVar, cast, overload

import torch
from torch import Tensor

from kfs.basics.flattening import VecFunction
from kfs.display.describe import Description, number
from kfs.display.suggestions import ByName
from kfs.distributed import Ranks
from kfs.distributed.distribution import REPLICATED, Distribution, by_bytes
from kfs.errors import KfsWarning, ModelError, UnknownAttributeError
from kfs.factors.blocks import decompositions
from kfs.factors.blocks.damping import (
    METHODS,
    Damping,
    Method,
    Relative,
    absolute_damping,
    damped_inverse,
    damping_by_name,
    formula_of,
    traces_and_rows,
)
from kfs.factors.blocks.dense import Dense
from kfs.factors.blocks.display import Listed, describe_blocks, formula_of_both, kind_of, plot_spectra
from kfs.factors.blocks.eigenbasis import Eigenbasis
from kfs.factors.blocks.kronecker import Kronecker
from kfs.factors.blocks.kronecker_sum import plus, product
from kfs.factors.blocks.stack import Stack, check_coverage, restricted, stacked, stacks_of
from kfs.factors.blocks.structure import Structure
from kfs.factors.layout import Layout, by_parameter
from kfs.files import with_tensors
from kfs.operators.linear_operator import LinearOperator, bracketed
from kfs.operators.solve import Vec
from kfs.operators.space import Columns, Space
from kfs.runtime.memory import copied

if TYPE_CHECKING:
    from matplotlib.axes import Axes

T = TypeVar("T")
_LARGE = 256  # rows and columns; for smaller factors, products with one column are limited by reading the factors


def noise_for(stack: Stack, num_samples: int, seed: int) -> Tensor:
    """Draw standard normal numbers for all blocks of a stack, `[stack, num_samples, d_B, d_A]`.

    The numbers of a block depend only on the seed and its name, and not on other blocks in the stack. They are drawn on
    the CPU, so they are the same for every device.
    """
    like = stack.structure.like
    sizes = num_samples, stack.structure.rows, stack.structure.columns
    parts = []
    for layout in stack.layouts:
        digest = hashlib.blake2b(f"{seed} {layout.name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        parts.append(torch.randn(layout.groups, *sizes, dtype=like.dtype, generator=generator))
    return torch.cat(parts).to(like.device)


def colored(root: Structure, noise: Tensor) -> Tensor:
    """Return draws from normal distributions with the squares of blocks as covariances, given standard normal noise."""
    if isinstance(root, Eigenbasis):
        # Standard normal noise is rotation invariant, so rotating it to the basis of the block is not necessary.
        return root.rotated(root.values.unsqueeze(1) * noise, back=True)
    return root.multiply(noise)


class _Load:
    """Raises an error that points to `kfs.load`, because users may look for `load` beside `save`.

    There is no such method, because the file determines the class.
    """

    def __get__(self, operator: object, cls: type) -> NoReturn:
        raise UnknownAttributeError(
            f"{cls.__name__} has no 'load'.", "Use kfs.load(path), which returns an object of the class that was saved."
        )


class BlockDiagonal(LinearOperator):
    """An operator with structured blocks on its diagonal, and zeros elsewhere.

    Args:
        space: The space that the operator acts on.
        stacks: The blocks of this process. The blocks of all processes together cover every parameter once. `None` if
            a subclass creates them on first use.
        distribution: Which process has which blocks. By default, each process has all of them.

    Attributes:
        distribution: As above.
    """

    load = _Load()
    _formula = ""
    _of = ""

    def __init__(self, space: Space, stacks: list[Stack] | None, distribution: Distribution = REPLICATED) -> None:
        super().__init__(space, space)
        self.distribution = distribution
        self._stacks = stacks
        self._listing: list[Listed] | None = None
        if not distribution.is_complete:
            self._listed()  # exchanges metadata, so that descriptions need no communication

    @classmethod
    def _from_parts(cls, *parts: Any) -> Self:
        """Return an object of a subclass whose `__init__` computes its parts, without computing them."""
        made = cls.__new__(cls)
        made._set(*parts)
        return made

    def _set(self, *parts: Any) -> None:
        """Set all attributes, given the parts of an object."""
        BlockDiagonal.__init__(self, *parts)

    # Blocks, and the ways to compute with them in all processes.

    @property
    def own_stacks(self) -> list[Stack]:
        """The blocks of this process: all blocks, or the ones that it owns."""
        assert self._stacks is not None  # noqa: S101 (subclasses that create them on first use override this)
        return self._stacks

    def _own(self, where: str, function: Callable[[Stack], T]) -> list[T]:
        """Return the results of a function for each stack of this process. An error ends the call in all processes."""
        with self.distribution.agree(where):
            if not self.is_elsewhere:
                return [function(stack) for stack in self.own_stacks]
            copies = zip(copied(self.own_stacks, self.device, Stack.mapped), self.own_stacks, strict=True)
            return [_returned(function(copy), copy, stack) for copy, stack in copies]

    @property
    def is_elsewhere(self) -> bool:
        """Whether blocks of this process are on another kind of device than the operator: in host memory."""
        return any(stack.structure.like.device.type != self.device.type for stack in self.own_stacks)

    def _write(self, where: str, tensors: Iterable[Tensor], function: Callable[[Stack], None]) -> None:
        """Let all blocks write their parts into tensors, where parts of blocks on other ranks are zero before."""
        self._own(where, function)
        self.distribution.sum(self.formula, tensors)

    def _numbers(self, where: str, function: Callable[[Stack], Tensor]) -> Tensor:
        """Return the numbers of all blocks in one vector, given a function that returns those of a stack."""
        none = torch.zeros(0, dtype=self.dtype, device=self.device)
        parts = self._own(where, lambda stack: function(stack).flatten().to(self.device))
        return self.distribution.concat(where, torch.cat([none, *parts]))

    def _with_structures(self, structures: Iterable[Structure]) -> "BlockDiagonal":
        """Return an operator with the same layouts and the given structures, one for each stack."""
        pairs = zip(self.own_stacks, structures, strict=True)
        stacks = [Stack(stack.layouts, structure) for stack, structure in pairs]
        return BlockDiagonal(self.domain, stacks, self.distribution).called("", self.of)

    def _map_structures(self, function: Callable[[Structure], Structure]) -> "BlockDiagonal":
        """Return the operator after applying a function to all structures."""
        return self._with_structures(self._own("blocks", lambda stack: stack.apply(function)))

    def _map_damped(self, function: Callable[[Structure, Tensor], Structure], damping: Damping) -> "BlockDiagonal":
        """Return the operator after applying a function to all structures and their dampings, `[stack]`."""
        mine = [name for stack in self.own_stacks for name in stack.names]
        numbers = damping_by_name(damping, set(self.distribution.union("blocks", mine)))
        # Only blocks of zeros need the mean, but a process does not know whether others have such blocks.
        mean = self.mean_eigenvalue() if any(isinstance(d, Relative) for d in numbers.values()) else 0.0

        def damped(stack: Stack) -> Structure:
            return stack.apply(function, absolute_damping(stack, numbers, mean))

        return self._with_structures(self._own("blocks", damped))

    def _combine_blocks(
        self, other: object, function: Callable[[Structure, Structure], Structure | None]
    ) -> "BlockDiagonal | None":
        """Combine two operators block by block; `None` if blocks differ or no structure can store a result."""
        if not isinstance(other, BlockDiagonal) or self.domain != other.domain:
            return None
        if not self.distribution.shares(other.distribution):
            return None
        theirs = {stack.layouts: stack.structure for stack in other.own_stacks}
        same = [stack.layouts for stack in self.own_stacks] == list(theirs)

        def combined(stack: Stack) -> Structure | None:
            return stack.apply(function, theirs[stack.layouts].to(stack.structure.like.device)) if same else None

        structures = [structure for structure in self._own("combined blocks", combined) if structure is not None]
        is_complete = same and len(structures) == len(self.own_stacks)
        return self._with_structures(structures) if self.distribution.all("combined blocks", is_complete) else None

    def each(self) -> Iterator[tuple[str, Structure]]:
        """Yield all blocks in the order of parameters, one after the other, on the operator's device.

        Blocks in host memory are copied to the device, and blocks of other processes are sent to this one. If blocks
        have owners, all processes must iterate together.

        Yields:
            Name and structure of each block.

        Example:
            >>> from kfs import KFAC, EmpiricalRisk
            >>> risk = EmpiricalRisk(torch.nn.Linear(3, 2), torch.nn.MSELoss(), (torch.rand(9, 3), torch.rand(9, 2)))
            >>> [(name, structure.rows, structure.columns) for name, structure in KFAC(risk).each()]
            [('weight', 2, 4)]
        """
        order = {block.layout.name: place for place, block in enumerate(self._listed())}
        stacks = [Stack((layout,), structure) for stack in self.own_stacks for layout, structure in stack.blocks()]
        stacks.sort(key=lambda stack: order[stack.layouts[0].name])
        copies: Iterable[Stack] = stacks
        if not self.distribution.is_complete:
            items = [(order[stack.layouts[0].name], stack.state()) for stack in stacks]
            found = (Stack.from_state(state) for _, state in self.distribution.each(items))
            copies = (stack.mapped(lambda t: t.to(self.device)) for stack in found)
        elif self.is_elsewhere:
            copies = copied(stacks, self.device, Stack.mapped)
        for stack in copies:
            yield stack.layouts[0].name, stack.structure

    # Text and plots.

    @property
    def ranks(self) -> Ranks:
        """The ranks that own blocks; this process alone if each process has all blocks."""
        return self.distribution.ranks

    @property
    def _ranks(self) -> Ranks:
        return self.distribution.ranks

    @property
    def stacks(self) -> list[Stack]:
        """All blocks; blocks of the same structure and size are stacked.

        Raises:
            DistributedError: If blocks have owners, because this process does not have all of them.
        """
        self.distribution.check_complete(self.formula)
        return self.own_stacks

    @property
    def structures(self) -> dict[str, Structure]:
        """The structure of each block, by name. With groups of channels, it is a stack of one block per group."""
        place_of = by_parameter(self.domain.shapes)
        blocks = sorted((b for stack in self.stacks for b in stack.blocks()), key=lambda block: place_of(block[0]))
        return ByName({layout.name: structure for layout, structure in blocks})

    @property
    def layouts(self) -> list[Layout]:
        """How parameters become the matrices that blocks act on, for the blocks of all processes."""
        if self.distribution.is_complete:
            return sorted(
                (one for stack in self.own_stacks for one in stack.layouts), key=by_parameter(self.domain.shapes)
            )
        return [block.layout for block in self._listed()]

    @property
    def symmetric(self) -> bool:  # type: ignore[override]
        """Whether all blocks are symmetric."""
        return all(block.symmetric for block in self._listed())

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks, in all processes together."""
        return sum(block.nbytes for block in self._listed())

    def _listed(self) -> list[Listed]:
        """List the blocks of all processes in the order of parameters."""
        if self._listing is None:
            rank, place_of = self.distribution.rank, by_parameter(self.domain.shapes)
            blocks = [block for stack in self.own_stacks for block in stack.blocks()]
            mine = [Listed(layout, kind_of(one), one.nbytes, one.symmetric, rank) for layout, one in blocks]
            found = self.distribution.union("blocks", mine)
            self._listing = sorted(found, key=lambda block: place_of(block.layout))
        return self._listing

    @property
    def formula(self) -> str:
        """The expression that the operator was computed by, such as `"KFAC.inverse(0.001)"`."""
        return self._formula or type(self).__name__

    @property
    def of(self) -> str:
        """A short description of model and loss; empty if unknown."""
        return self._of

    def called(self, formula: str, of: str | None = None) -> Self:
        """Set `formula`, and `of` if given, for `repr`; return the operator itself."""
        self._formula = formula
        self._of = self._of if of is None else of
        return self

    def describe(self) -> Description:
        """Describe all blocks, without reading their numbers."""
        return describe_blocks(self.about, self._listed())

    def plot_spectrum(
        self, names: Iterable[str] | None = None, *, damping: Damping = 1e-3, axes: "Axes | None" = None
    ) -> "Axes":
        """Plot the eigenvalues of every block on a log axis, with and without damping.

        Args:
            names: Names of the blocks to plot; all by default.
            damping: Damping of the dashed lines: one number (or `kfs.Relative`), or one for every block, by name.
            axes: Matplotlib axes; by default, those of a new figure.

        Returns:
            The axes.
        """
        if not self.symmetric:
            raise ModelError("The operator is not symmetric, so it has no real spectrum.", "Plot it before a product.")
        return plot_spectra(self.structures, names, damping, axes)

    # Copies and files.

    def gathered(self) -> Self:
        """Return the same operator with copies of all blocks in every process. All processes must call it.

        Example:
            >>> from kfs import KFAC, EmpiricalRisk
            >>> risk = EmpiricalRisk(torch.nn.Linear(3, 2), torch.nn.MSELoss(), (torch.rand(9, 3), torch.rand(9, 2)))
            >>> K = KFAC(risk, placement="owner").gathered()
        """
        if self.distribution.is_complete:
            return self
        # Clone own blocks, so that in-place changes of the result do not change this operator.
        state = self.distribution.fetch(with_tensors(self._state(), Tensor.clone))
        return type(self)._from_state(state, self.domain).called(self._formula, self.of)

    def save(self, path: str | Path) -> None:
        """Save the operator to a file in the safetensors format; `kfs.load` reads it.

        The file is replaced atomically. Its header is readable text: the library's version and the shapes of
        parameters; for `KFAC` and `EKFAC` also loss, kind of Fisher, sharing, number of examples and seed. If blocks
        have owners, all processes must call this. Rank 0 writes one file, and holds one tensor of other ranks at a
        time.

        Args:
            path: Name of the file, such as `"k.safetensors"`.

        Raises:
            StorageError: If the file cannot be written.
        """
        kind = next(cls.__name__ for cls in type(self).__mro__ if cls.__name__ in {"EKFAC", "KFAC", "BlockDiagonal"})
        shapes = [[name, list(shape)] for name, shape in self.domain.shapes.items()]
        own = {name: str(dtype).removeprefix("torch.") for name, (dtype, _) in self.domain.own.items()}
        space = {"shapes": shapes, "dtype": str(self.dtype).removeprefix("torch."), "own": own}
        with self.distribution.agree("save"):
            self.distribution.write(path, {"kind": kind} | self._about(), self._state() | {"space": space})

    def _about(self) -> dict[str, Any]:
        """Return the readable part of a file's header."""
        return {"parameters": {name: list(shape) for name, shape in self.domain.shapes.items()}}

    def _state(self) -> dict[str, Any]:
        """Return the content of a file, without the space. Lists have the blocks of this process only."""
        return {"groups": [stack.state() for stack in self.own_stacks]}

    @classmethod
    def _from_state(cls, state: Any, space: Space, ranks: Ranks | None = None) -> Self:
        """Load the result of `_state` for all blocks. If there are ranks, each keeps only its own blocks."""
        # In files, stacks are called groups.
        stacks = [Stack.from_state(part) for part in state["groups"]]
        check_coverage([layout for stack in stacks for layout in stack.layouts], space)
        sizes = {layout.name: structure.nbytes for stack in stacks for layout, structure in stack.blocks()}
        distribution = by_bytes(ranks or Ranks(), sizes)
        return cls(space, stacks_of(stacks, distribution), distribution)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """Move all blocks to a device, or convert them, in place."""
        stacks = [Stack(stack.layouts, stack.structure.to(device, dtype)) for stack in self.own_stacks]
        self._set(self.domain.to(device, dtype), stacks, self.distribution)
        return self

    # Algebra.

    def multiply(self, columns: Columns) -> Columns:
        """Return products with columns, computed block by block."""
        columns = {name: t.contiguous() for name, t in columns.items()}
        self.distribution.same_vectors(columns)
        result = {name: self.distribution.empty_like(t) for name, t in columns.items()}
        num_columns = len(next(iter(columns.values())))

        def write(stack: Stack) -> None:
            at_once = _columns_at_once(stack.structure, num_columns)
            for start in range(0, num_columns, at_once):
                some = slice(start, start + at_once)
                M = stack.read({name: columns[name][some] for name in stack.params})
                product = stack.structure.multiply(M.to(stack.structure.like))
                stack.write(product.to(M), {name: result[name][some] for name in stack.params})

        self._write("product", result.values(), write)
        return result

    def multiply_transposed(self, columns: Columns) -> Columns:
        """Return products with the transposed blocks."""
        return self._map_structures(lambda structure: structure.transposed()).multiply(columns)

    def _composed_with(self, other: LinearOperator) -> LinearOperator:
        """Return the product, block by block if both operators have the same blocks and a structure can store it."""
        made = self._combine_blocks(other, product)
        return super()._composed_with(other) if made is None else made.called(*formula_of_both(self, "@", other))

    @property
    def T(self) -> LinearOperator:  # noqa: N802
        """The transpose."""
        if self.symmetric:
            return self
        return self._map_structures(lambda structure: structure.transposed()).called(f"{bracketed(self)}.T")

    def __add__(self, other: LinearOperator) -> LinearOperator:
        made = self._combine_blocks(other, plus)
        return super().__add__(other) if made is None else made.called(*formula_of_both(self, "+", other))

    def __mul__(self, factor: float) -> LinearOperator:
        self.distribution.same(self.formula, factor=factor)
        scaled = super().__mul__(factor)  # checks the number
        made = self._map_structures(lambda structure: structure.scaled(scaled.factor))  # type: ignore[attr-defined]
        return made.called(f"{number(factor)} * {bracketed(self)}")

    __rmul__ = __mul__

    def shift(self, delta: float | Relative) -> LinearOperator:
        """Add `delta` times the identity: a number, or `kfs.Relative` to each block's mean eigenvalue."""
        self.distribution.same(self.formula, delta=delta)
        if isinstance(delta, Relative):
            self._check_symmetric("shifted by relative damping")
            made = self._map_damped(lambda structure, d: structure.shift(d), delta)
        elif not self.symmetric:
            return super().shift(delta)
        else:
            made = self._map_structures(lambda structure: structure.shift(float(delta)))
        return made.called(f"{bracketed(self)}.shift({number(delta)})")

    def _block_of(self, rows: Collection[str], columns: Collection[str]) -> LinearOperator:
        """Return a submatrix for some parameters; as a `BlockDiagonal` if its rows and columns agree, if possible."""
        space = self.domain.subspace(rows)
        if space == self.codomain.subspace(columns):
            parts = restricted(self.own_stacks, space.shapes)
            if self.distribution.all("submatrix", parts is not None):
                made = BlockDiagonal(space, stacked(parts or ()), self.distribution)
                return made.called(f"{bracketed(self)}[{space.listed}; {space.listed}]", self.of)
        return super()._block_of(rows, columns)

    def inverse(self, damping: Damping = 0.0, method: Method = "exact") -> "BlockDiagonal":
        """Return the inverse, after adding damping.

        Args:
            damping: The number to add to eigenvalues: one number, or one for every block, by name. `kfs.Relative(0.1)`
                instead of a number is a multiple of each block's mean eigenvalue.
            method: `"exact"` adds `damping` times the identity, up to round-off. `"factored"` adds multiples of the
                identity to both factors, such that their product grows by about as much (Martens & Grosse, 2015). It
                needs only Cholesky factors, and is exact for blocks in which one factor is a single number, or a
                multiple of the identity. `"per-factor"` adds `damping` to each factor. For a sum of two operators,
                `K1 + K2`, the inverse has a closed form with `"factored"` or `"per-factor"` damping, or without
                damping. With `"exact"` damping or more terms, it is applied using conjugate gradients.

        Returns:
            An operator with the same methods as this one.

        Raises:
            SolverError: If a block is singular, contains NaN, or is not positive semi-definite. If a factor of a
                Kronecker product is singular and there is no damping, its inverse is one over round-off, with a
                warning.

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
        self.distribution.same(self.formula, damping=damping, method=method)
        if method not in METHODS:
            raise ModelError(f"method is {method!r}.", f"Choose from {', '.join(map(repr, METHODS))}.")
        if damping:
            self._check_symmetric("inverted with damping")
        made = self._map_damped(lambda structure, d: damped_inverse(structure, d, method), damping)
        how = "" if method == "exact" else f", {method!r}"
        return made.called(f"{bracketed(self)}.inverse({formula_of(damping)}{how})")

    def solve(self, b: Vec, damping: Damping = 0.0, method: Method = "exact") -> Vec:
        """Return `self.inverse(damping, method) @ b`. To solve for several `b`, compute the inverse once."""
        return self.inverse(damping, method) @ b

    def power(self, exponent: float, damping: Damping = 0.0) -> "BlockDiagonal":
        """Return a power of the operator, after adding `damping` times the identity.

        Args:
            exponent: Any number. Negative ones need damping, or blocks that are not singular.
            damping: One number (or `kfs.Relative`), or one for every block, by name.
        """
        self.distribution.same(self.formula, exponent=exponent, damping=damping)
        self._check_symmetric("raised to a power")
        made = self._map_damped(lambda structure, d: structure.power(float(exponent), d), damping)
        return made.called(f"{bracketed(self)}.power({number(exponent)}, {formula_of(damping)})")

    def trace(self) -> Tensor:
        """Return the sum of all eigenvalues."""
        return self._numbers("trace", lambda stack: stack.apply(lambda structure: structure.trace()).sum()).sum()

    def logdet(self) -> Tensor:
        """Return the logarithm of the determinant; NaN if the determinant is negative.

        For a singular operator, it is minus infinity, with a warning. Most curvature matrices are singular; add damping
        first: `K.shift(damping).logdet()`.
        """
        sign, log = self._slogdet()
        if sign == 0:
            warnings.warn(
                f"{self.formula} is singular, up to round-off, so the logarithm of its determinant is minus "
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
        return self._numbers("norm", lambda stack: stack.apply(lambda structure: structure.squared_norm()).sum()).sum()

    def frobenius_norm(self) -> Tensor:
        """Return the root of the sum of all squared entries."""
        return self.squared_frobenius_norm().sqrt()

    def diagonal(self) -> Tensor:
        """Return the diagonal as a flat vector."""
        columns = self._zeros(1)

        def write(stack: Stack) -> None:
            stack.write(stack.structure.diagonal().unsqueeze(1).to(self.device, self.dtype), columns)

        self._write("diagonal", columns.values(), write)
        return self.domain.flatten(columns).squeeze(0)

    def eigenvalues(self) -> Tensor:
        """Return all eigenvalues, in ascending order."""
        self._check_symmetric("decomposed")
        values = self._numbers("eigenvalues", lambda stack: stack.apply(lambda structure: structure.eigenvalues()))
        return values.sort().values

    def eigh(self) -> "tuple[Tensor, BlockDiagonal]":
        """Return the eigenvalues as a flat vector, and an orthogonal operator with the eigenvectors as columns."""
        self._check_symmetric("decomposed")
        pairs = self._own("eigenvectors", lambda stack: stack.apply(_eigh))
        diagonal = self._with_structures(Eigenbasis.of_diagonal(values) for values, _ in pairs).diagonal()
        return diagonal, self._with_structures(vectors for _, vectors in pairs)

    def mean_eigenvalue(self) -> Tensor:
        """Return the mean eigenvalue of all blocks that are not zero; NaN if there are none."""
        pairs = self._numbers("mean eigenvalue", traces_and_rows).reshape(-1, 2)
        total = torch.zeros_like(pairs[0])
        for pair in pairs:
            total = total + pair
        return total[0] / total[1]

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
        """Draw samples from the normal distribution with this operator plus damping as precision (inverse covariance).

        Args:
            num_samples: Number of samples.
            damping: Multiple of the identity to add, such as the precision of a prior.
            seed: Seed for the samples. The samples of a block depend only on the seed and its name.
            form: `"matrix"` for flat vectors as columns, `"dict"` for tensors by parameter name.

        Returns:
            Samples as columns, `[size, num_samples]`; or the same samples as `{name: [num_samples, *shape]}`.

        Raises:
            ModelError: If there is no such form.
        """
        self.distribution.same(self.formula, num_samples=num_samples, damping=damping, seed=seed, form=form)
        if form not in {"matrix", "dict"}:
            raise ModelError(f"form is {form!r}.", "Choose 'matrix' or 'dict'.")
        columns = self._zeros(num_samples)

        def write(stack: Stack) -> None:
            noise = noise_for(stack, num_samples, seed)
            stack.write(colored(stack.structure, noise).to(self.device, self.dtype), columns)

        self.power(-0.5, damping)._write("sample", columns.values(), write)
        return self.domain.flatten(columns).T if form == "matrix" else self.domain.like_own(columns)

    def to_dense(self, flattening: str | VecFunction = "rvec") -> Tensor:
        """Return the matrix, formed block by block.

        Args:
            flattening: How to flatten each parameter: `"rvec"` (as in flat vectors) or `"cvec"`, or one of the
                functions of `kfs.basics.flattening` with these names.
        """
        order = self.domain.order(flattening)
        dense = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        places = self.domain.unflatten(torch.arange(self.shape[0], device=self.device).unsqueeze(0))

        def write(stack: Stack) -> None:
            index = stack.read(places).flatten(1)  # [stack, d_B * d_A]
            dense[index.unsqueeze(2), index.unsqueeze(1)] = stack.structure.to_dense().to(dense)

        self._write("matrix", [dense], write)
        return dense[order][:, order]

    def _slogdet(self) -> tuple[Tensor, Tensor]:
        """Return sign and logarithm of the determinant."""
        pairs = self._numbers("log-determinant", lambda stack: torch.stack(stack.apply(_slogdet), 1))
        signs, logs = pairs.reshape(-1, 2).T.contiguous()
        return signs.prod(), logs.sum()

    def _zeros(self, num_columns: int) -> Columns:
        """Return columns of zeros."""
        like: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        return {name: torch.zeros(num_columns, *shape, **like) for name, shape in self.domain.shapes.items()}

    def _check_symmetric(self, verb: str) -> None:
        if not self.symmetric:
            raise ModelError(
                f"The operator is not symmetric, so it cannot be {verb}.", "Apply this before multiplying operators."
            )


def _returned(result: T, copy: Stack, stack: Stack) -> T:
    """Return a result for a copy of a stack, with new blocks on the device of the stack.

    Tensors that new blocks share with the copy, such as eigenvectors, become those of the stack.
    """
    if isinstance(result, tuple):
        return cast("T", tuple(_returned(part, copy, stack) for part in result))
    if not isinstance(result, Structure):
        return result
    pairs = zip(copy.structure.tensors(), stack.structure.tensors(), strict=True)
    known = {id(there): here for there, here in pairs}
    device = stack.structure.like.device
    return result.mapped(lambda t: known[id(t)] if id(t) in known else t.to(device))


def _columns_at_once(structure: Structure, num_columns: int) -> int:
    """Return how many columns to multiply together: only one for a large block on a CPU, to make use of its cache."""
    is_large = min(structure.rows, structure.columns) >= _LARGE
    return 1 if is_large and structure.like.device.type == "cpu" else num_columns


def _slogdet(structure: Structure) -> tuple[Tensor, Tensor]:
    return structure.slogdet()


def _eigh(structure: Structure) -> tuple[Tensor, Structure]:
    """Return eigenvalues `[stack, d_B, d_A]`, and eigenvectors as columns of orthogonal blocks."""
    basis = structure.eigenbasis()
    if isinstance(basis, Dense):
        values, vectors = decompositions.eigh(basis.matrix)
        return values.reshape(-1, basis.rows, basis.columns), replace(basis, matrix=vectors, symmetric=False)
    assert isinstance(basis, Eigenbasis)  # noqa: S101 (there is no third structure)
    return basis.values, Kronecker(basis.Q_A, basis.Q_B)
