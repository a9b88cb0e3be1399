"""Models that the audit must accept: masks, vanishing gradients, inputs without batch axis, other precisions, hooks."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfs.factors import KFAC
from kfs.factors.audit.audit import FEW
from kfs.losses import TokenCrossEntropy
from kfs.problem.risk import EmpiricalRisk
from tests.factors.arrangements import normal
from tests.factors.models import Function
from tests.factors.test_audit import LOSS, MANY, labels
from tests.operators.contract import close

SHARING: tuple[Any, ...] = ("expand", "reduce")


class Encoder(nn.Module):
    """Attention of tokens to each other, and a prediction from one token, or from all."""

    def __init__(self, pool: str, causal: bool = False, padding: bool = False) -> None:
        super().__init__()
        self.pool, self.causal, self.padding = pool, causal, padding
        self.tokens = nn.Embedding(7, 4, padding_idx=0 if padding else None)
        self.layer = nn.TransformerEncoderLayer(4, 2, 4, dropout=0.0, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        masked = x == 0 if self.padding else None
        later = torch.ones(x.shape[1], x.shape[1]).triu(1).bool() if self.causal else None
        h = self.layer(self.tokens(x), src_mask=later, src_key_padding_mask=masked)
        if self.pool == "mean":
            counted = (x != 0).to(h.dtype).unsqueeze(2)
            h = (h * counted).sum(1) / counted.sum(1)
        elif self.pool != "none":
            h = h[:, 0 if self.pool == "first" else -1]
        result: Tensor = self.head(h)
        return result


class Positions(nn.Module):
    """Takes positions as an input without batch axis."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions, self.head = nn.Embedding(7, 4), nn.Embedding(12, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        result: Tensor = self.head((self.tokens(x) + self.positions(positions)).tanh()).mean(1)
        return result


class Several(nn.Module):
    """Takes arguments of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, scale: Tensor, times: int, *, mask: Tensor, name: str = "") -> Tensor:
        result: Tensor = self.layer(x * scale * times) * (2.0 if name else 1.0) + mask
        return result


def sequences(num_data: int, length: int = 5) -> Tensor:
    """Return tokens; sequence n ends with `n % length` tokens of padding."""
    x = torch.randint(1, 7, (num_data, length))
    for n in range(num_data):
        x[n, length - n % length :] = 0
    x[:, 0] = 1
    return x


def dead(m: Any, x: Tensor) -> Tensor:
    result: Tensor = (x @ m.W - 100).relu() @ m.V + x @ m.U
    return result


def masked_classes(m: Any, x: Tensor) -> Tensor:
    forbidden = torch.arange(4) == x[:, :1].gt(0).long() + 2
    result: Tensor = (x @ m.W).masked_fill(forbidden, -torch.inf)
    return result


Make = tuple[Callable[[], nn.Module], Callable[[int], Any]]
ACCEPTED: dict[str, Make] = {
    "padding, mean": (lambda: Encoder("mean", padding=True), sequences),
    "causal, last token": (lambda: Encoder("last", causal=True), sequences),
    "causal, first token": (lambda: Encoder("first", causal=True), sequences),
    "causal, padding, mean": (lambda: Encoder("mean", True, True), sequences),
    "dead units": (lambda: Function(dead, W=normal(4, 4), V=normal(4, 3), U=normal(4, 3)), lambda n: normal(n, 4)),
    "masked classes": (lambda: Function(masked_classes, W=normal(4, 4)), lambda n: normal(n, 4)),
    "booleans": (lambda: Function(lambda m, x: x.to(m.W.dtype) @ m.W, W=normal(4, 3)), lambda n: normal(n, 4) > 0),
    **{
        f"positions [{length}]": (Positions, lambda n, length=length: (sequences(n, length), torch.arange(length)))  # type: ignore[misc]
        for length in (3, FEW, MANY)
    },
    "positions [1, T]": (Positions, lambda n: (sequences(n, n + 1), torch.arange(n + 1).unsqueeze(0))),
    "positions by keyword": (Positions, lambda n: {"positions": torch.arange(4), "x": sequences(n, 4)}),
    "all kinds of arguments": (
        Several,
        lambda n: {"x": normal(n, 4), "scale": torch.tensor(2.0), "times": 3, "mask": normal(3), "name": "a"},
    ),
}


@pytest.mark.parametrize("num_data", [1, FEW, MANY])
@pytest.mark.parametrize("name", ACCEPTED)
def test_what_is_not_refused(name: str, num_data: int) -> None:
    make, inputs = ACCEPTED[name]
    torch.manual_seed(0)
    model = make().double().eval()
    risk = EmpiricalRisk(model, LOSS, [(inputs(num_data), labels(num_data, 2))])
    for sharing in SHARING:
        report = KFAC(risk, "empirical", sharing).audit
        assert report is not None
        assert report.predictions <= report.tolerance
        assert report.gradients.keys() == risk.params.keys()
        assert max(report.gradients.values()) <= report.tolerance


def lower(x: Any, dtype: torch.dtype) -> Any:
    """Convert inputs to another precision."""
    if isinstance(x, tuple):
        return tuple(lower(part, dtype) for part in x)
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False), (torch.float16, False)],
    ids=str,
)
@pytest.mark.parametrize(
    "name", ["causal, padding, mean", "causal, first token", "dead units", "masked classes", "positions [3]"]
)
def test_other_precisions_are_not_refused(name: str, dtype: torch.dtype, autocast: bool) -> None:
    make, inputs = ACCEPTED[name]
    torch.manual_seed(0)
    model = make().to(dtype).eval()
    context: AbstractContextManager[Any] = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
    risk = EmpiricalRisk(model, LOSS, [(lower(inputs(MANY), dtype), labels(MANY, 2))])
    with context:
        for sharing in SHARING:
            assert KFAC(risk, "empirical", sharing).audit is not None


def test_autocast_inside_of_the_model() -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                result: Tensor = self.second(self.first(x).tanh())
            return result.float()

    torch.manual_seed(0)
    report = KFAC(EmpiricalRisk(Inside(), LOSS, (torch.randn(MANY, 4), labels(MANY)))).audit
    assert report is not None
    assert report.tolerance > 1e-3  # products are in half precision, although predictions are not


def test_predictions_of_several_positions() -> None:
    torch.manual_seed(0)
    X = sequences(MANY)
    risk = EmpiricalRisk(Encoder("none", causal=True).double().eval(), TokenCrossEntropy(), [(X, X % 3)])
    for sharing in SHARING:
        assert KFAC(risk, "empirical", sharing).audit is not None


def test_a_gradient_that_is_zero_by_symmetry() -> None:
    """The bias of keys does not change attention: its gradient consists of rounding errors."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(4, 2, kdim=3, vdim=3, batch_first=True)
    model = Function(lambda m, x: m.head(m.attention(x, x[..., :3], x[..., :3])[0].mean(1)))
    model.attention, model.head = attention, nn.Linear(4, 3)
    nn.init.normal_(attention.in_proj_bias)
    report = KFAC(EmpiricalRisk(model.double(), LOSS, (normal(MANY, 6, 4), labels(MANY)))).audit
    assert report is not None
    assert report.gradients["attention.in_proj_bias"] <= report.tolerance


@pytest.mark.parametrize("change", [lambda g: 3 * g, lambda _: None, lambda g: g.zero_()], ids=["scale", "log", "zero"])
def test_hooks_of_parameters_do_not_confuse_it(change: Any) -> None:
    """They change gradients in training, but not what a use is."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    data = (normal(MANY, 4), labels(MANY))
    plain = KFAC(EmpiricalRisk(model, LOSS, data))
    hooks = [p.register_hook(change) for p in model.parameters()]
    model.requires_grad_(True)  # a different model for audits
    model.add_module("identity", nn.Identity())
    hooked = KFAC(EmpiricalRisk(model, LOSS, data))
    assert hooked.audit is not plain.audit
    close(hooked.to_dense(), plain.to_dense())
    assert all(len(p._backward_hooks or {}) == 1 for p in model.parameters())
    for hook in hooks:
        hook.remove()


def test_parameters_that_are_not_used() -> None:
    """They are reported by the coverage, not by the audit."""
    model = Function(lambda m, x: x @ m.W, W=normal(4, 3), unused=normal(2))
    K = KFAC(EmpiricalRisk(model, LOSS, (normal(5, 4), labels(5))), uncovered="skip")
    assert K.audit is not None
    assert list(K.audit.gradients) == ["W"]
