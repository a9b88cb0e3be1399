"""Checks that a curvature fits a model: it has blocks, and the model has its parameters, with the same values.

All applications use these checks. Each has further checks of its own arguments.
"""

from collections.abc import Mapping
from warnings import warn

import torch
from torch import Tensor, nn

from kfs.display.suggestions import few, guess
from kfs.errors import KfsWarning, ModelError
from kfs.factors.blocks import BlockDiagonal
from kfs.operators.linear_operator import LinearOperator
from kfs.problem.data import values_digest
from kfs.problem.risk import EmpiricalRisk

_SHOWN = 3  # number of parameters with wrong shapes that an error message lists


def check_curvature(K: object, what: str, *, way_out: str = "") -> None:
    """Check that an operator is symmetric and has blocks.

    Args:
        K: The operator.
        what: Name of the computation in the error message.
        way_out: Further advice for operators without blocks.

    Raises:
        ModelError: If the operator has no blocks, or is not symmetric.
    """
    if not isinstance(K, BlockDiagonal):
        raise ModelError(
            f"{what} takes an operator with blocks, but this is a {type(K).__name__}.",
            f"Use kfs.KFAC or kfs.EKFAC, or kfs.factors.exact_blocks(risk) for small layers. {way_out}".strip(),
        )
    if not K.symmetric:
        raise ModelError("The operator is not symmetric.", "Use the curvature itself, not a product with it.")


def check_risk(K: LinearOperator, risk: object, what: str, *, owner: str = "the model") -> None:
    """Check that an argument is a risk with the parameters of an operator.

    Args:
        K: The operator.
        risk: The argument.
        what: Name of the argument in error messages.
        owner: Name of its model in error messages.

    Raises:
        ModelError: If it is not a risk, or parameters or their shapes differ.
    """
    if not isinstance(risk, EmpiricalRisk):
        raise ModelError(
            f"{what} is a {type(risk).__name__}.", "Pass the kfs.EmpiricalRisk(model, loss, data) of these data."
        )
    check_parameters(K, risk.params, owner=owner)


def check_parameters(
    C: LinearOperator, params: Mapping[str, Tensor], *, what: str = "The curvature", owner: str = "the model"
) -> None:
    """Check that a model has all parameters of an operator, with the same shapes. It may have further parameters.

    Args:
        C: The operator.
        params: The model's parameters, by name.
        what: Name of the operator in error messages.
        owner: Name of the model in error messages.

    Raises:
        ModelError: If a parameter is missing, or has another shape.
    """
    wanted = {name: list(shape) for name, shape in C.domain.shapes.items()}
    missing = [name for name in wanted if name not in params]
    if missing:
        question = guess(missing, [name for name in params if name not in wanted])
        raise ModelError(
            f"{what} has the parameters {few(missing)}, which {owner} lacks.",
            f"{question} Use the model that it was computed for, and the same params=.".strip(),
        )
    differing = [
        f"{name!r} has shape {list(params[name].shape)} in {owner}, and {shape} in the curvature"
        for name, shape in wanted.items()
        if list(params[name].shape) != shape
    ]
    if differing:
        raise ModelError(
            f"{what} has parameters with other shapes: {'; '.join(differing[:_SHOWN])}.",
            "Use the model that it was computed for: the same layers, and the same vocabulary.",
        )


def computed_at(C: LinearOperator) -> str:
    """Return a digest of the parameter values at which an operator was computed. Empty if they are not known."""
    risk = getattr(C, "risk", None)
    return str(getattr(C, "computed_at", "")) if risk is None else digest_for(C, risk.params)


def digest_for(C: LinearOperator, params: Mapping[str, Tensor]) -> str:
    """Return a digest of the values that `params` has for the operator's parameters. Empty for special tensors."""
    return values_digest(params[name] for name in C.domain.shapes)


def warn_of_other_values(
    C: LinearOperator,
    params: Mapping[str, Tensor],
    *,
    what: str = "The curvature",
    owner: str = "the model",
    stacklevel: int,
) -> None:
    """Warn if an operator was computed at other values of its parameters.

    This is not an error, because curvature from a few steps before may be good enough for the user.

    Args:
        C: The operator.
        params: The current parameters of a model, by name. It may have further parameters.
        what: Name of the operator in the warning.
        owner: Name of the model in the warning.
        stacklevel: As in `warnings.warn`; two for the caller of this function.
    """
    before, now = computed_at(C), digest_for(C, params)
    if before and now and before != now:
        warn(
            f"{what} was computed at other values of the parameters than {owner} has now. If the model was trained "
            "since then, compute it again. If this is another model, pass its own curvature.",
            KfsWarning,
            stacklevel=stacklevel,
        )


def check_same_values(C: LinearOperator, queries: EmpiricalRisk, train: EmpiricalRisk) -> None:
    """Check that queries and training data have models with the same values of parameters and buffers.

    Gradients depend on all parameters and buffers, including the ones that the curvature lacks.

    Raises:
        ModelError: If a value differs.
    """
    found, expected = (
        _tensors(risk) | {name: risk.params[name] for name in C.domain.shapes} for risk in (queries, train)
    )
    for name, t in expected.items():
        mine = found.get(name)
        if mine is t or (mine is not None and mine.device == t.device and torch.equal(mine, t)):
            continue
        raise ModelError(
            f"Parameter or buffer {name!r} has another value (or device) in queries than in train.",
            "Use one model for both: influence functions compare gradients at the same parameters.",
        )


def _tensors(risk: EmpiricalRisk) -> dict[str, Tensor]:
    """Return all parameters and buffers of a module that have values, by name; none if the model is a function."""
    if not isinstance(risk.model, nn.Module):
        return {}
    every = dict(risk.model.named_parameters()) | dict(risk.model.named_buffers())
    return {name: t for name, t in every.items() if not t.is_meta}
