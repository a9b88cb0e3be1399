"""CUDA graphs: record a computation on a GPU once, and replay it for inputs of the same shapes.

The computations live with the clients: passes for factors, products with operators, the optimizer.

A GPU finishes the operations of a small model faster than Python can launch them. A CUDA graph contains all operations
of a pass and launches them together. For each shape of batches, `Replays` does the following:

1. The first batch runs as usual.
2. The second batch rehearses the recording, while PyTorch reports operations that synchronize with the GPU. Such an
   operation may mean that a decision depends on data. A graph does not make the decision again.
3. The third batch is recorded. Its inputs, and those of all further batches, are copied to the memory that the graph
   reads.

A graph does not change numbers on the host. For every batch of a shape, a pass adds the same amounts to them, and a
replay adds these amounts, too: `Host.counts` returns all such numbers. The index of the first example, on which random
draws depend, is a tensor on the device.

A model is not replayed if an attribute of a module keeps a result of one pass for the next one, or if the model has
hooks. Hooks must run in every pass, and the tensors that they keep would be memory of the graph.

A graph also reads memory that it does not own. `Reads` holds references to this memory.
"""

import gc
import logging
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from operator import is_
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import Module, Parameter
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_iter

from kfs.errors import ModelError
from kfs.runtime.nested import mapped, tensors_in
from kfs.runtime.precision import uses_tf32
from kfs.runtime.sync import detect_syncs

if TYPE_CHECKING:
    from kfs.problem.data import Batch

# PyTorch 2.9 has a new name for the switch of convolutions; see `kfs.runtime.precision`.
_convolutions: Any = getattr(torch.backends.cudnn, "conv", torch.backends.cudnn)
_SWITCH = "fp32_precision" if hasattr(_convolutions, "fp32_precision") else "allow_tf32"


def surroundings(device: torch.device) -> Hashable:
    """Return the global settings that affect computations on a device, for comparison with a later call."""
    cudnn = torch.backends.cudnn
    matmul = torch.backends.cuda.matmul
    return (
        torch.is_autocast_enabled(device.type),
        torch.get_autocast_dtype(device.type),
        torch.get_default_dtype(),
        uses_tf32(),
        getattr(_convolutions, _SWITCH),
        cudnn.enabled,
        cudnn.deterministic,
        cudnn.benchmark,
        torch.are_deterministic_algorithms_enabled(),
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
    )


def is_watched() -> bool:
    """Return whether a dispatch mode, such as PyTorch's FLOP counter, is active; a replayed graph would bypass it."""
    return _get_current_dispatch_mode() is not None


class Reads(TorchDispatchMode):
    """Holds references to all memory that operations in this context use but did not allocate themselves.

    A graph reads this memory at every replay. It includes cached constants, copies of settings, and tensors that a
    model caches for a sequence length. Their owners may replace them while the graph still reads the old memory.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: set[int] = set()
        self._held: dict[int, Any] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # By default, PyTorch wraps `__torch_dispatch__` and imports its compiler for that, which takes two seconds.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for t in tree_iter((args, kwargs)):
            if isinstance(t, Tensor) and t.layout is torch.strided:
                storage = t.untyped_storage()
                if storage._cdata not in self._made:
                    self._held[storage._cdata] = storage
        result = func(*args, **kwargs)
        for t in tree_iter(result):
            if isinstance(t, Tensor) and t.layout is torch.strided:
                place = t.untyped_storage()._cdata
                if place not in self._held:  # not a view of held memory
                    self._made.add(place)
        return result


class Graph(Protocol):
    """A recorded computation."""

    def replay(self) -> None:
        """Run the computation again."""

    def reset(self) -> None:
        """Free the memory of the graph."""


class Recorder(Protocol):
    """Interface of an object that records computations, such as `CudaRecorder`."""

    def notices_waits(self, run: Callable[[], None]) -> str:
        """Run a function, and return a description of its first synchronizing operation, or an empty string."""

    def record(self, run: Callable[[], None]) -> Graph:
        """Record the operations of a function without executing them."""


def why_not(error: Exception, waits: str = "") -> str:
    """Return the reason why a computation cannot be recorded, with its synchronizing operation if there is one."""
    text = str(error).partition("\n")[0].rstrip(".")
    return f"{text} (an operation waits for the GPU: {waits})" if waits else text


class CudaRecorder:  # pragma: no cover (tested on a GPU)
    """Records CUDA graphs that share one memory pool.

    Sharing is safe because the graphs never run concurrently and no temporary tensor outlives a replay.

    Args:
        device: A GPU.
        memory: Maximum number of bytes for all graphs; `None` for no limit.
    """

    def __init__(self, device: torch.device, memory: int | None = None) -> None:
        self._device = device
        self._memory = memory
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._taken = 0

    def notices_waits(self, run: Callable[[], None]) -> str:
        """Run a function, and return a description of its first synchronizing operation, or an empty string."""
        with detect_syncs() as waits:
            run()
        return waits[0].partition(" (Triggered")[0] if waits else ""

    def record(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Record the operations of a function without executing them.

        Raises:
            ModelError: If the graphs exceed the memory limit.
            Exception: If the function cannot be recorded. The state of PyTorch is restored.
        """
        with torch.cuda.device(self._device):
            before = torch.cuda.memory_reserved()
            idle = before - torch.cuda.memory_allocated()
            # Graphs cannot use memory in the cache of PyTorch's allocator. Free it if it exceeds the free memory.
            if torch.cuda.mem_get_info()[0] < idle:
                torch.cuda.empty_cache()
                before = torch.cuda.memory_reserved()
            graph = torch.cuda.CUDAGraph()
            try:
                with _without_cached_casts(), _recording(graph, self._stream, self._pool):
                    run()
            except BaseException:
                self._pool = torch.cuda.graph_pool_handle()  # a pool cannot be used again after a failure
                raise
            self._taken += max(torch.cuda.memory_reserved() - before, 0)
        if self._memory is not None and self._taken > self._memory:
            graph.reset()
            raise ModelError(f"Graphs take {self._taken} bytes, and memory={self._memory}.", "Increase memory=.")
        return graph


@contextmanager
def _recording(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any) -> Iterator[None]:  # pragma: no cover
    """Record all operations in this context; after an error, abandon the recording."""
    collects = gc.isenabled()
    gc.disable()  # the garbage collector could free memory of other streams during the capture
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            try:
                # Threads of a data loader may continue to use CUDA.
                graph.capture_begin(pool, capture_error_mode="thread_local")
                yield
                graph.capture_end()
            except BaseException:
                _abandon(graph)
                raise
    finally:
        torch.cuda.current_stream().wait_stream(stream)
        if collects:
            gc.enable()


def _abandon(graph: torch.cuda.CUDAGraph) -> None:  # pragma: no cover (tested on a GPU)
    """End a recording that failed."""
    try:
        graph.capture_end()
    except RuntimeError:
        # After a failed capture, PyTorch's random generator and allocator remain in capture mode. They recover with the
        # next successful capture, so capture a trivial graph.
        small = torch.cuda.CUDAGraph()
        t = torch.zeros((), device="cuda")
        with torch.cuda.stream(torch.cuda.Stream()):
            small.capture_begin(capture_error_mode="thread_local")
            t.add_(1)
            small.capture_end()
        small.reset()
    graph.reset()


@contextmanager
def _without_cached_casts() -> Iterator[None]:  # pragma: no cover (tested on a GPU)
    """Disable the cache of `autocast`: casts cached during a capture belong to the graph and have no values."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


# Attributes of all modules: parameters, buffers, children, modes and hooks. Other code checks them.
_KNOWN = frozenset(nn.Module().__dict__)
# Values of these types are compared by value, all others by identity. Containers are compared element by element.
_PLAIN = {bool, int, float, complex, str, bytes}
# Larger or deeper containers, such as a vocabulary, are not settings, and comparing their elements would be slow.
_LARGEST, _DEEPEST = 1000, 3
_CHANGED = "attributes of the model change between its passes"


class ModelState:
    """Snapshot of the attributes of a model's modules: settings, tensors that are not buffers, methods.

    Elements of containers are compared. Attributes of other objects, such as a configuration, may change unnoticed.

    Args:
        model: The model.
        settings: Further values to compare, such as attributes of a loss.
    """

    def __init__(self, model: nn.Module, settings: Mapping[str, Any] | None = None) -> None:
        # References keep all attributes alive, so that comparisons by identity are valid.
        self._before = _contents(model, settings)

    def difference(self, model: nn.Module, settings: Mapping[str, Any] | None = None) -> str:
        """Return a description of the change since the snapshot, or an empty string if there is none."""
        before = self._before
        now = _contents(model, settings)
        if len(before) != len(now):
            return _CHANGED
        # The comparison by identity is fast and nearly always sufficient.
        same = all(map(is_, before, now)) or all(map(_is_same, before, now))
        return "" if same else _CHANGED


def attributes_of(model: nn.Module) -> dict[tuple[int, str], Hashable]:
    """Return values or ids of the attributes of a model's modules, by module index and attribute name.

    The result holds no references, so it may outlive the model. A later object may then have the same id.
    """
    result: dict[tuple[int, str], Hashable] = {}
    for place, module in enumerate(model.modules()):
        for name, value in module.__dict__.items():
            if name not in _KNOWN:
                result[place, name] = tuple(v if type(v) in _PLAIN else id(v) for v in _leaves(value))
    return result


def has_hooks(model: nn.Module) -> bool:
    """Return whether a module of the model has forward or backward hooks."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, kind) for module in model.modules() for kind in kinds)


def _contents(model: nn.Module, settings: Mapping[str, Any] | None) -> list[Any]:
    """Return a flat list of settings, modules, and names and values of their attributes."""
    result = list(_leaves(settings))
    for module in model.modules():
        result.append(module)
        for name, value in module.__dict__.items():
            if name not in _KNOWN:
                result.append(name)
                if isinstance(value, (dict, list, tuple)):
                    result += _leaves(value)
                else:
                    result.append(value)
    return result


def _leaves(value: Any, depth: int = 0) -> Iterator[Any]:
    """Yield the types and values of all elements of nested containers."""
    yield type(value)
    if not isinstance(value, (dict, list, tuple)) or len(value) > _LARGEST or depth > _DEEPEST:
        yield value
        return
    if isinstance(value, dict):
        yield from value
    for part in value.values() if isinstance(value, dict) else value:
        yield from _leaves(part, depth + 1)


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and type(a) in _PLAIN and a == b)


@contextmanager
def unchanged_attributes(model: Module) -> Iterator[None]:
    """Restore the attributes of a model's modules after this context, such as the last state of a recurrent network.

    Changes in place, such as of a list, are not undone.
    """
    before = [(module, dict(module.__dict__)) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes in before:
            module.__dict__.clear()
            module.__dict__.update(attributes)


# Minimum number of further batches for which a recording pays off. A recording takes as long as a few eager passes
# (`python -m benchmarks.factors cuda`); for small models, each replay saves most of the time of an eager pass.
_WORTH = 4
# Maximum number of graphs. Loaders that sort sequences by length yield a few shapes.
_MOST_GRAPHS = 4
# Types that inputs may contain besides tensors. Their values are immutable, so they cannot change unnoticed.
_PLAIN_TYPES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


class Host(Protocol):
    """Interface of the state on the host that a pass changes: `kfs.factors.accumulate.Statistic`, or `Nothing`."""

    adders: dict[Any, Any]  # an adder that is created during a recording would use memory of the graph

    def counts(self) -> dict[Any, float]:
        """Return all numbers on the host that a pass adds to."""

    def add_counts(self, more: Mapping[Any, float]) -> None:
        """Add differences of `counts`."""

    def finish_batch(self) -> None:
        """Clear the state that a failed pass left behind."""


class Nothing:
    """The host state of passes that only change tensors in place: it is empty."""

    def __init__(self) -> None:
        self.adders: dict[Any, Any] = {}  # always empty

    def counts(self) -> dict[Any, float]:
        """Return an empty dictionary."""
        return {}

    def add_counts(self, more: Mapping[Any, float]) -> None:
        """Do nothing, since there are no numbers."""

    def finish_batch(self) -> None:
        """Do nothing, since a pass leaves no state behind."""


@dataclass
class Recorded:
    """A recorded pass over batches of one shape."""

    graph: Graph
    batch: "Batch"  # the static input of the graph
    counts: dict[Any, float]  # increments of numbers on the host in each pass
    reads: Reads  # holds all other memory that the graph reads

    def replay(self, batch: "Batch", sums: Host) -> None:
        """Replay the pass for another batch of the same shape."""
        mine, theirs = ([*tensors_in(one.x), one.y] for one in (self.batch, batch))
        assert self.batch.recorded is not None  # noqa: S101 (`Replays._record` sets it)
        with torch.no_grad():  # inputs may require gradients
            torch._foreach_copy_(mine, theirs)
            self.batch.recorded.fill_(batch.first)
        self.graph.replay()
        sums.add_counts(self.counts)


class Replays:
    """Runs the passes over all batches of a computation, and replays CUDA graphs if a recording pays off.

    Args:
        run: Runs the pass over a batch.
        sums: State on the host that a pass changes.
        recorder: Records passes. If `None`, all passes run eagerly.
        expected: Number of batches, if it is known.
        model: The model that the passes run.
        log: Logger for the reasons why passes cannot be recorded.
        around: Returns a context for eager passes; a replay needs none. By default, the caller has entered it already.
    """

    def __init__(
        self,
        run: Callable[["Batch"], None],
        sums: Host,
        recorder: Recorder | None,
        expected: int | None = None,
        model: object = None,
        log: logging.Logger | None = None,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._run = run
        self._model = model if isinstance(model, Module) else Module()
        self._sums = sums
        self._recorder = recorder
        self._left = expected
        self._log = logging.getLogger("kfs.runtime") if log is None else log
        self._around = around
        self._times: dict[Any, int] = {}  # number of batches so far, by shape
        self._recorded: dict[Any, Recorded] = {}
        self._waits = ""  # the synchronizing operation of an eager pass
        self._tried = False  # whether the recording of a pass with such an operation has failed once

    @property
    def is_disabled(self) -> bool:
        """Whether all further passes run eagerly."""
        return self._recorder is None

    def run(self, batch: "Batch") -> None:
        """Run the pass over a batch."""
        if self._left is not None:
            self._left -= 1
        shape = None if self._recorder is None else shape_of(batch)
        if shape in self._recorded:
            self._recorded[shape].replay(batch, self._sums)
            return
        with self._around():
            if self._recorder is None or shape is None:
                self._run(batch)
            else:
                self._run_or_record(self._recorder, shape, batch)

    def _run_or_record(self, recorder: Recorder, shape: Any, batch: "Batch") -> None:
        """Run the first batch of a shape eagerly, rehearse the recording with the second one, and record the third."""
        times = self._times[shape] = self._times.get(shape, 0) + 1
        worth = self._left is None or self._left + 1 >= _WORTH
        if times == 1 or not worth or len(self._recorded) == _MOST_GRAPHS:
            self._run(batch)
        elif times == 2:
            # Run eagerly with a tensor for the index of the first example, and look for reasons not to record.
            first = torch.full((), batch.first, dtype=torch.int64, device=batch.y.device)
            rehearsed = batch._replace(recorded=first)
            attributes = _attributes_of(self._model)
            # Models of Hugging Face synchronize, but not during a capture, so this alone is no reason to give up.
            self._waits = recorder.notices_waits(lambda: self._run(rehearsed))
            kept = _changed_attribute(attributes, self._model)
            if kept:
                self._give_up(f"the model changes its attribute {kept} in every pass")
            elif has_hooks(self._model):
                self._give_up("the model has hooks")
        else:
            self._record(recorder, shape, batch)

    def __enter__(self) -> "Replays":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free all graphs."""
        for recorded in self._recorded.values():
            recorded.graph.reset()
        self._recorded.clear()

    def _record(self, recorder: Recorder, shape: Any, batch: "Batch") -> None:
        """Record the pass over a batch and replay it; if it cannot be recorded, run it eagerly."""
        # The graph reads a copy of the batch, which each replay overwrites.
        sums = self._sums
        first = torch.zeros((), dtype=torch.int64, device=batch.y.device)
        static = batch._replace(x=mapped(batch.x, _copy), y=_copy(batch.y), recorded=first)
        before, plans = sums.counts(), len(sums.adders)
        reads = Reads()

        def run() -> None:
            # Tensors that the model would keep in its attributes belong to the graph.
            with unchanged_attributes(self._model), reads:
                self._run(static)

        try:
            graph = recorder.record(run)
            why = "" if len(sums.adders) == plans else "it used parameters in another way than before"
        except torch.OutOfMemoryError:
            graph, why = None, "there is not enough memory"
        except Exception as error:  # noqa: BLE001 (an eager pass may succeed after any exception)
            graph, why = None, why_not(error, self._waits)

        # A capture changes numbers on the host, but computes nothing. Undo these changes.
        added = {key: value - before.get(key, 0.0) for key, value in sums.counts().items()}
        sums.add_counts({key: -value for key, value in added.items()})
        if why:
            if graph is not None:
                graph.reset()
            sums.finish_batch()
            if self._waits and not self._tried:
                # The model takes a different path during a capture. The failed attempt may have filled caches that let
                # the next attempt succeed.
                self._tried = True
                self._log.debug("A pass over a batch could not be recorded as a CUDA graph: %s.", why)
            else:
                self._give_up(why)
            self._run(batch)
            return
        assert graph is not None  # noqa: S101 (otherwise `why` is not empty)
        self._recorded[shape] = Recorded(graph, static, added, reads)
        self._recorded[shape].replay(batch, sums)

    def _give_up(self, why: str) -> None:
        """Run all further passes eagerly."""
        self._log.info("Passes over batches are not replayed as CUDA graphs: %s.", why)
        self._recorder = None
        self.close()


def _copy(t: Tensor) -> Tensor:
    return t.detach().clone().requires_grad_(t.requires_grad)


def _attributes_of(model: Module) -> dict[str, dict[str, Any]]:
    """Return copies of the attribute dictionaries of all modules by name."""
    return {name: dict(module.__dict__) for name, module in model.named_modules()}


def _changed_attribute(before: dict[str, dict[str, Any]], model: Module) -> str:
    """Return the name of the first attribute that has changed; an empty string if there is none."""
    for name, attributes in _attributes_of(model).items():
        known = before.get(name, {})
        for key, value in attributes.items():
            same = key in known and (known[key] is value or _is_same_value(known[key], value))
            if not same:
                return f"{name}.{key}".lstrip(".")
    return ""


def _is_same_value(a: Any, b: Any) -> bool:
    """Return whether two values contain no tensors and are equal."""
    return _is_plain(a) and _is_plain(b) and not tensors_in((a, b)) and _structure(a) == _structure(b)


def shape_of(batch: "Batch") -> Any:
    """Return the properties of a batch that a recording depends on; `None` if graphs do not support the batch."""
    tensors = [*tensors_in(batch.x), batch.y]
    if not _is_plain(batch.x) or not all(_can_be_copied(t, batch.y.device) for t in tensors):
        return None
    return (*((t.shape, t.dtype, t.requires_grad) for t in tensors), batch.y.device, _structure(batch.x))


def _can_be_copied(t: Tensor, device: torch.device) -> bool:
    """Return whether a tensor is a plain dense tensor on the device, so that a replay can overwrite its values.

    Data on the host, such as the batch sizes of packed sequences, would be fixed at the time of the recording.
    """
    special = t.is_nested or t.is_quantized or type(t) not in {Tensor, Parameter}
    return t.layout is torch.strided and t.device == device and not special


def _is_plain(x: Any) -> bool:
    """Return whether inputs consist only of tensors and immutable values."""
    if isinstance(x, Mapping):
        return all(map(_is_plain, x.values()))
    if type(x) in {tuple, list} or (isinstance(x, tuple) and hasattr(x, "_fields")):  # as in `kfs.problem.data.mapped`
        return all(map(_is_plain, x))
    return isinstance(x, Tensor) or type(x) in _PLAIN_TYPES


def _structure(x: Any) -> Any:
    """Return types and values of plain inputs except values of tensors. Types matter, since `1 == True`."""
    if isinstance(x, Mapping):
        return type(x), tuple((key, _structure(value)) for key, value in x.items())
    if isinstance(x, (tuple, list)):
        return type(x), tuple(map(_structure, x))
    return Tensor if isinstance(x, Tensor) else (type(x), repr(x))
