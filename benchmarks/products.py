"""Cost of derivative products, kfs.basics against torch.func, in units of one forward and backward pass.

Everything is measured in one run, in turn. Every product includes its forward pass. The FLOP column, and the lines in
the plot, are the ratios that matrix products alone predict.
"""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor
from torch.func import functional_call, grad, jvp, vjp
from torch.nn import CrossEntropyLoss, Linear, ReLU, Sequential
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.report import RESULTS, Row, medians, write
from kfs.basics import ggn_product, hessian_product, jacobian_products

WIDTHS, BATCH, REPEATS = (784, 512, 512, 10), 256, 15


class MatrixProductFlops(TorchDispatchMode):
    """Counts the FLOPs of matrix products (PyTorch's own counter fails under nested torch.func transforms)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func in {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}:
            left, right = args[-2:]
            self.total += 2 * left.shape[0] * left.shape[1] * right.shape[1]
        return func(*args, **(kwargs or {}))


def programs() -> dict[tuple[str, str], Callable[[], object]]:
    """Return the programs: forward and backward, and the products with respect to the first layer's weight."""
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
    """Count FLOPs and time all programs."""
    tasks = programs()
    flops = {}
    for key, program in tasks.items():
        with MatrixProductFlops() as counter:
            program()
        flops[key] = counter.total
    seconds = medians(tasks, repeats, "Products")
    unit = ("forward+backward", "torch")
    return [Row("MLP", *key, seconds[key], seconds[key] / seconds[unit], flops[key] / flops[unit]) for key in tasks]


def main(results: Path = RESULTS, repeats: int = REPEATS) -> None:
    """Measure, and write table, JSON and plot."""
    write(measure(repeats), "products", {"widths": WIDTHS, "batch": BATCH, "repeats": repeats}, results)


if __name__ == "__main__":
    main()
