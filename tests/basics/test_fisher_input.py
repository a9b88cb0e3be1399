"""Input that the Fisher definitions refuse, and state that they leave untouched."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfs.basics._per_datum import Params
from kfs.basics.emp_fisher_product import empirical_fisher_vp
from kfs.basics.emp_fishers import empirical_fisher, vec_empirical_fisher
from kfs.basics.exact_fishers import type1_fisher, type2_fisher, vec_type1_fisher, vec_type2_fisher
from kfs.basics.mc_fisher_product import mc_fisher_vp
from kfs.basics.mc_fishers import mc_fisher, vec_mc_fisher
from kfs.errors import DataError, DtypeError, FlatteningError, GraphError, LossError, ModelError, ShapeError
from tests.basics.cases import CASES, LIKELIHOODS, assert_close, mlp

Fisher = Callable[[nn.Module, Any, Tensor, Tensor, Params], Tensor]


def multiplied(product: Any) -> Fisher:
    """A product with ones, called like a matrix."""

    def fisher(model: nn.Module, loss: Any, X: Tensor, y: Tensor, params: Params) -> Tensor:
        columns = params[-1] if isinstance(params, (tuple, list)) else params
        known = isinstance(model, nn.Module) and columns in dict(model.named_parameters())
        v = torch.ones_like(model.get_parameter(str(columns))) if known else torch.ones(1)
        return product(model, loss, X, y, params, v)  # type: ignore[no-any-return]

    fisher.__name__ = product.__name__
    return fisher


PRODUCTS = [multiplied(mc_fisher_vp), multiplied(empirical_fisher_vp)]
FISHERS: list[Fisher] = [mc_fisher, type1_fisher, type2_fisher, empirical_fisher, *PRODUCTS]


@pytest.mark.parametrize("fisher", FISHERS)
def test_user_state_is_untouched(fisher: Fisher) -> None:
    model, loss, X, y = LIKELIHOODS[0].make()
    model.get_parameter("2.bias").requires_grad_(False)
    weight = model.get_parameter("0.weight")
    weight.grad = torch.ones_like(weight)
    before = (torch.get_rng_state(), [p.clone() for p in model.parameters()], model.training)

    with torch.no_grad():  # works inside, too
        fisher(model, loss, X, y, "0.weight")
    with pytest.raises(ShapeError):
        fisher(model, loss, X, y[:, :1], "0.weight")

    assert torch.equal(torch.get_rng_state(), before[0])
    for p, copy in zip(model.parameters(), before[1], strict=True):
        assert torch.equal(p, copy)
    assert torch.equal(weight.grad, torch.ones_like(weight))
    assert [p.requires_grad for p in model.parameters()] == [True, True, True, False]
    assert model.training == before[2]


class NoTensor(nn.Module):
    def __init__(self, output: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.output = output

    def forward(self, x: Tensor) -> Any:
        return self.output


class UnusedParameter(nn.Module):
    """A parameter that the prediction does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.used(x)
        return result


@pytest.mark.parametrize("fisher", FISHERS)
def test_bad_models_and_data_are_refused(fisher: Fisher) -> None:
    model, loss, X, y = mlp(), nn.MSELoss(), torch.rand(4, 3), torch.rand(4, 3)
    for inputs, targets in ((X, y[:3]), (X[:0], y[:0]), (X[0, 0], y)):
        with pytest.raises(DataError, match="one target for each"):
            fisher(model, loss, inputs, targets, "0.weight")
    with pytest.raises(ModelError, match=r"no parameter named 'weight'\. .*name from \['0\.weight'"):
        fisher(model, loss, X, y, "weight")
    with pytest.raises(ModelError, match="no parameter that is the given one"):
        fisher(model, loss, X, y, torch.rand(2, 3))
    with pytest.raises(ModelError, match="params has 3 entries"):
        fisher(model, loss, X, y, ("0.weight", "0.bias", "2.bias"))  # type: ignore[arg-type]
    with pytest.raises(GraphError, match="does not depend on the parameter for rows"):
        fisher(UnusedParameter(), loss, X, y, "unused.weight")
    model.requires_grad_(False)
    with pytest.raises(GraphError, match=r"Parameter '0\.weight' is frozen.*requires_grad_"):
        fisher(model, loss, X, y, "0.weight")
    with pytest.raises(LossError, match="reduction='none'"):
        fisher(mlp(), nn.MSELoss(reduction="none"), X, y, "0.weight")
    for output, message in ((None, "a NoneType"), (torch.zeros(2, 3), r"of shape \[2, 3\]")):
        with pytest.raises(ModelError, match=f"output for one example is {message}"):
            fisher(NoTensor(output), loss, X, y, "weight")
    coupled = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with pytest.raises(ModelError, match=r"'1' \(BatchNorm1d\).*rest of the batch.*model\.eval\(\)"):
        fisher(coupled, loss, X, y, "0.weight")
    assert fisher(coupled.eval(), loss, X, y, "0.weight").isfinite().all()
    X[1, 2] = torch.nan
    with pytest.raises(DataError, match="prediction for example 1 is not finite"):
        fisher(mlp(), loss, X, y, "0.weight")
    with pytest.raises(ModelError, match=r"expected a torch\.nn\.Module"):
        fisher(torch.exp, loss, X, y, "0.weight")  # type: ignore[arg-type]


class Centred(nn.Module):
    """Subtracts the mean of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


@pytest.mark.parametrize("fisher", FISHERS)
@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.Dropout(0.5), "drew random numbers"),
        (nn.RReLU(), "drew random numbers"),
        (nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)), "changed its buffers"),
        (Centred(), "changes with the other examples"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_models_that_are_no_function_of_one_datum_are_refused(fisher: Fisher, layer: nn.Module, message: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), layer)
    X, y = torch.rand(2, 4, 3)
    state = torch.get_rng_state()
    buffers = [b.clone() for b in model.buffers()]
    with pytest.raises(ModelError, match=message):
        fisher(model, nn.MSELoss(), X, y, "0.weight")
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, model.buffers(), buffers))


@pytest.mark.parametrize("fisher", FISHERS)
def test_hooks_inference_mode_and_mixed_dtypes_are_refused(fisher: Fisher) -> None:
    first, last = nn.Linear(3, 2), nn.Linear(2, 3)
    model = nn.Sequential(first, nn.Dropout(0.0), last)
    X, y = torch.rand(2, 4, 3)
    assert fisher(model, nn.MSELoss(), X, y, "0.weight").isfinite().all()
    with torch.inference_mode(), pytest.raises(GraphError, match="inference_mode"):
        fisher(model, nn.MSELoss(), X, y, "0.weight")
    hook = first.weight.register_hook(lambda g: g.clamp(max=0.01))
    with pytest.raises(GraphError, match=r"Parameter '0\.weight' has hooks"):
        fisher(model, nn.MSELoss(), X, y, "0.weight")
    hook.remove()
    last.double()
    with pytest.raises(DtypeError, match=r"columns is torch\.float64 on cpu, but the one for rows is torch\.float32"):
        fisher(model, nn.MSELoss(), X, y, ("0.bias", "2.bias"))


@pytest.mark.parametrize("fisher", [mc_fisher, type1_fisher, type2_fisher])
def test_losses_that_are_no_likelihood_are_refused(fisher: Fisher) -> None:
    for case in CASES:
        if not case.is_likelihood:
            model, loss, X, y = case.make()
            with pytest.raises(LossError, match="not the negative logarithm"):
                fisher(model, loss, X, y, "0.weight")


@pytest.mark.parametrize("vec_fisher", [vec_mc_fisher, vec_type1_fisher, vec_type2_fisher, vec_empirical_fisher])
def test_other_flattenings_are_refused(vec_fisher: Any) -> None:
    model, loss, X, y = CASES[0].make()
    with pytest.raises(FlatteningError, match="cvec and rvec"):
        vec_fisher(model, loss, X, y, "0.weight", vec="fvec")


def test_bad_vectors_and_sample_counts_are_refused() -> None:
    model, loss, X, y = CASES[0].make()
    for product in (mc_fisher_vp, empirical_fisher_vp):
        with pytest.raises(ShapeError, match="v has shape"):
            product(model, loss, X, y, ("0.weight", "0.bias"), torch.zeros(2, 3, dtype=torch.float64))
        with pytest.raises(DtypeError, match=r"v is torch\.float32"):
            product(model, loss, X, y, ("0.weight", "0.bias"), torch.zeros(2))
    wrong: list[dict[str, Any]] = [{"mc_samples": 0}, {"mc_samples": 2.0}, {"seed": None}]
    for settings in wrong:
        with pytest.raises(DataError, match="expected integers"):
            mc_fisher(model, loss, X, y, "0.weight", **settings)


@pytest.mark.parametrize("product", [mc_fisher_vp, empirical_fisher_vp])
def test_products_with_a_parameter_carry_no_graph(product: Any) -> None:
    model, loss, X, y = CASES[0].make()
    W = model.get_parameter("0.weight")
    assert not product(model, loss, X, y, W, W).requires_grad


def test_tied_parameters_are_found_under_every_name() -> None:
    first, last = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    last.weight = first.weight
    model = nn.Sequential(first, nn.Tanh(), last).double()
    X, y = torch.rand(3, 2, dtype=torch.float64), torch.rand(3, 2, dtype=torch.float64)
    one, other = (empirical_fisher(model, nn.MSELoss(), X, y, name) for name in ("0.weight", "2.weight"))
    assert_close(one, other)
