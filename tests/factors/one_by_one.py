"""Gradients of single examples by autograd, in a loop: the reference for per-example gradients."""

from collections.abc import Callable

import torch
from torch import Tensor

from kfs.basics.reduction_factors import reduction_factor
from tests.factors.arrangements import Instance


def own_term(one: Instance) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the unscaled term of the loss, for predictions and targets with a batch axis of length one."""
    total = type(one.loss)(reduction="sum")
    return lambda f, y: total(f, y) / reduction_factor(total, y)


def gradients(one: Instance, quantity: Callable[[Tensor, Tensor], Tensor] | None = None) -> dict[str, Tensor]:
    """Differentiate the term of the loss, or another quantity, for each example in a loop: `[N, *shape]`."""
    params = {name: p for name, p in one.model.named_parameters() if p.requires_grad}
    quantity = own_term(one) if quantity is None else quantity
    rows = []
    for n, y in enumerate(one.ys):
        value = quantity(one.predict(n).unsqueeze(0), y)
        rows.append(torch.autograd.grad(value, list(params.values()), materialize_grads=True, allow_unused=True))
    return {name: torch.stack(g) for name, g in zip(params, zip(*rows, strict=True), strict=True)}


def flat(gradients: dict[str, Tensor]) -> Tensor:
    """Return gradients as rows of a matrix, in the order of parameters."""
    return torch.cat([g.reshape(len(g), -1) for g in gradients.values()], 1)


def close(actual: Tensor, expected: Tensor) -> None:
    """Whether both are equal, up to float64 round-off of sums of some hundred terms, relative to the largest number."""
    assert actual.shape == expected.shape
    largest = max(1.0, float(expected.abs().max()))
    assert float((actual - expected).abs().max()) <= 1e-12 * largest
