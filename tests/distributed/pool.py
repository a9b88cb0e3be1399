"""One pool of processes for all tests: a function runs on several ranks, which are connected by gloo.

The process of the tests is rank 0, so that coverage, debuggers and assertions work as usual. The others are
forked once and wait for functions. Every call has a world of its own, with exactly the requested number of ranks.
"""

import gc
import multiprocessing
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import kfs

SECONDS = 60  # a rank that waits longer raises an error
MOST = 4  # number of ranks that most functions run on

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")


class Job(NamedTuple):
    """A job for a rank."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    rank: int
    world_size: int
    store: str


class Outcome(NamedTuple):
    """The result of a job."""

    value: Any = None
    error: BaseException | None = None
    text: str = ""


class Pool:
    """Processes that run functions together.

    A function that kills a process should have a pool of its own, since replacing processes start slowly.
    """

    def __init__(self) -> None:
        self._workers: list[tuple[BaseProcess, Connection]] = []
        self._has_run = False

    def __call__(self, world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run a function on all ranks, and return their results.

        Args:
            world_size: Number of ranks.
            function: A function of a module. It is called with `torch.distributed` initialized.
            *arguments: Its arguments, the same for all ranks. Tensors are copied.

        Raises:
            Exception: The error of the first rank that failed by itself. Tracebacks of all others are in its notes.
        """
        self._start(world_size - 1)
        self._has_run = True
        with tempfile.TemporaryDirectory() as folder:
            store = str(Path(folder) / "store")
            for rank in range(1, world_size):
                job = Job(function, arguments, rank, world_size, store)
                self._workers[rank - 1][1].send_bytes(pickle.dumps(job))
            outcomes = [_run(Job(function, arguments, 0, world_size, store))]
            outcomes += [self._outcome(rank) for rank in range(1, world_size)]
        failed = [(rank, one) for rank, one in enumerate(outcomes) if one.error is not None]
        if failed:
            # Ranks that wait for a failed rank lose their connection to it.
            _, first = min(failed, key=lambda item: ("onnection" in str(item[1].error), item[0]))
            assert first.error is not None
            for rank, outcome in failed:
                first.error.add_note(f"--- rank {rank} ---\n{outcome.text}")
            raise first.error
        return [one.value for one in outcomes]

    def close(self) -> None:
        """End all processes."""
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.join()
        self._workers = []

    def _start(self, number: int) -> None:
        """Start processes until at least this many wait for functions."""
        if not all(process.is_alive() for process, _ in self._workers):
            self.close()
        if not self._workers and not self._has_run:
            _import_all()
            number = max(number, MOST - 1)
        # A process that has used a GPU cannot be forked. A former rank 0 of a sharded model should not be forked:
        # PyTorch keeps meshes, and copies of them would treat every rank as rank 0.
        spawns = self._has_run or torch.cuda.is_initialized()
        context: Any = multiprocessing.get_context("spawn" if spawns else "fork")
        while len(self._workers) < number:
            mine, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, mine))

    def _outcome(self, rank: int) -> Outcome:
        """Wait for the outcome of a rank."""
        connection = self._workers[rank - 1][1]
        try:
            if connection.poll(2 * SECONDS):
                outcome: Outcome = pickle.loads(connection.recv_bytes())
                return outcome
            error: Exception = TimeoutError(f"Rank {rank} did not return.")
        except EOFError:
            error = RuntimeError(f"The process of rank {rank} has ended.")
        self.close()
        self._workers = []
        return Outcome(error=error, text=str(error))


def _import_all() -> None:
    """Run a computation that imports all modules, so that forked processes need not import them."""
    data = torch.rand(2, 2), torch.randint(2, (2,))
    risk = kfs.EmpiricalRisk(torch.nn.Linear(2, 2), torch.nn.CrossEntropyLoss(), data)
    kfs.EKFAC(risk, sharing="reduce")
    kfs.GGN(risk) @ risk.gradient()


def _work(connection: Connection) -> None:
    """Run functions until the connection is closed."""
    sys.settrace(None)  # this process cannot save its coverage
    # A process group that was garbage in the parent process would wait for threads that do not exist here.
    gc.freeze()
    torch.set_num_threads(1)
    while True:
        try:
            job = connection.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            outcome = _run(pickle.loads(job))
            answer = pickle.dumps(outcome)
        except BaseException as error:  # noqa: BLE001 (everything is reported)
            answer = pickle.dumps(Outcome(error=RuntimeError(repr(error)), text=traceback.format_exc()))
        connection.send_bytes(answer)


def _run(job: Job) -> Outcome:
    """Run a function in a new world."""
    torch.manual_seed(0)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(job.store, job.world_size),  # type: ignore[attr-defined]
            rank=job.rank,
            world_size=job.world_size,
            timeout=timedelta(seconds=SECONDS),
        )
        try:
            return Outcome(job.function(*job.arguments))
        finally:
            dist.destroy_process_group()
    except BaseException as error:  # noqa: BLE001 (everything is reported, also what pytest raises)
        return Outcome(error=error, text=traceback.format_exc())
