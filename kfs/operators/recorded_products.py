"""CUDA graphs of operator products: on a GPU, repeated products with columns of the same shapes are replayed.

For a small model, a GPU finishes the operations of a product faster than Python can launch them. Therefore
`kfs.runtime.cuda_graphs.Replayer` records the operations as one CUDA graph per batch, which adds the product of the
batch with the columns to totals. Columns and totals are static tensors: a product copies its columns into them, and
returns copies of the totals.

A graph is kept after the product. It reads parameters in place, so that it sees new values. Any other change since the
recording invalidates it: parameters that are different tensors, attributes of the model, the loss and the operator,
modes, and settings of PyTorch. Models and losses that cannot be inspected, such as functions, are not recorded.
"""

import logging
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from kfs.losses import Custom, Loss
from kfs.operators.space import Columns
from kfs.problem.data import Batch
from kfs.problem.isolation import restored
from kfs.problem.risk import EmpiricalRisk
from kfs.runtime.cuda_graphs import Guard, Replayer, RunKey, has_hooks, is_watched, surroundings
from kfs.runtime.sync import DeferredChecks

log = logging.getLogger("kfs.operators")
# Maximum number of recordings. Batches have a few shapes, many columns are split into chunks of two sizes, and products
# with a single column may occur between them.
_MOST = 8


class Multiplies(Protocol):
    """Interface of operators with recorded products."""

    risk: EmpiricalRisk

    def products(self, batch: Batch, columns: Columns, rows: list[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the names of rows with their products for one batch."""

    def running(self) -> AbstractContextManager[None]:
        """Return a context in which products are computed."""


class _Memory(NamedTuple):
    """Static tensors that the graphs of one kind of products read and write."""

    columns: Columns
    totals: Columns
    flags: DeferredChecks

    @classmethod
    def like(cls, risk: EmpiricalRisk, columns: Columns, rows: list[str]) -> "_Memory":
        """Allocate it for columns with certain shapes and dtypes."""
        some = next(iter(columns.values()))
        shapes = {name: (len(some), *risk.params[name].shape) for name in rows}
        return cls(
            {name: torch.empty_like(t) for name, t in columns.items()},
            {name: some.new_empty(shape, dtype=risk.sum_dtype) for name, shape in shapes.items()},
            DeferredChecks(risk.device),
        )


class RecordedProducts:
    """Computes products of an operator with recordings, and keeps the recordings. Copies have none.

    Args:
        replay: Whether products may be recorded.
    """

    def __init__(self, replay: bool) -> None:
        self._replay = replay
        self._replayer: Replayer | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle without recordings."""
        return RecordedProducts, (self._replay,)

    def multiply(self, operator: Multiplies, columns: Columns, rows: list[str], task: str) -> Columns | None:
        """Multiply columns with a recording, if this kind of product is recorded or can be recorded.

        The first product of each kind runs eagerly. Hence a product that is computed once keeps no tensors, and the
        data have passed all checks before a graph replaces them.

        Args:
            operator: The operator.
            columns: Columns to multiply.
            rows: Names of the rows to compute.
            task: Name of the product in a progress bar.

        Returns:
            Sums over all batches; `None` if the product must run eagerly. Call `note` after an eager product.
        """
        risk = operator.risk
        replayer = self._replayer = self._replayer or Replayer("Products", log, risk.device, self._replay, most=_MOST)
        if not replayer.is_enabled:
            return None
        key, guard = _key_of(columns, rows), self._guard_of(operator)
        if not replayer.is_repeated(key, guard):
            return None
        try:
            memory = replayer.kept(key) or replayer.keep(key, _Memory.like(risk, columns, rows))
            with torch.no_grad():
                torch._foreach_copy_(list(memory.columns.values()), list(columns.values()))
                torch._foreach_zero_(list(memory.totals.values()))
                memory.flags.clear()

            def add(batch: Batch) -> None:
                for name, t in operator.products(batch, memory.columns, rows):
                    memory.totals[name].add_(t)

            with risk.checking_later(memory.flags) as explain, restored(None, risk.device):
                for batch in risk.batches(task):
                    replayer.run_batch(batch, add, guard, key.kind, around=operator.running)
                results = {name: t.clone() for name, t in memory.totals.items()}
                # Reading the flags synchronizes. Hence no GPU work is pending when the product is returned, and it can
                # be used on any stream.
                if memory.flags.first_failure() is not None:
                    with operator.running():
                        explain()
        except torch.OutOfMemoryError:
            # Free the recordings, and run eagerly, which needs less memory.
            replayer.refuse_for_memory(key.kind)
            return None
        except BaseException:
            replayer.close()
            raise
        return results

    def note(self, columns: Columns, rows: list[str]) -> None:
        """Remember the kind of an eager product, so that the next product of this kind is recorded."""
        if self._replayer is not None and self._replayer.is_enabled:
            self._replayer.note(_key_of(columns, rows))

    def _guard_of(self, operator: Multiplies) -> Guard:
        """Return a snapshot of everything that recordings depend on, except batches, columns and rows."""
        risk = operator.risk
        # Leave `self` out: recordings must not keep alive the operator that owns them.
        own = {name: value for name, value in vars(operator).items() if value is not self}
        losses = list(_losses_in(risk.loss))
        tensors = list(_tensors_of(risk))
        why = _why_not(risk, tensors)
        place = None if why else _place(risk, tensors, losses)
        return Guard(risk.model, {**own, "losses": [vars(loss) for loss in losses]}, place, why)


def _key_of(columns: Columns, rows: list[str]) -> RunKey:
    """Return the key of a product: names, shapes and dtypes of columns, and names of rows."""
    return RunKey((tuple((name, t.shape, t.dtype) for name, t in columns.items()), tuple(rows)))


def _why_not(risk: EmpiricalRisk, tensors: list[Tensor]) -> str:
    """Return the reason why products cannot be recorded, or an empty string."""
    model = risk.model
    if not isinstance(model, Module) or isinstance(risk.loss, Custom):
        return "the model or the loss is a function, and changes of the variables that it reads cannot be detected"
    if has_hooks(model):
        return "the model has hooks"
    if is_watched() or torch.is_inference_mode_enabled():
        return "a PyTorch mode that intercepts all operations is active, or inference mode"
    for t in tensors:
        special = type(t) not in {Tensor, Parameter} or t.layout is not torch.strided
        if special or t.device != risk.device:
            return "parameters or buffers are on several devices, or are special tensors"
    return ""


def _tensors_of(risk: EmpiricalRisk) -> Iterator[Tensor]:
    """Yield all parameters and buffers."""
    yield from risk.params.values()
    if isinstance(risk.model, Module):
        yield from (*risk.model.parameters(), *risk.model.buffers())


def _losses_in(loss: Loss) -> Iterator[Loss]:
    """Yield a loss and, recursively, the losses that are its attributes."""
    yield loss
    for part in vars(loss).values():
        if isinstance(part, Loss):
            yield from _losses_in(part)


def _place(risk: EmpiricalRisk, tensors: list[Tensor], losses: list[Loss]) -> Hashable:
    """Return the remaining state that recordings depend on: memory of parameters, modes, and settings of PyTorch."""
    memory = tuple((t.data_ptr(), t.shape, t.stride(), t.dtype, t.requires_grad) for t in tensors)
    modes = tuple(module.training for module in risk.model.modules()) if isinstance(risk.model, Module) else ()
    settings = (t for loss in losses for t in vars(loss).values() if isinstance(t, Tensor))
    # Settings of a loss may be tensors on the CPU, which must be copied to the GPU again after a change.
    versions = tuple(0 if t.is_inference() else t._version for t in settings)
    return memory, modes, versions, risk.reduction_factor, surroundings(risk.device)
