"""Block-diagonal operators: one structured block per parameter (with its bias), and algebra on them.

The algebra of a single block is in the other files of this folder.

Contracts, for a `BlockDiagonal` operator `K`, a vector `v` and numbers `d`, `p`:

    K.inverse(d) @ (K.shift(d) @ v) == v           K.power(-1.0) @ v == K.inverse() @ v
    K.to_dense().logdet() == K.logdet()            K.to_dense().trace() == K.trace()
    values, Q = K.eigh(); Q @ (values * (Q.T @ v)) == K @ v

Blocks may have owners (`OwnedBlocks`). Without owners, every process has all blocks, and no method communicates. With
owners, each block is on one rank, and all ranks call the same methods. Each rank computes the results of its own
blocks, and has zeros for the others. So the sum over ranks is the result, with the same bits on all of them.
"""

import hashlib
import warnings
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, Self, overload

import torch
from torch import Tensor

from kfs.basics.flattening import VecFunction
from kfs.display.charts import draw_spectra
from kfs.display.describe import Description, Table, counted, number, readable_size, times
from kfs.display.suggestions import ByName, suggest
from kfs.distributed import Ranks, Same, add_up, check_same
from kfs.distributed.assignment import EIGENVALUES, Part, place
from kfs.distributed.collectives import fetched, joined, write_joined
from kfs.errors import DistributedError, KfsWarning, ModelError, UnknownAttributeError, UnknownNameError
from kfs.factors.blocks import decompositions
from kfs.factors.blocks.congruence import Congruence, can_be_dense, small_dense
from kfs.factors.blocks.damping import (
    METHODS,
    Damping,
    Method,
    Relative,
    absolute_damping,
    damped_inverse,
    damping_by_name,
    traces_and_rows,
)
from kfs.factors.blocks.dense import Dense
from kfs.factors.blocks.eigenbasis import Eigenbasis
from kfs.factors.blocks.factor import Factor
from kfs.factors.blocks.kronecker import Kronecker
from kfs.factors.blocks.kronecker_sum import IterativeInverse, KroneckerSum, plus, product
from kfs.factors.blocks.stack import Stack, check_coverage, stacked
from kfs.factors.blocks.structure import Structure
from kfs.factors.layout import Layout
from kfs.files import with_tensors
from kfs.operators.linear_operator import LinearOperator, bracketed
from kfs.operators.solve import Vec
from kfs.operators.space import Columns, Space

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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


def restricted(stacks: Iterable[Stack], names: Collection[str]) -> list[tuple[Layout, Structure]] | None:
    """Return the parts of blocks that belong to the named parameters.

    If a weight and a bias share a block and only one of them is named, the part is a submatrix: some columns of the
    matrix that the block acts on. Other blocks are returned unchanged.

    Returns:
        Layouts and structures; `None` if no structure can store a part.
    """
    result = []
    for stack in stacks:
        for layout, part in stack.slices():
            wanted = [name for name in layout.params if name in names]
            if not wanted:
                continue
            structure: Structure | None = stack.structure[part]
            if len(wanted) < len(layout.params):
                is_weight = wanted == [layout.weight]
                structure = _with_columns(stack.structure[part], slice(0, -1) if is_weight else slice(-1, None))
                layout = replace(layout, bias=None) if is_weight else _layout_of_bias(layout)  # noqa: PLW2901
            if structure is None:
                return None
            result.append((layout, structure))
    return result


def _layout_of_bias(layout: Layout) -> Layout:
    """Return the layout of a bias without the weight that it shares a block with: a matrix with one column."""
    assert layout.bias is not None  # noqa: S101 (its name was given)
    size = layout.groups * layout.row_size
    if not layout.bias_has_rows:
        return Layout(layout.bias, (size,), (0, size), (0,), 1, layout.groups)
    num_rows = layout.rows[1] - layout.rows[0]
    shape = (layout.shape[0], size // num_rows)
    return Layout(layout.bias, shape, layout.rows, (0, 1), 2, layout.groups)


def _with_columns(structure: Structure, columns: slice) -> Structure | None:
    """Return submatrices of blocks, for some columns of the matrix that they act on; `None` if no structure fits."""
    if isinstance(structure, Kronecker):
        return Kronecker(_submatrix(structure.A, columns), structure.B)
    if isinstance(structure, KroneckerSum):
        return KroneckerSum(tuple(Kronecker(_submatrix(term.A, columns), term.B) for term in structure.terms))
    if isinstance(structure, Eigenbasis) and structure.Q_A.kind == "identity":
        noise = structure.noise if structure.noise.ndim == 1 else structure.noise[:, :, columns]
        return Eigenbasis(_submatrix(structure.Q_A, columns), structure.Q_B, structure.values[:, :, columns], noise)
    if not can_be_dense(structure):
        return None
    # A submatrix has other eigenvectors, so it is formed densely.
    whole = small_dense(structure).matrix
    sizes = (structure.rows, structure.columns)
    part = whole.reshape(-1, *sizes, *sizes)[:, :, columns, :, columns]
    num_columns = part.shape[2]
    size = structure.rows * num_columns
    return Dense(part.reshape(-1, size, size), structure.rows, num_columns, structure.symmetric)


def _submatrix(factor: Factor, part: slice) -> Factor:
    """Return the same rows and columns of all factors."""
    return replace(factor, values=factor.values[:, part, part] if factor.kind == "dense" else factor.values[:, part])


class Listed(NamedTuple):
    """Metadata of a block, known to all ranks."""

    layout: Layout
    kind: str
    nbytes: int
    symmetric: bool
    rank: int | None = None  # the owner rank; `None` if all ranks have the block


class VisibleBlocks(LinearOperator):
    """An operator that shows its blocks: in a table, and by plots of their eigenvalues."""

    _formula = ""
    _of = ""

    @property
    @abstractmethod
    def stacks(self) -> list[Stack]:
        """The blocks; blocks of the same structure and size are stacked."""

    @property
    def structures(self) -> dict[str, Structure]:
        """The structure of each block, by name. With groups of channels, it is a stack of one block per group."""
        return ByName({layout.name: structure for layout, structure in self._blocks_in_order()}, "block")

    def _blocks_in_order(self) -> list[tuple[Layout, Structure]]:
        """Return all blocks, in the order of parameters."""
        found = [(layout, stack.structure[part]) for stack in self.stacks for layout, part in stack.slices()]
        place_of = self._order()
        return sorted(found, key=lambda block: place_of(block[0]))

    def _order(self) -> Callable[[Layout], tuple[int, tuple[int, int]]]:
        """Return the sort key of blocks: the position of their parameter, and their rows."""
        order = {name: place for place, name in enumerate(self.domain.shapes)}
        return lambda layout: (order[layout.weight], layout.rows)

    def _listed(self) -> list[Listed]:
        """List all blocks in the order of parameters, without communication."""
        return [
            Listed(layout, kind_of(structure), structure.nbytes, structure.symmetric)
            for layout, structure in self._blocks_in_order()
        ]

    @property
    def formula(self) -> str:
        """The expression that the operator was computed by, such as `"KFAC.inverse(0.001)"`."""
        return self._formula or type(self).__name__

    @property
    def of(self) -> str:
        """A short description of model and loss; empty if unknown."""
        return self._of

    def describe(self) -> Description:
        """Describe all blocks, without reading their numbers."""
        rows = []
        listed = self._listed()
        for block in listed:
            shape = block.layout.matrix_shape
            size = times(shape if block.layout.groups > 1 else shape[1:])
            rank = "" if block.rank is None else str(block.rank)
            rows.append((block.layout.name, size, block.kind, readable_size(block.nbytes), rank))
        facts = (f"{counted(len(rows), 'block')}, {readable_size(sum(block.nbytes for block in listed))}",)
        table = Table("blocks", ("block", "matrix", "structure", "bytes", "rank"), rows, ("bytes", "rank"))
        return Description(self.about, facts, (table,))

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
        structures = self.structures
        dampings = damping_by_name(damping, set(structures))
        spectra = {}
        added = {}
        for name in chosen(names, structures):
            values = structures[name].eigenvalues().flatten().cpu()
            spectra[name] = values.sort(descending=True).values
            d = dampings[name]
            added[name] = d.fraction * max(float(values.mean()), 0.0) if isinstance(d, Relative) else d
        return draw_spectra(spectra, added, axes)

    def made_of(self, one: LinearOperator, sign: str, other: LinearOperator) -> Self:
        """Set `formula` to that of a sum or product, for `repr`; return the operator itself."""
        left, right = (one.formula, other.formula) if sign == "+" else (bracketed(one), bracketed(other))
        both = dict.fromkeys(part for part in (one.of, other.of) if part)  # two models, or one
        return self.called(f"{left} {sign} {right}", " and ".join(both))

    def called(self, formula: str, of: str | None = None) -> Self:
        """Set `formula`, and `of` if given, for `repr`; return the operator itself."""
        self._formula = formula
        self._of = self._of if of is None else of
        return self


def kind_of(structure: Structure) -> str:
    """Return the name of a structure and its factors, for tables.

    Example:
        >>> import torch
        >>> from kfs import KFAC, EmpiricalRisk
        >>> model = torch.nn.Linear(3, 2)
        >>> X, y = torch.rand(2, 9, 3), torch.rand(2, 9, 2)
        >>> K1, K2 = (KFAC(EmpiricalRisk(model, torch.nn.MSELoss(), data), "empirical") for data in zip(X, y))
        >>> print(K1 + K2)
        KFAC + KFAC of Linear with MSELoss (mean): 8 x 8, float32 on cpu, symmetric
          1 block, 160 B
        blocks
        block   matrix  structure                    bytes
        ------  ------  ---------------------------  -----
        weight  2 x 4   sum of 2 Kronecker products  160 B
        >>> kind_of((K1 + K2).inverse(0.1, "factored").structures["weight"])
        'diagonal in a common basis'
        >>> kind_of((K1 + K2).inverse(0.1).structures["weight"])
        'inverse of a sum of 3 Kronecker products, by conjugate gradients'
    """
    if isinstance(structure, Kronecker):
        return f"Kronecker, A {describe_factor(structure.A)}, B {describe_factor(structure.B)}"
    if isinstance(structure, KroneckerSum):
        return f"sum of {len(structure.terms)} Kronecker products"
    if isinstance(structure, IterativeInverse):
        return f"inverse of a {kind_of(structure.total)}, by conjugate gradients"
    if isinstance(structure, Congruence):
        return "diagonal in a common basis"
    if isinstance(structure, Eigenbasis):
        trivial = structure.Q_A.kind == structure.Q_B.kind == "identity"
        return "diagonal" if trivial else "eigenvalues and eigenvectors"
    return type(structure).__name__.lower()


def describe_factor(factor: Factor) -> str:
    """Return kind and size of a factor, such as `"dense 4x4"`."""
    return kind_and_size(factor.kind, factor.size)


def kind_and_size(kind: str, size: int, groups: int = 1) -> str:
    """Return kind and size of a factor, such as `"dense 4x4"` or `"diagonal 4"`; `"dense 2x4x4"` for two groups."""
    shape = [groups] * (groups > 1) + [size] * (2 if kind == "dense" else 1)
    return f"{kind} {'x'.join(map(str, shape))}"


def shown(damping: object) -> str:
    """Return the text of a damping in a formula."""
    return "damping of each block" if isinstance(damping, Mapping) else number(damping)


def chosen(names: Iterable[str] | None, known: Iterable[str]) -> list[str]:
    """Return the names of the given blocks; all names by default.

    Raises:
        UnknownNameError: If there is no block of that name.
    """
    known = list(known)
    if names is None:
        return known
    asked = [names] if isinstance(names, str) else list(names)
    unknown = [name for name in asked if name not in known]
    if unknown:
        raise UnknownNameError(f"There are no blocks {unknown}.", suggest(unknown, known))
    return asked


class _Load:
    """Raises an error that points to `kfs.load`, because users may look for `load` beside `save`.

    There is no such method, because the file determines the class.
    """

    def __get__(self, operator: object, cls: type) -> NoReturn:
        raise UnknownAttributeError(
            f"{cls.__name__} has no 'load'.", "Use kfs.load(path), which returns an object of the class that was saved."
        )


class OwnedBlocks(VisibleBlocks):
    """An operator with its blocks on all ranks, or each block on its owner rank.

    Args:
        space: The space that the operator acts on.
        stacks: The blocks of this process. `None` if a subclass creates them later.
        ranks: The ranks that own blocks. By default, this process has all blocks.

    Attributes:
        ranks: As above.
    """

    # Keys of `_state` with lists of per-block content, which are concatenated over ranks.
    _lists: tuple[str, ...] = ("groups",)
    load = _Load()

    def __init__(self, space: Space, stacks: list[Stack] | None, ranks: Ranks | None = None) -> None:
        super().__init__(space, space)
        self._stacks = stacks
        self.ranks = Ranks() if ranks is None else ranks
        self._of_all_ranks: list[Listed] | None = None
        if stacks is not None:
            self._list_blocks()

    @property
    def _ranks(self) -> Ranks:
        return self.ranks

    @property
    def stacks(self) -> list[Stack]:
        """All blocks; blocks of the same structure and size are stacked.

        Raises:
            DistributedError: If blocks have owners, because this process does not have all of them.
        """
        if self.ranks.are_several:
            raise DistributedError(
                f"The blocks of {self.formula} are owned by {self.ranks.size} processes, and this needs all of them in "
                "each process.",
                "Call K.gathered() in all processes, which copies all blocks to each of them, or compute K with "
                "placement='replicated'.",
            )
        return self.own_stacks

    @property
    def own_stacks(self) -> list[Stack]:
        """The blocks of this process: all blocks, or the ones that it owns."""
        assert self._stacks is not None  # noqa: S101 (subclasses that create them later override this)
        return self._stacks

    @property
    def symmetric(self) -> bool:  # type: ignore[override]
        """Whether all blocks are symmetric."""
        if self._of_all_ranks is not None:
            return all(block.symmetric for block in self._of_all_ranks)
        return all(stack.structure.symmetric for stack in self.own_stacks)

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks, on all ranks."""
        return sum(block.nbytes for block in self._listed())

    def _listed(self) -> list[Listed]:
        """List all blocks in the order of parameters, without communication."""
        return super()._listed() if self._of_all_ranks is None else self._of_all_ranks

    def _list_blocks(self) -> None:
        """Exchange the metadata of all blocks between ranks."""
        if not self.ranks.are_several:
            return
        mine = []
        for stack in self.own_stacks:
            for layout, part in stack.slices():
                s = stack.structure[part]
                mine.append(Listed(layout, kind_of(s), s.nbytes, s.symmetric, self.ranks.rank))
        place_of = self._order()
        found = [block for blocks in self.ranks.gather("blocks", mine) for block in blocks]
        self._of_all_ranks = sorted(found, key=lambda block: place_of(block.layout))

    def _check_same(self, **arguments: object) -> None:
        """Raise an error if arguments differ between ranks. Otherwise, each block would use those of its owner."""
        # Compare text, because NaN differs from itself. The order of a dictionary does not matter.
        texts = {n: sorted(map(repr, v.items())) if isinstance(v, Mapping) else repr(v) for n, v in arguments.items()}
        self.ranks.same(f"The arguments for {self.formula}", texts, "Pass the same arguments in all processes.")

    def _add_up(self, parts: Iterable[Tensor]) -> None:
        """Sum over ranks the tensors that each rank has computed from its own blocks, in place."""
        add_up(self.ranks, self.formula, parts)

    def _joined(self, values: Tensor) -> Tensor:
        """Return the concatenated numbers of all ranks, in the order of ranks."""
        if not self.ranks.are_several:
            return values
        found = self.ranks.gather("numbers of blocks", (len(values), values.dtype))
        sizes = [size for size, _ in found]
        start = sum(sizes[: self.ranks.rank])
        # A rank without blocks does not know the precision of the others.
        result = values.new_zeros(sum(sizes), dtype=reduce(torch.promote_types, [dtype for _, dtype in found]))
        result[start : start + len(values)] = values
        self._add_up([result])
        return result

    def gathered(self) -> Self:
        """Return the same operator with copies of all blocks in every process. All processes must call it.

        Example:
            >>> from kfs import KFAC, EmpiricalRisk
            >>> risk = EmpiricalRisk(torch.nn.Linear(3, 2), torch.nn.MSELoss(), (torch.rand(9, 3), torch.rand(9, 2)))
            >>> K = KFAC(risk, placement="owner").gathered()
        """
        if not self.ranks.are_several:
            return self
        # Clone own blocks, so that in-place changes of the result do not change this operator.
        own = with_tensors(self._state(), Tensor.clone)
        state = fetched(joined(self.ranks, own, self._lists))
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
        space = {"shapes": shapes, "dtype": str(self.dtype).removeprefix("torch.")}
        with self.ranks.agreed("save"):
            state = joined(self.ranks, self._state(), self._lists, root=0)
            write_joined(self.ranks, path, {"kind": kind} | self._about(), state | {"space": space})

    def _about(self) -> dict[str, Any]:
        """Return the readable part of a file's header."""
        return {"parameters": {name: list(shape) for name, shape in self.domain.shapes.items()}}

    def _state(self) -> dict[str, Any]:
        """Return the content of a file, without the space. Contains only the blocks of this process."""
        return {"groups": [stack.state() for stack in self.own_stacks]}

    @classmethod
    def _from_state(cls, state: Any, space: Space, ranks: Ranks | None = None) -> Self:
        """Load the result of `_state` for all blocks. If there are ranks, each keeps only its own blocks."""
        # In files, stacks are called groups.
        stacks = [Stack.from_state(part) for part in state["groups"]]
        check_coverage([layout for stack in stacks for layout in stack.layouts], space)
        if ranks is None or not ranks.are_several:
            return cls(space, stacks)
        parts = [
            Part(layout.name, EIGENVALUES, stack.structure[part].nbytes, diagonal=(True,), itemsize=1, eigen=True)
            for stack in stacks
            for layout, part in stack.slices()
        ]
        owners = {block: rank for (block, _), rank in place(parts, ranks.size).owners.items()}
        return cls(space, of_owner(stacks, owners, ranks), ranks)


def of_owner(stacks: list[Stack], owners: Mapping[str, int], ranks: Ranks) -> list[Stack]:
    """Return the blocks that this process owns; all if it is alone. Rank 0 owns blocks without an assigned owner."""
    if not ranks.are_several:
        return stacks
    parts = [(layout, stack.structure[part]) for stack in stacks for layout, part in stack.slices()]
    return stacked([(layout, one) for layout, one in parts if owners.get(layout.name, 0) == ranks.rank])


_SAME_VECTORS = "Broadcast vectors, or draw them from the same seed in all processes."
_LARGE = 256  # rows and columns; for smaller factors, products with one column are limited by reading the factors


class BlockDiagonal(OwnedBlocks):
    """An operator with structured blocks on its diagonal, and zeros elsewhere.

    Args:
        space: The space that the operator acts on.
        stacks: The blocks of this process. The blocks of all processes together cover every parameter once. `None` if
            a subclass creates them later.
        ranks: The ranks that own blocks. By default, this process has all blocks.
    """

    def multiply(self, columns: Columns) -> Columns:
        """Return products with columns, computed block by block."""
        columns = {name: t.contiguous() for name, t in columns.items()}
        check_same(self.ranks, "product", {"The vectors to multiply with": Same(columns, _SAME_VECTORS)})
        # Rows of blocks on other ranks stay zero, for the sum over ranks.
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
        """Return products with the transposed blocks."""
        return self._map_structures(lambda structure: structure.transposed()).multiply(columns)

    def _composed_with(self, other: LinearOperator) -> LinearOperator:
        """Return the product, block by block if both operators have the same blocks and a structure can store it."""
        made = self._combine_blocks(other, product)
        return super()._composed_with(other) if made is None else made.made_of(self, "@", other)

    @property
    def T(self) -> LinearOperator:  # noqa: N802
        """The transpose."""
        if self.symmetric:
            return self
        return self._map_structures(lambda structure: structure.transposed()).called(f"{bracketed(self)}.T")

    def __add__(self, other: LinearOperator) -> LinearOperator:
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
        """Return a submatrix for some parameters; as a `BlockDiagonal` if its rows and columns agree, if possible."""
        space = self.domain.subspace(rows)
        if space == self.codomain.subspace(columns):
            parts = restricted(self.own_stacks, space.shapes)
            if all(self.ranks.gather("submatrix", parts is not None)):
                made = BlockDiagonal(space, stacked(parts or ()), self.ranks)
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
        self._check_same(damping=damping, method=method)
        if method not in METHODS:
            raise ModelError(f"method is {method!r}.", f"Choose from {', '.join(map(repr, METHODS))}.")
        if damping:
            self._check_symmetric("inverted with damping")
        made = self._map_damped(lambda structure, d: damped_inverse(structure, d, method), damping)
        how = "" if method == "exact" else f", {method!r}"
        return made.called(f"{bracketed(self)}.inverse({shown(damping)}{how})")

    def solve(self, b: Vec, damping: Damping = 0.0, method: Method = "exact") -> Vec:
        """Return `self.inverse(damping, method) @ b`. To solve for several `b`, compute the inverse once."""
        return self.inverse(damping, method) @ b

    def power(self, exponent: float, damping: Damping = 0.0) -> "BlockDiagonal":
        """Return a power of the operator, after adding `damping` times the identity.

        Args:
            exponent: Any number. Negative ones need damping, or blocks that are not singular.
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
        """Return the eigenvalues as a flat vector, and an orthogonal operator with the eigenvectors as columns."""
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

    def to_dense(self, flattening: str | VecFunction = "rvec") -> Tensor:
        """Return the matrix, formed block by block.

        Args:
            flattening: How to flatten each parameter: `"rvec"` (as in flat vectors) or `"cvec"`, or one of the
                functions of `kfs.basics.flattening` with these names.
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
        """Return an operator with the same layouts and new structures, one for each stack."""
        with self.ranks.agreed("blocks"):  # iterating may compute the structures
            pairs = zip(self.own_stacks, structures, strict=True)
            stacks = [Stack(stack.layouts, structure) for stack, structure in pairs]
        return BlockDiagonal(self.domain, stacks, self.ranks).called("", self.of)

    def _map_structures(self, function: Callable[[Structure], Structure]) -> "BlockDiagonal":
        """Return the operator after applying a function to all structures."""
        return self._with_structures(stack.apply(function) for stack in self.own_stacks)

    def _map_damped(self, function: Callable[[Structure, Tensor], Structure], damping: Damping) -> "BlockDiagonal":
        """Return the operator after applying a function to all structures and their dampings, `[stack]`."""
        numbers = damping_by_name(damping, {block.layout.name for block in self._listed()})
        # Only blocks of zeros need the mean, but a rank does not know whether other ranks have such blocks.
        mean = self.mean_eigenvalue() if any(isinstance(d, Relative) for d in numbers.values()) else 0.0
        return self._with_structures(
            stack.apply(function, absolute_damping(stack, numbers, mean)) for stack in self.own_stacks
        )

    def mean_eigenvalue(self) -> Tensor:
        """Return the mean eigenvalue of all blocks that are not zero; NaN if there are none."""
        with self.ranks.agreed("mean eigenvalue"):
            found = traces_and_rows(self.own_stacks)
        trace, rows = self._joined(found).reshape(-1, 2).sum(0).unbind()
        return trace.div(rows)

    def _combine_blocks(
        self, other: object, function: Callable[[Structure, Structure], Structure | None]
    ) -> "BlockDiagonal | None":
        """Combine two operators block by block; `None` if blocks differ or no structure can store a result."""
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
        """Sum a function that returns one number for every block, `[stack]`, over all blocks."""
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
        """Return an empty tensor, the result of a process that owns no block."""
        return torch.zeros(0, dtype=self.dtype, device=self.device)

    def _check_symmetric(self, verb: str) -> None:
        if not self.symmetric:
            raise ModelError(
                f"The operator is not symmetric, so it cannot be {verb}.", "Apply this before multiplying operators."
            )


def _columns_at_once(structure: Structure, num_columns: int) -> int:
    """Return how many columns to multiply together: only one for a large block on a CPU, to make use of its cache."""
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
