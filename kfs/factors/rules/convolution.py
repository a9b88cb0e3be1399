"""Convolutions and transposed convolutions: linear maps of patches, shared by all output positions.

A transposed convolution is a convolution of its input with zeros inserted between pixels, with the kernel mirrored.
Each group of channels has its own pair of factors.
"""

from math import prod
from typing import Any

from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from kfs.factors.accumulate.patches import Patches
from kfs.factors.layout import Layout
from kfs.factors.rules.linear import bias_apart, bias_plan, is_bias, weight_and_bias
from kfs.factors.trace.plan import Argument, Call, Planned


def convolution(
    call: Call,
    input: Argument,
    weight: Argument,
    bias: Argument | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Planned:
    """Plan a convolution."""
    dims = weight.ndim - 2
    kernel, spread = weight.shape[2:], _each(dilation, dims)
    if padding == "same":
        totals = [d * (k - 1) for d, k in zip(spread, kernel, strict=True)]
        around = tuple((total // 2, total - total // 2) for total in totals)
    else:
        around = tuple((p, p) for p in _each(0 if padding == "valid" else padding, dims))
    if input.ndim != dims + 2:  # a single image without batch axis
        return None
    patches = Patches(input.shape, kernel, _each(stride, dims), around, spread, groups)
    layout = Layout(weight.name or "", weight.shape, (0, weight.shape[0]), tuple(range(weight.ndim)), 1, groups)
    return _plan(call, input, weight, bias, patches, layout)


def transposed_convolution(
    call: Call,
    input: Argument,
    weight: Argument,
    bias: Argument | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Planned:
    """Plan a transposed convolution."""
    dims = weight.ndim - 2
    if input.ndim != dims + 2:
        return None
    kernel, step, spread = weight.shape[2:], _each(stride, dims), _each(dilation, dims)
    spatial = tuple((n - 1) * s + 1 for n, s in zip(input.shape[2:], step, strict=True))
    around = tuple(
        (d * (k - 1) - p + more, d * (k - 1) - p)
        for k, d, p, more in zip(kernel, spread, _each(padding, dims), _each(output_padding, dims), strict=True)
    )

    def prepare(x: Tensor) -> Tensor:
        sparse = x.new_zeros(*x.shape[:2], *spatial)
        pixels: tuple[Any, ...] = (..., *(slice(None, None, s) for s in step))
        sparse[pixels] = x
        # The kernel is mirrored. Mirroring the image instead only changes the order of positions.
        return sparse.flip(*range(2, dims + 2))

    patches = Patches((*input.shape[:2], *spatial), kernel, (1,) * dims, around, spread, groups, mirrored=True)
    shape = (groups, weight.shape[0] // groups, *weight.shape[1:])
    layout = Layout(weight.name or "", shape, (0, groups), (0, 2, 1, *range(3, len(shape))), 2, groups)
    return _plan(call, input, weight, bias, patches, layout, prepare)


def _plan(
    call: Call,
    x: Argument,
    weight: Argument,
    bias: Argument | None,
    patches: Patches,
    layout: Layout,
    prepare: Any = None,
) -> Planned:
    """Plan a linear map of patches."""
    if not x.data:
        return None
    if weight.derived:
        return bias_apart(call, x, bias, trailing=len(patches.out))
    leading = (x.shape[0], prod(patches.out))
    if not weight.tracked:
        channels = layout.row_size * layout.groups
        return (bias_plan(bias, leading, _channels_last),) if is_bias(bias, channels) else None
    view = weight.view
    if view is None or weight.shape != view.shape:
        return None
    return weight_and_bias(call.name, layout, patches, (x,), bias, leading, prepare, _channels_last)


def _each(setting: Any, dims: int) -> tuple[int, ...]:
    """Return a setting for every spatial axis."""
    values = (setting,) if isinstance(setting, int) else tuple(setting)
    return values * dims if len(values) == 1 else values


def _channels_last(g: Tensor, _: Any) -> Tensor:
    """Read gradients `[columns, N, C, *spatial]` as `[columns, N, positions, C]`."""
    return g.flatten(3).transpose(2, 3)


RULES = {
    F.conv1d: convolution,
    F.conv2d: convolution,
    F.conv3d: convolution,
    F.conv_transpose1d: transposed_convolution,
    F.conv_transpose2d: transposed_convolution,
    F.conv_transpose3d: transposed_convolution,
}
