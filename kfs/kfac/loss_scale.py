"""What remains of a loss after factors were computed, so that more data can be added."""

from dataclasses import dataclass

from kfs.errors import ModelError
from kfs.kfac.storage.journal import details
from kfs.risk import EmpiricalRisk


@dataclass(frozen=True)
class LossScale:
    """What remains of a loss after factors were computed: its name, how it scales them, a digest of its settings."""

    name: str
    reduction: str
    scale: float
    details: str

    @classmethod
    def of(cls, risk: EmpiricalRisk) -> "LossScale":
        """Describe the loss of a risk."""
        return cls(risk.loss.name, risk.loss.reduction, risk.loss.scale, details(risk.loss))

    def reduction_factor(self, count: float) -> float:
        """Return `R`, given the count of all targets."""
        return self.scale if self.reduction == "sum" else self.scale / count

    def check_same(self, other: "LossScale") -> None:
        """Refuse another loss.

        Raises:
            ModelError: If it is another one.
        """
        if self != other:
            raise ModelError(f"The losses differ: {self} and {other}.", "Use the same loss for all data.")
