"""Small models for cases: layers that are pooled, called twice or renamed, and rows in all arrangements."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


class Pool(nn.Module):
    """Sums or averages over some axes."""

    def __init__(self, kind: str, axes: tuple[int, ...]) -> None:
        super().__init__()
        self.kind, self.axes = kind, axes

    def forward(self, x: Tensor) -> Tensor:
        """Sum or average."""
        return x.sum(self.axes) if self.kind == "sum" else x.mean(self.axes)


class CalledTwice(nn.Module):
    """One layer, applied to both halves of its input; both results are added, or are two positions of the output."""

    def __init__(self, combine: str, tied: bool = False) -> None:
        """Say what happens to the two results; `tied` uses two modules with one weight."""
        super().__init__()
        self.first = nn.Linear(4, 3, bias=not tied)
        self.second = nn.Linear(4, 3, bias=False) if tied else self.first
        self.second.weight = self.first.weight
        self.combine = combine

    def forward(self, x: Tensor) -> Tensor:
        """Apply it twice."""
        one, two = self.first(x[:, :4]), self.second(x[:, 4:])
        return one + two if self.combine == "sum" else torch.stack([one, two], 1)


class Renamed(nn.Linear):
    """A linear layer by another name, with code of its own."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (PyTorch's name)
        """Multiply."""
        return F.linear(input, self.weight, self.bias)


class Rows(nn.Module):
    """A layer that gets all positions of all data as rows of one matrix; results are summed per example, or kept.

    Args:
        order: `"folded"` for example by example, `"mixed"` for rows in an order that has nothing to do with data.
        combine: `"sum"` over the positions of an example, or `"keep"` them as positions of the output.
    """

    def __init__(self, order: str, combine: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.order, self.combine = order, combine

    def forward(self, x: Tensor) -> Tensor:
        """Fold, multiply, unfold."""
        rows = x.flatten(0, 1)
        order = torch.arange(len(rows))
        if self.order == "mixed":
            order = order.reshape(x.shape[:2]).T.flatten().flip(0)
        results: Tensor = self.linear(rows[order])[order.argsort()].unflatten(0, x.shape[:2])
        return results.sum(1) if self.combine == "sum" else results


class Ragged(nn.Module):
    """A layer that gets positions whose last feature is positive, which are more for some data than for others."""

    def __init__(self, combine: str) -> None:
        """Say what happens to results: `"sum"` or `"keep"`."""
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.combine = combine

    def forward(self, x: Tensor) -> Tensor:
        """Drop positions, multiply, and put zeros in their places."""
        mask = x[..., -1] > 0
        results: Tensor = self.linear(x[..., :-1][mask])
        filled = results.new_zeros(*mask.shape, 3).masked_scatter(mask.unsqueeze(-1), results)
        return filled.sum(1) if self.combine == "sum" else filled


class Padded(nn.Module):
    """Predicts a class for every position from it and the mean of all positions, where the last feature is positive.

    Other positions are padding: predictions for real ones do not depend on them. Those for padding are there, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 2)
        self.last = nn.Linear(2, 3)

    def mask(self, x: Tensor) -> Tensor:
        """Return which positions are real, `[batch, positions]`."""
        return x[..., -1] > 0

    def forward(self, x: Tensor) -> Tensor:
        """Return logits `[batch, classes, positions]`."""
        mask = self.mask(x).unsqueeze(-1)
        h = torch.tanh(self.first(x[..., :-1]))
        mean = (mask * h).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
        logits: Tensor = self.last(h + mean)
        return logits.movedim(-1, 1)


class Table(nn.Module):
    """A learned table of positions that is repeated for every example and added to inputs, before a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(7, 4))
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Repeat, add and multiply."""
        result: Tensor = self.linear(x + self.table.repeat(len(x), 1, 1))
        return result


class _Multiply(torch.autograd.Function):
    """A product with a weight that only autograd sees."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return g @ weight, g.T @ x


class Hidden(nn.Module):
    """One weight that is used twice: by a layer, and inside a function of the author's own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Add both results."""
        result: Tensor = self.linear(x[:, :4]) + _Multiply.apply(x[:, 4:], self.linear.weight)  # type: ignore[no-untyped-call]
        return result
