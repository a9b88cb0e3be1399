"""Ourselves."""

from typing import Any

from torch import Tensor, nn

from kfs.conformance.adapter import Adapter
from kfs.kfac import KFAC
from kfs.risk import EmpiricalRisk
from kfs.version import __version__


def compute(model: nn.Module, loss: nn.Module, data: list[tuple[Tensor, Tensor]], fisher: Any, sharing: Any) -> Any:
    """Return our factors; grouped convolutions have a pair for each group."""
    K = KFAC(EmpiricalRisk(model, loss, data), fisher, sharing)
    answer: dict[str, Any] = {}
    for name, block in K.blocks.items():
        groups = block.layout.groups
        answer[name] = (block.A, block.B) if groups == 1 else list(zip(block.A, block.B, strict=True))
    return answer


ADAPTER = Adapter("kfs", compute, version=__version__)
