"""Inspection of what KFAC covers, with which factors, at what cost, before any factor is computed."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.overrides import TorchFunctionMode

from kfs.display.charts import draw_bars
from kfs.display.describe import DescribedByTables, Description, Table, counted, readable_count, readable_size
from kfs.errors import DataError, KfsError, ModelError
from kfs.factors.accumulate.block_sums import BlockSums
from kfs.factors.accumulate.factor_sums import FactorSums
from kfs.factors.audit import Audit, Audits, predictor
from kfs.factors.blocks.display import kind_and_size
from kfs.factors.capture import forward
from kfs.factors.compute import not_covered, shared_with
from kfs.factors.layout import Side
from kfs.factors.rows import AuditResult
from kfs.factors.rules import new_trace
from kfs.factors.settings import Settings
from kfs.problem.data import Batch, can_be_cut, cut
from kfs.problem.risk import EmpiricalRisk
from kfs.problem.torch_fixes import explained
from kfs.runtime.cuda_graphs import has_hooks
from kfs.runtime.memory import beyond_memory
from kfs.runtime.nested import tensors_in

if TYPE_CHECKING:
    from matplotlib.axes import Axes

log = logging.getLogger("kfs.factors")
# Models with at least as many parameters are not audited by default, since an audit runs the model.
_LARGE = 2**28
_COLUMNS = ("parameter", "shape", "operations", "block", "A", "B", "bytes", "cost", "not covered because")
# Results of queries about values on the `meta` device: as for data in which nothing is special.
_ANSWERS = {"all": True, "eq": True, "__eq__": True, "any": False}


@dataclass(frozen=True)
class Row:
    """One parameter, and its factors in one block.

    Attributes:
        parameter: Its name.
        shape: Its shape.
        operations: The operations that use it; `"none"` if predictions do not depend on it.
        block: The block's name. Empty if the parameter is not covered, or not used.
        A: Structure and size of the input-based factor.
        B: Structure and size of the gradient-based factor.
        nbytes: Bytes of both factors. Zero for a bias that shares its weight's block.
        cost: Approximate floating-point operations for both factors, for each example and column that is sent back.
        why_not: Why the parameter is not covered. Empty if it is.
        rows: The order of rows of the operations' inputs. Empty without audit.
        difference: Relative difference between the sum over its uses and its gradient by autograd. `None` without
            audit.
    """

    parameter: str
    shape: tuple[int, ...]
    operations: tuple[str, ...] = ()
    block: str = ""
    A: str = ""
    B: str = ""
    nbytes: int = 0
    cost: float = 0.0
    why_not: str = ""
    rows: str = ""
    difference: float | None = None


@dataclass(frozen=True, repr=False)
class Inspection(DescribedByTables):
    """The result of `inspect`: a table of all parameters. Print it, or `plot` it.

    Attributes:
        rows: One per parameter and block.
        model: The class of the model.
        audit: The report of the audit; `None` if there was none.
        blocks: Sums of all covered blocks without values: layouts, sizes, numbers of positions.
        num_data: Number of examples that these positions belong to.
        notes: Sentences about factors that are too large for the memory here, and about a missing audit.
    """

    rows: tuple[Row, ...]
    audit: Audit | None = None
    model: str = ""
    blocks: tuple[BlockSums, ...] = field(default=(), compare=False)
    num_data: int = field(default=0, compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def uncovered(self) -> dict[str, str]:
        """The parameters that are not covered, with reasons."""
        return {row.parameter: row.why_not for row in self.rows if row.why_not}

    @property
    def nbytes(self) -> int:
        """Bytes of all factors."""
        return sum(row.nbytes for row in self.rows)

    def plot(self) -> "list[Axes]":
        """Draw the bytes of factors, and the operations to compute them, layer by layer, into a new figure.

        Returns:
            Axes of matplotlib: for bytes, and for operations for each example and column that is sent back.

        Raises:
            ModelError: If nothing is covered.
        """
        layers = {row.block: row for row in self.rows if row.nbytes}
        if not layers:
            raise ModelError("No parameter is covered.", "Print the table, which shows the reasons.")
        memory = [float(row.nbytes) for row in layers.values()], readable_size
        work = [row.cost for row in layers.values()], readable_count
        return draw_bars(list(layers), {"factors": memory, "operations for an example": work})

    def describe(self) -> Description:
        """Describe all parameters, and the audit."""
        rows = []
        for row in self.rows:
            shape = "x".join(map(str, row.shape))
            size = readable_size(row.nbytes) if row.nbytes else ""
            cost = readable_count(row.cost) if row.cost else ""
            operations = ", ".join(row.operations)
            rows.append((row.parameter, shape, operations, row.block, row.A, row.B, size, cost, row.why_not))
        blocks = len({row.block for row in self.rows if row.block})
        title = f"KFAC of {self.model}" if self.model else "KFAC"
        title += f": {counted(blocks, 'block')}, {readable_size(self.nbytes)} of factors"
        title += f", {counted(len(self.uncovered), 'parameter')} not covered" if self.uncovered else ""
        notes = self.notes if self.audit is None else (*self.notes, str(self.audit))
        return Description(title, tables=(Table("", _COLUMNS, rows, ("bytes", "cost")),), notes=notes)


def inspect(
    model: Any,
    sample: Any,
    params: Any = None,
    *,
    sharing: Any = "expand",
    joint_bias: bool = True,
    max_dim: int | None = None,
    batch_axis: int | None = None,
    audit: bool | None = None,
) -> Inspection:
    """Inspect what KFAC covers, without computing any factor.

    After an audit of a few examples, these are passed through the model once more, forward and backward; the rest of
    the sample only if it may be used in another way. Without an audit, the whole sample is used. A large model is
    neither audited nor run, unless `audit=True`: a copy of it on the `meta` device, without values, is used instead.

    Args:
        model: A module, or a function `f(params, x)`. A module on the `meta` device takes no memory, whatever its size:
            create it in `with torch.device("meta"):`. It has no values. If the model queries some, `x.all()` and `x ==
            y` are true, and `x.any()` is false.
        sample: A batch of inputs, as the model takes it. Use at least two examples: with one example, the batch axis
            looks like any other axis of length one.
        params: Which parameters, as in `EmpiricalRisk`.
        sharing: As in `KFAC`.
        joint_bias: As in `KFAC`.
        max_dim: As in `KFAC`.
        batch_axis: As in `KFAC`.
        audit: Whether to check, on a few examples, that the captured tensors are the model's own. By default, models
            with fewer than 268 million parameters are audited.

    Returns:
        A table with one row per parameter, or per part of a parameter if parts have separate factors.

    Raises:
        ModelError: If a model on the `meta` device needs other values.

    Example:
        >>> print(inspect(torch.nn.Linear(3, 2), torch.rand(5, 3)).rows[0].A)
        dense 4x4
        >>> inspect(torch.nn.Linear(3, 2), torch.rand(5, 3), audit=False)
        KFAC of Linear: 1 block, 80 B of factors
        parameter  shape  operations  block   A          B          bytes  cost
        ---------  -----  ----------  ------  ---------  ---------  -----  ----
        weight     2x3    linear      weight  dense 4x4  dense 2x2   80 B    40
        bias       2      linear      weight  dense 4x4  dense 2x2
        >>> with torch.device("meta"):
        ...     large = torch.nn.Linear(100_000, 2)
        >>> print(inspect(large, torch.rand(5, 100_000)).rows[0].A)
        dense 100001x100001
    """
    tensors = tensors_in(sample)
    if not tensors or tensors[0].ndim == 0:
        raise DataError("The sample has no tensor with a batch axis.", "Pass a batch of inputs, as the model takes it.")
    if params is None and isinstance(model, Module) and not any(p.requires_grad for p in model.parameters()):
        params = [name for name, _ in model.named_parameters()]
    settings = Settings(sharing=sharing, joint_bias=joint_bias, max_dim=max_dim, batch_axis=batch_axis)
    if audit is not True and isinstance(model, Module) and sum(p.numel() for p in model.parameters()) >= _LARGE:
        found = _without_memory(model, sample, params, settings)
        if found is not None:
            return found
    return _inspected(model, sample, params, settings, audit is not False)


def _without_memory(model: Module, sample: Any, params: Any, settings: Settings) -> Inspection | None:
    """Inspect a copy of a large model on the `meta` device; return `None` if the model needs values, or has hooks."""
    device = next(model.parameters()).device
    if device.type == "meta" or has_hooks(model) or isinstance(params, Mapping):
        return None
    tensors = (*model.parameters(), *model.buffers())
    if any(type(t) not in {Tensor, Parameter} for t in tensors):  # such as parts of a sharded parameter
        return None
    empty: dict[int, Any] = {id(t): torch.empty_like(t, device="meta") for t in tensors}
    empty |= {id(p): Parameter(empty[id(p)], p.requires_grad) for p in model.parameters()}
    try:
        found = _inspected(deepcopy(model, empty), sample, params, settings, audit=False)
    except Exception:
        log.debug("The model cannot be inspected without values.", exc_info=True)
        return None
    note = f"Not audited, since the model is large. Pass audit=True to check captured tensors on {device.type}."
    return replace(found, notes=(*_too_large(found.blocks, device), note))


def _inspected(model: Any, sample: Any, params: Any, settings: Settings, audit: bool) -> Inspection:
    """Inspect a model where it is."""
    tensors = tensors_in(sample)
    with explained():
        targets = torch.zeros(len(tensors[0]), device=tensors[0].device)
    risk = _Sample(model, _anything, [(sample, targets)], params=params)
    batch_axis = settings.batch_axis
    with risk.untouched(first_order=True), torch.enable_grad(), _without_values(risk.device), explained():
        audits = Audits(risk.model, new_trace(risk.params, settings.joint_bias), batch_axis)
        (batch,) = risk.batches()
        known = None
        if audit and risk.device.type != "meta":  # without values, there is nothing to audit
            known = audits.of(predictor(risk, batch), batch.x, len(batch.y))
        used = _audited_part(batch, known, audits.report, batch_axis)
        sums, why_not = _uses(risk, used, settings, known)
        with_block = {name for block in sums.blocks.values() for name in block.layout.params}
        # The other examples may use parameters that these do not.
        if used is not batch and (why_not or risk.params.keys() - with_block):
            used = batch
            sums, why_not = _uses(risk, used, settings, known)
    rows = []
    for name, p in risk.params.items():
        blocks = [block for block in sums.blocks.values() if name in block.layout.params and name not in why_not]
        rows += [_row(name, p, block, audits.report, len(used.y)) for block in blocks]
        if not blocks:
            why = why_not.get(name, "")
            rows.append(Row(name, tuple(p.shape), () if why else ("none",), why_not=why))
    covered = tuple(block for block in sums.blocks.values() if not why_not.keys() & set(block.layout.params))
    notes = tuple(_too_large(covered, risk.device))
    return Inspection(tuple(rows), audits.report, risk.about.partition(" ")[0], covered, len(used.y), notes)


def _too_large(blocks: Iterable[BlockSums], device: torch.device) -> Iterator[str]:
    """Generate sentences about blocks whose dense factors do not fit into the memory of a device."""
    for block in blocks:
        nbytes = sum(s.total.numel() * s.total.element_size() for s in block.sums if not s.diagonal)
        found = beyond_memory(block.layout.name, nbytes, device)
        if found:
            yield f"{found} Pass max_dim=, so that wider factors keep their diagonal only."


def _audited_part(batch: Batch, known: AuditResult | None, report: Audit | None, batch_axis: int | None) -> Batch:
    """Return the audited examples of a batch, if all other examples are used in the same way; otherwise the batch.

    Shapes of factors do not depend on the number of examples, so a few are enough.
    """
    num_data = len(batch.y)
    if known is None or report is None or report.num_data >= num_data:
        return batch
    if any(place.inner is None for place in (*known.uses, *known.meetings)):  # rows depend on the data
        return batch
    if not can_be_cut(batch.x, num_data, report.num_data, batch_axis):  # unlike a batch of this shape before
        return batch
    last = range(num_data - report.num_data, num_data)
    return Batch(cut(batch.x, num_data, last, batch_axis), batch.y[last.start :], batch.first + last.start)


def _uses(
    risk: EmpiricalRisk, batch: Batch, settings: Settings, known: AuditResult | None
) -> tuple[FactorSums, dict[str, str]]:
    """Run a forward and a backward pass; return sums without values, and the uncovered parameters with reasons."""
    sums = FactorSums(settings, dry=True)
    trace = new_trace(risk.params, settings.joint_bias)
    f, one = forward(risk, batch, trace, [sums], settings.batch_axis, known)
    one.measure_rows(f)
    one.backward(f, torch.ones_like(f).unsqueeze(0))
    why_not = not_covered(risk.params, sums.blocks.values(), one.unexplained, sums.conflicts, one.reached)
    return sums, why_not | shared_with(why_not, sums.blocks.values())


class _Sample(EmpiricalRisk):
    """A risk whose tensors need no values, because only shapes matter."""

    _needs_values = False


class _OrdinaryAnswers(TorchFunctionMode):
    """A mode that answers queries about values on the `meta` device, such as whether there is any padding."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in {Tensor.__bool__, Tensor.item} and hasattr(args[0], "_kfs_answer"):
            return args[0]._kfs_answer
        result = func(*args, **(kwargs or {}))
        known = _ANSWERS.get(getattr(func, "__name__", ""))
        if known is not None and isinstance(result, Tensor) and result.ndim == 0:
            result._kfs_answer = known  # type: ignore[attr-defined]
        return result


@contextmanager
def _without_values(device: torch.device) -> Iterator[None]:
    """On the `meta` device, answer queries about values, and explain errors about other values."""
    if device.type != "meta":
        yield
        return
    try:
        with _OrdinaryAnswers():
            yield
    except (NotImplementedError, RuntimeError) as error:
        message = str(error).partition("\n")[0]  # a long trace follows
        if isinstance(error, KfsError) or "meta" not in message.lower():
            raise
        raise ModelError(
            f"The model needs values in its forward pass, which tensors on the meta device do not have: {message}",
            "Inspect it on another device, or a smaller model of the same kind.",
        ) from error


def _anything(f: Tensor, y: Tensor) -> Tensor:
    """Return a placeholder for a loss, whose value does not matter."""
    return f.sum() + y


def _row(name: str, p: Tensor, block: BlockSums, audit: Audit | None, num_data: int) -> Row:
    """Return the table row of a covered parameter."""
    A = _structure_and_size(block, "A")
    B = _structure_and_size(block, "B")
    nbytes = block.nbytes if name == block.layout.weight else 0
    cost = block.work / num_data if name == block.layout.weight else 0.0
    row = Row(name, tuple(p.shape), tuple(sorted(block.operations)), block.layout.name, A, B, nbytes, cost)
    if audit is None:
        return row
    orders = dict.fromkeys(use.rows for use in audit.uses if use.parameter in block.layout.params)
    return replace(row, rows=", ".join(orders), difference=audit.gradients.get(name))


def _structure_and_size(block: BlockSums, side: Side) -> str:
    """Return the kind and size of the factor on one side of a block."""
    diagonal = block.is_diagonal(side)
    total = next(s.total for s in block.on_side(side) if s.diagonal == diagonal)
    return kind_and_size("diagonal" if diagonal else "dense", total.shape[-1], block.layout.groups)
