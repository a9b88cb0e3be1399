"""Updates of all parameters, and of inverses, as CUDA graphs.

An update consists of hundreds of small operations, and starting them takes longer than computing them. If the same
parameters are updated again and again, with the same tensors for state and inverses, the operations are recorded once.
What differs between steps is copied to where the graph reads it: gradients, and numbers such as the learning rate.
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
# What is recorded: it takes gradients, a flag, and numbers, and changes parameters and state in place. The flag says
# whether gradients are finite. On an accelerator, where nobody has looked, it becomes false, in place, if the step is
# not finite either; nothing changes then.
Update = Callable[[list[Tensor], Tensor, list[Scalar]], None]
# A recording holds memory of its own. Where it is large, it may take this share of what is free.
SHARE = 0.25
_SAME = 3  # An update is recorded when it comes for this many times in a row.


class _Recorded(NamedTuple):
    """A graph, and what it reads."""

    graph: Graph
    grads: list[Tensor]
    finite: Tensor
    numbers: Tensor
    reads: Reads  # holds what else it reads


class RecordedUpdate:
    """Runs updates, and records them if they repeat.

    Args:
        new_recorder: Makes what records a graph; `None` to run all updates as they are.
        what: What is updated, for messages.
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
            key: Updates with the same key do the same, with the same tensors, up to their arguments.
            update: Runs it.
            grads: Gradients.
            finite: Whether they are.
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
        # A copy of numbers from the host need not be waited for.
        recorded.numbers.copy_(torch.tensor(numbers, dtype=torch.float64), non_blocking=True)
        recorded.graph.replay()
        return recorded.finite

    @staticmethod
    def _run(update: Update, grads: Sequence[Tensor], finite: Tensor, numbers: Sequence[float]) -> Tensor:
        """Run an update as it is."""
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
        """Record an update without running it; `None` if that is not possible."""
        inputs = [torch.zeros_like(g) for g in grads]
        flag = torch.empty_like(finite)
        values = torch.zeros(len(numbers), dtype=torch.float64, device=finite.device)
        reads = Reads()

        def run() -> None:
            with reads:
                update(inputs, flag, list(values))

        try:
            graph = recorder.record(run)
        except Exception as error:  # noqa: BLE001 (whatever it is, the update may well run as it is)
            log.info("kfs.optim: %s are not recorded as CUDA graphs: %s.", self._what, why_not(error))
            self._new_recorder = None
            return None
        return _Recorded(graph, inputs, flag, values, reads)


def recorder_for(device: torch.device, share: float | None = None) -> Callable[[], Recorder] | None:
    """Return what makes recorders for a device; `None` if there are none.

    Args:
        device: Of all tensors.
        share: How much of the free memory recordings may take; as much as they need by default.
    """
    if device.type != "cuda":
        return None
    memory = None if share is None else int(share * memory_of(device)[0])  # pragma: no cover (tested on a GPU)
    return partial(CudaRecorder, device, memory)  # pragma: no cover


def memory_of(device: torch.device) -> tuple[int, int]:
    """Return how many bytes are free on a GPU, and how many PyTorch has reserved."""
    if device.type != "cuda":
        return 1, 0
    free, _ = torch.cuda.mem_get_info(device)  # pragma: no cover (tested on a GPU)
    reserved = torch.cuda.memory_reserved(device)  # pragma: no cover
    return free + reserved - torch.cuda.memory_allocated(device), reserved  # pragma: no cover
