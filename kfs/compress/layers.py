"""The layers of a model to compress, with their curvature, and their replacement by smaller ones.

Costs of removing weights live in `kfs.compress.surgery`, low-rank layers in `kfs.compress.factorization`.

A *layer* is a linear layer or a convolution. Its weight, and its bias if both share a block, is one matrix for each
group of channels, `[groups, d_B, d_A]`, as everywhere in `kfs.factors`. All computations are in float64.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import skip_init

from kfs.display.suggestions import few, suggest
from kfs.errors import DtypeError, ModelError, SolverError
from kfs.factors import BlockDiagonal, Relative
from kfs.factors.blocks import Dense, Factor, Kronecker, Stack, Structure
from kfs.factors.layout import Layout
from kfs.factors.match import check_parameters, warn_of_other_values
from kfs.problem.whole_parameters import refuse_sharded

Keep = float | Mapping[str, float]
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
# Types of compressed layers. Only these exact types are replaced: a subclass may use its weight in other ways, too.
LAYERS = (nn.Linear, *_CONVOLUTIONS)


@dataclass(frozen=True)
class Layer:
    """A layer to compress.

    Attributes:
        name: The module's name in the model.
        module: The module in the original model.
        layout: The matrix layout of its parameters.
        matrix: The parameters as matrices, `[groups, d_B, d_A]`, in float64.
        structure: Their curvature, in float64: one block for each group.
        damping: Number to add to the curvature's diagonal.
        decomposition: Cache of the curvature's eigenbasis, shared with copies of the layer with other damping.
    """

    name: str
    module: nn.Module
    layout: Layout
    matrix: Tensor
    structure: Structure
    damping: float
    decomposition: dict[str, Structure] = field(default_factory=dict, repr=False, compare=False)

    @property
    def size(self) -> int:
        """Number of entries of the matrices."""
        return self.matrix.numel()

    @property
    def shape(self) -> str:
        """Shape of the matrices as text, for a report."""
        groups, rows, columns = self.matrix.shape
        return f"{rows} x {columns}" if groups == 1 else f"{groups} x {rows} x {columns}"

    @property
    def is_convolution(self) -> bool:
        """Whether the layer is a convolution."""
        return isinstance(self.module, _CONVOLUTIONS)

    @cached_property
    def damped_inverse(self) -> Structure:
        """The inverse of the damped curvature; an error if curvature is singular and not damped."""
        delta = self.matrix.new_full((len(self.structure),), self.damping)
        # Without damping, the inverse of a Kronecker product needs no eigenbasis.
        known = self.eigenbasis if self.damping > 0 and isinstance(self.structure, Kronecker) else self.structure
        result: Structure = Stack((self.layout,), known).apply(lambda structure: structure.power(-1.0, delta))
        return result

    @property
    def eigenbasis(self) -> Structure:
        """The curvature as eigenvalues and eigenvectors, computed once."""
        if not self.decomposition:
            stack = Stack((self.layout,), self.structure)
            self.decomposition["eigenbasis"] = stack.apply(lambda structure: structure.eigenbasis())
        return self.decomposition["eigenbasis"]

    def damped_by(self, damping: float | Relative) -> "Layer":
        """Return the layer with other damping.

        Raises:
            SolverError: If the layer's curvature is zero, and damping is relative to it.
        """
        if not isinstance(damping, Relative):
            return replace(self, damping=float(damping))
        mean = float(self.structure.trace().sum()) / self.size
        if damping.fraction > 0 and not mean > 0:
            raise SolverError(
                f"Block {self.layout.name!r} has no curvature, so relative damping is zero, too: on these data, "
                "predictions do not depend on the layer.",
                "Pass an absolute damping, or leave the layer out: name the layers to compress with keep={...}.",
            )
        return replace(self, damping=damping.fraction * mean)

    def increase(self, matrix: Tensor) -> float:
        """Return the increase of the loss for new matrices, according to the quadratic model without damping."""
        change = (matrix - self.matrix).unsqueeze(1)
        return 0.5 * float((change * self.structure.multiply(change)).sum())

    def is_read_by_attention(self, model: nn.Module) -> bool:
        """Whether a `MultiheadAttention` reads the layer's weight without calling the layer."""
        return isinstance(model.get_submodule(self.name.rpartition(".")[0]), nn.MultiheadAttention)

    def check_replaceable(self, model: nn.Module, what: str) -> None:
        """Check that other modules, which the message calls `what`, can replace the module without side effects."""
        module = self.module
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
        cause = ""
        if self.is_read_by_attention(model):
            cause = "is the last product of a MultiheadAttention, which reads the layer's weight itself"
        elif self.layout.groups > 1:
            cause = f"is a convolution with {self.layout.groups} groups of channels"
        elif type(module) not in LAYERS or not self.layout.is_plain:
            cause = f"is a {type(module).__name__}, which does not simply multiply with its weight"
        elif any(hooks):
            cause = "has hooks, which would be lost"
        if cause:
            raise ModelError(
                f"Layer {self.name!r} {cause}, so {what} cannot take its place.",
                "Leave it out: name the layers to compress with keep={...}; or prune without structured=True, which "
                "only changes weights.",
            )


def layers_of(model: nn.Module, K: BlockDiagonal, keep: Keep, damping: float | Relative) -> list[Layer]:
    """Check the arguments of a compression, and return the layers to compress, in the model's order.

    Layers with zero curvature are omitted unless `keep` names them.

    Raises:
        DtypeError: If an argument has a wrong type.
        ModelError: If the model or the curvature does not fit; see the messages.
        SolverError: If a layer's curvature is zero, and damping is relative to it.
    """
    _check_arguments(model, K, keep, damping)
    params = dict(model.named_parameters())
    check_parameters(K, params)
    warn_of_other_values(K, params, stacklevel=4)
    modules = {name: module for name, module in model.named_modules() if isinstance(module, LAYERS)}
    if not modules:
        raise ModelError(
            "The model has no linear layer or convolution (torch.nn.Linear, Conv1d, Conv2d, Conv3d), so there is "
            "nothing to compress.",
            "Write products with its weights as such modules.",
        )
    # Choose the layers, and find their blocks.
    names = keep if isinstance(keep, Mapping) else modules
    unknown = [name for name in names if name not in modules]
    if unknown:
        raise ModelError(
            f"keep names {few(unknown)}, which is not a linear layer or convolution of the model.",
            suggest(unknown, modules),
        )
    chosen = {name: module for name, module in modules.items() if name in names}
    _check_not_tied(model, chosen)
    blocks = {layout.weight: (layout, stack.structure[part]) for stack in K.stacks for layout, part in stack.slices()}
    layers = []
    for name, module in chosen.items():
        weight = f"{name}.weight" if name else "weight"
        if weight not in blocks or blocks[weight][0].rows != (0, blocks[weight][0].shape[0]):
            raise ModelError(
                f"Layer {name!r} has no block in the curvature, so the cost of compressing it is unknown.",
                "Compute the curvature with this layer's parameters, or name the layers to compress with keep={...}.",
            )
        layout, structure = blocks[weight]
        layers.append(_layer(name, module, layout, structure, params))
    # The curvature of unused layers is zero. They do not compete with other layers unless the user names them.
    used = [layer for layer in layers if layer.structure.trace().any()]
    return [layer.damped_by(damping) for layer in (layers if isinstance(keep, Mapping) or not used else used)]


def _layer(name: str, module: nn.Module, layout: Layout, structure: Structure, params: Mapping[str, Tensor]) -> Layer:
    """Return a layer without damping."""
    columns = {param: params[param].detach().double().unsqueeze(0) for param in layout.params}
    matrix = layout.matrix(columns).squeeze(0)
    if not matrix.isfinite().all():
        raise ModelError(f"Layer {name!r} has NaN or infinity in its weights.", "Load other weights.")
    return Layer(name, module, layout, matrix, _in_double(structure).to(device=matrix.device), 0.0)


def _in_double(structure: Structure) -> Structure:
    """Return blocks in float64. Kronecker factors keep their original precision in `eps`, for tests of singularity."""
    eps = torch.finfo(structure.like.dtype).eps
    precise = structure.to(dtype=torch.float64)
    if isinstance(precise, Kronecker):
        return Kronecker(*(_factor(factor, factor.eps or eps) for factor in (precise.A, precise.B)))
    if isinstance(precise, Dense) and structure.like.dtype != torch.float64:
        return replace(precise, matrix=_without_round_off(precise.matrix, eps))
    return precise


def _factor(factor: Factor, eps: float) -> Factor:
    """Return a float64 factor with sums of precision `eps`, without the resulting round-off."""
    if factor.kind == "dense" and factor.symmetric and eps > torch.finfo(torch.float64).eps:
        factor = replace(factor, values=_without_round_off(factor.values, eps))
    return replace(factor, eps=eps)


def _without_round_off(matrices: Tensor, eps: float) -> Tensor:
    """Set eigenvalues of `[stack, d, d]` to zero if they are negative only because of round-off in sums over data.

    In the precision of the sums, they would be tolerated. In float64, they would raise an error.
    """
    values, vectors = torch.linalg.eigh(matrices)
    tolerated = -(eps**0.5) * values.abs().amax(-1, keepdim=True)
    wrong = (values < 0) & (values >= tolerated)
    if not wrong.any():
        return matrices
    result: Tensor = (vectors * torch.where(wrong, 0.0, values).unsqueeze(-2)) @ vectors.mT
    return result


def _check_arguments(model: object, K: object, keep: object, damping: object) -> None:
    """Check types, the modes of modules, and shares."""
    if not isinstance(model, nn.Module):
        raise DtypeError(f"The model is a {type(model).__name__}.", "Pass a torch.nn.Module.")
    if not isinstance(K, BlockDiagonal):
        raise DtypeError(f"The curvature is a {type(K).__name__}, which has no blocks.", "Pass a kfs.KFAC or EKFAC.")
    if not isinstance(damping, Relative) and (not isinstance(damping, (int, float)) or not 0 <= damping < inf):
        raise DtypeError(f"The damping is {damping!r}.", "Use a finite number >= 0, or kfs.Relative of one.")
    refuse_sharded(model)
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.training:
            raise ModelError(
                f"Module {name!r} ({type(module).__name__}) is in training mode: the curvature belongs to another "
                "function, and the statistics of the module would change.",
                "Call model.eval() first.",
            )
    if keep == {}:
        raise ModelError("keep is empty, so there is nothing to compress.", "Name at least one layer.")
    shares = {f"keep[{name!r}]": share for name, share in keep.items()} if isinstance(keep, Mapping) else {"keep": keep}
    for what, share in shares.items():
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise ModelError(
                f"{what} is {share!r}.", "Use a number above 0 and at most 1, such as 0.2; or one per layer."
            )


def _check_not_tied(model: nn.Module, chosen: Mapping[str, nn.Module]) -> None:
    """Raise an error for weights that have several names, or share memory with other parameters."""
    owners: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        owners.setdefault(p.data_ptr(), []).append(name)
    for name, module in chosen.items():
        for leaf, p in module.named_parameters(recurse=False):
            names = owners[p.data_ptr()]
            if len(names) > 1:
                raise ModelError(
                    f"Parameter {leaf!r} of layer {name!r} is tied: it is {few(names)}.",
                    "Leave the layer out: name the layers to compress with keep={...}.",
                )


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
    """Replace a module of the model, and return the model; if the name is empty, return the new module."""
    if not name:
        return module
    path, _, leaf = name.rpartition(".")
    parent = model.get_submodule(path)
    setattr(parent, leaf, module)
    if isinstance(parent, nn.TransformerEncoderLayer) and not isinstance(module, nn.Linear):
        # In evaluation mode, PyTorch's fused kernel would read the weight of a single layer here. Claim an activation
        # that it does not support.
        parent.activation_relu_or_gelu = 0
        for outer in model.modules():
            if isinstance(outer, nn.TransformerEncoder):
                outer.use_nested_tensor = False
    return model


def in_a_row(layer: Layer, factors: Sequence[Tensor], fixed: Sequence[bool]) -> nn.Sequential:
    """Return plain layers that take the place of one, and multiply with several matrices from input to output.

    In place of a convolution, the first one has its kernel, and all others have kernels of one pixel. Layers are frozen
    where `fixed` is true.
    """
    old: Any = layer.module
    modules = []
    for place, (factor, is_fixed) in enumerate(zip(factors, fixed, strict=True)):
        weight, bias = factor, None
        if place == 0 and layer.layout.bias is not None:
            weight, bias = factor[:, :-1], factor[:, -1]
        elif place == len(factors) - 1 and layer.layout.bias is None and old.bias is not None:
            bias = old.bias.detach()  # not part of the matrix, so it is added at the end, as before
        modules.append(_plain(layer, weight, bias, first=place == 0, trainable=not is_fixed))
    return nn.Sequential(*modules).train(old.training)


def _plain(layer: Layer, weight: Tensor, bias: Tensor | None, first: bool, trainable: bool) -> nn.Module:
    """Return a linear layer or a convolution with a given weight `[out, in * pixels]`."""
    old: Any = layer.module
    kind: dict[str, Any] = {"bias": bias is not None, "dtype": old.weight.dtype, "device": old.weight.device}
    rows, columns = weight.shape
    # Skip the initialization, which would change the global random state, and would be overwritten.
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
