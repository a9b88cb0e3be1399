"""What is refused before anything is computed: other models, other parameters, names that do not exist."""

from collections.abc import Sequence

import torch

from kfs.errors import DataError, ModelError
from kfs.kfac.structures import BlockDiagonal
from kfs.names import few, near
from kfs.risk import EmpiricalRisk


def check_choice(what: str, value: object, choices: Sequence[str]) -> None:
    """Refuse what is neither `None` nor one of some names."""
    if value is not None and value not in choices:
        raise ModelError(f"{what} is {value!r}.", f"{near([value], choices)} Or leave it out.")


def check_memory(memory: object) -> None:
    """Refuse what is not a number of bytes."""
    if isinstance(memory, bool) or not isinstance(memory, int) or memory < 0:
        raise ModelError(f"memory is {memory!r}.", "Use a number of bytes, such as 2**30.")


def check_risk(K: BlockDiagonal, risk: EmpiricalRisk, what: str) -> None:
    """Refuse a risk with other parameters than an operator, or without data.

    Args:
        K: The operator.
        risk: What should have its parameters.
        what: What to call the risk.

    Raises:
        ModelError: If parameters or their shapes differ.
        DataError: If there are no data.
    """
    if not isinstance(risk, EmpiricalRisk):
        raise ModelError(
            f"{what} is a {type(risk).__name__}.", "Pass kfs.EmpiricalRisk(model, loss, data) with these data."
        )
    mine = {name: tuple(p.shape) for name, p in risk.params.items()}
    theirs = {name: tuple(shape) for name, shape in K.domain.shapes.items()}
    missing = [name for name in theirs if name not in mine]
    settings = getattr(K, "settings", None)
    # Operators may leave parameters out that no rule covers.
    exhaustive = settings is not None and settings.uncovered != "skip"
    extra = [name for name in mine if name not in theirs] if exhaustive else []
    if missing or extra:
        raise ModelError(
            f"The parameters of {what} are not those of the curvature: it lacks {few(missing) or 'none'}, and has "
            f"{few(extra) or 'none'} too many.",
            "Use the same model, and the same params= for both.",
        )
    differing = [
        f"{name!r} ({list(mine[name])} instead of {list(theirs[name])})"
        for name in theirs
        if mine[name] != theirs[name]
    ]
    if differing:
        raise ModelError(
            f"Parameters of {what} have other shapes than in the curvature: {', '.join(differing[:3])}.",
            "Use the model that the curvature was computed for: the same layers, and the same vocabulary.",
        )
    if risk.num_data == 0:
        raise DataError(f"{what} has no data.", "Pass at least one batch.")


def check_same_parameters(K: BlockDiagonal, queries: EmpiricalRisk, train: EmpiricalRisk) -> None:
    """Refuse queries for a model with other values of its parameters than that of the training data.

    Raises:
        ModelError: If a value differs.
    """
    for name in K.domain.shapes:
        mine, theirs = queries.params[name], train.params[name]
        same = mine is theirs or (mine.device == theirs.device and torch.equal(mine, theirs))
        if not same:
            raise ModelError(
                f"Parameter {name!r} has another value (or device) in queries than in train.",
                "Use one model for both: influence functions compare gradients at the same parameters.",
            )
