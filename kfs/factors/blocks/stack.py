"""Stacks: blocks of one structure and size, with the parameters that they belong to."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from kfs.distributed.distribution import Distribution
from kfs.errors import SolverError
from kfs.factors.blocks.congruence import Congruence, can_be_dense, small_dense
from kfs.factors.blocks.decompositions import BlockError
from kfs.factors.blocks.dense import Dense
from kfs.factors.blocks.eigenbasis import Eigenbasis
from kfs.factors.blocks.factor import Factor
from kfs.factors.blocks.kronecker import Kronecker
from kfs.factors.blocks.kronecker_sum import IterativeInverse, KroneckerSum
from kfs.factors.blocks.structure import Structure
from kfs.factors.layout import Layout
from kfs.files import UnfitError
from kfs.operators.space import Space
from kfs.runtime.precision import at_least_float32

Answer = TypeVar("Answer")
# Structures by their names in files.
_CLASSES: dict[str, type[Structure]] = {
    "kronecker": Kronecker,
    "eigenbasis": Eigenbasis,
    "dense": Dense,
    "kronecker sum": KroneckerSum,
    "congruence": Congruence,
    "iterative inverse": IterativeInverse,
}


@dataclass(frozen=True)
class Stack:
    """Blocks that are processed together.

    Attributes:
        layouts: The matrix layouts of parameters. A layout with groups of channels has one block for each group.
        structure: The blocks of all layouts, in order.
    """

    layouts: tuple[Layout, ...]
    structure: Structure

    @property
    def names(self) -> list[str]:
        """The name of each block of the stack. Groups of channels have the name of their layout."""
        return [layout.name for layout in self.layouts for _ in range(layout.groups)]

    @property
    def params(self) -> list[str]:
        """Names of all parameters that blocks act on."""
        return [name for layout in self.layouts for name in layout.params]

    def slices(self) -> Iterator[tuple[Layout, slice]]:
        """Yield each layout with the slice of the stack that contains its blocks."""
        start = 0
        for layout in self.layouts:
            yield layout, slice(start, start + layout.groups)
            start += layout.groups

    def blocks(self) -> Iterator[tuple[Layout, Structure]]:
        """Yield each layout with its blocks, as views."""
        for layout, part in self.slices():
            yield layout, self.structure[part]

    def read(self, columns: Mapping[str, Tensor]) -> Tensor:
        """Return the matrices of all blocks, `[stack, columns, d_B, d_A]`."""
        parts = [layout.matrix(columns).transpose(0, 1) for layout in self.layouts]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def write(self, M: Tensor, columns: Mapping[str, Tensor]) -> None:
        """Write matrices `[stack, columns, d_B, d_A]` into tensors `[columns, *shape]`; the opposite of `read`."""
        for layout, part in self.slices():
            layout.write(M[part].transpose(0, 1), columns)

    def per_block(self, numbers: Mapping[str, float]) -> Tensor:
        """Return numbers given by block name as a tensor, `[stack]`."""
        return self.structure.like.new_tensor([numbers[name] for name in self.names])

    def apply(self, function: Callable[..., Answer], *args: Any) -> Answer:
        """Return the result of a function of the structure and further arguments.

        Raises:
            SolverError: If the function raises a `BlockError`. The message contains the block's name.
        """
        try:
            return function(self.structure, *args)
        except BlockError as error:
            raise SolverError(
                f"A factor of block {self.names[error.index]!r} {error.cause}.",
                "Check its data and gradients; for singular factors, pass damping.",
            ) from error

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "Stack":
        """Return the stack with a function applied to all tensors of its blocks."""
        return Stack(self.layouts, self.structure.mapped(function))

    def state(self) -> dict[str, Any]:
        """Return the stack as the content of a file."""
        kind = next(kind for kind, cls in _CLASSES.items() if type(self.structure) is cls)
        layouts = [asdict(layout) for layout in self.layouts]
        return {"layouts": layouts, "kind": kind, "blocks": self.structure.state()}

    @classmethod
    def from_state(cls, state: Any) -> "Stack":
        """Load the result of `state`."""
        layouts = tuple(map(Layout.from_state, state["layouts"]))
        sizes = {layout.matrix_shape[1:] for layout in layouts}
        if len(sizes) != 1:
            raise UnfitError("blocks of different sizes are in one stack")
        count = sum(layout.groups for layout in layouts)
        return cls(layouts, _CLASSES[state["kind"]].from_state(state["blocks"], count, *sizes.pop()))


def stacked(parts: Iterable[tuple[Layout, Structure]]) -> list[Stack]:
    """Return stacks, each of all blocks with the same structure and size."""
    by_key: dict[Any, list[tuple[Layout, Structure]]] = {}
    for layout, structure in parts:
        by_key.setdefault(structure.key, []).append((layout, structure))
    stacks = []
    for same in by_key.values():
        layouts, structures = zip(*same, strict=True)
        stacks.append(Stack(layouts, type(structures[0]).stack(structures)))
    return stacks


def stacks_of(stacks: list[Stack], distribution: Distribution) -> list[Stack]:
    """Return the blocks that this process has, from stacks of all blocks."""
    if distribution.is_complete:
        return stacks
    blocks = (block for stack in stacks for block in stack.blocks())
    return stacked((layout, structure) for layout, structure in blocks if distribution.has(layout.name))


def stacked_with_zeros(parts: Iterable[tuple[Layout, Structure]], space: Space) -> list[Stack]:
    """Return stacks of blocks, with blocks of zeros for rows of parameters that no block contains."""
    parts = list(parts)
    return stacked([*parts, *zero_blocks([layout for layout, _ in parts], space)])


def zero_blocks(layouts: Iterable[Layout], space: Space) -> list[tuple[Layout, Structure]]:
    """Return blocks of zeros for rows of parameters that no block contains; they need no memory."""
    zeros = torch.zeros((), dtype=at_least_float32(space.dtype), device=space.device)
    unused = layouts_of_unused_rows(layouts, space)
    return [(layout, Eigenbasis.of_diagonal(zeros.expand(layout.matrix_shape))) for layout in unused]


def layouts_of_unused_rows(layouts: Iterable[Layout], space: Space) -> list[Layout]:
    """Return layouts for rows of parameters that no block contains. Their curvature is zero."""
    shapes = {name: tuple(shape) or (1,) for name, shape in space.shapes.items()}
    used: dict[str, list[tuple[int, int]]] = {name: [] for name in shapes}
    for layout in layouts:
        shapes[layout.weight] = layout.shape
        used[layout.weight].append(layout.rows)
        if layout.bias is not None:
            used[layout.bias].append(layout.rows if layout.bias_has_rows else (0, shapes[layout.bias][0]))
    result = []
    for name, shape in shapes.items():
        # Gaps are between the end of one range of rows and the start of the next one.
        ranges = sorted(used[name])
        starts = [0, *(end for _, end in ranges)]
        ends = [*(start for start, _ in ranges), shape[0]]
        gaps = [(start, end) for start, end in zip(starts, ends, strict=True) if start < end]
        result += [Layout(name, shape, gap, tuple(range(len(shape))), 1) for gap in gaps]
    return result


def check_coverage(layouts: Iterable[Layout], space: Space) -> None:
    """Raise an `UnfitError` unless blocks cover every entry of every parameter exactly once."""
    counts = {name: torch.zeros(1, *shape) for name, shape in space.shapes.items()}
    for layout in layouts:
        layout.write(layout.matrix(counts) + 1, counts)
    if not all((t == 1).all() for t in counts.values()):
        raise UnfitError("blocks do not cover all parameters once")


def restricted(stacks: Iterable[Stack], names: Collection[str]) -> list[tuple[Layout, Structure]] | None:
    """Return the parts of blocks that belong to the named parameters.

    If a weight and a bias share a block and only one of them is named, the part is a submatrix: some columns of the
    matrix that the block acts on. Other blocks are returned unchanged.

    Returns:
        Layouts and structures; `None` if no structure can store a part.
    """
    result = []
    for stack in stacks:
        for layout, whole in stack.blocks():
            wanted = [name for name in layout.params if name in names]
            if not wanted:
                continue
            structure: Structure | None = whole
            if len(wanted) < len(layout.params):
                is_weight = wanted == [layout.weight]
                structure = _with_columns(whole, slice(0, -1) if is_weight else slice(-1, None))
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
