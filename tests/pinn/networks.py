"""Networks, a Poisson problem, and derivatives by nested autograd: the oracle of `taylor`."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from kfs.pinn import Problem, Term, taylor

torch64: dict[str, Any] = {"dtype": torch.float64}


class Sine(nn.Module):
    """A sine, and the square of another activation: not a module of torch."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(2 * x) + 0.1 * x.tanh() ** 2


class Residual(nn.Module):
    """A residual network with everything that `taylor` supports: slices, products, quotients, scales, constants."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(3, 6), nn.Linear(6, 6, bias=False), nn.Linear(6, 2)
        self.activation = activation
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.frequencies = nn.Parameter(torch.tensor([[1.0, -0.5, 0.3, 2.0]] * 3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.activation(self.first(x))
        h = h + 0.5 * self.activation(self.second(self.scale * h))
        t = x[:, 1:2]
        fourier = torch.cos(x @ self.frequencies).sum(1, keepdim=True)
        # Constants: on the left, with a factor, and as further features.
        ones = torch.ones(len(x), 1, dtype=x.dtype, device=x.device)
        a, b, one = torch.cat([1 - self.last(h), ones], dim=1).split(1, dim=1)
        a = torch.add(a, b, alpha=0.5) + ones * one - (ones - one)
        hard = t * (1 - t) / (1 + torch.exp(x[..., :1]))
        return torch.cat([a * hard + fourier, 2 / (3 + b.square())], dim=1) - x[:, [0, 2]] ** 3


def mlp(sizes: tuple[int, ...], activation: Callable[[], nn.Module] = nn.Tanh, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), activation()]
    return nn.Sequential(*layers[:-1]).double()


def nested(net: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return value `[N, out]`, gradients `[N, d, out]` and Hessians `[N, d, d, out]` by nested autograd."""
    x = x.detach().requires_grad_()
    value = net(x)
    gradients, hessians = [], []
    for o in range(value.shape[1]):
        (g,) = torch.autograd.grad(value[:, o].sum(), x, create_graph=True)
        rows = [
            torch.autograd.grad(g[:, i].sum(), x, create_graph=True, allow_unused=True, materialize_grads=True)[0]
            for i in range(x.shape[1])
        ]
        gradients.append(g)
        hessians.append(torch.stack(rows, 1))
    return value, torch.stack(gradients, -1), torch.stack(hessians, -1)


def along(net: Callable[[Tensor], Tensor], x: Tensor, v: Tensor, order: int) -> Tensor:
    """Return derivatives of order 1 to `order` in a direction, `[N, order, out]`, by nested autograd."""
    s = torch.zeros(len(x), 1, dtype=x.dtype, requires_grad=True)
    value = net(x + s * v)
    columns = []
    for o in range(value.shape[1]):
        f, found = value[:, o], []
        for _ in range(order):
            (g,) = torch.autograd.grad(f.sum(), s, create_graph=True)
            f = g[:, 0]
            found.append(f)
        columns.append(torch.stack(found, 1))
    return torch.stack(columns, -1)


class ByAutograd(nn.Module):
    """The scaled residuals of `poisson`, with Laplacians by nested autograd: an oracle for gradients and GGN."""

    def __init__(self, model: nn.Module, points: Tensor, boundary: Tensor, weight: float) -> None:
        super().__init__()
        self.model, self.points, self.boundary, self.weight = model, points, boundary, weight

    def forward(self) -> Tensor:
        _, _, H = nested(self.model, self.points)
        inside = H.diagonal(dim1=1, dim2=2).sum(-1) + source(self.points)
        parts = inside / len(inside) ** 0.5, self.weight**0.5 * self.model(self.boundary) / len(self.boundary) ** 0.5
        return torch.cat(parts).squeeze(1)


def source(x: Tensor) -> Tensor:
    return 2 * torch.pi**2 * (torch.pi * x).sin().prod(1, keepdim=True)


def square(count: int = 5) -> tuple[Tensor, Tensor]:
    """Return points of a grid inside of the unit square, and on its boundary."""
    grid = torch.linspace(0, 1, count + 2, **torch64)
    points = torch.cartesian_prod(grid, grid)
    on_boundary = ((points == 0) | (points == 1)).any(1)
    return points[~on_boundary], points[on_boundary]


def poisson(net: nn.Module, weight: float = 2.0, count: int = 5, **options: Any) -> Problem:
    inside, boundary = square(count)
    terms = [
        Term(lambda u, x: taylor(u, x).laplacian + source(x), inside, name="inside"),
        Term(lambda u, x: u(x), boundary, weight, name="boundary"),
    ]
    return Problem(net, terms, **options)


def dense_jacobian(net: nn.Module, residuals: nn.Module) -> tuple[Tensor, Tensor]:
    """Return residuals and their Jacobian `[rows, parameters]`, row by row by autograd."""
    r = residuals()
    params = [p for p in net.parameters() if p.requires_grad]
    rows = []
    for one in r:
        gradients = torch.autograd.grad(one, params, retain_graph=True, allow_unused=True, materialize_grads=True)
        rows.append(torch.cat([g.flatten() for g in gradients]))
    return r.detach(), torch.stack(rows)
