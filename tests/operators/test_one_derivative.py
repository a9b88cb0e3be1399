"""One derivative in every mode: stopped gradients, hooks, operations with a wrong forward mode, and poles."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfs.errors import ModelError
from kfs.operators import GGN, Fisher, Hessian, Jacobian
from kfs.problem.risk import EmpiricalRisk
from tests.operators.contract import close
from tests.operators.test_traps import NoForwardMode


class Net(nn.Module):
    """Two layers, with a function in between that gets the first one; counts its calls."""

    def __init__(self, between: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)
        self.between = between
        self.calls = 0
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        f: Tensor = self.last(self.between(self.first(x)))
        return f


def no_grad(h: Tensor) -> Tensor:
    with torch.no_grad():
        weight = h.tanh()
        with torch.enable_grad():
            inner = h.sin()
    return h.tanh() * weight + inner


@torch.no_grad()
def decorated(h: Tensor) -> Tensor:
    return h.tanh()


def switched_off(h: Tensor) -> Tensor:
    torch.set_grad_enabled(False)
    weight = h.tanh()
    torch.set_grad_enabled(True)
    return h.tanh() * weight


def by_numpy(h: Tensor) -> Tensor:
    return h.tanh() * torch.from_numpy(h.detach().numpy()).tanh()


def hook(h: Tensor) -> Tensor:
    if h.requires_grad:
        h.register_hook(lambda g: 0.5 * g)
    return h.tanh()


def products(h: Tensor) -> Tensor:
    places = torch.tensor([0, 0, 1, 1, 2]).expand(len(h), 5)
    return torch.ones(len(h), 5, dtype=h.dtype).scatter_reduce(1, places, h, "prod")


def products_in_place(h: Tensor) -> Tensor:
    places = torch.tensor([0, 0, 1, 1, 2]).expand(len(h), 5)
    return (0 * h).scatter_reduce_(1, places, h, reduce="prod", include_self=False)


BETWEEN: list[Callable[[Tensor], Tensor]] = [
    no_grad,
    lambda h: h.tanh() * decorated(h),
    switched_off,
    by_numpy,
    hook,
    products,
    products_in_place,
]


def make_risk(between: Callable[[Tensor], Tensor], num_data: int = 6, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(0)
    X, y = torch.randn(num_data, 4, dtype=dtype), torch.randint(3, (num_data,))
    half = num_data // 2
    data = [(X[:half], y[:half]), (X[half:], y[half:])]
    return EmpiricalRisk(Net(between, dtype), nn.CrossEntropyLoss(), data, progress=False)


def matrices(risk: EmpiricalRisk) -> tuple[Tensor, Tensor]:
    """Return Jacobian and GGN, by one backward pass per prediction."""
    params = list(risk.params.values())
    model: Any = risk.model
    f = torch.cat([model(batch.x) for batch in risk.batches()])
    y = torch.cat([batch.y for batch in risk.batches()])
    rows = [torch.autograd.grad(entry, params, retain_graph=True) for entry in f.flatten()]
    J = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
    H = torch.func.hessian(lambda f: nn.functional.cross_entropy(f.reshape(-1, 3), y))(f.detach().flatten())
    return J, J.T @ H @ J


@pytest.mark.parametrize("between", BETWEEN)
def test_derivatives_are_those_of_the_backward_pass(between: Callable[[Tensor], Tensor]) -> None:
    risk = make_risk(between)
    J, G = matrices(risk)
    state = torch.get_rng_state()
    for chunk_size in (1, 16):
        close(Jacobian(risk, chunk_size=chunk_size).to_dense(), J)
        close(Jacobian(risk, chunk_size=chunk_size).T.to_dense(), J.T)
        for reuse in (False, True):
            close(GGN(risk, chunk_size=chunk_size, reuse=reuse).to_dense(), G)
    close(Fisher(risk).to_dense(), G)
    close(GGN(risk).submatrix("last.weight").to_dense(), GGN(risk).to_dense()[25:40, 25:40])
    H = Hessian(risk).to_dense()
    close(H, H.T)
    close(Hessian(risk, chunk_size=1).to_dense(), H)
    assert torch.is_grad_enabled()
    assert torch._C._is_fwd_grad_enabled()
    assert torch.equal(torch.get_rng_state(), state)


def test_a_stopped_gradient_is_a_constant_for_second_derivatives() -> None:
    stopped, detached = make_risk(lambda h: h.tanh() * decorated(h)), make_risk(lambda h: h.tanh() * h.tanh().detach())
    close(Hessian(stopped).to_dense(), Hessian(detached).to_dense())


def test_forward_mode_stays_on_after_an_error() -> None:
    @torch.no_grad()
    def broken(h: Tensor) -> Tensor:  # noqa: ARG001
        torch.set_grad_enabled(False)
        raise KeyError("broken")

    with pytest.raises(KeyError):
        GGN(make_risk(broken)) @ torch.ones(43, dtype=torch.float64)
    assert torch._C._is_fwd_grad_enabled()
    assert torch.is_grad_enabled()


class Lopsided(torch.autograd.Function):
    """A product whose backward pass has one factor too many."""

    @staticmethod
    def forward(ctx, a, b):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        a, b = ctx.saved_tensors
        return g * b, 2 * g * a


def test_second_derivatives_that_are_not_symmetric_are_refused() -> None:
    risk = make_risk(lambda h: Lopsided.apply(h.tanh(), h.roll(1, 1)))  # type: ignore[no-untyped-call]
    close(GGN(risk).to_dense(), matrices(risk)[1])
    H = Hessian(risk)
    for _ in range(2):  # it stays an error
        with pytest.raises(ModelError, match="Second derivatives are not symmetric"):
            H @ torch.ones(43, dtype=torch.float64)


def test_backward_passes_that_are_not_linear_are_refused() -> None:
    def signs(h: Tensor) -> Tensor:
        if h.requires_grad:
            h.register_hook(torch.sign)
        return h.tanh()

    risk = make_risk(signs)
    for operator in (GGN(risk), GGN(risk, reuse=True), Fisher(risk, "empirical"), Jacobian(risk)):
        for _ in range(2):  # it stays an error
            with pytest.raises(ModelError, match="not the same in all modes"):
                operator @ torch.ones(43, dtype=torch.float64)
    with pytest.raises(ModelError, match="not the same in all modes"):
        Jacobian(risk).T @ torch.ones(18, dtype=torch.float64)


def test_derivatives_are_compared_once_and_on_few_data() -> None:
    sizes: list[int] = []

    def between(h: Tensor) -> Tensor:
        sizes.append(len(h))
        return h.tanh()

    risk = make_risk(between, num_data=40)
    G, v = GGN(risk), torch.ones(43, dtype=torch.float64)
    for operator, block in ((G, G.submatrix("first.bias")), (Hessian(risk), Hessian(risk).submatrix("first.bias"))):
        sizes.clear()
        operator @ v
        first = sizes.copy()
        sizes.clear()
        operator @ v
        assert sizes == [20] * len(sizes)
        assert sorted(first) == [4] * (len(first) - len(sizes)) + sizes
        if operator is G:
            block @ v[:5]
            operator @ torch.stack([v, v], 1)
            assert 4 not in sizes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rounding_is_no_other_derivative(dtype: torch.dtype) -> None:
    """Numbers inside the model may have a lower precision than the parameters."""
    inside = torch.float32 if dtype == torch.float64 else torch.bfloat16
    risk = make_risk(lambda h: (h.to(inside) * 3).tanh().exp().to(dtype), dtype=dtype)
    for operator in (GGN(risk), Hessian(risk), Jacobian(risk)):
        assert (operator @ torch.ones(43, dtype=dtype)).isfinite().all()
        assert operator._one_derivative.forward_mode


POLES: dict[str, Callable[[Tensor], Tensor]] = {
    "sinc": lambda h: torch.sinc(h - h.detach()) + h.tanh(),
    "std": lambda h: h.tanh() + (h - h.detach()).std(1, keepdim=True),
}


@pytest.mark.parametrize("pole", POLES)
def test_graphs_are_reused_next_to_poles_of_second_derivatives(pole: str) -> None:
    risk = make_risk(POLES[pole])
    kept, expected = GGN(risk, reuse=True, chunk_size=1).to_dense(), GGN(risk).to_dense()
    close(kept, expected)
    close(expected, matrices(risk)[1])


def test_poles_of_second_derivatives_are_refused_without_forward_mode() -> None:
    risk = make_risk(lambda h: NoForwardMode.apply(POLES["sinc"](h)))  # type: ignore[no-untyped-call]
    for settings in ({}, {"reuse": True}, {"chunk_size": 1}):
        with pytest.raises(ModelError, match="no finite derivative"):
            GGN(risk, **settings) @ torch.ones(43, dtype=torch.float64)
