"""The audit itself is tested: it notices every wrong rule on the user's own data, and names operation and parameter.

A wrong rule replaces the right one. Some change predictions, and are refused before the predictions are used.
Others misread inputs or gradients, and the parameter is not covered.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from kfs import optim
from kfs.errors import ModelError
from kfs.factors import EKFAC, KFAC, inspect
from kfs.factors.rules import RULES, convolution, elementwise, embedding, linear, normalization
from kfs.factors.trace.discovery import Discovery
from kfs.factors.trace.plan import Argument, Copy, Rewrite
from kfs.problem.risk import EmpiricalRisk
from tests.factors.arrangements import normal
from tests.factors.models import Function

LOSS = nn.CrossEntropyLoss()
N = 9
RIGHT_ATTENTION: Any = RULES[F.multi_head_attention_forward]


@dataclass(frozen=True)
class Wrong:
    """A rule with a bug.

    Attributes:
        func: The operation.
        rule: The wrong rule for it.
        model: A model with three classes on which the bug has an effect.
        says: Text that an error must contain, next to the operation's name.
        example: Makes the inputs of some examples.
        refused: Whether predictions change, so that the model is refused altogether.
        mixes: Whether examples seem to mix, so that the model is refused, too, except in training.
    """

    func: Any
    rule: Callable[..., Any]
    model: Callable[[], nn.Module]
    says: str
    datum: Callable[[int], Tensor] = lambda n: normal(n, 4)
    refused: bool = False
    mixes: bool = False


def rewritten(body: Callable[..., Any]) -> Callable[..., Any]:
    """Return a rule that runs another function in a captured pass."""

    def run(seen: Discovery, *args: Any, **named: Any) -> Any:
        with seen.intercepting():
            return body(*args, **named)

    return lambda *_, **__: Rewrite(run)


def changed(rule: Callable[..., Any], **changes: Any) -> Callable[..., Any]:
    """Return a rule whose plans have some fields replaced."""
    return lambda *args, **named: tuple(replace(plan, **changes) for plan in rule(*args, **named))


def bias_everywhere() -> Callable[..., Any]:
    """Return a rule that uses the last known bias in calls without bias."""
    seen: list[Argument] = []

    def rule(call: Any, input: Argument, weight: Argument, bias: Argument | None = None) -> Any:  # noqa: A002
        if bias is not None:
            seen.append(bias)
        return linear.linear(call, input, weight, bias or seen[-1])

    return rule


def not_causal(call: Any, *args: Any, **named: Any) -> Rewrite:
    """Run attention step by step, without its causal mask."""
    right = RIGHT_ATTENTION(call, *args, **named)
    return Rewrite(lambda one, *args, **named: right.body(one, *args, **(named | {"attn_mask": None})))


def square() -> nn.Module:
    return Function(lambda m, x: F.linear(x, m.W).tanh() @ m.V, W=normal(4, 4), V=normal(4, 3))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))


def twice() -> nn.Module:
    """Use a weight twice, the second time without its bias."""
    return Function(
        lambda m, x: F.linear(F.linear(x, m.W, m.b).tanh(), m.W).tanh() @ m.V,
        W=normal(4, 4),
        b=normal(4),
        V=normal(4, 3),
    )


def tokens(n: int) -> Tensor:
    return torch.randint(5, (n, 6))


def lookup() -> nn.Module:
    return nn.Sequential(nn.Embedding(5, 4, padding_idx=1), nn.Flatten(), nn.Linear(24, 3))


def image() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 2, 2, (2, 1)), nn.Flatten(), nn.Linear(12, 3))


def strides_swapped(call: Any, x: Any, weight: Any, bias: Any, stride: Any, *rest: Any) -> Any:
    return convolution.convolution(call, x, weight, bias, stride[::-1], *rest)


def scaled_by_inputs(call: Any, input: Any, shape: Any, weight: Any, bias: Any, eps: float) -> Any:  # noqa: A002, ARG001
    """Leave out the normalization."""
    return normalization._scaled("layer_norm", input, weight, bias, torch.clone)


def first_rows(call: Any, x: Any, weight: Any, bias: Any = None) -> Any:
    """Treat any rows of a matrix as the first ones."""
    return linear.linear(call, x, replace(weight, offset=0), bias)


class Causal(nn.Module):
    """Attention to the current and earlier positions."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        later = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        result: Tensor = self.head(self.attention(x, x, x, attn_mask=later)[0].mean(1))
        return result


def swapped(func: Any, other: Callable[[Tensor, Tensor], Tensor]) -> Wrong:
    """Run another function, in which the data and a parameter are swapped."""
    return Wrong(
        func,
        rewritten(other),
        lambda: Function(lambda m, x: func(x, m.b) @ m.V, b=normal(4), V=normal(4, 3)),
        f"{func.__name__} .parameter 'b'.",
        refused=True,
    )


ZOO: dict[str, Wrong] = {
    "subtraction, swapped": swapped(torch.sub, lambda a, b: torch.add(b, a.neg())),
    "division, swapped": swapped(torch.div, lambda a, b: torch.mul(b, a.reciprocal())),
    "without bias": Wrong(
        F.linear, rewritten(lambda x, W, _: x @ W.T), mlp, r"linear .parameter '0\.bias', '0\.weight'.", refused=True
    ),
    "noise": Wrong(
        F.linear, rewritten(lambda x, W, b: x @ W.T + b + 1e-4), mlp, r"linear .parameter '0\.bias'", refused=True
    ),
    "not causal": Wrong(
        F.multi_head_attention_forward,
        not_causal,
        Causal,
        "multi_head_attention_forward .parameter 'attention",
        lambda n: normal(n, 3, 4),
        refused=True,
    ),
    "use dropped": Wrong(F.linear, changed(linear.linear, read=lambda g, _: 0 * g), mlp, r"'0\.weight'"),
    "summed over data": Wrong(
        F.linear,
        changed(linear.linear, read=lambda g, _: g.sum(1, keepdim=True).expand_as(g)),
        mlp,
        r"'[02]\.weight'",
        mixes=True,
    ),
    "data reversed": Wrong(F.linear, changed(linear.linear, prepare=lambda x: x.flip(0)), mlp, r"'0\.weight'"),
    "a bias where there is none": Wrong(F.linear, bias_everywhere(), twice, "'(W|b)'"),
    "bias forgotten": Wrong(F.linear, changed(linear.linear, bias=None, joins=False), mlp, r"'0\.bias'"),
    "square weight, transposed": Wrong(
        F.linear, lambda call, x, W, b=None: linear.multiply(call, "linear", x, W, b, flip=True), square, "'W'"
    ),
    "gradients twice as large": Wrong(F.linear, changed(linear.linear, read=lambda g, _: 2 * g), mlp, r"'0\.weight'"),
    "gradients a little larger": Wrong(
        F.linear, changed(linear.linear, read=lambda g, _: 1.001 * g), mlp, r"'0\.weight'"
    ),
    "other rows": Wrong(
        F.linear,
        first_rows,
        lambda: Function(lambda m, x: F.linear(x, m.W[1:4]), W=normal(6, 4)),
        "'W'",
    ),
    "padding forgotten": Wrong(
        F.embedding, lambda call, x, W, *_, **__: embedding.embedding(call, x, W), lookup, r"'0\.weight'", tokens
    ),
    "strides swapped": Wrong(F.conv2d, strides_swapped, image, r"'1\.weight'", lambda n: normal(n, 16)),
    "not normalized": Wrong(
        F.layer_norm, scaled_by_inputs, lambda: nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 3)), r"'0\.weight'"
    ),
    "scaled is a copy": Wrong(
        torch.mul,
        lambda _, W, __: Copy(W.name),
        lambda: Function(lambda m, x: F.linear(F.linear(x, torch.mul(m.W, 2.0)), m.V), W=normal(4, 4), V=normal(3, 4)),
        "'W'",
    ),
    "shift of other entries": Wrong(
        torch.add,
        lambda call, x, b: elementwise.elementwise(call, x, replace(b, offset=0)),
        lambda: Function(lambda m, x: F.linear(torch.add(x, m.p[1]), m.V), p=normal(2, 4), V=normal(3, 4)),
        "'p'",
    ),
    "einsum, axes swapped": Wrong(
        torch.einsum,
        lambda call, _, x, W: linear.einsum(call, "ni,oi->no", x, W),
        lambda: Function(lambda m, x: torch.einsum("ni,io->no", x, m.W).tanh() @ m.V, W=normal(4, 4), V=normal(4, 3)),
        "'W'",
    ),
}


@pytest.fixture(params=ZOO)
def wrong(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Wrong:
    """Replace the right rule by a wrong one."""
    one = ZOO[request.param]
    assert one.func in RULES
    monkeypatch.setitem(RULES, one.func, one.rule)
    torch.manual_seed(0)
    return one


def data(one: Wrong) -> tuple[Tensor, Tensor]:
    return one.datum(N), torch.arange(N) % 3


def test_right_rules_are_accepted() -> None:
    """Otherwise the tests below would prove nothing."""
    for one in ZOO.values():
        torch.manual_seed(0)
        K = KFAC(EmpiricalRisk(one.model().double(), LOSS, data(one)), uncovered="skip")
        assert K.audit is not None


def test_wrong_rules_are_rejected(wrong: Wrong) -> None:
    """The message names the parameter and the operation."""
    model = wrong.model().double()
    risk = EmpiricalRisk(model, LOSS, data(wrong))
    for compute in (lambda: KFAC(risk), lambda: EKFAC(risk), lambda: KFAC(risk, sharing="reduce")):
        with pytest.raises(ModelError, match=wrong.says) as caught:
            compute()
        # A misread use is reported with the operation that reads it.
        assert any(name in str(caught.value) for name in (wrong.func.__name__, "linear", "not seen"))
    if wrong.refused:
        with pytest.raises(ModelError, match="Predictions under capture differ"):
            inspect(model, data(wrong)[0])
    elif not wrong.mixes:
        assert inspect(model, data(wrong)[0]).uncovered


def test_wrong_rules_do_not_change_training(wrong: Wrong) -> None:
    """A rule that changes predictions is refused before the pass. Other rules leave the parameter to AdamW."""
    model = wrong.model().double()
    X, y = data(wrong)
    before = model(X).detach()
    optimizer = optim.KFAC(model, LOSS)
    if wrong.refused:
        for _ in range(2):
            with pytest.raises(ModelError, match=wrong.says):
                model(X)
        optimizer.close()
        assert torch.equal(model(X), before)
        return
    f = model(X)
    assert torch.equal(f, before)
    LOSS(f, y).backward()
    with pytest.warns(Warning, match=wrong.says):
        optimizer.step()
    assert optimizer.uncovered


def test_without_audit_nobody_notices(wrong: Wrong) -> None:
    """So the audit notices wrong rules; without it, only a parameter without any use is reported."""
    table = inspect(wrong.model().double(), data(wrong)[0], audit=False)
    assert all("no operation with a rule" in why for why in table.uncovered.values())
