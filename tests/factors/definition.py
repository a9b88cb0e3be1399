"""KFAC of one module, computed literally: loops over examples, positions and backpropagated vectors.

Module hooks record inputs and outputs, one call of `autograd.grad` per example and vector computes gradients, and
patches are cut out pixel by pixel. No code is shared with the engine.
"""

from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from kfs.basics.hessian_factorizations import hessian_factor
from kfs.basics.reduction_factors import Loss
from kfs.operators import Fisher, LinearOperator
from kfs.problem.risk import EmpiricalRisk


def patches(layer: Any, x: Tensor) -> Tensor:
    """Cut the patches of one example `[C, *spatial]` out: `[positions, groups, C / groups * kernel]`."""
    dims = x.ndim - 1
    padding = layer.padding
    if padding == "same":
        totals = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        around = [(t // 2, t - t // 2) for t in totals]
    else:
        around = [(p, p) for p in ((0,) * dims if padding == "valid" else padding)]
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    x = nn.functional.pad(x.unsqueeze(0), [side for pair in reversed(around) for side in pair], mode=mode).squeeze(0)
    spans = [d * (k - 1) + 1 for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
    starts = [range(0, n - span + 1, s) for n, span, s in zip(x.shape[1:], spans, layer.stride, strict=True)]
    rows = []
    for place in product(*starts):
        window = x[
            (slice(None), *(slice(p, p + span, d) for p, span, d in zip(place, spans, layer.dilation, strict=True)))
        ]
        rows.append(window.reshape(layer.groups, -1))
    return torch.stack(rows)


def vectors(layer: nn.Module, x: Tensor) -> Tensor:
    """Return one example's inputs as `[positions, groups, features]`."""
    if isinstance(layer, nn.Linear):
        return x.reshape(-1, 1, x.shape[-1])
    return patches(layer, x)


def gradients(layer: nn.Module, g: Tensor) -> Tensor:
    """Return one example's output gradients as `[positions, groups, features]`."""
    if isinstance(layer, nn.Linear):
        return g.reshape(-1, 1, g.shape[-1])
    groups: int = layer.groups  # type: ignore[assignment]
    return g.reshape(groups, len(g) // groups, -1).movedim(2, 0)


def rows_that_count(predictions: Tensor, out: Tensor) -> Tensor:
    """Return which rows of an output `[..., features]` affect the given predictions, as a mask `[...]`, by loops."""
    size = torch.zeros(out.shape[:-1], dtype=torch.float64)
    for one in predictions.flatten():
        (gradient,) = torch.autograd.grad(one, out, retain_graph=True)
        size += gradient.norm(dim=-1)
    return size > 1e-12  # round-off, such as that of the query of a position that attends only to itself


def definition(
    model: nn.Module, loss: Loss, X: Tensor, y: Tensor, layer: nn.Module, sharing: str, R: float, every: bool = True
) -> tuple[Tensor, Tensor]:
    """Compute both factors of a layer, with a joint bias if it has one: `[groups, d, d]` each.

    All calls of the layer count as further shared positions. Unless `every` position counts, rows of a linear layer
    count only if they affect a prediction whose label is not ignored.
    """
    calls: list[tuple[Tensor, Tensor]] = []
    handle = layer.register_forward_hook(lambda _, args, out: calls.append((args[0], out)))
    f = model(X)
    handle.remove()
    N, A, B = len(X), torch.zeros(()), torch.zeros(())
    terms = 0
    for n in range(N):
        x = torch.cat([vectors(layer, inputs[n].detach()) for inputs, _ in calls])
        if layer.bias is not None:
            x = torch.cat([x, torch.ones_like(x[..., :1])], -1)
        rows = torch.ones(len(x), dtype=torch.bool)
        if not every:
            rows = torch.cat([rows_that_count(f[n][:, y[n] != -100], out)[n].flatten() for _, out in calls])
        x = x[rows]
        S = len(x)
        terms += S if sharing == "expand" else S > 0
        A = A + outer(x, sharing)
        columns = hessian_factor(loss, f[n].detach(), y[n]).reshape(f[n].numel(), -1).T
        for v in columns.reshape(-1, *f[n].shape):
            outs = torch.autograd.grad((f[n] * v).sum(), [out for _, out in calls], retain_graph=True)
            g = torch.cat([gradients(layer, out[n]) for out in outs])[rows]
            B = B + outer(g, sharing) / (1 if sharing == "expand" else S**2)
    return R * A, B / terms


def outer(v: Tensor, sharing: str) -> Tensor:
    """Sum outer products over positions, or take the outer product of the sum: `[groups, d, d]`."""
    total = v.new_zeros(v.shape[1], v.shape[2], v.shape[2])
    for position in v if sharing == "expand" else v.sum(0, keepdim=True):
        total += torch.stack([torch.outer(u, u) for u in position])
    return total


def fresh_fisher(risk: EmpiricalRisk, mc_samples: int = 1, seed: int = 0) -> LinearOperator:
    """Return the Monte Carlo Fisher for the draws of EKFAC's eigenvalues: `m, ..., 2 m - 1` for each example.

    The average over twice as many draws is the mean of this one and that of the factors' draws.
    """
    both, first = (Fisher(risk, "type-1", mc_samples=m, seed=seed) for m in (2 * mc_samples, mc_samples))
    return 2.0 * both - first
