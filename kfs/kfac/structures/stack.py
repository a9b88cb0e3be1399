"""Groups: blocks of one structure and size, with the parameters that they belong to."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from kfs.kfac.layout import Layout
from kfs.kfac.structures.dense import Dense
from kfs.kfac.structures.eigenbasis import Eigenbasis
from kfs.kfac.structures.kronecker import Kronecker
from kfs.kfac.structures.structure import Structure
from kfs.operators.space import Space
from kfs.storage import UnfitError


@dataclass(frozen=True)
class Group:
    """Blocks that are processed together.

    Attributes:
        layouts: How each block's parameter becomes a matrix (or several ones, with groups of channels).
        structure: All units, in order: as many per block as its layout has groups.
    """

    layouts: tuple[Layout, ...]
    structure: Structure

    @property
    def names(self) -> list[str]:
        """The block that each unit belongs to."""
        return [layout.name for layout in self.layouts for _ in range(layout.groups)]

    def read(self, columns: Mapping[str, Tensor]) -> Tensor:
        """Return all blocks' matrices, `[U, K, d_B, d_A]`."""
        parts = [self._units(layout.matrix(columns), layout) for layout in self.layouts]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def write(self, M: Tensor, columns: Mapping[str, Tensor]) -> None:
        """Undo `read`: write into tensors `[K, *shape]`."""
        for layout, units in self.parts():
            part = M[units].transpose(0, 1)
            layout.write(part if layout.groups > 1 else part.squeeze(1), columns)

    def parts(self) -> Iterator[tuple[Layout, slice]]:
        """Go through all blocks, and which units belong to them."""
        start = 0
        for layout in self.layouts:
            yield layout, slice(start, start + layout.groups)
            start += layout.groups

    def state(self) -> dict[str, Any]:
        """Return everything, for a file."""
        kind = next(kind for kind, cls in _KINDS.items() if type(self.structure) is cls)
        return {"layouts": [asdict(layout) for layout in self.layouts], "kind": kind, "blocks": self.structure.state()}

    @classmethod
    def from_state(cls, state: Any) -> "Group":
        """Undo `state`."""
        layouts = tuple(map(Layout.from_state, state["layouts"]))
        units, rows = sum(layout.groups for layout in layouts), layouts[0].row_size
        sizes = {layout.column_size + (layout.bias is not None) for layout in layouts}
        if {layout.row_size for layout in layouts} != {rows} or len(sizes) != 1:
            raise UnfitError("blocks of different sizes are together")
        return cls(layouts, _KINDS[state["kind"]].from_state(state["blocks"], units, rows, sizes.pop()))

    @staticmethod
    def _units(M: Tensor, layout: Layout) -> Tensor:
        return M.transpose(0, 1) if layout.groups > 1 else M.unsqueeze(0)


_KINDS: dict[str, type[Structure]] = {"kronecker": Kronecker, "eigenbasis": Eigenbasis, "dense": Dense}


def grouped(parts: Iterable[tuple[Layout, Structure]]) -> list[Group]:
    """Put blocks of one structure and size together."""
    by_key: dict[Any, list[tuple[Layout, Structure]]] = {}
    for layout, structure in parts:
        by_key.setdefault(structure.key, []).append((layout, structure))
    return [
        Group(tuple(layout for layout, _ in same), type(same[0][1]).stack([structure for _, structure in same]))
        for same in by_key.values()
    ]


def unused_rows(layouts: Iterable[Layout], space: Space) -> list[Layout]:
    """Return layouts for rows of parameters that no block has; their curvature is zero."""
    layouts = list(layouts)
    result = []
    for name in space.shapes:
        mine = sorted(layout.rows for layout in layouts if layout.weight == name)
        if not mine:  # a bias within its weight's block
            continue
        first = next(layout for layout in layouts if layout.weight == name)
        edges = [0, *(edge for rows in mine for edge in rows), first.shape[0]]
        order = tuple(range(len(first.shape)))
        gaps = [(low, high) for low, high in zip(edges[::2], edges[1::2], strict=True) if high > low]
        result += [Layout(name, first.shape, gap, order, 1) for gap in gaps]
    return result


def check_cover(layouts: Iterable[Layout], space: Space) -> None:
    """Check that blocks cover all entries of all parameters once.

    Raises:
        UnfitError: If they do not.
    """
    counts = {name: torch.zeros(1, *shape) for name, shape in space.shapes.items()}
    for layout in layouts:
        layout.write(layout.matrix(counts) + 1, counts)
    if not all((t == 1).all() for t in counts.values()):
        raise UnfitError("blocks do not cover all parameters once")


def zero_block(layout: Layout, space: Space) -> Structure:
    """Return a block of zeros, for entries of a parameter that predictions do not depend on."""
    zeros = torch.zeros((), dtype=torch.promote_types(space.dtype, torch.float32), device=space.device)
    return Eigenbasis.of_diagonal(zeros.expand(1, layout.row_size, layout.column_size))
