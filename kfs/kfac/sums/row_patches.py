r"""The patch covariance for an accelerator: shifts along the first axis of images, patches along the others.

The block of two kernel offsets is the sum over output positions $p$ of $x_{p+a} x_{p+b}^\top$. Let $z_q$ have all
numbers that the kernel's offsets along the other axes touch in row $q$ of an image. If the first axis has stride one,
the block of the rows $a, b$ of the kernel is the sum over rows $q$ of $z_q z_{q+b-a}^\top$, up to a few rows at the
border: a 3x3 kernel needs three products with a third of the columns, which are a third of the operations of one with
all of them. Rows are stored first axis first, so that a shift is an offset in memory.

On a CPU, where small operations cost little, shifts along all axes take still fewer operations; see `patches`.
"""

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from kfs.kfac.sums.precision import HALF

Range = tuple[int, int]


class Windows(NamedTuple):
    """Where a kernel looks, one number (or pair) for each spatial axis."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[Range, ...]  # zeros before and after
    dilation: tuple[int, ...]
    out: tuple[int, ...]  # number of output positions

    @property
    def but_first(self) -> "Windows":
        """All axes but the first."""
        return Windows(*(numbers[1:] for numbers in self))  # type: ignore[arg-type]


def rows_pay(windows: Windows, height: int) -> bool:
    """Whether shifts along the first axis need fewer operations than patches; strips save up to 40 % of theirs."""
    (kernel, *_), (stride, *_), (out, *_) = windows.kernel, windows.stride, windows.out
    return stride == 1 and kernel * height < 0.6 * kernel**2 * out


def add_by_rows(total: Tensor, x: Tensor, windows: Windows) -> None:
    """Add the covariance of all patches to a total.

    Args:
        total: `[channels * kernel, channels * kernel]`, changed in place, below the diagonal, too.
        x: Images, `[images, channels, *spatial]`.
        windows: Where patches are. The first axis has stride one.
    """
    kernel, _, padding, dilation, out = windows
    channels, height = x.shape[1:3]
    z = _rows(x, windows.but_first)
    split = (channels, kernel[0], prod(kernel[1:]))
    blocks = total.unflatten(1, split).unflatten(0, split)
    for step in range(kernel[0]):
        shift = step * dilation[0]
        if shift >= height:
            break
        whole = _product(z[:, : height - shift], z[:, shift:], split, total.dtype)
        # All pairs of kernel rows with this distance, the later one second; and first.
        blocks.diagonal(step, 1, 4).add_(whole.unsqueeze(-1))
        if step:
            blocks.diagonal(-step, 1, 4).add_(whole.permute(2, 3, 0, 1).unsqueeze(-1))
        for a in range(kernel[0] - step):
            first = a * dilation[0] - padding[0][0]  # the row of the image that belongs to the first row of outputs
            for start, stop in _missing(first, out[0], height - shift):
                border = _product(z[:, start:stop], z[:, start + shift : stop + shift], split, total.dtype)
                blocks[:, a, :, :, a + step].sub_(border)
                if step:
                    blocks[:, a + step, :, :, a].sub_(border.permute(2, 3, 0, 1))


def _rows(x: Tensor, windows: Windows) -> Tensor:
    """Write down patches along all axes but the first: `[channels * kernel, rows, images * positions]`."""
    kernel, stride, padding, dilation, out = windows
    flat = [side for pad in reversed(padding) for side in pad]
    x = F.pad(x, flat) if any(flat) else x
    images, channels, rows, *others = x.stride()
    steps = [d * n for d, n in zip(dilation, others, strict=True)]
    hops = [s * n for s, n in zip(stride, others, strict=True)]
    shape = (x.shape[1], *kernel, x.shape[2], len(x), *out)
    view = x.as_strided(shape, (channels, *steps, rows, images, *hops), x.storage_offset())
    return view.reshape(x.shape[1] * prod(kernel), x.shape[2], -1)


def _missing(first: int, count: int, rows: int) -> Iterator[Range]:
    """Yield which of the rows `0, ..., rows - 1` are not among `count` rows from `first` on."""
    if first > 0:
        yield 0, min(first, rows)
    if first + count < rows:
        yield max(first + count, 0), rows


def _product(left: Tensor, right: Tensor, split: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
    """Sum outer products over rows and positions: `[channels, kernel, channels, kernel]`, in a precision."""
    left, right = left.flatten(1), right.flatten(1).T
    product: Tensor
    if left.dtype in HALF and left.is_cuda:  # pragma: no cover (tested on a GPU)
        product = torch.mm(left, right, out_dtype=dtype)
    else:
        product = left.to(dtype) @ right.to(dtype)
    return product.reshape(*split[::2], *split[::2])
