"""The exact diagonal of a curvature matrix, for parameters that no rule covers: one datum at a time, but right."""

import torch
from torch import Tensor

from kfs.kfac.backpropagated_vectors import backpropagated_vectors
from kfs.kfac.settings import Settings
from kfs.operators.derivatives import leaves_and_rest, pull_back
from kfs.risk import EmpiricalRisk


def diagonal_of_uncovered(risk: EmpiricalRisk, names: list[str], settings: Settings) -> dict[str, Tensor]:
    """Sum squares of every datum's backpropagated vectors, without the reduction factor.

    Args:
        risk: Model, loss, data and parameters.
        names: Of which parameters.
        settings: Which curvature matrix. `"forward-only"` has no gradients; its diagonal is zero.

    Returns:
        By name, tensors shaped like the parameters.
    """
    dtype = torch.promote_types(risk.dtype, torch.float32)
    total = {name: torch.zeros_like(risk.params[name], dtype=dtype) for name in names}
    with risk.untouched(), torch.enable_grad():
        for batch in risk.batches("diagonal"):
            leaves, rest = leaves_and_rest(risk, names)
            f = risk.predict(leaves | rest, batch)
            first = settings.first_datum + batch.first
            for vectors in backpropagated_vectors(risk.loss, f.detach(), batch.y, settings, first, 1):
                for n in range(len(f)):
                    one = torch.zeros_like(vectors)
                    one[:, n] = vectors[:, n]
                    for name, g in pull_back(f, leaves, one, keep_graph=True).items():
                        total[name] += g.to(dtype).square().sum(0)
    return total
