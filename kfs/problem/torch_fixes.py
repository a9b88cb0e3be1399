"""Replaces operations whose derivatives in PyTorch are wrong, or differ between forward and reverse mode.

Operations that cannot be replaced raise an error, and errors about missing derivatives and indices are explained.
`EmpiricalRisk.untouched` activates `ExactDerivatives`, unless it is called with `first_order=True`.
"""

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch.autograd_function import custom_function_call
from torch.autograd import forward_ad
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.func import functional_call
from torch.nn import functional as F  # noqa: N812 (the usual name)
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointError, CheckpointFunction

from kfs.errors import DataError, ModelError

# Parts of PyTorch's messages for operations that have no (second) derivative.
_NO_DERIVATIVE = (
    "is not implemented",
    "differentiate twice",
    "Double backward is unsupported",
    "does not support automatic differentiation",
)
# Parts of PyTorch's messages for tensor layouts that few operations and derivatives support.
_STORED_OTHERWISE = {
    "sparse": ("'Sparse", "Sparse CSR", "sparse tensor"),
    "nested": ("NestedTensor", "NestedInt", "_nested_", "nested tensor"),
}


def call_with(model: nn.Module, params: Mapping[str, Tensor], args: Any, kwargs: Any = None) -> Any:
    """Call a module with other parameters, as `functional_call` does, which does not restore repeated modules.

    If a module has several names, PyTorch swaps its parameters once for each, and puts the given tensors back last.
    """
    places = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    repeated = [module for module in model.modules() if places[id(module)] > 1]
    before: list[tuple[Any, Any]] = [
        (own, own.copy()) for module in repeated for own in (module._parameters, module._buffers)
    ]
    given = {id(t) for t in params.values()}
    try:
        return functional_call(model, dict(params), args, kwargs)
    finally:
        for own, old in before:
            own.update({name: t for name, t in old.items() if id(own.get(name)) in given})


@contextmanager
def explained() -> Iterator[None]:
    """Turn PyTorch's errors about missing derivatives into a `ModelError` that explains how to fix them."""
    try:
        yield
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        message = str(error).partition("\n")[0]  # a long trace follows
        first = message.partition(". ")[0].rstrip(".")  # a list of all supported backends follows
        for kind, symptoms in _STORED_OTHERWISE.items():
            if any(symptom in first for symptom in symptoms):
                raise stored_otherwise(kind, first) from error
        if isinstance(error, CheckpointError) or any(symptom in message for symptom in _NO_DERIVATIVE):
            raise ModelError(
                f"PyTorch cannot differentiate an operation of the model as needed: {message}",
                "Replace the operation, or exclude the parameters before it with params=.",
            ) from error
        raise


def stored_otherwise(kind: str, where: str) -> ModelError:
    """Return the error for a `"sparse"` or `"nested"` tensor."""
    ways_out = {
        "sparse": "Make it dense first, in the data or in the model: x.to_dense().",
        "nested": "Pad it first, with torch.nested.to_padded_tensor(x, 0.0), and mask the padding.",
    }
    cause = f"The model uses a {kind} tensor in a way that is not supported here: {where}."
    return ModelError(cause, ways_out[kind])


@contextmanager
def no_hooks_on_saved_tensors() -> Iterator[None]:
    """Raise an error if the model uses activation checkpointing or other hooks on saved tensors."""
    cause = (
        "The model uses activation checkpointing or other hooks on saved tensors, which would use the model's own "
        "parameters instead of the values given as params={...}, or instead of differentiable copies of frozen ones."
    )
    try:
        with disable_saved_tensors_hooks(cause):
            yield
    except RuntimeError as error:
        if cause in str(error):
            way_out = "Switch it off, or load the values into the model and set requires_grad of the parameters."
            raise ModelError(cause, way_out) from error
        raise


class RightGradients(TorchFunctionMode):
    """Fixes the gradients of batch and instance normalization on the CPU.

    The backward pass of `F.batch_norm` reads a gradient or an input in the wrong order if the batch has one example
    and channels are last in memory. `F.instance_norm` reshapes all data into one example and calls the same kernel.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        replacement = _RIGHT_GRADIENTS.get(func, func)
        return replacement(*args, **kwargs or {})


def has_instance_norms(model: object) -> bool:
    """Return whether a model has instance normalizations, whose gradients may be wrong for any batch."""
    return isinstance(model, nn.Module) and any(isinstance(module, _InstanceNorm) for module in model.modules())


class ExactDerivatives(TorchFunctionMode):
    """Replaces operations so that their derivatives are correct and equal in all modes of differentiation.

    - The row `padding_idx` of an embedding is a constant: PyTorch drops its gradient in reverse mode, but not its
      tangent in forward mode, so that `J` and `J^T` would not be transposes of each other.
    - `F.embedding_bag` has no second derivative and no forward-mode derivative. It is composed of operations with both.
    - The second derivative of weight normalization is wrong in PyTorch on the CPU. It is composed of simpler
      operations.
    - Batch and instance normalization have a wrong gradient for some strides: see `RightGradients`.
    - Forward mode of `scatter_reduce` with products is wrong. It raises, and the caller uses two backward passes.
    - Recurrent layers of cuDNN have no second derivative. They run as other kernels of PyTorch.
    - Reentrant checkpoints hide parameters from `torch.autograd.grad`. They raise an error.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not torch.is_grad_enabled():
            refuse_reentrant_checkpoint()
        replacement = _EXACT_DERIVATIVES.get(func, func)
        return replacement(*args, **kwargs or {})


class StopsForwardMode(TorchFunctionMode):
    """Switches off forward mode inside of `torch.no_grad()`. Enter this mode with gradients enabled.

    PyTorch's forward mode propagates tangents through `torch.no_grad()`, where reverse mode treats results as
    constants.
    """

    def __enter__(self) -> Any:
        # A model may switch gradients off without switching them on again, so the state is restored on exit.
        self._before = torch._C._is_fwd_grad_enabled()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch._C._set_fwd_grad_enabled(self._before)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._C._set_grad_enabled:
            torch._C._set_fwd_grad_enabled(*args)
        return func(*args, **kwargs or {})


class NotByForwardModeError(RuntimeError):
    """An operation must be differentiated in reverse mode. Callers catch this error and do so."""


class NotByFuncError(RuntimeError):
    """An operation must be differentiated twice in an ordinary autograd graph. Callers catch this error and do so."""


class RefuseMissedErrors(TorchFunctionMode):
    """Raises an error for operations whose missing second derivatives `torch.func` silently treats as zero.

    PyTorch's backward passes add a node to the graph that raises if it is differentiated: for products of several
    zeros, and for custom functions that are `once_differentiable`. `torch.func` does not see this node and treats its
    output as a constant. In an ordinary autograd graph, the error is raised.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ERRORS_MISSED:
            raise NotByFuncError(f"{func} is not differentiated twice by torch.func.")
        return func(*args, **kwargs or {})


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
    """Raise an error for an embedding that rescales its gradient or renormalizes its weight."""
    if scale_grad_by_freq or max_norm is not None:
        raise ModelError(
            "An embedding has scale_grad_by_freq or max_norm, which changes its gradient or its weight.",
            "Switch both off.",
        )


def embedding_bag_written_out(
    input: Tensor,  # noqa: A002 (as PyTorch calls it)
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,  # noqa: ARG001
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,  # noqa: ARG001
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Compute `F.embedding_bag` using `F.embedding` and other operations that have derivatives in all modes."""
    refuse_changing_embedding(max_norm, scale_grad_by_freq)
    # Invalid arguments: PyTorch raises the error.
    if (input.ndim == 1) == (offsets is None) or mode not in {"sum", "mean", "max"}:
        return F.embedding_bag(input, weight, offsets, mode=mode)

    # Look up the rows, and mark those that are not padding.
    rows = F.embedding(input, weight, padding_idx)
    counts = torch.ones_like(input, dtype=torch.bool)
    if padding_idx is not None:
        counts = input != padding_idx % len(weight)

    # Index of the bag of each row.
    if offsets is None:
        bags, positions = len(input), input.shape[1]
        bag = torch.arange(bags, device=input.device).unsqueeze(1).expand(-1, positions)
    else:
        starts = offsets[:-1] if include_last_offset else offsets
        bags = len(starts)
        places = torch.arange(len(input), dtype=starts.dtype, device=input.device)
        # Of the bags that start at the same position, all but the last one are empty.
        bag = torch.searchsorted(starts, places, right=True) - 1
    if mode == "max":
        return _maximum(rows.flatten(0, -2), counts.flatten(), bag.flatten(), bags)

    # Weighted sum over each bag.
    weights = counts.to(rows.dtype)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    rows = rows * weights.unsqueeze(-1)

    def summed(t: Tensor) -> Tensor:
        return t.sum(1) if offsets is None else t.new_zeros(bags, *t.shape[1:]).index_add(0, bag, t)

    total = summed(rows)
    return total if mode == "sum" else total / summed(weights).clamp(min=1).unsqueeze(-1)


def _maximum(rows: Tensor, counts: Tensor, bag: Tensor, bags: int) -> Tensor:
    """Return the maximum of each bag per feature, zero for an empty bag. Of equal maxima, the first one is gathered."""
    values = rows.detach().masked_fill(~counts.unsqueeze(-1), -torch.inf)
    index = bag.unsqueeze(-1).expand_as(rows)
    largest = values.new_full((bags, rows.shape[1]), -torch.inf).scatter_reduce(0, index, values, "amax")
    none = len(rows)
    positions = torch.arange(none, device=rows.device).unsqueeze(-1)
    chosen = (values == largest[bag]) & counts.unsqueeze(-1)
    first = index.new_full(largest.shape, none).scatter_reduce(0, index, torch.where(chosen, positions, none), "amin")
    return torch.cat([rows, rows.new_zeros(1, rows.shape[1])]).gather(0, first)


def _weight_norm(v: Any, g: Any, dim: int = 0) -> Any:
    return v * (g / torch.norm_except_dim(v, 2, dim))


def _batch_norm(*args: Any, **kwargs: Any) -> Tensor:
    x, rest = (args[0], args[1:]) if args else (kwargs.pop("input"), ())
    if len(x) != 1:
        return F.batch_norm(x, *rest, **kwargs)
    return _with_contiguous_gradient(F.batch_norm(x.contiguous(), *rest, **kwargs))


def _instance_norm(*args: Any, **kwargs: Any) -> Tensor:
    return _with_contiguous_gradient(F.instance_norm(*args, **kwargs))


def _with_contiguous_gradient(out: Tensor) -> Tensor:
    """Return the same tensor, with a backward pass that makes its gradient contiguous.

    The backward pass of the two reshapes flattens the gradient, which makes it contiguous, and reshapes it back. They
    save no tensors. A checkpoint, which reruns the model without this mode, therefore saves the same tensors.
    """
    if out.device.type != "cpu" or out.ndim < 4:  # PyTorch's gradient is correct
        return out
    return out.reshape(-1).reshape(out.shape)


def _without_forward_mode_of_products(scatter: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a scatter function so that it raises if a product would be differentiated in forward mode."""

    def call(*args: Any, **kwargs: Any) -> Tensor:
        reduce = kwargs["reduce"] if "reduce" in kwargs else args[4]
        tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.is_floating_point()]
        if reduce == "prod" and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
            raise NotByForwardModeError("forward AD of scatter_reduce(reduce='prod') is wrong in PyTorch.")
        return scatter(*args, **kwargs)

    return call


def _without_cudnn(recurrent: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a recurrent layer so that it does not use cuDNN."""

    def call(*args: Any, **kwargs: Any) -> Any:
        before = torch._C._get_cudnn_enabled()
        torch._C._set_cudnn_enabled(False)
        try:
            return recurrent(*args, **kwargs)
        finally:
            torch._C._set_cudnn_enabled(before)

    return call


# Replacements, by the function that they replace.
_RIGHT_GRADIENTS: dict[Any, Callable[..., Any]] = {F.batch_norm: _batch_norm, F.instance_norm: _instance_norm}
_RECURRENT: list[Any] = [torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu]
_SCATTERS: list[Any] = [torch.scatter_reduce, Tensor.scatter_reduce, Tensor.scatter_reduce_]
_EXACT_DERIVATIVES = (
    _RIGHT_GRADIENTS
    | {F.embedding: _embedding, F.embedding_bag: embedding_bag_written_out, torch._weight_norm: _weight_norm}
    | {recurrent: _without_cudnn(recurrent) for recurrent in _RECURRENT}
    | {scatter: _without_forward_mode_of_products(scatter) for scatter in _SCATTERS}
)

_ERRORS_MISSED = {
    custom_function_call,
    *_SCATTERS,
    torch.index_reduce,
    Tensor.index_reduce,
    Tensor.index_reduce_,
}


def refuse_reentrant_checkpoint() -> None:
    """Raise an error inside of a reentrant checkpoint, which hides parameters from `torch.autograd.grad`."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not CheckpointFunction.forward.__code__:
        frame = frame.f_back  # type: ignore[assignment]
    if frame is not None:
        raise ModelError(
            "The model uses reentrant activation checkpointing, which hides its parameters from torch.autograd.grad.",
            "Call checkpoint(..., use_reentrant=False), or switch it off.",
        )


def refuse_checkpoint(what: str) -> None:
    """Raise an error inside of a checkpoint, for operations that are rewritten in the first run, but not in the second.

    Saved tensors would then be confused, and gradients could be wrong.

    Args:
        what: Name of the operation.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None and getattr(hooks[0], "__module__", "") == CheckpointError.__module__:
        raise ModelError(
            f"{what} runs inside of an activation checkpoint (torch.utils.checkpoint).",
            "Call it outside of the checkpoint, or leave its parameters out with params=.",
        )


class CheckedEmbeddings(TorchFunctionMode):
    """A mode that raises for indices that an embedding does not have, and names the example.

    Args:
        params: Parameters by name.
        num_data: Number of examples in the batch.
        first: Index of its first example.

    Raises:
        DataError: In its context, if an embedding does not have an index.
    """

    def __init__(self, params: Mapping[str, Tensor], num_data: int, first: int) -> None:
        super().__init__()
        self.names = {id(p): name for name, p in params.items()}
        self.num_data = num_data
        self.first = first

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.embedding:
            index = args[0] if args else kwargs["input"]
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            wrong = ((index < 0) | (index >= len(weight))).nonzero()
            if len(wrong):
                value = int(index[tuple(wrong[0])])
                has_data = index.shape[:1] == (self.num_data,)
                datum = f"of example {self.first + int(wrong[0, 0])} " if has_data else ""
                name = self.names.get(id(weight), "an embedding")
                raise DataError(
                    f"The index {value} {datum}does not exist in {name!r}, which has {len(weight)} rows.",
                    "Use data with the vocabulary that the model has, numbered from zero. For tokens beyond it: "
                    "model.resize_token_embeddings(len(tokenizer)).",
                )
        return func(*args, **kwargs)
