"""Outputs of models: a risk, an operator, KFAC and the optimizer find the same predictions."""

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfs import GGN, KFAC, EmpiricalRisk, inspect
from kfs.errors import DataError, ModelError
from kfs.optim import KFAC as Optimizer  # noqa: N811 (both are called KFAC)
from tests.operators.contract import close

LOSS = nn.CrossEntropyLoss()
Named = namedtuple("Named", ["hidden", "logits"])
# Forms in which a model returns its prediction, and functions that extract it.
FORMS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tuple": (lambda f: (f, None), lambda output: output[0]),
    "list": (lambda f: [f, 2 * f], lambda output: output[0]),
    "after a number": (lambda f: (f.sum(), f), lambda output: output[1]),
    "named tuple": (lambda f: Named(2 * f, f), lambda output: output.logits),
    "object": (lambda f: SimpleNamespace(hidden=2 * f, logits=f), lambda output: output.logits),
    "object with one tensor": (lambda f: SimpleNamespace(loss=None, scores=f), lambda output: output.scores),
    "mapping": (lambda f: {"hidden": 2 * f, "logits": f}, lambda output: output["logits"]),
    "mapping with one tensor": (lambda f: OrderedDict(scores=f), lambda output: output["scores"]),
}


class Returns(nn.Module):
    """A linear model that returns its prediction in some form."""

    def __init__(self, form: Callable[[Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 2).double()
        self.form = form

    def forward(self, x: Tensor) -> Any:
        return self.form(self.layer(x))


def data() -> tuple[Tensor, Tensor]:
    return torch.randn(5, 3, dtype=torch.float64), torch.randint(2, (5,))


@pytest.mark.parametrize("name", FORMS)
def test_all_forms_of_outputs_are_the_same_prediction(name: str) -> None:
    X, y = data()
    form = FORMS[name][0]
    plain, wrapped = (Returns(one) for one in (lambda f: f, form))
    expected, risk = (EmpiricalRisk(model, LOSS, (X, y)) for model in (plain, wrapped))
    assert risk.value() == pytest.approx(LOSS(plain(X), y).item(), rel=1e-14)
    for parameter, g in expected.gradient().items():
        close(risk.gradient()[parameter], g)
    close(GGN(risk).to_dense(), GGN(expected).to_dense())
    close(GGN(risk, chunk_size=1).to_dense(), GGN(expected).to_dense())
    close(KFAC(risk).to_dense(), KFAC(expected).to_dense())
    assert inspect(wrapped, X).rows == inspect(plain, X).rows


@pytest.mark.parametrize("name", FORMS)
def test_functions_may_return_the_same(name: str) -> None:
    X, y = data()
    form = FORMS[name][0]
    model = Returns(form)
    risk = EmpiricalRisk(
        lambda params, x: form(nn.functional.linear(x, params["W"], params["b"])),
        LOSS,
        (X, y),
        params={"W": model.layer.weight, "b": model.layer.bias},
    )
    assert risk.value() == pytest.approx(LOSS(model.layer(X), y).item(), rel=1e-14)
    close(KFAC(risk).to_dense(), KFAC(EmpiricalRisk(model.layer, LOSS, (X, y))).to_dense())


@pytest.mark.parametrize("name", FORMS)
def test_the_optimizer_finds_the_same(name: str) -> None:
    X, y = data()
    form, take_out = FORMS[name]
    plain, wrapped = Returns(lambda f: f), Returns(form)
    for model in (plain, wrapped):
        optimizer = Optimizer(model, LOSS, lr=0.1)
        output = model(X)
        LOSS(output if model is plain else take_out(output), y).backward()
        optimizer.step()
    assert not torch.equal(plain.layer.weight, Returns(lambda f: f).layer.weight)
    close(wrapped.layer.weight, plain.layer.weight)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (lambda f: {"a": f, "b": 2 * f}, "returned a dict with 2 tensors"),
        (lambda f: SimpleNamespace(a=f, b=f), "returned a SimpleNamespace with 2 tensors"),
        (lambda f: (f.sum(), None), "returned a tuple with 0 tensors"),
        (lambda f: "text", "returned a str with 0 tensors"),  # noqa: ARG005
    ],
)
def test_outputs_without_a_prediction_are_refused(form: Callable[[Tensor], Any], message: str) -> None:
    risk = EmpiricalRisk(Returns(form), LOSS, data())
    for call in (risk.value, risk.gradient, lambda: GGN(risk).to_dense(), lambda: KFAC(risk)):
        with pytest.raises(ModelError, match=f"{message} .* Return a tensor, an object or mapping with `logits`"):
            call()


def test_numbers_are_no_predictions() -> None:
    risk = EmpiricalRisk(Returns(Tensor.sum), LOSS, data())
    with pytest.raises(DataError, match=r"returned shape \[\] for targets of shape \[5\]"):
        risk.value()
