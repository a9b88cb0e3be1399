"""Does an operator fit a model? Names and shapes of its parameters, and the values at which it was computed."""

from collections.abc import Mapping, Sequence
from warnings import warn

from torch import Tensor

from kfs.display.suggestions import few, guess
from kfs.errors import KfsWarning, ModelError
from kfs.operators.linear_operator import LinearOperator
from kfs.problem.data import values_digest

_SHOWN = 3  # parameters whose shapes a message has


def check_parameters(
    C: LinearOperator, shapes: Mapping[str, Sequence[int]], *, what: str = "The curvature", owner: str = "the model"
) -> None:
    """Refuse a model that lacks parameters of an operator, or has them in other shapes. It may have more of them.

    Args:
        C: The operator.
        shapes: Shapes of the model's parameters, by name.
        what: What the operator is called.
        owner: What the model is called.

    Raises:
        ModelError: If one is missing, or has another shape.
    """
    wanted = {name: list(shape) for name, shape in C.domain.shapes.items()}
    missing = [name for name in wanted if name not in shapes]
    if missing:
        question = guess(missing, [name for name in shapes if name not in wanted])
        raise ModelError(
            f"{what} is that of {few(missing)}, which {owner} lacks.",
            f"{question} Use the model that it was computed for, and the same params=.".strip(),
        )
    differing = [
        f"{name!r} has shape {list(shapes[name])} in {owner}, and {shape} in the curvature"
        for name, shape in wanted.items()
        if list(shapes[name]) != shape
    ]
    if differing:
        raise ModelError(
            f"{what} is that of parameters with other shapes: {'; '.join(differing[:_SHOWN])}.",
            "Use the model that it was computed for: the same layers, and the same vocabulary.",
        )


def computed_at(C: LinearOperator) -> str:
    """Return a digest of the values of parameters at which an operator was computed; empty if these are not known."""
    risk = getattr(C, "risk", None)
    return str(getattr(C, "computed_at", "")) if risk is None else digest_for(C, risk.params)


def digest_for(C: LinearOperator, params: Mapping[str, Tensor]) -> str:
    """Return a digest of the values of the operator's parameters; empty for special tensors."""
    return values_digest(params[name] for name in C.domain.shapes)


def warn_of_other_values(
    C: LinearOperator, params: Mapping[str, Tensor], *, what: str, owner: str, stacklevel: int
) -> None:
    """Warn if an operator was computed at other values of its parameters. It is no error.

    Curvature of a few steps before may be good enough, and is the user's choice.

    Args:
        C: The operator.
        params: The parameters that a model has now, by name. There may be more of them.
        what: What the operator is called.
        owner: What the model is called.
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
