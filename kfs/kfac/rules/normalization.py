"""Scale and shift of normalisations, and the slope of PReLU: vectors that multiply features, or are added to them."""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from kfs.errors import ModelError
from kfs.kfac.capture.mode import Capture, Read
from kfs.kfac.rules.elementwise import record_entries
from kfs.kfac.rules.linear import record_vector


def layer_norm(
    capture: Capture,
    func: Any,
    input: Tensor,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *_: Any,
) -> Any:
    """Normalise over the last axes, then scale and shift."""
    out = func(input, normalized_shape, weight, bias, eps)
    x = input.detach()
    return _scaled(
        capture, "layer_norm", input, out, weight, bias, lambda: F.layer_norm(x, normalized_shape, eps=eps), False
    )


def rms_norm(
    capture: Capture,
    func: Any,
    input: Tensor,
    normalized_shape: Any,
    weight: Any = None,
    eps: float | None = None,
) -> Any:
    """Divide by the root mean square over the last axes, then scale."""
    out = func(input, normalized_shape, weight, eps)
    x = input.detach()
    return _scaled(
        capture, "rms_norm", input, out, weight, None, lambda: F.rms_norm(x, normalized_shape, eps=eps), False
    )


def group_norm(
    capture: Capture,
    func: Any,
    input: Tensor,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *_: Any,
) -> Any:
    """Normalise groups of channels, then scale and shift channels."""
    out = func(input, num_groups, weight, bias, eps)
    x = input.detach()
    return _scaled(capture, "group_norm", input, out, weight, bias, lambda: F.group_norm(x, num_groups, eps=eps), True)


def batch_norm(
    capture: Capture,
    func: Any,
    input: Tensor,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Normalise by running statistics (by those of the batch in training), then scale and shift channels."""
    if training and not capture.uses.mixing:
        raise ModelError(
            "F.batch_norm is called with training=True: the prediction for one datum depends on the rest of its batch.",
            "Call model.eval() first, or pass training=False.",
        )
    out = func(input, running_mean, running_var, weight, bias, training, momentum, eps)
    x = input.detach()
    mean, variance = (None, None) if training else (running_mean, running_var)
    return _scaled(
        capture,
        "batch_norm",
        input,
        out,
        weight,
        bias,
        lambda: F.batch_norm(x, mean, variance, training=training, eps=eps),
        True,
    )


def instance_norm(
    capture: Capture,
    func: Any,
    input: Tensor,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Normalise every channel of every datum, then scale and shift channels."""
    out = func(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    x = input.detach()

    def normalized() -> Tensor:
        return F.instance_norm(x, running_mean, running_var, use_input_stats=use_input_stats, momentum=0.0, eps=eps)

    return _scaled(capture, "instance_norm", input, out, weight, bias, normalized, True)


def prelu(capture: Capture, func: Any, input: Tensor, weight: Tensor) -> Any:
    """Multiply negative numbers with a slope, per channel or altogether."""
    x = input.detach()
    out = func(input, weight)
    channels = weight.numel() > 1

    def negative() -> Tensor:
        return x.clamp(max=0)

    return _scaled(capture, "prelu", input, out, weight, None, negative, channels, single=not channels)


def _scaled(
    capture: Capture,
    operation: str,
    x: Tensor,
    out: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized: Callable[[], Tensor],
    channels: bool,
    single: bool = False,
) -> Any:
    """Take note of a scale and a shift.

    Args:
        capture: The forward pass.
        operation: What to call it.
        x: What it was applied to.
        out: What the operation returned.
        weight: The scale, if there is one.
        bias: The shift, if there is one.
        normalized: Returns what the scale multiplied; evaluated when gradients arrive.
        channels: Whether both lie along the second axis, instead of the last ones.
        single: Whether the scale is one number for everything.
    """

    def features_last(g: Tensor) -> Tensor:
        if single:
            return g.unsqueeze(-1)
        return g.flatten(3).movedim(2, -1) if channels and g.ndim > 3 else g

    def times_normalized(g: Tensor) -> Tensor:
        return normalized().mul_(g[0]).unsqueeze(0) if len(g) == 1 else g * normalized()

    if not capture.is_data(x):
        return NotImplemented
    reads: list[tuple[Tensor | None, Read]] = [
        (weight, lambda g: features_last(times_normalized(g))),
        (bias, features_last),
    ]
    leading = tuple(out.shape) if single else tuple(out.shape[:-1])
    if channels:
        leading = (len(out), prod(out.shape[2:])) if out.ndim > 2 else (len(out),)
    for parameter, read in reads:
        if parameter is None or capture.sources.find(parameter) is None:
            continue
        view = capture.sources.view(parameter)
        if view is None or (parameter.ndim > 1 and parameter.shape != view.source.tensor.shape):
            return NotImplemented
        if parameter.ndim > 1:
            out = record_entries(capture, out, operation, view.source, parameter.ndim, read)
        else:
            out = record_vector(capture, out, operation, view, read, leading)
    return out


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
