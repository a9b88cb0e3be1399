"""Whether an operator acts on the parameters of a model, by their names and shapes. Values are for `computed_at`."""

from collections.abc import Mapping, Sequence

from kfs.errors import ModelError
from kfs.names import few, guess
from kfs.operators.interface import LinearOperator

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
