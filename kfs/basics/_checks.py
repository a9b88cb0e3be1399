"""Checks of what is passed to the definitions: tensors, axes, losses, targets, layers.

An error says what was passed and how to fix it. Checks of a network as a function of
one example are in `_per_datum`, those that need derivatives in `_autograd`.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from math import prod
from typing import NoReturn, TypeAlias

from torch import Generator, Size, Tensor, int64
from torch.nn import CrossEntropyLoss, Module, MSELoss

from kfs.errors import (
    DataError,
    DtypeError,
    GraphError,
    LossError,
    ModelError,
    ShapeError,
)
from kfs.problem.isolation import check_no_inference_mode

# As in `reduction_factors`, which imports this module.
Loss: TypeAlias = MSELoss | CrossEntropyLoss


# Tensors.


def check_tensor(name: str, t: Tensor) -> None:
    """Raise an error if a value is not a tensor."""
    if isinstance(t, Tensor):
        return
    way_out = "Convert it to a tensor."
    if callable(t) or isinstance(t, str):
        way_out = "A flattening is passed as vec=cvec or vec=rvec."
    elif isinstance(t, tuple):
        way_out = (
            "Pass one tensor. A pair (x1, x2) of the paper is two arguments here; for "
            "products, of mixed_hvp or mixed_ggnvp."
        )
    raise DtypeError(
        f"{name} is a {type(t).__name__}, expected a torch.Tensor.", way_out
    )


def check_floating(name: str, t: Tensor) -> None:
    """Raise an error if a value is not a tensor of real floating-point numbers."""
    check_tensor(name, t)
    if not t.is_floating_point():
        raise DtypeError(
            f"{name} has dtype {t.dtype}, but derivatives exist only for real "
            "floating-point tensors.",
            "Start the computation from such a tensor, e.g. of dtype torch.float64.",
        )


def check_nodes(**nodes: Tensor) -> None:
    """Raise an error if one of several tensors cannot be differentiated."""
    for name, t in nodes.items():
        check_node(name, t)


def check_node(name: str, t: Tensor) -> None:
    """Raise an error if a tensor cannot be differentiated.

    It has the wrong dtype, or is not part of a graph, or has hooks.
    """
    check_floating(name, t)
    check_no_inference_mode()
    if not t.requires_grad:
        raise GraphError(
            f"{name} is not part of a computation graph: it does not require "
            "gradients.",
            "Call requires_grad_() on the leaves before the forward pass, and run "
            "that outside of torch.no_grad().",
        )
    check_no_hooks(name, t, "the derivatives that pass through it")


def check_no_hooks(name: str, t: Tensor, changed: str) -> None:
    """Raise an error if a tensor has hooks."""
    if t._backward_hooks:
        raise GraphError(
            f"{name} has hooks, which may change {changed}.",
            "Remove them: call remove() on the handle that register_hook returned.",
        )


def check_scalar(name: str, t: Tensor) -> None:
    """Raise an error if a tensor is not a scalar, for which a Hessian is defined."""
    if t.ndim != 0:
        raise ShapeError(
            f"{name} has shape {list(t.shape)}, but a Hessian is defined for a scalar, "
            "shape [].",
            f"Reduce it first, e.g. {name}.sum() or {name}.squeeze().",
        )


def check_like(name: str, t: Tensor, of: str, reference: Tensor) -> None:
    """Raise an error if shape, dtype or device differ from the reference's."""
    check_tensor(name, t)
    if t.shape != reference.shape:
        raise ShapeError(
            f"{name} has shape {list(t.shape)}, but {of} has shape "
            f"{list(reference.shape)}.",
            f"Give {name} the shape of {of}.",
        )
    check_same_kind(name, t, of, reference)


def check_same_kind(name: str, t: Tensor, of: str, reference: Tensor) -> None:
    """Raise an error if dtype or device of a tensor differ from the reference's."""
    if t.dtype != reference.dtype or t.device != reference.device:
        raise DtypeError(
            f"{name} is {t.dtype} on {t.device}, but {of} is {reference.dtype} on "
            f"{reference.device}.",
            "Convert one of them, e.g. "
            f"{name}.to('{reference.device}', {reference.dtype}).",
        )


def check_no_vec(a2: Tensor | None) -> None:
    """Raise an error if a flattening is passed as `a2`, as in the paper's order."""
    if a2 is not None and not isinstance(a2, Tensor):
        raise DtypeError(
            f"a2 is a {type(a2).__name__}, expected a torch.Tensor; the paper's "
            'printed order is vec_ggn(loss, p, output, "rvec").',
            "Here: vec_ggn(loss, output, p, vec=rvec), with rvec or cvec of "
            "kfs.basics.flattening.",
        )


def check_ndim(name: str, t: Tensor, ndim: int, way_out: str) -> None:
    """Raise an error if a tensor is not a vector (one axis) or a matrix (two axes)."""
    check_tensor(name, t)
    if t.ndim != ndim:
        expected = {1: "vector", 2: "matrix"}[ndim]
        raise ShapeError(
            f"{name} has shape {list(t.shape)}, expected a {expected}.", way_out
        )


def check_matrices(**matrices: Tensor) -> None:
    """Raise an error if one of several tensors is not a matrix."""
    for name, t in matrices.items():
        check_ndim(name, t, 2, "Pass a tensor with two axes.")


def check_product(**matrices: Tensor) -> None:
    """Raise an error if two matrices cannot be multiplied."""
    (one, left), (other, right) = matrices.items()
    if left.shape[1] != right.shape[0]:
        raise ShapeError(
            f"{one} has shape {list(left.shape)} and {other} has shape "
            f"{list(right.shape)}, so {one} @ {other} does not exist.",
            f"Pass {other} with {left.shape[1]} rows.",
        )


def check_square(name: str, t: Tensor) -> None:
    """Raise an error if a tensor is not a square matrix."""
    check_ndim(name, t, 2, "Pass a square matrix.")
    if t.shape[0] != t.shape[1]:
        raise ShapeError(
            f"{name} has shape {list(t.shape)}, but only square matrices have an "
            "inverse.",
            "Pass a square matrix.",
        )


def check_length(name: str, v: Tensor, columns: int, of: str) -> None:
    """Raise an error if a tensor is not a vector that a matrix multiplies."""
    check_tensor(name, v)
    if v.shape != (columns,):
        raise ShapeError(
            f"{name} has shape {list(v.shape)}, but {of} has {columns} columns.",
            f"Pass a vector of shape [{columns}].",
        )


# Axes.


def axis_range(name: str, t: Tensor, start_dim: int, end_dim: int) -> tuple[int, int]:
    """Return a range of axes as non-negative numbers; raise an error for others."""
    check_tensor(name, t)
    ndim = max(t.ndim, 1)  # a scalar is flattened like a vector of one entry
    inside = all(-ndim <= dim < ndim for dim in (start_dim, end_dim))
    if not inside or start_dim % ndim > end_dim % ndim:
        raise ShapeError(
            f"Axes {start_dim} to {end_dim} are no range of axes of a tensor of shape "
            f"{list(t.shape)}.",
            f"Choose start_dim <= end_dim, both from {-ndim} to {ndim - 1}.",
        )
    return start_dim % ndim, end_dim % ndim


def unflattened_axis(v: Tensor, shape: Sequence[int], dim: int) -> int:
    """Return an axis as a non-negative number; raise an error for a wrong length."""
    dim, _ = axis_range("v", v, dim, dim)
    if v.ndim == 0 or v.shape[dim] != prod(shape):
        raise ShapeError(
            f"Axis {dim} of a tensor of shape {list(v.shape)} cannot become "
            f"{list(shape)} ({prod(shape)} entries).",
            "Pass the vector that a flattening returned together with the shape that "
            "the tensor had before.",
        )
    return dim


# Losses and targets.


def check_loss(loss: Module) -> None:
    """Raise an error unless the loss is reduced, and of a supported type.

    Subclasses may redefine anything, so they are not supported.
    """
    if type(loss) is not MSELoss and type(loss) is not CrossEntropyLoss:
        raise LossError(
            f"The loss is {loss!r}, but kfs.basics defines MSELoss and "
            "CrossEntropyLoss (and no subclass of them).",
            "Pass an instance of one of the two: torch.nn.MSELoss() or "
            "torch.nn.CrossEntropyLoss().",
        )
    if loss.reduction not in {"mean", "sum"}:
        raise LossError(
            f"The loss has reduction={loss.reduction!r}, so it is not one number.",
            "Choose reduction='mean' or reduction='sum'.",
        )


def check_targets(loss: Loss, target: Tensor) -> None:
    """Raise an error if the targets of a data set have no reduction factor."""
    check_loss(loss)
    check_tensor("The target", target)
    if target.ndim == 0 or target.numel() == 0:
        raise DataError(
            f"The target has shape {list(target.shape)}: there is no example in it.",
            "Pass all targets, stacked along the first axis.",
        )
    if isinstance(loss, MSELoss) or loss.reduction == "sum":
        return
    _check_labels(loss, target)
    if target.is_floating_point() and target.ndim < 2:
        raise ShapeError(
            f"The target has shape {list(target.shape)}, dtype {target.dtype}: "
            "neither labels nor probabilities.",
            "Pass labels [N, ...] as torch.int64, or probabilities [N, C, ...].",
        )
    if not target.is_floating_point() and loss.weight is not None:
        _check_range(loss, target, len(loss.weight))


def check_counted(num_labels: float) -> None:
    """Raise an error if no label counts."""
    if num_labels == 0:
        raise DataError(
            "Every label is ignore_index or of a class with weight zero, so their mean "
            "is 0/0.",
            "Pass data with at least one counted label, or use reduction='sum'.",
        )


def check_datum(loss: Loss, f: Tensor, y: Tensor) -> None:
    """Raise an error if prediction and target of one example do not fit."""
    check_floating("The prediction", f)
    check_tensor("The target", y)
    if isinstance(loss, MSELoss):
        check_floating("The target", y)
        _check_target_shape(f, y, f.shape)
        return
    check_logits(f)
    if loss.weight is not None:
        one_per_class = f.reshape(f.shape[0], -1)[:, 0]
        check_like(
            "The loss's weight",
            loss.weight,
            "a prediction's class axis",
            one_per_class,
        )
    _check_labels(loss, y)
    _check_target_shape(f, y, f.shape if y.is_floating_point() else f.shape[1:])
    if not y.is_floating_point():
        _check_range(loss, y, f.shape[0])


def check_logits(f: Tensor) -> None:
    """Raise an error for a prediction without classes."""
    if f.ndim == 0 or f.numel() == 0:
        raise ShapeError(
            f"The prediction has shape {list(f.shape)}, but cross-entropy needs one "
            "logit per class.",
            "Pass one example's logits, shape [C, ...].",
        )


def check_likelihood(loss: Loss, prediction: Tensor) -> None:
    """Raise an error if the criterion is not a negative log-likelihood.

    Or if the prediction does not fit it.
    """
    check_loss(loss)
    check_floating("The prediction", prediction)
    if isinstance(loss, MSELoss):
        return
    check_logits(prediction)
    if loss.weight is not None or loss.label_smoothing != 0:
        raise LossError(
            f"{loss} with class weights or label smoothing is not the negative "
            "logarithm of a distribution.",
            "Drop both settings, or use a curvature matrix that needs no samples "
            "(Hessian, GGN, empirical Fisher).",
        )
    if 0 <= loss.ignore_index < prediction.shape[0]:
        raise LossError(
            f"ignore_index={loss.ignore_index} is one of the {prediction.shape[0]} "
            "classes that can be drawn.",
            "Mark missing labels by a number that is no class, such as PyTorch's "
            "default -100.",
        )


def check_generator(generator: Generator | None, f: Tensor) -> None:
    """Raise an error if labels for a prediction cannot be drawn by a generator."""
    if not isinstance(generator, Generator | None):
        raise DtypeError(
            f"generator is a {type(generator).__name__}, expected a torch.Generator.",
            "Make one from a seed: torch.Generator().manual_seed(seed).",
        )
    if generator is not None and generator.device.type != f.device.type:
        raise DtypeError(
            f"The generator is on {generator.device}, but the prediction is on "
            f"{f.device}.",
            f"Make one there: torch.Generator({f.device.type!r}).",
        )


def check_draws(mc_samples: int, seed: int = 0) -> None:
    """Raise an error if number and seed of drawn labels are no such numbers."""
    integers = isinstance(mc_samples, int) and isinstance(seed, int)
    if not integers or mc_samples < 1:
        raise DataError(
            f"mc_samples is {mc_samples!r} and seed is {seed!r}, expected integers.",
            "Draw at least one label per example: mc_samples >= 1.",
        )


def _check_target_shape(f: Tensor, y: Tensor, expected: Size) -> None:
    """Raise an error if a target does not have the expected shape."""
    if y.shape != expected:
        raise ShapeError(
            f"The prediction has shape {list(f.shape)}, so one example's target has "
            f"shape {list(expected)}, but it has shape {list(y.shape)} (dtype "
            f"{y.dtype}).",
            "Pass one example without its batch axis; class labels as torch.int64, "
            "probabilities like the logits.",
        )


def _check_labels(loss: CrossEntropyLoss, y: Tensor) -> None:
    """Raise an error if targets are neither class labels nor class probabilities."""
    if y.is_floating_point() and loss.ignore_index >= 0:
        raise LossError(
            "The target is class probabilities, but "
            f"ignore_index={loss.ignore_index}, which is for labels.",
            "Leave ignore_index at its default of -100.",
        )
    if not y.is_floating_point() and y.dtype != int64:
        raise DtypeError(
            f"The target has dtype {y.dtype}, but class labels are torch.int64.",
            "Convert it: y.long().",
        )


def _check_range(loss: CrossEntropyLoss, y: Tensor, num_classes: int) -> None:
    """Raise an error if labels are out of range."""
    counted = y[y != loss.ignore_index]
    if counted.numel() and not 0 <= counted.min() <= counted.max() < num_classes:
        raise DataError(
            f"Labels go from {counted.min().item()} to {counted.max().item()}, but "
            f"there are {num_classes} classes.",
            f"Use labels from 0 to {num_classes - 1}, or ignore_index "
            f"({loss.ignore_index}) for missing ones.",
        )


# Layers.


def named_layers(model: Module, names: Iterable[str]) -> dict[str, Module]:
    """Return the layers with these names; raise an error for names without a layer."""
    check_no_inference_mode()
    if isinstance(names, str):
        raise ModelError(
            f"names is the string {names!r}.", f"Pass a list of names: [{names!r}]."
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    names = list(names)
    unknown = list(dict.fromkeys(name for name in names if name not in modules))
    if unknown:
        raise ModelError(
            f"The model has no layers named {unknown}.",
            f"Choose from {[name for name in modules if name]}.",
        )
    return {name: modules[name] for name in names}


@contextmanager
def called_once(layers: dict[str, Module]) -> Iterator[None]:
    """Raise an error unless each layer is called once here, with a tensor in and out.

    And unless both are as they were at the end: PyTorch counts changes of a tensor.
    """
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    versions: dict[str, tuple[int, ...]] = {}
    with ExitStack() as hooks:
        for name, layer in layers.items():

            def before(_: Module, x: tuple[object, ...], name: str = name) -> None:
                versions[name] = tuple(t._version for t in x if isinstance(t, Tensor))

            def after(
                _: Module, x: tuple[object, ...], y: object, name: str = name
            ) -> None:
                if name in seen:
                    _refuse_second_call(name)
                seen[name] = _tensor_in_tensor_out(name, x, y)
                versions[name] += (seen[name][1]._version,)

            hooks.callback(layer.register_forward_pre_hook(before).remove)
            hooks.callback(layer.register_forward_hook(after).remove)
        yield

    for name in layers:
        if name not in seen:
            raise ModelError(
                f"Layer {name!r} was not called in the forward pass.",
                "Leave it out of names, or check that the model calls the module "
                "itself, not only its parameters.",
            )
        if versions[name] != tuple(t._version for t in seen[name]):
            raise ModelError(
                f"The input or output of layer {name!r} was overwritten by an in-place "
                "operation.",
                "Use the out-of-place version, e.g. ReLU(inplace=False).",
            )


def _refuse_second_call(name: str) -> NoReturn:
    """Raise the error for a layer that is called again."""
    raise ModelError(
        f"Layer {name!r} was called more than once in the forward pass, so it has no "
        "one input and output.",
        "Watch the modules that call it instead, or give every call a module of its "
        "own.",
    )


def _tensor_in_tensor_out(
    name: str, inputs: tuple[object, ...], output: object
) -> tuple[Tensor, Tensor]:
    """Return a layer's input and output; raise an error unless each is one tensor."""
    if len(inputs) == 1:
        (x,) = inputs
        if isinstance(x, Tensor) and isinstance(output, Tensor):
            return x, output
    raise ModelError(
        f"Layer {name!r} does not map one tensor, passed by position, to one tensor.",
        "Watch the layers inside of it, which do.",
    )
