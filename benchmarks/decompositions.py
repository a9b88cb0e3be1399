"""Where to decompose and invert factors on a machine with a GPU: part of `python -m benchmarks.algebra cuda`.

Matrices and results are in float32 on the GPU, for all methods; times include conversions and copies. Matrices are
symmetric and positive definite, alone or in stacks of 12; "loop" processes one at a time. Each time is the median of
three, or a single one if that takes more than half a second. Stacks that would take more than two seconds are measured
in part and scaled up, marked by `~`; single matrices that would are left out.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.replayed_factors import seconds_of
from benchmarks.report import RESULTS, Row, save
from kfs.factors.blocks.decompositions import inverse_by_halves

SIZES = (256, 513, 768, 1024, 2305, 3073)
STACK = 12
LIMIT = 2.0  # maximal seconds for one case
BUDGET = 80.0  # seconds after which no further method starts
REPEATS = 3


@dataclass(frozen=True)
class Method:
    """A method to process a stack of matrices.

    Attributes:
        name: Its name in tables.
        run: The computation for a stack `[n, D, D]`.
        library: The preferred library for linear algebra on the GPU.
        loop: Whether to pass one matrix at a time.
    """

    name: str
    run: Callable[[Tensor], object]
    library: str = "default"
    loop: bool = False

    def __call__(self, A: Tensor) -> object:
        """Run the computation."""
        return [self.run(a) for a in A.split(1)] if self.loop else self.run(A)


@dataclass(frozen=True)
class Time:
    """Seconds, and whether only a part was measured and scaled up."""

    seconds: float
    scaled: bool = False


Times = dict[tuple[int, int], dict[str, Time]]  # by size and stack, then by method


def eigh(A: Tensor) -> tuple[Tensor, Tensor]:
    """Decompose on the device of the matrices."""
    L, Q = torch.linalg.eigh(A)
    return L, Q


def eigh_in_double(A: Tensor) -> tuple[Tensor, Tensor]:
    """Decompose in float64."""
    L, Q = torch.linalg.eigh(A.double())
    return L.to(A.dtype), Q.to(A.dtype)


def eigh_on_cpu(A: Tensor) -> tuple[Tensor, Tensor]:
    """Decompose on the CPU."""
    L, Q = torch.linalg.eigh(A.cpu())
    return L.to(A.device), Q.to(A.device)


def inverse_by_cholesky(A: Tensor) -> Tensor:
    """Invert by `cholesky_inverse`."""
    return torch.cholesky_inverse(torch.linalg.cholesky_ex(A)[0])


def inverse_by_triangles(A: Tensor) -> Tensor:
    """Invert the triangular factor, and multiply."""
    L = torch.linalg.cholesky_ex(A)[0]
    eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    W = torch.linalg.solve_triangular(L, eye.expand_as(A), upper=False)
    result: Tensor = W.mT @ W
    return result


def inverse_by_lu(A: Tensor) -> Tensor:
    """Invert as a general matrix."""
    result: Tensor = torch.linalg.inv_ex(A)[0]
    return result


def eigh_methods(device: str) -> list[Method]:
    """Return methods to decompose, the most promising first."""
    if device != "cuda":
        return [Method("CPU float32", eigh_on_cpu), Method("CPU float32, loop", eigh_on_cpu, loop=True)]
    return [
        Method("GPU float32, cusolver", eigh, "cusolver"),
        Method("CPU float32", eigh_on_cpu),
        Method("GPU float32, magma", eigh, "magma"),
        Method("GPU float64", eigh_in_double),
        Method("GPU float32, cusolver, loop", eigh, "cusolver", loop=True),
        Method("GPU float32, magma, loop", eigh, "magma", loop=True),
    ]


def inverse_methods() -> list[Method]:
    """Return methods to invert."""
    ways = {
        "cholesky_inverse": inverse_by_cholesky,
        "solve_triangular": inverse_by_triangles,
        "inv": inverse_by_lu,
        "halves": lambda A: inverse_by_halves(A)[0],
    }
    return [Method(f"{name}{', loop' * loop}", run, loop=loop) for name, run in ways.items() for loop in (False, True)]


def matrices(size: int, count: int, device: str) -> Tensor:
    """Return Gram matrices of random vectors, twice as many as their dimension."""
    x = torch.randn(count, 2 * size, size, device=device)
    return x.mT @ x / (2 * size)


@contextmanager
def preferred(library: Any, device: str) -> Iterator[None]:
    """Prefer a library for linear algebra on the GPU."""
    if device != "cuda":
        yield
        return
    before = torch.backends.cuda.preferred_linalg_library()
    torch.backends.cuda.preferred_linalg_library(library)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_linalg_library(before)


def timed(program: Callable[[], object]) -> float:
    """Return the median of three runs after a warm-up, or the time of the first run if it is long."""
    first = seconds_of(program)
    return first if first > LIMIT / 4 else statistics.median(seconds_of(program) for _ in range(REPEATS))


def times_of(method: Method, sizes: tuple[int, ...], device: str) -> Iterator[tuple[tuple[int, int], Time]]:
    """Time a method for all sizes, alone and in stacks."""
    method(matrices(32, 2, device))  # libraries are loaded on first use
    per_cube = 0.0
    for size in sizes:
        if per_cube * size**3 > LIMIT:
            return  # sizes increase
        A = matrices(size, STACK, device)
        single = timed(partial(method, A[:1]))
        per_cube = single / size**3
        yield (size, 1), Time(single)
        count = next((n for n in (STACK, STACK // 3) if n * single <= LIMIT), 1)
        seconds = timed(partial(method, A[:count])) if count > 1 else single
        yield (size, STACK), Time(seconds * STACK / count, scaled=count < STACK)


def measure(methods: list[Method], sizes: tuple[int, ...], device: str, deadline: float) -> Times:
    """Time all methods; unavailable ones are reported."""
    found: Times = {(size, n): {} for size in sizes for n in (1, STACK)}
    for method in methods:
        if time.perf_counter() > deadline:
            print(f"No time is left for: {method.name}.")
            continue
        try:
            with preferred(method.library, device):
                for case, value in times_of(method, sizes, device):
                    found[case][method.name] = value
        except RuntimeError as error:  # also out of memory, and errors of LAPACK
            print(f"{method.name}: {error!s:.200}")
    return {case: times for case, times in found.items() if times}


def show(title: str, methods: list[Method], found: Times) -> None:
    """Print milliseconds, one line per size and stack; the fastest is in bold."""
    print(f"\n| {title}, milliseconds | {' | '.join(m.name for m in methods)} |\n{'|---' * (1 + len(methods))}|")
    for (size, stack), times in found.items():
        fastest = min(times, key=lambda name: times[name].seconds)
        cells = []
        for method in methods:
            value = times.get(method.name)
            text = "" if value is None else f"{'~' * value.scaled}{1e3 * value.seconds:.2f}"
            cells.append(f"**{text}**" if method.name == fastest else text)
        print(f"| {stack} x {size} | {' | '.join(cells)} |")


def rows(title: str, found: Times) -> list[Row]:
    """Return times in units of the fastest."""
    made = []
    for (size, stack), times in found.items():
        fastest = min(value.seconds for value in times.values())
        for name, value in times.items():
            made.append(Row(f"{stack} x {size}", title, name, value.seconds, value.seconds / fastest))
    return made


def main(device: str = "cuda", sizes: tuple[int, ...] = SIZES, results: Path = RESULTS) -> None:
    """Measure, print tables, and write JSON."""
    torch.manual_seed(0)
    deadline = time.perf_counter() + BUDGET
    found = []
    for title, methods in (("inverse", inverse_methods()), ("eigh", eigh_methods(device))):
        times = measure(methods, sizes, device, deadline)
        show(title, methods, times)
        found += rows(title, times)
    print(f"Written: {save(found, 'decompositions', {'device': device}, results)}")
