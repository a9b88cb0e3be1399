"""PyTorch's `autograd.grad`, with errors that say how to fix them.

It leaves the graph and all `.grad` as they were. The definitions differentiate with
this function only.
"""

from torch import Tensor, autograd, linspace, ones_like, zeros_like

from kfs.errors import DtypeError, GraphError


def grad(b: Tensor, a: Tensor, v: Tensor, create_graph: bool = False) -> Tensor | None:
    """Return `v^T J` with the Jacobian of `b` with respect to `a`.

    `None` if no path leads from `a` to `b`.
    """
    if not b.requires_grad:
        return None
    # Autograd would add to their .grad.
    kept = [(t, t.grad) for t in (b, a) if t.retains_grad]
    try:
        (u,) = autograd.grad(
            b, a, v, retain_graph=True, create_graph=create_graph, allow_unused=True
        )
    except RuntimeError as error:
        for symptom, (cause, way_out) in _AUTOGRAD_ERRORS.items():
            if symptom in str(error):
                raise GraphError(cause, way_out) from error
        raise
    finally:
        for t, old in kept:
            t.grad = old
    return u


def connected(u: Tensor | None, b: str, a: str) -> Tensor:
    """Return a derivative of `b` with respect to `a`; raise an error for `None`."""
    if u is None:
        raise _no_path(b, a)
    return u


def depends(b: Tensor, a: Tensor) -> bool:
    """Return whether `b` was computed from `a`."""
    return not b.is_leaf and grad(b, a, ones_like(b)) is not None


def check_independent(a1: Tensor, a2: Tensor) -> None:
    """Raise an error if one of two different tensors was computed from the other."""
    if a1 is not a2 and (depends(a1, a2) or depends(a2, a1)):
        raise GraphError(
            "One of a1 and a2 was computed from the other, so they cannot be varied "
            "independently.",
            "Choose two tensors of which neither enters the computation of the other.",
        )


def check_order(printed: str, here: str, b: Tensor, a: Tensor) -> None:
    """Raise an error if `a` was computed from `b`: the paper's order, not ours.

    Or if `b` is a pair of tensors, which stands there in the paper.
    """
    if isinstance(b, tuple):
        raise DtypeError(
            f"b is a tuple; the paper's printed order is {printed}.", f"Here: {here}."
        )
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or not b.requires_grad:
        return
    if a is not b and depends(a, b):
        raise GraphError(
            f"a was computed from b; the paper's printed order is {printed}.",
            f"Here: {here}.",
        )


def zero_jvp(b: Tensor, a: Tensor) -> Tensor:
    """Return zeros like `b`, if the backward pass to `a` multiplies with zero.

    Raise an error if it does not, so that it only hides how it depends on its input.
    """
    probe = linspace(1, 2, b.numel(), dtype=b.dtype, device=b.device).reshape(b.shape)
    if connected(grad(b, a, probe), "b", "a").count_nonzero():
        raise GraphError(
            "The backward pass from b to a cannot be differentiated, as with "
            "@once_differentiable functions.",
            "Write that function's backward pass in differentiable operations.",
        )
    return zeros_like(b)


def zero_hvp(c: Tensor, a: Tensor) -> Tensor:
    """Return zeros like `a`, of which the gradient of `c` does not depend.

    Raise an error if `c` does not depend on `a`, either.
    """
    if not depends(c, a):
        raise _no_path("c", "a1")
    return zeros_like(a)


def _no_path(b: str, a: str) -> GraphError:
    """Return the error for two tensors of which one was not computed from the other."""
    return GraphError(
        f"{b} was not computed from {a}: there is no path between them in the "
        "computation graph.",
        "Pass the very tensor that entered the computation, not a copy, a slice or a "
        "detached version of it.",
    )


# Parts of PyTorch's messages, and the causes and ways out for our messages.
_AUTOGRAD_ERRORS = {
    "a second time": (
        "The computation graph has been freed by an earlier backward pass.",
        "Evaluate the network again, or pass retain_graph=True to that backward pass.",
    ),
    "modified by an inplace operation": (
        "A tensor of the computation graph has been overwritten since the forward pass "
        "(by an optimizer step, say).",
        "Evaluate the network again, or replace the in-place operation.",
    ),
    "is not implemented": (
        "An operation in the computation graph has no second derivative in PyTorch.",
        "Use another implementation, for attention: with "
        "torch.nn.attention.sdpa_kernel(SDPBackend.MATH).",
    ),
}
