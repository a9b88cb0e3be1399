"""Checks of arguments before any computation: options, models and parameters."""

import warnings
from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor, nn

from kfs.display.suggestions import few, suggest
from kfs.errors import DistributedError, KfsWarning, ModelError, SolverError
from kfs.factors.blocks import BlockDiagonal, Damping, Method, Relative
from kfs.operators.match import check_parameters
from kfs.problem.risk import EmpiricalRisk


def chosen_damping(damping: Damping | None, weight_decay: float | None) -> Damping:
    """Return the damping, the weight decay in its place, or the default damping `Relative(0.1)`.

    Raises:
        ModelError: If both are given, or the weight decay is not a positive number.
    """
    if weight_decay is None:
        return Relative(0.1) if damping is None else damping
    if damping is not None:
        raise ModelError(
            f"Both damping={damping!r} and weight_decay={weight_decay!r} are given, and both set the damping.",
            "Pass one of them.",
        )
    if isinstance(weight_decay, bool) or not isinstance(weight_decay, int | float) or not 0 < weight_decay < inf:
        raise ModelError(
            f"weight_decay is {weight_decay!r}.",
            "Use the positive number that the optimizer was given. If it had no weight decay, leave it out.",
        )
    return float(weight_decay)


def inverse_of(K: BlockDiagonal, damping: Damping, method: Method) -> BlockDiagonal:
    """Return the damped inverse of a block-diagonal operator, without a fallback for singular blocks.

    The fallback adds a small number to singular blocks, which would dominate all scores.

    Raises:
        SolverError: If a block is singular.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error", KfsWarning)
        try:
            inverse = K.inverse(damping, method)
        except KfsWarning as warning:
            K.power(-1.0)  # raises an error with the name of the block
            raise SolverError(f"A block is singular: {warning}", "Pass damping.") from warning
    return inverse


def check_choice(what: str, value: object, choices: Sequence[str]) -> None:
    """Raise `ModelError` unless a value is `None` or one of the choices."""
    if value is not None and value not in choices:
        raise ModelError(f"{what} is {value!r}.", f"{suggest([value], choices)} Or leave it out.")


def check_memory(memory: object, what: str = "memory") -> None:
    """Raise `ModelError` unless a value is a number of bytes."""
    if isinstance(memory, bool) or not isinstance(memory, int) or memory < 0:
        raise ModelError(f"{what} is {memory!r}.", "Use a number of bytes, such as 2**30.")


def check_count(what: str, number: object, optional: bool = True) -> None:
    """Raise `ModelError` unless a value is a positive integer, or `None` if it is optional."""
    if number is None and optional:
        return
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ModelError(f"{what} is {number!r}.", f"Use a positive integer{', or leave it out' if optional else ''}.")


def check_risk(K: BlockDiagonal, risk: EmpiricalRisk, what: str) -> None:
    """Check that a risk has data and the parameters of an operator.

    Args:
        K: The operator.
        risk: The risk to check.
        what: Name of the risk in error messages.

    Raises:
        ModelError: If parameters or their shapes differ.
        DataError: If there are no data.
    """
    if not isinstance(risk, EmpiricalRisk):
        raise ModelError(
            f"{what} is a {type(risk).__name__}.", "Pass kfs.EmpiricalRisk(model, loss, data) with these data."
        )
    check_parameters(K, {name: p.shape for name, p in risk.params.items()}, owner=what)
    settings = getattr(K, "settings", None)
    # With `uncovered="skip"`, the operator may lack parameters that no rule covers.
    exhaustive = settings is not None and settings.uncovered != "skip"
    extra = [name for name in risk.params if name not in K.domain.shapes] if exhaustive else []
    if extra:
        raise ModelError(
            f"{what} has the parameters {few(extra)}, which the curvature lacks.",
            "Use the same model, and the same params= for both.",
        )
    risk.count()  # raises an error if there are no data


def check_alone(risk: EmpiricalRisk, what: str) -> None:
    """Check that the data are not split over several processes.

    Args:
        risk: The risk with the data.
        what: Name of the computation that needs all data in one process, as the start of a sentence.

    Raises:
        DistributedError: If the data are split.
    """
    if risk.ranks.are_several:
        raise DistributedError(
            f"{what} cannot be computed from data that are split over {risk.ranks.size} processes.",
            "Pass an EmpiricalRisk of all these data, without kfs.shard and group=.",
        )


def check_same_parameters(K: BlockDiagonal, queries: EmpiricalRisk, train: EmpiricalRisk) -> None:
    """Check that queries and training data have models with the same values of parameters and buffers.

    Gradients depend on all parameters and buffers, including the ones that the curvature lacks.

    Raises:
        ModelError: If a value differs.
    """
    one = _tensors(queries) | {name: queries.params[name] for name in K.domain.shapes}
    other = _tensors(train) | {name: train.params[name] for name in K.domain.shapes}
    for name, theirs in other.items():
        mine = one.get(name)
        same = mine is theirs or (
            mine is not None
            and mine.device == theirs.device
            and mine.shape == theirs.shape
            and torch.equal(mine, theirs)
        )
        if not same:
            raise ModelError(
                f"Parameter or buffer {name!r} has another value (or device) in queries than in train.",
                "Use one model for both: influence functions compare gradients at the same parameters.",
            )


def _tensors(risk: EmpiricalRisk) -> dict[str, Tensor]:
    """Return all parameters and buffers of a module, by name. The result is empty if the model is a function."""
    if not isinstance(risk.model, nn.Module):
        return {}
    return dict(risk.model.named_parameters()) | dict(risk.model.named_buffers())
