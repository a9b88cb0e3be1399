"""What the definitions ask of the tensors they are given. Each failed check says what came and what to do.

Checks of losses live with the losses (`reduction_factors`), those of models and data in `_per_datum`.
"""

from torch import Tensor

from kfs.errors import DtypeError, GraphError, ShapeError


def check_tensor(name: str, t: Tensor) -> None:
    """Refuse anything but a tensor."""
    if not isinstance(t, Tensor):
        raise DtypeError(
            f"{name} is a {type(t).__name__}, expected a torch.Tensor.",
            "Check the order of the arguments; a flattening is passed as vec=cvec or vec=rvec.",
        )


def check_floating(name: str, t: Tensor) -> None:
    """Refuse anything but a tensor of real floating-point numbers."""
    check_tensor(name, t)
    if not t.is_floating_point():
        raise DtypeError(
            f"{name} has dtype {t.dtype}, but derivatives exist only for real floating-point tensors.",
            "Convert it with .to(torch.float64) before the computation that uses it.",
        )


def check_node(name: str, t: Tensor) -> None:
    """Refuse what cannot be differentiated: not a tensor, not real floating point, or outside any graph."""
    check_floating(name, t)
    if not t.requires_grad:
        raise GraphError(
            f"{name} is not part of a computation graph: it does not require gradients.",
            "Call requires_grad_() on the leaves before the forward pass, and run that outside of torch.no_grad().",
        )


def check_scalar(name: str, t: Tensor) -> None:
    """Refuse a tensor that has axes: a Hessian is that of a scalar."""
    if t.ndim != 0:
        raise ShapeError(
            f"{name} has shape {list(t.shape)}, but a Hessian is defined for a scalar, shape [].",
            f"Reduce it first, e.g. {name}.sum() or {name}.squeeze().",
        )


def check_like(name: str, t: Tensor, of: str, reference: Tensor) -> None:
    """Refuse a tensor whose shape, dtype or device is not the reference's."""
    check_tensor(name, t)
    if t.shape != reference.shape:
        raise ShapeError(
            f"{name} has shape {list(t.shape)}, but {of} has shape {list(reference.shape)}.",
            f"{name} must have the shape of {of}.",
        )
    if t.dtype != reference.dtype or t.device != reference.device:
        raise DtypeError(
            f"{name} is {t.dtype} on {t.device}, but {of} is {reference.dtype} on {reference.device}.",
            f"Convert it: {name}.to({of}).",
        )
