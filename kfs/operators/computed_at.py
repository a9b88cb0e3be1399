"""At which values of the parameters an operator was computed, if that is known; a warning if a model has others now."""

from collections.abc import Mapping
from warnings import warn

from torch import Tensor

from kfs.data import values_digest
from kfs.errors import KfsWarning
from kfs.operators.interface import LinearOperator


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
