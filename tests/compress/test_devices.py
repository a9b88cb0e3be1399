"""Smaller models on an accelerator compute the same as on the CPU, and stay on the device of the model."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

import kfs
from kfs.compress import low_rank, prune
from tests.compress.problems import cnn, image_risk, mlp, mlp_risk

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICE = "cuda"
WAYS: dict[str, Any] = {
    "OBD": lambda model, K: prune(model, K, 0.5, update=False),
    "OBS": lambda model, K: prune(model, K, 0.5),
    "eigenbasis": lambda model, K: prune(model, K, 0.5, basis="eigen"),
    "channels": lambda model, K: prune(model, K, 0.7, structured=True),
    "EigenDamage": lambda model, K: prune(model, K, 0.5, basis="eigen", structured=True),
    "low rank": lambda model, K: low_rank(model, K, 0.7),
}


@pytest.mark.parametrize("make", [kfs.KFAC, kfs.EKFAC])
@pytest.mark.parametrize("problem", ["mlp", "cnn"])
@pytest.mark.parametrize("way", WAYS)
def test_same_smaller_models(way: str, problem: str, make: Any) -> None:
    """Signs of singular vectors and eigenvectors are arbitrary, so outputs and reports are compared."""
    here: nn.Module = mlp() if problem == "mlp" else cnn()
    risk = mlp_risk(here) if problem == "mlp" else image_risk(here)
    batch = next(iter(risk.batches()))
    there = deepcopy(here).to(DEVICE)
    risk_there = kfs.EmpiricalRisk(there, risk.loss, (batch.x, batch.y), params=list(risk.params))
    K = make(risk)
    arbitrary = way == "eigenbasis" and problem == "cnn"  # vectors with the eigenvalue zero: factors are singular
    if arbitrary and make is kfs.KFAC:
        pytest.skip("each device would choose other vectors")
    expected, report = WAYS[way](here, K)
    found, report_there = WAYS[way](there, K if arbitrary else make(risk_there))
    assert {p.device.type for p in found.parameters()} == {DEVICE}
    assert report_there.stored_after == report.stored_after
    assert report_there.parameters_after == report.parameters_after
    with torch.no_grad():
        torch.testing.assert_close(found(batch.x.to(DEVICE)).cpu(), expected(batch.x), rtol=1e-7, atol=1e-7)


def test_curvature_of_another_device() -> None:
    """Curvature computed on the CPU is moved to the device of the model."""
    here = mlp()
    risk = mlp_risk(here)
    K = kfs.KFAC(risk)
    there = deepcopy(here).to(DEVICE)
    batch = next(iter(risk.batches()))
    for way in ("OBS", "low rank"):
        expected, found = WAYS[way](here, K).model, WAYS[way](there, K).model
        with torch.no_grad():
            torch.testing.assert_close(found(batch.x.to(DEVICE)).cpu(), expected(batch.x), rtol=1e-9, atol=1e-9)
