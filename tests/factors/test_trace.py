"""A trace over batches: plans of every kind are reused, do not change sums, and keep no tensors alive.

`test_plans` tests what plans depend on.
"""

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfs.errors import ModelError
from kfs.factors.accumulate import BlockSums, FactorSums
from kfs.factors.audit.audit import GradientSums
from kfs.factors.capture import CapturedPass, forward
from kfs.factors.rules import RULES, new_trace
from kfs.factors.rules.fallback import without_rule
from kfs.factors.settings import Settings
from kfs.factors.trace import Trace
from kfs.factors.trace.plan import Plan
from kfs.problem.risk import EmpiricalRisk
from tests.factors.models import Function
from tests.operators.contract import close


class CountedRules(dict[Any, Any]):
    """All rules; calls are counted by the operation's name.

    Attributes:
        asked: Number of calls of rules, by name of the operation.
    """

    def __init__(self) -> None:
        """Wrap all rules."""
        super().__init__({func: self._counted(func, rule) for func, rule in RULES.items()})
        self.asked: Counter[str] = Counter()

    def _counted(self, func: Any, rule: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.asked[func.__name__] += 1
            return rule(*args, **kwargs)

        return counted


class Sweep:
    """Passes over batches that share one trace, as `kfs.factors.compute.sweep` makes them.

    Attributes:
        rules: Counts calls of rules.
        trace: Outlives batches.
        sums: The sums that inputs and gradients are added to.
        derived: References to the derived parameters of the last batch.
    """

    def __init__(self, model: nn.Module) -> None:
        """Start without plans."""
        self.model = model
        self.rules = CountedRules()
        self.trace = Trace(dict(model.named_parameters()), rules=self.rules, fallback=without_rule)
        self.sums = FactorSums(Settings())
        self.derived: list[weakref.ref[Any]] = []

    def batch(self, num_data: int = 5, features: int = 4) -> tuple[Tensor, CapturedPass]:
        """Pass a batch of random data through the model and back."""
        X = torch.randn(num_data, features, dtype=torch.float64)
        risk = EmpiricalRisk(self.model, nn.CrossEntropyLoss(), (X, torch.zeros(num_data, dtype=torch.long)))
        (batch,) = risk.batches()
        f, one = forward(risk, batch, self.trace, [self.sums])
        self.derived = list(map(weakref.ref, one.derived))
        one.send_back(f, iter([torch.ones_like(f).unsqueeze(0)]))
        return X, one

    @property
    def blocks(self) -> list[BlockSums]:
        """The sums of all blocks."""
        return list(self.sums.blocks.values())

    @property
    def settled(self) -> set[Plan]:
        """All settled plans."""
        return {plan for found in self.trace.plans.values() if isinstance(found, list) for plan in found}


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()


def of_all_kinds() -> nn.Module:
    """A use of every kind: a plan, a broadcast, a copy, a derived parameter, a rewrite, and one without a rule."""

    def function(m: Any, x: Tensor) -> Tensor:
        x = nn.functional.linear(x, m.W, m.b).tanh()
        x = x * m.scale  # a broadcast parameter
        x = x @ m.copied.clone()
        x = x + m.derived.exp()  # no rule; its result is tracked until it meets the data
        x = torch.cat([x.unsqueeze(1), m.token.repeat(len(x), 1, 1)], dim=1).sum(1)
        result: Tensor = x @ m.W
        return result

    def r(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64)

    return Function(function, W=r(3, 4), b=r(3), scale=r(3), copied=r(3, 3), derived=r(3), token=r(1, 1, 3))


def test_rules_are_asked_once() -> None:
    sweep = Sweep(two_layers())
    sweep.batch()
    assert sweep.rules.asked == {"linear": 2}
    plans, adders = sweep.settled, dict(sweep.sums.adders)
    assert len(plans) == len(adders) == 2
    for _ in range(3):
        sweep.batch()
    assert sweep.rules.asked == {"linear": 2}
    assert sweep.settled == plans  # the very same objects
    assert sweep.sums.adders == adders


def test_rules_are_asked_once_for_every_kind_of_plan() -> None:
    sweep = Sweep(of_all_kinds())
    sweep.batch()
    asked, plans = dict(sweep.rules.asked), len(sweep.trace.plans)
    assert {"linear", "mul", "clone", "add"} <= {name.strip("_") for name in asked}
    for _ in range(3):
        sweep.batch()
    assert sweep.rules.asked == asked
    assert len(sweep.trace.plans) == plans


def test_plans_do_not_change_sums() -> None:
    """Two batches with one trace give the same sums as with a trace for each batch."""
    model = of_all_kinds()
    together = Sweep(model)
    torch.manual_seed(1)
    together.batch()
    together.batch()
    torch.manual_seed(1)
    apart = [Sweep(model), Sweep(model)]
    for sweep in apart:
        sweep.batch()
    assert together.blocks
    for both, one, other in zip(together.blocks, apart[0].blocks, apart[1].blocks, strict=True):
        assert both.layout == one.layout == other.layout
        for s, first, second in zip(both.sums, one.sums, other.sums, strict=True):
            close(s.total, first.total + second.total)


def test_autocast_has_its_own_plans() -> None:
    sweep = Sweep(two_layers().float())
    sweep.model.register_forward_pre_hook(lambda _, args: (args[0].float(),))
    for narrow, asked in ((None, 2), (torch.bfloat16, 4), (None, 4), (torch.bfloat16, 4)):
        with nullcontext() if narrow is None else torch.autocast("cpu", narrow):
            sweep.batch()
        assert sweep.rules.asked == {"linear": asked}
    assert {plan.narrow for plan in sweep.settled} == {None, torch.bfloat16}


def test_arguments_that_are_no_tensors_have_their_own_plans() -> None:
    """The same tensors with another stride of a convolution are another call."""
    stride = 1

    def function(m: Any, x: Tensor) -> Tensor:
        return nn.functional.conv1d(x.unsqueeze(1), m.W, None, stride).flatten(1)

    sweep = Sweep(Function(function, W=torch.randn(2, 1, 2, dtype=torch.float64)))
    for stride, asked in ((1, 1), (2, 2), (1, 2)):  # noqa: B007 (the function sees it)
        sweep.batch()
        assert sweep.rules.asked == {"conv1d": asked}


def test_plans_die_with_the_storage_of_a_parameter() -> None:
    model = two_layers()
    sweep = Sweep(model)
    sweep.batch()
    before = sweep.settled
    weight = model.get_parameter("0.weight")
    weight.data = weight.data.clone()
    sweep.batch()
    assert sweep.rules.asked == {"linear": 4}
    assert not before & sweep.settled
    assert not before & set(sweep.sums.adders)
    assert [block.terms for block in sweep.blocks] == [10.0, 10.0]  # sums go on


def alive(references: list["weakref.ref[Any]"]) -> int:
    gc.collect()
    return sum(reference() is not None for reference in references)


def activations(model: nn.Module) -> Iterator[list["weakref.ref[Any]"]]:
    """Watch the inputs and outputs of all modules."""
    seen: list[weakref.ref[Any]] = []

    def note(_: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        seen.extend(weakref.ref(t.untyped_storage()) for t in (*args, out))

    handles = [module.register_forward_hook(note) for module in model.modules()]
    yield seen
    for handle in handles:
        handle.remove()


def test_no_activation_is_kept_alive() -> None:
    """Neither plans nor adders hold data, only descriptions of arguments, and sums."""
    model = two_layers()
    sweep = Sweep(model)
    for seen in activations(model):
        X, one = sweep.batch()
        assert len(seen) == 8
        assert alive(seen) > 0  # X, at least
        del X, one
        assert alive(seen) == 0
    assert sweep.settled
    assert sweep.sums.adders


def test_a_batch_leaves_nothing_behind() -> None:
    """Copies and derived parameters of a batch are dropped with it, and so are the objects that refer to it."""
    sweep = Sweep(of_all_kinds())
    for _ in range(2):
        X, one = sweep.batch()
        assert sweep.derived  # there were derived parameters
        references: list[weakref.ref[Any]] = [weakref.ref(one), *sweep.derived]
        del X, one
        assert alive(references) == 0
    for name, p in sweep.model.named_parameters():
        assert sweep.trace.tracker.get(p).name == name


def test_backward_passes_without_taps() -> None:
    """The requested gradients exist even if no use was found."""
    W = torch.randn(4, 3, requires_grad=True)
    one = CapturedPass(new_trace({"W": W}), [GradientSums()], 2)
    f = torch.randn(2, 3) @ W.T @ W
    v = torch.ones_like(f).unsqueeze(0)
    (g,) = one.backward(f, v, keep_graph=True, also=[W])
    assert g is not None
    assert one.backward(f, v) == ()
    assert one.backward(f.detach(), v, also=[W]) == [None]


def test_a_pass_is_entered_once() -> None:
    """Rules enter `intercepting()`: leaving the pass would remove marks."""
    with (
        CapturedPass(new_trace({"W": torch.ones(2, requires_grad=True)}), [GradientSums()], 2) as one,
        pytest.raises(ModelError, match="intercepting"),
        one,
    ):
        pass
