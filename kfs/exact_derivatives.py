"""Operations whose derivatives PyTorch gets wrong, or treats differently forward and backward, replaced by equal ones.

What cannot be replaced is refused, and what has no derivative is explained. The mode is active whenever a risk
evaluates its model.
"""

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.nn import functional as F  # noqa: N812 (as everybody calls it)
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointError, CheckpointFunction

from kfs.errors import ModelError

# What PyTorch's messages contain where an operation has no (second) derivative at all.
_NO_DERIVATIVE = (
    "is not implemented",
    "differentiate twice",
    "Double backward is unsupported",
    "does not support automatic differentiation",
)
# What they contain where a tensor is stored in a way that few operations and derivatives know.
_STORED_OTHERWISE = {
    "sparse": ("'Sparse", "Sparse CSR", "sparse tensor"),
    "nested": ("NestedTensor", "NestedInt", "_nested_", "nested tensor"),
}


@contextmanager
def explained() -> Iterator[None]:
    """Say what to do where PyTorch cannot differentiate an operation as often as needed."""
    try:
        yield
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        message = str(error).partition("\n")[0]  # a long trace follows
        first = message.partition(". ")[0].rstrip(".")  # a list of everything that would work follows
        for kind, symptoms in _STORED_OTHERWISE.items():
            if any(symptom in first for symptom in symptoms):
                raise _stored_otherwise(kind, first) from error
        if isinstance(error, CheckpointError) or any(symptom in message for symptom in _NO_DERIVATIVE):
            raise ModelError(
                f"PyTorch cannot differentiate an operation of the model as needed: {message}",
                "Replace the operation by others, or leave the parameters before it out with params=.",
            ) from error
        raise


def refuse_sparse_and_nested(t: Tensor) -> None:
    """Refuse a tensor whose entries are not where its strides say."""
    if t.is_nested or t.layout is not torch.strided:
        raise _stored_otherwise("nested" if t.is_nested else "sparse", "it is combined with a parameter")


def _stored_otherwise(kind: str, where: str) -> ModelError:
    """Return the error for a `"sparse"` or `"nested"` tensor."""
    ways_out = {
        "sparse": "Make it dense before, in the data or in the model: x.to_dense().",
        "nested": "Pad it before, with torch.nested.to_padded_tensor(x, 0.0), and mask the padding.",
    }
    cause = f"The model uses a {kind} tensor in a way that is not supported here: {where}."
    return ModelError(cause, ways_out[kind])


@contextmanager
def no_hooks_on_saved_tensors() -> Iterator[None]:
    """Refuse activation checkpointing."""
    cause = (
        "The model uses activation checkpointing or other hooks on saved tensors, which would see its own parameters "
        "instead of the values given as params={...}, or instead of frozen ones that are to be differentiated."
    )
    try:
        with disable_saved_tensors_hooks(cause):
            yield
    except RuntimeError as error:
        if cause in str(error):
            way_out = "Switch it off, or load the values into the model and let the parameters require gradients."
            raise ModelError(cause, way_out) from error
        raise


class ExactDerivatives(TorchFunctionMode):
    """Makes `F.embedding` and `torch._weight_norm` have one derivative in every mode of differentiation.

    - The row `padding_idx` of an embedding is a constant: PyTorch drops its gradient in the backward pass, but not its
      tangent in the forward pass, so that `J` and `J^T` would not be transposes of each other.
    - The second derivative of weight normalisation is wrong in PyTorch on the CPU; spelled out, it is right.
    - Reentrant checkpoints hide parameters from `torch.autograd.grad`; they are refused.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: D105
        kwargs = kwargs or {}
        if not torch.is_grad_enabled():
            refuse_reentrant_checkpoint()
        if func is F.embedding:
            return _embedding(*args, **kwargs)
        if func is torch._weight_norm:
            return _weight_norm(*args, **kwargs)
        return func(*args, **kwargs)


def _embedding(*args: Any, **kwargs: Any) -> Any:
    call = inspect.signature(F.embedding).bind(*args, **kwargs)
    call.apply_defaults()
    index, weight, padding = (call.arguments[name] for name in ("input", "weight", "padding_idx"))
    refuse_changing_embedding(call.arguments["max_norm"], call.arguments["scale_grad_by_freq"])
    if padding is None or forward_ad.unpack_dual(weight).tangent is None:
        return F.embedding(index, weight, padding)
    moves = (index != padding % len(weight)).unsqueeze(-1)
    return torch.where(moves, F.embedding(index, weight), F.embedding(index, weight.detach()))


def refuse_changing_embedding(max_norm: float | None, scale_grad_by_freq: bool) -> None:
    """Refuse an embedding whose gradient or weight is not what it seems to be."""
    if scale_grad_by_freq or max_norm is not None:
        raise ModelError(
            "An embedding has scale_grad_by_freq or max_norm: it changes its gradient or its weight.",
            "Switch both off.",
        )


def _weight_norm(v: Any, g: Any, dim: int = 0) -> Any:
    return v * (g / torch.norm_except_dim(v, 2, dim))


def refuse_reentrant_checkpoint() -> None:
    """Refuse to run inside of a checkpoint that hides parameters from `torch.autograd.grad`."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not CheckpointFunction.forward.__code__:
        frame = frame.f_back  # type: ignore[assignment]
    if frame is not None:
        raise ModelError(
            "The model uses reentrant activation checkpointing, which hides its parameters from torch.autograd.grad.",
            "Call checkpoint(..., use_reentrant=False), or switch it off.",
        )
