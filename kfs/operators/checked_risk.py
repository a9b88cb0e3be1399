"""Whether an argument is a risk: a model, which other libraries take there, is refused."""

from torch import nn

from kfs.errors import DtypeError
from kfs.risk import EmpiricalRisk


def check_risk(risk: object) -> None:
    """Refuse what is no risk.

    Raises:
        DtypeError: If it is something else, such as a model.
    """
    if isinstance(risk, EmpiricalRisk):
        return
    way_out = "Pass kfs.EmpiricalRisk(model, loss, data)."
    if isinstance(risk, nn.Module):
        way_out += " The optimizer, which takes a model and its loss, is kfs.optim.KFAC."
    raise DtypeError(f"The risk is a {type(risk).__name__}.", way_out)
