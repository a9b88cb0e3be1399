"""Adapter for this library."""

from typing import Any

from torch import Tensor, nn

from kfs.conformance.adapter import Adapter
from kfs.factors import KFAC
from kfs.problem.risk import EmpiricalRisk
from kfs.version import __version__


def compute(model: nn.Module, loss: nn.Module, data: list[tuple[Tensor, Tensor]], fisher: Any, sharing: Any) -> Any:
    """Return the factors of `kfs.KFAC` by layer, with a list of pairs for grouped convolutions."""
    K = KFAC(EmpiricalRisk(model, loss, data), fisher, sharing)
    answer: dict[str, Any] = {}
    for name, block in K.blocks.items():
        if block.layout.groups > 1:
            answer[name] = list(zip(block.A, block.B, strict=True))
        elif block.layout.order == (1, 0):  # the rows of a table are its inputs
            answer[name] = block.B, block.A
        else:
            answer[name] = block.A, block.B
    return answer


ADAPTER = Adapter("kfs", compute, version=__version__)
