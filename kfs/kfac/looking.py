"""How KFAC and EKFAC show themselves: model and loss, settings, data, and a table of all blocks."""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Protocol

from kfs.charts import Panel, draw_factors
from kfs.describing import Description, Table, counted, readable_size, times
from kfs.kfac.block import Block
from kfs.kfac.layout import Side
from kfs.kfac.settings import Settings
from kfs.kfac.structures import chosen
from kfs.kfac.structures.looking import kind_and_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Shown in any case; other settings are shown where they differ from their default.
_ALWAYS = ("fisher", "sharing")


def describe_factors(about: str, blocks: Mapping[str, Block], settings: Settings, data: str) -> Description:
    """Describe an operator that has Kronecker factors, without looking at a number of them.

    Args:
        about: The title.
        blocks: All blocks.
        settings: All settings.
        data: How many data it comes from.
    """
    nbytes = readable_size(sum(block.nbytes for block in blocks.values()))
    counts = f"{data}, {counted(len(blocks), 'block')}, {nbytes} of factors"
    rows = []
    for block in blocks.values():
        layout = block.layout
        size = times(layout.matrix_shape if layout.groups > 1 else layout.matrix_shape[1:])
        operations = ", ".join(sorted(block.operations))
        sides = describe_side(block, "A"), describe_side(block, "B")
        rows.append((block.name, size, *sides, operations, readable_size(block.nbytes)))
    table = Table("blocks", ("block", "matrix", "A", "B", "operations", "bytes"), rows, ("bytes",))
    return Description(about, (_settings(settings), counts), (table,))


class _HasBlocks(Protocol):
    @property
    def blocks(self) -> Mapping[str, Block]: ...


class ShowsFactors:
    """An operator that has Kronecker factors, and can draw them."""

    def plot(self: "_HasBlocks", names: Iterable[str] | None = None, *, most: int = 12) -> "list[Axes]":
        """Draw the factors `A` and `B` of every block as heat maps, into a new figure.

        Args:
            names: Blocks to draw. By default all of them; if there are more than `most`, the first ones that are not
                just a vector, as biases and scales are.
            most: How many blocks to draw if none are named.

        Returns:
            Axes of matplotlib: of `A` and `B`, block by block.
        """
        blocks = self.blocks
        shown = chosen(names, blocks)
        if names is None and len(shown) > most:
            matrices = [name for name in shown if min(blocks[name].layout.matrix_shape[1:]) > 1]
            shown = (matrices or shown)[:most]
        panels = [Panel(name, blocks[name].A, blocks[name].B) for name in shown]
        return draw_factors(panels, left_out=0 if names is not None else len(blocks) - len(shown))


def describe_side(block: Block, side: Side) -> str:
    """Describe a factor of a block, whatever its number of groups."""
    _, rows, columns = block.layout.matrix_shape
    kind = "diagonal" if block.is_diagonal(side) else "dense"
    if side == "B" and block.sums.forward_only:
        kind = "identity"
    return kind_and_size(kind, columns if side == "A" else rows)


def _settings(settings: Settings) -> str:
    values = {f.name: getattr(settings, f.name) for f in fields(settings)}
    default = {f.name: f.default for f in fields(settings)}
    return ", ".join(f"{name}={v!r}" for name, v in values.items() if name in _ALWAYS or v != default[name])
