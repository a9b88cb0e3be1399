"""Solve the Poisson equation on the unit square with a small network: `python examples/poisson.py`."""

import math

import torch
from torch import Tensor, nn

from kfs.pinn import EnergyNaturalGradient, Problem, Term, taylor


def solution(x: Tensor) -> Tensor:
    """Return the solution, to compare with."""
    return (math.pi * x).sin().prod(1, keepdim=True)


def main(steps: int = 60) -> float:
    """Train, and return the relative error at points that were not used."""
    torch.manual_seed(0)
    grid = torch.linspace(0, 1, 20, dtype=torch.float64)
    points = torch.cartesian_prod(grid, grid)
    edge = ((points == 0) | (points == 1)).any(1)
    net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1)).double()
    inside = Term(lambda u, x: taylor(u, x).laplacian + 2 * math.pi**2 * solution(x), points[~edge])
    optimizer = EnergyNaturalGradient(Problem(net, [inside, Term(lambda u, x: u(x), points[edge])]))
    for step in range(steps):
        print(f"step {step}: loss {optimizer.step():.1e}")
    test = torch.rand(1000, 2, dtype=torch.float64)
    with torch.no_grad():
        return float((net(test) - solution(test)).norm() / solution(test).norm())


if __name__ == "__main__":
    print(f"relative error {main():.1e}")
