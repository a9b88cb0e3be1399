"""Linear operations: `F.linear`, `addmm`, products with `@`, simple `einsum`, bilinear maps.

All multiply vectors $x$ of features with a weight matrix $W$: the input-based factor comes from $x$, the
gradient-based one from gradients with respect to $W x$.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (as everybody calls it)

from kfs.kfac.capture.mode import Capture, Read, Receiver
from kfs.kfac.capture.parameters import View
from kfs.kfac.capture.uses import Use
from kfs.kfac.layout import Layout
from kfs.kfac.sums.inputs import Rows, Vectors


def linear(capture: Capture, func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """Multiply with `weight` `[out, in]`."""
    return _multiply(capture, "linear", lambda x: func(x, weight, bias), input, weight, bias)


def addmm(capture: Capture, func: Any, *args: Tensor, beta: float = 1, alpha: float = 1, **kwargs: Tensor) -> Any:
    """Compute `bias + x @ weight`, as Hugging Face's `Conv1D` does."""
    bias, x, weight = (*args, *kwargs.values())
    if beta != 1 or alpha != 1:
        return NotImplemented
    return _multiply(capture, "addmm", lambda t: func(bias, t, weight), x, weight.T, bias)


def matmul(capture: Capture, func: Any, *args: Tensor, **kwargs: Tensor) -> Any:
    """Compute `a @ b`, where one of them is a parameter with two axes."""
    a, b = (*args, *kwargs.values())
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or min(a.ndim, b.ndim) < 2:
        return NotImplemented
    if b.ndim == 2 and capture.sources.find(b) is not None:
        return _multiply(capture, "matmul", lambda x: func(x, b), a, b.T, None)
    if a.ndim == 2:
        if not capture.is_data(b):
            return NotImplemented
        x = capture.as_data(b.transpose(-1, -2))
        return _multiply(capture, "matmul", lambda x: func(a, x.transpose(-1, -2)), x, a, None, _transposed)
    return NotImplemented


def rmatmul(capture: Capture, func: Any, b: Tensor, a: Tensor) -> Any:
    """Compute `a @ b`."""
    return matmul(capture, lambda x, y: func(y, x), a, b)


def einsum(capture: Capture, func: Any, equation: Any, *operands: Any) -> Any:
    """Contract a parameter with a tensor over some of the parameter's axes; all its other axes are in the result."""
    operands = operands[0] if len(operands) == 1 and type(operands[0]) in {tuple, list} else operands
    if not isinstance(equation, str) or len(operands) != 2 or "->" not in equation or "." in equation:
        return NotImplemented
    sides, result = equation.replace(" ", "").split("->")
    letters = sides.split(",")
    which = [i for i, t in enumerate(operands) if capture.sources.find(t) is not None]
    if len(which) != 1:
        return NotImplemented
    w, x = letters[which[0]], letters[1 - which[0]]
    weight, vectors = operands[which[0]], operands[1 - which[0]]
    into, out = [c for c in w if c in x], [c for c in w if c not in x]
    rest = [c for c in x if c not in into]
    simple = len(set(w)) == len(w) and len(set(x)) == len(x) and len(set(result)) == len(result)
    if (
        not simple
        or not into
        or not out
        or set(result) != {*rest, *out}
        or list(w) not in ([*into, *out], [*out, *into])
    ):
        return NotImplemented
    view = capture.sources.view(weight)
    if view is None or view.transposed or not capture.is_data(vectors):
        return NotImplemented
    order = tuple(w.index(c) for c in (*out, *into))
    layout, side = capture.uses.place(
        Layout(view.source.name, tuple(view.source.tensor.shape), view.rows, order, len(out))
    )

    def features_last(t: Tensor, axes: str, features: list[str], first: int) -> Tensor:
        permuted = t.permute(*range(first), *(first + axes.index(c) for c in (*rest, *features)))
        return permuted.flatten(first + len(rest))

    return capture.record(
        func(equation, *operands),
        "einsum",
        layout,
        Vectors(features_last(vectors, x, into, 0)),
        lambda g: features_last(g, result, out, 1),
        ones=False,
        side=side,
    )


def bilinear(
    capture: Capture, func: Any, input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Any:
    """Compute `x^T W y + bias` for every matrix `W` of `weight`: linear in the outer products of the inputs."""
    view = capture.sources.view(weight)
    if view is None or not capture.is_data(input1) or not capture.is_data(input2):
        return NotImplemented
    x = (input1.detach().unsqueeze(-1) * input2.detach().unsqueeze(-2)).flatten(-2)
    layout = Layout(view.source.name, tuple(view.source.tensor.shape), view.rows, (0, 1, 2), 1)
    return record_with_bias(
        capture, func(input1, input2, weight, bias), "bilinear", layout, Vectors(x), lambda g: g, bias
    )


def record_with_bias(
    capture: Capture, out: Tensor, operation: str, layout: Layout, vectors: Any, read: Read, bias: Tensor | None
) -> Any:
    """Take note of a use of weight and bias, in one block or in two. The bias lies along the output features."""
    tracked = bias is not None and capture.sources.find(bias) is not None
    if tracked and (capture.sources.view(bias) is None or bias.shape != (layout.row_size * layout.groups,)):  # type: ignore[union-attr]
        return NotImplemented
    name = _name_of(capture, bias, layout)
    layout, side = capture.uses.place(layout, name)
    joint = name is not None and layout.bias == name and side == "A"
    out = capture.record(out, operation, layout, vectors, read, joint, side)
    return record_bias(capture, out, bias, read, layout.groups) if tracked and not joint else out


def _name_of(capture: Capture, bias: Tensor | None, layout: Layout) -> str | None:
    """Return the name of a bias that may join its weight: all of it, or the part that belongs to the weight's rows."""
    view = capture.sources.view(bias)
    if view is None or bias is None or bias.shape != (layout.row_size * layout.groups,):
        return None
    whole = view.rows == (0, len(view.source.tensor))
    fits = whole if layout.rows == (0, layout.shape[0]) else view.rows == layout.rows
    return view.source.name if fits else None


def record_bias(capture: Capture, out: Tensor, bias: Tensor | None, read: Read, groups: int = 1) -> Any:
    """Take note of a use of a bias alone."""
    view = capture.sources.view(bias)

    def features_last(g: Tensor) -> Tensor:
        return read(g).flatten(-2) if groups > 1 else read(g)

    shape = features_last(torch.empty(1, *out.shape, device="meta")).shape
    if view is None or view.source.tensor.ndim != 1 or bias is None or len(bias) != shape[-1]:
        return NotImplemented

    return record_vector(capture, out, "bias", view, features_last, shape[1:-1])


def record_vector(
    capture: Capture, out: Tensor, operation: str, view: View, read: Read, leading: tuple[int, ...]
) -> Tensor:
    """Take note of a use of a vector that is added to, or scales, the output's features.

    Args:
        capture: The forward pass.
        out: What the operation returned.
        operation: What to call it.
        view: The vector.
        read: Turns the output's gradients into those of the vector, one for each position.
        leading: The axes of positions in what `read` returns.
    """
    layout = Layout(view.source.name, tuple(view.source.tensor.shape), view.rows, (0,), 1)
    return capture.record(out, operation, layout, Rows(None, 1, leading, out), read, ones=False)


def _multiply(
    capture: Capture,
    operation: str,
    call: Callable[[Tensor], Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    read: Read = lambda g: g,
) -> Any:
    """Take note of `call(x)`, which multiplies vectors `x` `[..., in]` with `weight` `[out, in]`."""
    view = capture.sources.view(weight)
    if capture.sources.find(weight) is None and capture.is_data(x):
        return record_bias(capture, call(x), bias, read)
    if view is None or weight.ndim != 2 or capture.sources.find(x) is not None:
        return NotImplemented
    order = (1, 0) if view.transposed else (0, 1)
    layout = Layout(view.source.name, tuple(view.source.tensor.shape), view.rows, order, 1)
    if capture.is_data(x):
        return record_with_bias(capture, call(x), operation, layout, Vectors(_as_used(x)), read, bias)
    name = _name_of(capture, bias, layout)
    where, side = capture.uses.place(layout, name)
    if bias is not None and capture.sources.find(bias) is not None and (name is None or where.bias != name):
        return NotImplemented
    out = call(x)

    def record(with_batch: bool) -> Receiver:
        vectors = Vectors(x if with_batch else x.expand(capture.num_data, *x.shape))
        use = Use(capture.batch, operation, where, vectors, read, out, name is not None, side)
        return capture.uses.record(use)

    return capture.record_virtual(out, layout.weight, record)


def _transposed(g: Tensor) -> Tensor:
    return g.transpose(-1, -2)


def _as_used(x: Tensor) -> Tensor:
    """Return an input in the precision in which `autocast` multiplies it."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) and x.dtype != torch.float64 else x


RULES = {
    F.linear: linear,
    F.bilinear: bilinear,
    torch.addmm: addmm,
    torch.matmul: matmul,
    torch.mm: matmul,
    torch.einsum: einsum,
    Tensor.addmm: addmm,
    Tensor.matmul: matmul,
    Tensor.mm: matmul,
    Tensor.__matmul__: matmul,
    Tensor.__rmatmul__: rmatmul,
}
