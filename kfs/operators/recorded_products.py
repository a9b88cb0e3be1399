"""CUDA graphs of operator products: on a GPU, repeated products with columns of the same shapes are replayed.

For a small model, a GPU finishes the operations of a product faster than Python can launch them. Therefore
`kfs.runtime.cuda_graphs.Replays` records the operations as one CUDA graph per batch, which adds the product of the
batch with the columns to totals. Columns and totals are static tensors: a product copies its columns into them, and
returns copies of the totals.

A graph is kept after the product. It reads parameters in place, so that it sees new values. Any other change since the
recording invalidates it: parameters that are different tensors, attributes of the model, the loss and the operator,
modes, and settings of PyTorch. Models and losses that cannot be inspected, such as functions, are not recorded.
"""

import logging
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from kfs.losses import Custom, Loss
from kfs.operators.space import Columns
from kfs.problem.data import Batch
from kfs.problem.isolation import same_random_state
from kfs.problem.risk import EmpiricalRisk
from kfs.runtime.cuda_graphs import (
    CudaRecorder,
    ModelState,
    Nothing,
    Recorder,
    Replays,
    has_hooks,
    is_watched,
    surroundings,
)
from kfs.runtime.sync import DeferredChecks

log = logging.getLogger("kfs.operators")
# Number of kinds of products that are recorded at the same time. Many columns are split into chunks of two sizes, and
# products with a single column may occur between them.
_MOST_KINDS = 4
_MOST_SEEN = 64  # Number of kinds of products that are remembered.
# Log a message if attributes have changed this often without a recording in between.
_FRUITLESS = 3


class Multiplies(Protocol):
    """Interface of operators with recorded products."""

    risk: EmpiricalRisk

    def products(self, batch: Batch, columns: Columns, rows: list[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the names of rows with their products for one batch."""

    def running(self) -> AbstractContextManager[None]:
        """Return a context in which products are computed."""


def recorder_for(device: torch.device) -> Callable[[], Recorder] | None:
    """Return a factory of recorders for a device; `None` if the device is not a GPU."""
    return partial(CudaRecorder, device) if device.type == "cuda" else None


class RecordedKind:
    """Recorded products of one kind, with columns and rows of fixed shapes.

    Args:
        operator: The operator. It is not kept alive.
        columns: Tensors with the shapes and dtypes of the columns to multiply.
        rows: Names of the rows to compute.
        recorder: Records the operations.
    """

    def __init__(self, operator: Multiplies, columns: Columns, rows: list[str], recorder: Recorder) -> None:
        # Allocate the static tensors that graphs read and write.
        risk = operator.risk
        some = next(iter(columns.values()))
        self._columns = {name: torch.empty_like(t) for name, t in columns.items()}
        shapes = {name: (len(some), *risk.params[name].shape) for name in rows}
        self._totals = {name: some.new_empty(shape, dtype=risk.sum_dtype) for name, shape in shapes.items()}
        self._flags = DeferredChecks(risk.device)
        reference = weakref.ref(operator)
        add = _adder(reference, self._columns, self._totals)
        self._replays = Replays(
            add, Nothing(), recorder, model=risk.model, log=log, around=lambda: _alive(reference).running()
        )

    @property
    def is_disabled(self) -> bool:
        """Whether products of this kind cannot be recorded."""
        return self._replays.is_disabled

    def multiply(self, operator: Multiplies, columns: Columns, task: str) -> Columns:
        """Multiply columns, and return sums over all batches, one for each row."""
        risk = operator.risk
        with torch.no_grad():
            torch._foreach_copy_(list(self._columns.values()), list(columns.values()))
            torch._foreach_zero_(list(self._totals.values()))
            self._flags.clear()
        with risk.checking_later(self._flags) as explain, same_random_state(risk.device):
            for batch in risk.batches(task):
                self._replays.run(batch)
            results = {name: t.clone() for name, t in self._totals.items()}
            # Reading the flags synchronizes. Hence no GPU work is pending when the product is returned, and it can be
            # used on any stream.
            if self._flags.first_failure() is not None:
                with operator.running():
                    explain()
        return results

    def close(self) -> None:
        """Free all CUDA graphs."""
        self._replays.close()


def _adder(reference: "weakref.ref[Multiplies]", columns: Columns, totals: Columns) -> Callable[[Batch], None]:
    """Return a function that adds the products of a batch to the totals."""

    def add(batch: Batch) -> None:
        for name, t in _alive(reference).products(batch, columns, list(totals)):
            totals[name].add_(t)

    return add


def _alive(reference: "weakref.ref[Multiplies]") -> Multiplies:
    """Return the referenced operator. The reference is weak, because the operator owns the recordings."""
    operator = reference()
    assert operator is not None  # noqa: S101 (the caller is a method of the operator)
    return operator


class RecordedProducts:
    """Decides which products of an operator are recorded, and keeps the recordings. Copies have no recordings.

    Args:
        replay: Whether products may be recorded.
    """

    def __init__(self, replay: bool) -> None:
        self._replay = replay
        self._recorder: Recorder | None = None
        self._kinds: dict[Hashable, RecordedKind] = {}
        self._seen: set[Hashable] = set()  # kinds of products that have been computed
        self._refused: set[Hashable] = set()  # kinds that cannot be recorded
        self._reasons: set[str] = set()  # each is logged once
        self._fruitless = 0  # number of changes of attributes since the last recording
        self._place: Hashable = None
        self._state: ModelState | None = None

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
        make = recorder_for(operator.risk.device) if self._replay else None
        if make is None:
            return None
        tensors = _tensors_of(operator.risk)
        why = _why_not(operator.risk, tensors)
        if why:
            self._say(why)
            return None
        self._forget_if_changed(operator, tensors)
        kind = _kind_of(columns, rows)
        if kind not in self._seen or kind in self._refused:
            return None
        try:
            recorded = self._kinds.get(kind) or self._new(make, kind, operator, columns, rows)
            results = recorded.multiply(operator, columns, task)
        except torch.OutOfMemoryError:
            # Free the recordings, and run eagerly, which needs less memory.
            self._refuse(kind)
            self._say("there is not enough memory")
            return None
        except BaseException:
            self._forget()
            raise
        if recorded.is_disabled:
            self._refuse(kind)
        return results

    def _new(
        self, make: Callable[[], Recorder], kind: Hashable, operator: Multiplies, columns: Columns, rows: list[str]
    ) -> RecordedKind:
        """Create a recording for a kind of product, and free all recordings if there are too many."""
        if len(self._kinds) == _MOST_KINDS:
            self._free()
        self._recorder = self._recorder or make()
        self._kinds[kind] = RecordedKind(operator, columns, rows, self._recorder)
        self._fruitless = 0
        return self._kinds[kind]

    def note(self, columns: Columns, rows: list[str]) -> None:
        """Remember the kind of an eager product, so that the next product of this kind is recorded."""
        if self._state is not None and len(self._seen) < _MOST_SEEN:
            self._seen.add(_kind_of(columns, rows))

    def _forget_if_changed(self, operator: Multiplies, tensors: list[Tensor]) -> None:
        """Free all recordings if the model, the loss, the operator or the environment has changed."""
        model = cast("Module", operator.risk.model)
        # Leave `self` out: recordings must not keep alive the operator that owns them.
        own = {name: value for name, value in vars(operator).items() if value is not self}
        settings = {"operator": own, "losses": [vars(loss) for loss in _losses_in(operator.risk.loss)]}
        place = weakref.ref(operator), _place(operator.risk, tensors)
        difference = "" if self._state is None else self._state.difference(model, settings)
        if place == self._place and not difference:
            return
        self._fruitless += bool(difference)
        if self._fruitless == _FRUITLESS:
            self._say(difference)
        self._forget()
        self._place = place
        self._state = ModelState(model, settings)

    def _forget(self) -> None:
        """Free all recordings, and forget all kinds of products."""
        self._free()
        self._seen.clear()
        self._refused.clear()

    def _refuse(self, kind: Hashable) -> None:
        """Never record a kind of product again, and free all recordings."""
        self._refused.add(kind)
        self._free()

    def _free(self) -> None:
        """Free all recordings together, because PyTorch cannot share a memory pool with graphs that were freed."""
        for recorded in self._kinds.values():
            recorded.close()
        self._kinds.clear()
        self._recorder = None

    def _say(self, why: str) -> None:
        """Log why products run eagerly, once per reason."""
        if why not in self._reasons:
            self._reasons.add(why)
            log.info("Products are not replayed as CUDA graphs: %s.", why)


def _kind_of(columns: Columns, rows: list[str]) -> Hashable:
    """Return the key of a recording: names, shapes and dtypes of columns, and names of rows."""
    return tuple((name, t.shape, t.dtype) for name, t in columns.items()), tuple(rows)


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


def _tensors_of(risk: EmpiricalRisk) -> list[Tensor]:
    """Return all parameters and buffers."""
    model = risk.model
    return [*risk.params.values(), *((*model.parameters(), *model.buffers()) if isinstance(model, Module) else ())]


def _losses_in(loss: Loss) -> Iterator[Loss]:
    """Yield a loss and, recursively, the losses that are its attributes."""
    yield loss
    for part in vars(loss).values():
        if isinstance(part, Loss):
            yield from _losses_in(part)


def _place(risk: EmpiricalRisk, tensors: list[Tensor]) -> Hashable:
    """Return the remaining state that recordings depend on: memory of parameters, modes, and settings of PyTorch."""
    memory = tuple((t.data_ptr(), t.shape, t.stride(), t.dtype, t.requires_grad) for t in tensors)
    modes = tuple(module.training for module in cast("Module", risk.model).modules())
    settings = (t for loss in _losses_in(risk.loss) for t in vars(loss).values() if isinstance(t, Tensor))
    # Settings of a loss may be tensors on the CPU, which must be copied to the GPU again after a change.
    versions = tuple(0 if t.is_inference() else t._version for t in settings)
    return memory, modes, versions, risk.reduction_factor, surroundings(risk.device)
