"""Linear operations: `F.linear`, `addmm`, products with `@`, simple `einsum`, bilinear maps.

All multiply feature vectors $x$ with a weight matrix $W$: the input-based factor comes from $x$, the gradient-based one
from gradients with respect to $W x$. The matrix may be one of several in a parameter; products with all of them at once
are in `experts`.
"""

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from kfs.factors.accumulate.inputs import Inputs, Rows, Vectors
from kfs.factors.layout import Layout
from kfs.factors.rules import experts
from kfs.factors.trace.derived import on_device
from kfs.factors.trace.discovery import Discovery
from kfs.factors.trace.plan import Argument, Call, Plan, Planned, Read, Rewrite, argument_at, with_argument


def linear(call: Call, input: Argument, weight: Argument, bias: Argument | None = None) -> Planned:
    """Plan a linear layer with `weight` `[out, in]`."""
    return bias_apart(call, input, bias) if weight.derived else multiply(call, "linear", input, weight, bias)


def addmm(
    call: Call,
    input: Argument,
    mat1: Argument,
    mat2: Argument,
    out_dtype: Any = None,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: Argument | None = None,
) -> Planned:
    """Plan `bias + x @ weight`, as in Hugging Face's `Conv1D`."""
    if beta != 1 or alpha != 1 or out_dtype is not None or out is not None:
        return None
    return multiply(call, "addmm", mat1, mat2, input, flip=True)


def matmul(call: Call, input: Argument, other: Argument, *, out: Argument | None = None) -> Planned:
    """Plan `a @ b`, where one operand is a parameter with two axes or a stack of matrices, or `b` is a vector."""
    a, b = input, other
    if out is not None or not isinstance(a, Argument) or not isinstance(b, Argument):
        return None
    if b.ndim == 1 and b.tracked:
        return inner_products(call, a, b)
    if min(a.ndim, b.ndim) < 2:
        return None
    if b.ndim == 2 and b.tracked:
        return multiply(call, "matmul", a, b, flip=True)
    if a.ndim == 2 and b.data:
        leading = (*b.shape[:-2], b.shape[-1])
        return multiply(call, "matmul", b, a, leading=leading, prepare=_transposed, read=_transposed)
    return experts.product(call, a, b)


def mm(call: Call, input: Argument, mat2: Argument, out_dtype: Any = None, *, out: Argument | None = None) -> Planned:
    """Plan `a @ b`, with the argument names of `torch.mm` and `torch.bmm`."""
    return None if out_dtype is not None else matmul(call, input, mat2, out=out)


def rmatmul(call: Call, input: Argument, other: Argument) -> Planned:
    """Plan `other @ input`."""
    return matmul(call, other, input)


def einsum(call: Call, equation: Any, *operands: Any) -> Planned:
    """Plan a contraction of a parameter with a tensor over some of the parameter's axes, or all."""
    operands = operands[0] if len(operands) == 1 and type(operands[0]) in {tuple, list} else operands
    if not isinstance(equation, str) or len(operands) != 2 or "->" not in equation or "." in equation:
        return None
    sides, result = equation.replace(" ", "").split("->")
    letters = sides.split(",")
    which = [i for i, operand in enumerate(operands) if operand.tracked]
    if len(which) != 1:
        return None
    w, x = letters[which[0]], letters[1 - which[0]]
    weight, vectors = operands[which[0]], operands[1 - which[0]]
    into, out = [c for c in w if c in x], [c for c in w if c not in x]
    rest = [c for c in x if c not in into]
    if not all(len(set(part)) == len(part) for part in (w, x, result)):
        return None
    if not into or set(result) != {*rest, *out}:
        return experts.einsum(weight, vectors, (w, x, result))
    view = weight.view
    if view is None or not vectors.data:
        return None

    def features_last(t: Tensor, axes: str, features: list[str], first: int) -> Tensor:
        permuted = t.permute(*range(first), *(first + axes.index(c) for c in (*rest, *features)))
        return permuted.flatten(first + len(rest)) if features else permuted.unsqueeze(-1)

    axes = w[::-1] if view.transposed else w
    layout = view.layout(tuple(axes.index(c) for c in (*out, *into)), len(out))
    plan = Plan(
        "einsum",
        layout,
        Vectors(layout.column_size),
        (vectors,),
        prepare=lambda t: features_last(t, x, into, 0),
        read=lambda g, _: features_last(g, result, out, 1),
    )
    return (plan,)


def inner_products(call: Call, x: Argument, weight: Argument) -> Planned:
    """Plan inner products of vectors `[*leading, in]` with a weight `[in]`: a matrix with one row."""
    view = weight.view
    if view is None or not x.data or x.ndim < 2:
        return None
    layout = view.layout((0,), 0)
    prepare = None
    if call.narrow is not None and x.dtype != torch.float64:
        prepare = _narrowed(call.narrow, None)  # as autocast multiplies
    return (Plan("matmul", layout, Vectors(layout.column_size), (x,), prepare, read=lambda g, _: g.unsqueeze(-1)),)


def bilinear(call: Call, input1: Argument, input2: Argument, weight: Argument, bias: Argument | None = None) -> Planned:
    """Plan `x^T W y + bias` for every matrix `W` of `weight`, which is linear in outer products of the inputs."""
    view = weight.view
    if view is None or view.stacked or not input1.data or not input2.data:
        return None
    layout = view.layout((0, 1, 2), 1)

    def prepare(x: Tensor, y: Tensor) -> Tensor:
        return (x.unsqueeze(-1) * y.unsqueeze(-2)).flatten(-2)

    vectors = Vectors(layout.column_size)
    return weight_and_bias("bilinear", layout, vectors, (input1, input2), bias, input1.shape[:-1], prepare)


def multiply(
    call: Call,
    operation: str,
    x: Argument,
    weight: Argument,
    bias: Argument | None = None,
    *,
    flip: bool = False,
    leading: tuple[int, ...] | None = None,
    prepare: Callable[[Tensor], Tensor] | None = None,
    read: Read | None = None,
) -> Planned:
    """Plan a product of vectors `[*leading, in]` with a weight `[out, in]`, or `[in, out]` if `flip`.

    The vectors are `x`, or `prepare(x)`; then `leading` has their leading axes.
    """
    leading = x.shape[:-1] if leading is None else leading
    if weight.ndim != 2:
        return None
    if not weight.tracked:
        features = weight.shape[1 if flip else 0]
        return (bias_plan(bias, leading, read),) if x.data and is_bias(bias, features) else None
    if weight.rows and x.data and not flip and read is None and bias is None:
        return _some_outputs(x, weight)
    view = weight.view
    if view is None or x.tracked:
        return None
    layout = view.matrix_layout(flip)
    if call.narrow is not None and x.dtype != torch.float64:
        prepare = _narrowed(call.narrow, prepare)  # as autocast multiplies
    vectors = Vectors(layout.column_size)
    return weight_and_bias(operation, layout, vectors, (x,), bias, leading, prepare, read, follows=not x.data)


def _some_outputs(x: Argument, weight: Argument) -> Planned:
    """Plan a product with a table in which a parameter has replaced some rows: these rows give some of the outputs."""
    layout, chosen = weight.layout_of_rows(), torch.tensor(weight.rows)

    def read(g: Tensor, _: Any) -> Tensor:
        return g.index_select(-1, on_device(chosen, g.device))

    return (Plan("linear", layout, Vectors(layout.column_size), (x,), read=read),)


def weight_and_bias(
    operation: str,
    layout: Layout,
    inputs: Inputs,
    arguments: tuple[Argument, ...],
    bias: Argument | None,
    leading: tuple[int, ...],
    prepare: Callable[..., Any] | None = None,
    read: Read | None = None,
    follows: bool = False,
) -> Planned:
    """Plan a use of a weight, and of a bias along the output features. The trace decides if they share a block."""
    features = layout.row_size * layout.groups
    alone, joins = None, False
    if bias is not None and bias.tracked:
        view = bias.view
        if view is None or not is_bias(bias, features):
            return None
        alone = bias_plan(bias, leading, read)
        # Some rows of a bias may join only the same rows of a weight.
        whole = layout.rows == (0, layout.shape[0])
        same_rows = (view.rows, view.shape[0]) == (layout.rows, layout.shape[0])
        joins = view.is_whole if whole else same_rows
    return (Plan(operation, layout, inputs, arguments, prepare, read, alone, joins, follows),)


def bias_apart(call: Call, x: Argument, bias: Argument | None, trailing: int = 0) -> Rewrite | None:
    """Plan to add the bias after an operation whose weight is computed, so that the bias is covered.

    The output has `trailing` axes after its features.
    """
    if not x.data or bias is None or not bias.tracked:
        return None
    place = bias.place

    def body(seen: Discovery, *args: Any, **kwargs: Any) -> Tensor:
        b = argument_at(place, args, kwargs)
        args, kwargs = with_argument(place, None, args, kwargs)
        with seen.intercepting():
            out: Tensor = call.func(*args, **kwargs) + b.reshape(-1, *(1,) * trailing)
            return out

    return Rewrite(body)


def is_bias(bias: Argument | None, features: int) -> TypeGuard[Argument]:
    """Whether a bias is there, tracked, and a vector of features."""
    return bias is not None and bias.view is not None and bias.shape == (features,)


def bias_plan(bias: Argument, leading: tuple[int, ...], read: Read | None) -> Plan:
    """Plan the use of a bias. `read` returns the gradients of the output as `[columns, *leading, features]`."""
    view = bias.view
    assert view is not None  # noqa: S101 (callers have checked)
    return Plan("bias", view.layout((0,), 1), Rows(None, 1, leading, bias.dtype, bias.device), read=read)


def _narrowed(dtype: torch.dtype, prepare: Callable[[Tensor], Tensor] | None) -> Callable[[Tensor], Tensor]:
    return (lambda x: x.to(dtype)) if prepare is None else (lambda x: prepare(x).to(dtype))


def _transposed(t: Tensor, _: Any = None) -> Tensor:
    return t.transpose(-1, -2)


RULES = {
    F.linear: linear,
    F.bilinear: bilinear,
    torch.addmm: addmm,
    torch.matmul: matmul,
    torch.mm: mm,
    torch.bmm: mm,
    torch.einsum: einsum,
    Tensor.addmm: addmm,
    Tensor.matmul: matmul,
    Tensor.mm: mm,
    Tensor.bmm: mm,
    Tensor.__matmul__: matmul,
    Tensor.__rmatmul__: rmatmul,
}
