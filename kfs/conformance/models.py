"""Small models for cases: pooled layers, layers that are called twice, and layers with unusual arrangements of rows."""

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
        """Sum or average over the axes."""
        return x.sum(self.axes) if self.kind == "sum" else x.mean(self.axes)


class CalledTwice(nn.Module):
    """One layer that is applied to both halves of its input.

    Args:
        combine: `"sum"` adds the two results, `"stack"` stacks them as two positions of the output.
        tied: Whether to use two modules with one weight.
    """

    def __init__(self, combine: str, tied: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3, bias=not tied)
        self.second = nn.Linear(4, 3, bias=False) if tied else self.first
        self.second.weight = self.first.weight
        self.combine = combine

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to both halves, and combine the results."""
        one, two = self.first(x[:, :4]), self.second(x[:, 4:])
        return one + two if self.combine == "sum" else torch.stack([one, two], 1)


class Renamed(nn.Linear):
    """A subclass of `nn.Linear` that overrides `forward`."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (PyTorch's name)
        """Apply the linear map."""
        return F.linear(input, self.weight, self.bias)


class Rows(nn.Module):
    """A layer that receives all positions of all examples as rows of one matrix.

    Args:
        order: `"folded"` for rows sorted by example, `"mixed"` for rows in mixed order.
        combine: `"sum"` adds the results of an example, `"keep"` returns them as positions of the output.
    """

    def __init__(self, order: str, combine: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.order, self.combine = order, combine

    def forward(self, x: Tensor) -> Tensor:
        """Fold positions into rows, apply the layer, and unfold the results."""
        rows = x.flatten(0, 1)
        order = torch.arange(len(rows))
        if self.order == "mixed":
            order = order.reshape(x.shape[:2]).T.flatten().flip(0)
        results: Tensor = self.linear(rows[order])[order.argsort()].unflatten(0, x.shape[:2])
        return results.sum(1) if self.combine == "sum" else results


class Ragged(nn.Module):
    """A layer that receives only the positions with a positive last feature, so that their number differs by example.

    Args:
        combine: `"sum"` adds the results of an example, `"keep"` returns them as positions of the output.
    """

    def __init__(self, combine: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.combine = combine

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to the selected positions, and fill all other positions with zeros."""
        mask = x[..., -1] > 0
        results: Tensor = self.linear(x[..., :-1][mask])
        filled = results.new_zeros(*mask.shape, 3).masked_scatter(mask.unsqueeze(-1), results)
        return filled.sum(1) if self.combine == "sum" else filled


class Padded(nn.Module):
    """Predicts a class for every position from this position and the mean over all real positions.

    Real positions have a positive last feature. All other positions are padding. Predictions for real positions do not
    depend on padding. The output also has predictions for padding.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 2)
        self.last = nn.Linear(2, 3)

    def mask(self, x: Tensor) -> Tensor:
        """Return a mask that is true at real positions, `[batch, positions]`."""
        return x[..., -1] > 0

    def forward(self, x: Tensor) -> Tensor:
        """Return logits `[batch, classes, positions]`."""
        mask = self.mask(x).unsqueeze(-1)
        h = torch.tanh(self.first(x[..., :-1]))
        mean = (mask * h).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
        logits: Tensor = self.last(h + mean)
        return logits.movedim(-1, 1)


class Table(nn.Module):
    """A linear layer after a learned table of positions, which is repeated for every example and added to inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(7, 4))
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Add the repeated table to the inputs, and apply the layer."""
        result: Tensor = self.linear(x + self.table.repeat(len(x), 1, 1))
        return result


class _Multiply(torch.autograd.Function):
    """A product with a weight inside a custom function, which only autograd sees."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return g @ weight, g.T @ x


class Hidden(nn.Module):
    """One weight that is used by a layer, and also inside a custom `autograd.Function`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both results."""
        result: Tensor = self.linear(x[:, :4]) + _Multiply.apply(x[:, 4:], self.linear.weight)  # type: ignore[no-untyped-call]
        return result
