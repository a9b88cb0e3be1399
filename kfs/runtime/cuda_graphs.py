"""CUDA graphs: a computation on a GPU is recorded once and replayed for inputs of the same shapes.

What is computed lives with the clients: passes for factors, products with operators, the optimizer.
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
    """Return all settings for computations on a device; they can be compared with those of another time."""
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
    """Whether somebody looks at every operation, as PyTorch's counter of operations does: a graph shows it none."""
    return _get_current_dispatch_mode() is not None


class Reads(TorchDispatchMode):
    """Holds all memory that operations in this context read or change, and that none of them has made.

    Constants that are kept for further use, copies of settings, and what a model has computed for a length of its
    sequences may all be replaced by others while a graph still reads them.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: set[int] = set()
        self._held: dict[int, Any] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # PyTorch asks. Otherwise it wraps what is below, and imports its compiler for that, which takes two seconds.
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
                if place not in self._held:  # otherwise it is a view
                    self._made.add(place)
        return result


class Graph(Protocol):
    """A recorded computation."""

    def replay(self) -> None:
        """Run it again."""

    def reset(self) -> None:
        """Free its memory."""


class Recorder(Protocol):
    """What records computations: `CudaRecorder`."""

    def notices_waits(self, run: Callable[[], None]) -> str:
        """Run something, and say what in it waits for the device; an empty text if nothing does."""

    def record(self, run: Callable[[], None]) -> Graph:
        """Record what something would compute, without computing it."""


def why_not(error: Exception, waits: str = "") -> str:
    """Return why something cannot be recorded, given what waits for the GPU when it is not recorded."""
    text = str(error).partition("\n")[0].rstrip(".")
    return f"{text} (an operation waits for the GPU: {waits})" if waits else text


class CudaRecorder:  # pragma: no cover (tested on a GPU)
    """Records CUDA graphs that share their memory: they never run at the same time, and nothing outlives a replay.

    Args:
        device: A GPU.
        memory: How many bytes graphs may take.
    """

    def __init__(self, device: torch.device, memory: int | None = None) -> None:
        self._device = device
        self._memory = memory
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._taken = 0

    def notices_waits(self, run: Callable[[], None]) -> str:
        """Run something, and say what in it waits for the GPU."""
        with detect_syncs() as waits:
            run()
        return waits[0].partition(" (Triggered")[0] if waits else ""

    def record(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Record what something would compute, without computing it.

        Raises:
            Exception: If it cannot be recorded; the state of PyTorch is as before.
        """
        with torch.cuda.device(self._device):
            before = torch.cuda.memory_reserved()
            idle = before - torch.cuda.memory_allocated()
            if torch.cuda.mem_get_info()[0] < idle:  # graphs do not use memory that PyTorch keeps for others
                torch.cuda.empty_cache()
                before = torch.cuda.memory_reserved()
            graph = torch.cuda.CUDAGraph()
            try:
                with _without_cached_casts(), _recording(graph, self._stream, self._pool):
                    run()
            except BaseException:
                self._pool = torch.cuda.graph_pool_handle()  # PyTorch does not let the last one be used again.
                raise
            self._taken += max(torch.cuda.memory_reserved() - before, 0)
        if self._memory is not None and self._taken > self._memory:
            graph.reset()
            raise ModelError(f"Graphs take {self._taken} bytes, and memory={self._memory}.", "Allow more.")
        return graph


@contextmanager
def _recording(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any) -> Iterator[None]:  # pragma: no cover
    """Record all operations in this context; whatever happens, nothing is recorded afterwards."""
    collects = gc.isenabled()
    gc.disable()  # what it frees meanwhile may belong to streams that know nothing of a graph
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            try:
                # Threads of a data loader may go on with what they do.
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
        # PyTorch leaves its random generator and its allocator in the middle of a recording if that has failed. They
        # recover with the next one that succeeds.
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
    """Let `autocast` convert parameters anew: what it keeps belongs to the graph otherwise, and has no values yet."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


# What all modules have: parameters, buffers, children and modes, which others look at, and hooks.
_KNOWN = frozenset(nn.Module().__dict__)
# Values of these types are compared, all others by what they are. A list of something else counts with its elements.
_PLAIN = {bool, int, float, complex, str, bytes}
# Larger or deeper containers, such as a vocabulary, are no settings. To look at them would take too long.
_LARGEST, _DEEPEST = 1000, 3
_CHANGED = "attributes of the model change between its passes"


class ModelState:
    """The attributes of a model's modules: settings such as a temperature, tensors that are not buffers, methods.

    Containers count with what is in them. What is in other objects, such as a configuration, may change unnoticed.

    Args:
        model: The model.
        settings: What else counts, such as attributes of a loss.
    """

    def __init__(self, model: nn.Module, settings: Mapping[str, Any] | None = None) -> None:
        """Hold all attributes, so that no other object can get the id of one of them."""
        self._before = _contents(model, settings)

    def difference(self, model: nn.Module, settings: Mapping[str, Any] | None = None) -> str:
        """Return what is different now; an empty text if nothing is."""
        before = self._before
        now = _contents(model, settings)
        if len(before) != len(now):
            return _CHANGED
        # The first comparison is fast, and nearly always enough.
        same = all(map(is_, before, now)) or all(map(_is_same, before, now))
        return "" if same else _CHANGED


def attributes_of(model: nn.Module) -> dict[tuple[int, str], Hashable]:
    """Return what identifies the attributes of a model's modules, by the place of a module and the attribute's name.

    It holds none of them, so that it may be kept for longer than the model; another object may get the id of one.
    """
    result: dict[tuple[int, str], Hashable] = {}
    for place, module in enumerate(model.modules()):
        for name, value in module.__dict__.items():
            if name not in _KNOWN:
                result[place, name] = tuple(v if type(v) in _PLAIN else id(v) for v in _leaves(value))
    return result


def has_hooks(model: nn.Module) -> bool:
    """Whether somebody wants to be told about passes."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, kind) for module in model.modules() for kind in kinds)


def _contents(model: nn.Module, settings: Mapping[str, Any] | None) -> list[Any]:
    """Return settings, all modules, and names and values of their attributes, one after the other."""
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
    """Yield what is in a container, and in the containers in it."""
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
    """Restore what a model's modules keep in attributes, such as the last state of a recurrent network.

    What is changed in place, such as a list, is not restored.
    """
    before = [(module, dict(module.__dict__)) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes in before:
            module.__dict__.clear()
            module.__dict__.update(attributes)


# A recording pays if at least so many further batches are expected. It takes as long as a few of them that run as they
# are (`python -m benchmarks.factors cuda`), and small models gain most of that with each batch.
_WORTH = 4
# So many graphs are kept. Loaders that sort sequences by length have a few shapes.
_MOST_GRAPHS = 4
# What inputs may have next to tensors: values of these types do not change unnoticed.
_PLAIN_TYPES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


class Host(Protocol):
    """What a pass changes on the host: `kfs.factors.accumulate.Sums`, or `Nothing`."""

    adders: dict[Any, Any]  # a pass that makes a new one has no memory for it that outlives the graph

    def counts(self) -> dict[Any, float]:
        """Return all numbers on the host that a pass adds to."""

    def add_counts(self, more: Mapping[Any, float]) -> None:
        """Add differences of `counts`."""

    def finish_batch(self) -> None:
        """Forget what a pass that has failed has left behind."""


class Nothing:
    """The host of passes that only change tensors, in place."""

    def __init__(self) -> None:
        """Start without adders, and stay so."""
        self.adders: dict[Any, Any] = {}

    def counts(self) -> dict[Any, float]:
        """Return no numbers."""
        return {}

    def add_counts(self, more: Mapping[Any, float]) -> None:
        """Do nothing: there are no numbers."""

    def finish_batch(self) -> None:
        """Do nothing: a pass leaves nothing behind."""


@dataclass
class Recorded:
    """The recorded pass over batches of one shape."""

    graph: Graph
    batch: "Batch"  # what the graph reads
    counts: dict[Any, float]  # what a pass adds to numbers on the host
    reads: Reads  # holds what else it reads

    def replay(self, batch: "Batch", sums: Host) -> None:
        """Run the pass for another batch."""
        mine, theirs = ([*tensors_in(one.x), one.y] for one in (self.batch, batch))
        assert self.batch.recorded is not None  # noqa: S101 (it was made so)
        with torch.no_grad():  # inputs may require gradients
            torch._foreach_copy_(mine, theirs)
            self.batch.recorded.fill_(batch.first)
        self.graph.replay()
        sums.add_counts(self.counts)


class Replays:
    """Runs the passes over all batches of a computation, recorded ones where that pays.

    Args:
        run: Runs the pass over a batch.
        sums: What it adds to.
        recorder: Records passes. `None` to run all of them as they are.
        expected: How many batches there will be, if known.
        model: What runs.
        log: Is told why passes cannot be recorded.
        around: Makes a context for passes that Python runs; a graph needs none. By default, there is one already.
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
        self._log = logging.getLogger("kfs.runtime.cuda_graphs") if log is None else log
        self._around = around
        self._times: dict[Any, int] = {}  # how often shapes were seen
        self._recorded: dict[Any, Recorded] = {}
        self._waits = ""  # what waits for the device in a pass that is not recorded
        self._tried = False  # whether such a pass could not be recorded once

    @property
    def is_disabled(self) -> bool:
        """Whether all further passes run as they are."""
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
        """Run, rehearse or record the pass over a batch, by how many of its shape came before."""
        times = self._times[shape] = self._times.get(shape, 0) + 1
        worth = self._left is None or self._left + 1 >= _WORTH
        if times == 1 or not worth or len(self._recorded) == _MOST_GRAPHS:
            self._run(batch)
        elif times == 2:
            first = torch.full((), batch.first, dtype=torch.int64, device=batch.y.device)
            rehearsed = batch._replace(recorded=first)
            attributes = _attributes_of(self._model)
            # Models of Hugging Face wait, but not while they are recorded. So this alone is no reason to give up.
            self._waits = recorder.notices_waits(lambda: self._run(rehearsed))
            kept = _changed_attribute(attributes, self._model)
            if kept:
                self._give_up(f"the model changes its attribute {kept} in every pass")
            elif has_hooks(self._model):
                self._give_up("the model has hooks")
        else:
            self._record(recorder, shape, batch)

    def __enter__(self) -> "Replays":
        """Do nothing: graphs are made when batches come."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free all graphs."""
        for recorded in self._recorded.values():
            recorded.graph.reset()
        self._recorded.clear()

    def _record(self, recorder: Recorder, shape: Any, batch: "Batch") -> None:
        """Record the pass over a batch and run it; if it cannot be recorded, run it as it is."""
        sums = self._sums
        first = torch.zeros((), dtype=torch.int64, device=batch.y.device)
        static = batch._replace(x=mapped(batch.x, _copy), y=_copy(batch.y), recorded=first)
        before, plans = sums.counts(), len(sums.adders)
        reads = Reads()

        def run() -> None:
            """Run the pass; what a model keeps of it would belong to the graph."""
            with unchanged_attributes(self._model), reads:
                self._run(static)

        try:
            graph = recorder.record(run)
            why = "" if len(sums.adders) == plans else "it used parameters in another way than before"
        except torch.OutOfMemoryError:
            graph, why = None, "there is not enough memory"
        except Exception as error:  # noqa: BLE001 (whatever it is, the pass may well run as it is)
            graph, why = None, why_not(error, self._waits)
        added = {key: value - before.get(key, 0.0) for key, value in sums.counts().items()}
        sums.add_counts({key: -value for key, value in added.items()})  # nothing was computed yet
        if why:
            if graph is not None:
                graph.reset()
            sums.finish_batch()
            if self._waits and not self._tried:
                # The model goes another way while it is recorded, on which it may have made what the next try finds.
                self._tried = True
                self._log.debug("A pass over a batch could not be recorded as a CUDA graph: %s.", why)
            else:
                self._give_up(why)
            self._run(batch)
            return
        assert graph is not None  # noqa: S101 (there is a reason if not)
        self._recorded[shape] = Recorded(graph, static, added, reads)
        self._recorded[shape].replay(batch, sums)

    def _give_up(self, why: str) -> None:
        """Run all further passes as they are."""
        self._log.info("Passes over batches are not replayed as CUDA graphs: %s.", why)
        self._recorder = None
        self.close()


def _copy(t: Tensor) -> Tensor:
    return t.detach().clone().requires_grad_(t.requires_grad)


def _attributes_of(model: Module) -> dict[str, dict[str, Any]]:
    """Return what the modules of a model have as attributes."""
    return {name: dict(module.__dict__) for name, module in model.named_modules()}


def _changed_attribute(before: dict[str, dict[str, Any]], model: Module) -> str:
    """Return the name of an attribute that is another one than before; an empty text if there is none."""
    for name, attributes in _attributes_of(model).items():
        known = before.get(name, {})
        for key, value in attributes.items():
            same = key in known and (known[key] is value or _is_same_value(known[key], value))
            if not same:
                return f"{name}.{key}".lstrip(".")
    return ""


def _is_same_value(a: Any, b: Any) -> bool:
    """Whether two things have no tensors, and are equal."""
    return _is_plain(a) and _is_plain(b) and not tensors_in((a, b)) and _structure(a) == _structure(b)


def shape_of(batch: "Batch") -> Any:
    """Return what a recording depends on; `None` if a batch cannot be copied to where another one was."""
    tensors = [*tensors_in(batch.x), batch.y]
    if not _is_plain(batch.x) or not all(_can_be_copied(t, batch.y.device) for t in tensors):
        return None
    return (*((t.shape, t.dtype, t.requires_grad) for t in tensors), batch.y.device, _structure(batch.x))


def _can_be_copied(t: Tensor, device: torch.device) -> bool:
    """Whether a tensor has nothing but numbers, and has them where a graph reads them when it is replayed.

    What the host knows, such as the batch sizes of packed sequences, decides what is recorded.
    """
    special = t.is_nested or t.is_quantized or type(t) not in {Tensor, Parameter}
    return t.layout is torch.strided and t.device == device and not special


def _is_plain(x: Any) -> bool:
    """Whether inputs consist of tensors and of what does not change unnoticed."""
    if isinstance(x, Mapping):
        return all(map(_is_plain, x.values()))
    if type(x) in {tuple, list} or (isinstance(x, tuple) and hasattr(x, "_fields")):  # as in `kfs.problem.data.mapped`
        return all(map(_is_plain, x))
    return isinstance(x, Tensor) or type(x) in _PLAIN_TYPES


def _structure(x: Any) -> Any:
    """Return what plain inputs are, but for values of tensors. Types count: `1` equals `True`."""
    if isinstance(x, Mapping):
        return type(x), tuple((key, _structure(value)) for key, value in x.items())
    if isinstance(x, (tuple, list)):
        return type(x), tuple(map(_structure, x))
    return Tensor if isinstance(x, Tensor) else (type(x), repr(x))
