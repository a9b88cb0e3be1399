"""Replay: on a GPU, the pass over a batch is recorded once, and repeated for further batches of its shape.

A GPU finishes the operations of a small model faster than Python can start them. A CUDA graph has all operations of a
pass and starts them together. The first batch of a shape runs as usual. The second one rehearses what will be recorded,
while PyTorch says whether anything waits for the GPU: that would be a decision that depends on data, which a graph does
not take again. The third one is recorded. Its inputs are copied to where the graph reads them, as are those of all
further batches.

What a graph cannot know are numbers on the host. A pass adds the same to them for every batch of a shape (`Host.counts`
has them all). The index of the first datum, on which draws depend, is a tensor on the device. A model that keeps
something from one pass for the next one, in an attribute of a module, is not replayed. Nor is one with hooks: these are
to run with every pass, and what they keep would be memory of a graph.

A graph reads memory that was there before it, and does not know whose that is. So somebody has to hold it: `Reads`.
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from kfs.data import Batch
from kfs.nested import mapped, tensors_in
from kfs.recording.model_state import has_hooks, unchanged_attributes
from kfs.recording.reads import Reads
from kfs.recording.recorder import Graph, Recorder, why_not

# A recording pays if at least so many further batches are expected. It takes as long as a few of them that run as they
# are (`python -m benchmarks.factors cuda`), and small models gain most of that with each batch.
_WORTH = 4
# So many graphs are kept. Loaders that sort sequences by length have a few shapes.
_MOST_GRAPHS = 4
# What inputs may have next to tensors: values of these types do not change unnoticed.
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


class Host(Protocol):
    """What a pass changes on the host: `kfs.kfac.sums.Sums`, or `Nothing`."""

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
    batch: Batch  # what the graph reads
    counts: dict[Any, float]  # what a pass adds to numbers on the host
    reads: Reads  # holds what else it reads

    def replay(self, batch: Batch, sums: Host) -> None:
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
        run: Callable[[Batch], None],
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
        self._log = logging.getLogger("kfs.recording") if log is None else log
        self._around = around
        self._times: dict[Any, int] = {}  # how often shapes were seen
        self._recorded: dict[Any, Recorded] = {}
        self._waits = ""  # what waits for the device in a pass that is not recorded
        self._tried = False  # whether such a pass could not be recorded once

    @property
    def has_given_up(self) -> bool:
        """Whether all further passes run as they are."""
        return self._recorder is None

    def run(self, batch: Batch) -> None:
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

    def _run_or_record(self, recorder: Recorder, shape: Any, batch: Batch) -> None:
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

    def _record(self, recorder: Recorder, shape: Any, batch: Batch) -> None:
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


def shape_of(batch: Batch) -> Any:
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
    if type(x) in {tuple, list} or (isinstance(x, tuple) and hasattr(x, "_fields")):  # as in `kfs.data.mapped`
        return all(map(_is_plain, x))
    return isinstance(x, Tensor) or type(x) in _PLAIN


def _structure(x: Any) -> Any:
    """Return what plain inputs are, but for values of tensors. Types count: `1` equals `True`."""
    if isinstance(x, Mapping):
        return type(x), tuple((key, _structure(value)) for key, value in x.items())
    if isinstance(x, (tuple, list)):
        return type(x), tuple(map(_structure, x))
    return Tensor if isinstance(x, Tensor) else (type(x), repr(x))
