"""Cost of derivative products, kfs.basics against torch.func, in units of one forward and backward pass.

Prints a Markdown table and writes benchmarks/results/products.json and products.png. Everything is measured in one run,
in turn. Every product includes its forward pass. The FLOP column is what the matrix products alone predict.
"""

import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.progress import track
from torch import Tensor
from torch.func import functional_call, grad, jvp, vjp
from torch.nn import CrossEntropyLoss, Linear, ReLU, Sequential
from torch.utils._python_dispatch import TorchDispatchMode

from kfs import __version__
from kfs.basics import ggn_product, hessian_product, jacobian_products

RESULTS = Path(__file__).parent / "results"
WIDTHS, BATCH, REPEATS = (784, 512, 512, 10), 256, 15


@dataclass(frozen=True)
class Row:
    """One measured product.

    Attributes:
        product: Which product.
        library: Whose implementation.
        seconds: Median time.
        ratio: That time in units of forward and backward.
        flop_ratio: FLOPs of the matrix products in units of forward and backward.
    """

    product: str
    library: str
    seconds: float
    ratio: float
    flop_ratio: float


class MatrixProductFlops(TorchDispatchMode):
    """Counts the FLOPs of matrix products (PyTorch's own counter fails under nested torch.func transforms)."""

    def __init__(self) -> None:
        """Start at zero."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # noqa: D105
        if func in {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}:
            left, right = args[-2:]
            self.total += 2 * left.shape[0] * left.shape[1] * right.shape[1]
        return func(*args, **(kwargs or {}))


def programs() -> dict[tuple[str, str], Callable[[], object]]:
    """Return what is measured: forward and backward, and the products with respect to the first layer's weight."""
    torch.manual_seed(0)
    layers = [layer for i, o in pairwise(WIDTHS) for layer in (Linear(i, o), ReLU())]
    model, loss = Sequential(*layers[:-1]), CrossEntropyLoss()
    X, y = torch.randn(BATCH, WIDTHS[0]), torch.randint(WIDTHS[-1], (BATCH,))
    W = layers[0].weight
    assert isinstance(W, Tensor)  # noqa: S101 (nn.Module attributes are not typed)
    v, u = torch.randn_like(W), torch.randn(BATCH, WIDTHS[-1])
    rest = {name: p.detach() for name, p in model.named_parameters()}
    weight = W.detach()

    def f(w: Tensor) -> Tensor:
        return functional_call(model, rest | {"0.weight": w}, X)  # type: ignore[no-any-return]

    def risk(prediction: Tensor) -> Tensor:
        return loss(prediction, y)  # type: ignore[no-any-return]

    def forward_backward() -> None:
        loss(model(X), y).backward()
        model.zero_grad()

    def func_hvp() -> Tensor:
        gradient = grad(lambda w: risk(f(w)))
        return jvp(gradient, (weight,), (v,))[1]  # type: ignore[no-any-return]

    def ours_ggnvp() -> Tensor:
        prediction = model(X)
        return ggn_product.ggnvp(risk(prediction), prediction, W, v)

    def func_ggnvp() -> Tensor:
        prediction, Jv = jvp(f, (weight,), (v,))[:2]
        HJv = jvp(grad(risk), (prediction,), (Jv,))[1]
        return vjp(f, weight)[1](HJv)[0]  # type: ignore[no-any-return]

    return {
        ("forward+backward", "torch"): forward_backward,
        ("vjp", "kfs.basics"): lambda: jacobian_products.vjp(model(X), W, u),
        ("vjp", "torch.func"): lambda: vjp(f, weight)[1](u),
        ("jvp", "kfs.basics"): lambda: jacobian_products.jvp(model(X), W, v),
        ("jvp", "torch.func"): lambda: jvp(f, (weight,), (v,)),
        ("hvp", "kfs.basics"): lambda: hessian_product.hvp(risk(model(X)), W, v),
        ("hvp", "torch.func"): func_hvp,
        ("ggnvp", "kfs.basics"): ours_ggnvp,
        ("ggnvp", "torch.func"): func_ggnvp,
    }


def measure(repeats: int = REPEATS) -> list[Row]:
    """Time all programs in turn, `repeats` times, and return the medians and FLOPs relative to forward and backward."""
    tasks = programs()
    flops = {}
    for key, program in tasks.items():
        with MatrixProductFlops() as counter:  # also a warm-up
            program()
        flops[key] = counter.total
    times: dict[tuple[str, str], list[float]] = {key: [] for key in tasks}
    for _ in track(range(repeats), "Measuring", transient=True):
        for key, program in tasks.items():
            start = time.perf_counter()
            program()
            times[key].append(time.perf_counter() - start)
    seconds = {key: statistics.median(values) for key, values in times.items()}
    unit = ("forward+backward", "torch")
    return [Row(*key, seconds[key], seconds[key] / seconds[unit], flops[key] / flops[unit]) for key in tasks]


def draw(rows: list[Row], file: Path) -> None:
    """Draw the ratios as bars, and the FLOP ratios as lines across them."""
    products = list(dict.fromkeys(row.product for row in rows[1:]))
    libraries = list(dict.fromkeys(row.library for row in rows[1:]))
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    width = 0.8 / len(libraries)
    for i, library in enumerate(libraries):
        chosen = [row for row in rows if row.library == library]
        places = [products.index(row.product) + (i - (len(libraries) - 1) / 2) * width for row in chosen]
        axes.bar(places, [row.ratio for row in chosen], 0.9 * width, label=library)
        left, right = [place - width / 2 for place in places], [place + width / 2 for place in places]
        label = "FLOPs" if i == 0 else ""
        axes.hlines([row.flop_ratio for row in chosen], left, right, colors="black", label=label)
    axes.set_xticks(range(len(products)), products)
    axes.set_ylabel("cost in units of forward+backward")
    axes.set_title(f"Derivative products, MLP {'-'.join(map(str, WIDTHS))}, batch {BATCH}")
    axes.legend(frameon=False)
    figure.savefig(file, dpi=150)


def main(results: Path = RESULTS, repeats: int = REPEATS) -> None:
    """Measure, print the table, and write table and plot."""
    rows = measure(repeats)
    results.mkdir(parents=True, exist_ok=True)
    environment = {
        "kfs": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "widths": WIDTHS,
        "batch": BATCH,
        "repeats": repeats,
    }
    text = json.dumps({"environment": environment, "rows": [asdict(row) for row in rows]}, indent=2)
    (results / "products.json").write_text(text + "\n", encoding="utf-8")
    draw(rows, results / "products.png")
    print("| product | library | milliseconds | time / (forward+backward) | FLOPs / (forward+backward) |")
    print("|---|---|---|---|---|")
    for row in rows:
        print(f"| {row.product} | {row.library} | {1e3 * row.seconds:.2f} | {row.ratio:.2f} | {row.flop_ratio:.2f} |")
    print(f"Written: {results / 'products.json'}, {results / 'products.png'}")


if __name__ == "__main__":
    main()
