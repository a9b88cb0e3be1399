"""Factor passes as CUDA graphs, which run in addition to the user's own passes.

The recording of CUDA graphs in general lives in `kfs.runtime.cuda_graphs`.

Watching a forward pass runs Python code for each operation, while a GPU waits. So when inputs of the same shape have
come twice, a separate pass is recorded for them: forward, vectors, backward and sums. From then on, the user's passes
with such inputs are not watched. When the gradient of their loss arrives, the recorded pass runs with their inputs and
targets. It costs one more forward pass, and hardly any time on the host.

A model is recorded only if that changes nothing:

- The model must be a function of its inputs: no dropout, no statistics over batches, no state from one pass to the
  next.
- It must not synchronize with the GPU.
- It must have no hooks except those of this library.

Before the recording, a rehearsal of the separate pass must give the same sums as the watched pass.
"""

import copy
import logging
import weakref
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
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
from kfs.optim.recorded_update import SHARE, memory_of, recorder_for
from kfs.problem.data import Batch, MaskSource
from kfs.problem.isolation import evaluating, is_same, other_random_state, random_state, restored
from kfs.problem.risk import prediction_in
from kfs.runtime import cuda_graphs
from kfs.runtime.cuda_graphs import Graph, Reads, Recorder, shape_of, unchanged_attributes, why_not
from kfs.runtime.nested import mapped, tensors_in
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


def has_other_hooks(model: nn.Module) -> bool:
    """Whether a model has hooks that this library has not registered."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooks = (hook for module in model.modules() for kind in kinds for hook in getattr(module, kind).values())
    return not all(isinstance(hook, Hook) for hook in hooks)


class HookedModelState(cuda_graphs.ModelState):
    """The attributes of a model's modules. Hooks that this library has not registered count as a difference, too."""

    def difference(self, model: nn.Module, settings: Mapping[str, Any] | None = None) -> str:
        """Return what is different now; empty if nothing is."""
        return "the model has hooks" if has_other_hooks(model) else super().difference(model, settings)


log = logging.getLogger("kfs.optim")
_TIMES = 2  # Passes are recorded when their input shape has occurred this many times.
_MOST_GRAPHS = 2
_MOST_KEYS = 64  # number of shapes that are counted
_MOST_CHANGES = 3  # If the model has changed this many times, such passes are no longer recorded.
_MOST_REFUSALS = 3  # If this many shapes could not be recorded in one mode of the model, others are not tried.
# Sums of watched and recorded passes, possibly in half precision, may have this relative difference.
_TOLERANCE = 1e-2
Autocast = tuple[bool, torch.dtype]
# The data of a pass: arguments of the model, number of examples, targets, index of the first example.
Data = tuple[Any, int, Tensor, int]


class PassKey(NamedTuple):
    """Key of a recording: passes with equal keys can share it."""

    shape: Hashable  # of the model's arguments
    mode: Hashable  # precision, and which modules are in training mode


@dataclass(eq=False)
class FactorPass:
    """A pass that computes factors, with everything that it needs except data.

    Attributes:
        model: Called with the arguments.
        loss: The declared loss.
        settings: Which curvature matrix to compute, and how.
        trace: Contains the plans.
        known: Result of the audit.
        autocast: Whether the user's pass ran with autocast, and its dtype.
        masks: Finds a mask in the arguments.
    """

    model: nn.Module
    loss: Loss
    settings: Settings
    trace: Trace
    known: AuditResult | None
    autocast: Autocast
    masks: MaskSource

    def run(self, arguments: Any, num_data: int, y: Tensor, first: Tensor, sums: FactorSums) -> dict[str, str]:
        """Overwrite `sums` with the sums of a batch, and return parameters that have none, with reasons.

        Numbers of positions that depend on data stay on the device, because a graph cannot send them to the host.
        """
        # Reset sums in place: a graph writes to the same memory every time.
        reset(sums)
        # Run the model in a captured pass.
        device = self.trace.device_type
        masks = BatchMasks(self.loss.counted(y), self.masks.find(arguments, num_data), device=self.trace.device)
        one = CapturedPass(self.trace, [sums], num_data, self.settings.batch_axis, self.known, masks=masks)
        args, kwargs = one.mark(arguments)
        with torch.enable_grad(), torch.autocast(device, self.autocast[1], self.autocast[0]), evaluating():
            with one:
                f = prediction_in(self.model(*args, **kwargs))
            one.finish_forward(f)
        # Send vectors back through its graph.
        with torch.no_grad():
            at_once = columns_at_once(self.settings, f.device) if self.settings.columns_at_once else 1
            values = computable(f.detach())
            vectors = backpropagated_vectors(self.loss, values, y, self.settings, first, at_once)
            one.send_back(f, (columns.to(f.dtype) for columns in vectors))
            for total in (total for block in sums.blocks.values() for total in block.sums):
                total.complete(roughly=True)
        return not_covered(one.tracker.params, sums.blocks.values(), one.unexplained, sums.conflicts)


@dataclass(eq=False)
class FactorGraph:
    """A recorded pass for inputs of one shape.

    Attributes:
        graph: The recording.
        arguments: Arguments of the model that the recording reads.
        y: Targets that the recording reads.
        first: Index of the first example that the recording reads.
        sums: Sums that the recording writes.
        counts: Numbers of positions that are the same for all data, which the host knows.
        uncovered: Parameters without sums, with reasons.
        reads: Keeps other tensors that the recording reads alive.
        state: State of the model when it was recorded.
        run: Computes the same eagerly.
        user: The result that currently refers to the sums.
    """

    graph: Graph
    arguments: Any
    y: Tensor
    first: Tensor
    sums: FactorSums
    counts: dict[Any, float]
    uncovered: dict[str, str]
    reads: Reads
    state: HookedModelState
    run: Callable[[Any, Tensor, Tensor, FactorSums], dict[str, str]]
    user: "weakref.ref[FactorResult] | None" = None

    def replay(self, arguments: Any, y: Tensor, first_datum: int) -> "FactorResult":
        """Return the sums for new data."""
        if y.shape != self.y.shape or y.dtype != self.y.dtype:
            sums = FactorSums(self.sums.settings)
            first = torch.full_like(self.first, first_datum)
            return FactorResult(sums, self.run(arguments, y, first, sums))
        before = None if self.user is None else self.user()
        if before is not None:
            before.copy()  # Gradients are accumulated, and the sums of the last pass were not used yet.
        with torch.no_grad():
            torch._foreach_copy_(list(tensors_in(self.arguments)), list(tensors_in(arguments)))
            self.y.copy_(y)
            self.first.fill_(first_datum)
        self.graph.replay()
        _set_counts(self.sums, self.counts)
        result = FactorResult(self.sums, self.uncovered)
        self.user = weakref.ref(result)
        return result


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
        read_counts(role for block in blocks.values() for role in block.roles.values())
        return blocks

    def copy(self) -> None:
        """Copy the sums, because the graph will run again."""
        self.own = copy.deepcopy(self.sums.blocks)


class FactorGraphs:
    """Decides which passes are recorded, and stores recordings."""

    def __init__(self, loss: Loss, settings: Settings, replay: bool) -> None:
        self._loss = loss
        self._settings = settings
        # These Fisher types send no vectors back: the user's passes are enough.
        self._enabled = replay and settings.fisher not in {"empirical", "forward-only"}
        self._times: dict[Hashable, int] = {}
        self._graphs: dict[PassKey, FactorGraph] = {}
        self._place: Hashable = None  # trace and memory addresses of the model in the last pass
        self._changes: dict[Hashable, int] = {}  # how often the model differed from its recorded state
        self._refused: set[Hashable] = set()  # passes that cannot be recorded, by key
        self._refusals: dict[Hashable, int] = {}  # by mode of the model, which is the key without the shape
        self._reasons: set[str] = set()  # Each is logged once.

    def key(self, model: nn.Module, trace: Trace, arguments: Any, autocast: Autocast) -> PassKey | None:
        """Return the key of the recording for a pass; `None` if the pass cannot be recorded."""
        tensors = list(tensors_in(arguments))
        if not self._enabled or not tensors or recorder_for(tensors[0].device) is None:
            return None
        shape = shape_of(Batch(arguments, tensors[0], 0))
        if shape is None:
            return None
        own = (*model.parameters(), *model.buffers())
        place = id(trace), tuple(t.data_ptr() for t in own)
        if place != self._place:
            # Recordings for another trace or other memory would never be used again.
            self.forget()
            self._place = place
        mode = autocast, uses_tf32(), tuple(module.training for module in model.modules())
        return PassKey(shape, mode)

    def find(self, key: PassKey, model: nn.Module) -> FactorGraph | None:
        """Return the recording for a pass, if there is one and the model has not changed."""
        found = self._graphs.get(key)
        why = "" if found is None else found.state.difference(model)
        if not why:
            return found
        # A recording contains Python numbers of that time, such as a temperature.
        self._free(key)
        self._changes[key] = self._changes.get(key, 0) + 1
        if self._changes[key] == _MOST_CHANGES:
            self._refuse(key, why)
        return None

    def wants(self, key: PassKey) -> bool:
        """Count a watched pass, and return whether to record it."""
        if key in self._refused or self._refusals.get(key.mode, 0) >= _MOST_REFUSALS:
            return False
        times = self._times.pop(key, 0) + 1
        self._times[key] = times
        if len(self._times) > _MOST_KEYS:
            del self._times[next(iter(self._times))]  # the least recent one
        return times == _TIMES

    def forget(self) -> None:
        """Free all recordings."""
        for recorded in self._graphs.values():
            recorded.graph.reset()
        self._graphs.clear()
        self._times.clear()

    def _free(self, key: PassKey) -> None:
        self._graphs.pop(key).graph.reset()
        self._times.pop(key, None)

    def _refuse(self, key: PassKey, why: str) -> None:
        """Stop recording passes with this key. Others, such as passes in evaluation mode, may still be recorded."""
        if why not in self._reasons:
            log.info("kfs.optim: passes for factors are not recorded as CUDA graphs: %s.", why)
            self._reasons.add(why)
        self._refused.add(key)
        self._refusals[key.mode] = self._refusals.get(key.mode, 0) + 1

    def record(
        self,
        key: PassKey,
        one: FactorPass,
        data: Data,
        watched: dict[Key, BlockSums],
    ) -> None:
        """Record passes like one that was watched.

        Args:
            key: Key of such passes.
            one: How to run them.
            data: Data of the watched pass (see `Data`).
            watched: Sums of the watched pass.
        """
        make = recorder_for(data[2].device)
        if make is None or len(self._graphs) == _MOST_GRAPHS:
            return
        with allow_sync(), unchanged_attributes(one.model):
            try:
                self._graphs[key] = self._recorded(make(), one, data, watched)
            except Exception as error:  # noqa: BLE001 (whatever it is, passes can be watched)
                self._refuse(key, why_not(error))

    def _recorded(self, recorder: Recorder, one: FactorPass, data: Data, watched: dict[Key, BlockSums]) -> FactorGraph:
        """Rehearse a pass, compare its sums with the watched ones, and record it."""
        arguments, num_data, y, first_datum = data
        static = mapped(arguments, lambda t: t.detach().clone().requires_grad_(t.requires_grad))
        targets = y.clone()
        first = torch.full((), first_datum, dtype=torch.int64, device=y.device)
        sums = FactorSums(self._settings)
        state = HookedModelState(one.model)
        random = random_state(y.device)
        other_random = other_random_state()
        versions = [b._version for b in one.model.buffers()]
        if has_other_hooks(one.model):
            raise _NotRecordableError("the model has hooks")

        # Rehearse without recording. The pass must be repeatable, and give the watched sums.
        def rehearse() -> None:
            one.run(static, num_data, targets, first, sums)

        with restored(one.model, y.device, refuse=False):
            waits = recorder.notices_waits(rehearse)
            same_state = is_same(random, random_state(y.device)) and other_random == other_random_state()
        counts = sums.counts()
        kept = state.difference(one.model)
        if not same_state or versions != [b._version for b in one.model.buffers()] or kept:
            raise _NotRecordableError("the model depends on chance, or keeps something from one pass to the next")
        if not _are_equal(sums.blocks, watched):
            raise _NotRecordableError("the model is not a function of its inputs")
        # Record the pass, unless it needs too much memory.
        free, taken = memory_of(y.device)
        reads = Reads()
        uncovered: dict[str, str] = {}
        plans = len(sums.adders)

        def run() -> None:
            with unchanged_attributes(one.model), reads:
                uncovered.update(one.run(static, num_data, targets, first, sums))

        graph = _record(recorder, run, waits, sums)
        _set_counts(sums, counts)  # recording has changed them
        taken = memory_of(y.device)[1] - taken
        if len(sums.adders) != plans or taken > SHARE * free:
            graph.reset()
            why = f"it would take {taken / 2**30:.1f} of {free / 2**30:.1f} GiB that are free"
            raise _NotRecordableError(why if len(sums.adders) == plans else "parameters were used in another way")

        def run_as_it_is(arguments: Any, y: Tensor, first: Tensor, sums: FactorSums) -> dict[str, str]:
            return one.run(arguments, num_data, y, first, sums)

        return FactorGraph(graph, static, targets, first, sums, counts, uncovered, reads, state, run_as_it_is)


class _NotRecordableError(Exception):
    """Passes cannot be recorded; the message says why."""


def _record(recorder: Recorder, run: Callable[[], None], waits: str, sums: FactorSums) -> Graph:
    """Record a pass. `waits` describes what synchronizes with the GPU when the pass is not recorded."""
    try:
        return recorder.record(run)
    except Exception as error:
        if not waits:
            raise
        log.debug("kfs.optim: a pass for factors could not be recorded: %s.", why_not(error))
    # A model may take another branch while it is recorded, and fill a cache that the next attempt finds.
    sums.finish_batch()
    try:
        return recorder.record(run)
    except Exception as error:
        raise _NotRecordableError(why_not(error, waits)) from error


def _set_counts(sums: FactorSums, counts: Mapping[Any, float]) -> None:
    """Set the numbers of positions that the host knows; others are on the device."""
    sums.add_counts({key: counts[key] - value for key, value in sums.counts().items()})


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
