r"""A Triton kernel that adds one triangle of $X^\top X$ to a total: a candidate for `add_gram`.

The result is divided into tiles. Only tiles that reach the diagonal or are above it are computed. For each tile,
several programs sum over disjoint slices of the rows of $X$ ("split-K") and add their sums to the total by atomic
additions. So small results, which have few tiles, keep all multiprocessors busy, and the total is changed in place. The
order of these additions is not fixed: results differ by round-off from run to run.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

triton: Any = None
tl: Any = None
try:
    triton = import_module("triton")
    tl = import_module("triton.language")
except ImportError:  # part of PyTorch for CUDA only
    pass

if TYPE_CHECKING:
    constexpr = int  # the name that Triton looks up
else:
    constexpr = int if triton is None else tl.constexpr


def compiled(function: Any) -> Any:
    """Let Triton compile a function, if it is installed."""
    return function if triton is None else triton.jit(function)


@dataclass(frozen=True)
class Tiling:
    """The division of the work. A tile is square, or its width is a multiple of its height.

    Attributes:
        height: Rows of a tile.
        width: Columns of a tile.
        depth: Number of rows of $X$ per multiplication.
        warps: Warps of a program.
        stages: Number of steps by which loads are ahead.
    """

    height: int = 128
    width: int = 128
    depth: int = 64
    warps: int = 8
    stages: int = 3

    def tiles(self, size: int) -> int:
        """Return the number of tiles that reach the diagonal of a square result or are above it."""
        ratio = self.width // self.height
        columns = -(-size // self.width)
        return sum(columns - row // ratio for row in range(-(-size // self.height)))


TILINGS = {
    torch.bfloat16: (
        Tiling(128, 128, warps=4, stages=4),
        Tiling(128, 128, warps=8, stages=3),
        Tiling(128, 128, warps=8, stages=4),
        Tiling(128, 256, warps=8, stages=3),
    ),
    # Entries of four bytes need twice the shared memory.
    torch.float32: (
        Tiling(128, 128, depth=32, warps=4, stages=3),
        Tiling(128, 128, depth=32, warps=8, stages=4),
        Tiling(128, 128, depth=64, warps=8, stages=3),
    ),
}


@compiled
def tile_of(number, columns, RATIO: constexpr):  # type: ignore[no-untyped-def]
    """Return row and column of a tile by its number; in row `i`, the first tile is in column `i // RATIO`."""
    row = 0
    first = 0
    while number >= columns - first:
        number -= columns - first
        row += 1
        first = row // RATIO
    return row, first + number


@compiled
def triangle(  # type: ignore[no-untyped-def]
    total,
    x,
    rows,
    size,
    total_stride,
    x_stride,
    slices,
    HEIGHT: constexpr,
    WIDTH: constexpr,
    DEPTH: constexpr,
):
    """Add one tile's sum over one slice of rows."""
    row, column = tile_of(tl.program_id(0), tl.cdiv(size, WIDTH), WIDTH // HEIGHT)
    i = row * HEIGHT + tl.arange(0, HEIGHT)
    j = column * WIDTH + tl.arange(0, WIDTH)
    length = tl.cdiv(tl.cdiv(rows, DEPTH), slices) * DEPTH
    start = tl.program_id(1) * length
    stop = tl.minimum(start + length, rows)
    found = tl.zeros((HEIGHT, WIDTH), dtype=tl.float32)
    for k in range(start, stop, DEPTH):
        n = k + tl.arange(0, DEPTH)
        line = x + n.to(tl.int64)[:, None] * x_stride
        left = tl.load(line + i[None, :], mask=(n < stop)[:, None] & (i < size)[None, :], other=0.0)
        right = tl.load(line + j[None, :], mask=(n < stop)[:, None] & (j < size)[None, :], other=0.0)
        found = tl.dot(tl.trans(left), right, found, input_precision="tf32")
    place = total + i.to(tl.int64)[:, None] * total_stride + j[None, :]
    # Entries below the diagonal may have other values.
    inside = (j < size)[None, :] & (i[:, None] <= j[None, :])
    tl.atomic_add(place, found, mask=inside, sem="relaxed")


def slices_for(tiling: Tiling, rows: int, size: int, programs: int) -> int:
    """Return the number of slices of rows for a wanted number of programs, each with sufficient work."""
    most = max(1, rows // (4 * tiling.depth))
    return max(1, min(most, round(programs / tiling.tiles(size))))


def add_triangle(total: Tensor, x: Tensor, tiling: Tiling, slices: int) -> None:
    """Add the upper triangle of $X^T X$ to a total in float32.

    Args:
        total: `[D, D]`, changed in place.
        x: `[rows, D]`, float32 (rounded to TF32) or in half precision; entries of a row are contiguous.
        tiling: How to divide the work.
        slices: Number of programs that share the rows of a tile.
    """
    rows, size = x.shape
    triangle[tiling.tiles(size), slices](
        total,
        x,
        rows,
        size,
        total.stride(0),
        x.stride(0),
        slices,
        HEIGHT=tiling.height,
        WIDTH=tiling.width,
        DEPTH=tiling.depth,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
