"""Recording of computations as CUDA graphs: what records, and what was recorded."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from kfs.errors import ModelError
from kfs.waiting import noticed_waits


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
        with noticed_waits() as waits:
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
