"""Widths at which strips beat one product for X^T X: the measurement behind the limits in `add_gram`.

`python -m benchmarks.gram` measures widths of strips on a CPU, `python -m benchmarks.gram cuda` on a GPU. In the second
case, another table compares `add_gram` with one full product by cuBLAS and, if Triton is installed, with the best of
several settings of `benchmarks/triangle_kernel.py`, for bf16 inputs and for float32 inputs with TF32; totals are in
float32. Its times are those of the GPU alone: ten calls are recorded as one CUDA graph and replayed. *Error* is the
largest difference from float64 on a small case of odd sizes, in units of the largest entry.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import triangle_kernel
from benchmarks.report import RESULTS, medians, save
from benchmarks.triangle_kernel import TILINGS, Tiling, add_triangle, slices_for
from kfs.factors.accumulate.outer_products import add_gram

SIZES = {"cpu": ((512, 1024), (1024, 256), (4096, 512)), "cuda": ((12608, 768), (12608, 2304), (12608, 3072))}
ROWS, COLUMNS = (8192, 12608, 16384), (768, 1024, 2304, 3072, 4096)
KINDS = {"bf16": torch.bfloat16, "TF32": torch.float32}
SMALL = (1000, 301)  # rows and columns of the small case for errors
CALLS = 10  # number of calls in one graph
REPEATS = 9
Add = Callable[[Tensor, Tensor], object]  # adds the upper triangle of X^T X to a total


@dataclass(frozen=True)
class GramRow:
    """One measured product.

    Attributes:
        problem: Precision, and number of rows and columns.
        program: The implementation, with its settings.
        library: Its library.
        seconds: Median time.
        ratio: That time in units of one full product.
        error: Largest difference from float64 on a small case, in units of the largest entry.
    """

    problem: str
    program: str
    library: str
    seconds: float
    ratio: float
    error: float


def strips(total: Tensor, x: Tensor, width: int) -> None:
    """Add a product, strip by strip."""
    for start in range(0, len(total), width):
        out = total[start : start + width, start:]
        if x.dtype == total.dtype:
            out.addmm_(x[:, start : start + width].T, x[:, start:])
        else:
            torch.addmm(out, x[:, start : start + width].T, x[:, start:], out_dtype=total.dtype, out=out)


def one_product(total: Tensor, x: Tensor) -> None:
    """Add a full product."""
    strips(total, x, len(total))


def repeated(add: Add, total: Tensor, x: Tensor) -> Callable[[], None]:
    """Return a program that adds several times: as a CUDA graph on a GPU."""
    add(total, x)  # this call compiles

    def several() -> None:
        for _ in range(CALLS):
            add(total, x)

    if x.device.type != "cuda":
        return several
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        several()
    return graph.replay


def candidates(dtype: torch.dtype, rows: int, size: int, multiprocessors: int) -> dict[str, Add]:
    """Return the kernel with several settings: one to four programs for each multiprocessor."""
    found: dict[str, Add] = {}
    for tiling in TILINGS[dtype]:
        for waves in (1, 2, 4):
            slices = slices_for(tiling, rows, size, waves * multiprocessors)
            found[_name(tiling, slices)] = partial(add_triangle, tiling=tiling, slices=slices)
    return found


def _name(tiling: Tiling, slices: int) -> str:
    sizes = f"{tiling.height}x{tiling.width}x{tiling.depth}"
    return f"triangle, {sizes}, {tiling.warps} warps, {tiling.stages} stages, {slices} slices"


def error(add: Add, dtype: torch.dtype, device: str) -> float:
    """Return the largest error of an upper triangle on a small case, in units of its largest entry."""
    rows, size = SMALL
    # Rows are strided, like those of a part of a larger matrix.
    x = torch.randn(rows, size + 3, dtype=dtype, device=device)[:, :size]
    before = torch.randn(size, size, device=device)
    total = before.clone()
    add(total, x)
    exact = (x.double().T @ x.double() + before.double()).triu()
    return float((total.double().triu() - exact).abs().max() / exact.abs().max())


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Allow rounding of float32 products to TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def triangles(device: str, kinds: dict[str, torch.dtype], repeats: int = REPEATS) -> Iterator[GramRow]:
    """Compare full products, `add_gram` and the kernel, for all sizes."""
    kernel = triangle_kernel.triton is not None and device == "cuda"
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if kernel else 0
    for kind, dtype in kinds.items():
        with tf32(kind == "TF32"):
            errors: dict[str, float] = {}
            for rows in ROWS:
                for size in COLUMNS:
                    x = torch.randn(rows, size, dtype=dtype, device=device)
                    total = torch.zeros(size, size, device=device)
                    programs: dict[str, Add] = {"one product": one_product, "add_gram": add_gram}
                    if kernel:
                        tried = candidates(dtype, rows, size, multiprocessors)
                        times = medians({name: repeated(add, total, x) for name, add in tried.items()}, 3, "settings")
                        best = min(times, key=lambda name: times[name])
                        programs[best] = tried[best]
                    runs = {name: repeated(add, total, x) for name, add in programs.items()}
                    seconds = medians(runs, repeats, f"{kind} {rows} {size}")
                    for name, value in seconds.items():
                        if name not in errors:
                            errors[name] = error(programs[name], dtype, device)
                        library = {"one product": "torch", "add_gram": "kfs"}.get(name, "Triton")
                        ratio = value / seconds["one product"]
                        yield GramRow(f"{kind}, {rows} x {size}", name, library, value / CALLS, ratio, errors[name])


def widths(device: str) -> None:
    """Print milliseconds for several widths of strips; the last one is a single product."""
    kinds = [torch.float32] if device == "cpu" else [torch.float32, torch.bfloat16]
    for positions, size in SIZES[device]:
        for dtype in kinds:
            x = torch.randn(positions, size, device=device, dtype=dtype)
            total = torch.zeros(size, size, device=device)

            def program(width: int, total: Tensor = total, x: Tensor = x) -> Callable[[], None]:
                return lambda: strips(total, x, width)

            some = [w for w in (64, 96, 128, 256, 384, 512, 768, 1024, 1536) if w < size] + [size]
            times = medians({w: program(w) for w in some}, REPEATS, "gram")
            print(positions, size, dtype, {w: round(1e3 * t, 3) for w, t in times.items()})


def compare(device: str, kinds: dict[str, torch.dtype], results: Path = RESULTS) -> None:
    """Print a table of full products, `add_gram` and the kernel, and write JSON."""
    if triangle_kernel.triton is None:
        print("Triton is not installed.")
    print("| product | program | library | microseconds | time / (one product) | error |\n|---|---|---|---|---|---|")
    rows = []
    for row in triangles(device, kinds):
        rows.append(row)
        numbers = f"{1e6 * row.seconds:.1f} | {row.ratio:.2f} | {row.error:.1e}"
        print(f"| {row.problem} | {row.program} | {row.library} | {numbers} |", flush=True)
    print(f"Written: {save(rows, 'gram', {'device': device}, results)}")


def main(device: str = "cpu") -> None:
    """Measure widths of strips, and on a GPU also the kernel."""
    widths(device)
    if device == "cuda":
        compare(device, KINDS)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cpu")
