"""What the Fisher definitions share: parameters of a block, one example's gradients.

Also the check that a network is a function of one example. The sums over examples are
in `mc_fishers`, `exact_fishers` and `emp_fishers`, which define the matrices.
"""

from typing import TypeAlias

import torch
from torch import Tensor, ones_like, zeros, zeros_like
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm

from kfs.basics._autograd import grad
from kfs.basics._checks import (
    Loss,
    check_datum,
    check_floating,
    check_no_hooks,
    check_same_kind,
    check_targets,
    check_tensor,
)
from kfs.errors import DataError, GraphError, ModelError
from kfs.problem.isolation import (
    check_no_inference_mode,
    random_model,
    random_state,
    restored,
)

# A parameter of the model or its name. Two of them for the block with rows from the
# first and columns from the second.
Param: TypeAlias = Tensor | str
Params: TypeAlias = Param | tuple[Param, Param] | list[Param]
Pair: TypeAlias = tuple[Tensor, Tensor]


def parameter_pair(model: Module, params: Params) -> Pair:
    """Return the parameters that index rows and columns of a block."""
    if not isinstance(model, Module):
        raise ModelError(
            f"The model is a {type(model).__name__}, expected a torch.nn.Module.",
            "Wrap it in a module.",
        )
    check_no_inference_mode()
    chosen = params if isinstance(params, (tuple, list)) else (params, params)
    if len(chosen) != 2:
        raise ModelError(
            f"params has {len(chosen)} entries, expected one parameter, or two for an "
            "off-diagonal block.",
            "Compute the blocks of a larger matrix one by one.",
        )
    rows, columns = (_parameter(model, param) for param in chosen)
    check_same_kind("The parameter for columns", columns, "the one for rows", rows)
    return rows, columns


def empty_block(rows: Tensor, columns: Tensor) -> Tensor:
    """Return zeros of shape `[*rows.shape, *columns.shape]`."""
    shape = (*rows.shape, *columns.shape)
    return zeros(shape, dtype=rows.dtype, device=rows.device)


def gradients(c: Tensor, rows: Tensor, columns: Tensor) -> Pair:
    """Differentiate one example's criterion with respect to two parameters.

    The gradient is zero if this example does not use a parameter.
    """
    g1, g2 = (grad(c, p, ones_like(c)) for p in (rows, columns))
    return (
        zeros_like(rows) if g1 is None else g1,
        zeros_like(columns) if g2 is None else g2,
    )


def check_data(model: Module, loss: Loss, X: Tensor, y: Tensor, pair: Pair) -> None:
    """Raise an error if data do not fit, or if the model is no function of one example.

    A prediction depends on its input and the parameters, not on other examples, not on
    chance.
    """
    check_tensor("X", X)
    check_tensor("y", y)
    if X.ndim == 0 or y.ndim == 0 or len(X) != len(y) or len(X) == 0:
        raise DataError(
            f"X has shape {list(X.shape)} and y has shape {list(y.shape)}: not one "
            "target for each of N > 0 inputs.",
            "Stack inputs and targets along the first axis, in the same order.",
        )
    check_targets(loss, y)
    for name, module in model.named_modules():
        if module.training and isinstance(module, _BatchNorm):
            raise ModelError(
                f"Module {name!r} ({type(module).__name__}) is in training mode: its "
                "output for one example depends on the rest of the batch, so "
                "per-example derivatives are not defined.",
                "Call model.eval() first.",
            )
    # Compare predictions for the whole batch with predictions for single examples.
    device = pair[0].device
    with restored(model, device):
        before = random_state(device)
        together = model(X)
        alone = [model(x_n.unsqueeze(0)) for x_n in X]
        if not all(map(torch.equal, before, random_state(device))):
            raise random_model()
    for n, (f, y_n) in enumerate(zip(alone, y, strict=True)):
        _check_prediction(n, f)
        check_datum(loss, f[0], y_n)
    # Batched and single products round differently: half of the digits must agree.
    rtol = torch.finfo(together.dtype).eps ** 0.5
    if not torch.allclose(together, torch.cat(alone), rtol=rtol, atol=1e-6):
        raise ModelError(
            "The model's prediction for an example changes with the other examples in "
            "the batch.",
            "Use a model without batch statistics; call model.eval() if it has them in "
            "training mode only.",
        )
    for role, p in zip(("rows", "columns"), pair, strict=True):
        if grad(together, p, ones_like(together)) is None:
            raise GraphError(
                f"The prediction does not depend on the parameter for {role}.",
                "Choose one that it uses.",
            )


def _check_prediction(n: int, f: Tensor) -> None:
    """Raise an error if an example's prediction has no batch axis, or is not finite."""
    if not isinstance(f, Tensor) or f.shape[:1] != (1,):
        is_tensor = isinstance(f, Tensor)
        came = f"of shape {list(f.shape)}" if is_tensor else f"a {type(f).__name__}"
        raise ModelError(
            f"The model's output for one example is {came}, expected a tensor whose "
            "first axis has length 1.",
            "Wrap the model in a module that returns one prediction per example along "
            "the first axis.",
        )
    if (f.isnan() | (f == torch.inf)).any():
        raise DataError(
            f"The prediction for example {n} is not finite.",
            "Look for NaN or infinity in the data or the parameters.",
        )


def _parameter(model: Module, param: Param) -> Tensor:
    """Return a parameter, given as tensor or by name, that the model trains.

    Raise an error if there is none.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    of_tensor = (name for name, p in named.items() if p is param)
    name = param if isinstance(param, str) else next(of_tensor, None)
    if name not in named:
        by_name = isinstance(param, str)
        what = f"named {param!r}" if by_name else "that is the given one"
        raise ModelError(
            f"The model has no parameter {what}.",
            f"Pass one of its parameters, or a name from {list(named)}.",
        )
    tensor = named[name]
    check_floating(f"Parameter {name!r}", tensor)
    if not tensor.requires_grad:
        raise GraphError(
            f"Parameter {name!r} is frozen.", "Call requires_grad_(True) on it."
        )
    check_no_hooks(f"Parameter {name!r}", tensor, "its gradients")
    return tensor
