r"""A differential equation as a least-squares problem: terms with residuals, points and weights.

$$
\mathcal{L}(\theta) = \frac12 \sum_k w_k \frac{1}{N_k} \sum_{n=1}^{N_k} \lVert r_k(x_{k,n}, \theta) \rVert^2
$$

`Problem` makes one model and one loss of all terms. Everything that takes a risk or a model works with it: gradients,
`kfs.GGN`, `kfs.KFAC`, and any optimizer. Derivatives of networks live in `kfs.pinn.taylor`, and optimizers for such
problems in `kfs.pinn.natural_gradient` and `kfs.pinn.termwise`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from kfs.display.describe import Described, Description, Table, counted
from kfs.errors import DataError, DtypeError, ModelError, ShapeError
from kfs.losses import HalfSquaredError
from kfs.problem.isolation import check_module
from kfs.problem.risk import EmpiricalRisk

Points = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True)
class Term:
    """One term of a problem: an equation inside of a domain, a condition on its boundary, or data.

    Attributes:
        residual: A function of the model and points, `residual(model, x)`, that vanishes for a solution. It returns
            one row for every point, `[N]` or `[N, m]`, which depends on no other point. If there are several tensors
            of points, it gets all of them: `residual(model, x, y)`.
        points: Points `[N, d]`, or a tuple of tensors with one row for every point, such as points and measured
            values. For fresh points in every step, a function without arguments that returns them.
        weight: Factor of the term, positive.
        name: Name for messages.
    """

    residual: Callable[..., Tensor]
    points: Points | Callable[[], Points]
    weight: float = 1.0
    name: str = ""


class Residuals(nn.Module):
    """The weighted residuals of all terms as a module: a function of points and of the term of each point.

    Args:
        model: The network.
        terms: The terms.
        columns: Widths of the tensors of points, for each term.
        scales: Factors of the residuals.
        width: Number of residuals of a point. Terms that have fewer are padded with zeros.
    """

    def __init__(
        self,
        model: nn.Module,
        terms: Sequence[Term],
        columns: Sequence[Sequence[int]],
        scales: Sequence[float],
        width: int,
    ) -> None:
        super().__init__()
        self.model = model
        self.terms, self.columns, self.scales, self.width = tuple(terms), columns, scales, width

    def forward(self, x: Tensor, term: Tensor) -> Tensor:
        """Return residuals `[N, width]`.

        Args:
            x: Points of all terms, padded to the same number of columns, `[N, columns]`.
            term: The index of the term of each point, `[N]`.
        """
        pieces, places = [], []
        for k in range(len(self.terms)):
            rows = (term == k).nonzero().squeeze(1)
            if len(rows):
                own = x if len(rows) == len(x) else x[rows]
                pieces.append(self.of_term(k, own))
                places.append(rows)
        if len(pieces) == 1:
            return pieces[0]
        return torch.cat(pieces)[torch.cat(places).argsort()]

    def of_term(self, k: int, x: Tensor) -> Tensor:
        """Return the scaled residuals of points of one term, `[N, width]`."""
        parts = x[:, : sum(self.columns[k])].split(list(self.columns[k]), dim=1)
        r = self.scales[k] * in_rows(self.terms[k].residual(self.model, *parts), x)
        return r if r.shape[1] == self.width else nn.functional.pad(r, (0, self.width - r.shape[1]))


class Problem(Described):
    """A least-squares problem for a network: a sum of terms, each the weighted mean square of residuals.

    Args:
        model: The network. Its parameters that require gradients are trained.
        terms: At least one `Term`. Points are moved to the device of the model. Functions for points are called once
            now, and by `draw()`.

    Attributes:
        model: The network.
        terms: The terms, with names.
        residuals: The model for other parts of the library: a module that returns the residuals of all points.
        loss: The loss for `residuals`: half the mean square, `kfs.losses.HalfSquaredError()`.
        inputs: The arguments of `residuals`: all points, and the index of the term of each.
        targets: The targets of `loss`: zeros.

    Raises:
        DataError: If there are no points, or a residual is not finite.
        ShapeError: If a residual does not have one row for each point.
        ModelError: If a weight is not positive, or there is no parameter to train.

    Example:
        The solution of u'' = -sin(x) with zeros at both ends:

        >>> from kfs.pinn import EnergyNaturalGradient, Problem, Term, taylor
        >>> _ = torch.manual_seed(0)
        >>> net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1)).double()
        >>> x = torch.linspace(0, torch.pi, 40, dtype=torch.float64).unsqueeze(1)
        >>> inside = Term(lambda u, x: taylor(u, x).laplacian + x.sin(), x, name="inside")
        >>> ends = Term(lambda u, x: u(x), x[[0, -1]], name="ends")
        >>> problem = Problem(net, [inside, ends])
        >>> optimizer = EnergyNaturalGradient(problem)
        >>> for _ in range(50):
        ...     loss = optimizer.step()
        >>> bool((net(x) - x.sin()).abs().max() < 1e-3)
        True
        >>> print(problem)
        Problem of Sequential: 42 points, 49 parameters
        terms
        term    points  residuals  weight
        ------  ------  ---------  ------
        inside      40          1       1
        ends         2          1       1
    """

    def __init__(self, model: nn.Module, terms: Sequence[Term]) -> None:
        if not isinstance(model, nn.Module):
            raise DtypeError(f"The model is a {type(model).__name__}.", "Pass a torch.nn.Module.")
        self.model = model
        self.terms = tuple(_checked(term, place) for place, term in enumerate(terms))
        if not self.terms:
            raise DataError("The problem has no terms.", "Pass at least one Term(residual, points).")
        self._params = [p for p in model.parameters() if p.requires_grad]
        if not self._params:
            raise ModelError("No parameter of the model requires gradients.", "Call model.requires_grad_().")
        check_module(model)
        self.loss = HalfSquaredError()
        self._points = [self._drawn(term) for term in self.terms]
        self._widths = [self._width_of(k) for k in range(len(self.terms))]
        self._put_together()

    def describe(self) -> Description:
        """Describe model and terms."""
        numbers = [p.numel() for p in self._params]
        title = f"Problem of {type(self.model).__name__}: {counted(self.num_points, 'point')}, "
        rows = [
            (term.name, f"{len(points[0]):,}", str(width), f"{term.weight:g}")
            for term, points, width in zip(self.terms, self._points, self._widths, strict=True)
        ]
        header = ("term", "points", "residuals", "weight")
        table = Table("terms", header, rows, ("points", "residuals", "weight"))
        return Description(title + counted(sum(numbers), "parameter"), (), (table,))

    @property
    def num_points(self) -> int:
        """Number of points of all terms."""
        return sum(len(points[0]) for points in self._points)

    @property
    def draws(self) -> bool:
        """Whether a term has a function that draws points."""
        return any(callable(term.points) for term in self.terms)

    @property
    def risk(self) -> EmpiricalRisk:
        """The problem at its present points as a risk, for `kfs.KFAC(problem.risk, fisher="ggn")` and others."""
        return EmpiricalRisk(self.residuals, self.loss, (self.inputs, self.targets))

    def __call__(self) -> Tensor:
        """Return the loss at the present points. Call `backward()` on it to train with any optimizer."""
        return self.loss(self.residuals(*self.inputs), self.targets)

    def draw(self) -> None:
        """Draw fresh points for terms whose points are a function."""
        self._points = [
            self._drawn(term) if callable(term.points) else points
            for term, points in zip(self.terms, self._points, strict=True)
        ]
        self._put_together()

    def parts(self, *groups: Sequence[int]) -> list["Problem"]:
        """Return problems with some of the terms each, at the same points; their losses add up to the loss.

        Args:
            *groups: Indices of terms. By default, there is one problem for each term.
        """
        found = []
        for group in groups or [(k,) for k in range(len(self.terms))]:
            part = object.__new__(Problem)
            part.model, part.loss, part._params = self.model, self.loss, self._params
            part.terms = tuple(self.terms[k] for k in group)
            part._points = [self._points[k] for k in group]
            part._widths = [self._widths[k] for k in group]
            part._put_together()
            found.append(part)
        return found

    def term_points(self) -> list[tuple[Callable[..., Tensor], tuple[Tensor, ...], float]]:
        """Return residual, points and scale of each term; the loss is half the sum of squares of scaled residuals."""
        return [
            (term.residual, points, (term.weight / len(points[0])) ** 0.5)
            for term, points in zip(self.terms, self._points, strict=True)
        ]

    def _drawn(self, term: Term) -> tuple[Tensor, ...]:
        """Return the points of a term, after checking them."""
        points = term.points() if callable(term.points) else term.points
        tensors = points if isinstance(points, tuple) else (points,)
        like = self._params[0]
        for t in tensors:
            if not isinstance(t, Tensor) or t.dtype != like.dtype:
                kind = t.dtype if isinstance(t, Tensor) else type(t).__name__
                raise DtypeError(
                    f"The points of {term.name} are {kind}, but the model is {like.dtype}.",
                    f"Pass tensors of {like.dtype}, or convert the model.",
                )
            if t.ndim != 2:
                raise ShapeError(
                    f"The points of {term.name} have shape {list(t.shape)}.", "Pass [N, d]; use x.unsqueeze(1) for [N]."
                )
        lengths = [len(t) for t in tensors]
        if not lengths or min(lengths) == 0:
            raise DataError(f"The term {term.name} has no points.", "Pass at least one point, or leave out the term.")
        if len(set(lengths)) > 1:
            raise ShapeError(
                f"The points of {term.name} are tensors of lengths {lengths}.", "Pass one row of each for every point."
            )
        return tuple(t.detach().to(like.device) for t in tensors)

    def _width_of(self, k: int) -> int:
        """Return the number of residuals of a point, after evaluating and checking them."""
        term, points = self.terms[k], self._points[k]
        with torch.no_grad():
            r = term.residual(self.model, *points)
        if not isinstance(r, Tensor) or r.ndim not in {1, 2} or len(r) != len(points[0]):
            shape = f"shape {list(r.shape)}" if isinstance(r, Tensor) else f"type {type(r).__name__}"
            raise ShapeError(
                f"The residual of {term.name} has {shape} for {counted(len(points[0]), 'point')}.",
                "Return a tensor with one row for each point, [N] or [N, m], as u(x) - y does for y of shape [N, m].",
            )
        check_finite(r, term.name)
        return 1 if r.ndim == 1 else r.shape[1]

    def _put_together(self) -> None:
        """Make the module of all residuals, and its inputs and targets."""
        columns = [[t.shape[1] for t in points] for points in self._points]
        lengths = [len(points[0]) for points in self._points]
        total, width, most = sum(lengths), max(self._widths), max(map(sum, columns))
        # The loss is half the mean square over all points.
        scales = [(term.weight * total / n) ** 0.5 for term, n in zip(self.terms, lengths, strict=True)]
        if not hasattr(self, "residuals"):
            self.residuals = Residuals(self.model, self.terms, columns, scales, width)
        self.residuals.columns, self.residuals.scales = columns, scales
        joined = [torch.cat(points, dim=1) for points in self._points]
        x = torch.cat([nn.functional.pad(t, (0, most - t.shape[1])) for t in joined])
        term = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(x.device)
        self.inputs, self.targets = (x, term), x.new_zeros(total, width)


def in_rows(r: Tensor, points: Tensor) -> Tensor:
    """Return residuals as `[N, m]`, also those of a single point whose axis was squeezed."""
    return r.reshape(len(points), -1)


def check_finite(r: Tensor, name: str) -> None:
    """Raise an error if residuals are NaN or infinite.

    Raises:
        DataError: For the first point whose residual is not finite.
    """
    good = r.isfinite()
    if not bool(good.all()):
        first = int((~good).flatten(1).any(1).nonzero()[0]) if r.ndim > 1 else int((~good).nonzero()[0])
        raise DataError(
            f"The residual of {name} is not finite at point {first}.",
            "Check the equation at this point, the parameters of the model, and the step size.",
        )


def _checked(term: Term, place: int) -> Term:
    """Return a term with a name, after checking its weight."""
    if not isinstance(term, Term):
        raise DtypeError(f"terms[{place}] is a {type(term).__name__}.", "Pass Term(residual, points, weight).")
    name = term.name or f"term {place}"
    weight: Any = term.weight
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not isfinite(weight) or weight <= 0:
        raise ModelError(f"The weight of {name} is {weight!r}.", "Pass a positive number.")
    if not callable(term.residual):
        raise DtypeError(
            f"The residual of {name} is a {type(term.residual).__name__}.", "Pass a function of the model and points."
        )
    return Term(term.residual, term.points, float(weight), name)
