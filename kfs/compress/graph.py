"""Which layers read the channels of which, by `torch.fx`, with nothing in between that mixes channels."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from kfs.compress.layers import LAYERS
from kfs.errors import ModelError

_ELEMENTWISE = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid),
    *(nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.LogSigmoid, nn.Identity, _DropoutNd),
)
_POOLING = (
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
)
_ELEMENTWISE_FUNCTIONS = {
    *(torch.relu, torch.tanh, torch.sigmoid, F.relu, F.gelu, F.silu, F.elu, F.leaky_relu, F.dropout, F.softplus),
    *("relu", "tanh", "sigmoid"),
}
_POOLING_FUNCTIONS = {F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d, F.max_pool1d, F.adaptive_avg_pool1d}
_FLATTENING = {torch.flatten, "flatten"}
_TRANSFORMER_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


@dataclass(frozen=True)
class Link:
    """A layer that reads the channels of another one, and nothing else.

    Attributes:
        source: Name of the layer that computes the channels.
        reader: Name of the layer that reads them.
        norms: Names of BatchNorm modules between them.
    """

    source: str
    reader: str
    norms: tuple[str, ...]


def links(model: nn.Module) -> list[Link]:
    """Find all pairs of layers between which channels can be removed.

    Raises:
        ModelError: If `torch.fx` cannot trace the model, and it has no layers of PyTorch's Transformers.
    """
    found = _inside_transformers(model)
    try:
        graph = fx.symbolic_trace(model).graph
    except Exception as error:
        # Tracing runs the model's code with other arguments, so any error may occur.
        if found:
            return found
        raise ModelError(
            f"torch.fx cannot trace the model, so that it is not known which layer reads which channels ({error}).",
            "Use basis='eigen' for structured pruning, which needs no graph, or structured=False.",
        ) from error
    modules = dict(model.named_modules())
    targets = [str(node.target) for node in graph.nodes if node.op == "call_module"]
    # Whoever reads a weight besides the layer itself would notice that a row of it is gone.
    read = {str(node.target).rpartition(".")[0] for node in graph.nodes if node.op == "get_attr"}
    once = {name: modules[name] for name in targets if targets.count(name) == 1 and name not in read}
    found = [link for link in found if {link.source, link.reader}.isdisjoint(read)]
    for node in graph.nodes:
        if node.op == "call_module" and _is_plain(once.get(str(node.target))):
            link = _followed(node, once)
            found += [] if link is None or link in found else [link]
    return found


def _inside_transformers(model: nn.Module) -> list[Link]:
    """Find the pairs of linear layers of PyTorch's own Transformers, which tracing does not look into."""
    found = []
    for name, module in model.named_modules():
        if type(module) in _TRANSFORMER_LAYERS:
            activation: Any = module.activation
            keeps = activation in _ELEMENTWISE_FUNCTIONS or isinstance(activation, _ELEMENTWISE)
            if keeps and _is_plain(module.linear1) and _is_plain(module.linear2):
                prefix = f"{name}." if name else ""
                found.append(Link(f"{prefix}linear1", f"{prefix}linear2", ()))
    return found


def _is_plain(module: nn.Module | None) -> bool:
    """Whether a module is a linear layer or a convolution without groups of channels."""
    return type(module) in LAYERS and getattr(module, "groups", 1) == 1


def channels_out(module: Any) -> int:
    """Return how many channels a layer computes."""
    return int(module.weight.shape[0])


def columns_in(module: Any) -> int:
    """Return how many columns a layer's matrix has, without bias."""
    return prod(module.weight.shape[1:])


def _followed(node: fx.Node, once: Mapping[str, nn.Module]) -> Link | None:
    """Go from a layer to the one that reads it.

    Args:
        node: The call of the layer.
        once: Modules that are called once, and whose weights nobody else reads.

    Returns:
        `None` if there is no such layer, or if something in between mixes channels.
    """
    source = str(node.target)
    num_channels = channels_out(once[source])
    norms: list[str] = []
    has_pixels = not isinstance(once[source], nn.Linear)
    while len(node.users) == 1:
        node = next(iter(node.users))
        name = str(node.target)
        module = once.get(name) if node.op == "call_module" else None
        if _is_plain(module):
            # A linear layer reads channels of a convolution only after they were flattened.
            fits = isinstance(module, nn.Linear) != has_pixels and columns_in(module) % num_channels == 0
            return Link(source, name, tuple(norms)) if fits else None
        if has_pixels and _flattens(node, module):
            has_pixels = False
        elif isinstance(module, _BatchNorm) and module.num_features == num_channels:
            norms.append(name)
        elif not _keeps_channels(node, module, has_pixels):
            return None
    return None


def _keeps_channels(node: fx.Node, module: nn.Module | None, has_pixels: bool) -> bool:
    """Whether an operation acts on every channel by itself, and on all of them in the same way."""
    if node.op == "call_module":
        return isinstance(module, _ELEMENTWISE) or (has_pixels and isinstance(module, _POOLING))
    return node.target in _ELEMENTWISE_FUNCTIONS or (has_pixels and node.target in _POOLING_FUNCTIONS)


def _flattens(node: fx.Node, module: nn.Module | None) -> bool:
    """Whether an operation puts channels and pixels into one axis."""
    if isinstance(module, nn.Flatten):
        return (module.start_dim, module.end_dim) == (1, -1)
    arguments = dict(zip(("input", "start_dim", "end_dim"), node.args, strict=False)) | node.kwargs
    axes = (arguments.get("start_dim", 0), arguments.get("end_dim", -1))
    return node.target in _FLATTENING and axes == (1, -1)
