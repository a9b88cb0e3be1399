"""Operations on factors, in units of forward+backward: products, inverses and EKFAC, by kfs and by curvlinops.

One run measures everything in turn: `python -m benchmarks.algebra` on one CPU thread, `python -m benchmarks.algebra
cuda` on a GPU, followed by methods to decompose and to invert (`benchmarks/decompositions.py`; `python -m
benchmarks.algebra cuda decompositions` measures only these). Factors are those of the Monte Carlo Fisher and `expand`,
of linear layers and convolutions, computed beforehand. An inverse is measured with its first product, since curvlinops
computes it only then.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import CrossEntropyLoss

from benchmarks import decompositions
from benchmarks.factor_problems import Batches, factor_problems
from benchmarks.factor_programs import curvlinops_operator, forward_backward, kfs_factors, layers
from benchmarks.report import RESULTS, Row, medians, write
from kfs import EKFAC, KFAC, EmpiricalRisk

REPEATS = 3
DAMPING = 1e-3
SETTINGS: dict[str, Any] = {"fisher": "mc", "sharing": "expand"}
METHODS = {"factored": {"use_heuristic_damping": True}, "exact": {"use_exact_damping": True}}


def kfs_programs(problem: Batches) -> dict[str, Callable[[], object]]:
    """Return our programs."""
    params = layers(problem)
    risk = EmpiricalRisk(problem.model, CrossEntropyLoss(), problem.data, params=params)
    K: KFAC = kfs_factors(problem, params, **SETTINGS)
    v = torch.randn(K.shape[0], device=K.device)
    V = torch.randn(K.shape[0], 10, device=K.device)
    inverse = K.inverse(DAMPING)

    def fresh(method: Any) -> object:
        for stack in K.stacks:
            for factor in (stack.structure.A, stack.structure.B):  # type: ignore[attr-defined]
                factor.__dict__.pop("_unscaled_eigh", None)  # eigenvectors of the previous call would be reused
        return K.inverse(DAMPING, method) @ v

    found: dict[str, Callable[[], object]] = {
        "KFAC": partial(kfs_factors, problem, params, **SETTINGS),
        "EKFAC": partial(EKFAC, risk, **SETTINGS),
        "product": lambda: K @ v,
        "product, 10 columns": lambda: K @ V,
        "product with exact inverse": lambda: inverse @ v,
    }
    return found | {f"{method} inverse": partial(fresh, method) for method in METHODS}


def curvlinops_programs(problem: Batches) -> dict[str, Callable[[], object]]:
    """Return the programs of curvlinops; none if it is not installed."""
    K = curvlinops_operator(problem, **SETTINGS)
    if K is None:
        return {}
    from curvlinops import KFACInverseLinearOperator  # noqa: PLC0415 (a peer, not a dependency)

    device = problem.data[0][0].device
    v, V = torch.randn(K.shape[0], device=device), torch.randn(K.shape[0], 10, device=device)
    K.compute_kronecker_factors()

    def inverse_of(method: str) -> Any:
        return KFACInverseLinearOperator(K, damping=DAMPING, **METHODS[method])

    def ekfac() -> None:
        E = curvlinops_operator(problem, **SETTINGS, name="EKFACLinearOperator")
        E.compute_kronecker_factors()
        E.compute_eigenvalue_correction()

    inverse = inverse_of("exact")
    found: dict[str, Callable[[], object]] = {
        "KFAC": lambda: curvlinops_operator(problem, **SETTINGS).compute_kronecker_factors(),
        "product": lambda: K @ v,
        "product, 10 columns": lambda: K @ V,
        "product with exact inverse": lambda: inverse @ v,
    }
    if problem.terms == 1:  # it does not support EKFAC for sequences of predictions
        found["EKFAC"] = ekfac
    return found | {f"{method} inverse": partial(lambda m: inverse_of(m) @ v, method) for method in METHODS}


def measure(chosen: list[Batches], repeats: int = REPEATS) -> list[Row]:
    """Time all programs on the problems."""
    rows = []
    for problem in chosen:
        unit = "forward+backward", "torch"
        found: dict[tuple[str, str], Callable[[], object]] = {unit: partial(forward_backward, problem)}
        for library, programs in (("kfs", kfs_programs), ("curvlinops", curvlinops_programs)):
            found |= {(name, library): program for name, program in programs(problem).items()}
        seconds = medians(found, repeats, problem.name)
        rows += [Row(problem.name, key[0], key[1], value, value / seconds[unit]) for key, value in seconds.items()]
    return rows


def main(results: Path = RESULTS, repeats: int = REPEATS, scale: int = 1, device: str = "cpu") -> None:
    """Measure on a device, and write table, JSON and plot."""
    threads = torch.get_num_threads()
    if device == "cpu":
        torch.set_num_threads(1)
    try:
        rows = measure(factor_problems(scale, device), repeats)
        write(rows, "algebra", {"repeats": repeats, "device": device}, results)
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    given = sys.argv[1:] or ["cpu"]
    if "decompositions" not in given:
        main(device=given[0])
    if given[0] == "cuda":
        decompositions.main()
