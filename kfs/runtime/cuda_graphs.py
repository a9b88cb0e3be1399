"""CUDA graphs: record a computation on a GPU once, and replay it for inputs of the same shapes.

The computations live with the clients: passes for factors, products with operators, updates and inverses of the
optimizer, and its own passes. A client gives a key, a body, inputs and a guard to `Replayer.run`.

A GPU finishes the operations of a small model faster than Python can launch them. A CUDA graph contains all operations
of a run and launches them together. For each key, `Replayer` does the following:

1. The first run is eager.
2. The second run rehearses the recording, while PyTorch reports operations that synchronize with the GPU. Such an
   operation may mean that a decision depends on data. A graph does not make the decision again.
3. The third run is recorded. Its inputs, and those of all further runs, are copied to the memory that the graph reads.

A graph does not change numbers on the host. Every run with a key adds the same amounts to them, and a replay adds these
amounts, too: `Host.counts` returns all such numbers. Numbers that differ between runs, such as the index of the first
example, on which random draws depend, are tensors on the device.

A model is not replayed if an attribute of a module keeps a result of one run for the next one, or if the model has
hooks. Hooks must run in every pass, and the tensors that they keep would be memory of the graph. `Guard` compares
everything else that a recording depends on.

A graph also reads memory that it does not own. `Reads` holds references to this memory.
"""

import gc
import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import Module, Parameter
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from kfs.errors import ModelError
from kfs.runtime.memory import free_memory
from kfs.runtime.nested import is_named_tuple, mapped, tensors_in
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
        made, held = self._made, self._held
        for t in _tensors_of((*args, *kwargs.values()) if kwargs else args):
            storage = t.untyped_storage()
            place = storage._cdata
            if place not in made and place not in held:
                held[place] = storage
        result = func(*args, **(kwargs or {}))
        for t in _tensors_of(result if type(result) in {tuple, list} else (result,)):
            place = t.untyped_storage()._cdata
            if place not in held:  # not a view of held memory
                made.add(place)
        return result


def _tensors_of(parts: Sequence[Any]) -> list[Tensor]:
    """Return the dense tensors among the arguments or results of an operation, and in lists of them."""
    found = []
    for part in parts:  # a loop, because this runs for every operation
        if isinstance(part, Tensor):
            if part.layout is torch.strided:
                found.append(part)
        elif type(part) in {tuple, list}:
            found += _tensors_of(part)
    return found


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
            caches_casts, collects = torch.is_autocast_cache_enabled(), gc.isenabled()
            torch.set_autocast_cache_enabled(False)  # casts cached during a capture have no values
            gc.disable()  # the garbage collector could free memory of other streams during the capture
            self._stream.wait_stream(torch.cuda.current_stream())
            try:
                with torch.cuda.stream(self._stream):
                    try:
                        # Threads of a data loader may continue to use CUDA.
                        graph.capture_begin(self._pool, capture_error_mode="thread_local")
                        run()
                        graph.capture_end()
                    except BaseException:
                        _abandon(graph)
                        self._pool = torch.cuda.graph_pool_handle()  # a pool cannot be used again after a failure
                        raise
            finally:
                torch.cuda.current_stream().wait_stream(self._stream)
                torch.set_autocast_cache_enabled(caches_casts)
                if collects:
                    gc.enable()
            self._taken += max(torch.cuda.memory_reserved() - before, 0)
        if self._memory is not None and self._taken > self._memory:
            graph.reset()
            raise ModelError(f"Graphs take {self._taken} bytes, and memory={self._memory}.", "Increase memory=.")
        return graph


def recorder_for(
    device: torch.device, memory: int | None = None, share: float | None = None
) -> Callable[[], CudaRecorder] | None:
    """Return a function that makes recorders for a device; `None` if the device is not a GPU.

    Args:
        device: Device of all tensors.
        memory: Maximum number of bytes for all graphs of a recorder; `None` for no limit.
        share: In place of `memory`: a share of the memory that is free when a recorder is made.
    """
    if device.type != "cuda":
        return None

    def make() -> CudaRecorder:  # pragma: no cover (tested on a GPU)
        if share is None:
            return CudaRecorder(device, memory)
        return CudaRecorder(device, int(share * (free_memory(device) or 0)))

    return make  # pragma: no cover


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


# Attributes of all modules: parameters, buffers, children, modes and hooks. Other code checks them.
_KNOWN = frozenset(nn.Module().__dict__)
# Values of these types are compared by value, all others by identity. Containers are compared element by element.
_PLAIN = {bool, int, float, complex, str, bytes, torch.device}
# Larger or deeper containers, such as a vocabulary, are not settings, and comparing their elements would be slow.
_LARGEST, _DEEPEST = 1000, 3
_NO_MODEL = Module()


class Guard:
    """Snapshot of what recordings depend on besides their key.

    The attributes of a model's modules are compared: settings, tensors that are not buffers, methods. Elements of
    containers are compared, too. Attributes of other objects, such as a configuration, may change unnoticed.

    Args:
        model: The model that is run. It must not keep anything from one run to the next in its attributes.
        settings: Further values to compare, such as attributes of a loss.
        place: What is compared with `==`. Recordings for another place, such as for parameters with other memory
            addresses, would never be used again.
        why: A reason why nothing may be recorded or replayed at present, such as hooks; empty if there is none.
    """

    def __init__(
        self, model: object = None, settings: Mapping[str, Any] | None = None, place: Hashable = None, why: str = ""
    ) -> None:
        self.model = model if isinstance(model, Module) else _NO_MODEL
        self.place = place
        self.why = why
        # References keep all attributes alive, so that comparisons by identity are valid.
        self._contents = _contents(self.model, settings)

    def difference(self, now: "Guard") -> str:
        """Return a description of the attributes that have changed, or an empty string if none has."""
        mine, theirs = self._contents, now._contents
        changed = mine.keys() ^ theirs.keys()
        if not changed:
            # The comparison by identity is fast and nearly always sufficient.
            changed = {key for key, value in mine.items() if not (value is theirs[key] or _is_same(value, theirs[key]))}
        if not changed:
            return ""
        modules = {module: f"{name}." if name else "" for name, module in now.model.named_modules()}
        names = sorted({modules.get(module, "") + name for module, name in changed})
        return f"attributes of the model change between its passes ({', '.join(names[:3])})"


def attributes_of(model: nn.Module) -> dict[tuple[int, str], Hashable]:
    """Return values or ids of the attributes of a model's modules, by module index and attribute name.

    The result holds no references, so it may outlive the model. A later object may then have the same id.
    """
    places = {module: place for place, module in enumerate(model.modules())}
    return {
        (places[module], name): tuple([v if type(v) in _PLAIN else id(v) for v in _leaves(value)])
        for (module, name), value in _contents(model).items()
    }


def has_hooks(model: object, ours: type | tuple[()] = ()) -> bool:
    """Return whether a module of the model has forward or backward hooks, except hooks of the type `ours`."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    modules = model.modules() if isinstance(model, Module) else ()
    hooks = (hook for module in modules for kind in kinds for hook in getattr(module, kind).values())
    return not all(isinstance(hook, ours) for hook in hooks)


def _contents(model: Module, settings: Mapping[str, Any] | None = None) -> dict[tuple[Module, str], Any]:
    """Return settings, modules, and values of their attributes; containers as tuples of types and values."""
    result = {(_NO_MODEL, name): tuple(_leaves(value)) for name, value in (settings or {}).items()}
    for module in model.modules():
        result[module, ""] = ()
        for name, value in module.__dict__.items():
            if name not in _KNOWN:
                result[module, name] = tuple(_leaves(value)) if isinstance(value, (dict, list, tuple)) else value
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
    """Return whether two values, or two tuples of leaves, are the same."""
    if type(a) is tuple and type(b) is tuple:
        # Leaves that are tuples are large, and compared by identity.
        pairs = zip(a, b, strict=False)
        return len(a) == len(b) and all(x is y or (type(x) is not tuple and _is_same(x, y)) for x, y in pairs)
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


# A recording has its own memory. If it is large, it may take this share of the free memory.
SHARE = 0.25
# Minimum number of further runs for which a recording pays off. A recording takes as long as a few eager passes
# (`python -m benchmarks.factors cuda`); for small models, each replay saves most of the time of an eager pass.
_WORTH = 4
# Log a message if the attributes of a guard have changed this often, with only few replays in between.
_MOST_CHANGES = 3
_MOST_KEYS = 64  # Number of kinds, and of shapes of a kind, that are remembered.
# Types that inputs may contain besides tensors. Their values are immutable, so they cannot change unnoticed.
_PLAIN_TYPES = {*_PLAIN, type(None), torch.dtype}


class RunKey(NamedTuple):
    """Runs with equal keys perform the same operations on inputs of the same shapes."""

    kind: Hashable = ()  # Recordings of a kind have a common guard.
    shape: Hashable = ()


class Host(Protocol):
    """Interface of the state on the host that a body changes, such as `kfs.factors.accumulate.Statistic`."""

    adders: dict[Any, Any]  # an adder that is created during a recording would use memory of the graph

    def counts(self) -> dict[Any, float]:
        """Return all numbers on the host that a body adds to."""

    def add_counts(self, more: Mapping[Any, float]) -> None:
        """Add differences of `counts`."""

    def finish_batch(self) -> None:
        """Clear the state that a failed run left behind."""


class _Nothing:
    """The host state of bodies that only change tensors in place: it is empty."""

    def __init__(self) -> None:
        self.adders: dict[Any, Any] = {}

    def counts(self) -> dict[Any, float]:
        return {}

    def add_counts(self, more: Mapping[Any, float]) -> None:
        pass

    def finish_batch(self) -> None:
        pass


_T = TypeVar("_T")
_NOTHING = _Nothing()
NO_GUARD = Guard()
# What is run. It takes inputs and numbers.
Body = Callable[[Any, Sequence[float | Tensor]], None]


@dataclass(eq=False)
class Recorded:
    """A recorded run."""

    graph: torch.cuda.CUDAGraph
    inputs: Any  # the static inputs of the graph
    numbers: Tensor  # the static numbers of the graph, `[numbers]`
    counts: dict[Any, float]  # increments of numbers on the host in each run
    reads: Reads  # holds all other memory that the graph reads

    def replay(self, inputs: Any, numbers: Sequence[float], host: Host) -> None:
        """Replay the run for other inputs of the same shapes."""
        groups: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for mine, theirs in zip(tensors_in(self.inputs), tensors_in(inputs), strict=True):
            group = groups.setdefault(mine.dtype, ([], []))
            group[0].append(mine)
            group[1].append(theirs)
        with torch.no_grad():  # inputs may require gradients
            for ours, others in groups.values():
                torch._foreach_copy_(ours, others)  # one launch for all tensors of a dtype
            # The copy from the host is asynchronous.
            self.numbers.copy_(torch.tensor(numbers, dtype=torch.float64), non_blocking=True)
        self.graph.replay()
        host.add_counts(self.counts)


@dataclass(eq=False)
class _Shape:
    """Record of the runs with one key."""

    times: int = 0  # number of runs so far
    waits: str | None = None  # the synchronizing operation in the rehearsal, which may be empty; `None` before it
    tried: bool = False  # whether the recording of a run with such an operation has failed once
    recorded: Recorded | None = None
    kept: Any = None  # see `Replayer.keep`


@dataclass(eq=False)
class _Kind:
    """Record of the runs of one kind."""

    guard: Guard
    patience: int = 1  # number of eager runs before a rehearsal
    replays: int = 0
    shapes: dict[Hashable, _Shape] = field(default_factory=dict)
    is_refused: bool = False  # whether a run could not be recorded

    def shape(self, name: Hashable) -> _Shape:
        """Return the record of a shape, which may be new."""
        return _latest(self.shapes, name, _Shape, lambda one: one.recorded is None and one.kept is None)

    @property
    def recorded(self) -> list[Recorded]:
        """All recordings."""
        return [shape.recorded for shape in self.shapes.values() if shape.recorded is not None]


class Replayer:
    """Runs computations, and replays CUDA graphs of those that repeat.

    The first run with a key is eager, the second one is rehearsed, and the third one is recorded and replayed.

    Runs of a kind stay eager if a rehearsal shows that the model keeps something, if a recording fails, or if memory
    runs out. A recording that fails after its rehearsal has synchronized is tried once more. If the attributes of a
    guard change often, recordings wait longer.

    Args:
        what: What is run, in the plural, for messages such as "Products are not replayed as CUDA graphs: ...".
        log: Logger for these messages. Each reason is logged once.
        device: Device of all tensors. If it is not a GPU, all runs are eager.
        enabled: Whether runs may be recorded.
        expected: Number of runs, if it is known. Runs are not recorded if only few are left.
        memory: Maximum number of bytes for all graphs; `None` for no limit.
        share: In place of `memory`: a share of the free memory.
        most: Maximum number of recordings. Loaders that sort sequences by length yield a few shapes. If there are more,
            recordings of other kinds are freed, and further shapes of a kind are not recorded.

    Attributes:
        device: Device of all tensors.
        is_enabled: Whether runs may be recorded.
    """

    def __init__(
        self,
        what: str,
        log: logging.Logger,
        device: torch.device,
        enabled: bool = True,
        *,
        expected: int | None = None,
        memory: int | None = None,
        share: float | None = None,
        most: int = 4,
    ) -> None:
        self._what = what
        self._log = log
        self._new_recorder = recorder_for(device, memory, share) if enabled else None
        self.is_enabled = self._new_recorder is not None
        self.device = device
        self._left = expected
        self._most = most
        self._kinds: dict[Hashable, _Kind] = {}
        self._reasons: set[str] = set()
        self._recorder: CudaRecorder | None = None

    def run(
        self,
        key: RunKey | None,
        body: Body,
        inputs: Any,
        guard: Guard = NO_GUARD,
        numbers: Sequence[float] = (),
        host: Host = _NOTHING,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """Run `body(inputs, numbers)`, or replay a recording of it.

        The body reads its inputs and persistent tensors, writes into persistent tensors in place, and changes the host
        only through the counts of `host`. A replay copies the inputs to those of the recording, starts the graph, and
        adds the counts that the recorded run has added. The body must not keep tensors that it makes: their memory
        belongs to the graph.

        Args:
            key: Runs with equal keys perform the same operations. If `None`, the body runs eagerly.
            body: Performs the operations. In rehearsals and recordings, its numbers are tensors on the device.
            inputs: Nested containers of tensors.
            guard: What recordings depend on besides the key. A change frees all recordings of the kind.
            numbers: Numbers that may differ between runs.
            host: State on the host that the body changes.
            around: Returns a context for runs that are not replayed. By default, the caller has entered it already.
        """
        if self._left is not None:
            self._left -= 1
        if key is None or self._is_prevented(guard):
            with around():
                body(inputs, numbers)
            return
        kind = self._kind(key.kind, guard)
        shape = kind.shape(key.shape)
        if shape.recorded is None:
            shape.times += 1
            with around():
                is_worth = self._left is None or self._left + 1 >= _WORTH
                is_next = shape.times > kind.patience and self.has_room(key.kind) and not kind.is_refused
                if not (is_worth and is_next):
                    body(inputs, numbers)
                elif shape.waits is None:
                    self._rehearse(key, body, inputs, numbers)
                elif not self._record(key, body, inputs, numbers, host):
                    body(inputs, numbers)
        if shape.recorded is not None:
            kind.replays += 1
            shape.recorded.replay(inputs, numbers, host)

    def run_batch(
        self,
        batch: "Batch",
        body: Callable[["Batch"], None],
        guard: Guard = NO_GUARD,
        kind: Hashable = (),
        host: Host = _NOTHING,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """Run `body(batch)`, or replay a recording of it, as in `run`. The key is the kind and the batch's shape."""

        def run(inputs: Any, numbers: Sequence[float | Tensor]) -> None:
            first = numbers[0].long() if isinstance(numbers[0], Tensor) else None
            body(batch._replace(x=inputs[0], y=inputs[1], recorded=first))

        inputs = batch.x, batch.y
        shape = shape_of(inputs)
        self.run(None if shape is None else RunKey(kind, shape), run, inputs, guard, [batch.first], host, around)

    def is_recorded(self, key: RunKey, guard: Guard = NO_GUARD) -> bool:
        """Return whether there is a recording. If the guard has changed, the recordings of the kind are freed."""
        if self._is_prevented(guard):
            return False
        shape = self._kind(key.kind, guard).shapes.get(key.shape)
        return shape is not None and shape.recorded is not None

    def is_repeated(self, key: RunKey, guard: Guard = NO_GUARD) -> bool:
        """Return whether the next run with this key would be rehearsed, recorded or replayed."""
        if self._is_prevented(guard):
            return False
        kind = self._kind(key.kind, guard)
        shape = kind.shapes.get(key.shape)
        return shape is not None and shape.times >= kind.patience and not kind.is_refused

    def note(self, key: RunKey) -> None:
        """Count an eager run that was made without `run`, after `is_repeated`."""
        if key.kind in self._kinds:
            self._kinds[key.kind].shape(key.shape).times += 1

    def has_room(self, kind: Hashable) -> bool:
        """Return whether another shape of a kind can be recorded."""
        return kind not in self._kinds or len(self._kinds[kind].recorded) < self._most

    def keep(self, key: RunKey, memory: _T) -> _T:
        """Keep persistent memory of runs with this key as long as their recordings, and return it."""
        shapes = self._kinds[key.kind].shapes
        # Free memory of shapes that did not come often enough.
        idle = [name for name, shape in shapes.items() if shape.kept is not None and shape.recorded is None]
        if len(idle) == self._most:
            del shapes[idle[0]]
        self._kinds[key.kind].shape(key.shape).kept = memory
        return memory

    def kept(self, key: RunKey) -> Any:
        """Return the persistent memory of runs with this key; `None` if there is none."""
        shape = self._kinds[key.kind].shapes.get(key.shape)
        return None if shape is None else shape.kept

    def refuse(self, kind: Hashable, why: str) -> None:
        """Do not record runs of a kind any more, unless the guard changes, and free their recordings."""
        self._explain(why)
        self._kinds[kind].is_refused = True
        self._free(self._kinds[kind])

    def _explain(self, why: str) -> None:
        """Log a reason why runs are eager, once."""
        if why not in self._reasons:
            self._reasons.add(why)
            self._log.info("%s are not replayed as CUDA graphs: %s.", self._what, why)

    def close(self) -> None:
        """Free all recordings, and forget all runs. Further runs start again."""
        self._free(*self._kinds.values())
        self._kinds.clear()

    def refuse_for_memory(self, kind: Hashable) -> None:
        """Free all recordings, and do not record runs of a kind any more, because memory has run out."""
        self._free(*self._kinds.values())
        self.refuse(kind, "there is not enough memory")

    def _free(self, *kinds: _Kind) -> None:
        """Free the recordings of some kinds, and what was kept for them."""
        for kind in kinds:
            for recorded in kind.recorded:
                recorded.graph.reset()
                self._recorder = None  # PyTorch cannot record into a memory pool whose graphs were freed.
            kind.shapes.clear()

    def _kind(self, name: Hashable, guard: Guard) -> _Kind:
        """Return the record of a kind. If the guard has changed since, start again."""
        most = max(_MOST_KEYS, self._most)
        kind = _latest(self._kinds, name, lambda: _Kind(guard), lambda kind: not kind.recorded, most)
        if guard is kind.guard:
            return kind
        why = kind.guard.difference(guard)
        if why or guard.place != kind.guard.place:
            self._free(kind)
            patience = kind.patience
            if why:
                # If the guard changes often, wait longer each time, because recordings would not be used often enough.
                patience = patience + 1 if kind.replays < _WORTH else 1
                if patience > _MOST_CHANGES:
                    self._explain(why)
            kind = self._kinds[name] = _Kind(guard, patience)
        kind.guard = guard  # the same, but compared faster next time
        return kind

    def _is_prevented(self, guard: Guard) -> bool:
        """Return whether nothing may be recorded or replayed at present, and log the reason."""
        if self._new_recorder is None:
            return True
        if guard.why:
            self._explain(guard.why)
        return bool(guard.why)

    def _rehearse(self, key: RunKey, body: Body, inputs: Any, numbers: Sequence[float]) -> None:
        """Run eagerly with numbers on the device, and look for reasons not to record."""
        kind = self._kinds[key.kind]
        values = torch.tensor(numbers, dtype=torch.float64).to(self.device, non_blocking=True)
        before = Guard(kind.guard.model)
        # Models of Hugging Face synchronize, but not during a capture, so this alone is no reason to give up.
        waits = self._make_recorder().notices_waits(lambda: body(inputs, list(values)))
        kind.shapes[key.shape].waits = waits
        why = before.difference(Guard(kind.guard.model))
        if why:
            self.refuse(key.kind, why)

    def _record(self, key: RunKey, body: Body, inputs: Any, numbers: Sequence[float], host: Host) -> bool:
        """Record a run without running it. Return `False` if it cannot be recorded."""
        kind = self._kinds[key.kind]
        shape = kind.shapes[key.shape]
        if sum(len(one.recorded) for one in self._kinds.values()) >= self._most:
            self._free(*(one for one in self._kinds.values() if one is not kind))
        before, adders = host.counts(), len(host.adders)
        reads = Reads()
        graph = None
        why = ""
        try:
            # The graph reads copies of the inputs, which each replay overwrites.
            static = mapped(inputs, lambda t: t.detach().clone().requires_grad_(t.requires_grad))
            values = torch.zeros(len(numbers), dtype=torch.float64, device=self.device)

            def run() -> None:
                # Tensors that the model would keep in its attributes belong to the graph.
                with unchanged_attributes(kind.guard.model), reads:
                    body(static, list(values))

            graph = self._make_recorder().record(run)
            if len(host.adders) != adders:
                why = "it used parameters in another way than before"
        except torch.OutOfMemoryError:
            self.refuse_for_memory(key.kind)
        except Exception as error:  # noqa: BLE001 (an eager run may succeed after any exception)
            why = why_not(error, shape.waits or "")

        # A capture changes numbers on the host, but computes nothing. Undo these changes.
        added = {name: value - before.get(name, 0.0) for name, value in host.counts().items()}
        host.add_counts({name: -value for name, value in added.items()})
        if graph is not None and not why:
            shape.recorded = Recorded(graph, static, values, added, reads)
            return True
        if graph is not None:
            graph.reset()
        self._recorder = None
        host.finish_batch()
        if why and shape.waits and not shape.tried:
            # The model takes a different path during a capture. The failed attempt may have filled caches that let the
            # next attempt succeed.
            shape.tried = True
            self._log.debug("%s could not be recorded as CUDA graphs: %s.", self._what, why)
        elif why:
            self.refuse(key.kind, why)
        return False

    def _make_recorder(self) -> CudaRecorder:
        """Return the recorder, whose graphs share their memory."""
        if self._recorder is None:
            assert self._new_recorder is not None  # noqa: S101 (otherwise all runs are eager)
            self._recorder = self._new_recorder()
        return self._recorder


def _latest(
    known: dict[Any, _T], key: Hashable, make: Callable[[], _T], may_go: Callable[[_T], bool], most: int = _MOST_KEYS
) -> _T:
    """Return a value, or a new one, and move it to the end. Remove the first one that may go if there are too many."""
    value = known[key] = known.pop(key) if key in known else make()
    if len(known) > most:
        unused = (name for name, one in known.items() if one is not value and may_go(one))
        known.pop(next(unused, None), None)
    return value


def shape_of(inputs: Any) -> Hashable:
    """Return the properties of inputs that a recording depends on; `None` if graphs do not support the inputs."""
    tensors, structure = tensors_in(inputs), _structure(inputs)
    if structure is None or not all(_can_be_copied(t, tensors[-1].device) for t in tensors):
        return None
    return (*((t.shape, t.dtype, t.requires_grad) for t in tensors), tensors[-1].device, structure)


def _can_be_copied(t: Tensor, device: torch.device) -> bool:
    """Return whether a tensor is a plain dense tensor on the device, so that a replay can overwrite its values.

    Data on the host, such as the batch sizes of packed sequences, would be fixed at the time of the recording.
    """
    special = t.is_nested or t.is_quantized or type(t) not in {Tensor, Parameter}
    return t.layout is torch.strided and t.device == device and not special


def _structure(x: Any) -> Any:
    """Return types and values of inputs except values of tensors; `None` if a value may change unnoticed."""
    if isinstance(x, Tensor):
        return Tensor
    if type(x) in _PLAIN_TYPES:
        return type(x), repr(x)  # types matter, since `1 == True`
    if isinstance(x, Mapping):
        parts = [(key, _structure(value)) for key, value in x.items()]
        return None if any(part is None for _, part in parts) else (type(x), tuple(parts))
    if type(x) in {tuple, list} or is_named_tuple(x):
        found = tuple(map(_structure, x))
        return None if None in found else (type(x), found)
    return None
