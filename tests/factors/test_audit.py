"""Errors of the audit and their messages: models with a hidden use of a parameter, and models that mix examples.

`test_audit_accepts` has models that the audit must accept; `test_audits` tests when it runs, and that it leaves no
state behind.
"""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from kfs import optim, per_datum
from kfs.errors import KfsWarning, ModelError
from kfs.factors import EKFAC, KFAC, inspect
from kfs.factors.audit import audits
from kfs.factors.audit.audit import FEW
from kfs.operators import GGN
from kfs.problem.risk import EmpiricalRisk
from kfs.runtime import sync
from tests.factors.arrangements import normal
from tests.factors.models import Function
from tests.operators.contract import close

LOSS = nn.CrossEntropyLoss()
MANY = 2 * FEW + 1  # more examples than an audit uses
Compute = Callable[[Any, Tensor], Tensor]


def labels(num_data: int, classes: int = 3) -> Tensor:
    return torch.arange(num_data) % classes


class Product(torch.autograd.Function):
    """A product that no mode sees, computed in the precision of its first factor."""

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


# A second use of a weight that has a use with a rule: the operation, and the words that an error must contain.
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
    """The error names parameter and operation; other parameters are covered as usual, and the diagonal is exact."""
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
    """A hidden use of the same input contributes half of the gradient."""
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
        for V in (normal(3, 4), None):  # is there another use, which is not hidden?
            params = {"W": normal(3, 4)} if V is None else {"W": normal(4, 4), "V": V}
            model = Function(compute, **params)
            data = [(normal(num_data, length, 4), labels(num_data)) for length in (2, 5)]
            assert list(KFAC(EmpiricalRisk(model, LOSS, data[:1])).blocks) == list(params)
            with pytest.raises(
                ModelError, match=r"'W': it is used by something that was not seen: .* depend on data\)"
            ):
                KFAC(EmpiricalRisk(model, LOSS, data))


def test_without_audit_hidden_uses_are_not_noticed() -> None:
    risk = EmpiricalRisk(hidden_model("scripted"), LOSS, (normal(5, 4), labels(5)))
    K = KFAC(risk, audit=False)
    assert list(K.blocks) == ["W", "V"]
    assert K.audit is None
    # A parameter whose uses are all hidden is not treated as unused: it is in the graph.
    model = Function(lambda m, x: scripted(x, m.W) + x @ m.V, W=normal(3, 4), V=normal(4, 3), unused=normal(2))
    risk = EmpiricalRisk(model, LOSS, (normal(5, 4), labels(5)))
    for compute in (KFAC, lambda *args, **named: list(per_datum(*args, **named))):
        with pytest.raises(ModelError, match=r"\('W': no operation with a rule used it, as far as .* on it\)"):
            compute(risk, audit=False)


@pytest.mark.parametrize("how", HIDDEN)
def test_an_optimizer_trains_what_has_hidden_uses_by_other_means(how: str) -> None:
    model, x, y = hidden_model(how), normal(5, 4), labels(5)
    optimizer = optim.KFAC(model, LOSS)
    LOSS(model(x), y).backward()
    with pytest.warns(Warning, match="'W'"):
        optimizer.step()
    assert list(optimizer.uncovered) == ["W"]


def neighbors(num_data: int) -> Tensor:
    """Return the normalized adjacency matrix of a ring."""
    return (torch.eye(num_data) + torch.eye(num_data).roll(1, 0)).double() / 2


def limited(m: Any, x: Tensor) -> Tensor:
    """Send examples to two experts, each of which accepts the first two."""
    best = (x[:, 0] > 10).long()  # all are sent to the first one
    out = torch.zeros_like(x)
    for expert in range(2):
        chosen = (best == expert).nonzero().squeeze(1)[:2]
        out[chosen] = x[chosen] @ m.E[expert]
    result: Tensor = (out + x) @ m.V
    return result


def limited_by_batch(m: Any, x: Tensor) -> Tensor:
    """Scale the last examples of a batch differently if it is longer than the audited part."""
    return torch.cat([x[: FEW + 2] @ m.V, x[FEW + 2 :] @ m.V * 0.5])


BETWEEN = "Examples mix after matmul .'W'., and before matmul .'V'."
REST = "depends on the rest of its batch"
# Ways in which examples influence each other, and the words that the error must contain.
MIXING: dict[str, tuple[Compute, str]] = {
    "centered": (lambda m, x: ((h := x @ m.W) - h.mean(0)).tanh() @ m.V, BETWEEN),
    "centered before any parameter": (lambda m, x: (x - x.mean(0)) @ m.V, REST),
    "detached statistics": (lambda m, x: ((h := x @ m.W) - h.mean(0).detach()).tanh() @ m.V, REST),
    "detached norm": (lambda m, x: ((h := x @ m.W) / h.detach().norm()).tanh() @ m.V, REST),
    "contrast": (lambda m, x: F.normalize(x @ m.W, dim=1) @ F.normalize(x @ m.V, dim=1).T, "Examples mix after matmul"),
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
    "at the end": (lambda m, x: (f := x @ m.V) - f.mean(0), "Examples mix after matmul .'V'."),
    "softmax over data": (lambda m, x: (x @ m.V).softmax(0), "Examples mix after matmul .'V'."),
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
    if name != "batch norm":  # whose rule knows it
        assert KFAC(risk, uncovered="skip", audit=False).audit is None


def test_the_last_data_of_a_long_batch() -> None:
    """Examples beyond the audited ones are computed alone, and the results are compared."""
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


@pytest.mark.parametrize("vocabulary", [3, FEW, 10])
@pytest.mark.parametrize("num_data", [FEW, 16])
def test_tokens_that_look_like_indices_of_data(num_data: int, vocabulary: int) -> None:
    """The audit still computes some examples alone."""

    class Centered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.head = nn.Embedding(vocabulary, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            h = (self.tokens(x) * mask.unsqueeze(2)).sum(1)
            result: Tensor = self.head((h - h.mean(0).detach()).tanh())
            return result

    x = (torch.randint(vocabulary, (num_data, 5)), torch.ones(num_data, 5))
    with pytest.raises(ModelError, match=REST):
        KFAC(EmpiricalRisk(Centered().double(), LOSS, [(x, labels(num_data))]))


def branches(m: Any, x: Tensor) -> Tensor:
    product = scripted if x.sum() > 0 else F.linear
    return product(x, m.W)


def two_batches(first: Tensor, second: Tensor) -> EmpiricalRisk:
    y = torch.arange(len(first)) % 3
    return EmpiricalRisk(Function(branches, W=normal(3, 4)), LOSS, [(first, y), (second, y)])


def test_batches_that_take_another_way() -> None:
    """A use that is hidden only in some batches is found there, whichever batch comes first."""
    x = torch.rand(6, 4, dtype=torch.float64)
    assert list(KFAC(two_batches(-x, -x)).blocks) == ["W"]
    for first, second in ((x, -x), (-x, x)):
        with pytest.raises(ModelError, match=r"'W'.*not seen"):
            KFAC(two_batches(first, second))


def test_not_more_ways_than_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that takes a new route in every batch is audited only a limited number of times."""
    monkeypatch.setattr(audits, "_MOST_WAYS", 1)
    x = torch.rand(6, 4, dtype=torch.float64)
    KFAC(two_batches(-x, x))


class Counts(nn.Module):
    """Counts its calls in a list, which cannot be restored."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(3, 3), [0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += 1
        result: Tensor = self.linear(x) * (1 + 0.1 * self.calls[0])
        return result


def test_models_that_are_not_repeatable() -> None:
    X, y = torch.randn(6, 3), torch.arange(6) % 3
    with pytest.raises(ModelError, match="not the same function in every call"):
        KFAC(EmpiricalRisk(Counts(), LOSS, (X, y)))
    model = Counts()
    optimizer = optim.KFAC(model, LOSS, factors_every=1)
    with pytest.warns(KfsWarning, match="cannot be audited"):
        LOSS(model(X), y).backward()
    optimizer.step()
    assert optimizer.audit is None
    assert not optimizer.uncovered


class Varying(torch.autograd.Function):
    """The identity, whose gradients vary from run to run, as sums of a GPU in half precision do after many layers."""

    generator = torch.Generator()

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        """Copy."""
        return x.clone()

    @staticmethod
    def backward(_: Any, g: Tensor) -> Tensor:
        """Multiply by random numbers close to one."""
        return g * (1 + 0.05 * torch.randn(g.shape, generator=Varying.generator)).to(g)


class Net(nn.Module):
    """A network in bfloat16 with varying gradients; a share of the mean over the batch may be added."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.first, self.last, self.share = nn.Linear(6, 8), nn.Linear(8, 3), share
        self.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        """Map `[batch, 6]` to `[batch, 3]`."""
        h = torch.tanh(self.first(x))
        y: Tensor = self.last(Varying.apply(h + self.share * h.mean(0, keepdim=True)))  # type: ignore[no-untyped-call]
        return y


def test_gradients_that_vary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients in half precision that differ from run to run are not taken for a mixture; a mixture is still found."""
    torch.manual_seed(0)
    data = (torch.randn(8, 6).bfloat16(), torch.randint(3, (8,)))
    with pytest.raises(ModelError, match="Examples mix"):  # results of a CPU do not vary
        KFAC(EmpiricalRisk(Net(0.0), nn.CrossEntropyLoss(), data))
    monkeypatch.setattr(sync, "is_asynchronous", lambda _: True)
    for seed in range(5):
        Varying.generator.manual_seed(seed)
        KFAC(EmpiricalRisk(Net(0.0), nn.CrossEntropyLoss(), data))
        with pytest.raises(ModelError, match="Examples mix"):
            KFAC(EmpiricalRisk(Net(4.0), nn.CrossEntropyLoss(), data))


def test_a_refused_batch_leaves_no_memory() -> None:
    """The graph of a refused batch is freed, though the operations of its backward pass refer to it."""
    data = (torch.randn(8, 6).bfloat16(), torch.randint(3, (8,)))
    net = Net(4.0)

    def refuse() -> int:
        with pytest.raises(ModelError, match="Examples mix"):
            KFAC(EmpiricalRisk(net, nn.CrossEntropyLoss(), data))
        gc.collect()
        return sum(type(one) is Tensor for one in gc.get_objects())

    before = refuse()
    assert refuse() <= before
