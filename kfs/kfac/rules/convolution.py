"""Convolutions and transposed convolutions: linear maps of patches, shared by all output positions.

A transposed convolution is a convolution of its input with zeros put between pixels, with the kernel mirrored. Groups
of channels have a factor pair each.
"""

from math import prod
from typing import Any

from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from kfs.kfac.capture.mode import Capture, Read
from kfs.kfac.layout import Layout
from kfs.kfac.rules.linear import record_bias, record_with_bias
from kfs.kfac.sums.patches import Patches


def convolution(
    capture: Capture,
    func: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    """Convolve."""
    dims, view = weight.ndim - 2, capture.sources.view(weight)
    if input.ndim != dims + 2 or not capture.is_data(input):
        return NotImplemented
    if capture.sources.find(weight) is None:
        out = func(input, weight, bias, stride, padding, dilation, groups)
        return record_bias(capture, out, bias, _channels_last(groups), groups)
    if view is None or weight.shape != view.source.tensor.shape:
        return NotImplemented
    kernel, step, spread = tuple(weight.shape[2:]), _each(stride, dims), _each(dilation, dims)
    if padding == "same":
        totals = [d * (k - 1) for d, k in zip(spread, kernel, strict=True)]
        around = tuple((total // 2, total - total // 2) for total in totals)
    else:
        around = tuple((p, p) for p in _each(0 if padding == "valid" else padding, dims))
    out = func(input, weight, bias, stride, padding, dilation, groups)
    patches = Patches(input, kernel, step, around, spread, groups)
    layout = Layout(view.source.name, tuple(weight.shape), view.rows, tuple(range(weight.ndim)), 1, groups)
    return record_with_bias(capture, out, func.__name__, layout, patches, _channels_last(groups), bias)


def transposed_convolution(
    capture: Capture,
    func: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    """Convolve the other way round."""
    dims, view = weight.ndim - 2, capture.sources.view(weight)
    if input.ndim != dims + 2 or not capture.is_data(input):
        return NotImplemented
    if capture.sources.find(weight) is None:
        out = func(input, weight, bias, stride, padding, output_padding, groups, dilation)
        return record_bias(capture, out, bias, _channels_last(groups), groups)
    if view is None or weight.shape != view.source.tensor.shape:
        return NotImplemented
    kernel, step, spread = tuple(weight.shape[2:]), _each(stride, dims), _each(dilation, dims)
    sparse = input.new_zeros(*input.shape[:2], *((n - 1) * s + 1 for n, s in zip(input.shape[2:], step, strict=True)))
    pixels: tuple[Any, ...] = (..., *(slice(None, None, s) for s in step))
    sparse[pixels] = input.detach()
    # The kernel is mirrored; mirroring the image instead changes the order of positions only.
    sparse = sparse.flip(*range(2, dims + 2))
    around = tuple(
        (d * (k - 1) - p + more, d * (k - 1) - p)
        for k, d, p, more in zip(kernel, spread, _each(padding, dims), _each(output_padding, dims), strict=True)
    )
    out = func(input, weight, bias, stride, padding, output_padding, groups, dilation)
    patches = Patches(sparse, kernel, (1,) * dims, around, spread, groups, mirrored=True)
    shape = (groups, weight.shape[0] // groups, *weight.shape[1:])
    layout = Layout(view.source.name, shape, (0, groups), (0, 2, 1, *range(3, len(shape))), 2, groups)
    return record_with_bias(capture, out, func.__name__, layout, patches, _channels_last(groups), bias)


def _each(setting: Any, dims: int) -> tuple[int, ...]:
    """Return a setting for every spatial axis."""
    values = (setting,) if isinstance(setting, int) else tuple(setting)
    return values * dims if len(values) == 1 else values


def _channels_last(groups: int) -> Read:
    """Read gradients `[columns, N, C, *spatial]` as `[columns, N, P, C]` (or `[columns, N, P, G, C]`)."""

    def read(g: Tensor) -> Tensor:
        g = g.reshape(*g.shape[:2], groups, g.shape[2] // groups, prod(g.shape[3:])).movedim(4, 2)
        return g if groups > 1 else g.squeeze(3)

    return read


RULES = {
    F.conv1d: convolution,
    F.conv2d: convolution,
    F.conv3d: convolution,
    F.conv_transpose1d: transposed_convolution,
    F.conv_transpose2d: transposed_convolution,
    F.conv_transpose3d: transposed_convolution,
}
