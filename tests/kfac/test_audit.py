"""The audit: what it refuses, with which words, and what it must not refuse.

Models that are refused have a use that nobody sees, or mix data. When the audit happens, and that it leaves nothing
behind, is tested by `test_audits`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from kfs import optim
from kfs.errors import ModelError
from kfs.kfac import EKFAC, KFAC, inspect
from kfs.kfac.capture.audit import FEW
from kfs.losses import TokenCrossEntropy
from kfs.operators import GGN
from kfs.risk import EmpiricalRisk
from tests.kfac.arrangements import normal
from tests.kfac.models import Function
from tests.operators.contract import close

LOSS = nn.CrossEntropyLoss()
SHARING: tuple[Any, ...] = ("expand", "reduce")
MANY = 2 * FEW + 1  # more data than an audit looks at
Compute = Callable[[Any, Tensor], Tensor]


def labels(num_data: int, classes: int = 3) -> Tensor:
    return torch.arange(num_data) % classes


class Product(torch.autograd.Function):
    """A product that no mode sees, in the precision of its first factor."""

    @staticmethod
    def forward(ctx, x, W):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, W)
        return x @ W.to(x.dtype)

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        x, W = ctx.saved_tensors
        return g @ W.T.to(g.dtype), (x.T @ g).to(W.dtype)


def product(x: Tensor, W: Tensor) -> Tensor:
    result: Tensor = Product.apply(x, W)  # type: ignore[no-untyped-call]
    return result


@torch.jit.script
def scripted(x: Tensor, W: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, W)


# A second use of a weight, next to one that has a rule: how, and what an error must name.
HIDDEN: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "itself": (product, "Product"),
    "transposed": (lambda x, W: product(x, W.T), "Product"),
    "copied": (lambda x, W: product(x, W.clone()), "Product"),
    "in another precision": (lambda x, W: product(x, W.to(torch.float32)), "Product"),
    "some rows": (lambda x, W: product(x[:, :2], W[:2]), "Product"),
    "function of it": (lambda x, W: product(x, W.tanh()), "Product"),
    "scripted": (lambda x, W: scripted(x.tanh(), W), r"linear .* (hides|hidden)"),
}


def with_hidden_use(how: str) -> Compute:
    return lambda m, x: (F.linear(x, m.W) + HIDDEN[how][0](x, m.W)).tanh() @ m.V


def hidden_model(how: str) -> nn.Module:
    torch.manual_seed(0)
    return Function(with_hidden_use(how), W=normal(4, 4), V=normal(4, 3))


@pytest.mark.parametrize("how", HIDDEN)
def test_hidden_uses(how: str) -> None:
    """The error names parameter and operation; other parameters are as always, and the diagonal is exact."""
    model, X = hidden_model(how), normal(5, 4)
    risk = EmpiricalRisk(model, LOSS, (X, labels(5)))
    for make in (KFAC, EKFAC):
        with pytest.raises(ModelError, match=rf"'W': .*{HIDDEN[how][1]}.*params=.*uncovered='skip'"):
            make(risk)
    assert list(KFAC(risk, uncovered="skip").blocks) == ["V"]
    diagonal = KFAC(risk, uncovered="diagonal")
    found, exact = (operator.submatrix("W").to_dense() for operator in (diagonal, GGN(risk)))
    torch.testing.assert_close(found, exact.diagonal().diag(), rtol=1e-5, atol=1e-7)  # some of it is in float32
    close(diagonal.submatrix("V").to_dense(), KFAC(risk, uncovered="skip").to_dense())
    assert list(inspect(model, X).uncovered) == ["W"]


@pytest.mark.parametrize("how", HIDDEN)
def test_hidden_uses_of_tensors_that_need_no_gradient(how: str) -> None:
    """As in functions of parameters, and in frozen models."""
    model, data = hidden_model(how), (normal(5, 4), labels(5))
    frozen = hidden_model(how).requires_grad_(False)
    params = {name: p.detach().clone() for name, p in model.named_parameters()}

    def function(p: dict[str, Tensor], x: Tensor) -> Tensor:
        result: Tensor = torch.func.functional_call(frozen, p, (x,))
        return result

    for risk in (
        EmpiricalRisk(function, LOSS, data, params=params),
        EmpiricalRisk(frozen, LOSS, data, params=["W", "V"]),
    ):
        with pytest.raises(ModelError, match=rf"'W': .*{HIDDEN[how][1]}"):
            KFAC(risk)
        assert list(KFAC(risk, uncovered="skip").blocks) == ["V"]
        assert not any(p.requires_grad for p in risk.params.values())


def test_the_difference_is_in_the_message() -> None:
    """A hidden use of the same input has half of the gradient."""
    model = Function(lambda m, x: F.linear(x, m.W) + scripted(x, m.W), W=normal(3, 4))
    with pytest.raises(ModelError, match=r"'W': .* differs by 50%"):
        KFAC(EmpiricalRisk(model, LOSS, (normal(5, 4), labels(5))))


def test_hidden_uses_in_some_batches() -> None:
    """A parameter has a block from batches of one shape; batches of another shape hide its only use."""

    def compute(m: Any, x: Tensor) -> Tensor:
        multiply = scripted if x.shape[1] > 3 else F.linear
        h = multiply(x, m.W).tanh().mean(1)
        return F.linear(h, m.V) if hasattr(m, "V") else h

    for num_data in (1, 5):
        for V in (normal(3, 4), None):  # is there another use, which is seen?
            params = {"W": normal(3, 4)} if V is None else {"W": normal(4, 4), "V": V}
            model = Function(compute, **params)
            data = [(normal(num_data, length, 4), labels(num_data)) for length in (2, 5)]
            assert list(KFAC(EmpiricalRisk(model, LOSS, data[:1])).blocks) == list(params)
            with pytest.raises(ModelError, match=r"'W': .* not seen"):
                KFAC(EmpiricalRisk(model, LOSS, data))


def test_without_audit_hidden_uses_are_not_noticed() -> None:
    risk = EmpiricalRisk(hidden_model("scripted"), LOSS, (normal(5, 4), labels(5)))
    K = KFAC(risk, audit=False)
    assert list(K.blocks) == ["W", "V"]
    assert K.audit is None


@pytest.mark.parametrize("how", HIDDEN)
def test_an_optimizer_trains_what_has_hidden_uses_by_other_means(how: str) -> None:
    model, x, y = hidden_model(how), normal(5, 4), labels(5)
    optimizer = optim.KFAC(model, LOSS)
    LOSS(model(x), y).backward()
    with pytest.warns(Warning, match="'W'"):
        optimizer.step()
    assert list(optimizer.uncovered) == ["W"]


def neighbors(num_data: int) -> Tensor:
    """Return the adjacency matrix of a ring, normalized."""
    return (torch.eye(num_data) + torch.eye(num_data).roll(1, 0)).double() / 2


def limited(m: Any, x: Tensor) -> Tensor:
    """Send data to two experts, which have room for two data each: those that come first."""
    best = (x[:, 0] > 10).long()  # all go to the first one
    out = torch.zeros_like(x)
    for expert in range(2):
        chosen = (best == expert).nonzero().squeeze(1)[:2]
        out[chosen] = x[chosen] @ m.E[expert]
    result: Tensor = (out + x) @ m.V
    return result


def limited_by_batch(m: Any, x: Tensor) -> Tensor:
    """Do nothing to the last data of a batch that is longer than what an audit looks at."""
    return torch.cat([x[: FEW + 2] @ m.V, x[FEW + 2 :] @ m.V * 0.5])


BETWEEN = "Data mix after matmul .'W'., and before matmul .'V'."
REST = "depends on the rest of its batch"
# How data influence each other, and what the error must say.
MIXING: dict[str, tuple[Compute, str]] = {
    "centered": (lambda m, x: ((h := x @ m.W) - h.mean(0)).tanh() @ m.V, BETWEEN),
    "centered before any parameter": (lambda m, x: (x - x.mean(0)) @ m.V, REST),
    "detached statistics": (lambda m, x: ((h := x @ m.W) - h.mean(0).detach()).tanh() @ m.V, REST),
    "detached norm": (lambda m, x: ((h := x @ m.W) / h.detach().norm()).tanh() @ m.V, REST),
    "contrast": (lambda m, x: F.normalize(x @ m.W, dim=1) @ F.normalize(x @ m.V, dim=1).T, "Data mix after matmul"),
    "neighbors": (lambda m, x: (neighbors(len(x)) @ (x @ m.W)).tanh() @ m.V, BETWEEN),
    "sparse neighbors": (lambda m, x: torch.sparse.mm(neighbors(len(x)).to_sparse(), x @ m.W).tanh() @ m.V, BETWEEN),
    "batch norm without parameters": (
        lambda m, x: F.batch_norm(x @ m.W, None, None, training=True).tanh() @ m.V,
        BETWEEN,
    ),
    "batch norm": (
        lambda m, x: F.batch_norm(x @ m.W, None, None, m.s, m.b, training=True).tanh() @ m.V,
        "batch_norm is called with training=True",
    ),
    "at the end": (lambda m, x: (f := x @ m.V) - f.mean(0), "Data mix after matmul .'V'."),
    "softmax over data": (lambda m, x: (x @ m.V).softmax(0), "Data mix after matmul .'V'."),
    "running sum": (lambda m, x: (x @ m.W).cumsum(0).tanh() @ m.V, BETWEEN),
    "running sum of inputs": (lambda m, x: x.cumsum(0) @ m.V, REST),
    "capacity": (limited, REST),
    "the first one": (lambda m, x: ((h := x @ m.W) + h[:1].detach()).tanh() @ m.V, REST),
    "the last one": (lambda m, x: ((h := x @ m.W) + h[-1:].detach()).tanh() @ m.V, REST),
    "place in the batch": (lambda m, x: (x @ m.W * torch.arange(len(x)).unsqueeze(1)).tanh() @ m.V, REST),
    "size of the batch": (lambda m, x: (x @ m.W / len(x)).tanh() @ m.V, REST),
}


def mixing_model(compute: Compute) -> nn.Module:
    torch.manual_seed(0)
    params = {"W": normal(4, 4), "V": normal(4, 4), "E": normal(2, 4, 4), "s": normal(4), "b": normal(4)}
    return Function(compute, **params)


@pytest.mark.parametrize("num_data", [FEW, MANY])
@pytest.mark.parametrize("name", MIXING)
def test_models_that_mix_data(name: str, num_data: int) -> None:
    compute, message = MIXING[name]
    model, X = mixing_model(compute), normal(num_data, 4)
    risk = EmpiricalRisk(model, LOSS, (X, labels(num_data)))
    with pytest.raises(ModelError, match=message):
        KFAC(risk, uncovered="skip")
    with pytest.raises(ModelError, match=message):
        inspect(model, X)
    if name != "batch norm":  # which has a rule that knows
        assert KFAC(risk, uncovered="skip", audit=False).audit is None


def test_the_last_data_of_a_long_batch() -> None:
    """What happens to data beyond those that an audit looks at is compared with what happens to them alone."""
    model = mixing_model(limited_by_batch)
    X, y = normal(MANY, 4), labels(MANY)
    with pytest.raises(ModelError, match=REST):
        KFAC(EmpiricalRisk(model, LOSS, (X, y)), uncovered="skip")
    KFAC(EmpiricalRisk(model, LOSS, (X[:FEW], y[:FEW])), uncovered="skip")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_mixing_in_other_precisions(dtype: torch.dtype) -> None:
    X = normal(FEW, 4).to(dtype)
    for compute in (MIXING["centered"][0], MIXING["contrast"][0], MIXING["centered before any parameter"][0]):
        with pytest.raises(ModelError, match=REST):
            KFAC(EmpiricalRisk(mixing_model(compute).to(dtype), LOSS, (X, labels(FEW))), uncovered="skip")


class Encoder(nn.Module):
    """Attention of tokens to each other, and a prediction from one of them, or from all."""

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
    """Positions are an input without batch axis."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions, self.head = nn.Embedding(7, 4), nn.Embedding(12, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        result: Tensor = self.head((self.tokens(x) + self.positions(positions)).tanh()).mean(1)
        return result


class Several(nn.Module):
    """Takes all kinds of arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, scale: Tensor, times: int, *, mask: Tensor, name: str = "") -> Tensor:
        result: Tensor = self.layer(x * scale * times) * (2.0 if name else 1.0) + mask
        return result


def sequences(num_data: int, length: int = 5) -> Tensor:
    """Return tokens; the last ones are padding, as many as the place in the batch says."""
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
    """They change gradients in training, and not what a use is."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    data = (normal(MANY, 4), labels(MANY))
    plain = KFAC(EmpiricalRisk(model, LOSS, data))
    hooks = [p.register_hook(change) for p in model.parameters()]
    model.requires_grad_(True)  # another model, as far as audits are concerned
    model.add_module("identity", nn.Identity())
    hooked = KFAC(EmpiricalRisk(model, LOSS, data))
    assert hooked.audit is not plain.audit
    close(hooked.to_dense(), plain.to_dense())
    assert all(len(p._backward_hooks or {}) == 1 for p in model.parameters())
    for hook in hooks:
        hook.remove()


def test_parameters_that_are_not_used() -> None:
    """That is a question of coverage, not an error of the audit."""
    model = Function(lambda m, x: x @ m.W, W=normal(4, 3), unused=normal(2))
    K = KFAC(EmpiricalRisk(model, LOSS, (normal(5, 4), labels(5))), uncovered="skip")
    assert K.audit is not None
    assert list(K.audit.gradients) == ["W"]
