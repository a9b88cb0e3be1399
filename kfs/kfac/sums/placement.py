"""Placement: which blocks there are, and to which one a use belongs."""

from collections.abc import Iterable
from dataclasses import replace

from kfs.kfac.layout import Key, Layout, Side


class Placement:
    """The layouts of all blocks.

    Args:
        layouts: Blocks that are known from before.

    Attributes:
        both_ways: Weights that are used both ways round, after their bias has joined them. That does not fit together:
            a bias is used in one of these ways only.
    """

    def __init__(self, layouts: Iterable[Layout] = ()) -> None:
        self.both_ways: set[str] = set()
        self._layouts: dict[Key, Layout] = {}
        self._blocks_of: dict[str, list[Layout]] = {}
        for layout in layouts:
            self.admit(layout)

    def place(self, layout: Layout, bias: str | None) -> tuple[Layout, Side]:
        """Return the layout of a weight's block, and on which side of it inputs are.

        The bias joins if that is wanted and does not contradict earlier uses. A weight that was used the other way
        round before (an embedding whose transpose computes the logits) has its inputs on the side of the gradients.
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
        """Whether no other block has the same parameters in another way."""
        if layout.key in self._layouts:
            return layout == self._layouts[layout.key]
        start, stop = layout.rows
        others = [other for name in layout.params for other in self._blocks_of.get(name, ())]
        return all(
            other.weight == layout.weight and (other.rows[1] <= start or stop <= other.rows[0]) for other in others
        )

    def admit(self, layout: Layout) -> bool:
        """Take note of a block if it fits, and return whether it does."""
        if not self.fits(layout):
            return False
        if layout.key not in self._layouts:
            self._layouts[layout.key] = layout
            for name in layout.params:
                self._blocks_of.setdefault(name, []).append(layout)
        return True
