"""Outputs of models: a risk, an operator, KFAC and the optimizer find the same predictions."""

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfs import EKFAC, GGN, KFAC, EmpiricalRisk, inspect, per_datum
from kfs.errors import DataError, ModelError
from kfs.losses import describe
from kfs.optim import KFAC as Optimizer  # noqa: N811 (both are called KFAC)
from kfs.problem.risk import prediction_in
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


class Heads(nn.Module):
    """A body with two heads, whose outputs are returned in some form."""

    def __init__(self, form: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.first, self.second = (nn.Linear(*size).double() for size in ((3, 4), (4, 2), (4, 3)))
        self.form = form

    def forward(self, x: Tensor) -> Any:
        hidden = self.body(x).tanh()
        return self.form(self.first(hidden), self.second(hidden))


# Forms of both heads, and the names of the first and the second one.
HEADS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Any, Any]] = {
    "tuple": (lambda a, b: (a, b), 0, 1),
    "after a number": (lambda a, b: (a.sum(), a, b), 1, 2),
    "mapping": (lambda a, b: {"a": a, "b": b}, "a", "b"),
    "mapping with logits": (lambda a, b: {"logits": a, "value": b}, "logits", "value"),
    "object": (lambda a, b: SimpleNamespace(start=a, end=b), "start", "end"),
    "named tuple": (lambda a, b: Named(b, a), "logits", "hidden"),
}


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("chosen", [1, 2])
def test_the_loss_names_one_of_several_outputs(name: str, chosen: int) -> None:
    """Results are those of a model with this head alone; the parameters of the other head are unused."""
    X, _ = data()
    y = torch.randint(2, (5,))
    model = Heads(HEADS[name][0])
    head, other = (model.first, model.second)[:: 1 if chosen == 1 else -1]
    alone = nn.Sequential(OrderedDict(body=model.body, tanh=nn.Tanh(), head=head))
    loss = describe(nn.CrossEntropyLoss(), output=HEADS[name][chosen])  # type: ignore[arg-type]
    risk, expected = EmpiricalRisk(model, loss, (X, y)), EmpiricalRisk(alone, LOSS, (X, y))
    assert risk.value() == pytest.approx(expected.value(), rel=1e-14)
    size = sum(p.numel() for p in alone.parameters())
    names = [n for n, p in model.named_parameters() if all(p is not q for q in other.parameters())]
    close(GGN(risk).submatrix(names).to_dense(), GGN(expected).to_dense())
    K = KFAC(risk)
    close(K.submatrix(names).to_dense(), KFAC(expected).to_dense())
    assert KFAC(expected).shape == (size, size)
    word = "second" if chosen == 1 else "first"
    assert K.audit is not None
    assert K.audit.unused == (f"{word}.weight", f"{word}.bias")
    assert f"{word}.weight: not used, as predictions do not depend on it" in str(K.audit)
    assert not K.blocks[word].B.any()


@pytest.mark.parametrize("name", ["tuple", "after a number", "mapping with logits", "named tuple"])
def test_parameters_of_other_outputs_are_an_error_unless_the_output_is_named(name: str) -> None:
    X, y = data()
    form, own, other = HEADS[name]
    model = Heads(form)
    risk = EmpiricalRisk(model, LOSS, (X, y))
    before = [p.detach().clone() for p in model.parameters()]
    message = f"is for output {own!r} of the model, but only output {other!r} depends on 'second.weight'"
    for call in (lambda: KFAC(risk), lambda: EKFAC(risk), lambda: list(per_datum(risk))):
        with pytest.raises(ModelError, match=rf"{message}.*describe\(loss, output={own!r}\)"):
            call()
    assert all(p.grad is None and torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    # Without the other head's parameters there is nothing to name.
    names = [n for n, _ in model.named_parameters() if not n.startswith("second")]
    few = EmpiricalRisk(model, LOSS, (X, y), params=names)
    close(
        KFAC(few).to_dense(), KFAC(EmpiricalRisk(model, describe(LOSS, output=own), (X, y))).submatrix(names).to_dense()
    )


@pytest.mark.parametrize(("name", "found"), [("tuple", r"0 \[5, 2\], 1 \[5, 3\]"), ("mapping", "'a' .*, 'b'")])
def test_outputs_that_do_not_exist_are_an_error(name: str, found: str) -> None:
    X, y = data()
    risk = EmpiricalRisk(Heads(HEADS[name][0]), describe(LOSS, output="c"), (X, y))
    with pytest.raises(ModelError, match=rf"is for output 'c' of the model, which returned a .* with {found}"):
        risk.value()


@pytest.mark.parametrize("name", HEADS)
def test_the_optimizer_takes_the_output_that_the_loss_names(name: str) -> None:
    """The other head has its own loss, and is trained by AdamW."""
    X, y = data()
    form, first, second = HEADS[name]
    results = []
    for wrapped in (True, False):
        model = Heads(form)
        forward = model if wrapped else nn.Sequential(OrderedDict(body=model.body, tanh=nn.Tanh(), head=model.first))
        loss = describe(LOSS, output=first) if wrapped else LOSS
        optimizer = Optimizer(forward, loss, lr=0.1, params=[*model.body.parameters(), *model.first.parameters()])
        for _ in range(2):
            optimizer.zero_grad()
            output = forward(X)
            f = prediction_in(output, first) if wrapped else output
            nn.functional.cross_entropy(f, y).backward()
            optimizer.step()
        results.append(model.first.weight.detach())
    close(results[0], results[1])
    assert second is not None
