"""Updates of all parameters, and of inverses, as CUDA graphs.

An update consists of hundreds of small operations, and launching them takes longer than computing them. If the same
parameters are updated repeatedly, with the same tensors for state and inverses, the operations are recorded once.
Values that differ between steps, such as gradients and the learning rate, are copied to where the graph reads them.
"""

import logging
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kfs.optim.update_rule import Scalar
from kfs.runtime.cuda_graphs import CudaRecorder, Graph, Reads, Recorder, why_not

log = logging.getLogger("kfs.optim")
# A function that can be recorded. It takes gradients, a flag and numbers, and changes parameters and state in place.
# The flag says whether gradients are finite. On an accelerator, the function sets it to false, in place, if the step
# is not finite; parameters and state do not change then.
Update = Callable[[list[Tensor], Tensor, list[Scalar]], None]
# A recording has its own memory. A large recording may take this share of the free memory.
SHARE = 0.25
_SAME = 3  # An update is recorded when it is requested this many times in a row.


class _Recorded(NamedTuple):
    """A graph and the tensors that it reads."""

    graph: Graph
    grads: list[Tensor]
    finite: Tensor
    numbers: Tensor
    reads: Reads  # keeps other tensors that it reads alive


class RecordedUpdate:
    """Runs updates, and records them if they repeat.

    Args:
        new_recorder: Returns a recorder of graphs; `None` to run all updates eagerly.
        what: Name of the updates in messages.
    """

    def __init__(self, new_recorder: Callable[[], Recorder] | None, what: str = "updates") -> None:
        self._new_recorder = new_recorder
        self._what = what
        self._key: Hashable = None  # of the last update
        self._times = 0  # how often it came in a row
        self._recorded: _Recorded | None = None

    @property
    def is_used(self) -> bool:
        """Whether updates may be recorded."""
        return self._new_recorder is not None

    def run(
        self, key: Hashable, update: Update, grads: Sequence[Tensor], finite: Tensor, numbers: Sequence[float]
    ) -> Tensor:
        """Run an update.

        Args:
            key: Updates with equal keys perform the same operations on the same tensors, except for their arguments.
            update: Performs the update.
            grads: Gradients.
            finite: Flag: whether gradients are finite.
            numbers: All numbers that may differ between updates.

        Returns:
            The flag after the update; the next update may overwrite it.
        """
        if self._new_recorder is None:
            return self._run(update, grads, finite, numbers)
        if key != self._key:
            self.forget()
            self._key = key
        self._times += 1
        if self._recorded is None and self._times >= _SAME:
            self._recorded = self._record(self._new_recorder(), update, grads, finite, numbers)
        recorded = self._recorded
        if recorded is None:
            return self._run(update, grads, finite, numbers)
        if grads:
            torch._foreach_copy_(recorded.grads, list(grads))
        recorded.finite.copy_(finite)
        # This copy from the host is asynchronous.
        recorded.numbers.copy_(torch.tensor(numbers, dtype=torch.float64), non_blocking=True)
        recorded.graph.replay()
        return recorded.finite

    @staticmethod
    def _run(update: Update, grads: Sequence[Tensor], finite: Tensor, numbers: Sequence[float]) -> Tensor:
        """Run an update eagerly."""
        flag = finite.clone()
        update(list(grads), flag, list(numbers))
        return flag

    def forget(self) -> None:
        """Free the graph."""
        if self._recorded is not None:
            self._recorded.graph.reset()
        self._recorded = None
        self._times = 0

    def _record(
        self, recorder: Recorder, update: Update, grads: Sequence[Tensor], finite: Tensor, numbers: Sequence[float]
    ) -> _Recorded | None:
        """Record an update without running it; return `None` if that is not possible."""
        inputs = [torch.zeros_like(g) for g in grads]
        flag = torch.empty_like(finite)
        values = torch.zeros(len(numbers), dtype=torch.float64, device=finite.device)
        reads = Reads()

        def run() -> None:
            with reads:
                update(inputs, flag, list(values))

        try:
            graph = recorder.record(run)
        except Exception as error:  # noqa: BLE001 (whatever it is, the update can run eagerly)
            log.info("kfs.optim: %s are not recorded as CUDA graphs: %s.", self._what, why_not(error))
            self._new_recorder = None
            return None
        return _Recorded(graph, inputs, flag, values, reads)


def recorder_for(device: torch.device, share: float | None = None) -> Callable[[], Recorder] | None:
    """Return a function that makes recorders for a device; `None` if the device has none.

    Args:
        device: Device of all tensors.
        share: Share of the free memory that recordings may take. By default, they take as much as they need.
    """
    if device.type != "cuda":
        return None
    memory = None if share is None else int(share * memory_of(device)[0])  # pragma: no cover (tested on a GPU)
    return partial(CudaRecorder, device, memory)  # pragma: no cover


def memory_of(device: torch.device) -> tuple[int, int]:
    """Return how many bytes are free on a GPU, including PyTorch's cache, and how many PyTorch has reserved."""
    if device.type != "cuda":
        return 1, 0
    free, _ = torch.cuda.mem_get_info(device)  # pragma: no cover (tested on a GPU)
    reserved = torch.cuda.memory_reserved(device)  # pragma: no cover
    return free + reserved - torch.cuda.memory_allocated(device), reserved  # pragma: no cover
