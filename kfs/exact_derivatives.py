"""Operations whose derivatives PyTorch gets wrong, or treats differently forward and backward, replaced by equal ones.

What cannot be replaced is refused. The mode is active whenever a risk evaluates its model.
"""

import inspect
import sys
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.nn import functional as F  # noqa: N812 (as everybody calls it)
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from kfs.errors import ModelError


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
            _refuse_reentrant_checkpoint()
        if func is F.embedding:
            return _embedding(*args, **kwargs)
        if func is torch._weight_norm:
            return _weight_norm(*args, **kwargs)
        return func(*args, **kwargs)


def _embedding(*args: Any, **kwargs: Any) -> Any:
    call = inspect.signature(F.embedding).bind(*args, **kwargs)
    call.apply_defaults()
    index, weight, padding = (call.arguments[name] for name in ("input", "weight", "padding_idx"))
    if call.arguments["scale_grad_by_freq"] or call.arguments["max_norm"] is not None:
        raise ModelError(
            "An embedding has scale_grad_by_freq or max_norm: it changes its gradient or its weight.",
            "Switch both off.",
        )
    if padding is None or forward_ad.unpack_dual(weight).tangent is None:
        return F.embedding(index, weight, padding)
    moves = (index != padding % len(weight)).unsqueeze(-1)
    return torch.where(moves, F.embedding(index, weight), F.embedding(index, weight.detach()))


def _weight_norm(v: Any, g: Any, dim: int = 0) -> Any:
    return v * (g / torch.norm_except_dim(v, 2, dim))


def _refuse_reentrant_checkpoint() -> None:
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not CheckpointFunction.forward.__code__:
        frame = frame.f_back  # type: ignore[assignment]
    if frame is not None:
        raise ModelError(
            "The model uses reentrant activation checkpointing, which hides its parameters from torch.autograd.grad.",
            "Call checkpoint(..., use_reentrant=False), or switch it off.",
        )
