"""Cost of Kronecker factors on a GPU, with batches of a known shape replayed: `python -m benchmarks.factors cuda`.

The unit is an eager forward+backward of one batch: the time of 12 of them, over 12. Batches are on the GPU already, and
are repeated. The model was audited before. Columns, in this unit unless stated otherwise:

- milliseconds: the time of one more batch.
- first: a computation with one batch, from the first call to the finished factors.
- marginal: one more batch, once its shape has been recorded: the time for 44 batches minus the time for 12, over 32
  (for a ViT: 20 minus 12, over 8). One-time work for all data cancels out.
- recording: the time of 12 batches minus that of the first one and 11 marginal ones.
- / graphed: one more batch, in units of forward+backward that is recorded as one CUDA graph and replayed.
- no replay: one more batch with `replay=False`.
- allocated, reserved: the peak of memory in tensors, and of memory that the allocator reserves on the GPU, for 12
  batches, in addition to the memory at the start, without the factors; in units of the same for eager
  forward+backward. Memory of recorded graphs is reserved.
- audit: the time of the audit of the first batch, in units of this program's time for one batch of eight examples.
- / KFAC: for EKFAC, one more batch (in both passes) in units of KFAC's.

Peers have no replay. Their *marginal* is the time per batch for all batches of the problem, in units of the time per
batch of equally many eager forward+backwards.
"""

import gc
import inspect
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.factor_problems import Batches
from benchmarks.factor_programs import (
    ADAPTERS,
    TASKS,
    accumulate_gradients,
    adapter,
    audit_seconds,
    forward_backward,
    kfs_factors,
    layers,
    of_eight,
    peers,
    rounding,
    tasks,
)
from benchmarks.report import RESULTS, Row, draw, medians, save, synchronize
from kfs import EKFAC, KFAC

REPEATS = 9
PATIENCE = 3.0  # seconds for the turns of one program, after which no further turn starts
COUNTS = (12, 44)  # numbers of batches, both after recording
LARGE_COUNTS = (12, 20)
Program = Callable[[int], Any]  # a program that takes the number of batches


@dataclass(frozen=True)
class ReplayRow:
    """One measured program; the units of ratios are in the module's docstring.

    Attributes:
        problem: The model and data.
        program: The program.
        library: Its library.
        seconds: Time of one more batch.
        ratio: That time in units of eager forward+backward.
        first: Time of a computation with one batch.
        recording: Time spent on recording.
        graphed_ratio: Time of one more batch in units of graphed forward+backward.
        no_replay: Time of one more batch without replay.
        allocated: Peak of allocated memory.
        reserved: Peak of reserved memory.
        audit_ratio: Time of the audit.
        kfac_ratio: Time of one more batch in units of KFAC's.
    """

    problem: str
    program: str
    library: str
    seconds: float
    ratio: float
    first: float | None = None
    recording: float | None = None
    graphed_ratio: float | None = None
    no_replay: float | None = None
    allocated: float | None = None
    reserved: float | None = None
    audit_ratio: float | None = None
    kfac_ratio: float | None = None

    def line(self) -> str:
        """Return a line of a Markdown table."""
        numbers = (
            *(self.first, self.ratio, self.recording, self.graphed_ratio, self.no_replay),
            *(self.allocated, self.reserved, self.audit_ratio, self.kfac_ratio),
        )
        cells = ["" if number is None else f"{number:.2f}" for number in numbers]
        return f"| {self.problem} | {self.program} | {self.library} | {1e3 * self.seconds:.3f} | {' | '.join(cells)} |"


HEADER = (
    "| problem | program | library | milliseconds | first | marginal | recording | / graphed | no replay "
    "| allocated | reserved | audit / (8 examples) | / KFAC |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Job:
    """A program of kfs to measure."""

    program: str
    library: str
    params: list[str] | None
    task: dict[str, Any]
    kind: Any = KFAC
    products: str = "auto"


@dataclass(frozen=True)
class Cost:
    """Seconds of a computation: with one batch, of one more batch, and of recording."""

    first: float
    marginal: float
    recording: float


@dataclass
class Plain:
    """Forward+backward of one batch: seconds, seconds as a CUDA graph, peaks of allocated and reserved memory."""

    seconds: float
    graphed: float | None
    peaks: tuple[float, float] | None
    kfac: float | None = None  # seconds of KFAC's marginal batch, once measured


def replay_settings(device: torch.device, replay: bool = True, products: str = "auto") -> dict[str, Any]:
    """Return the settings for GPUs: none for other devices, and only those of the measured version."""
    wanted = {"replay": replay, "products": products} if device.type == "cuda" else {}
    known = inspect.signature(KFAC).parameters
    return {name: value for name, value in wanted.items() if name in known}


def device_of(problem: Batches) -> torch.device:
    """Return the device of a problem's data."""
    return problem.data[0][0].device


def with_batches(problem: Batches, count: int) -> Batches:
    """Return a problem with a given number of batches, by repetition."""
    return replace(problem, data=(problem.data * count)[:count])


def seconds_of(call: Callable[[], object]) -> float:
    """Return the time of a call, including all work that it starts on the GPU."""
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - start


def turns(repeats: int) -> Iterator[int]:
    """Yield the numbers of turns, up to a limit of their number and of seconds."""
    start = time.perf_counter()
    for turn in range(repeats):
        if turn and time.perf_counter() - start > PATIENCE:
            return
        yield turn


def cost(program: Program, counts: tuple[int, int], repeats: int) -> Cost:
    """Time a program for one batch, for few and for many, in turn."""
    few, many = counts
    program(few)  # audits, and lets the allocator reserve memory
    times: dict[int, list[float]] = {1: [], few: [], many: []}
    for _ in turns(repeats):
        for count, found in times.items():
            found.append(seconds_of(partial(program, count)))
    differences = [(long - short) / (many - few) for short, long in zip(times[few], times[many], strict=True)]
    first = statistics.median(times[1])
    marginal = statistics.median(differences)
    return Cost(first, marginal, statistics.median(times[few]) - first - (few - 1) * marginal)


def marginal_without_replay(program: Program, counts: tuple[int, int], repeats: int) -> float:
    """Time one more batch without replay, so that fewer batches suffice."""
    more = max(1, (counts[1] - counts[0]) // 4)
    program(2)
    differences = [
        (seconds_of(partial(program, 1 + more)) - seconds_of(partial(program, 1))) / more for _ in turns(repeats)
    ]
    return statistics.median(differences)


def graphed_seconds(problem: Batches, count: int, repeats: int) -> float | None:
    """Return the time of forward+backward of one batch as a CUDA graph; `None` without CUDA."""
    if device_of(problem).type != "cuda":
        return None
    one = with_batches(problem, 1)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # PyTorch requires some passes on another stream before recording
        for _ in range(3):
            accumulate_gradients(one)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):  # gradients exist already, and are added to, as in an eager loop
            accumulate_gradients(one)
    except RuntimeError as error:
        print(f"{problem.name}: forward+backward cannot be recorded: {error!s:.300}")
        problem.model.zero_grad()
        return None

    def replay() -> None:
        for _ in range(count):
            graph.replay()

    seconds = statistics.median(seconds_of(replay) for _ in turns(repeats)) / count
    problem.model.zero_grad()
    return seconds


def peaks(program: Callable[[], Any], device: torch.device) -> tuple[float, float] | None:
    """Return the increase of allocated and reserved memory, in bytes, without resulting factors; `None` on a CPU."""
    if device.type != "cuda":
        return None
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    result = program()
    torch.cuda.synchronize()
    factors = 0 if result is None else sum(block.nbytes for block in result.blocks.values())
    more_allocated = torch.cuda.max_memory_allocated() - allocated - factors
    return more_allocated, torch.cuda.max_memory_reserved() - reserved - factors


def measure_plain(problem: Batches, counts: tuple[int, int], repeats: int) -> Plain:
    """Measure forward+backward."""
    few = counts[0]
    eager = partial(forward_backward, with_batches(problem, few))
    for _ in range(3):
        eager()
    seconds = statistics.median(seconds_of(eager) for _ in turns(repeats)) / few
    return Plain(seconds, graphed_seconds(problem, few, repeats), peaks(eager, device_of(problem)))


def jobs(problem: Batches) -> list[Job]:
    """Return the programs of kfs."""
    inside = layers(problem)
    mc = TASKS["mc expand"]
    some = {"mc expand": mc} if problem.large else tasks(problem)
    found = [Job(name, "kfs", inside, task) for name, task in some.items()]
    if len(inside) < len(list(problem.model.parameters())):
        found.append(Job("mc expand", "kfs, all parameters", None, mc))
    if problem.large and problem.autocast is None and "products" in replay_settings(device_of(problem)):
        found.append(Job("mc expand, bf16 products", "kfs", inside, mc, products="bf16"))
    if not problem.large:
        found.append(Job("EKFAC mc expand", "kfs", inside, mc, EKFAC))
    return found


def measure_job(problem: Batches, job: Job, counts: tuple[int, int], plain: Plain, repeats: int) -> ReplayRow:
    """Measure one program of kfs."""

    def program(count: int, replay: bool = True, problem: Batches = problem) -> Any:
        settings = job.task | replay_settings(device_of(problem), replay, job.products)
        return kfs_factors(with_batches(problem, count), job.params, job.kind, **settings)

    audit = audit_seconds(problem, job.params, min(repeats, 3))
    eight = medians({"eight": partial(program, 1, problem=of_eight(problem))}, repeats, "eight data")["eight"]
    found = cost(program, counts, repeats)
    no_replay = None
    if "replay" in replay_settings(device_of(problem)):
        no_replay = marginal_without_replay(partial(program, replay=False), counts, repeats) / plain.seconds
    memory = peaks(partial(program, counts[0]), device_of(problem))
    ratios: tuple[float | None, float | None] = (None, None)
    if memory is not None and plain.peaks is not None:
        ratios = memory[0] / plain.peaks[0], memory[1] / plain.peaks[1]
    if job.kind is KFAC and plain.kfac is None:  # mc expand, which is measured first
        plain.kfac = found.marginal
    return ReplayRow(
        problem.name,
        job.program,
        job.library,
        found.marginal,
        found.marginal / plain.seconds,
        found.first / plain.seconds,
        found.recording / plain.seconds,
        None if plain.graphed is None else found.marginal / plain.graphed,
        no_replay,
        *ratios,
        audit / eight,
        found.marginal / plain.kfac if job.kind is EKFAC and plain.kfac is not None else None,
    )


def measure(chosen: list[Batches], repeats: int = REPEATS) -> Iterator[ReplayRow]:
    """Measure all problems, and yield rows as they are measured."""
    for problem in chosen:
        counts = LARGE_COUNTS if problem.large else COUNTS
        with rounding(problem):
            plain = measure_plain(problem, counts, repeats)
            unit = plain.seconds
            graphed = None if plain.graphed is None else unit / plain.graphed
            yield ReplayRow(problem.name, "forward+backward", "torch", unit, 1.0, graphed_ratio=graphed)
            if plain.graphed is not None:
                ratio = plain.graphed / unit
                yield ReplayRow(problem.name, "forward+backward, graphed", "torch", plain.graphed, ratio)
            for job in jobs(problem):
                try:
                    yield measure_job(problem, job, counts, plain, repeats)
                except Exception as error:  # noqa: BLE001 (the other programs must run if one fails)
                    # A message may be long, in particular if memory runs out.
                    print(f"{problem.name}, {job.program}, {job.library}: {type(error).__name__}: {error!s:.300}")
            yield from measure_peers(problem, repeats)


def measure_peers(problem: Batches, repeats: int) -> Iterator[ReplayRow]:
    """Time installed peers on the batches that the problem has."""
    count = len(problem.data)
    for name, task in {"mc expand": TASKS["mc expand"]}.items() if problem.large else tasks(problem).items():
        found: dict[str, Callable[[], object]] = {"torch": partial(forward_backward, problem)}
        found |= peers(problem, **task)
        if len(found) > 1:
            seconds = medians(found, repeats, problem.name)
            unit = seconds.pop("torch")
            for peer, value in seconds.items():
                yield ReplayRow(problem.name, name, peer, value / count, value / unit)


def main(chosen: list[Batches], results: Path = RESULTS, repeats: int = REPEATS) -> None:
    """Measure, and write table, JSON and plot. They contain only measurements of this run."""
    start = time.perf_counter()
    if not replay_settings(device_of(chosen[0])):
        print("There is no replay here: not with this version of kfs, or not on this device.")
    for peer in ADAPTERS:
        adapter(peer)  # prints which libraries are not installed, before the table
    rows = []
    print(HEADER)
    for row in measure(chosen, repeats):
        print(row.line(), flush=True)  # a run may be stopped
        rows.append(row)
        file = save(rows, "factors_cuda", {"repeats": repeats, "device": device_name(device_of(chosen[0]))}, results)
    bars = [Row(row.problem, row.program, row.library, row.seconds, row.ratio) for row in rows]
    draw(bars, "marginal batch", results / "factors_cuda.png")
    print(f"Written: {file}, {results / 'factors_cuda.png'}; {time.perf_counter() - start:.0f} s")


def device_name(device: torch.device) -> str:
    """Return the name of a device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
