r"""Inputs of convolutions: patches of images, and their covariance, usually computed without forming them.

The rule that rewrites a convolution lives in `kfs.factors.rules.convolution`.

The patch covariance has a block for every two kernel offsets $a, b$: the sum over output positions $p$ of
$x_{p+a} x_{p+b}^\top$. At stride one, it can be computed without forming all patches, in two ways:

- *Shifts along all axes*, on a CPU, where small operations cost little. $q = p + a$ runs over the whole image except
  for a few rows and columns at its border. So the block is the image's autocorrelation at the shift $b - a$, minus
  border strips. A 3x3 kernel has 45 blocks but only 13 shifts. In images that are stored row by row with zeros between
  rows, a shift is an offset in memory, so that no autocorrelation needs a copy.
- *Shifts along the first axis, patches along the others*, on an accelerator (`_rows`). Let $z_q$ have all numbers
  that the kernel's offsets along the other axes touch in row $q$ of an image. If the first axis has stride one, the
  block of the kernel's rows $a, b$ is the sum over rows $q$ of $z_q z_{q+b-a}^\top$, up to a few rows at the border. A
  3x3 kernel needs three products with a third of the columns, which take a third of the operations of one product with
  all columns. Rows are stored first axis first, so that a shift is an offset in memory.

If neither way applies or saves operations, patches are formed, a few images at a time.
"""

from collections.abc import Iterator
from functools import cache
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from kfs.factors.accumulate.inputs import Inputs, Use, Vectors, chosen
from kfs.factors.accumulate.outer_products import HALF, OuterProductSum, multiplying, rounded
from kfs.factors.accumulate.row_products import PlainVectors, RowProducts, at_a_time
from kfs.factors.rows.row_map import RowMap, StridedRows
from kfs.runtime import sync
from kfs.runtime.precision import at_least_float32

Range = tuple[int, int]


# Patches are formed for a few images at a time, so that they fill about this many bytes.
_PATCH_BYTES = {False: 2**26, True: 2**28}  # on a CPU, on an accelerator


class Patches(Inputs):
    """Patches of images `x` of shape `[images, channels, *spatial]`.

    Args:
        shape: The shape of the images.
        kernel: Kernel size per spatial axis.
        stride: Stride per spatial axis.
        padding: Zeros before and after, per spatial axis (a negative number crops).
        dilation: Dilation per spatial axis.
        groups: Number of channel groups.
        mirrored: Whether patches are in the reverse order of the operation's output positions.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        kernel: tuple[int, ...],
        stride: tuple[int, ...],
        padding: tuple[Range, ...],
        dilation: tuple[int, ...],
        groups: int,
        mirrored: bool = False,
    ) -> None:
        self.kernel = kernel
        self.stride = stride
        self.dilation = dilation
        self.groups = groups
        self.mirrored = mirrored
        self.crop = tuple((max(-before, 0), max(-after, 0)) for before, after in padding)
        self.padding = tuple((max(before, 0), max(after, 0)) for before, after in padding)
        self.spatial = tuple(n - sum(off) for n, off in zip(shape[2:], self.crop, strict=True))
        self.out = tuple(
            (n + sum(pad) - d * (k - 1) - 1) // s + 1
            for n, pad, k, s, d in zip(self.spatial, self.padding, kernel, stride, dilation, strict=True)
        )
        self.channels = shape[1] // groups
        self.size = self.channels * prod(kernel)
        self.overlap = prod(kernel)
        self.per_row = prod(self.out)
        self._pad = [side for pad in reversed(self.padding) for side in pad]  # as `F.pad` takes it

    def add_to(self, total: OuterProductSum, x: Tensor, ones: bool, counted: Tensor | None = None) -> float | Tensor:
        """Add the patch covariance."""
        x = rounded(self._cropped(x), total.products)  # before patches repeat each number
        if counted is not None:
            return self._add_counted(total, x, ones, counted)
        positions = len(x) * prod(self.out)
        # Choose the method with the fewest operations; shifts do not form the patches.
        if total.diagonal or self.groups > 1:
            self._add_patches(total, x)
        elif sync.is_asynchronous(x.device) and self._rows_pay():
            each = self._at_a_time(x, prod(self.kernel[1:]) * self.spatial[0] * prod(self.out[1:]))
            with multiplying(total.products):
                for some_x in x.split(each):
                    self._add_by_rows(total.inner, some_x)
        elif self._shifts_pay(x):
            self._add_by_shifts(total.inner, x)
        else:
            self._add_patches(total, x)
        if ones:
            total.add_ones(self._sums(x).sum(0), positions)
        return positions

    def _add_counted(self, total: OuterProductSum, x: Tensor, ones: bool, counted: Tensor) -> float | Tensor:
        """Add the patches at positions that count, a few images at a time."""
        each = self._at_a_time(x, prod(self.kernel) * prod(self.out))
        numbers = []
        for some_x, some in zip(x.split(each), self._in_order_of_patches(counted).split(each), strict=True):
            vectors, number = chosen(self._vectors(some_x).squeeze(0), some.flatten())
            total.add(vectors, ones, number)
            numbers.append(number)
        return sum(numbers)

    def _in_order_of_patches(self, positions: Tensor) -> Tensor:
        """Reorder values at the output positions of each image, `[images, positions, ...]`, to the order of patches."""
        return positions.flip(1) if self.mirrored else positions

    def _add_patches(self, total: OuterProductSum, x: Tensor) -> None:
        """Form patches and add their outer products, a few images at a time."""
        for some_x in x.split(self._at_a_time(x, prod(self.kernel) * prod(self.out))):
            total.add(self._vectors(some_x))

    def _at_a_time(self, x: Tensor, numbers: int) -> int:
        """Return how many images to process together, given how many numbers are stored per image and channel."""
        limit = _PATCH_BYTES[x.device.type != "cpu"]
        return max(1, limit // (x.element_size() * self.channels * self.groups * numbers))

    def leading(self, x: Tensor) -> tuple[int, ...]:
        """Return the axis of images: all positions of an image belong to the same example."""
        return (len(x),)

    def sums(self, x: Tensor, row_map: RowMap) -> tuple[Tensor, Tensor]:
        """Sum the patches of each example."""
        if row_map.counted is not None:
            dtype = at_least_float32(x.dtype)
            counted = self._in_order_of_patches(row_map.counted)
            patches = self._vectors(self._cropped(x)).reshape(*counted.shape, -1)
            of_images = torch.where(counted.unsqueeze(2), patches, 0).sum(1, dtype=dtype)
            sums = row_map.by_datum(of_images).sum(1)
            return sums.unflatten(1, (self.groups, -1)), row_map.numbers_counted(dtype).sum((1, 2))
        sums = row_map.by_datum(self._sums(self._cropped(x))).sum(1)  # an example may have several images
        return sums.unflatten(1, (self.groups, -1)), row_map.counts(len(x), sums) * prod(self.out)

    def shared(self, use: Use) -> int:
        """Return the number of rows per example: one for each position of its images."""
        return super().shared(use) * prod(self.out)

    def rows(self, use: Use, g: Tensor, by_place: bool = False) -> RowProducts:
        """Form all patches, with their gradients."""
        ((patches, g),) = self._with_gradients(use.x, g, all_at_once=True)
        # An example may have several images; the positions of all of them are its rows.
        x, g = (use.row_map.by_datum(t, trailing=2).flatten(1, 2) for t in (patches, g))
        x, g = (t.unflatten(2, (self.groups, -1)).permute(2, 0, 1, 3) for t in (x, g))
        return RowProducts(PlainVectors(x, 1.0 if use.ones else None), PlainVectors(g))

    def gradients(self, use: Use, g: Tensor) -> Iterator[Tensor]:
        """Yield per-example gradients, forming patches for a few images at a time."""
        several = self._has_several_images(use)
        for patches, some_g in self._with_gradients(use.x, g, all_at_once=several):
            patches, some_g = (t.unflatten(2, (self.groups, -1)) for t in (patches, some_g))  # noqa: PLW2901
            gradients = some_g.permute(0, 2, 3, 1) @ patches.transpose(1, 2)
            if use.ones:
                gradients = torch.cat([gradients, some_g.sum(1).unsqueeze(3)], 3)
            yield use.row_map.by_datum(gradients, trailing=3).sum(1) if several else gradients

    def add_squares(self, total: Tensor, use: Use, g: Tensor, Q_A: Tensor | None, Q_B: Tensor | None) -> None:
        """Add squares, treating patches of a few images at a time as vectors; a convolution rotates them."""
        if self.groups > 1 or self._has_several_images(use):
            super().add_squares(total, use, g, Q_A, Q_B)
            return
        vectors = Vectors(self.size)
        # With few positions, rotating the patches is cheaper than rotating the gradients.
        if Q_A is not None and prod(self.out) <= g.shape[-1]:
            g = self._in_order_of_patches(g)
            step = at_a_time(g, prod(self.out) * Q_A.shape[2])
            for some_x, some_g in zip(self._cropped(use.x).split(step), g.split(step), strict=True):
                rotated = self._rotated(some_x.to(total.dtype), Q_A[0], use.ones)
                some = Use(vectors, rotated, StridedRows(len(some_x), prod(self.out)), ones=False)
                vectors.add_squares(total, some, some_g, None, Q_B)
            return
        for patches, some_g in self._with_gradients(use.x, g):
            some = Use(vectors, patches, StridedRows(len(patches), prod(self.out)), use.ones)
            vectors.add_squares(total, some, some_g, Q_A, Q_B)

    def _cropped(self, x: Tensor) -> Tensor:
        """Crop pixels where padding is negative."""
        for axis, (before, after) in enumerate(self.crop, start=2):
            if before or after:
                x = x.narrow(axis, before, x.shape[axis] - before - after)
        return x

    def _rotated(self, x: Tensor, Q: Tensor, ones: bool) -> Tensor:
        """Return patches in another basis, `[images, positions, d_A]`; the last row of `Q` belongs to the bias."""
        weight = Q[: self.size].T.reshape(-1, self.channels, *self.kernel)
        convolution = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[len(self.kernel)]
        bias = Q[-1] if ones else None
        rotated: Tensor = convolution(F.pad(x, self._pad), weight, bias, self.stride, 0, self.dilation)
        return rotated.flatten(2).transpose(1, 2)

    def _has_several_images(self, use: Use) -> bool:
        """Whether an example may have more than one image."""
        return not use.row_map.in_order(len(use.x))

    def _with_gradients(self, x: Tensor, g: Tensor, all_at_once: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield patches and their gradients, a few images at a time: `[images, positions, features]` each."""
        g = self._in_order_of_patches(g.to(torch.promote_types(g.dtype, x.dtype)))
        step = len(g) if all_at_once else at_a_time(g, self.size * prod(self.out) * self.groups)
        for some_x, some_g in zip(self._cropped(x).split(step), g.split(step), strict=True):
            patches = self._vectors(some_x.to(g.dtype))
            yield patches.unflatten(1, (len(some_x), -1)).squeeze(0), some_g

    def _sums(self, x: Tensor) -> Tensor:
        """Sum patches over positions, one axis after the other: `[images, groups * features]`."""
        sums = x.to(at_least_float32(x.dtype))
        for axis in range(len(self.kernel)):
            dim = 2 + axis  # the spatial axes before it have become kernel axes
            parts = []
            total = sums.sum(dim) if self.stride[axis] == 1 else None
            for i in range(self.kernel[axis]):
                if total is None:
                    parts.append(sums.index_select(dim, self._pixels(axis, i, sums.device)).sum(dim))
                else:
                    ranges = self._outside(axis, i, self.spatial[axis])
                    outside = [sums.narrow(dim, low, high - low).sum(dim) for low, high in ranges]
                    parts.append(sum((-part for part in outside), total))
            sums = torch.stack(parts, dim)
        return sums.flatten(1)

    def _pixels(self, axis: int, i: int, device: torch.device) -> Tensor:
        """Return the indices of the pixels that offset `i` of the kernel reads along an axis."""
        step, offset = self.stride[axis], i * self.dilation[axis] - self.padding[axis][0]
        first = max(0, -(offset // step))  # outputs before this one read padding
        last = min(self.out[axis] - 1, (self.spatial[axis] - 1 - offset) // step)
        return torch.arange(first, max(first, last + 1), device=device) * step + offset

    def _outside(self, axis: int, i: int, rows: int) -> Iterator[Range]:
        """Yield the half-open ranges of the first `rows` pixels that offset `i` does not read, at stride one."""
        first, count = i * self.dilation[axis] - self.padding[axis][0], self.out[axis]
        if first > 0:
            yield 0, min(first, rows)
        if first + count < rows:
            yield max(first + count, 0), rows

    def _vectors(self, x: Tensor) -> Tensor:
        """Form patches, `[1, positions, groups * features]`, with positions next to each other in memory."""
        x = F.pad(x, self._pad).transpose(0, 1)
        patches = x.new_empty(x.shape[0], prod(self.kernel), x.shape[1], *self.out)
        for place, offset in enumerate(product(*map(range, self.kernel))):
            window = [
                slice(i * d, i * d + (n - 1) * s + 1, s)
                for i, d, n, s in zip(offset, self.dilation, self.out, self.stride, strict=True)
            ]
            patches[:, place] = x[(slice(None), slice(None), *window)]
        return patches.reshape(self.groups * self.size, -1).T.unsqueeze(0)

    def _rows_pay(self) -> bool:
        """Whether shifts along the first axis need fewer operations than patches, for which strips save up to 40 %."""
        kernel = self.kernel[0]
        return self.stride[0] == 1 and kernel * self.spatial[0] < 0.6 * kernel**2 * self.out[0]

    def _add_by_rows(self, total: Tensor, x: Tensor) -> None:
        """Add the patch covariance `[C * kernel, C * kernel]`, by shifts along the first axis, which has stride one."""
        height, rows, split = self.spatial[0], self.kernel[0], (self.channels, prod(self.kernel[1:]))
        z = self._rows(x)
        blocks = total.unflatten(1, (split[0], rows, split[1])).unflatten(0, (split[0], rows, split[1]))

        def outer(left: Tensor, right: Tensor) -> Tensor:
            """Sum outer products over rows and positions: `[channels, kernel, channels, kernel]`."""
            left, right = left.flatten(1), right.flatten(1).T
            if left.dtype in HALF and left.is_cuda:  # pragma: no cover (tested on a GPU)
                return torch.mm(left, right, out_dtype=total.dtype).reshape(*split, *split)
            return (left.to(total.dtype) @ right.to(total.dtype)).reshape(*split, *split)

        for step in range(rows):
            shift = step * self.dilation[0]
            if shift >= height:
                break
            whole = outer(z[:, : height - shift], z[:, shift:])
            # Add to all pairs of kernel rows at this distance, in both orders.
            blocks.diagonal(step, 1, 4).add_(whole.unsqueeze(-1))
            if step:
                blocks.diagonal(-step, 1, 4).add_(whole.permute(2, 3, 0, 1).unsqueeze(-1))
            for a in range(rows - step):
                # Subtract the rows of the image that this kernel row does not read.
                for start, stop in self._outside(0, a, height - shift):
                    border = outer(z[:, start:stop], z[:, start + shift : stop + shift])
                    blocks[:, a, :, :, a + step].sub_(border)
                    if step:
                        blocks[:, a + step, :, :, a].sub_(border.permute(2, 3, 0, 1))

    def _rows(self, x: Tensor) -> Tensor:
        """Form patches along all axes but the first: `[channels * kernel, rows, images * positions]`."""
        kernel, flat = self.kernel[1:], self._pad[:-2]
        x = F.pad(x, flat) if any(flat) else x
        images, channels, rows, *others = x.stride()
        steps = [d * n for d, n in zip(self.dilation[1:], others, strict=True)]
        hops = [s * n for s, n in zip(self.stride[1:], others, strict=True)]
        shape = (x.shape[1], *kernel, x.shape[2], len(x), *self.out[1:])
        view = x.as_strided(shape, (channels, *steps, rows, images, *hops), x.storage_offset())
        return view.reshape(x.shape[1] * prod(kernel), x.shape[2], -1)

    def _shifts_pay(self, x: Tensor) -> bool:
        """Whether autocorrelations need fewer operations than patches. Only on a CPU: they are many small products."""
        if any(s != 1 for s in self.stride) or x.device.type != "cpu":
            return False
        gaps = [0, *(d * (k - 1) for k, d in zip(self.kernel[1:], self.dilation[1:], strict=True))]
        frame = prod(n + gap for n, gap in zip(self.spatial, gaps, strict=True))
        shifts = (prod(2 * k - 1 for k in self.kernel) + 1) / 2
        blocks = prod(self.kernel) * (prod(self.kernel) + 1) / 2
        return shifts * frame < 0.9 * blocks * prod(self.out)

    def _add_by_shifts(self, total: Tensor, x: Tensor) -> None:
        """Add the patch covariance `[C * kernel, C * kernel]` from autocorrelations and border strips."""
        # The first axis is the slowest one in memory and needs no gap: pixels shifted beyond its end are cut off.
        first, *others = self.spatial
        gaps = [d * (k - 1) for k, d in zip(self.kernel[1:], self.dilation[1:], strict=True)]
        widths = [n + gap for n, gap in zip(others, gaps, strict=True)]
        frame = x.new_zeros(self.channels, first, len(x), *widths, dtype=total.dtype)
        inside: tuple[Any, ...] = (..., *(slice(n) for n in others))
        image = frame[inside].movedim(1, 2)  # [C, N, *spatial]
        image.copy_(x.transpose(0, 1))
        flat, strides = frame.flatten(1), image.stride()[2:]

        # In the flattened frame, every shift is an offset. Gaps of zeros absorb pixels that are shifted beyond an axis.
        @cache
        def autocorrelation(shift: tuple[int, ...]) -> Tensor:
            offset = min(sum(map(prod, zip(shift, strides, strict=True))), flat.shape[1])
            return flat[:, : flat.shape[1] - offset] @ flat[:, offset:].T

        @cache
        def strip(ranges: tuple[Range, ...], shift: tuple[int, ...]) -> Tensor | None:
            """Sum products over pixels within the given ranges, if the shifted pixel is inside of the image."""
            near, far = [slice(None)] * 2, [slice(None)] * 2
            for (low, high), by, n in zip(ranges, shift, self.spatial, strict=True):
                low, high = max(low, -by), min(high, n - by)  # noqa: PLW2901
                if high <= low:
                    return None
                near.append(slice(low, high))
                far.append(slice(low + by, high + by))
            return image[tuple(near)].flatten(1) @ image[tuple(far)].flatten(1).T

        # Each pair of kernel offsets is one block: an autocorrelation, minus products of pixels outside of the patches.
        offsets = list(product(*map(range, self.kernel)))
        blocks = total.unflatten(1, (self.channels, -1)).unflatten(0, (self.channels, -1))
        for i, a in enumerate(offsets):
            # Inclusion-exclusion: subtract pixels outside of the window along one axis, add those along two, ...
            parts = [
                [((0, n), 1.0), *((outside, -1.0) for outside in self._outside(axis, a[axis], n))]
                for axis, n in enumerate(self.spatial)
            ]
            for j, b in enumerate(offsets[i:], start=i):
                shift = tuple((q - p) * d for p, q, d in zip(a, b, self.dilation, strict=True))
                block = autocorrelation(shift).clone()
                for choice in list(product(*parts))[1:]:  # the first one is the whole image
                    border = strip(tuple(pixels for pixels, _ in choice), shift)
                    if border is not None:
                        block.add_(border, alpha=prod(sign for _, sign in choice))
                blocks[:, i, :, j] += block
                if i != j:
                    blocks[:, j, :, i] += block.T
