"""Code shared by the Fisher definitions: per-example predictions, gradients, and sums of their outer products.

The matrices themselves are defined in `mc_fishers`, `exact_fishers` and `emp_fishers`.
"""

from collections.abc import Iterable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor, ones_like, tensordot, zeros, zeros_like
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm

from kfs.basics._checks import check_floating, check_like, check_same_kind, check_tensor
from kfs.basics.jacobian_products import pull_back
from kfs.basics.reduction_factors import Loss, check_datum, reduction_factor
from kfs.errors import DataError, GraphError, ModelError
from kfs.problem.isolation import check_no_inference_mode, no_randomness, restored

# A parameter of the model or its name; two of them for the block with rows from the first and columns from the second.
Param: TypeAlias = Tensor | str
Params: TypeAlias = Param | tuple[Param, Param] | list[Param]
Pair: TypeAlias = tuple[Tensor, Tensor]


def parameter_pair(model: Module, params: Params) -> Pair:
    """Return the parameters that index rows and columns of a block."""
    if not isinstance(model, Module):
        raise ModelError(f"The model is a {type(model).__name__}, expected a torch.nn.Module.", "Wrap it in a module.")
    check_no_inference_mode()
    chosen = tuple(params) if isinstance(params, (tuple, list)) else (params, params)
    if len(chosen) != 2:
        raise ModelError(
            f"params has {len(chosen)} entries, expected one parameter, or two for an off-diagonal block.",
            "Compute the blocks of a larger matrix one by one.",
        )
    rows, columns = (_parameter(model, param) for param in chosen)
    check_same_kind("The parameter for columns", columns, "the one for rows", rows)
    return rows, columns


def predictions(model: Module, loss: Loss, X: Tensor, y: Tensor, pair: Pair) -> Iterator[tuple[Tensor, Tensor]]:
    """Evaluate the model on one example at a time; yield the prediction, without batch axis, and the target.

    Everything is checked before the first prediction is yielded.
    """
    check_tensor("X", X)
    check_tensor("y", y)
    if X.ndim == 0 or y.ndim == 0 or len(X) != len(y) or len(X) == 0:
        raise DataError(
            f"X has shape {list(X.shape)} and y has shape {list(y.shape)}: not one target for each of N > 0 inputs.",
            "Stack inputs and targets along the first axis, in the same order.",
        )
    reduction_factor(loss, y)
    _check_model(model, loss, X, y, pair)
    for x_n, y_n in zip(X, y, strict=True):
        yield model(x_n.unsqueeze(0))[0], y_n


def gradients(c: Tensor, pair: Pair) -> tuple[Tensor, Tensor]:
    """Differentiate a scalar with respect to both parameters of a pair; zero where this example does not use one."""
    g1, g2 = (pull_back(c, p, ones_like(c), create_graph=False) for p in pair)
    return zeros_like(pair[0]) if g1 is None else g1, zeros_like(pair[1]) if g2 is None else g2


def sum_of_outer_products(terms: Iterable[tuple[Tensor, Tensor]], pair: Pair) -> Tensor:
    """Add up the outer products of gradients, shape `[*rows.shape, *columns.shape]`."""
    total = empty_block(pair)
    for g1, g2 in terms:
        total += tensordot(g1, g2, dims=0)
    return total


def sum_of_products(terms: Iterable[tuple[Tensor, Tensor]], pair: Pair, v: Tensor) -> Tensor:
    """Multiply the sum of the outer products of gradients with `v`, without forming it; shaped like the rows."""
    check_like("v", v, "the parameter for columns", pair[1])
    total = zeros_like(pair[0])
    for g1, g2 in terms:
        total += g1 * (g2 * v.detach()).sum()
    return total


def empty_block(pair: Pair) -> Tensor:
    """Return zeros of shape `[*rows.shape, *columns.shape]`."""
    return zeros((*pair[0].shape, *pair[1].shape), dtype=pair[0].dtype, device=pair[0].device)


def _parameter(model: Module, param: Param) -> Tensor:
    """Return a parameter, given the tensor or its name; raise an error if the model does not train it."""
    named = dict(model.named_parameters(remove_duplicate=False))
    name = param if isinstance(param, str) else next((name for name, p in named.items() if p is param), None)
    if name not in named:
        what = f"named {param!r}" if isinstance(param, str) else "that is the given one"
        raise ModelError(
            f"The model has no parameter {what}.", f"Pass one of its parameters, or a name from {list(named)}."
        )
    tensor = named[name]
    check_floating(f"Parameter {name!r}", tensor)
    if not tensor.requires_grad:
        raise GraphError(f"Parameter {name!r} is frozen.", "Call requires_grad_(True) on it.")
    if tensor._backward_hooks:
        raise GraphError(
            f"Parameter {name!r} has hooks, which may change its gradients.",
            "Remove them: call remove() on the handle that register_hook returned.",
        )
    return tensor


def _check_model(model: Module, loss: Loss, X: Tensor, y: Tensor, pair: Pair) -> None:
    """Raise an error if the prediction for an example depends on more than that example and the parameters."""
    for name, module in model.named_modules():
        if module.training and isinstance(module, _BatchNorm):
            raise ModelError(
                f"Module {name!r} ({type(module).__name__}) is in training mode: its output for one example depends on "
                "the rest of the batch, so per-example derivatives are not defined.",
                "Call model.eval() first.",
            )
    # Compare predictions for the whole batch with predictions for single examples.
    with restored(model, pair[0].device), no_randomness(pair[0].device):
        together = model(X)
        alone = [model(x_n.unsqueeze(0)) for x_n in X]
    for n, (f, y_n) in enumerate(zip(alone, y, strict=True)):
        if not isinstance(f, Tensor) or f.shape[:1] != (1,):
            came = f"of shape {list(f.shape)}" if isinstance(f, Tensor) else f"a {type(f).__name__}"
            raise ModelError(
                f"The model's output for one example is {came}, expected a tensor whose first axis has length 1.",
                "Wrap the model in a module that returns one prediction per example along the first axis.",
            )
        if (f.isnan() | (f == torch.inf)).any():
            raise DataError(
                f"The prediction for example {n} is not finite.",
                "Look for NaN or infinity in the data or the parameters.",
            )
        check_datum(loss, f[0], y_n)
    # Batched and single products round differently, so only half of the digits must agree.
    if not torch.allclose(together, torch.cat(alone), rtol=torch.finfo(together.dtype).eps ** 0.5, atol=1e-6):
        raise ModelError(
            "The model's prediction for an example changes with the other examples in the batch.",
            "Use a model without batch statistics; call model.eval() if it has them in training mode only.",
        )
    for role, p in zip(("rows", "columns"), pair, strict=True):
        if pull_back(together, p, ones_like(together), create_graph=False) is None:
            raise GraphError(f"The prediction does not depend on the parameter for {role}.", "Choose one that it uses.")
