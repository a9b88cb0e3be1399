"""Writing matrices back into a model: as weights; or as several plain layers in a row."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from kfs.compress.layers import Layer


def write_weights(model: nn.Module, layer: Layer, matrix: Tensor) -> None:
    """Write matrices `[groups, d_B, d_A]` into the layer's parameters, in place."""
    module = model.get_submodule(layer.name)
    prefix = f"{layer.name}." if layer.name else ""
    params = {f"{prefix}{leaf}": p for leaf, p in module.named_parameters(recurse=False)}
    columns = {name: params[name].detach().double().unsqueeze(0) for name in layer.layout.params}
    layer.layout.write(matrix.unsqueeze(0), columns)
    with torch.no_grad():
        for name, values in columns.items():
            params[name].copy_(values.squeeze(0))


def replace_module(model: nn.Module, name: str, module: nn.Module) -> nn.Module:
    """Put a module in the place of another one, and return the model: the module itself, if the name is empty."""
    if not name:
        return module
    path, _, leaf = name.rpartition(".")
    parent = model.get_submodule(path)
    setattr(parent, leaf, module)
    if isinstance(parent, nn.TransformerEncoderLayer) and not isinstance(module, nn.Linear):
        # In evaluation mode, one fused kernel would read the weight of a single layer here. Not for other activations.
        parent.activation_relu_or_gelu = 0
        for outer in model.modules():
            if isinstance(outer, nn.TransformerEncoder):
                outer.use_nested_tensor = False
    return model


def in_a_row(layer: Layer, factors: Sequence[Tensor], fixed: Sequence[bool]) -> nn.Sequential:
    """Make plain layers that multiply with several matrices, one after the other.

    Args:
        layer: The layer that they replace. The first one reads the same patches; all others have one pixel.
        factors: Matrices from input to output, of which the first has the columns of the layer's matrix.
        fixed: Which of them are no longer trained.
    """
    old: Any = layer.module
    modules = []
    for place, (factor, is_fixed) in enumerate(zip(factors, fixed, strict=True)):
        weight, bias = factor, None
        if place == 0 and layer.layout.bias is not None:
            weight, bias = factor[:, :-1], factor[:, -1]
        elif place == len(factors) - 1 and layer.layout.bias is None and old.bias is not None:
            bias = old.bias.detach()  # it has no part in the matrix, and is added at the end, as before
        modules.append(_plain(layer, weight, bias, first=place == 0, trainable=not is_fixed))
    return nn.Sequential(*modules).train(old.training)


def _plain(layer: Layer, weight: Tensor, bias: Tensor | None, first: bool, trainable: bool) -> nn.Module:
    """Make a linear layer or a convolution with a weight `[out, in * pixels]`."""
    old: Any = layer.module
    kind: dict[str, Any] = {"bias": bias is not None, "dtype": old.weight.dtype, "device": old.weight.device}
    rows, columns = weight.shape
    # Initial values would be overwritten. They are not drawn, so that the caller's random state stays as it was.
    new: nn.Linear | nn.Conv2d
    if not layer.is_convolution:
        new = skip_init(nn.Linear, columns, rows, **kind)
    elif first:
        same = {name: getattr(old, name) for name in ("stride", "padding", "dilation", "padding_mode")}
        new = skip_init(type(old), old.in_channels, rows, old.kernel_size, **same, **kind)
    else:
        new = skip_init(type(old), columns, rows, 1, **kind)
    with torch.no_grad():
        new.weight.copy_(weight.reshape(new.weight.shape))
        if bias is not None and new.bias is not None:
            new.bias.copy_(bias)
    new.weight.requires_grad_(trainable and old.weight.requires_grad)
    if new.bias is not None:
        new.bias.requires_grad_(trainable and old.bias.requires_grad)
    return new
