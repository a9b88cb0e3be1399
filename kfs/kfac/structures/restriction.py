"""Submatrices of block-diagonal operators that keep their structure."""

from collections.abc import Collection, Iterable
from dataclasses import replace

from kfs.kfac.layout import Layout
from kfs.kfac.structures.congruence import can_be_dense, small_dense
from kfs.kfac.structures.dense import Dense
from kfs.kfac.structures.eigenbasis import Eigenbasis
from kfs.kfac.structures.factor import Factor
from kfs.kfac.structures.kronecker import Kronecker
from kfs.kfac.structures.kronecker_sum import KroneckerSum
from kfs.kfac.structures.stack import Stack
from kfs.kfac.structures.structure import Structure


def restricted(stacks: Iterable[Stack], names: Collection[str]) -> list[tuple[Layout, Structure]] | None:
    """Return the parts of blocks that belong to some parameters.

    A block that is wanted as a whole stays as it is. Of a weight and a bias that share a block, one may be wanted: some
    columns of the matrix.

    Returns:
        Layouts and structures; `None` if a part has no structure.
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
    """Return how a bias that shares the block of a weight becomes a matrix by itself, with one column."""
    assert layout.bias is not None  # noqa: S101 (it is wanted)
    size = layout.groups * layout.row_size
    if not layout.bias_has_rows:
        return Layout(layout.bias, (size,), (0, size), (0,), 1, layout.groups)
    num_rows = layout.rows[1] - layout.rows[0]
    shape = (layout.shape[0], size // num_rows)
    return Layout(layout.bias, shape, layout.rows, (0, 1), 2, layout.groups)


def _with_columns(structure: Structure, columns: slice) -> Structure | None:
    """Return the submatrix of blocks for some columns of the matrix that they act on. `None` if it has no structure."""
    if isinstance(structure, Kronecker):
        return Kronecker(_submatrix(structure.A, columns), structure.B)
    if isinstance(structure, KroneckerSum):
        return KroneckerSum(tuple(Kronecker(_submatrix(term.A, columns), term.B) for term in structure.terms))
    if isinstance(structure, Eigenbasis) and structure.Q_A.kind == "identity":
        noise = structure.noise if structure.noise.ndim == 1 else structure.noise[:, :, columns]
        return Eigenbasis(_submatrix(structure.Q_A, columns), structure.Q_B, structure.values[:, :, columns], noise)
    if not can_be_dense(structure):
        return None
    # The eigenvectors of a submatrix are others.
    whole = small_dense(structure).matrix
    sizes = (structure.rows, structure.columns)
    part = whole.reshape(-1, *sizes, *sizes)[:, :, columns, :, columns]
    num_columns = part.shape[2]
    size = structure.rows * num_columns
    return Dense(part.reshape(-1, size, size), structure.rows, num_columns, structure.symmetric)


def _submatrix(factor: Factor, part: slice) -> Factor:
    """Return some rows and columns of factors."""
    return replace(factor, values=factor.values[:, part, part] if factor.kind == "dense" else factor.values[:, part])
