"""EmpiricalRisk: PyTorch's own values for all forms of data, untouched user state, and clear refusals."""

from collections import OrderedDict
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import kfs
from kfs import GGN, Hessian
from kfs.errors import DataError, DtypeError, GraphError, LossError, ModelError, ShapeError
from kfs.factors import exact_blocks
from kfs.problem.risk import EmpiricalRisk
from tests.losses.cases import CASES, Case
from tests.operators.problems import PROBLEMS, Problem


def data(num_data: int = 7) -> tuple[Tensor, Tensor]:
    return torch.randn(num_data, 3, dtype=torch.float64), torch.randint(2, (num_data,))


def linear() -> nn.Module:
    return nn.Linear(3, 2).double()


class Identity(nn.Module):
    """Returns its own parameter as prediction, so that any loss can be tested."""

    def __init__(self, f: Tensor) -> None:
        super().__init__()
        self.f = nn.Parameter(f)

    def forward(self, index: Tensor) -> Tensor:
        return self.f[index]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_value_and_gradient_are_pytorchs_for_every_loss(case: Case) -> None:
    _, f, y = case.make()
    index = torch.arange(len(f))
    batches = [(index[:1], y[:1]), (index[1:], y[1:])]
    # Log-probabilities are normalized, whatever the parameters.
    is_divergence = isinstance(case.loss, nn.KLDivLoss)
    last = nn.LogSoftmax(-1) if is_divergence else nn.Identity()
    model = nn.Sequential(OrderedDict(f=Identity(f), last=last))
    risk = EmpiricalRisk(model, case.loss, batches)
    assert risk.value() == pytest.approx(case.pytorch(f, y).item(), rel=1e-12)
    leaf = f.clone().requires_grad_()
    (expected,) = torch.autograd.grad(case.pytorch(last(leaf), y), leaf)
    torch.testing.assert_close(risk.gradient()["f.f"], expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_value_and_gradient_are_pytorchs_for_every_model(problem: Problem) -> None:
    risk, model, X, y = problem.make((1, 1, len(problem.make()[3]) - 2))
    value = problem.loss(model(X), y)
    assert risk.value() == pytest.approx(value.item(), rel=1e-12)
    expected = torch.autograd.grad(value, [model.get_parameter(name) for name in risk.params])
    for g, e in zip(risk.gradient().values(), expected, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-10, atol=1e-12)


def test_all_forms_of_data_are_the_same_risk() -> None:
    model, loss = linear(), nn.CrossEntropyLoss()
    X, y = data()
    forms: dict[str, tuple[Any, dict[str, Any]]] = {
        "pair": ((X, y), {}),
        "list": ([(X[:2], y[:2]), (X[2:], y[2:])], {}),
        "loader": (DataLoader(TensorDataset(X, y), batch_size=3), {}),
        "mapping": ({"input": X, "labels": y}, {}),
        "mappings": ([{"input": X[:4], "labels": y[:4]}, {"input": X[4:], "labels": y[4:]}], {}),
        "arguments": ([((X,), y)], {}),
        "unpack": ([{"a": X, "b": y}], {"unpack": lambda batch: (batch["a"], batch["b"])}),
        "progress": ([(X, y)], {"progress": True}),
    }
    for name, (form, options) in forms.items():
        risk = EmpiricalRisk(model, loss, form, **options)
        assert risk.num_data == 7, name
        assert risk.reduction_factor == pytest.approx(1 / 7), name
        assert risk.value() == pytest.approx(loss(model(X), y).item()), name
    generated = EmpiricalRisk(model, loss, Generated(X, y), progress=True)
    assert generated.value() == pytest.approx(loss(model(X), y).item())


class Generated:
    """Data of unknown length that are generated again in every iteration."""

    def __init__(self, X: Tensor, y: Tensor) -> None:
        self.pairs = list(zip(X.split(2), y.split(2), strict=True))

    def __iter__(self) -> Any:
        yield from self.pairs


def test_params_choose_and_may_give_values() -> None:
    model = linear()
    X, y = data()
    named = dict(model.named_parameters())
    assert list(EmpiricalRisk(model, nn.CrossEntropyLoss(), (X, y), params="bias").params) == ["bias"]
    other = {"weight": torch.zeros(2, 3, dtype=torch.float64)}
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), (X, y), params=other)
    assert risk.value() == pytest.approx(nn.CrossEntropyLoss()(named["bias"].expand(7, 2), y).item())
    model.requires_grad_(False)
    frozen = EmpiricalRisk(model, nn.CrossEntropyLoss(), (X, y), params=["weight"])
    assert frozen.gradient()["weight"].abs().sum() > 0


def test_user_state_is_untouched() -> None:
    X, y = data()
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).double().eval()
    model.get_parameter("0.bias").requires_grad_(False)
    weight = model.get_parameter("0.weight")
    weight.grad = torch.ones_like(weight)
    hook = model.register_forward_hook(lambda *_: None)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.get_rng_state()
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), (X, y))
    risk.value(), risk.gradient(), Hessian(risk) @ torch.ones(10, dtype=torch.float64)
    bad = EmpiricalRisk(model, nn.CrossEntropyLoss(), [(X, y), (X, y[:3])])
    for call in (bad.value, bad.gradient):
        with pytest.raises(DataError):
            call()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(weight.grad, torch.ones_like(weight))
    assert [p.requires_grad for p in model.parameters()] == [True, False, True, True]
    assert list(model._forward_hooks) == [hook.id]
    assert not model.training


class Counting(nn.Module):
    """Assigns its buffer again in every forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return x


@pytest.mark.parametrize("kind", ["own", "frozen", "values"])
def test_a_context_that_fails_leaves_risk_and_parameters_as_they_were(kind: str) -> None:
    """All parameters require gradients in the context: the model's own ones, or leaves in place of other values."""
    model = linear()
    model.requires_grad_(kind != "frozen")
    values = {name: p.detach() + 1 for name, p in model.named_parameters()}
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), data(), params=values if kind == "values" else list(values))
    given = risk.params
    batch = next(iter(risk.batches()))
    with suppress(ArithmeticError), risk.untouched(first_order=True):
        assert all(p.requires_grad for p in risk.params.values())
        assert (risk.params is given) == (kind != "values")
        inside = risk.predict(risk.params, batch).detach()
        raise ArithmeticError
    assert risk.params is given
    assert [p.requires_grad for p in model.parameters()] == [kind != "frozen"] * 2
    torch.testing.assert_close(inside, risk.predict(risk.params, batch).detach())


@pytest.mark.parametrize("at", [0, 1])
def test_data_that_replace_a_parameter(at: int) -> None:
    """The risk's own parameters are used for all batches."""
    model = nn.Linear(3, 2).double()
    weight, batches = model.weight, [data(), data()]

    class Batches:
        """Two batches, one of which comes with another weight."""

        def __iter__(self) -> Any:
            for place, batch in enumerate(batches):
                if place == at:
                    model.weight = nn.Parameter(weight.detach() * 2)
                yield batch

    K = kfs.KFAC(EmpiricalRisk(model, nn.CrossEntropyLoss(), Batches(), num_data=14))
    model.weight = weight
    expected = kfs.KFAC(EmpiricalRisk(model, nn.CrossEntropyLoss(), batches))
    torch.testing.assert_close(K.to_dense(), expected.to_dense())


def test_reassigned_buffers_are_put_back() -> None:
    model = nn.Sequential(nn.Linear(3, 2), Counting()).double()
    with pytest.raises(ModelError, match=r"changed its buffers \['1.calls'\]"):
        EmpiricalRisk(model, nn.CrossEntropyLoss(), data()).value()
    assert model.get_buffer("1.calls") == 0


def test_batch_statistics_inference_mode_and_targets_that_are_not_finite_are_refused() -> None:
    X, y = data()
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2, track_running_stats=False)).double().eval()
    with pytest.raises(ModelError, match="keeps no running statistics"):
        EmpiricalRisk(model, nn.CrossEntropyLoss(), (X, y))
    with torch.inference_mode(), pytest.raises(GraphError, match="inference_mode"):
        EmpiricalRisk(linear(), nn.CrossEntropyLoss(), (X, y)).gradient()
    targets = torch.full((7, 2), torch.nan, dtype=torch.float64)
    with pytest.raises(DataError, match="risk is not finite"):
        EmpiricalRisk(linear(), nn.MSELoss(), (X, targets)).value()


def test_masked_classes_are_finite_enough() -> None:
    """Negative infinity masks a class; an example may consist of masked classes only."""
    X, y = data()
    risk = EmpiricalRisk(linear(), nn.CrossEntropyLoss(), (X, y))
    (batch,) = risk.batches()
    f = torch.zeros(7, 2)
    for bad in (torch.nan, torch.inf):
        with pytest.raises(DataError, match="example 3 is not finite"):
            risk.finite(f.index_fill(0, torch.tensor([3]), bad), batch)
    risk.finite(f.index_fill(0, torch.tensor([3]), -torch.inf), batch)
    risk.finite(torch.full((7, 2), -torch.inf), batch)
    risk.finite(torch.empty(7, 0), batch)


class Last(nn.Module):
    """Takes a packed sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(2, 2, batch_first=True)

    def forward(self, x: Any) -> Tensor:
        return self.rnn(x)[1][0]  # type: ignore[no-any-return]


def test_packed_sequences_are_inputs() -> None:
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(3, 4, 2).double(), torch.tensor([4, 3, 2]), batch_first=True)
    y = torch.randn(3, 2).double()
    model = Last().double()
    risk = EmpiricalRisk(model, nn.MSELoss(), (packed, y))
    assert risk.value() == pytest.approx(nn.MSELoss()(model(packed), y).item())


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.Dropout(0.5), r"'1' \(Dropout\) is in training mode.*chance.*model\.eval"),
        (nn.BatchNorm1d(2), r"'1' \(BatchNorm1d\) is in training mode.*rest of its batch"),
    ],
)
def test_training_mode_is_refused_when_it_matters(layer: nn.Module, message: str) -> None:
    model = nn.Sequential(nn.Linear(3, 2), layer).double()
    with pytest.raises(ModelError, match=message):
        EmpiricalRisk(model, nn.CrossEntropyLoss(), data())
    risk = EmpiricalRisk(model.eval(), nn.CrossEntropyLoss(), data())
    model.train()
    with pytest.raises(ModelError, match="training mode"):
        risk.value()


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


def test_hidden_randomness_and_state_are_refused_and_undone() -> None:
    X, y = data()
    noisy, noisier = (nn.Sequential(nn.Linear(3, 2), layer).double() for layer in (nn.RReLU(), Noise()))
    state = torch.get_rng_state()
    with pytest.raises(ModelError, match="drew random numbers"):
        EmpiricalRisk(noisy, nn.CrossEntropyLoss(), (X, y)).value()
    with pytest.raises(ModelError, match="drew random numbers"):
        Hessian(EmpiricalRisk(noisy, nn.CrossEntropyLoss(), (X, y))).to_dense()
    for model in (noisy, noisier):
        with pytest.raises(ModelError, match="drew random numbers"):
            GGN(EmpiricalRisk(model, nn.CrossEntropyLoss(), (X, y))).to_dense()
    assert torch.equal(torch.get_rng_state(), state)
    stateful = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2)).double()
    names = [name for name, _ in stateful.named_parameters()]
    before = [b.clone() for b in stateful.buffers()]
    with pytest.raises(ModelError, match="changed its buffers"):
        EmpiricalRisk(stateful, nn.CrossEntropyLoss(), (X, y), params=names).value()
    assert all(map(torch.equal, stateful.buffers(), before))


# ruff: noqa: ARG005 (lambdas of one list take the same arguments)
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda X, y: iter([(X, y)]), "iterated only once.*list\\(data\\)"),
        (lambda X, y: X, "data is a Tensor"),
        (lambda X, y: 3, "data is a int"),
        (lambda X, y: [], "data set is empty"),
        (lambda X, y: [(X[:0], y[:0])], "data set is empty"),
        (lambda X, y: [(X, y, y)], "A batch is a tuple, expected a pair"),
        (lambda X, y: {"x": X}, "none of which is 'labels'.*unpack="),
        (lambda X, y: [(X, 3)], "targets of a batch are 3"),
        (lambda X, y: (X, y[:5]), "not one prediction for each target"),
        (lambda X, y: (X.clone().fill_(torch.nan), y), "prediction for example 0 is not finite"),
        (
            lambda X, y: [(X, y), (torch.cat([X[:1], X[:1] * torch.nan]), y[:2])],
            "prediction for example 8 is not finite",
        ),
        (lambda X, y: (X, torch.full_like(y, -100)), "0/0"),
    ],
)
def test_bad_data_are_refused(wrong: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        EmpiricalRisk(linear(), nn.CrossEntropyLoss(), wrong(*data())).value()


def test_data_that_change_are_refused() -> None:
    X, y = data()
    batches = [(X, y)]
    risk = EmpiricalRisk(linear(), nn.CrossEntropyLoss(), batches)
    risk.value()
    batches.append((X, y))
    with pytest.raises(DataError, match="7 targets at first, and 14 now"):
        risk.value()


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.used(x)
        return result


def test_bad_models_and_parameters_are_refused() -> None:
    X, y = data()
    loss = nn.CrossEntropyLoss()
    with pytest.raises(ModelError, match=r"No parameter of the model requires gradients.*params="):
        EmpiricalRisk(linear().requires_grad_(False), loss, (X, y))
    with pytest.raises(ModelError, match=r"No parameter of the model requires gradients.*a model with parameters"):
        EmpiricalRisk(nn.ReLU(), loss, (X, y))
    with pytest.raises(LossError, match=r"Targets are torch.float32 of shape .*y\.long\(\)"):
        EmpiricalRisk(linear(), loss, (X, y.float())).count()
    with pytest.raises(LossError, match=r"define a likelihood of targets\. Use"):
        kfs.KFAC(EmpiricalRisk(linear(), lambda f, _: f.sum(), (X, y)))
    with pytest.raises(ModelError, match=r"no parameters \['w'\]. Choose from"):
        EmpiricalRisk(linear(), loss, (X, y), params=["w"])
    with pytest.raises(ModelError, match=r"params is 3\. Pass a list of names"):
        EmpiricalRisk(linear(), loss, (X, y), params=3)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="given value has shape"):
        EmpiricalRisk(linear(), loss, (X, y), params={"bias": torch.zeros(3)})
    with pytest.raises(ModelError, match="no parameters to consider"):
        EmpiricalRisk(linear(), loss, (X, y), params=[])
    with pytest.raises(ModelError, match=r"model is a function, but params is NoneType"):
        EmpiricalRisk(lambda params, x: x, loss, (X, y))
    with pytest.raises(DtypeError, match=r"'W' is torch\.int64"):
        EmpiricalRisk(lambda params, x: x, loss, (X, y), params={"W": torch.tensor([1])})
    with pytest.raises(DtypeError, match="'W' is list"):
        EmpiricalRisk(lambda params, x: x, loss, (X, y), params={"W": [1.0]})  # type: ignore[dict-item]
    gradient = EmpiricalRisk(Unused().double(), loss, (X, y)).gradient()
    assert gradient["unused.weight"].abs().sum() == 0 < gradient["used.weight"].abs().sum()
    constant = EmpiricalRisk(lambda params, x: x[:, :2], loss, (X, y), params={"W": torch.ones(4)})
    assert torch.equal(constant.gradient()["W"], torch.zeros(4))
    with pytest.raises(LossError, match="not supported"):
        EmpiricalRisk(linear(), nn.L1Loss(), (X, y))
    with pytest.raises(ShapeError, match="targets have shape"):
        EmpiricalRisk(linear(), nn.MSELoss(), (X, torch.zeros(7, 1, dtype=torch.float64))).value()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_compiled_modules_are_refused() -> None:
    X, y = data()
    plain = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(X.dtype)
    for compiled in (torch.jit.script(plain), torch.jit.trace(plain, X)):
        for refused in (EmpiricalRisk, lambda model, loss, _: kfs.optim.KFAC(model, loss)):
            with pytest.raises(ModelError, match=r"The model was scripted or traced.*made from"):
                refused(compiled, nn.CrossEntropyLoss(), (X, y))
        assert not compiled._forward_pre_hooks
    with pytest.raises(ModelError, match=r"Module '1' was scripted"):
        EmpiricalRisk(nn.Sequential(linear(), torch.jit.script(nn.Tanh())), nn.CrossEntropyLoss(), (X, y))


@pytest.mark.parametrize(
    "take",
    [kfs.KFAC, kfs.EKFAC, kfs.GGN, kfs.Hessian, kfs.Fisher, kfs.Jacobian, kfs.compare, exact_blocks, kfs.per_datum],
)
def test_a_model_in_place_of_a_risk(take: Any) -> None:
    """Other libraries and the optimizer take a model at this position."""
    with pytest.raises(DtypeError, match=r"The risk is a Linear\. Pass kfs.EmpiricalRisk.*kfs.optim.KFAC"):
        take(nn.Linear(3, 2))
    with pytest.raises(DtypeError, match=r"The risk is a tuple\. Pass kfs.EmpiricalRisk\(model, loss, data\)\.$"):
        take((torch.rand(4, 3), torch.rand(4, 2)))
