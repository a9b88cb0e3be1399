"""The part of laplace-torch 0.3 that a backend uses: its interface, its Kronecker factors, and its sums over batches.

laplace-torch needs libraries that would replace PyTorch, so it is not installed for tests. If it is installed, tests
use it as well; `benchmarks/laplace.py` needs it.
"""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn


class GGNInterface:
    """Like `laplace.curvature.GGNInterface`, without Jacobians."""

    def __init__(
        self,
        model: nn.Module,
        likelihood: str,
        last_layer: bool = False,
        subnetwork_indices: Tensor | None = None,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        stochastic: bool = False,
        num_samples: int = 1,
    ) -> None:
        self.stochastic = stochastic
        self.num_samples = num_samples
        self.likelihood = likelihood
        self.model = model
        self.last_layer = last_layer
        self.subnetwork_indices = subnetwork_indices
        is_regression = likelihood == "regression"
        self.lossfunc = nn.MSELoss(reduction="sum") if is_regression else nn.CrossEntropyLoss(reduction="sum")
        self.factor = 0.5 if is_regression else 1.0
        chosen: Any = model.last_layer if last_layer else model
        self.params = [p for p in chosen.parameters() if p.requires_grad]


class Kron:
    """Like `laplace.utils.Kron`: a list of one or two factors for each parameter."""

    def __init__(self, kfacs: list[list[Tensor]]) -> None:
        self.kfacs = kfacs

    def __add__(self, other: "Kron") -> "Kron":
        pairs = zip(self.kfacs, other.kfacs, strict=True)
        return Kron([[a + b for a, b in zip(mine, theirs, strict=True)] for mine, theirs in pairs])

    def to_matrix(self) -> Tensor:
        blocks = [factors[0] if len(factors) == 1 else torch.kron(*factors) for factors in self.kfacs]
        matrix: Tensor = torch.block_diag(*blocks)
        return matrix


def modules() -> dict[str, ModuleType]:
    """Return modules with these names, as in `sys.modules`."""
    found = {name: ModuleType(name) for name in ("laplace", "laplace.curvature", "laplace.utils")}
    found["laplace.curvature"].GGNInterface = GGNInterface  # type: ignore[attr-defined]
    found["laplace.utils"].Kron = Kron  # type: ignore[attr-defined]
    return found
