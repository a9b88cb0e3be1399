"""Scale and shift of normalizations, and the slope of PReLU: vectors that multiply features, or are added to them."""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from kfs.kfac.capture.plan import Argument, Call, Plan, Planned
from kfs.kfac.rules.elementwise import entries_plan
from kfs.kfac.rules.linear import vector_plan


def layer_norm(
    call: Call,
    input: Argument,
    normalized_shape: Any,
    weight: Argument | None = None,
    bias: Argument | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Planned:
    """Normalize over the last axes, then scale and shift."""
    return _scaled("layer_norm", input, weight, bias, lambda x: F.layer_norm(x, normalized_shape, eps=eps))


def rms_norm(
    call: Call,
    input: Argument,
    normalized_shape: Any,
    weight: Argument | None = None,
    eps: float | None = None,
) -> Planned:
    """Divide by the root mean square over the last axes, then scale."""
    return _scaled("rms_norm", input, weight, None, lambda x: F.rms_norm(x, normalized_shape, eps=eps))


def group_norm(
    call: Call,
    input: Argument,
    num_groups: int,
    weight: Argument | None = None,
    bias: Argument | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Planned:
    """Normalize groups of channels, then scale and shift channels."""
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
    """Normalize by running statistics (by those of the batch in training), then scale and shift channels."""
    statistics = () if training else (running_mean, running_var)

    def normalized(x: Tensor, *known: Tensor) -> Tensor:
        return F.batch_norm(x, *(known or (None, None)), training=training, eps=eps)

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
    """Normalize every channel of every datum, then scale and shift channels."""
    statistics = () if running_mean is None else (running_mean, running_var)

    def normalized(x: Tensor, *known: Tensor) -> Tensor:
        # A momentum of zero leaves running statistics as they are.
        return F.instance_norm(
            x, *(known or (None, None)), use_input_stats=use_input_stats, momentum=0.0, eps=eps
        )

    return _scaled("instance_norm", input, weight, bias, normalized, "channels", statistics)


def prelu(call: Call, input: Argument, weight: Argument) -> Planned:
    """Multiply negative numbers with a slope, per channel or altogether."""
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

    Args:
        operation: What to call it.
        x: What it is applied to.
        weight: The scale, if there is one.
        bias: The shift, if there is one.
        normalized: Returns what the scale multiplies; evaluated when gradients arrive.
        along: Where both lie: along the `"last axes"`, along `"channels"` (the second axis), or along `"nothing"` if
            the scale is one number for everything.
        statistics: What `normalized` takes beside `x`.
        mixes: As in `Plan`.
    """
    if not x.data:
        return None
    leading = x.shape[:-1]
    if along == "nothing":
        leading = x.shape
    elif along == "channels":
        leading = (x.shape[0], prod(x.shape[2:])) if x.ndim > 2 else x.shape[:1]

    def features_last(g: Tensor, _: Any) -> Tensor:
        if along == "nothing":
            return g.unsqueeze(-1)
        return g.flatten(3).movedim(2, -1) if along == "channels" and g.ndim > 3 else g

    def times_normalized(g: Tensor, arguments: tuple[Tensor, ...]) -> Tensor:
        factor = normalized(*arguments)
        return features_last(factor.mul_(g[0]).unsqueeze(0) if len(g) == 1 else g * factor, None)

    known = tuple(t for t in statistics if t is not None)
    plans: list[Plan] = []
    for parameter, read in ((weight, times_normalized), (bias, features_last)):
        if parameter is None or not parameter.tracked:
            continue
        arguments, prepare = ((x, *known), _detached) if parameter is weight else ((), None)
        view = parameter.view
        if view is None or (parameter.ndim > 1 and parameter.shape != view.shape):
            return None
        if parameter.ndim > 1:
            positions = x.shape[: x.ndim - parameter.ndim]
            plan = entries_plan(operation, parameter, positions, arguments, read, prepare, mixes)
        else:
            plan = vector_plan(operation, parameter, leading, arguments, read, prepare, mixes)
        plans.append(plan)
    return tuple(plans) or None


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
