"""Cost of products with Hessian, GGN and empirical Fisher, for one and ten columns, beside curvlinops if installed.

Everything is measured in one run, in turn, in units of a forward and backward pass on the same data. Products include
all work of a user's `A @ V`. On a GPU, products are recorded before they are measured; rows with `replay=False` are
eager. `python -m benchmarks.operators cuda compiled` adds rows of `benchmarks/compiled_products.py`, with KFAC beside
them.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import CrossEntropyLoss
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.compiled_products import compiled_products
from benchmarks.problems import Problem, problems
from benchmarks.report import RESULTS, Row, medians, write
from kfs import GGN, KFAC, EmpiricalRisk, Fisher, Hessian

COLUMNS, REPEATS = (1, 10), 9
RECORDED = 4  # The fourth product with one batch is recorded.


def kfs_operators(problem: Problem, both: bool = False) -> dict[str, Any]:
    """Return operators of kfs by name; optionally also operators that do not replay products."""
    risk = EmpiricalRisk(problem.model, CrossEntropyLoss(), (problem.X, problem.y))
    operators: dict[str, Any] = {
        "Hessian": Hessian(risk),
        "GGN": GGN(risk),
        "GGN, graph reused": GGN(risk, reuse=True),
        "empirical Fisher": Fisher(risk, "empirical"),
    }
    if both:
        operators["Hessian, replay=False"] = Hessian(risk, replay=False)
        operators["GGN, replay=False"] = GGN(risk, replay=False)
        operators["empirical Fisher, replay=False"] = Fisher(risk, "empirical", replay=False)
    return operators


def curvlinops_operators(problem: Problem) -> dict[str, Any]:
    """Return curvlinops' operators by name; none if it is not installed."""
    try:
        import curvlinops  # noqa: PLC0415 (a peer, not a dependency)
    except ImportError:
        return {}
    params = [p for p in problem.model.parameters() if p.requires_grad]
    arguments = (problem.model, CrossEntropyLoss(), params, [(problem.X, problem.y)])
    peers = {
        "Hessian": curvlinops.HessianLinearOperator,
        "GGN": curvlinops.GGNLinearOperator,
        "empirical Fisher": curvlinops.EFLinearOperator,
    }
    return {name: make(*arguments, check_deterministic=False) for name, make in peers.items()}


def programs(problem: Problem, compiled: bool = False) -> dict[tuple[str, str], Callable[[], object]]:
    """Return the programs for a problem, optionally with compiled products; all libraries get the same columns."""
    loss = CrossEntropyLoss()
    size = sum(p.numel() for p in problem.model.parameters())
    columns = {k: torch.randn(size, k, device=problem.X.device) for k in COLUMNS}

    def forward_backward() -> None:
        loss(problem.model(problem.X), problem.y).backward()
        problem.model.zero_grad()

    def with_math_attention(operator: Any, k: int) -> object:
        with sdpa_kernel(SDPBackend.MATH):  # curvlinops leaves the choice to the user; other kernels do not support it
            return operator @ columns[k]

    tasks: dict[tuple[str, str], Callable[[], object]] = {("forward+backward", "torch"): forward_backward}
    for name, operator in kfs_operators(problem, both=problem.X.is_cuda).items():
        for k in COLUMNS:
            for _ in range(RECORDED if problem.X.is_cuda else 0):
                operator @ columns[k]
            tasks[f"{name}, {k}", "kfs"] = partial(operator.__matmul__, columns[k])
    for name, operator in curvlinops_operators(problem).items():
        for k in COLUMNS:
            tasks[f"{name}, {k}", "curvlinops"] = partial(with_math_attention, operator, k)
    return tasks | (_compiled_and_kfac(problem, columns) if compiled else {})


def _compiled_and_kfac(problem: Problem, columns: dict[int, Tensor]) -> dict[tuple[str, str], Callable[[], object]]:
    """Return compiled products, and the products with KFAC for comparison."""
    K = KFAC(EmpiricalRisk(problem.model, CrossEntropyLoss(), (problem.X, problem.y)))
    tasks: dict[tuple[str, str], Callable[[], object]] = {
        (f"KFAC, {k}", "kfs"): partial(K.__matmul__, V) for k, V in columns.items()
    }
    for name, product in compiled_products(problem).items():
        for k, V in columns.items():
            tasks[f"{name}, {k}", "torch.compile"] = partial(product, V)
    return tasks


def measure(chosen: list[Problem], repeats: int = REPEATS, compiled: bool = False) -> list[Row]:
    """Time all programs on the problems."""
    rows = []
    for problem in chosen:
        seconds = medians(programs(problem, compiled), repeats, problem.name)
        unit = seconds["forward+backward", "torch"]
        rows += [
            Row(problem.name, program, library, value, value / unit) for (program, library), value in seconds.items()
        ]
    return rows


def main(
    results: Path = RESULTS, repeats: int = REPEATS, scale: int = 1, device: str = "cpu", compiled: bool = False
) -> None:
    """Measure on a device, and write table, JSON and plot."""
    settings = {"columns": COLUMNS, "repeats": repeats, "device": device, "compiled": compiled}
    write(measure(problems(scale, device), repeats, compiled), "operators", settings, results)


if __name__ == "__main__":
    given = sys.argv[1:]
    main(device="cuda" if "cuda" in given else "cpu", compiled="compiled" in given)
