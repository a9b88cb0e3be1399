"""Checks of tensors that are passed to the definitions. An error says what was passed and how to fix it.

Checks of losses are in `reduction_factors`, checks of models and data in `_per_datum`.
"""

from torch import Tensor

from kfs.errors import DtypeError, GraphError, ShapeError
from kfs.problem.isolation import check_no_inference_mode


def check_tensor(name: str, t: Tensor) -> None:
    """Raise an error if a value is not a tensor."""
    if not isinstance(t, Tensor):
        way_out = "A flattening is passed as vec=cvec or vec=rvec." if callable(t) else "Convert it to a tensor."
        raise DtypeError(f"{name} is a {type(t).__name__}, expected a torch.Tensor.", way_out)


def check_floating(name: str, t: Tensor) -> None:
    """Raise an error if a value is not a tensor of real floating-point numbers."""
    check_tensor(name, t)
    if not t.is_floating_point():
        raise DtypeError(
            f"{name} has dtype {t.dtype}, but derivatives exist only for real floating-point tensors.",
            "Start the computation from such a tensor, e.g. of dtype torch.float64.",
        )


def check_node(name: str, t: Tensor) -> None:
    """Raise an error if a tensor cannot be differentiated: wrong dtype, not part of a graph, or with hooks."""
    check_floating(name, t)
    check_no_inference_mode()
    if not t.requires_grad:
        raise GraphError(
            f"{name} is not part of a computation graph: it does not require gradients.",
            "Call requires_grad_() on the leaves before the forward pass, and run that outside of torch.no_grad().",
        )
    if t._backward_hooks:
        raise GraphError(
            f"{name} has hooks, which may change the derivatives that pass through it.",
            "Remove them: call remove() on the handle that register_hook returned.",
        )


def check_scalar(name: str, t: Tensor) -> None:
    """Raise an error if a tensor is not a scalar, for which a Hessian is defined."""
    if t.ndim != 0:
        raise ShapeError(
            f"{name} has shape {list(t.shape)}, but a Hessian is defined for a scalar, shape [].",
            f"Reduce it first, e.g. {name}.sum() or {name}.squeeze().",
        )


def check_like(name: str, t: Tensor, of: str, reference: Tensor) -> None:
    """Raise an error if shape, dtype or device of a tensor differ from the reference's."""
    check_tensor(name, t)
    if t.shape != reference.shape:
        raise ShapeError(
            f"{name} has shape {list(t.shape)}, but {of} has shape {list(reference.shape)}.",
            f"Give {name} the shape of {of}.",
        )
    check_same_kind(name, t, of, reference)


def check_same_kind(name: str, t: Tensor, of: str, reference: Tensor) -> None:
    """Raise an error if dtype or device of a tensor differ from the reference's."""
    if t.dtype != reference.dtype or t.device != reference.device:
        raise DtypeError(
            f"{name} is {t.dtype} on {t.device}, but {of} is {reference.dtype} on {reference.device}.",
            f"Convert one of them, e.g. {name}.to('{reference.device}', {reference.dtype}).",
        )
