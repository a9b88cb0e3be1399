"""Differential equations: derivatives by `kfs.pinn.taylor` beside autograd, and errors of networks over seconds.

`python -m benchmarks.applications pinn [--quick]` measures both, in CPU time of one thread and float64.

- Derivatives: the mean squared Laplacian at 100 points and its gradient with respect to parameters, for networks with
  three hidden layers. Programs: `taylor`; `nested`, one backward pass with a graph for each dimension; `func`, the
  trace of `torch.func.hessian` under `vmap`. Time and peak memory, relative to `taylor`.
- Training: equations with known solutions. All methods have the same time, without the time for measuring errors, and
  the same points: those of a grid in two dimensions, as in the reference of 900 points inside and 120 on the boundary,
  otherwise 800 random ones inside and 200 for conditions. The error is the relative L2 distance to the solution at
  3,000 other points. Learning rates of Adam and SOAP are 0.01 for small networks, otherwise 0.003; L-BFGS has a line
  search.

The settings of `TermwiseKFAC` and `EnergyNaturalGradient` were chosen on the first two equations, with the same seed;
those of other methods were not tuned. JSON and a picture are written to benchmarks/results.
"""

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.func import functional_call, hessian, vmap

import kfs
from benchmarks.baseline_optimizers import SOAP, Stepper
from benchmarks.factor_programs import peak_memory
from benchmarks.report import save
from kfs.pinn import EnergyNaturalGradient, Problem, Term, TermwiseKFAC, taylor

POINTS = 100


@dataclass(frozen=True)
class DerivativeRow:
    """The cost of derivatives.

    Attributes:
        program: The program.
        dimension: Dimension of the points.
        width: Width of the hidden layers.
        seconds: CPU time.
        ratio: The time over that of `taylor`.
        memory_ratio: The peak memory over that of `taylor`; `None` if it was not measured.
        error: Largest difference of the Laplacian from that of `taylor`, relative to the largest Laplacian.
    """

    program: str
    dimension: int
    width: int
    seconds: float
    ratio: float
    memory_ratio: float | None
    error: float


@dataclass(frozen=True)
class TrainingRow:
    """One run.

    Attributes:
        equation: The equation.
        parameters: Number of parameters.
        method: The method.
        seconds: CPU time.
        steps: Number of steps.
        error: Relative L2 error at the end.
        errors: Errors on the way, each with its CPU time.
    """

    equation: str
    parameters: int
    method: str
    seconds: float
    steps: int
    error: float
    errors: list[tuple[float, float]]


@dataclass(frozen=True)
class Equation:
    """An equation with a known solution.

    Attributes:
        sizes: Widths of the network, from the dimension of points on.
        residual: Its residual at inner points.
        solution: Its solution, which conditions prescribe.
        inside: Inner points.
        conditions: Points on the boundary and at the start.
        test: Points at which errors are measured.
        seconds: CPU time for each method.
    """

    sizes: tuple[int, ...]
    residual: Callable[[nn.Module, Tensor], Tensor]
    solution: Callable[[Tensor], Tensor]
    inside: Tensor
    conditions: Tensor
    test: Tensor
    seconds: float

    def problem(self) -> Problem:
        """Return the problem for a new network."""
        conditions = Term(
            lambda u, x, y: u(x) - y, (self.conditions, self.solution(self.conditions)), name="conditions"
        )
        return Problem(mlp(self.sizes), [Term(self.residual, self.inside, name="equation"), conditions])

    def error(self, net: nn.Module) -> float:
        """Return the relative L2 error of a network."""
        with torch.no_grad():
            truth = self.solution(self.test)
            return float((net(self.test) - truth).norm() / truth.norm())


def mlp(sizes: tuple[int, ...], seed: int = 0) -> nn.Sequential:
    """Return a tanh network in float64."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).double()


def cube(d: int, times: bool, inside: int = 800, conditions: int = 200) -> tuple[Tensor, Tensor, Tensor]:
    """Return random points inside of the unit cube, on its boundary, and for tests.

    If the first axis is time, the boundary is without the end of time.
    """
    generator = torch.Generator().manual_seed(9)
    x, y, test = (torch.rand(n, d, generator=generator, dtype=torch.float64) for n in (inside, conditions, 3000))
    axes = torch.randint(d, (conditions,), generator=generator)
    ends = torch.randint(2, (conditions,), generator=generator).double()
    rows = torch.arange(conditions)
    y[rows, axes] = torch.where((axes == 0) & times, 0.0, ends)
    return x, y, test


def square() -> tuple[Tensor, Tensor, Tensor]:
    """Return the 900 inner points and 120 points on the boundary of the reference, and points for tests."""
    g = torch.linspace(0, 1, 32, dtype=torch.float64)[1:-1]
    t = torch.linspace(0, 1, 31, dtype=torch.float64)[:-1]
    z = torch.zeros_like(t)
    sides = [torch.stack(pair, 1) for pair in ((t, z), (t, z + 1), (z, t), (z + 1, t))]
    test = torch.rand(3000, 2, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return torch.cartesian_prod(g, g), torch.cat(sides), test


def sines(x: Tensor) -> Tensor:
    """Return the solution of the Poisson equation of the reference."""
    return (math.pi * x[:, :1]).sin() * (math.pi * x[:, 1:]).sin()


def poisson(u: nn.Module, x: Tensor) -> Tensor:
    """Return the residual of the Poisson equation of the reference."""
    return taylor(u, x).laplacian + 2 * math.pi**2 * sines(x)


def in_space(d: int) -> Tensor:
    """Return coefficients of the Laplacian in space, where the first of `d` axes is time."""
    return torch.diag(torch.tensor([0.0] + [1.0] * (d - 1), dtype=torch.float64))


def heat(u: nn.Module, x: Tensor) -> Tensor:
    """Return the residual of the heat equation with diffusivity 1/4."""
    t = taylor(u, x, second=in_space(x.shape[1]))
    assert t.second is not None  # noqa: S101 (for mypy)
    return t.gradient[:, 0] - 0.25 * t.second


def burgers(u: nn.Module, x: Tensor) -> Tensor:
    """Return the residual of the equation of Burgers with viscosity 0.05."""
    t = taylor(u, x, second=in_space(2))
    assert t.second is not None  # noqa: S101 (for mypy)
    return t.gradient[:, 0] + t.value * t.gradient[:, 1] - 0.05 * t.second


def wave_front(x: Tensor) -> Tensor:
    """Return a solution of the equation of Burgers: a front that moves with speed 1/2."""
    return 0.5 - 0.5 * torch.tanh((x[:, 1:] - 0.25 - x[:, :1] / 2) / 0.2)


def equations(quick: bool) -> dict[str, Equation]:
    """Return all equations."""
    tenth = 0.02 if quick else 1.0
    harmonic, bowl = (
        (lambda x: (x[:, ::2] * x[:, 1::2]).sum(1, keepdim=True)),
        (lambda x: x.square().sum(1, keepdim=True)),
    )
    decays = lambda x: (-(math.pi**2) / 4 * x[:, :1]).exp() * (math.pi * x[:, 1:]).sin()  # noqa: E731
    modes = lambda x: (-x[:, :1]).exp() * (2 * x[:, 1:]).sin().sum(1, keepdim=True)  # noqa: E731
    small, medium = (2, 64, 1), (2, 64, 64, 48, 48, 1)
    found = {
        "Poisson, 2-d, 257 parameters": Equation(small, poisson, sines, *square(), 12 * tenth),
        "Poisson, 2-d, 9,873 parameters": Equation(medium, poisson, sines, *square(), 30 * tenth),
        "heat, 1+1": Equation((2, 32, 32, 1), heat, decays, *cube(2, True), 6 * tenth),
        "heat, 4+1": Equation((5, 32, 32, 1), heat, modes, *cube(5, True), 6 * tenth),
        "Burgers": Equation((2, 32, 32, 1), burgers, wave_front, *cube(2, True), 6 * tenth),
        "Poisson, 10-d": Equation(
            (10, 48, 48, 1), lambda u, x: taylor(u, x).laplacian, harmonic, *cube(10, False), 8 * tenth
        ),
        "Poisson, 100-d": Equation(
            (100, 64, 48, 1), lambda u, x: taylor(u, x).laplacian - 200, bowl, *cube(100, False), 12 * tenth
        ),
    }
    return {name: found[name] for name in list(found)[:1]} if quick else found


def by_closure(make: Callable[[Problem], Any]) -> Callable[[Problem], Callable[[], object]]:
    """Return a method that trains with an optimizer whose step takes a closure."""

    def method(problem: Problem) -> Callable[[], object]:
        optimizer = make(problem)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = problem()
            loss.backward()
            return loss

        return lambda: optimizer.step(closure)

    return method


def soap(problem: Problem) -> Callable[[], object]:
    """Return a step of SOAP; vectors are left to Adam."""
    params = list(problem.model.parameters())
    matrices, vectors = [p for p in params if p.ndim == 2], [p for p in params if p.ndim == 1]
    parts: tuple[Stepper, Stepper] = (SOAP(matrices, rate(problem)), torch.optim.Adam(vectors, lr=rate(problem)))

    def step() -> None:
        problem.model.zero_grad()
        problem().backward()
        for part in parts:
            part.step()

    return step


def rate(problem: Problem) -> float:
    """Return the learning rate of Adam and SOAP."""
    return 0.01 if sum(p.numel() for p in problem.model.parameters()) < 1000 else 0.003


def energy(problem: Problem) -> Callable[[], object]:
    """Return a step of energy natural gradients: all points for small networks, otherwise 288 random ones."""
    if sum(p.numel() for p in problem.model.parameters()) < 1000:
        return EnergyNaturalGradient(problem, damping=1e-11).step
    return EnergyNaturalGradient(problem, points_per_step=288, momentum=0.5).step


METHODS: dict[str, Callable[[Problem], Callable[[], object]]] = {
    "Adam": by_closure(lambda p: torch.optim.Adam(p.model.parameters(), lr=rate(p))),
    "L-BFGS": by_closure(lambda p: torch.optim.LBFGS(p.model.parameters(), line_search_fn="strong_wolfe")),
    "SOAP": soap,
    "optim.KFAC": by_closure(lambda p: kfs.optim.KFAC(p.residuals, p.loss, fisher="ggn", quadratic_model=True)),
    "TermwiseKFAC": lambda p: TermwiseKFAC(p).step,
    "EnergyNaturalGradient": energy,
}


def trained(name: str, equation: Equation, method: str) -> TrainingRow:
    """Train a network, and measure its error 20 times on the way."""
    problem = equation.problem()
    net = problem.model
    start = used = time.process_time()
    step = METHODS[method](problem)
    errors = [(0.0, equation.error(net))]
    steps, apart = 0, 0.0  # time for measuring errors
    while used - start - apart < equation.seconds:
        step()
        steps += 1
        used = time.process_time()
        if used - start - apart >= len(errors) * equation.seconds / 20:
            errors.append((round(used - start - apart, 3), equation.error(net)))
            apart += time.process_time() - used
            used = time.process_time()
    error = equation.error(net)
    return TrainingRow(name, sum(p.numel() for p in net.parameters()), method, equation.seconds, steps, error, errors)


def by_taylor(net: nn.Module, x: Tensor) -> Tensor:
    """Return the Laplacian in one forward pass."""
    return taylor(net, x).laplacian


def nested(net: nn.Module, x: Tensor) -> Tensor:
    """Return the Laplacian by nested calls of autograd."""
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    parts = [torch.autograd.grad(slope[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(x.shape[1])]
    return torch.stack(parts).sum(0).unsqueeze(1)


def by_func(net: nn.Module, x: Tensor) -> Tensor:
    """Return the Laplacian by `torch.func`."""
    params: dict[str, Tensor] = dict(net.named_parameters())

    def of_point(z: Tensor) -> Tensor:
        value: Tensor = functional_call(net, params, (z.unsqueeze(0),))
        return value.squeeze()

    found: Tensor = vmap(lambda z: hessian(of_point)(z).trace())(x).unsqueeze(1)
    return found


def derivatives(quick: bool) -> list[DerivativeRow]:
    """Measure the cost of the gradient of the mean squared Laplacian."""
    rows = []
    for width in (64, 256):
        for d in (2, 10) if quick else (2, 10, 30, 100):
            net = mlp((d, width, width, width, 1))
            x = torch.rand(8 if quick else POINTS, d, dtype=torch.float64)
            programs = {"taylor": by_taylor, "nested": nested, "func": by_func}
            found = {name: cost(laplacian, net, x) for name, laplacian in programs.items()}
            seconds, memory, expected = found["taylor"]
            for name, (its_seconds, its_memory, values) in found.items():
                error = float((values - expected).abs().max() / expected.abs().max())
                memory_ratio = its_memory / memory if its_memory and memory else None
                rows.append(DerivativeRow(name, d, width, its_seconds, its_seconds / seconds, memory_ratio, error))
    return rows


def cost(
    laplacian: Callable[[nn.Module, Tensor], Tensor], net: nn.Module, x: Tensor
) -> tuple[float, float | None, Tensor]:
    """Return CPU seconds and peak memory of the gradient of the mean squared Laplacian, and the Laplacian."""
    params = list(net.parameters())

    def program() -> None:
        torch.autograd.grad(laplacian(net, x).square().mean(), params, allow_unused=True)

    program()
    start, count = time.process_time(), 0
    while not count or time.process_time() - start < _AT_LEAST:
        program()
        count += 1
    return (time.process_time() - start) / count, peak_memory(program), laplacian(net, x).detach()


_AT_LEAST = 0.3  # seconds


def show(costs: list[DerivativeRow], rows: list[TrainingRow]) -> None:
    """Print both tables as Markdown."""
    print(
        "| program | dimension | width | milliseconds | time / taylor | memory / taylor | error |\n" + "|---" * 7 + "|"
    )
    for row in costs:
        memory = "" if row.memory_ratio is None else f"{row.memory_ratio:.2f}"
        times = f"{1e3 * row.seconds:.1f} | {row.ratio:.2f} | {memory} | {row.error:.0e}"
        print(f"| {row.program} | {row.dimension} | {row.width} | {times} |")
    print("\n| equation | method | seconds | steps | error |\n|---|---|---|---|---|")
    for run in rows:
        print(f"| {run.equation} | {run.method} | {run.seconds:g} | {run.steps:,} | {run.error:.1e} |")


def draw_solution(left: Axes, right: Axes, steps: int) -> None:
    """Draw the solution of a network for the first equation, and its error."""
    problem = next(iter(equations(quick=False).values())).problem()
    optimizer = EnergyNaturalGradient(problem, damping=1e-11)
    for _ in range(steps):
        optimizer.step()
    grid = torch.linspace(0, 1, 80, dtype=torch.float64)
    x = torch.cartesian_prod(grid, grid)
    with torch.no_grad():
        u = problem.model(x)
    for axes, values, title in ((left, u, "Poisson, 2-d: solution"), (right, u - sines(x), f"error, {steps} steps")):
        shown = axes.pcolormesh(
            grid.numpy(), grid.numpy(), values.view(80, 80).T.numpy(), shading="auto", rasterized=True
        )
        axes.figure.colorbar(shown, ax=axes).ax.tick_params(labelsize=7)
        axes.set_title(title, fontsize=8)
        axes.tick_params(labelsize=7)


def draw(rows: list[TrainingRow], file: Path, steps: int) -> None:
    """Draw the solution of an equation and its error after some steps, and errors over seconds for all equations."""
    names = list(dict.fromkeys(row.equation for row in rows))
    figure = Figure(figsize=(13, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    first, second, *panels = figure.subplots(2, 5).T.ravel()
    draw_solution(first, second, steps)
    for axes, name in zip(panels, names, strict=False):
        for row in rows:
            if row.equation == name:
                emphasis = 2.0 if "Energy" in row.method else 1.0
                axes.semilogy(*zip(*row.errors, strict=True), label=row.method, linewidth=emphasis)
        axes.set_title(name, fontsize=8)
        axes.set_xlabel("CPU seconds", fontsize=7)
        axes.tick_params(labelsize=7)
    panels[0].set_ylabel("relative L2 error", fontsize=7)
    for axes in panels[len(names) :]:
        axes.axis("off")
    handles, labels = panels[0].get_legend_handles_labels()
    panels[-1].legend(handles, labels, fontsize=7, loc="center")
    figure.savefig(file, dpi=130)


def main(quick: bool, results: Path) -> None:
    """Measure, print tables, and write JSON and a picture."""
    costs = derivatives(quick)
    rows = []
    for name, equation in equations(quick).items():
        for method in METHODS:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                rows.append(trained(name, equation, method))
    show(costs, rows)
    end = "_quick" if quick else ""  # results of full runs stay
    files = save(costs, f"applications_pinn_derivatives{end}", {"points": POINTS}, results)
    file = save(rows, f"applications_pinn{end}", {"seed": 0}, results)
    draw(rows, results / f"applications_pinn{end}.png", steps=2 if quick else 300)
    print(f"Written: {files}, {file}")
