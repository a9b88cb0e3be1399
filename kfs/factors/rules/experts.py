"""Experts: products with all matrices of a parameter `[E, in, out]`, rewritten as one product for each matrix.

Every matrix has a block of its own, as if it were the weight of a separate layer. A mixture of experts sends a token to
a few of them; the heads of attention may also have their matrices in one parameter.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kfs.factors.rules.elementwise import broadcast
from kfs.factors.trace.discovery import Discovery
from kfs.factors.trace.plan import Argument, Call, Planned, Rewrite, argument_at
from kfs.problem.torch_fixes import refuse_checkpoint

_STACK = "A product with a stack of matrices (experts)"


def product(call: Call, a: Argument, b: Argument) -> Planned:
    """Plan `a @ b`, where one operand is a stack of matrices of a parameter."""
    weight, x = (a, b) if a.tracked else (b, a)
    if x.data and weight.derived:
        # Computed matrices that are the same for all examples, such as keys of positions: each example gets a copy.
        leading = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        mine = (1,) * (len(leading) - weight.ndim + 2) + weight.shape[:-2]
        copies = any(n == 1 and long % call.num_data == 0 for n, long in zip(mine, leading, strict=True))
        if copies or call.num_data == 1:  # a single example needs no copies
            return (broadcast(weight, (*leading, *weight.shape[-2:]), "matmul"),)
        return None
    if not x.data or not _is_stack(weight):
        return None

    def multiply(vectors: Tensor, matrix: Tensor) -> Tensor:
        return matrix @ vectors if weight is a else vectors @ matrix

    def body(seen: Discovery, *args: Any, **kwargs: Any) -> Tensor:
        W, vectors = (argument_at(t.place, args, kwargs) for t in (weight, x))
        with seen.intercepting():
            return _over_experts(vectors, W, multiply)

    return Rewrite(body)


def einsum(weight: Argument, x: Argument, letters: tuple[str, str, str]) -> Planned:
    """Plan an `einsum` in which the first axis of a parameter is an axis of the data and of the result, too.

    `letters` are those of the parameter, of `x`, and of the result.
    """
    w, v, result = letters
    if len(w) < 3:
        return None
    expert, contracted = w[0], set(w[1:]) & set(v)
    one_by_one = expert in v and expert in result and not contracted & set(result)
    if not one_by_one or not contracted or set(w) <= set(v) or not x.data:
        return None
    axis, parts = v.index(expert), _parts(weight)
    if weight.shape[0] != x.shape[axis] or not parts or any(part.view is None for part in parts):
        return None
    repeated = _is_repeated(weight)
    matrix, vectors, output = (part.replace(expert, "") for part in letters)

    def body(seen: Discovery, *args: Any, **kwargs: Any) -> Tensor:
        W, data = (argument_at(t.place, args, kwargs) for t in (weight, x))
        with seen.intercepting():
            if repeated:
                return torch.einsum(f"{matrix},{v}->{result}", W[0], data)
            refuse_checkpoint(_STACK)
            pairs = zip(W.unbind(0), data.unbind(axis), strict=True)
            outputs = [torch.einsum(f"{matrix},{vectors}->{output}", *pair) for pair in pairs]
            return torch.stack(outputs, result.index(expert))

    return Rewrite(body)


def baddbmm(
    call: Call,
    input: Argument,
    batch1: Argument,
    batch2: Argument,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: Argument | None = None,
) -> Planned:
    """Plan `beta * input + alpha * batch1 @ batch2`."""
    if out is not None or not (batch1.data or batch2.data):
        return None
    joins = beta == 1 and alpha == 1 and _are_biases(input, batch1, batch2)

    def body(seen: Discovery, *args: Any, **kwargs: Any) -> Tensor:
        bias, a, b = (argument_at(t.place, args, kwargs) for t in (input, batch1, batch2))
        with seen.intercepting():
            if joins:
                refuse_checkpoint(_STACK)
                triples = zip(bias.squeeze(1).unbind(0), a.unbind(0), b.unbind(0), strict=True)
                return torch.stack([torch.addmm(*triple) for triple in triples])
            z = torch.bmm(a, b)
            if beta == 0:  # then the input is ignored, even if it is not finite
                return alpha * z
            z = z if alpha == beta else alpha / beta * z
            # A parameter is added before scaling, so that no scaled parameter has to be tracked.
            total = bias + z
            total = total if beta == 1 else beta * total
            result: Tensor = total.to(z.dtype)  # under autocast, the sum has a higher precision than the operation
            return result

    return Rewrite(body)


def grouped_mm(
    call: Call,
    input: Argument,
    mat2: Argument,
    offs: Argument | None = None,
    bias: Argument | None = None,
    out_dtype: torch.dtype | None = None,
) -> Planned:
    """Plan products of consecutive rows with one matrix of `[E, in, out]` each; `offs` has the ends of groups."""
    if bias is not None or out_dtype is not None or not input.data or not _is_stack(mat2):
        return None

    def body(seen: Discovery, *args: Any, **kwargs: Any) -> Tensor:
        x, W = (argument_at(t.place, args, kwargs) for t in (input, mat2))
        ends = None if offs is None else argument_at(offs.place, args, kwargs).tolist()
        # Autocast does not affect this operation, but would affect its parts.
        with torch.autocast(x.device.type, enabled=False), seen.intercepting():
            if ends is None:
                return _over_experts(x, W, torch.matmul)
            refuse_checkpoint(_STACK)
            sizes = [stop - start for start, stop in pairwise([0, *ends])]
            *groups, rest = x.split([*sizes, len(x) - ends[-1]])
            outputs = [group @ matrix for group, matrix in zip(groups, W.unbind(0), strict=True)]
            return torch.cat([*outputs, rest.new_zeros(len(rest), W.shape[2])])

    return Rewrite(body)


def _over_experts(x: Tensor, W: Tensor, multiply: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Multiply `[..., E, n, m]` with the matrices of `[E, i, j]` one by one; axes are broadcast as by `matmul`."""
    if W.ndim == 2:
        return multiply(x, W)
    x = x.expand(*torch.broadcast_shapes(x.shape[:-2], W.shape[:-2]), *x.shape[-2:])
    if W.shape[0] == 1 or W.stride(0) == 0:  # one matrix for all experts
        return _over_experts(x, W[0], multiply)
    refuse_checkpoint(_STACK)
    pairs = zip(x.unbind(-W.ndim), W.unbind(0), strict=True)
    return torch.stack([_over_experts(one, matrix, multiply) for one, matrix in pairs], -W.ndim)


def _is_stack(weight: Argument) -> bool:
    """Whether a tensor with more than two axes is a stack of matrices that are simple views of a parameter."""
    if weight.ndim < 3 or not weight.tracked:
        return False
    known = [_is_stack(part) if part.ndim > 2 else part.view is not None for part in _parts(weight)]
    return bool(known) and all(known)


def _are_biases(input: Argument, x: Argument, weight: Argument) -> bool:
    """Whether an input `[E, 1, out]` holds the biases of linear layers with weights `[E, in, out]`."""
    if input.ndim != 3 or input.shape[1] != 1 or not x.data or not _is_stack(weight):
        return False
    biases = [part.part(0) for part in _parts(input)]
    known = all(bias.view is not None and bias.shape == weight.shape[2:] for bias in biases)
    return known and len(biases) == len(_parts(weight))


def _parts(weight: Argument) -> list[Argument]:
    """Return descriptions of the slices along the first axis; a single one if all slices are the same."""
    return [weight.part(index) for index in range(1 if _is_repeated(weight) else weight.shape[0])]


def _is_repeated(weight: Argument) -> bool:
    return weight.shape[0] == 1 or weight.stride[0] == 0


RULES: dict[Any, Callable[..., Planned]] = {torch.baddbmm: baddbmm, Tensor.baddbmm: baddbmm}
if hasattr(torch, "_grouped_mm"):  # pragma: no branch (F.grouped_mm calls it; older versions of PyTorch lack it)
    RULES[torch._grouped_mm] = grouped_mm
