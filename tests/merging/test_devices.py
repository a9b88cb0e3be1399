"""Merging models on an accelerator: state dicts equal those on the CPU, and stay on the device of the models."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kfs
from kfs.factors import exact_diagonal
from tests.merging.models import cnn, family, mlp, risks_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICE = "cuda"
KINDS: dict[str, Any] = {
    "KFAC": kfs.KFAC,
    "EKFAC": kfs.EKFAC,
    "RegMean": lambda risk: kfs.KFAC(risk, fisher="forward-only"),
    "diagonal": exact_diagonal,
    "GGN": kfs.GGN,
}


def moved(risks: list[kfs.EmpiricalRisk], models: list[nn.Module]) -> list[kfs.EmpiricalRisk]:
    """Return risks with the same data and models on the accelerator. Data are moved to the parameters' device."""
    data = [next(iter(risk.batches())) for risk in risks]
    return [
        kfs.EmpiricalRisk(model, nn.CrossEntropyLoss(), (batch.x, batch.y), progress=False)
        for model, batch in zip(models, data, strict=True)
    ]


def same(there: dict[str, Any], here: dict[str, Any], tolerance: float) -> None:
    assert there.keys() == here.keys()
    for name, t in there.items():
        assert t.device.type == DEVICE
        torch.testing.assert_close(t.cpu(), here[name], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("make", [mlp, cnn])
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_merge(kind: str, count: int, make: Any) -> None:
    """Closed forms for two Kronecker products and for diagonals, and conjugate gradients."""
    here = family(make, count)
    there = [deepcopy(model).to(DEVICE) for model in here]
    risks = risks_of(here, make)
    # Conjugate gradients stop at this residual; condition numbers below 1e4 amplify it in the solution.
    options: dict[str, Any] = {"tolerance": 1e-12, "damping": 0.1}
    curvatures = [KINDS[kind](risk) for risk in risks]
    expected = kfs.merge(here, curvatures, **options)
    found = kfs.merge(there, [KINDS[kind](risk) for risk in moved(risks, there)], **options)
    same(found, expected, 1e-7)


def test_statistics_are_recomputed() -> None:
    here = family(cnn, 2)
    there = [deepcopy(model).to(DEVICE) for model in here]
    risks = risks_of(here, cnn)
    data: list[Tensor] = [next(iter(risk.batches())).x for risk in risks]
    expected = kfs.merge(here, [kfs.KFAC(risk) for risk in risks], buffers="recompute", data=data)
    curvatures = [kfs.KFAC(risk) for risk in moved(risks, there)]
    same(kfs.merge(there, curvatures, buffers="recompute", data=data), expected, 1e-8)
