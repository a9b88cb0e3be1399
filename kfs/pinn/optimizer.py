"""What the optimizers of a `Problem` have in common: points of a step, momentum, line search and state.

Directions live in `kfs.pinn.natural_gradient` and `kfs.pinn.termwise`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor, nn

from kfs.display.describe import Described, Description, counted
from kfs.errors import DtypeError, ModelError, StorageError
from kfs.pinn.problem import Problem, check_finite, in_rows
from kfs.problem.torch_fixes import call_with

Params = dict[str, Tensor]


class OneTerm(nn.Module):
    """The residual of one term as a function of its points, without weights; it returns `[N, m]`.

    Args:
        model: The network.
        residual: The residual, which is a function of the network and points.
    """

    def __init__(self, model: nn.Module, residual: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model, self.residual = model, residual

    def forward(self, *points: Tensor) -> Tensor:
        """Return residuals `[N, m]`."""
        return in_rows(self.residual(self.model, *points), points[0])


@dataclass(frozen=True)
class Rows:
    """Residuals of one term at the points of a step.

    Attributes:
        module: The residual as a function of points.
        points: The points.
        scale: Factor with which half the sum of squares is the term of the loss.
        name: Name of the term.
    """

    module: OneTerm
    points: tuple[Tensor, ...]
    scale: float
    name: str

    def residuals(self, params: Params) -> Tensor:
        """Return scaled residuals at given parameters, `[rows]`."""
        r: Tensor = call_with(self.module, {f"model.{n}": p for n, p in params.items()}, self.points)
        return self.scale * r.flatten()


class ProblemOptimizer(Described, ABC):
    """Base of optimizers that own a `Problem`.

    Args:
        problem: The problem.
        lr: Factor of each step. `None` for a line search, on a logarithmic grid from 1 on.
        damping: Added to the curvature; what it is relative to depends on the optimizer.
        momentum: Fraction of the last direction that is kept.
        points_per_step: Number of points of all terms, drawn at random in each step. By default, all points.
        seed: Seed for drawing points.
    """

    # Smallest step of the line search, as a power of two.
    smallest = -24

    def __init__(
        self,
        problem: Problem,
        lr: float | None,
        damping: float,
        momentum: float,
        points_per_step: int | None,
        seed: int,
    ) -> None:
        if not isinstance(problem, Problem):
            raise DtypeError(f"The problem is a {type(problem).__name__}.", "Pass kfs.pinn.Problem(model, terms).")
        _check_number("lr", 1.0 if lr is None else lr, 0, inf, "Pass a positive number, or None for a line search.")
        _check_number("damping", damping, 0, inf, "Pass a positive number.")
        _check_number("momentum", momentum, None, 1, "Pass a number from 0 up to, but not including, 1.")
        some = points_per_step
        is_count = isinstance(some, int) and not isinstance(some, bool)
        if some is not None and not (is_count and some >= len(problem.terms)):
            raise ModelError(
                f"points_per_step is {points_per_step!r} for {counted(len(problem.terms), 'term')}.",
                "Pass at least one point for each term, or None for all points.",
            )
        self.problem = problem
        self.lr, self.damping, self.momentum, self.points_per_step = lr, float(damping), momentum, points_per_step
        self.steps = 0
        self._generator = torch.Generator().manual_seed(seed)
        self._direction: Params = {}
        self._modules = [OneTerm(problem.model, term.residual) for term in problem.terms]

    def describe(self) -> Description:
        """Describe the optimizer and its settings."""
        lr = "line search" if self.lr is None else f"lr={self.lr:g}"
        about = f"{type(self).__name__} of {type(self.problem.model).__name__} after {counted(self.steps, 'step')}"
        return Description(about, (f"{lr}, damping={self.damping:.2g}, momentum={self.momentum:g}",))

    def step(self) -> float:
        """Draw points, if the problem or `points_per_step` asks for it, and update the parameters.

        Returns:
            The loss at the points of this step, before the update.

        Raises:
            DataError: If a residual is not finite. Parameters and state are unchanged then.
        """
        if self.problem.draws and self.steps:
            self.problem.draw()
        rows = self._rows()
        params = {name: p.detach() for name, p in self.problem.model.named_parameters() if p.requires_grad}
        with torch.enable_grad():
            r = self._checked_residuals(rows, params)
            loss = 0.5 * float(r.square().sum())
            direction = self.direction(rows, params, r, self._momentum_for(params))
        self._apply(rows, params, loss, direction)
        self.steps += 1
        return loss

    @abstractmethod
    def direction(self, rows: list[Rows], params: Params, r: Tensor, last: Params) -> Params:
        """Return the direction whose negative is the step.

        Args:
            rows: Residuals at the points of this step.
            params: Present parameters by name, without graph.
            r: Present residuals, `[rows]`; the loss is half their sum of squares.
            last: The last direction times momentum; zeros in the first step.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state: number of steps, settings that change, momentum, and the state of the generator."""
        return {
            "steps": self.steps,
            "lr": self.lr,
            "damping": self.damping,
            "direction": {name: t.clone() for name, t in self._direction.items()},
            "generator": self._generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of `state_dict`.

        Raises:
            StorageError: If an entry is missing, or belongs to another model.
        """
        missing = [name for name in self.state_dict() if name not in state]
        if missing:
            raise StorageError(
                f"The state lacks {missing}.", f"Pass what state_dict() of {type(self).__name__} returned."
            )
        shapes = {name: p.shape for name, p in self.problem.model.named_parameters()}
        wrong = [name for name, t in state["direction"].items() if shapes.get(name) != t.shape]
        if wrong:
            raise StorageError(f"The state is that of another model: {wrong[0]!r} differs.", "Build the same model.")
        self.steps, self.lr, self.damping = state["steps"], state["lr"], state["damping"]
        self._direction = {name: t.clone() for name, t in state["direction"].items()}
        self._generator.set_state(state["generator"])

    def _rows(self) -> list[Rows]:
        """Return the residuals of all terms, at all points or at some of them."""
        total, found = self.problem.num_points, []
        for module, term, (_, points, scale) in zip(
            self._modules, self.problem.terms, self.problem.term_points(), strict=True
        ):
            count = len(points[0])
            if self.points_per_step is not None and self.points_per_step < total:
                some = max(1, round(self.points_per_step * count / total))
                chosen = torch.randperm(count, generator=self._generator)[:some].to(points[0].device)
                points, scale = tuple(t[chosen] for t in points), scale * (count / some) ** 0.5  # noqa: PLW2901
            found.append(Rows(module, points, scale, term.name))
        return found

    def _momentum_for(self, params: Params) -> Params:
        """Return the last direction times momentum."""
        if not self.momentum or not self._direction:
            return {name: torch.zeros_like(p) for name, p in params.items()}
        kept = self._direction
        return {name: self.momentum * kept.get(name, torch.zeros_like(p)) for name, p in params.items()}

    def _checked_residuals(self, rows: Sequence[Rows], params: Params) -> Tensor:
        with torch.no_grad():
            parts = [row.residuals(params) for row in rows]
        for row, part in zip(rows, parts, strict=True):
            check_finite(part, row.name)
        return torch.cat(parts)

    def _apply(self, rows: Sequence[Rows], params: Params, loss: float, direction: Params) -> None:
        """Move the parameters, and adapt the damping after a line search."""

        def moved(size: float) -> Params:
            return {name: p - size * direction[name] for name, p in params.items()}

        @torch.no_grad()
        def loss_at(size: float) -> float:
            new = moved(size)
            value = 0.5 * sum(float(row.residuals(new).square().sum()) for row in rows)
            return value if isfinite(value) else inf

        size, new = (self.lr, 0.0) if self.lr is not None else line_search(loss_at, loss, self.smallest)
        if self.lr is None:
            self.adapt(size, loss, new)
        # A direction along which the loss does not fall is not kept.
        self._direction = direction if size else {}
        own = dict(self.problem.model.named_parameters())
        with torch.no_grad():
            for name, p in moved(size).items():
                own[name].copy_(p)

    def adapt(self, size: float, before: float, after: float) -> None:
        """Raise the damping if no step reduces the loss."""
        if not size:
            self.damping *= 4


def line_search(loss_at: Callable[[float], float], loss: float, smallest: int) -> tuple[float, float]:
    """Return the step size with the smallest loss among powers of two from 1 on, and its loss.

    The search ends at the first larger loss after one that is smaller than the present one.

    Args:
        loss_at: The loss for a step size.
        loss: The present loss.
        smallest: The logarithm of the smallest step size.

    Returns:
        Step size and loss; the size is zero if no step reduces the loss.
    """
    best, size = loss, 0.0
    for exponent in range(0, smallest - 1, -1):
        value = loss_at(2.0**exponent)
        if value < best:
            best, size = value, 2.0**exponent
        elif size:
            break
    return size, best


def _check_number(name: str, value: object, low: float | None, high: float, way_out: str) -> None:
    """Raise an error unless a number is larger than `low` (`None`: not negative) and less than `high`."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not (value >= 0 if low is None else low < value) or not value < high:  # type: ignore[operator]
        raise ModelError(f"{name} is {value!r}.", way_out)
