r"""How a parameter becomes a matrix, and which block it belongs to (`BlockMap`).

A block's parameter is read as a matrix $M$ of shape `[d_B, d_A]`, with rows on the gradient side and columns on the
input side, and the block maps it to $B M A$. A bias is the last column of $M$. With groups of channels, a parameter
becomes one matrix for each group.

All code that uses layouts has the same axis convention. Several vectors of parameters (*columns*) are processed
together:

- Parameters are given by name, as tensors `[columns, *shape]`.
- `Layout.matrix` returns `[columns, groups, d_B, d_A]`, also for a single group, and `Layout.write` is its inverse.
- Structures take `[stack, columns, d_B, d_A]`, where a stack holds the blocks of several layouts, one for each group.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from kfs.files import UnfitError

Side = Literal["A", "B"]
# Identifies a block: the name of its weight, and the half-open range of rows that belong to the block.
Key = tuple[str, tuple[int, int]]


@dataclass(frozen=True)
class Layout:
    """How a parameter becomes a matrix.

    Attributes:
        weight: Name of the parameter.
        shape: Its shape, or one that it is reshaped to.
        rows: Half-open range of its rows (indices of its first axis) that belong to the block.
        order: Order of its axes in which the first `split` axes form the rows of the matrix.
        split: Number of axes that form the rows.
        groups: Number of groups of channels, each with a matrix of its own.
        bias: Name of the parameter in the last column of the matrix, or `None`.
    """

    weight: str
    shape: tuple[int, ...]
    rows: tuple[int, int]
    order: tuple[int, ...]
    split: int
    groups: int = 1
    bias: str | None = None

    @classmethod
    def from_state(cls, state: Any) -> "Layout":
        """Return the layout from the result of `dataclasses.asdict`, read from a file."""
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in state.items()}
        layout = cls(**fields)
        numbers = (*layout.shape, *layout.rows, *layout.order, layout.split, layout.groups)
        valid = (
            isinstance(layout.weight, str)
            and isinstance(layout.bias, str | None)
            and sorted(layout.order) == list(range(len(layout.shape)))
            and all(type(n) is int and n >= 0 for n in numbers)
            and layout.groups > 0
        )
        if not valid:
            raise UnfitError(f"the layout {state} is invalid")
        return layout

    @property
    def key(self) -> Key:
        """The key of the block, which is unique among all blocks of a model."""
        return self.weight, self.rows

    @property
    def name(self) -> str:
        """The block's name: the module's if the block has its weight and bias, else the weight's; with a row range."""
        module, _, leaf = self.weight.rpartition(".")
        is_module = module and leaf == "weight" and self.bias is not None
        name = module if is_module else self.weight
        start, stop = self.rows
        if (start, stop) == (0, self.shape[0]):
            return name
        return f"{name}[{start}]" if self.is_one_of_stack else f"{name}[{start}:{stop}]"

    @property
    def params(self) -> tuple[str, ...]:
        """The names of the parameters in this block."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def param_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parameters in this block as they are used: weight, and bias if there is one."""
        shapes = {self.weight: self.shape}
        if self.bias is not None:
            size = prod(self.shape[axis] for axis in self.order[: self.split])
            shapes[self.bias] = (self.shape[0], size // self.shape[0]) if self.bias_has_rows else (size,)
        return shapes

    @cached_property
    def matrix_shape(self) -> tuple[int, int, int]:
        """The shape `[groups, d_B, d_A]`; a bias counts as a column."""
        lengths = [self.rows[1] - self.rows[0], *self.shape[1:]]
        in_order = [lengths[axis] for axis in self.order]
        rows, columns = prod(in_order[: self.split]), prod(in_order[self.split :])
        return self.groups, rows // self.groups, columns + (self.bias is not None)

    @property
    def row_size(self) -> int:
        """`d_B`: number of rows of the matrix (of one group), the size of the gradient-based factor."""
        return self.matrix_shape[1]

    @property
    def column_size(self) -> int:
        """Number of columns of the matrix without the bias."""
        return self.matrix_shape[2] - (self.bias is not None)

    def matrix(self, columns: Mapping[str, Tensor]) -> Tensor:
        """Read tensors `[columns, *shape]` as matrices.

        Returns:
            `[columns, groups, d_B, d_A]`.
        """
        W, b = self.views(columns)
        M = W.reshape(len(W), self.groups, self.row_size, self.column_size)
        if b is None:
            return M
        return torch.cat([M, b.reshape(len(W), self.groups, self.row_size, 1)], dim=3)

    def write(self, M: Tensor, columns: Mapping[str, Tensor]) -> None:
        """Write `[columns, groups, d_B, d_A]` into tensors `[columns, *shape]`, the inverse of `matrix`."""
        W, b = self.views(columns)
        if b is not None:
            b.copy_(M[..., -1].reshape(b.shape))
            M = M[..., :-1]
        W.copy_(M.reshape(W.shape))

    def flat_index(self) -> Tensor:
        """Return the index of each entry of the matrix in the block's flat vector.

        The joint matrix `(W b)`, flattened by rows, has entries of the bias in between. The flat vector has them last:
        it consists of the flattened parameters, `params`, one after the other.

        Returns:
            `[groups, d_B, d_A]` indices, so that `flat[layout.flat_index()]` is the matrix.

        Example:
            >>> Layout("weight", (2, 3), (0, 2), (0, 1), 1, bias="bias").flat_index()
            tensor([[[0, 1, 2, 6],
                     [3, 4, 5, 7]]])
        """
        shapes = self.param_shapes()
        sizes = [prod(shape) for shape in shapes.values()]
        places = torch.arange(sum(sizes)).split(sizes)
        columns = {name: t.reshape(1, *shape) for (name, shape), t in zip(shapes.items(), places, strict=True)}
        return self.matrix(columns).squeeze(0)

    @property
    def is_plain(self) -> bool:
        """Whether the matrix is the whole parameter as stored in memory, with the bias beside it."""
        all_rows = self.rows == (0, self.shape[0])
        return self.groups == 1 and all_rows and self.order == tuple(range(len(self.shape)))

    @property
    def is_one_of_stack(self) -> bool:
        """Whether the block is one of the matrices (or vectors) that a parameter stacks along its first axis."""
        return self.rows[1] - self.rows[0] == 1 and self.order[0] == 0 and self.split > 1

    @property
    def turned_order(self) -> tuple[int, ...]:
        """The order of axes for the transposed matrix."""
        fixed = 1 if self.is_one_of_stack else 0  # the stack axis, of length one, stays first
        return self.order[:fixed] + self.order[self.split :] + self.order[fixed : self.split]

    def turned(self) -> "Layout":
        """Return the layout of the transposed matrix. A bias is a column, so there must be none.

        Example:
            >>> Layout("weight", (2, 3), (0, 2), (0, 1), 1).turned()
            Layout(weight='weight', shape=(2, 3), rows=(0, 2), order=(1, 0), split=1, groups=1, bias=None)
        """
        fixed = 1 if self.is_one_of_stack else 0
        return replace(self, order=self.turned_order, split=len(self.order) - self.split + fixed)

    @property
    def bias_has_rows(self) -> bool:
        """Whether the block has the rows of its bias that it has of its weight, and not all of them."""
        return self.rows != (0, self.shape[0]) and self.order[0] == 0

    def views(self, columns: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Return views of the weight's rows with axes in order, and of the bias entries that belong to them."""
        rows = slice(*self.rows)
        W = columns[self.weight].view(-1, *self.shape)[:, rows]
        W = W.permute(0, *(1 + axis for axis in self.order))
        if self.bias is None:
            return W, None
        b = columns[self.bias]
        return W, b[:, rows] if self.bias_has_rows else b


class BlockMap:
    """The layouts of all blocks.

    Attributes:
        both_ways: Weights that are used both directly and transposed, after their bias has joined the block. This is a
            conflict, because the bias is used in one of these ways only.
    """

    def __init__(self, layouts: Iterable[Layout] = ()) -> None:
        self.both_ways: set[str] = set()
        self._layouts: dict[Key, Layout] = {}
        self._blocks_of: dict[str, list[Layout]] = {}
        for layout in layouts:
            self.admit(layout)

    def place(self, layout: Layout, bias: str | None) -> tuple[Layout, Side]:
        """Return the layout of a weight's block, and the side that inputs belong to.

        A given bias joins the block unless that contradicts earlier uses. If the transposed weight was used before (an
        embedding whose transpose computes the logits), the inputs belong to the side of the gradients, `"B"`.
        """
        there = self._layouts.get(layout.key)
        if there is not None:
            if there.order != layout.order and there.order == layout.turned_order:
                if there.bias is None:
                    return there, "B"
                self.both_ways.add(layout.weight)
            return replace(layout, bias=there.bias), "A"
        if bias is None:
            return layout, "A"
        taken = any(other.weight != layout.weight for other in self._blocks_of.get(bias, ()))
        return layout if taken else replace(layout, bias=bias), "A"

    def fits(self, layout: Layout) -> bool:
        """Whether a block is compatible with all others that contain its parameters."""
        if layout.key in self._layouts:
            return layout == self._layouts[layout.key]
        start, stop = layout.rows
        others = [other for name in layout.params for other in self._blocks_of.get(name, ())]
        return all(
            other.weight == layout.weight and (other.rows[1] <= start or stop <= other.rows[0]) for other in others
        )

    def admit(self, layout: Layout) -> bool:
        """Add a block if it fits, and return whether it does."""
        if not self.fits(layout):
            return False
        if layout.key not in self._layouts:
            self._layouts[layout.key] = layout
            for name in layout.params:
                self._blocks_of.setdefault(name, []).append(layout)
        return True


def by_parameter(names: Iterable[str]) -> Callable[[Layout], tuple[int, tuple[int, int]]]:
    """Return the sort key of layouts: the position of their weight among the names of parameters, and their rows."""
    order = {name: place for place, name in enumerate(names)}
    return lambda layout: (order[layout.weight], layout.rows)
