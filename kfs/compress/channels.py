r"""Pruning of channels between pairs of layers: one that computes them, and one that reads them.

The cost of removing columns of a matrix lives in `kfs.compress.surgery`.

A channel is removed by removing its columns from the layer that reads it. This is the whole change of the model. The
layer before has one row that computes this channel. This row then has no effect and is removed, too, with its part of a
BatchNorm in between. `links` finds out which layer reads which channels.

The columns of a channel, all of them together, cost $\tfrac12 w_r^\top \left((C^{-1})_{rr}\right)^{-1} w_r$ if the
other columns of the layer adapt. Channels are ordered by their cost for each number saved. Layers adapt one by one,
without regard to the rows that the next layer loses.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from kfs.compress.choosing import allowed, shortest
from kfs.compress.layers import LAYERS, Keep, Layer, replace_module, write_weights
from kfs.compress.report import LayerRow
from kfs.compress.surgery import adapted, cost_of_columns, damage
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
    """A pair of layers, of which one reads exactly the channels that the other one computes.

    Attributes:
        source: Name of the layer that computes the channels.
        reader: Name of the layer that reads them.
        norms: Names of BatchNorm modules between them.
    """

    source: str
    reader: str
    norms: tuple[str, ...]


def links(model: nn.Module) -> list[Link]:
    """Return all pairs of layers between which channels can be removed.

    Raises:
        ModelError: If `torch.fx` cannot trace the model, and it has no Transformer layers of PyTorch.
    """
    found = _inside_transformers(model)
    try:
        graph = fx.symbolic_trace(model).graph
    except Exception as error:
        # Tracing runs the model's code with proxies as arguments, so any error may occur.
        if found:
            return found
        raise ModelError(
            f"torch.fx cannot trace the model, so it is unknown which layer reads which channels ({error}).",
            "Use basis='eigen' for structured pruning, which needs no graph, or structured=False.",
        ) from error
    modules = dict(model.named_modules())
    targets = [str(node.target) for node in graph.nodes if node.op == "call_module"]
    # Exclude layers if other code reads their weights, and layers that are called several times.
    read = {str(node.target).rpartition(".")[0] for node in graph.nodes if node.op == "get_attr"}
    once = {name: modules[name] for name in targets if targets.count(name) == 1 and name not in read}
    found = [link for link in found if {link.source, link.reader}.isdisjoint(read)]
    for node in graph.nodes:
        if node.op == "call_module" and _is_plain(once.get(str(node.target))):
            link = _followed(node, once)
            found += [] if link is None or link in found else [link]
    return found


def _inside_transformers(model: nn.Module) -> list[Link]:
    """Return the pairs of linear layers in PyTorch's Transformer layers, which tracing does not enter."""
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
    """Return the number of channels that a layer computes."""
    return int(module.weight.shape[0])


def columns_in(module: Any) -> int:
    """Return the number of columns of a layer's matrix, without bias."""
    return prod(module.weight.shape[1:])


def _followed(node: fx.Node, once: Mapping[str, nn.Module]) -> Link | None:
    """Return the pair of layers in which one reads the output of the other one, which `node` calls.

    The result is `None` if there is no reader, or an operation in between mixes channels. `once` has the modules that
    are called once, with weights that no other code reads.
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
            # A linear layer reads the channels of a convolution only after flattening.
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
    """Whether an operation acts on each channel separately, and on all channels in the same way."""
    if node.op == "call_module":
        return isinstance(module, _ELEMENTWISE) or (has_pixels and isinstance(module, _POOLING))
    return node.target in _ELEMENTWISE_FUNCTIONS or (has_pixels and node.target in _POOLING_FUNCTIONS)


def _flattens(node: fx.Node, module: nn.Module | None) -> bool:
    """Whether an operation flattens channels and pixels into one axis."""
    if isinstance(module, nn.Flatten):
        return (module.start_dim, module.end_dim) == (1, -1)
    arguments = dict(zip(("input", "start_dim", "end_dim"), node.args, strict=False)) | node.kwargs
    axes = (arguments.get("start_dim", 0), arguments.get("end_dim", -1))
    return node.target in _FLATTENING and axes == (1, -1)


@dataclass(frozen=True)
class Channels:
    """The channels between two layers.

    Attributes:
        link: The layers.
        reader: The layer that reads them, with its curvature.
        costs: Twice the cost of removing each channel, `[channels]`.
        saved: Number of entries per channel, in both layers.
    """

    link: Link
    reader: Layer
    costs: Tensor
    saved: int

    @property
    def order(self) -> list[int]:
        """The channels that may be removed, the cheapest first. The most expensive one is always kept."""
        places: list[int] = self.costs.argsort(stable=True)[:-1].tolist()
        return places


def prune_channels(
    model: nn.Module, layers: Sequence[Layer], keep: Keep, update: bool
) -> tuple[nn.Module, list[LayerRow]]:
    """Return a copy of the model without the cheapest channels, with smaller layers on both sides.

    If `keep` is a mapping, it has shares of each layer's input channels.

    Raises:
        ModelError: If it is unknown which layer computes the channels that another one reads, or if removing all
            channels but one between layers does not suffice.
    """
    by_name = {layer.name: layer for layer in layers}
    found = [
        Channels(link, by_name[link.reader], _costs(model, link, by_name[link.reader], update), _saved(model, link))
        for link in links(model)
        # Layers without curvature are unchanged, on either side.
        if link.reader in by_name and (isinstance(keep, Mapping) or link.source in by_name)
    ]
    gone = _by_layer(found, keep) if isinstance(keep, Mapping) else _globally(layers, found, keep)
    return _removed(model, layers, found, gone, update)


def _costs(model: nn.Module, link: Link, reader: Layer, update: bool) -> Tensor:
    """Return twice the cost of removing each channel."""
    num_channels = channels_out(model.get_submodule(link.source))
    if update:
        return cost_of_columns(reader, num_channels)
    columns = damage(reader)[0, :, : reader.layout.column_size]
    return columns.reshape(len(columns), num_channels, -1).sum((0, 2))


def _saved(model: nn.Module, link: Link) -> int:
    """Return the number of entries per channel: a row of one layer with its bias, and columns of the other one."""
    source: Any = model.get_submodule(link.source)
    reader: Any = model.get_submodule(link.reader)
    row = columns_in(source) + (source.bias is not None)
    return row + int(reader.weight.numel()) // channels_out(source)


def _by_layer(found: Sequence[Channels], shares: Mapping[str, float]) -> list[list[int]]:
    """Return the channels to remove, such that each layer keeps its share of channels, at least one."""
    readers = {channels.reader.name for channels in found}
    missing = [name for name, share in shares.items() if share < 1 and name not in readers]
    if missing:
        raise ModelError(
            f"Layer {missing[0]!r} does not read exactly the channels of one other layer.",
            "Leave it out of keep; or use basis='eigen', which replaces each layer separately.",
        )
    gone = []
    for channels in found:
        number = len(channels.costs)
        left = max(1, allowed(shares[channels.reader.name], number))
        gone.append(channels.order[: number - left])
    return gone


def _globally(layers: Sequence[Layer], found: Sequence[Channels], keep: float) -> list[list[int]]:
    """Return the channels to remove, such that all layers together keep their share of entries."""
    candidates = sorted(
        (float(channels.costs[place]) / channels.saved, number, place)
        for number, channels in enumerate(found)
        for place in channels.order
    )
    sizes = {layer.name: list(layer.matrix.shape[1:]) for layer in layers}
    per_channel = {channels.link: channels.reader.layout.column_size // len(channels.costs) for channels in found}

    def size(removed: int) -> int:
        counts = {name: list(shape) for name, shape in sizes.items()}
        for _, number, _ in candidates[:removed]:
            link = found[number].link
            counts[link.reader][1] -= per_channel[link]
            counts[link.source][0] -= 1
        groups = {layer.name: len(layer.matrix) for layer in layers}
        return sum(groups[name] * rows * columns for name, (rows, columns) in counts.items())

    total = sum(layer.size for layer in layers)
    number = shortest(size, len(candidates), allowed(keep, total), "channels")
    gone: list[list[int]] = [[] for _ in found]
    for _, which, place in candidates[:number]:
        gone[which].append(place)
    return gone


def _removed(
    model: nn.Module, layers: Sequence[Layer], found: Sequence[Channels], gone: Sequence[list[int]], update: bool
) -> tuple[nn.Module, list[LayerRow]]:
    """Return a copy of the model without the given channels, and the rows of the report."""
    result = deepcopy(model)
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    increases: dict[str, float] = {}
    # Choose the remaining channels of each pair, and adapt the reader's weights.
    for channels, places in zip(found, gone, strict=True):
        if not places:
            continue
        link, reader = channels.link, channels.reader
        for layer in layers:
            if layer.name in {link.source, link.reader}:
                layer.check_replaceable(model, "a smaller layer")
        left = torch.ones(len(channels.costs), dtype=torch.bool)
        left[places] = False
        inputs[link.reader] = outputs[link.source] = left
        for norm in link.norms:
            result = replace_module(result, norm, _norm_with(result.get_submodule(norm), left))
        kept = _kept_columns(reader, left)
        matrix = adapted(reader, kept) if update else torch.where(kept, reader.matrix, 0.0)
        increases[reader.name] = reader.increase(matrix)
        if update:
            write_weights(result, reader, matrix)
    # Replace each layer once: it may lose both inputs and outputs.
    for name in {*inputs, *outputs}:
        module = _layer_with(result.get_submodule(name), inputs.get(name), outputs.get(name))
        result = replace_module(result, name, module)
    rows = [
        _row_of(layer, inputs.get(layer.name), outputs.get(layer.name), increases.get(layer.name, 0.0))
        for layer in layers
    ]
    return result, rows


def _row_of(layer: Layer, inputs: Tensor | None, outputs: Tensor | None, increase: float) -> LayerRow:
    """Return the row of the report for a layer, given which inputs and outputs are left; `None` if all are."""
    groups, d_B, d_A = layer.matrix.shape
    rows = d_B if outputs is None else int(outputs.sum())
    lost = 0 if inputs is None else int((~inputs).sum()) * (layer.layout.column_size // len(inputs))
    columns = d_A - lost
    form = "unchanged" if (rows, columns) == (d_B, d_A) else "smaller"
    shape = f"{rows} x {columns} of {d_B} x {d_A}"
    return LayerRow(layer.name, layer.size, groups * rows * columns, 0, shape, form, increase)


def _kept_columns(reader: Layer, left: Tensor) -> Tensor:
    """Return the mask of kept entries in the reader's matrices, `[1, d_B, d_A]`."""
    columns = left.to(reader.matrix.device).repeat_interleave(reader.layout.column_size // len(left))
    kept = torch.ones_like(reader.matrix, dtype=torch.bool)
    kept[..., : len(columns)] = columns
    return kept


def _layer_with(module: Any, inputs: Tensor | None, outputs: Tensor | None) -> nn.Module:
    """Return a copy of a layer with only the given input and output channels; `None` keeps all."""
    weight = module.weight.detach()
    bias = None if module.bias is None else module.bias.detach()
    if inputs is not None:
        width = weight.shape[1] // len(inputs)  # pixels that were flattened with each channel
        weight = weight[:, inputs.repeat_interleave(width)]
    if outputs is not None:
        weight = weight[outputs]
        bias = None if bias is None else bias[outputs]
    new: Any = deepcopy(module)
    new.weight = nn.Parameter(weight.clone(), module.weight.requires_grad)
    if bias is not None:
        new.bias = nn.Parameter(bias.clone(), module.bias.requires_grad)
    sizes = ("out_features", "in_features") if isinstance(module, nn.Linear) else ("out_channels", "in_channels")
    for name, size in zip(sizes, weight.shape, strict=False):
        setattr(new, name, size)
    return new  # type: ignore[no-any-return]


def _norm_with(module: Any, left: Tensor) -> nn.Module:
    """Return a copy of a BatchNorm with only the given channels."""
    new: Any = deepcopy(module)
    new.num_features = int(left.sum())
    for name, p in module.named_parameters(recurse=False):
        setattr(new, name, nn.Parameter(p.detach()[left].clone(), p.requires_grad))
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.ndim == 1:
            setattr(new, name, buffer[left].clone())
    return new  # type: ignore[no-any-return]
