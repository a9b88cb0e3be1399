r"""How a parameter becomes a matrix.

In its own frame, a block's parameter is a matrix with rows on the gradient side and columns on the input side, $M$ of
shape `[d_B, d_A]`, and the block maps it to $B M A$. A `Layout` says how the parameter becomes that matrix: which
rows of it, in which order of axes, in how many groups, and with which bias as last column.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from kfs.storage import UnfitError

Side = Literal["A", "B"]
# Identifies a block: its weight's name, and the rows of it that belong to the block.
Key = tuple[str, tuple[int, int]]


@dataclass(frozen=True)
class Layout:
    """How a parameter becomes a matrix.

    Attributes:
        weight: Name of the parameter.
        shape: Its shape, or one that it is reshaped to.
        rows: First and one behind the last of its rows (indices of its first axis) that belong to the block.
        order: Order of its axes such that the first `split` make the rows of the matrix.
        split: How many axes make the rows.
        groups: Into how many groups the rows fall, each with a matrix of its own.
        bias: Name of the parameter in the last column of the matrix.
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
        """Undo `dataclasses.asdict`, after a file was read."""
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in state.items()}
        layout = cls(**fields)
        numbers = (*layout.shape, *layout.rows, *layout.order, layout.split, layout.groups)
        names = isinstance(layout.weight, str) and isinstance(layout.bias, str | None)
        sensible = sorted(layout.order) == list(range(len(layout.shape))) and layout.groups > 0
        if not names or not sensible or not all(type(n) is int and n >= 0 for n in numbers):
            raise UnfitError(f"the layout {state} is not one")
        return layout

    @property
    def key(self) -> Key:
        """What identifies the block among all blocks of a model."""
        return self.weight, self.rows

    @property
    def name(self) -> str:
        """The module's name if the block has its `weight` and bias, else the weight's; with rows if not all."""
        module, _, leaf = self.weight.rpartition(".")
        part = "" if self.rows == (0, self.shape[0]) else f"[{self.rows[0]}:{self.rows[1]}]"
        return (module if module and leaf == "weight" and self.bias is not None else self.weight) + part

    @property
    def params(self) -> tuple[str, ...]:
        """The parameters in this block."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @property
    def row_size(self) -> int:
        """Rows of the matrix (of one group): the size of the gradient-based factor."""
        sizes = [self.rows[1] - self.rows[0], *self.shape[1:]]
        return prod(sizes[axis] for axis in self.order[: self.split]) // self.groups

    @property
    def column_size(self) -> int:
        """Columns of the matrix without the bias."""
        sizes = [self.rows[1] - self.rows[0], *self.shape[1:]]
        return prod(sizes[axis] for axis in self.order[self.split :])

    def matrix(self, columns: Mapping[str, Tensor]) -> Tensor:
        """Bring `[K, *shape]` into the form `[K, d_B, d_A]` (or `[K, G, d_B, d_A]`)."""
        W, b = self._parts(columns)
        M = W.reshape(len(W), self.groups, self.row_size, self.column_size)
        if b is not None:
            M = torch.cat([M, b.reshape(len(W), self.groups, self.row_size, 1)], dim=3)
        return M if self.groups > 1 else M.squeeze(1)

    def write(self, M: Tensor, columns: Mapping[str, Tensor]) -> None:
        """Undo `matrix`: write into tensors `[K, *shape]`."""
        W, b = self._parts(columns)
        if b is not None:
            b.copy_(M[..., -1].reshape(b.shape))
            M = M[..., :-1]
        W.copy_(M.reshape(W.shape))

    @property
    def is_plain(self) -> bool:
        """Whether the matrix is the whole parameter as it lies in memory, with the bias beside it."""
        return self.groups == 1 and self.rows == (0, self.shape[0]) and self.order == tuple(range(len(self.shape)))

    def _parts(self, columns: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Return views of the weight's rows, with axes in order, and of the bias' part that belongs to them."""
        W = columns[self.weight].view(-1, *self.shape)[:, self.rows[0] : self.rows[1]]
        W = W.permute(0, *(1 + axis for axis in self.order))
        if self.bias is None:
            return W, None
        b = columns[self.bias]
        whole = self.rows == (0, self.shape[0]) or self.order[0] != 0
        return W, b if whole else b[:, self.rows[0] : self.rows[1]]
