"""Scale and shift of normalizations, and the slope of PReLU: vectors that multiply features or are added to them."""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from kfs.factors.accumulate.inputs import Rows
from kfs.factors.layout import Layout
from kfs.factors.rules.elementwise import all_rows, entries_layout
from kfs.factors.trace.plan import Argument, Call, Plan, Planned, Read, View


def layer_norm(
    call: Call,
    input: Argument,
    normalized_shape: Any,
    weight: Argument | None = None,
    bias: Argument | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Planned:
    """Plan layer normalization: scale and shift after normalizing over the last axes."""
    return _scaled("layer_norm", input, weight, bias, lambda x: F.layer_norm(x, normalized_shape, eps=eps))


def rms_norm(
    call: Call,
    input: Argument,
    normalized_shape: Any,
    weight: Argument | None = None,
    eps: float | None = None,
) -> Planned:
    """Plan RMS normalization: scale after dividing by the root mean square over the last axes."""
    return _scaled("rms_norm", input, weight, None, lambda x: F.rms_norm(x, normalized_shape, eps=eps))


def group_norm(
    call: Call,
    input: Argument,
    num_groups: int,
    weight: Argument | None = None,
    bias: Argument | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Planned:
    """Plan group normalization: scale and shift of channels after normalizing groups of channels."""
    return _scaled("group_norm", input, weight, bias, lambda x: F.group_norm(x, num_groups, eps=eps), "channels")


def batch_norm(
    call: Call,
    input: Argument,
    running_mean: Argument | None,
    running_var: Argument | None,
    weight: Argument | None = None,
    bias: Argument | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Planned:
    """Plan batch normalization: scale and shift of channels, by running statistics or, in training, by the batch's."""
    statistics = () if training else (running_mean, running_var)

    def normalized(x: Tensor, mean: Tensor | None = None, variance: Tensor | None = None) -> Tensor:
        return F.batch_norm(x, mean, variance, training=training, eps=eps)

    return _scaled("batch_norm", input, weight, bias, normalized, "channels", statistics, mixes=training)


def instance_norm(
    call: Call,
    input: Argument,
    running_mean: Argument | None = None,
    running_var: Argument | None = None,
    weight: Argument | None = None,
    bias: Argument | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Planned:
    """Plan instance normalization: scale and shift of channels after normalizing every channel of every example."""
    statistics = () if running_mean is None else (running_mean, running_var)

    def normalized(x: Tensor, mean: Tensor | None = None, variance: Tensor | None = None) -> Tensor:
        # A momentum of zero leaves running statistics as they are.
        return F.instance_norm(x, mean, variance, use_input_stats=use_input_stats, momentum=0.0, eps=eps)

    return _scaled("instance_norm", input, weight, bias, normalized, "channels", statistics)


def prelu(call: Call, input: Argument, weight: Argument) -> Planned:
    """Plan PReLU: negative numbers are multiplied with a slope, per channel or one for all."""
    along = "channels" if prod(weight.shape) > 1 else "nothing"
    return _scaled("prelu", input, weight, None, lambda x: x.clamp(max=0), along)


def _scaled(
    operation: str,
    x: Argument,
    weight: Argument | None,
    bias: Argument | None,
    normalized: Callable[..., Tensor],
    along: str = "last axes",
    statistics: tuple[Argument | None, ...] = (),
    mixes: bool = False,
) -> Planned:
    """Plan the uses of a scale and a shift.

    Both lie `along` the `"last axes"`, the `"channels"` (the second axis), or `"nothing"` if they are a single number.
    The scale multiplies `normalized(x, *statistics)`, which is computed when gradients arrive.
    """
    if not x.data:
        return None

    def features_last(g: Tensor, _: Any) -> Tensor:
        if along == "nothing":
            return g.unsqueeze(-1)
        return g.flatten(3).movedim(2, -1) if along == "channels" and g.ndim > 3 else g

    def times_normalized(g: Tensor, arguments: tuple[Tensor, ...]) -> Tensor:
        factor = normalized(*arguments)
        return features_last(factor.mul_(g[0]).unsqueeze(0) if len(g) == 1 else g * factor, None)

    arguments = (x, *(t for t in statistics if t is not None))
    uses = (weight, arguments, _detached, times_normalized), (bias, (), None, features_last)
    plans = []
    for parameter, of_prepare, prepare, read in uses:
        if parameter is None or not parameter.tracked:
            continue
        view = parameter.view
        if view is None or (parameter.ndim > 1 and parameter.shape != view.shape):
            return None
        layout, rows, by_rows = _along(x, parameter, view, along, read)
        plans.append(Plan(operation, layout, rows, of_prepare, prepare, by_rows, mixes=mixes))
    return tuple(plans) or None


def _along(x: Argument, parameter: Argument, view: View, along: str, read: Read) -> tuple[Layout, Rows, Read]:
    """Return the layout and the inputs of a scale or shift, and how its gradients are read, given `read`."""
    if parameter.ndim > 1:
        leading = x.shape[: x.ndim - parameter.ndim]
        layout = entries_layout(parameter)

        def by_rows(g: Tensor, arguments: Any) -> Tensor:
            rows_last: Tensor = read(g, arguments).flatten(1 + len(leading)).unflatten(-1, (-1, layout.row_size))
            return rows_last

        return layout, all_rows(parameter, layout, leading), by_rows
    leading = {
        "last axes": x.shape[:-1],
        "channels": (x.shape[0], prod(x.shape[2:])) if x.ndim > 2 else x.shape[:1],
        "nothing": x.shape,
    }[along]
    return view.layout((0,), 1), Rows(None, 1, leading, parameter.dtype, parameter.device), read


def _detached(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.detach() for t in tensors)


RULES = {
    F.layer_norm: layer_norm,
    torch.layer_norm: layer_norm,
    F.rms_norm: rms_norm,
    torch.rms_norm: rms_norm,
    F.group_norm: group_norm,
    torch.group_norm: group_norm,
    F.batch_norm: batch_norm,
    F.instance_norm: instance_norm,
    F.prelu: prelu,
}
