"""Products that are replayed: on a GPU, an operator repeats what it did for columns of the same shapes.

A GPU finishes the operations of a product with a small model faster than Python can start them. So they are recorded as
a CUDA graph, batch by batch, by `kfs.runtime.cuda_graphs.Replays`: it adds the product of a batch with columns to
totals. Columns and totals are tensors that stay where they are; a product copies its own columns there, and returns
copies of totals.

A graph outlives a product. It reads parameters where they are, so that it sees new values. Whatever else has changed
since it was recorded ends it: parameters that are other tensors, attributes of the model, of the loss and of the
operator, modes, and settings of PyTorch. What nobody can look into is not recorded, such as a model that is a function.
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
# So many kinds of products are recorded at the same time: many columns come in chunks of two sizes, and single ones
# come next to them.
_MOST_KINDS = 4
_MOST_SEEN = 64  # So many kinds are remembered.
# If attributes have changed so often, and nothing was recorded in between, the log says so.
_FRUITLESS = 3


class Multiplies(Protocol):
    """What a recorded operator needs to have."""

    risk: EmpiricalRisk

    def products(self, batch: Batch, columns: Columns, rows: list[str]) -> Iterator[tuple[str, Tensor]]:
        """Return names of rows, and the batch's products for them."""

    def running(self) -> AbstractContextManager[None]:
        """Return a context in which products are computed."""


def recorder_for(device: torch.device) -> Callable[[], Recorder] | None:
    """Return what makes a recorder for a device; `None` if there is none."""
    return partial(CudaRecorder, device) if device.type == "cuda" else None


class RecordedKind:
    """Recorded products of one kind.

    Args:
        operator: Computes them. It is not kept alive.
        columns: Tensors like those to multiply with.
        rows: Names of the rows that are wanted.
        recorder: Records them.
    """

    def __init__(self, operator: Multiplies, columns: Columns, rows: list[str], recorder: Recorder) -> None:
        """Make the tensors that graphs read and change."""
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
        """Whether such products cannot be recorded."""
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
            # This waits. So nothing is left to do for the GPU when a product is returned, whatever stream comes next.
            if self._flags.first_failure() is not None:
                with operator.running():
                    explain()
        return results

    def close(self) -> None:
        """Free all graphs."""
        self._replays.close()


def _adder(reference: "weakref.ref[Multiplies]", columns: Columns, totals: Columns) -> Callable[[Batch], None]:
    """Return what adds the products of a batch to totals."""

    def add(batch: Batch) -> None:
        for name, t in _alive(reference).products(batch, columns, list(totals)):
            totals[name].add_(t)

    return add


def _alive(reference: "weakref.ref[Multiplies]") -> Multiplies:
    """Return the operator that multiplies. Recordings belong to it, and must not keep it alive."""
    operator = reference()
    assert operator is not None  # noqa: S101 (somebody multiplies with it)
    return operator


class RecordedProducts:
    """Decides which products of an operator are recorded, and keeps recordings. Copies of it have none.

    Args:
        replay: Whether anything may be recorded.
    """

    def __init__(self, replay: bool) -> None:
        self._replay = replay
        self._recorder: Recorder | None = None
        self._kinds: dict[Hashable, RecordedKind] = {}
        self._seen: set[Hashable] = set()  # kinds of products that have been computed
        self._refused: set[Hashable] = set()  # kinds that cannot be recorded
        self._reasons: set[str] = set()  # each is logged once
        self._fruitless = 0  # how often attributes have changed since something was recorded
        self._place: Hashable = None
        self._state: ModelState | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave recordings out."""
        return RecordedProducts, (self._replay,)

    def multiply(self, operator: Multiplies, columns: Columns, rows: list[str], task: str) -> Columns | None:
        """Multiply columns if such products are recorded, or to be recorded.

        A kind of product that comes for the first time runs as it is. So what is computed once leaves no tensors
        behind, and data have passed all checks before anything is left to a graph.

        Args:
            operator: Computes products.
            columns: What to multiply with.
            rows: Names of the rows that are wanted.
            task: What to call it in a progress bar.

        Returns:
            Sums over all batches; `None` if the product is to run as it is. Call `note` after it has.
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
            # Without recordings, there is more of it.
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
        """Start to record a kind of products."""
        if len(self._kinds) == _MOST_KINDS:
            self._free()
        self._recorder = self._recorder or make()
        self._kinds[kind] = RecordedKind(operator, columns, rows, self._recorder)
        self._fruitless = 0
        return self._kinds[kind]

    def note(self, columns: Columns, rows: list[str]) -> None:
        """Take note of a product that has run as it is."""
        if self._state is not None and len(self._seen) < _MOST_SEEN:
            self._seen.add(_kind_of(columns, rows))

    def _forget_if_changed(self, operator: Multiplies, tensors: list[Tensor]) -> None:
        """Free all recordings if anything is different from what they take for granted."""
        model = cast("Module", operator.risk.model)
        # Recordings must not keep the operator alive, which has them.
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
        """Free all recordings, and know nothing about any kind of product."""
        self._free()
        self._seen.clear()
        self._refused.clear()

    def _refuse(self, kind: Hashable) -> None:
        """Let a kind of products run as it is."""
        self._refused.add(kind)
        self._free()

    def _free(self) -> None:
        """Free all recordings. PyTorch does not let memory be shared with graphs that are gone: so all go together."""
        for recorded in self._kinds.values():
            recorded.close()
        self._kinds.clear()
        self._recorder = None

    def _say(self, why: str) -> None:
        """Log why products run as they are, once."""
        if why not in self._reasons:
            self._reasons.add(why)
            log.info("Products are not replayed as CUDA graphs: %s.", why)


def _kind_of(columns: Columns, rows: list[str]) -> Hashable:
    """Return what products have in common that one recording serves."""
    return tuple((name, t.shape, t.dtype) for name, t in columns.items()), tuple(rows)


def _why_not(risk: EmpiricalRisk, tensors: list[Tensor]) -> str:
    """Return why products are not recorded; an empty text if they may be."""
    model = risk.model
    if not isinstance(model, Module) or isinstance(risk.loss, Custom):
        return "the model or the loss is a function, and what it looks at may change unnoticed"
    if has_hooks(model):
        return "the model has hooks"
    if is_watched() or torch.is_inference_mode_enabled():
        return "a mode of PyTorch is on that watches all operations, or is for inference"
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
    """Yield a loss, and those that it consists of."""
    yield loss
    for part in vars(loss).values():
        if isinstance(part, Loss):
            yield from _losses_in(part)


def _place(risk: EmpiricalRisk, tensors: list[Tensor]) -> Hashable:
    """Return what else recordings take for granted: where parameters are, modes, numbers and settings of PyTorch."""
    memory = tuple((t.data_ptr(), t.shape, t.stride(), t.dtype, t.requires_grad) for t in tensors)
    modes = tuple(module.training for module in cast("Module", risk.model).modules())
    settings = (t for loss in _losses_in(risk.loss) for t in vars(loss).values() if isinstance(t, Tensor))
    # Settings of a loss may be on the host, from where changed ones have to be copied again.
    versions = tuple(0 if t.is_inference() else t._version for t in settings)
    return memory, modes, versions, risk.reduction_factor, surroundings(risk.device)
