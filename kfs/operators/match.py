"""Checks that an operator and a model have the same parameters: names, shapes and values."""

from collections.abc import Mapping, Sequence
from warnings import warn

from torch import Tensor

from kfs.display.suggestions import few, guess
from kfs.errors import KfsWarning, ModelError
from kfs.operators.linear_operator import LinearOperator
from kfs.problem.data import values_digest

_SHOWN = 3  # number of parameters with wrong shapes that an error message lists


def check_parameters(
    C: LinearOperator, shapes: Mapping[str, Sequence[int]], *, what: str = "The curvature", owner: str = "the model"
) -> None:
    """Check that a model has all parameters of an operator, with the same shapes. It may have further parameters.

    Args:
        C: The operator.
        shapes: Shapes of the model's parameters, by name.
        what: Name of the operator in error messages.
        owner: Name of the model in error messages.

    Raises:
        ModelError: If a parameter is missing, or has another shape.
    """
    wanted = {name: list(shape) for name, shape in C.domain.shapes.items()}
    missing = [name for name in wanted if name not in shapes]
    if missing:
        question = guess(missing, [name for name in shapes if name not in wanted])
        raise ModelError(
            f"{what} has the parameters {few(missing)}, which {owner} lacks.",
            f"{question} Use the model that it was computed for, and the same params=.".strip(),
        )
    differing = [
        f"{name!r} has shape {list(shapes[name])} in {owner}, and {shape} in the curvature"
        for name, shape in wanted.items()
        if list(shapes[name]) != shape
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
    C: LinearOperator, params: Mapping[str, Tensor], *, what: str, owner: str, stacklevel: int
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
