"""A flattening is a function or its name: both work in definitions and in operators, and other values raise errors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfs.basics.emp_fishers import vec_empirical_fisher
from kfs.basics.exact_fishers import vec_type1_fisher, vec_type2_fisher
from kfs.basics.flattening import check_vec, cvec, find_vec, matricize, rvec
from kfs.basics.ggns import vec_ggn
from kfs.basics.ggns_linear_regression import linear_regression_ggn
from kfs.basics.hessians import vec_hessian
from kfs.basics.jacobians import vec_jacobian
from kfs.basics.jacobians_linear_layer import linear_layer_jacobian
from kfs.basics.jacobians_shared_linear_layer import shared_linear_layer_jacobian
from kfs.basics.mc_fishers import vec_mc_fisher
from kfs.errors import FlatteningError
from kfs.factors import EKFAC, KFAC
from kfs.kfac.expand_Linear import kfac_block
from kfs.operators import GGN, Jacobian
from kfs.problem.risk import EmpiricalRisk

torch.manual_seed(0)
MODEL, LOSS = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double(), nn.CrossEntropyLoss()
X, Y = torch.randn(5, 3, dtype=torch.float64), torch.randint(3, (5,))
SQUARE = torch.randn(3, 3, dtype=torch.float64)
A, B = (t @ t.T for t in torch.randn(2, 3, 3, dtype=torch.float64))
RISK = EmpiricalRisk(MODEL, LOSS, (X, Y))


def of_graph(definition: Callable[..., Tensor], vec: Any) -> Tensor:
    """Call a definition that takes the tensors of a computation graph."""
    f, W = MODEL(X), MODEL.get_parameter("0.weight")
    value = LOSS(f, Y)
    arguments = {vec_jacobian: (f, W), vec_hessian: (value, W), vec_ggn: (value, f, W)}[definition]
    return definition(*arguments, vec=vec)


def of_model(definition: Callable[..., Tensor], vec: Any) -> Tensor:
    return definition(MODEL, LOSS, X, Y, "0.weight", vec=vec)


DEFINITIONS: dict[str, Callable[[Any], Tensor]] = {
    "matricize": lambda vec: matricize(SQUARE.reshape(3, 3, 1) * SQUARE, 2, vec),
    "jacobian": lambda vec: of_graph(vec_jacobian, vec),
    "hessian": lambda vec: of_graph(vec_hessian, vec),
    "ggn": lambda vec: of_graph(vec_ggn, vec),
    "mc": lambda vec: of_model(vec_mc_fisher, vec),
    "type-1": lambda vec: of_model(vec_type1_fisher, vec),
    "type-2": lambda vec: of_model(vec_type2_fisher, vec),
    "empirical": lambda vec: of_model(vec_empirical_fisher, vec),
    "linear layer": lambda vec: linear_layer_jacobian(X[0], 2, vec),
    "shared linear layer": lambda vec: shared_linear_layer_jacobian(SQUARE, 2, vec),
    "linear regression": lambda vec: linear_regression_ggn(X, 2, vec),
    "block": lambda vec: kfac_block(A, B, vec),
}
OPERATORS: dict[str, Callable[[Any], Tensor]] = {
    "GGN": GGN(RISK).to_dense,
    "Jacobian": Jacobian(RISK).to_dense,
    "KFAC": KFAC(RISK).to_dense,
    "EKFAC": EKFAC(RISK).to_dense,
    "product": (GGN(RISK) @ KFAC(RISK)).to_dense,
}


@pytest.mark.parametrize("dense", [*DEFINITIONS.values(), *OPERATORS.values()], ids=[*DEFINITIONS, *OPERATORS])
def test_functions_and_names(dense: Callable[[Any], Tensor]) -> None:
    for vec, other in ((cvec, rvec), (rvec, cvec)):
        assert torch.equal(dense(vec), dense(vec.__name__))
        assert not torch.allclose(dense(vec.__name__), dense(other))


@pytest.mark.parametrize("wrong", ["columns", "CVEC", "", None, torch.ravel, ["cvec"], 1])
def test_anything_else_is_refused(wrong: Any) -> None:
    assert find_vec(wrong) is None
    for definition in DEFINITIONS.values():
        with pytest.raises(FlatteningError, match=r"^vec is .*functions cvec and rvec\..*vec=cvec or vec=rvec"):
            definition(wrong)
    for operator in OPERATORS.values():
        with pytest.raises(FlatteningError, match=r"^flattening is .*flattening='cvec' or flattening='rvec'"):
            operator(wrong)


def test_names_become_functions() -> None:
    assert [check_vec(vec) for vec in ("cvec", cvec, "rvec", rvec)] == [cvec, cvec, rvec, rvec]
