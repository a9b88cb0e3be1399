"""Every definition gives the same numbers on an accelerator as on the CPU. Skipped without an accelerator."""

import copy

import pytest
import torch

from kfs.basics.emp_fisher_product import empirical_fisher_vp
from kfs.basics.emp_fishers import empirical_fisher
from kfs.basics.exact_fishers import type1_fisher, type2_fisher
from kfs.basics.ggn_product import ggnvp
from kfs.basics.ggns import vec_ggn
from kfs.basics.hessian_ce_loss import ce_hessian
from kfs.basics.hessian_factorizations import hessian_factor
from kfs.basics.hessians import vec_hessian
from kfs.basics.jacobians import vec_jacobian
from kfs.basics.linearization import linearize
from kfs.basics.mc_fisher_product import mc_fisher_vp
from kfs.basics.mc_fishers import mc_fisher
from kfs.verification import ROUND_OFF
from tests.basics.cases import LIKELIHOODS, Case, assert_close

DEVICES = ["cuda"] if torch.cuda.is_available() else []


def everything(case: Case, device: str) -> dict[str, torch.Tensor]:
    """Compute all results that do not depend on random numbers; random streams differ between devices."""
    model, loss, X, y = case.make()
    model, loss, X, y = model.to(device), copy.deepcopy(loss).to(device), X.to(device), y.to(device)
    name, W = next(iter(model.named_parameters()))
    prediction = model(X)
    risk = loss(prediction, y)
    v = torch.linspace(-1, 1, W.numel(), dtype=W.dtype, device=device).reshape(W.shape)
    mc = mc_fisher(model, loss, X, y, name, mc_samples=2)
    mc_vp = mc_fisher_vp(model, loss, X, y, name, v, mc_samples=2)
    assert_close(torch.tensordot(mc, v), mc_vp)
    results = {
        "jacobian": vec_jacobian(prediction, W),
        "hessian": vec_hessian(risk, W),
        "ggn": vec_ggn(risk, prediction, W),
        "ggnvp": ggnvp(risk, prediction, W, v),
        "linearize": linearize(torch.exp, X)(X + 1),
        "ce_hessian": ce_hessian(prediction[0]),
        "hessian_factor": hessian_factor(loss, prediction[0], y[0]),
        "type1": type1_fisher(model, loss, X, y, name),
        "type2": type2_fisher(model, loss, X, y, name),
        "empirical": empirical_fisher(model, loss, X, y, name),
        "empirical_vp": empirical_fisher_vp(model, loss, X, y, name, v),
    }
    assert all(t.device.type == device for t in results.values())
    return {key: t.detach().cpu() for key, t in results.items()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", LIKELIHOODS, ids=str)
def test_same_numbers(case: Case, device: str) -> None:
    expected = everything(case, "cpu")
    for key, t in everything(case, device).items():
        assert torch.allclose(t, expected[key], rtol=ROUND_OFF, atol=ROUND_OFF), key
