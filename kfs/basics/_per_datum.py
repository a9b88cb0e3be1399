"""What the Fisher definitions share: predictions one datum at a time, and gradients with respect to two parameters.

The matrices themselves live in `mc_fishers`, `exact_fishers` and `emp_fishers`.
"""

from collections.abc import Iterator
from typing import TypeAlias

from torch import Tensor, ones_like, zeros
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from kfs.basics._checks import check_node, check_tensor
from kfs.basics.jacobian_products import vjp
from kfs.basics.reduction_factors import Loss, check_datum
from kfs.errors import DataError, ModelError

# A parameter of the model or its name; two of them for the block with rows from the first and columns from the second.
Param: TypeAlias = Tensor | str
Params: TypeAlias = Param | tuple[Param, Param]


def parameter_pair(model: Module, params: Params) -> tuple[Tensor, Tensor]:
    """Return the parameters that index rows and columns of the wanted block."""
    pair = tuple(params) if isinstance(params, (tuple, list)) else (params, params)
    if len(pair) != 2:
        raise ModelError(
            f"params has {len(pair)} entries, expected one parameter, or two for an off-diagonal block.",
            "Compute the blocks of a larger matrix one by one.",
        )
    return _parameter(model, pair[0]), _parameter(model, pair[1])


def predictions(model: Module, loss: Loss, X: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Evaluate the model on one datum after the other; yield the prediction, without batch axis, and the target."""
    _check_model(model)
    check_tensor("X", X)
    check_tensor("y", y)
    if X.ndim == 0 or y.ndim == 0 or len(X) != len(y) or len(X) == 0:
        raise DataError(
            f"X has shape {list(X.shape)} and y has shape {list(y.shape)}: not one target for each of N > 0 inputs.",
            "Stack inputs and targets along the first axis, in the same order.",
        )
    for x_n, y_n in zip(X, y, strict=True):
        f = model(x_n.unsqueeze(0))
        if not isinstance(f, Tensor) or f.shape[:1] != (1,):
            came = f"of shape {list(f.shape)}" if isinstance(f, Tensor) else f"a {type(f).__name__}"
            raise ModelError(
                f"The model's output for one datum is {came}, expected a tensor whose first axis has length 1.",
                "Wrap the model in a module that returns one prediction per datum along the first axis.",
            )
        check_datum(loss, f[0], y_n)  # also where labels are drawn: the reduction factor counts the targets
        yield f[0], y_n


def gradients(c: Tensor, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Differentiate a scalar with respect to both parameters of a pair."""
    g1 = vjp(c, pair[0], ones_like(c))
    return g1, g1 if pair[1] is pair[0] else vjp(c, pair[1], ones_like(c))


def empty_block(pair: tuple[Tensor, Tensor]) -> Tensor:
    """Return zeros of shape `[*rows.shape, *columns.shape]`."""
    return zeros((*pair[0].shape, *pair[1].shape), dtype=pair[0].dtype, device=pair[0].device)


def _parameter(model: Module, param: Param) -> Tensor:
    """Look a parameter up by name, or check that a tensor is one of the model's."""
    named = dict(model.named_parameters(remove_duplicate=False))
    if isinstance(param, str):
        if param not in named:
            raise ModelError(f"The model has no parameter named {param!r}.", f"Choose from {list(named)}.")
        param = named[param]
    elif not any(param is p for p in named.values()):
        raise ModelError(
            "params holds something that is no parameter of the model.",
            f"Pass one of the model's own parameter tensors, or a name from {list(named)}.",
        )
    check_node("The parameter", param)
    return param


def _check_model(model: Module) -> None:
    """Refuse a model whose prediction for one datum depends on other data or on chance."""
    for name, module in model.named_modules():
        random = isinstance(module, _DropoutNd) and module.p > 0
        if module.training and (random or isinstance(module, _BatchNorm)):
            raise ModelError(
                f"Module {name!r} ({type(module).__name__}) is in training mode: its output for one datum depends on "
                f"{'chance' if random else 'the rest of the batch'}, so per-datum derivatives are not defined.",
                "Call model.eval() first.",
            )
