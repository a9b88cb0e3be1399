"""Plans outlive batches: their keys, their lifetimes, and tensors that they must not hold."""

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from kfs import EKFAC, GGN, KFAC, EmpiricalRisk, optim
from kfs.errors import ModelError
from kfs.factors import capture as capture_module
from kfs.factors import compute
from kfs.factors.accumulate import FactorSums
from kfs.factors.capture import forward
from kfs.factors.rules import RULES, new_trace
from kfs.factors.rules.fallback import without_rule
from kfs.factors.settings import Settings
from kfs.factors.trace import Trace
from tests.factors.models import Function
from tests.operators.contract import close


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def exact_for_one_datum(model: nn.Module, x: Tensor, outputs: int) -> None:
    """KFAC of one example and one position is the exact matrix, block by block."""
    risk = EmpiricalRisk(model, nn.MSELoss(), (x, normal(1, outputs)))
    K = KFAC(risk)
    for block in K.blocks.values():
        names = list(block.layout.params)
        close(K.submatrix(names).to_dense(), GGN(risk).submatrix(names).to_dense())


class Asked:
    """Counts how often rules are asked."""

    def __init__(self) -> None:
        self.times = 0
        self.rules = {func: self.counting(rule) for func, rule in RULES.items()}

    def counting(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.times += 1
            return rule(*args, **kwargs)

        return counted


def run(trace: Trace, sums: FactorSums, model: nn.Module, X: Tensor) -> None:
    """Make one captured forward pass and a backward pass."""
    risk = EmpiricalRisk(model, nn.MSELoss(), (X, normal(len(X), 2)))
    (batch,) = risk.batches()
    with torch.enable_grad():
        f, one = forward(risk, batch, trace, [sums])
        one.send_back(f, [torch.ones_like(f).unsqueeze(0)])


def test_rules_are_asked_once_for_every_shape_and_storage() -> None:
    model, asked, sums = mlp(), Asked(), FactorSums(Settings())
    trace = Trace(dict(model.named_parameters()), rules=asked.rules, fallback=without_rule)
    weight = model.get_parameter("0.weight")
    for data, times in ((5, 2), (5, 2), (4, 4), (5, 4), (4, 4)):
        run(trace, sums, model, normal(data, 3))
        assert asked.times == times
    with torch.no_grad():
        weight.add_(1.0)  # other values in the same memory
    run(trace, sums, model, normal(5, 3))
    assert asked.times == 4
    weight.data = weight.data.clone()
    run(trace, sums, model, normal(5, 3))
    assert asked.times == 6
    with torch.autocast("cpu", torch.bfloat16):
        run(trace, sums, model, normal(5, 3))
    assert asked.times == 8


def test_ever_new_shapes_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_module, "MOST_PLANS", 10)
    model, sums = mlp(), FactorSums(Settings())
    trace = new_trace(dict(model.named_parameters()))
    for data in range(1, 30):
        run(trace, sums, model, normal(data, 3))
        assert len(trace.plans) <= 12
        assert len(sums.adders) <= 12


def test_derived_parameters_need_no_plan_for_every_batch() -> None:
    model = Function(lambda m, x: (x * torch.sigmoid(m.p)) @ m.W, p=normal(3), W=normal(3, 2))
    sums, trace = FactorSums(Settings()), new_trace(dict(model.named_parameters()))
    for _ in range(5):
        run(trace, sums, model, normal(4, 3))
    assert len(sums.adders) == 2


def test_plans_keep_no_activation_alive() -> None:
    seen: list[weakref.ref[Tensor]] = []

    def compute(m: Any, x: Tensor) -> Tensor:
        h = F.layer_norm(x @ m.W, (4,), m.s, m.b).tanh()
        seen.append(weakref.ref(h))
        return F.linear(h + m.p, m.V)

    model = Function(compute, W=normal(3, 4), s=normal(4), b=normal(4), p=normal(1, 4), V=normal(2, 4))
    sums, trace = FactorSums(Settings()), new_trace(dict(model.named_parameters()))
    for _ in range(2):
        run(trace, sums, model, normal(4, 3))
    gc.collect()
    assert trace.plans
    assert all(reference() is None for reference in seen)


def test_two_equations_with_the_same_shapes() -> None:
    """Operands are in a list; only the equation differs."""

    def compute(m: Any, x: Tensor) -> Tensor:
        x = x.reshape(-1, 3, 1)
        h = torch.einsum("bij,ik->bkj", [x, m.W]).tanh()
        return torch.einsum("bij,ki->bkj", [h, m.V]).flatten(1)

    exact_for_one_datum(Function(compute, W=normal(3, 3), V=normal(3, 3)), normal(1, 3), 3)

    def twice(m: Any, x: Tensor, in_list: bool) -> Tensor:
        operands = (lambda *t: [t]) if in_list else (lambda *t: t)
        h = torch.einsum("bij,jk->bik", *operands(x, m.W)).tanh()
        return torch.einsum("bij,ik->bjk", *operands(h, m.W)).flatten(1)

    W, X, y = normal(3, 3), normal(4, 3, 3), normal(4, 9)
    one, other = (
        KFAC(EmpiricalRisk(Function(lambda m, x, i=i: twice(m, x, i), W=W.clone()), nn.MSELoss(), (X, y)))
        for i in (False, True)
    )
    close(one.to_dense(), other.to_dense())


def test_two_results_of_one_function_of_a_parameter() -> None:
    def compute(m: Any, x: Tensor) -> Tensor:
        h = x * m.p.mean(0)
        out: Tensor = (h.tanh() * m.p.mean(0, keepdim=True)[0]) @ m.W
        return out

    model = Function(compute, p=normal(4, 3), W=normal(3, 2))
    X, y = normal(1, 3), normal(1, 2)
    risk = EmpiricalRisk(model, nn.MSELoss(), (X, y))
    # EKFAC's trace is exact, for every parameter and any number of uses.
    for name in ("p", "W"):
        found, exact = (operator.submatrix([name]).to_dense().trace() for operator in (EKFAC(risk), GGN(risk)))
        close(found, exact)
    lengths = [(normal(2, 3), normal(2, 2)), (normal(2, 5), normal(2, 2))]
    padded = Function(lambda m, x: (x * F.pad(m.p, (0, x.shape[1] - 3)))[:, :3] @ m.W, p=normal(3), W=normal(3, 2))
    assert KFAC(EmpiricalRisk(padded, nn.MSELoss(), lengths)).num_data == 4


def test_products_of_constants_with_a_bias_of_its_own() -> None:
    """A bias that does not join its weight is tracked, too, if there are no data before it."""
    constant, params, data = normal(4, 3), {"W": normal(2, 3), "b": normal(2)}, (normal(5, 2), normal(5, 2))
    model = Function(lambda m, x: x + F.linear(constant, m.W, m.b).mean(0), **params)
    copies = Function(lambda m, x: x + F.linear(constant + 0 * x[:, :1, None], m.W, m.b).mean(1), **params)
    risk, other = (EmpiricalRisk(one, nn.MSELoss(), data) for one in (model, copies))
    for joint in (True, False):
        found, expected = (KFAC(one, joint_bias=joint) for one in (risk, other))
        assert list(found.blocks) == (["W"] if joint else ["W", "b"])
        close(found.to_dense(), expected.to_dense())


def test_functions_of_a_parameter_that_is_not_laid_out_by_rows() -> None:
    model = Function(lambda m, x: x * torch.sigmoid(m.p).sum(0), p=normal(3, 4).T)
    with pytest.raises(ModelError, match="sigmoid"):
        KFAC(EmpiricalRisk(model, nn.MSELoss(), (normal(5, 3), normal(5, 3))))


@pytest.mark.parametrize("fisher", ["type-2", "ggn"])
def test_columns_are_computed_together_or_a_few_at_a_time(fisher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, X, y = mlp(), normal(3, 3), torch.randint(2, (3,))
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), (X, y))
    expected = KFAC(risk, fisher).to_dense()
    monkeypatch.setattr(compute, "_NUMBERS", 1)
    for at_once in (1, 2, 3):
        close(KFAC(risk, fisher, columns_at_once=at_once).to_dense(), expected)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_dropout_between_recurrent_layers_is_noticed_in_every_mode(kind: Any) -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = kind(3, 4, num_layers=2, dropout=0.5, batch_first=True)
            self.outer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.outer(self.inner(x)[0].mean(1))
            return out

    model, loss = Network(), nn.CrossEntropyLoss()
    optimizer = optim.KFAC(model, loss, factors_every=1)
    x, y = torch.randn(8, 5, 3), torch.randint(3, (8,))
    loss(model.eval()(x), y).backward()
    optimizer.step()
    with pytest.raises(ModelError, match="uses dropout"):
        model.train()(x)


def test_a_model_that_changes_its_parameters_in_a_sweep() -> None:
    """The risk's own parameters are used for all batches, even if a layer of the model is replaced in between."""
    model = mlp()
    data = [(normal(4, 3), normal(4, 2)) for _ in range(3)]

    class Swapping:
        def __iter__(self) -> Any:
            for place, batch in enumerate(data):
                if place == 1:
                    model[2] = nn.Linear(4, 2).double()
                yield batch

    risk = EmpiricalRisk(model, nn.MSELoss(), Swapping())
    expected = KFAC(EmpiricalRisk(mlp_like(model), nn.MSELoss(), data))
    close(KFAC(risk).blocks["2"].B, expected.blocks["2"].B)


def mlp_like(model: nn.Sequential) -> nn.Sequential:
    copy = mlp()
    copy.load_state_dict(model.state_dict())
    return copy


class Custom(torch.autograd.Function):
    """A product that is hidden from modes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return torch.mm(x, w)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g @ w.T, x.T @ g


@pytest.mark.parametrize("plain_first", [False, True])
def test_hidden_uses_in_later_batches(plain_first: bool) -> None:
    """The number of operations and uses is that of an earlier batch, but one use is hidden."""

    def compute(m: Any, x: Tensor) -> Tensor:
        if float(x.detach().sum()) > 0:
            return torch.mm(((x @ m.A) @ m.B).tanh(), m.C).neg()
        hidden: Tensor = Custom.apply((((x @ m.A) @ m.A) @ m.B).tanh(), m.C)  # type: ignore[no-untyped-call]
        return hidden

    model = Function(compute, A=normal(4, 4), B=normal(4, 4), C=normal(4, 4))
    X, y = torch.rand(4, 4, dtype=torch.float64), torch.randint(3, (4,))
    data = [(X, y), (-X, y)] if plain_first else [(-X, y), (X, y)]
    with pytest.raises(ModelError, match="Custom"):
        KFAC(EmpiricalRisk(model, nn.CrossEntropyLoss(), data))


@pytest.mark.parametrize("convert", [Tensor.type_as, Tensor.to])
def test_parameters_that_give_a_type_only(convert: Any) -> None:
    """`x.to(weight)` does not use the weight; `weight.to(x)` is a copy of it."""
    plain = Function(lambda m, x: (x @ m.W).tanh() @ m.V, W=normal(3, 4), V=normal(4, 2))
    typed = Function(
        lambda m, x: convert((x @ m.W).tanh(), m.V) @ convert(m.V, x.float()).double(),
        W=plain.get_parameter("W").detach(),
        V=plain.get_parameter("V").detach(),
    )
    X, y = normal(5, 3), normal(5, 2)
    one, other = (KFAC(EmpiricalRisk(model, nn.MSELoss(), (X, y))).to_dense() for model in (plain, typed))
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)  # weights were rounded to float32


def test_operations_while_torch_func_runs() -> None:
    """Gradients are hidden there, including those of operations that are independent of the transformation."""

    def inside(m: Any, x: Tensor) -> Tensor:
        seen: list[Tensor] = []

        def function(s: Tensor) -> Tensor:
            seen.append(F.linear(x, m.W))
            return s

        torch.func.vmap(function)(torch.ones(2))
        out: Tensor = seen[0].tanh() @ m.V
        return out

    risk = EmpiricalRisk(Function(inside, W=normal(4, 3), V=normal(4, 2)), nn.MSELoss(), (normal(5, 3), normal(5, 2)))
    with pytest.raises(ModelError, match=r"'W': it is used by linear inside of torch\.func"):
        KFAC(risk)
    assert list(KFAC(risk, uncovered="skip").blocks) == ["V"]


def test_functions_of_a_parameter_inside_of_a_checkpoint() -> None:
    """A parameter is expanded before it is tapped, which the rerun of a checkpoint does not notice."""

    def compute(call: Any, m: Any, x: Tensor) -> Tensor:
        h = call(lambda h: h * torch.sigmoid(m.p), x @ m.W)
        out: Tensor = h.tanh() @ m.V
        return out

    parameters = {"W": normal(3, 4), "p": normal(4), "V": normal(4, 2)}
    data = normal(5, 3), normal(5, 2)
    saved, rerun = (
        KFAC(EmpiricalRisk(Function(partial(compute, call), **parameters), nn.MSELoss(), data))
        for call in (lambda f, h: f(h), partial(checkpoint, use_reentrant=False))
    )
    assert list(rerun.blocks) == ["W", "p", "V"]
    for name, block in saved.blocks.items():
        torch.testing.assert_close(rerun.blocks[name].A, block.A)
        torch.testing.assert_close(rerun.blocks[name].B, block.B)


def test_plans_die_with_the_strides_of_a_parameter() -> None:
    model, asked, sums = (
        nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 2)).double(),
        Asked(),
        FactorSums(Settings()),
    )
    trace = Trace(dict(model.named_parameters()), rules=asked.rules, fallback=without_rule)
    weight = model.get_parameter("0.weight")
    for times in (2, 2):
        run(trace, sums, model, normal(5, 3))
        assert asked.times == times
    weight.data = weight.data.T  # the same storage, address and shape
    run(trace, sums, model, normal(5, 3))
    assert asked.times == 4


def test_models_that_use_torch_func() -> None:
    """Inside `torch.func`, tensors are not parameters of the risk."""

    def cosine(m: Any, x: Tensor) -> Tensor:
        z, pull_back, *_ = torch.func.vjp(torch.sin, x @ m.W)
        result: Tensor = pull_back(torch.ones_like(z))[0]
        return result

    risk = EmpiricalRisk(Function(cosine, W=normal(4, 3)), nn.CrossEntropyLoss(), (normal(5, 4), torch.arange(5) % 3))
    close(EKFAC(risk).trace(), GGN(risk).to_dense().trace())
