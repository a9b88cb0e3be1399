"""Every operation that has a rule, called with keyword arguments in any order, next to some positional ones.

For any order of arguments, predictions in a captured pass are those of the model alone, and factors equal those of the
positional call, whose oracle is autograd: summed over examples, the gradients of all uses are those of the risk.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from kfs import KFAC, EmpiricalRisk, inspect
from kfs.errors import ModelError
from kfs.factors.accumulate import FactorSums, Moment, PerDatumSums
from kfs.factors.capture import forward
from kfs.factors.compute import sweep
from kfs.factors.rules import RULES, new_trace
from kfs.factors.settings import Settings
from kfs.factors.trace.discovery import takes
from kfs.problem.data import Batch
from tests.factors.calls import CASES, WIDTH, Case, N
from tests.factors.models import Function

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")  # PyTorch's own, about bilinear


class Total(Moment):
    """The sum of the gradients of all examples."""

    def __init__(self, total: Tensor) -> None:
        self.total = total

    def add(self, gradients: Tensor) -> None:
        self.total += gradients.sum(0)


def factors(K: KFAC) -> dict[str, Tensor]:
    return {f"{name}.{side}": getattr(block, side) for name, block in K.blocks.items() for side in ("A", "B")}


def test_every_operation_has_a_case() -> None:
    assert {case.func for case in CASES} == set(RULES)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_positional_arguments(case: Case) -> None:
    """All parameters are covered, and their gradients are autograd's."""
    model, batch = case.model(), case.batch()
    assert not inspect(model, batch[0]).uncovered
    risk = EmpiricalRisk(model, nn.MSELoss(), batch)
    K = KFAC(risk)
    layouts = {block.layout.key: block.layout for block in K.blocks.values()}
    totals = {key: Total(torch.zeros(layout.matrix_shape, dtype=case.dtype)) for key, layout in layouts.items()}
    settings = Settings(fisher="empirical")
    sweep(risk, PerDatumSums(settings, layouts, totals), settings, "gradients")
    exact = {name: g.unsqueeze(0) / risk.reduction_factor for name, g in risk.gradient().items()}
    assert {name for layout in layouts.values() for name in layout.params} == set(exact)
    for key, layout in layouts.items():
        expected = layout.matrix(exact)[0]
        case.close(totals[key].total, expected.reshape(totals[key].total.shape))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_keyword_arguments_in_any_order(case: Case) -> None:
    X, y = case.batch()
    expected = factors(KFAC(EmpiricalRisk(case.model(), nn.MSELoss(), (X, y)), audit=False))
    plain = case.model()(X)
    for positional, by_name in case.variants():
        model = case.model(positional, by_name)
        risk = EmpiricalRisk(model, nn.MSELoss(), (X, y))
        with risk.untouched(first_order=True):
            trace = new_trace(risk.params)
            f, _ = forward(risk, Batch(X, y, 0), trace, [FactorSums(Settings())])
        case.close(f, plain)
        assert torch.equal(model(X), plain)
        found = factors(KFAC(risk, audit=False))
        assert found.keys() == expected.keys(), (positional, by_name)
        assert all(torch.equal(found[name], expected[name]) for name in found), (positional, by_name)


any_torch: Any = torch  # with more arguments than their type annotations have
any_functional: Any = F

# Calls that PyTorch accepts besides the documented ones: NumPy's names, earlier orders, sequences of all lengths.
UNDOCUMENTED: dict[str, Callable[[Any, Tensor], Any]] = {
    "linear": lambda m, x: any_functional.linear(x=x[:, :4], weight=m.W),
    "matmul": lambda m, x: any_torch.matmul(x1=x[:, :4], x2=m.W.T),
    "mm": lambda m, x: any_torch.mm(a=x[:, :4], mat2=m.W.T),
    "conv1d": lambda m, x: any_functional.conv1d(x=x[:, :8].reshape(N, 4, 2), weight=m.W.unsqueeze(2)),
    "prelu": lambda m, x: any_functional.prelu(x1=x[:, :4], weight=m.W[0]),
    "addmm": lambda m, x: any_torch.addmm(1, x[:, :2], 1, x[:, :4], m.W.T),
    "addmm, shorter": lambda m, x: any_torch.addmm(1, x[:, :2], x[:, :4], m.W.T),
    "rnn_tanh": lambda m, x: any_torch.rnn_tanh(
        data=x[:, :4],
        batch_sizes=torch.tensor([N]),
        hx=x.new_zeros(1, N, 2),
        params=[m.W, m.W[:, :2]],
        has_biases=False,
        num_layers=1,
        dropout=0.0,
        train=False,
        bidirectional=False,
    )[0],
}


@pytest.mark.filterwarnings("ignore:This overload of addmm is deprecated")
@pytest.mark.parametrize("name", UNDOCUMENTED)
def test_arguments_that_a_rule_does_not_know_are_uses_without_rule(name: str) -> None:
    """They are not covered, and the error is one of kfs, with advice, not one of Python."""
    model = Function(lambda m, x: UNDOCUMENTED[name](m, x).flatten(1).tanh(), W=torch.rand(2, 4)).double()
    X = torch.rand(N, WIDTH, dtype=torch.float64)
    assert list(inspect(model, X).uncovered) == ["W"]
    with pytest.raises(ModelError, match="with arguments that the rule for it does not take"):
        KFAC(EmpiricalRisk(model, nn.MSELoss(), (X, torch.zeros_like(model(X).detach()))))


def test_operands_may_have_any_name() -> None:
    """Rules for operations that broadcast, or join, read all arguments."""
    X = torch.rand(N, WIDTH, dtype=torch.float64)
    calls: list[Callable[[Any, Tensor], Tensor]] = [
        lambda m, x: any_torch.sub(x1=x[:, :4], x2=m.w),
        lambda m, x: any_torch.cat(tensors=[x[:, :4], m.w.expand(N, 4)], axis=1),
    ]
    for call in calls:
        model = Function(lambda m, x, call=call: call(m, x).tanh(), w=torch.rand(1, 4)).double()
        assert not inspect(model, X).uncovered


def test_rules_are_asked_with_what_they_know() -> None:
    def rule(call: Any, input: Any, weight: Any = None, *, out: Any = None) -> Any:  # noqa: A002 (PyTorch's name)
        return call, input, weight, out

    assert takes(rule, (2,), {"out": 3})
    assert takes(rule, (), {"weight": 2, "input": 4})
    for unknown in ((), (2, 3, 4)):
        assert not takes(rule, unknown, {})
    assert not takes(rule, (2,), {"bias": 3})
    assert not takes(rule, (2,), {"input": 3})
