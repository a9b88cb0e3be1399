"""Derivatives in one forward pass equal nested autograd; KFAC sees all uses; errors name the module."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kfs
from kfs.errors import DtypeError, ModelError, ShapeError
from kfs.losses import HalfSquaredError
from kfs.pinn import taylor
from tests.pinn.networks import Residual, Sine, along, mlp, nested, torch64

ACTIVATIONS = [
    nn.Tanh(),
    nn.Sigmoid(),
    nn.SiLU(),
    nn.GELU(),
    nn.GELU("tanh"),
    nn.Softplus(2.0),
    nn.Mish(),
    nn.LogSigmoid(),
    Sine(),
]
EXACT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}
V = torch.tensor([0.3, -0.5, 0.8], **torch64)


def network(activation: nn.Module) -> Residual:
    torch.manual_seed(0)
    return Residual(activation).double()


def points(count: int = 4, d: int = 3) -> Tensor:
    return torch.rand(count, d, generator=torch.Generator().manual_seed(1), **torch64)


def coefficients(kind: str) -> Tensor | str:
    C = torch.randn(4, 3, 3, generator=torch.Generator().manual_seed(2), **torch64)
    C = C + C.mT
    diagonal = torch.diag(torch.tensor([1.0, 0.0, -2.0], **torch64))
    scaled = torch.arange(1.0, 5.0, **torch64)[:, None, None] * diagonal
    by_name = {"matrix": C[0], "by point": C, "diagonal": diagonal, "diagonal by point": scaled}
    return "laplacian" if kind == "laplacian" else by_name[kind]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: f"{type(a).__name__}-{a.extra_repr()}")
def test_derivatives_equal_nested_autograd(activation: nn.Module) -> None:
    net, x = network(activation), points()
    value, gradient, hessian = nested(net, x)
    directional = along(net, x, V, 4)
    for kind in ("laplacian", "matrix", "by point", "diagonal", "diagonal by point"):
        C = coefficients(kind)
        u = taylor(net, x, second=C, direction=V, order=4)
        matrix = torch.eye(3, **torch64) if isinstance(C, str) else C
        second = (matrix.expand(4, 3, 3).unsqueeze(-1) * hessian).sum((1, 2))
        assert u.second is not None
        assert u.directional is not None
        for found, expected in (
            (u.value, value),
            (u.gradient, gradient),
            (u.second, second),
            (u.directional, directional),
            (u.along(3), directional[:, 2]),
        ):
            torch.testing.assert_close(found, expected, **EXACT)
    torch.testing.assert_close(taylor(net, x).laplacian, hessian.diagonal(dim1=1, dim2=2).sum(-1), **EXACT)
    first = taylor(net, x, second=None)
    torch.testing.assert_close(first.gradient, gradient, **EXACT)
    assert first.second is None


def test_gradients_with_respect_to_parameters_equal_nested_autograd() -> None:
    net, x = network(nn.Tanh()), points()
    params = list(net.parameters())
    u = taylor(net, x, direction=V, order=3)
    _, gradient, hessian = nested(net, x)
    weights = torch.arange(1.0, 9.0, **torch64).view(4, 2)
    mine = (weights * u.laplacian).sum() + u.gradient[:, 1].square().sum() + u.along(3).sum()
    third = along(net, x, V, 3)[:, 2].sum()
    theirs = (weights * hessian.diagonal(dim1=1, dim2=2).sum(-1)).sum() + gradient[:, 1].square().sum() + third
    for found, expected in zip(torch.autograd.grad(mine, params), torch.autograd.grad(theirs, params), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)


def test_the_chain_rule_without_its_second_term_is_wrong() -> None:
    net, x = mlp((3, 5, 1)), points()
    layer, last = net[0], net[2]
    assert isinstance(layer, nn.Linear)
    assert isinstance(last, nn.Linear)
    z = layer(x).detach()
    slope, bend = 1 - z.tanh() ** 2, -2 * z.tanh() * (1 - z.tanh() ** 2)
    squares = layer.weight.square().sum(1)
    by_hand = (bend * squares) @ last.weight.T
    torch.testing.assert_close(taylor(net, x).laplacian, by_hand, **EXACT)
    without_squares = (slope * 0 + bend) @ last.weight.T
    assert not torch.allclose(taylor(net, x).laplacian, without_squares, rtol=1e-3)


def test_a_linear_network_has_the_same_derivatives_everywhere() -> None:
    net, x = mlp((3, 2)), points()
    u = taylor(net, x, direction=V, order=2)
    assert u.gradient.shape == (4, 3, 2)
    torch.testing.assert_close(u.gradient[2], net[0].weight.T)
    assert u.directional is not None
    assert u.directional.shape == (4, 2, 2)
    assert not u.laplacian.any()


def test_higher_orders_of_closed_forms() -> None:
    x = torch.linspace(0.1, 0.9, 4, **torch64).unsqueeze(1)
    for function, order in ((torch.sin, 7), (torch.exp, 6), (torch.sigmoid, 6), (torch.tanh, 6), (torch.sqrt, 3)):
        expected = along(function, x, torch.ones(1, **torch64), order)
        u = taylor(function, x, direction=[1.0], order=order)
        torch.testing.assert_close(u.directional, expected, rtol=1e-10, atol=1e-10)
    cubic = taylor(lambda x: (2 * x) ** 3 / x, x, direction=[1.0], order=3)
    torch.testing.assert_close(cubic.along(2), torch.full_like(x, 16.0))
    torch.testing.assert_close(cubic.along(3), torch.zeros_like(x), rtol=0, atol=1e-9)


class Laplacian(nn.Module):
    """The value, a first derivative and the Laplacian, as one prediction."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        u = taylor(self.net, x)
        return torch.cat([u.value, u.gradient[:, 0], u.laplacian], 1)


@pytest.mark.parametrize("activation", [nn.Tanh, nn.Mish, Sine])
def test_kfac_has_the_factors_of_the_paper(activation: Callable[[], nn.Module]) -> None:
    """By hand: outer products of all that multiplies a weight, with a one for the bias of the value only."""
    net, x = mlp((2, 4, 3, 1), activation), points(6, 2)
    model = Laplacian(net)
    risk = kfs.EmpiricalRisk(model, HalfSquaredError(), (x, torch.zeros(6, 3, **torch64)))
    # Without an audit, derivatives that no prediction depends on count, too.
    K = kfs.KFAC(risk, fisher="ggn", audit=False)
    inputs, outputs = [], []

    def note(_: nn.Module, args: Any, out: Any) -> None:
        inputs.append(torch.cat([args[0].value, args[0].rest.expand(6, -1, -1)], 1).detach())
        out.rest = out.rest.expand(6, -1, -1).clone()
        out.value.retain_grad(), out.rest.retain_grad()
        outputs.append(out)

    hooks = [layer.register_forward_hook(note) for layer in net if isinstance(layer, nn.Linear)]
    prediction = model(x)
    for hook in hooks:
        hook.remove()
    B = [torch.zeros_like(block.B) for block in K.blocks.values()]
    for o in range(3):
        prediction[:, o].sum().backward(retain_graph=True)
        for one, out in zip(B, outputs, strict=True):
            g = torch.cat([out.value.grad, out.rest.grad], 1).flatten(0, 1)
            one.add_(g.T @ g, alpha=1 / 24)
            out.value.grad = out.rest.grad = None
    ones, value_only = torch.ones(6, 4, 1, **torch64), torch.zeros(6, 4, 1, **torch64)
    value_only[:, 0] = 1
    for block, Z, expected in zip(K.blocks.values(), inputs, B, strict=True):
        with_bias = torch.cat([Z, value_only], 2).flatten(0, 1)
        torch.testing.assert_close(block.A, with_bias.T @ with_bias / 6, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(block.B, expected, rtol=1e-12, atol=1e-12)
        wrong = torch.cat([Z, ones], 2).flatten(0, 1)  # a bias for derivatives, too
        assert not torch.allclose(block.A, wrong.T @ wrong / 6, rtol=1e-3)
    model.zero_grad()
    assert kfs.inspect(model, x) is not None
    assert list(kfs.KFAC(risk, fisher="ggn").blocks) == list(K.blocks)


def test_products_with_operators_are_exact() -> None:
    net, x = mlp((2, 4, 1)), points(6, 2)
    model = Laplacian(net)
    risk = kfs.EmpiricalRisk(model, HalfSquaredError(), (x, torch.zeros(6, 3, **torch64)))
    leaves = dict(model.named_parameters())
    J = torch.autograd.functional.jacobian(
        lambda *p: torch.func.functional_call(model, dict(zip(leaves, p, strict=True)), (x,)),
        tuple(leaves.values()),
    )
    dense = torch.cat([j.flatten(2).flatten(0, 1) for j in J], 1)
    torch.testing.assert_close(kfs.GGN(risk).to_dense(), dense.T @ dense / 6)
    torch.testing.assert_close(kfs.Jacobian(risk).to_dense(), dense)
    (batch,) = kfs.per_datum(risk)
    mean = {name: g.mean(0) for name, g in batch.tensors().items()}
    for name, g in risk.gradient().items():
        torch.testing.assert_close(mean[name], g)


class Rough(nn.Module):
    """A network with one module that is not supported, inside of another one."""

    def __init__(self, bad: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(3, 4), nn.Sequential(bad)])

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


class Call(nn.Module):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


@pytest.mark.parametrize("bad", [nn.ReLU(), nn.ELU(), nn.Softsign(), nn.LeakyReLU(), nn.PReLU(dtype=torch.float64)])
def test_functions_that_are_not_smooth_are_refused(bad: nn.Module) -> None:
    net = Rough(bad).double()
    with pytest.raises(ModelError, match=rf"Module 'blocks\.1\.0' \({type(bad).__name__}\).*second derivative.*tanh"):
        taylor(net, points())


REFUSED: dict[str, tuple[nn.Module, str]] = {
    "norm": (nn.LayerNorm(4), "layer_norm"),
    "softmax": (nn.Softmax(1), "softmax"),
    "in place": (nn.SiLU(inplace=True), "in place"),
    "dropout": (nn.Dropout(), "training mode"),
    "detach": (Call(lambda x: x.detach()), "detach"),
    "in-place method": (Call(lambda x: x.tanh_()), "in place"),
    "in-place operator": (Call(lambda x: x.__iadd__(1)), "iadd in place"),
    "in-place quotient": (Call(lambda x: x.__itruediv__(2)), "in place"),
    "assignment": (Call(lambda x: x.__setitem__(0, 1)), "in place"),
    "comparison": (Call(lambda x: x == 0), "eq"),
    "index": (Call(lambda x: x[:, 0]), "index"),
    "rows": (Call(lambda x: x[:1, :]), "index"),
    "sum": (Call(lambda x: x.sum(1)), "keepdim"),
    "sum of points": (Call(lambda x: x.sum(0, keepdim=True)), "features"),
    "cat of points": (Call(lambda x: torch.cat([x, x])), "features"),
    "split of points": (Call(lambda x: x.split(1)), "features"),
    "power": (Call(lambda x: x**x), "powers"),
    "gram": (Call(lambda x: x @ x), "matrix products"),
    "three axes": (Call(lambda x: x + torch.zeros(1, 4, 4)), "shape"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_operations_are_refused_by_name(name: str) -> None:
    bad, message = REFUSED[name]
    with pytest.raises(ModelError, match=rf"Module 'blocks\.1\.0' \({type(bad).__name__}\).*{message}"):
        taylor(Rough(bad).double(), points())


def test_other_bad_input_is_refused() -> None:
    net, x = mlp((3, 4, 1)), points()
    with pytest.raises(ShapeError, match=r"shape \[4\]"):
        taylor(net, x[:, 0])
    with pytest.raises(ShapeError, match=r"shape \[0, 3\]"):
        taylor(net, x[:0])
    with pytest.raises(DtypeError, match="int64"):
        taylor(net, x.long())
    with pytest.raises(DtypeError, match="list"):
        taylor(net, [1.0])  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match=r"second is \[2, 2\]"):
        taylor(net, x, second=torch.eye(2))
    with pytest.raises(ShapeError, match="second is 'hessian'"):
        taylor(net, x, second="hessian")
    with pytest.raises(ModelError, match="not symmetric"):
        taylor(net, x, second=torch.ones(3, 3).triu())
    with pytest.raises(ModelError, match="require gradients"):
        taylor(net, x, second=torch.eye(3, requires_grad=True))
    with pytest.raises(ShapeError, match="direction"):
        taylor(net, x, direction=[1.0])
    with pytest.raises(ModelError, match="order is 0"):
        taylor(net, x, direction=V, order=0)
    with pytest.raises(ModelError, match="first derivatives only, not the Laplacian"):
        _ = taylor(net, x, second=None).laplacian
    with pytest.raises(ModelError, match="another second-order operator"):
        _ = taylor(net, x, second=torch.eye(3)).laplacian
    with pytest.raises(ModelError, match=r"not order 3.*order=3"):
        taylor(net, x, direction=V).along(3)
    with pytest.raises(ModelError, match=r"0 derivatives.*direction=v"):
        taylor(net, x).along(1)
    with pytest.raises(ModelError, match="returned a Tensor"):
        taylor(lambda _: x, x)


def test_nothing_else_changes() -> None:
    """Hooks run, gradients and values stay, and the model is usable after an error."""
    net, x = mlp((3, 4, 1)), points()
    calls = []
    net[0].register_forward_hook(lambda *_: calls.append(1))
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(ModelError):
        taylor(nn.Sequential(net, nn.ReLU()), x)
    taylor(net, x).laplacian.sum()
    assert len(calls) == 2
    assert all(p.grad is None for p in net.parameters())
    assert all(torch.equal(before[name], t) for name, t in net.state_dict().items())
    assert x.grad is None
    assert net(x).shape == (4, 1)
    evaluated = nn.Sequential(net, nn.Dropout(), nn.Identity()).eval()
    torch.testing.assert_close(taylor(evaluated, x).laplacian, taylor(net, x).laplacian)


def test_an_activation_outside_of_a_pass() -> None:
    """An activation that a hook keeps still behaves like a tensor, except for attributes that tensors lack."""
    kept: list[Any] = []

    def keeping(x: Any) -> Any:
        kept.append(x)
        return x.tanh()

    taylor(keeping, points())
    (x,) = kept
    assert torch.tanh(x).shape == (4, 3)
    assert (x.ndim, x.dim(), x.size(1), x.dtype) == (2, 2, 3, torch.float64)
    with pytest.raises(AttributeError, match="nothing"):
        _ = x.nothing
