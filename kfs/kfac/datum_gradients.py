r"""Per-datum gradients, batch by batch, as sums over rows of outer products: the primitive of new statistics.

The gradient of datum $n$ with respect to a block is $G_n = \sum_s g_{n,s}\, x_{n,s}^\top$, summed over shared positions
and over all uses of the parameter. `kfs.Influence` is built on what `per_datum` yields, and EKFAC's eigenvalues on the
same rows (`kfs.kfac.sums.row_products`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from kfs.data import Batch
from kfs.describing import Described, Description, Table, counted, kind, times
from kfs.errors import DataError, ModelError, ShapeError
from kfs.kfac.block_gradients import BlockGradients
from kfs.kfac.coverage import coverage_error, not_covered
from kfs.kfac.layout import Key, Layout
from kfs.kfac.settings import Settings
from kfs.kfac.storage.checkpoint import Progress
from kfs.kfac.structures import BlockDiagonal
from kfs.kfac.sums import Captured, KeptGradients
from kfs.kfac.sweep import Vectors, passes
from kfs.losses.quantities import Quantity, gradient_of
from kfs.names import ByName, few, near
from kfs.nested import tensors_in
from kfs.operators.checked_risk import check_risk
from kfs.operators.derivatives import leaves_and_rest, pull_back
from kfs.risk import EmpiricalRisk
from kfs.waiting import numbers

Uncovered = Literal["error", "skip", "autograd"]
_UNCOVERED = ("error", "skip", "autograd")


@dataclass(frozen=True, repr=False)
class GradientBatch(Described):
    """The gradients of some consecutive data, with respect to all blocks.

    Attributes:
        start: Index of the first datum within the data set.
        stop: End of the half-open range of data, `start` to `stop`.
        blocks: The gradients by the names of blocks.
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
        title = f"Gradients of data {self.start:,} to {self.stop - 1:,}: {counted(len(self.blocks), 'block')}, "
        rows = [
            (name, times(block.layout.matrix_shape), str(len(block.uses)), "" if block.whole is None else "yes")
            for name, block in self.blocks.items()
        ]
        table = Table("blocks", ("block", "groups x d_B x d_A", "uses", "by autograd"), rows)
        return Description(title + kind(first.dtype, first.device), (), (table,))

    def some(self, data: slice) -> "GradientBatch":
        """Return the gradients of some of these data, by their places."""
        places = range(*data.indices(len(self)))
        blocks = ByName({name: block.some(data) for name, block in self.blocks.items()}, "block")
        return GradientBatch(self.start + places.start, self.start + places.stop, blocks, self.shapes)

    def tensors(self) -> dict[str, Tensor]:
        """Return the gradients by the names of parameters, `[n, *shape]`. This forms all of them."""
        some = next(iter(self.blocks.values()))
        result = {
            name: torch.zeros(len(self), *shape, dtype=some.dtype, device=some.device)
            for name, shape in self.shapes.items()
        }
        for block in self.blocks.values():
            block.layout.write(block.dense(), result)
        return result

    def inner(self, other: "GradientBatch") -> Tensor:
        """Return inner products with the gradients of other data, `[n, m]`."""
        if self.shapes != other.shapes:
            raise ShapeError(
                f"Gradients with respect to {few(self.shapes)} have no inner product with gradients with respect to "
                f"{few(other.shapes)}.",
                "Compute both for the same model and parameters.",
            )
        # A block that one of them lacks was not used, and has gradients of zero.
        both = [block.inner(other.blocks[name]) for name, block in self.blocks.items() if name in other.blocks]
        return torch.stack(both).sum(0)

    def squared_norms(self) -> Tensor:
        """Return the squared norm of every datum's gradient, `[n]`."""
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
    """Compute the gradient of every datum, batch by batch, without forming it.

    The gradient is that of the datum's own term `c(f, y)` of the loss, which is not scaled: the gradient of the risk is
    `risk.reduction_factor` times the sum over all data. Parameters, modes and random state are as before whenever a
    batch is yielded, and if you stop early.

    Args:
        risk: Model, loss, data and parameters.
        of: What is differentiated: `"loss"`, `"log-probability"` (of the label), `"margin"` (`log p / (1 - p)` of the
            label's probability; Park et al., 2023), or a function of one datum's prediction and target.
        blocks: An operator such as `KFAC`, whose blocks and settings are used. By default, blocks are those that `KFAC`
            would have.
        uncovered: What to do about parameters that no rule covers: `"error"`, `"skip"` (leave them out), or
            `"autograd"` (differentiate datum by datum, slowly).
        joint_bias: As in `KFAC`.
        batch_axis: As in `KFAC`.
        audit: As in `KFAC`.
        skip: Says of a batch, by its place among all batches, whether it is left out. Its pass does not run, and its
            data count for the indices of later ones.

    Yields:
        The gradients of each batch. `batch.blocks[name]` has rows (`parts`), `dense()`, `tensors()`, inner products
        (`inner`, `inner_within`, `squared_norms`), and products with blocks of operators (`multiplied`, `rotated`).

    Raises:
        ModelError: If a parameter is not covered, or blocks are others than those of the operator.
        DataError: If a gradient is not finite, or an index of an embedding does not exist. The datum is named.
        LossError: If there is no such quantity.

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
    # Names and settings are checked now, and not when the first batch is asked for: processes may have none.
    named = {"of": getattr(of, "__qualname__", of), "uncovered": uncovered, "joint_bias": joint_bias}
    with risk.together("kfs.per_datum", named | {"batch_axis": batch_axis}):
        if uncovered not in _UNCOVERED:
            raise ModelError(f"uncovered is {uncovered!r}.", near([uncovered], _UNCOVERED))
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
    r"""Compute $J_n^\top v_{n,c}$ for every datum and several vectors each, with a single forward pass for each batch.

    For unit vectors, these are the rows of the Jacobian.

    Args:
        risk: Model, data and parameters.
        vectors: From predictions and targets to vectors, some of them at a time, `[columns, *f.shape]`.
        blocks: As in `per_datum`.
        uncovered: As in `per_datum`.
        audit: As in `KFAC`.

    Yields:
        For each batch, its gradients for each column.

    Raises:
        ModelError: If a parameter is not covered, or blocks are others than those of the operator.
        DataError: If a gradient is not finite. The datum is named.
    """
    settings = _settings(Settings(fisher="empirical", audit=audit, replay=False), blocks)
    return _Stream(risk, vectors, blocks, uncovered).batches(settings)


def _settings(settings: Settings, blocks: BlockDiagonal | None) -> Settings:
    """Return settings with those of an operator on which its blocks depend."""
    theirs = getattr(blocks, "settings", settings)
    return replace(settings, joint_bias=theirs.joint_bias, batch_axis=theirs.batch_axis)


class _Stream:
    """Runs passes, and makes gradients of what they leave.

    Args:
        risk: Model, loss, data and parameters.
        vectors: What is sent back.
        operator: Says which blocks there are, if it is given.
        uncovered: What to do about parameters that no rule covers.
    """

    def __init__(
        self, risk: EmpiricalRisk, vectors: Vectors, operator: BlockDiagonal | None, uncovered: Uncovered
    ) -> None:
        self.risk = risk
        self.vectors = vectors
        self.num_columns = 0  # how many the last batch had
        self.operator = operator
        self.uncovered = uncovered
        layouts = [] if operator is None else [layout for stack in operator.stacks for layout in stack.layouts]
        self.sums = KeptGradients({layout.key: layout for layout in layouts})
        self.progress = Progress()
        self.order = {name: place for place, name in enumerate(risk.params)}

    def batches(
        self, settings: Settings, skip: Callable[[int, Batch], bool] | None = None
    ) -> Iterator[list[GradientBatch]]:
        """Yield gradients batch by batch, for each column."""
        used: set[str] = set()
        sent = self._counted
        runs = passes(self.risk, self.sums, settings, "gradients", self.progress, vectors=sent, pausing=True, skip=skip)
        for batch in _explaining_indices(self.risk, runs):
            captured = self.sums.take() or [{} for _ in range(self.num_columns)]
            used |= {name for key in captured[0] for name in self.sums.layouts[key].params}
            bad = self._uncovered()
            differentiated = self._by_autograd(batch, bad)
            result = [self._collected(batch, *both, bad) for both in zip(captured, differentiated, strict=True)]
            _check_finite(result)
            yield result
        unused = [name for name in self.order if name not in used and name not in self._uncovered()]
        alone = not self.risk.ranks.are_several  # otherwise data of other processes may use them
        missed = not_covered(unused, [], set(), set(), self.progress.reached)
        if missed and alone and self.operator is None and self.uncovered == "error":
            raise coverage_error(missed)

    def _counted(self, f: Tensor, y: Tensor) -> Iterator[Tensor]:
        """Yield what is sent back, and count it."""
        self.num_columns = 0
        for some in self.vectors(f, y):
            self.num_columns += len(some)
            yield some

    def _uncovered(self) -> dict[str, str]:
        """Return parameters that have to be left out, or differentiated in another way, and why.

        Raises:
            ModelError: If they may not.
        """
        why = not_covered([], [], self.progress.unexplained, self.sums.conflicts)
        if not why:
            return why
        wanted = self.order if self.operator is None else self.operator.domain.shapes
        for layout in self.sums.layouts.values():  # parameters in the same block are not covered either
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
        """Return the gradients of a batch for one column, by block: what the pass has left, and those by autograd."""
        risk, num_data = self.risk, len(batch.y)

        def of_block(layout: Layout, uses: Sequence[Captured] = (), whole: Tensor | None = None) -> BlockGradients:
            return BlockGradients(layout, num_data, risk.sum_dtype, risk.device, tuple(uses), whole)

        good = {key: layout for key, layout in self.sums.layouts.items() if not set(layout.params) & set(bad)}
        blocks = [of_block(layout, captured.get(key, ())) for key, layout in good.items()]
        for name, g in differentiated.items():
            blocks.append(of_block(_flat_layout(risk, name), whole=g.reshape(num_data, 1, -1, 1)))
        blocks.sort(key=lambda block: (self.order[block.layout.weight], block.layout.rows))
        shapes = {name: p.shape for name, p in risk.params.items()}
        by_name = ByName({block.layout.name: block for block in blocks}, "block")
        return GradientBatch(batch.first, batch.first + num_data, by_name, shapes)

    def _by_autograd(self, batch: Batch, bad: Mapping[str, str]) -> list[dict[str, Tensor]]:
        """Differentiate with respect to parameters that no rule covers datum by datum, `[n, *shape]`, for each column.

        There is nothing to differentiate if they are left out.
        """
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
    """Return the layout of a parameter that no rule covers: a vector, as `BlockSums.of_diagonal` has it."""
    size = risk.params[name].numel()
    return Layout(name, (size,), (0, size), (0,), 1)


def _check_finite(columns: Sequence[GradientBatch]) -> None:
    """Refuse gradients with NaN or infinity, and name the datum; an accelerator is asked once if all is well."""
    blocks = [block for batch in columns for block in batch.blocks.values()]
    uses = [use for block in blocks for use in block.uses if isinstance(use, Captured)]
    tensors = [use.gradient for use in uses]
    # Inputs may be NaN where what comes back is zero, and the product is NaN, too. All columns have the same inputs.
    inputs = [t for use in uses[: len(uses) // len(columns)] for t in tensors_in(use.use.x)]
    tensors += [t for t in inputs if t.is_floating_point()]
    tensors += [block.whole for block in blocks if block.whole is not None]
    if not tensors or all(map(isfinite, numbers([torch.nn.utils.get_total_norm(tensors)]))):
        return
    start = columns[0].start
    for block in blocks:
        sides = [side.dense() for part in block.parts for side in (part.x, part.g)]
        sides += [] if block.whole is None else [block.whole.transpose(0, 1)]
        for t in sides:
            wrong = (~t.isfinite()).any(3).any(2).any(0).nonzero().flatten().tolist()
            if wrong:
                first, last = start + wrong[0], start + wrong[-1]
                # Gradients by autograd are sent back for all data together, and one may spoil all.
                unclear = block.whole is not None and last > first
                datum = f"a datum from {first} to {last}" if unclear else f"datum {first}"
                raise DataError(
                    f"The gradient of {datum} with respect to block {block.layout.name!r} is not finite.",
                    "Look for NaN or infinity in its input, its target, the parameters or the loss.",
                )


def _explaining_indices(risk: EmpiricalRisk, batches: Iterator[Batch]) -> Iterator[Batch]:
    """Iterate; if an index is out of range, say which one, of which datum and of which embedding."""
    with risk.whole.held(risk.params):  # other processes have other numbers of batches
        try:
            yield from batches
        except IndexError as error:
            with suppress(IndexError), risk.untouched():
                for batch in risk.batches():
                    with _CheckedEmbeddings(risk, batch):
                        risk.evaluate(batch)
            raise DataError(f"An index is out of range: {error}.", "Look for one that is too large.") from error


class _CheckedEmbeddings(TorchFunctionMode):
    """Refuses indices that an embedding does not have, and names the datum."""

    def __init__(self, risk: EmpiricalRisk, batch: Batch) -> None:
        super().__init__()
        self.names = {id(p): name for name, p in risk.params.items()}
        self.batch = batch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.embedding:
            index = args[0] if args else kwargs["input"]
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            wrong = ((index < 0) | (index >= len(weight))).nonzero()
            if len(wrong):
                value = int(index[tuple(wrong[0])])
                has_data = index.shape[:1] == self.batch.y.shape[:1]
                datum = f"of datum {self.batch.first + int(wrong[0, 0])} " if has_data else ""
                name = self.names.get(id(weight), "an embedding")
                raise DataError(
                    f"The index {value} {datum}does not exist in {name!r}, which has {len(weight)} rows.",
                    "Use data with the vocabulary that the model has, numbered from zero.",
                )
        return func(*args, **kwargs)
