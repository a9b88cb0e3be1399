"""Factor passes as CUDA graphs, which run in addition to the user's own passes.

The recording of CUDA graphs in general lives in `kfs.runtime.cuda_graphs`.

Watching a forward pass runs Python code for each operation, while a GPU waits. So when inputs of the same shape have
come three times, a separate pass is recorded for them: forward, vectors, backward and sums. From then on, the user's
passes with such inputs are not watched. When the gradient of their loss arrives, the recorded pass runs with their
inputs and targets. It costs one more forward pass, and hardly any time on the host.

A model is recorded only if that changes nothing:

- The model must be a function of its inputs: no dropout, no statistics over batches, no state from one pass to the
  next.
- It must not synchronize with the GPU.
- It must have no hooks except those of this library.

When they come for the second time, the separate pass is rehearsed. Rehearsal and recording must give the same sums as
the watched passes.
"""

import copy
import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # unlike torch.compiler.disable, it does not import the compiler

from kfs.factors.accumulate import BlockSums, FactorSums, read_counts, reset
from kfs.factors.blocks import computable
from kfs.factors.capture import CapturedPass
from kfs.factors.compute import backpropagated_vectors, columns_at_once, not_covered
from kfs.factors.layout import Key
from kfs.factors.rows import AuditResult, BatchMasks
from kfs.factors.settings import Settings
from kfs.factors.trace import Trace
from kfs.losses import Loss
from kfs.problem.data import MaskSource
from kfs.problem.isolation import evaluating, other_random_state, random_state, restored
from kfs.problem.risk import prediction_in
from kfs.runtime.cuda_graphs import (
    SHARE,
    Guard,
    Replayer,
    RunKey,
    has_hooks,
    shape_of,
    unchanged_attributes,
    why_not,
)
from kfs.runtime.nested import tensors_in
from kfs.runtime.precision import uses_tf32
from kfs.runtime.sync import allow_sync


class Hook:
    """Calls a method of a `Watch` that still exists. Copies of a hooked module have hooks that do nothing."""

    def __init__(self, watch: object = None, method: str = "") -> None:
        """Store a weak reference to the watch."""
        self._watch = None if watch is None else weakref.ref(watch)
        self._method = method

    @_disable_dynamo
    def __call__(self, *args: Any) -> Any:
        """Call the method; do nothing if the watch no longer exists."""
        watch = None if self._watch is None else self._watch()
        return None if watch is None else getattr(watch, self._method)(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles have no watch."""
        return Hook, ()


log = logging.getLogger("kfs.optim")
_MOST_GRAPHS = 2
# Sums of watched and recorded passes, possibly in half precision, may have this relative difference.
_TOLERANCE = 1e-2
# The data of a pass: arguments of the model, targets, index of the first example.
Data = tuple[Any, Tensor, int]


class PassKey(NamedTuple):
    """Identifies passes that can share a recording."""

    replayer: Replayer  # has the recording
    run: RunKey  # The kind is precision, and which modules are in training mode; the shape is that of the arguments.
    guard: Guard
    autocast: tuple[bool, torch.dtype]  # whether the user's pass runs with autocast, and its dtype


@dataclass(eq=False)
class FactorGraph:
    """A pass that computes factors for inputs of one shape, with everything that it needs except data.

    Attributes:
        key: Key of the pass.
        model: Called with the arguments.
        loss: The declared loss.
        settings: Which curvature matrix to compute, and how.
        trace: Contains the plans.
        known: Result of the audit.
        masks: Finds a mask in the arguments.
        num_data: Number of examples.
        targets: Shape and dtype of the targets; `None` before the first run.
        sums: Sums that the pass overwrites.
        uncovered: Parameters without sums, with reasons.
        user: The result that currently refers to the sums.
    """

    key: PassKey
    model: nn.Module
    loss: Loss
    settings: Settings
    trace: Trace
    known: AuditResult | None
    masks: MaskSource
    num_data: int
    targets: tuple[torch.Size, torch.dtype] | None = None
    sums: FactorSums = field(init=False)
    uncovered: dict[str, str] = field(default_factory=dict)
    user: "weakref.ref[FactorResult] | None" = None

    def __post_init__(self) -> None:
        self.sums = FactorSums(self.settings)

    def replay(self, arguments: Any, y: Tensor, first_datum: int) -> "FactorResult":
        """Return the sums for new data."""
        self.targets = self.targets or (y.shape, y.dtype)
        if (y.shape, y.dtype) != self.targets:
            sums = FactorSums(self.settings)
            return FactorResult(sums, self._run(arguments, y, first_datum, sums))
        before = None if self.user is None else self.user()
        if before is not None:
            before.copy()  # Gradients are accumulated, and the sums of the last pass were not used yet.
        # The pass overwrites sums on the device. It adds to numbers of positions that the host knows.
        self.sums.add_counts({name: -value for name, value in self.sums.counts().items()})

        def body(inputs: tuple[Any, Tensor], numbers: Sequence[float | Tensor]) -> None:
            self.uncovered |= self._run(*inputs, numbers[0], self.sums)

        key = self.key
        key.replayer.run(key.run, body, (arguments, y), key.guard, [first_datum], host=self.sums)
        result = FactorResult(self.sums, self.uncovered)
        self.user = weakref.ref(result)
        return result

    def _run(self, arguments: Any, y: Tensor, first: float | Tensor, sums: FactorSums) -> dict[str, str]:
        """Overwrite `sums` with the sums of a batch, and return parameters that have none, with reasons.

        A recording has the index of the first example on the device. Numbers of positions that depend on data stay
        there, because a graph cannot send them to the host.
        """
        # Reset sums in place: a graph writes to the same memory every time.
        reset(sums)
        # Run the model in a captured pass.
        enabled, dtype = self.key.autocast
        masks = BatchMasks(self.loss.counted(y), self.masks.find(arguments, self.num_data), device=self.trace.device)
        one = CapturedPass(self.trace, [sums], self.num_data, self.settings.batch_axis, self.known, masks=masks)
        args, kwargs = one.mark(arguments)
        with torch.enable_grad(), torch.autocast(self.trace.device_type, dtype, enabled), evaluating():
            with one:
                f = prediction_in(self.model(*args, **kwargs), self.loss.output)
            one.finish_forward(f)
        # Send vectors back through its graph.
        with torch.no_grad():
            at_once = columns_at_once(self.settings, f.device) if self.settings.columns_at_once else 1
            first = first if isinstance(first, Tensor) else torch.full((), first, device=y.device)
            values = computable(f.detach())
            vectors = backpropagated_vectors(self.loss, values, y, self.settings, first.long(), at_once)
            one.send_back(f, (columns.to(f.dtype) for columns in vectors))
            for total in (total for block in sums.blocks.values() for total in block.sums):
                total.complete(roughly=True)
        return not_covered(one.tracker.params, sums.blocks.values(), one.unexplained, sums.conflicts)


@dataclass(eq=False)
class FactorResult:
    """Sums of one batch, in the memory of a graph or in their own memory."""

    sums: FactorSums
    uncovered: dict[str, str]
    own: dict[Key, BlockSums] | None = None

    @property
    def blocks(self) -> dict[Key, BlockSums]:
        """The sums. All numbers of positions that depend on data are read from an accelerator at once."""
        blocks = dict(self.sums.blocks) if self.own is None else self.own
        read_counts(blocks.values())
        return blocks

    def copy(self) -> None:
        """Copy the sums, because the graph will run again."""
        self.own = copy.deepcopy(self.sums.blocks)


class FactorGraphs:
    """Decides which passes can be recorded, and compares their sums with those of watched passes."""

    def __init__(self, settings: Settings, replay: bool) -> None:
        # These Fisher types send no vectors back: the user's passes are enough.
        self._enabled = replay and settings.fisher not in {"empirical", "forward-only"}
        self._replayer: Replayer | None = None

    def key(self, model: nn.Module, trace: Trace, arguments: Any) -> PassKey | None:
        """Return the key of the recording for a pass; `None` if the pass cannot be recorded."""
        tensors = tensors_in(arguments)
        if not self._enabled or not tensors:
            return None
        device = tensors[0].device
        if self._replayer is None or self._replayer.device != device:
            self.forget()
            self._replayer = Replayer("Passes for factors", log, device, share=SHARE, most=_MOST_GRAPHS)
        shape = shape_of(arguments) if self._replayer.is_enabled else None
        if shape is None:
            return None
        # Recordings for another trace or other memory would never be used again. A recording contains Python numbers
        # of its time, such as a temperature.
        place = id(trace), tuple(t.data_ptr() for t in (*model.parameters(), *model.buffers()))
        guard = Guard(model, place=place, why="the model has hooks" if has_hooks(model, Hook) else "")
        kind = trace.device_type
        autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        mode = autocast, uses_tf32(), tuple(module.training for module in model.modules())
        return PassKey(self._replayer, RunKey(mode, shape), guard, autocast)

    def find(self, key: PassKey) -> FactorGraph | None:
        """Return the recording for a pass, if there is one and the model has not changed."""
        if not key.replayer.is_recorded(key.run, key.guard):
            return None
        found: FactorGraph = key.replayer.kept(key.run)
        found.key = key
        return found

    def wants(self, key: PassKey) -> bool:
        """Count a watched pass, and return whether to rehearse or record it."""
        repeated = key.replayer.is_repeated(key.run, key.guard) and key.replayer.has_room(key.run.kind)
        key.replayer.note(key.run)
        return repeated

    def forget(self) -> None:
        """Free all recordings."""
        if self._replayer is not None:
            self._replayer.close()

    def record(self, one: FactorGraph, data: Data, watched: dict[Key, BlockSums]) -> None:
        """Rehearse, or record, a pass like one that was watched.

        Args:
            one: The pass.
            data: Data of the watched pass (see `Data`).
            watched: Sums of the watched pass.
        """
        # The model may have changed after the watched pass.
        replayer, run, guard, _ = one.key
        if not replayer.is_repeated(run, guard) or guard.difference(Guard(one.model)):
            return
        with allow_sync(), unchanged_attributes(one.model):
            try:
                why = self._compared(one, data, watched)
            except Exception as error:  # noqa: BLE001 (whatever it is, passes can be watched)
                why = why_not(error)
        if why:
            replayer.refuse(run.kind, why)

    def _compared(self, one: FactorGraph, data: Data, watched: dict[Key, BlockSums]) -> str:
        """Run a pass, and compare its sums with the watched ones. Return the reason why it cannot be recorded."""
        replayer, run = one.key.replayer, one.key.run
        graph: FactorGraph = replayer.kept(run) or replayer.keep(run, one)
        graph.key = one.key
        arguments, y, first_datum = data
        random, other_random = random_state(y.device), other_random_state()
        versions = [b._version for b in one.model.buffers()]
        with restored(one.model, y.device, refuse=False):
            result = graph.replay(arguments, y, first_datum)
            same_state = all(map(torch.equal, random, random_state(y.device)))
            same_state = same_state and other_random == other_random_state()
        if not same_state or versions != [b._version for b in one.model.buffers()]:
            return "the model depends on chance, or keeps something from one pass to the next"
        return "" if _are_equal(result.sums.blocks, watched) else "the model is not a function of its inputs"


def _are_equal(sums: dict[Key, BlockSums], others: dict[Key, BlockSums]) -> bool:
    """Whether two computations of the same sums agree."""
    if sums.keys() != others.keys():
        return False
    pairs = [(a, b) for key in sums for a, b in zip(sums[key].sums, others[key].sums, strict=True)]
    if any(a.total.shape != b.total.shape for a, b in pairs):
        return False
    mine, theirs = ([pair[side].total for pair in pairs] for side in (0, 1))
    distances = torch._foreach_norm(torch._foreach_sub(mine, theirs))
    sizes = torch._foreach_norm(theirs)
    close = [d <= _TOLERANCE * size for d, size in zip(distances, sizes, strict=True)]
    return bool(torch.stack(close).all())
