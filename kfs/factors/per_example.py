r"""Per-example gradients as sums over rows of outer products: the primitive for new statistics.

Algebra on rows is in `kfs.factors.accumulate.row_products`.

The gradient of example $n$ with respect to a block is $G_n = \sum_s g_{n,s}\, x_{n,s}^\top$, summed over shared
positions and over all uses of the parameter. `BlockGradients` stores the rows of some examples. It computes inner
products, and products with blocks of a curvature matrix. Matrices `[n, groups, d_B, d_A]` are formed only if that takes
fewer operations.

`per_datum` yields the gradients batch by batch. `kfs.Influence` uses them, and the eigenvalues of EKFAC use the same
rows.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from math import isfinite
from typing import Any, Literal, TypeVar, cast, get_args

import torch
from torch import Tensor

from kfs.display.describe import Described, Description, Table, counted, kind, times
from kfs.display.suggestions import ByName, few, suggest
from kfs.errors import DataError, ModelError, ShapeError
from kfs.factors.accumulate import Captured, KeptGradients
from kfs.factors.accumulate.row_products import (
    PlainVectors,
    RowProducts,
    RowVectors,
    UnitVectors,
    at_a_time,
    cheaper,
    cheaper_within,
    joined_products,
    matrix_inner,
    matrix_inner_by_row,
)
from kfs.factors.blocks import BlockDiagonal, Congruence, Eigenbasis, Factor, Kronecker, Structure
from kfs.factors.checkpoint import Progress
from kfs.factors.compute import Passes, Vectors, coverage_error, not_covered
from kfs.factors.layout import Key, Layout
from kfs.factors.settings import Settings
from kfs.losses.quantities import Quantity, gradient_of
from kfs.operators.derivatives import leaves_and_rest, pull_back
from kfs.problem.data import Batch
from kfs.problem.risk import EmpiricalRisk, check_risk
from kfs.runtime.nested import tensors_in
from kfs.runtime.precision import full_precision
from kfs.runtime.sync import numbers

Basis = Eigenbasis | Congruence
Method = TypeVar("Method", bound=Callable[..., Any])


def precisely(method: Method) -> Method:
    """Decorate a method to compute in the precision of the gradients, even under the caller's `autocast`."""

    @wraps(method)
    def run(gradients: "BlockGradients", /, *args: Any, **kwargs: Any) -> Any:
        with full_precision(gradients.device.type):
            return method(gradients, *args, **kwargs)

    return cast("Method", run)


@dataclass(frozen=True, repr=False)
class BlockGradients(Described):
    """Per-example gradients with respect to the parameters of one block.

    Each gradient is the sum of all parts. It is a matrix `[d_B, d_A]` for each group of channels, as in the block's
    layout: inputs are on the side of `d_A`, with a one for the bias.

    Attributes:
        layout: How the parameter becomes a matrix.
        num_data: Number of examples.
        dtype: Dtype of the gradients, float32 or better.
        device: Device of the gradients.
        uses: One part for each use of the parameter: captured inputs and gradients, or rows.
        whole: A part given as matrices, `[n, groups, d_B, d_A]`. `None` if there is none.
    """

    layout: Layout
    num_data: int
    dtype: torch.dtype
    device: torch.device
    uses: tuple[Captured | RowProducts, ...] = ()
    whole: Tensor | None = None

    def describe(self) -> Description:
        """Describe block, data and parts; rows are not counted, because that may take memory."""
        groups, rows, columns = self.layout.matrix_shape
        size = times((groups, rows, columns) if groups > 1 else (rows, columns))
        where = kind(self.dtype, self.device)
        title = f"Gradients of {counted(self.num_data, 'example')}, block {self.layout.name!r}: {size}, {where}"
        parts = [f"rows of {counted(len(self.uses), 'use')}"] if self.uses else []
        parts += [] if self.whole is None else ["matrices"]
        return Description(title, (" + ".join(parts) or "zero: the parameter was not used",))

    @cached_property
    def parts(self) -> tuple[RowProducts, ...]:
        """The rows of all uses: each has vectors `x` and `g`, `[groups, n, rows of an example, d_A]` and `[..., d_B]`.

        Examples with fewer rows are padded with zeros. `x.dense()` materializes unit vectors and the coordinate of the
        bias.
        """
        return tuple((use.rows if isinstance(use, Captured) else use).to(self.dtype) for use in self.uses)

    def by_place(self) -> "BlockGradients":
        """Return the same gradients with separate rows for the positions at which a parameter was broadcast."""
        return replace(self, uses=tuple(use.by_place() if isinstance(use, Captured) else use for use in self.uses))

    @property
    def shared(self) -> int:
        """Number of rows of each example, over all parts; computed without materializing rows."""
        return sum(use.shared for use in self.uses)

    @property
    def numbers(self) -> int:
        """Number of entries of one example's gradient."""
        groups, rows, columns = self.layout.matrix_shape
        return groups * rows * columns

    @property
    def nbytes(self) -> int:
        """Bytes that are stored for all examples."""
        stored = sum(part.stored for part in self.parts) + (0 if self.whole is None else self.numbers)
        return self.num_data * stored * self.dtype.itemsize

    @precisely
    def some(self, data: slice) -> "BlockGradients":
        """Return the gradients of a slice of the examples."""
        num_data = len(range(*data.indices(self.num_data)))
        whole = None if self.whole is None else self.whole[data]
        return replace(self, num_data=num_data, uses=tuple(part.some(data) for part in self.parts), whole=whole)

    @precisely
    def dense(self) -> Tensor:
        """Materialize the gradients as matrices, `[n, groups, d_B, d_A]`."""
        total = self.whole
        for use in self.uses:
            matrices = torch.cat(list(use.matrices())).to(self.dtype)
            total = matrices if total is None else total + matrices
        if total is None:
            return torch.zeros(self.num_data, *self.layout.matrix_shape, dtype=self.dtype, device=self.device)
        return total

    def formed(self) -> "BlockGradients":
        """Return the same gradients as matrices."""
        return replace(self, uses=(), whole=self.dense())

    def tensors(self) -> dict[str, Tensor]:
        """Return the gradients by parameter name, `[n, *shape]`; rows that belong to other blocks are zero."""
        shapes = self.layout.param_shapes()
        result = {
            name: torch.zeros(self.num_data, *shape, dtype=self.dtype, device=self.device)
            for name, shape in shapes.items()
        }
        self.layout.write(self.dense(), result)
        return result

    @precisely
    def inner(self, other: "BlockGradients") -> Tensor:
        """Return inner products with the gradients of other examples, `[n, m]`, with the fewest operations."""
        self._check_block(other)
        total = torch.zeros(self.num_data, other.num_data, dtype=self.dtype, device=self.device)
        if not (self._has_parts and other._has_parts):
            return total
        sizes = (self.num_data, other.num_data), (self.shared, other.shared)
        by_rows = self.whole is None and other.whole is None
        if by_rows and cheaper(*sizes, self._work(other), self.numbers) == "rows":
            for mine in self.parts:
                for theirs in other.parts:
                    total += mine.inner(theirs)
            return total
        matrices = self.dense()
        if other._has_plain_rows:
            return matrix_inner(matrices, other.parts)
        # Form the other matrices a few examples at a time if there is a single part.
        one_part = len(other.uses) == 1 and other.whole is None
        place = 0
        for some in other.uses[0].matrices() if one_part else [other.dense()]:
            total[:, place : place + len(some)] = matrices.flatten(1) @ some.to(self.dtype).flatten(1).T
            place += len(some)
        return total

    @precisely
    def inner_by_row(self, other: "BlockGradients") -> list[Tensor]:
        """Return the contribution of each row of the other gradients to inner products, `[n, m, rows]`, part by part.

        The other gradients must consist of rows only.
        """
        self._check_block(other)
        shares = []
        for theirs in other.parts:
            share = torch.zeros(self.num_data, other.num_data, theirs.shared, dtype=self.dtype, device=self.device)
            for mine in self.parts:
                share += mine.inner(theirs, by_row=True)
            if self.whole is not None:
                step = at_a_time(self.whole, other.num_data * theirs.shared * theirs.g.size * theirs.g.groups)
                parts = [matrix_inner_by_row(some, theirs) for some in self.whole.split(step)]
                share += torch.cat(parts)
            shares.append(share)
        return shares

    @precisely
    def inner_within(self, other: "BlockGradients") -> Tensor:
        """Return the inner product of two gradients of every example, `[n]`."""
        self._check_block(other)
        if not (self._has_parts and other._has_parts):
            return torch.zeros(self.num_data, dtype=self.dtype, device=self.device)
        by_rows = self.whole is None and other.whole is None
        if by_rows and cheaper_within((self.shared, other.shared), self._work(other), self.numbers) == "rows":
            return torch.stack([mine.inner_within(theirs) for mine in self.parts for theirs in other.parts]).sum(0)
        return (self.dense() * other.dense()).flatten(1).sum(1)

    def squared_norms(self) -> Tensor:
        """Return the squared norm of every example's gradient, `[n]`."""
        return self.inner_within(self)

    @precisely
    def multiplied(self, structure: Structure) -> "BlockGradients":
        """Return the product with a block of a curvature matrix, or of an inverse, given this block's structure.

        Rows are kept where possible: under Kronecker products, and on the side of unit vectors under diagonal bases.
        """
        structure = structure.to(self.device, self.dtype)
        if self.keeps_rows(structure):
            return replace(self, uses=tuple(_multiplied_rows(part, structure) for part in self.parts))
        product = structure.multiply(self.dense().transpose(0, 1)).transpose(0, 1)
        return replace(self, uses=(), whole=product)

    def keeps_rows(self, structure: Structure) -> bool:
        """Whether the product with a block keeps rows: if that is possible, and takes fewer operations."""
        if self.whole is not None:
            return False
        if isinstance(structure, Kronecker):
            groups, rows, columns = self.layout.matrix_shape
            of_rows = self.shared * groups * (rows**2 + columns**2)
            return of_rows <= self.numbers * (self.shared + rows + columns)
        if not isinstance(structure, Basis):
            return False
        # A unit vector is an eigenvector of a diagonal side, and selects the eigenvalues on the other side.
        Q_A, Q_B = sides_of(structure)
        picks = [(x and Q_A is None) or (g and Q_B is None) for x, g in (use.units for use in self.uses)]
        return bool(picks) and all(picks)

    @precisely
    def rotated(self, basis: Basis) -> "BlockGradients":
        """Return the gradients in a basis, `Q_B^T G Q_A`."""
        Q_A, Q_B = sides_of(basis.to(self.device, self.dtype))
        parts = tuple(part.times(Q_A, Q_B) for part in self.parts)
        if self.whole is None:
            return replace(self, uses=parts)
        whole = self.whole if Q_A is None else self.whole @ Q_A
        whole = whole if Q_B is None else Q_B.transpose(1, 2) @ whole
        return replace(self, uses=parts, whole=whole)

    @property
    def _has_plain_rows(self) -> bool:
        """Whether gradients consist of rows of plain vectors, which exist already or take little memory."""
        written = [use for use in self.uses if isinstance(use, RowProducts) or use.plan.inputs.overlap == 1]
        if self.whole is not None or len(written) < len(self.uses):
            return False
        return all(isinstance(side, PlainVectors) for part in self.parts for side in (part.x, part.g))

    @property
    def _has_parts(self) -> bool:
        return bool(self.uses) or self.whole is not None

    def _work(self, other: "BlockGradients") -> tuple[int, int]:
        """Return the number of multiplications of inner products of vectors, on each side."""
        pairs = [(mine.work, theirs.work) for mine in self.uses for theirs in other.uses]
        return max(min(a[0], b[0]) for a, b in pairs), max(min(a[1], b[1]) for a, b in pairs)

    def _check_block(self, other: "BlockGradients") -> None:
        if self.layout != other.layout:
            raise ShapeError(
                f"Gradients of block {self.layout.name!r} have no inner product with those of {other.layout.name!r}, "
                "or these have another layout.",
                "Use the same block of the same model.",
            )


def joined_gradients(parts: Sequence[BlockGradients]) -> BlockGradients:
    """Concatenate the gradients of several batches, part by part."""
    first = parts[0]
    if len(parts) == 1:
        return first
    num_data = sum(part.num_data for part in parts)
    numbers_of_uses = {len(part.uses) for part in parts}
    if len(numbers_of_uses) > 1 or any(part.whole is not None for part in parts):
        return replace(first, num_data=num_data, uses=(), whole=torch.cat([part.dense() for part in parts]))
    uses = tuple(joined_products(same) for same in zip(*(part.parts for part in parts), strict=True))
    return replace(first, num_data=num_data, uses=uses)


def sides_of(basis: Basis) -> tuple[Tensor | None, Tensor | None]:
    """Return the matrices of a basis on both sides, `[groups, d, d]`; `None` for the standard basis."""
    both = (basis.Q_A, basis.Q_B) if isinstance(basis, Eigenbasis) else (basis.T_A, basis.T_B)
    Q_A, Q_B = (Q.values if Q.kind == "dense" else None for Q in both)
    return Q_A, Q_B


def _multiplied_rows(part: RowProducts, structure: Structure) -> RowProducts:
    """Multiply rows with a block that keeps rows; see `BlockGradients.keeps_rows`."""
    x, g = part.x, part.g
    if isinstance(structure, Kronecker):
        # For a unit vector, a diagonal factor is a scalar, which is moved to the other side.
        A, B = structure.A, structure.B
        if isinstance(x, UnitVectors) and A.kind == "diagonal":
            g = PlainVectors(g.dense() * A.values[:, x.index].unsqueeze(3))
        else:
            x = _times_factor(x, A)
        if isinstance(g, UnitVectors) and B.kind == "diagonal":
            x = PlainVectors(x.dense() * B.values[:, g.index].unsqueeze(3))
        else:
            g = _times_factor(g, B)
        scale = (A.scale * B.scale).reshape(-1, 1, 1, 1)
        if isinstance(g, PlainVectors):
            return RowProducts(x, PlainVectors(g.dense() * scale))
        return RowProducts(PlainVectors(x.dense() * scale), g)
    assert isinstance(structure, Basis)  # noqa: S101 (the only other kind)
    Q_A, Q_B = sides_of(structure)
    if isinstance(x, UnitVectors) and Q_A is None:
        return RowProducts(x, _filtered(g, Q_B, structure.values[0].T[x.index]))
    assert isinstance(g, UnitVectors)  # noqa: S101 (one side has unit vectors)
    return RowProducts(_filtered(x, Q_A, structure.values[0][g.index]), g)


def _filtered(vectors: RowVectors, Q: Tensor | None, values: Tensor) -> PlainVectors:
    """Rotate to a basis, multiply coordinates with values `[n, shared, size]`, and rotate back."""
    inside = (vectors if Q is None else vectors.times(Q)).dense() * values
    return PlainVectors(inside) if Q is None else PlainVectors(inside).times(Q.transpose(1, 2))


def _times_factor(vectors: RowVectors, factor: Factor) -> RowVectors:
    """Multiply vectors with matrices, without their scales."""
    if factor.kind == "identity":
        return vectors
    if factor.kind == "diagonal":
        return PlainVectors(vectors.dense() * factor.values[:, None, None])
    return vectors.times(factor.values.transpose(1, 2))


Uncovered = Literal["error", "skip", "autograd"]


@dataclass(frozen=True, repr=False)
class GradientBatch(Described):
    """Per-example gradients of consecutive examples, with respect to all blocks.

    Attributes:
        start: Index of the first example within the data set.
        stop: End of the half-open range of examples, `start` to `stop`.
        blocks: The gradients by block name.
        shapes: The shapes of all parameters, by name.
    """

    start: int
    stop: int
    blocks: Mapping[str, BlockGradients]
    shapes: Mapping[str, torch.Size]

    def __len__(self) -> int:
        return self.stop - self.start

    def describe(self) -> Description:
        """Describe data and blocks."""
        first = next(iter(self.blocks.values()))
        title = f"Gradients of examples {self.start:,} to {self.stop - 1:,}: {counted(len(self.blocks), 'block')}, "
        rows = [
            (name, times(block.layout.matrix_shape), str(len(block.uses)), "" if block.whole is None else "yes")
            for name, block in self.blocks.items()
        ]
        table = Table("blocks", ("block", "groups x d_B x d_A", "uses", "by autograd"), rows)
        return Description(title + kind(first.dtype, first.device), (), (table,))

    def some(self, data: slice) -> "GradientBatch":
        """Return the gradients of a slice of these examples."""
        places = range(*data.indices(len(self)))
        blocks = ByName({name: block.some(data) for name, block in self.blocks.items()})
        return GradientBatch(self.start + places.start, self.start + places.stop, blocks, self.shapes)

    def tensors(self) -> dict[str, Tensor]:
        """Return the gradients by parameter name, `[n, *shape]`. This materializes all of them."""
        some = next(iter(self.blocks.values()))
        result = {
            name: torch.zeros(len(self), *shape, dtype=some.dtype, device=some.device)
            for name, shape in self.shapes.items()
        }
        for block in self.blocks.values():
            block.layout.write(block.dense(), result)
        return result

    def inner(self, other: "GradientBatch") -> Tensor:
        """Return inner products with the gradients of other examples, `[n, m]`."""
        if self.shapes != other.shapes:
            raise ShapeError(
                f"Gradients with respect to {few(self.shapes)} have no inner product with gradients with respect to "
                f"{few(other.shapes)}.",
                "Compute both for the same model and parameters.",
            )
        # A block that is missing on one side was not used there, and has zero gradients.
        both = [block.inner(other.blocks[name]) for name, block in self.blocks.items() if name in other.blocks]
        return torch.stack(both).sum(0)

    def squared_norms(self) -> Tensor:
        """Return the squared norm of every example's gradient, `[n]`."""
        return torch.stack([block.squared_norms() for block in self.blocks.values()]).sum(0)


def per_datum(
    risk: EmpiricalRisk,
    of: Quantity = "loss",
    *,
    blocks: BlockDiagonal | None = None,
    uncovered: Uncovered = "error",
    joint_bias: bool = True,
    batch_axis: int | None = None,
    audit: bool = True,
    skip: Callable[[int, Batch], bool] | None = None,
) -> Iterator[GradientBatch]:
    """Compute per-example gradients, batch by batch, without materializing them.

    Each gradient is that of the example's own, unscaled term `c(f, y)` of the loss: the gradient of the risk is
    `risk.reduction_factor` times their sum. Parameters, modes and random state are restored whenever a batch is
    yielded, and if you stop early.

    Args:
        risk: Model, loss, data and parameters.
        of: The quantity to differentiate: `"loss"`, `"log-probability"` (of the label), `"margin"` (`log p / (1 - p)`
            of the label's probability; Park et al., 2023), or a function of one example's prediction and target.
        blocks: An operator such as `KFAC`, whose blocks and settings are used. If not given, blocks are those that
            `KFAC` would have.
        uncovered: What to do about parameters that no rule covers: `"error"`, `"skip"` (leave them out), or
            `"autograd"` (differentiate example by example, slowly).
        joint_bias: As in `KFAC`.
        batch_axis: As in `KFAC`.
        audit: As in `KFAC`.
        skip: Called with the index of a batch and the batch; returns whether to skip it. Its pass does not run, but its
            examples count for the indices of later ones.

    Yields:
        The gradients of each batch. `batch.blocks[name]` has rows (`parts`), `dense()`, `tensors()`, inner products
        (`inner`, `inner_within`, `squared_norms`), and products with blocks of operators (`multiplied`, `rotated`).

    Raises:
        ModelError: If a parameter is not covered, or the model's blocks differ from the operator's.
        DataError: If a gradient is not finite, or an index of an embedding does not exist. The example is named.
        LossError: If the quantity does not exist.

    Example:
        A statistic of gradients, the simple noise scale (McCandlish et al., 2018): the trace of their covariance over
        the squared norm of their mean.

        >>> def noise_scale(risk):
        ...     norms = torch.cat([batch.squared_norms() for batch in per_datum(risk)])  # no gradient is formed
        ...     total = {name: g / risk.reduction_factor for name, g in risk.gradient().items()}
        ...     mean = sum(g.square().sum() for g in total.values()) / risk.num_data**2
        ...     return float((norms.mean() - mean) / mean)
        >>> _ = torch.manual_seed(0)
        >>> X, y = torch.rand(10, 4), torch.rand(10, 2)
        >>> risk = EmpiricalRisk(torch.nn.Linear(4, 2), torch.nn.MSELoss(), [(X[:6], y[:6]), (X[6:], y[6:])])
        >>> round(noise_scale(risk), 2)
        4.08
    """
    check_risk(risk)
    # Check names and settings now, not when the first batch is requested: a process may have no batches.
    named = {"of": getattr(of, "__qualname__", of), "uncovered": uncovered, "joint_bias": joint_bias}
    with risk.together("kfs.per_datum", named | {"batch_axis": batch_axis}):
        if uncovered not in get_args(Uncovered):
            raise ModelError(f"uncovered is {uncovered!r}.", suggest([uncovered], get_args(Uncovered)))
        settings = Settings(fisher="empirical", joint_bias=joint_bias, batch_axis=batch_axis, audit=audit, replay=False)
        settings = _settings(settings, blocks)
        gradient = gradient_of(of, risk.loss)
        stream = _Stream(risk, lambda f, y: [gradient(f, y).unsqueeze(0)], blocks, uncovered)
    return (columns[0] for columns in stream.batches(settings, skip))


def per_datum_columns(
    risk: EmpiricalRisk,
    vectors: Vectors,
    *,
    blocks: BlockDiagonal | None = None,
    uncovered: Uncovered = "error",
    audit: bool = True,
) -> Iterator[list[GradientBatch]]:
    r"""Compute $J_n^\top v_{n,c}$ for every example and several vectors each, with one forward pass per batch.

    For unit vectors, these are the rows of the Jacobian. The gradients of each batch are a list, one for each column.

    Args:
        risk: Model, data and parameters.
        vectors: Maps predictions and targets to vectors, some columns at a time, `[columns, *f.shape]`.
        blocks: As in `per_datum`, which also raises the same errors.
        uncovered: As in `per_datum`.
        audit: As in `KFAC`.
    """
    settings = _settings(Settings(fisher="empirical", audit=audit, replay=False), blocks)
    return _Stream(risk, vectors, blocks, uncovered).batches(settings)


def _settings(settings: Settings, blocks: BlockDiagonal | None) -> Settings:
    """Return settings with those of an operator that its blocks depend on."""
    theirs = getattr(blocks, "settings", settings)
    return replace(settings, joint_bias=theirs.joint_bias, batch_axis=theirs.batch_axis)


class _Stream:
    """Runs passes, and collects per-example gradients from the captured inputs and gradients."""

    def __init__(
        self, risk: EmpiricalRisk, vectors: Vectors, operator: BlockDiagonal | None, uncovered: Uncovered
    ) -> None:
        self.risk = risk
        self.vectors = vectors
        self.num_columns = 0  # of the last batch
        self.operator = operator  # defines the blocks, if given
        self.uncovered = uncovered
        layouts = [] if operator is None else operator.layouts
        self.sums = KeptGradients({layout.key: layout for layout in layouts})
        self.progress = Progress()
        self.order = {name: place for place, name in enumerate(risk.params)}

    def batches(
        self, settings: Settings, skip: Callable[[int, Batch], bool] | None = None
    ) -> Iterator[list[GradientBatch]]:
        """Generate the gradients of each batch, for each column."""
        used: set[str] = set()
        passes = Passes(self.risk, self.sums, settings, self.progress, vectors=self._counted)
        batches = enumerate(self.risk.batches("gradients"))
        wanted = (batch for place, batch in batches if skip is None or not skip(place, batch))
        for batch in _explaining_indices(self.risk, passes.over(wanted, pausing=True)):
            captured = self.sums.take() or [{} for _ in range(self.num_columns)]
            used |= {name for key in captured[0] for name in self.sums.layouts[key].params}
            bad = self._uncovered()
            differentiated = self._by_autograd(batch, bad)
            result = [self._collected(batch, *both, bad) for both in zip(captured, differentiated, strict=True)]
            _check_finite(result)
            yield result
        # Parameters that were never used are uncovered, too, unless predictions do not depend on them.
        unused = [name for name in self.order if name not in used and name not in self._uncovered()]
        alone = not self.risk.ranks.are_several  # otherwise, data of other processes may use them
        missed = not_covered(unused, [], set(), set(), self.progress.reached)
        if missed and alone and self.operator is None and self.uncovered == "error":
            raise coverage_error(missed)

    def _counted(self, f: Tensor, y: Tensor) -> Iterator[Tensor]:
        """Generate the vectors that are sent back, and count them."""
        self.num_columns = 0
        for some in self.vectors(f, y):
            self.num_columns += len(some)
            yield some

    def _uncovered(self) -> dict[str, str]:
        """Return parameters to leave out or differentiate by autograd, with reasons; raise if that is not allowed."""
        why = not_covered([], [], self.progress.unexplained, self.sums.conflicts)
        if not why:
            return why
        wanted = self.order if self.operator is None else self.operator.domain.shapes
        for layout in self.sums.layouts.values():  # parameters in the same block are also uncovered
            shared = [name for name in layout.params if name in why]
            if shared:
                why = dict.fromkeys(layout.params, f"it shares a block with {shared[0]!r}") | why
        why = {name: reason for name, reason in why.items() if name in wanted}
        if self.operator is None:
            if why and self.uncovered == "error":
                raise coverage_error(why)
            return why
        wrong = [name for name in why if _flat_layout(self.risk, name) not in self.sums.layouts.values()]
        if wrong:
            raise ModelError(
                f"The parameters {wrong} are used in another way than in the operator whose blocks are given, or other "
                f"rows of them are: {why[wrong[0]]}.",
                "Use the same model, with data that do not use other rows than the operator's data did.",
            )
        return why

    def _collected(
        self,
        batch: Batch,
        captured: Mapping[Key, list[Captured]],
        differentiated: Mapping[str, Tensor],
        bad: Mapping[str, str],
    ) -> GradientBatch:
        """Return the gradients of a batch for one column, by block: captured ones, and those by autograd."""
        risk, num_data = self.risk, len(batch.y)

        def of_block(layout: Layout, uses: Sequence[Captured] = (), whole: Tensor | None = None) -> BlockGradients:
            return BlockGradients(layout, num_data, risk.sum_dtype, risk.device, tuple(uses), whole)

        # Covered blocks have captured uses; uncovered parameters are vectors with gradients by autograd.
        good = {key: layout for key, layout in self.sums.layouts.items() if not set(layout.params) & set(bad)}
        blocks = [of_block(layout, captured.get(key, ())) for key, layout in good.items()]
        for name, g in differentiated.items():
            blocks.append(of_block(_flat_layout(risk, name), whole=g.reshape(num_data, 1, -1, 1)))
        blocks.sort(key=lambda block: (self.order[block.layout.weight], block.layout.rows))
        shapes = {name: p.shape for name, p in risk.params.items()}
        by_name = ByName({block.layout.name: block for block in blocks})
        return GradientBatch(batch.first, batch.first + num_data, by_name, shapes)

    def _by_autograd(self, batch: Batch, bad: Mapping[str, str]) -> list[dict[str, Tensor]]:
        """Return gradients of uncovered parameters, example by example, `[n, *shape]`, unless they are left out."""
        if not bad or (self.operator is None and self.uncovered != "autograd"):
            return [{} for _ in range(self.num_columns)]
        found = []
        with self.risk.untouched(), torch.enable_grad():
            leaves, rest = leaves_and_rest(self.risk, list(bad))
            f = self.risk.predict(leaves | rest, batch)
            for some in self.vectors(f.detach(), batch.y):
                for v in some.to(f.dtype):
                    columns = v.new_zeros(len(v), *v.shape)
                    each = torch.arange(len(v), device=v.device)
                    columns[each, each] = v
                    gradients = pull_back(f, leaves, columns, keep_graph=True)
                    found.append({name: g.to(self.risk.sum_dtype) for name, g in gradients.items()})
        return found


def _flat_layout(risk: EmpiricalRisk, name: str) -> Layout:
    """Return the layout of an uncovered parameter: a vector, as in `BlockSums.of_diagonal`."""
    size = risk.params[name].numel()
    return Layout(name, (size,), (0, size), (0,), 1)


def _check_finite(columns: Sequence[GradientBatch]) -> None:
    """Raise for gradients with NaN or infinity, and name the example; synchronizes once if all are finite."""
    blocks = [block for batch in columns for block in batch.blocks.values()]
    uses = [use for block in blocks for use in block.uses if isinstance(use, Captured)]
    tensors = [use.gradient for use in uses]
    # Inputs may be NaN where gradients are zero; the product is NaN, too. All columns have the same inputs.
    inputs = [t for use in uses[: len(uses) // len(columns)] for t in tensors_in(use.use.x)]
    tensors += [t for t in inputs if t.is_floating_point()]
    tensors += [block.whole for block in blocks if block.whole is not None]
    if not tensors or all(map(isfinite, numbers([torch.nn.utils.get_total_norm(tensors)]))):
        return
    # Something is not finite: find the first block and example.
    start = columns[0].start
    for block in blocks:
        sides = [side.dense() for part in block.parts for side in (part.x, part.g)]
        sides += [] if block.whole is None else [block.whole.transpose(0, 1)]
        for t in sides:
            wrong = (~t.isfinite()).any(3).any(2).any(0).nonzero().flatten().tolist()
            if wrong:
                first, last = start + wrong[0], start + wrong[-1]
                # Gradients by autograd are computed for all examples together, and one example may spoil all.
                unclear = block.whole is not None and last > first
                datum = f"an example from {first} to {last}" if unclear else f"example {first}"
                raise DataError(
                    f"The gradient of {datum} with respect to block {block.layout.name!r} is not finite.",
                    "Look for NaN or infinity in its input, its target, the parameters or the loss.",
                )


def _explaining_indices(risk: EmpiricalRisk, batches: Iterator[Batch]) -> Iterator[Batch]:
    """Iterate over batches; explain an error if an index is out of range."""
    with risk.whole.held(risk.params):  # other processes may have other numbers of batches
        try:
            yield from batches
        except IndexError as error:
            raise DataError(f"An index is out of range: {error}.", "Look for one that is too large.") from error
