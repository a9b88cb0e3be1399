"""Training in several processes: seconds, bytes that each rank sends and holds, beside the scheme of kfac-pytorch.

`python -m benchmarks.distributed [ranks]` trains on gloo ranks of this machine, by default two, one thread each.

*Sent* are bytes per rank and update of factors, without gradients, which `DistributedDataParallel` exchanges for every
optimizer. They are counted at the calls of `torch.distributed` for ring algorithms: a sum for one rank, or a copy from
one rank, is sent by all ranks but one, and a sum for all ranks twice. *kfac-pytorch* adds up whole factors on all
ranks, and sends whole inverses or eigenvectors from their owners to all others. This is counted for the same model and
the same intervals, not run. *Held* are bytes of factors and inverses on each rank.

Larger numbers of ranks are simulated for ViT-B: the schedule and the owners are those of the optimizer, but nothing is
inverted. *Work* is counted in inverses of 768 x 768. The *path* of a round, in which owners compute inverses, is the
work of the rank with most of it.
"""

import json
import os
import pickle
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.report import RESULTS, save
from kfs.factors.blocks import Factor, Kronecker
from kfs.factors.layout import Layout
from kfs.optim import KFAC, across_ranks
from kfs.optim.averages import Average
from kfs.optim.curvature import Curvature
from kfs.optim.inverses import Inverses

FACTORS_EVERY, INVERSES_EVERY = 10, 20
# Before this step, inverses are computed more often. Later ones are measured.
FIRST, LAST = 40, 80
BATCH = 64
_INTERVALS = 10  # number of intervals between inverses that are simulated


@dataclass(frozen=True)
class DistributedRow:
    """Measurements of one model.

    Attributes:
        model: Its name.
        optimizer: The optimizer.
        ranks: Number of processes.
        seconds: Mean time of a step.
        busy: Mean time per step in which this rank computes; in the rest, it waits for others.
        sent: Bytes that each rank sends per update of factors, without gradients.
        scheme: Bytes that each rank would send in the scheme of kfac-pytorch.
        held: Bytes of factors and inverses on each rank.
        factors: Bytes of all factors.
    """

    model: str
    optimizer: str
    ranks: int
    seconds: float
    busy: float
    sent: float = 0.0
    scheme: float = 0.0
    held: int = 0
    factors: int = 0


@dataclass
class Traffic:
    """Bytes that this rank sends with ring algorithms."""

    sent: float = 0.0
    _functions: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count calls of `torch.distributed` in this context, except for calls by `DistributedDataParallel`."""
        share = 1 - 1 / dist.get_world_size()
        times = {"reduce": share, "broadcast": share, "all_reduce": 2 * share, "all_gather_object": share}
        functions = {name: getattr(dist, name) for name in times}

        def counting(name: str) -> Any:
            def run(first: Any, *args: Any, **kwargs: Any) -> Any:
                if isinstance(first, Tensor):
                    self.sent += times[name] * first.nbytes
                else:  # a small value for all ranks
                    self.sent += times[name] * dist.get_world_size() * len(pickle.dumps(args[0]))
                return functions[name](first, *args, **kwargs)

            return run

        for name in times:
            setattr(dist, name, counting(name))
        try:
            yield
        finally:
            for name, function in functions.items():
                setattr(dist, name, function)


@dataclass(frozen=True)
class SimulatedRow:
    """Inverses of ViT-B, in one interval between inverses, on a simulated number of ranks.

    Attributes:
        ranks: Number of processes.
        path: Sum of the paths of all rounds.
        ratio: The path, divided by the mean work of a rank.
        best: The smallest possible ratio if no block is divided: all inverses in one round.
        busy: Mean number of ranks that compute inverses in a round.
        rounds: Number of rounds.
        held: Largest number of bytes of averages and inverses on a rank, if the model is sharded.
    """

    ranks: int
    path: float
    ratio: float
    best: float
    busy: float
    rounds: float
    held: int


def simulated(sizes: Sequence[int] = (1, 2, 4, 8, 64, 256), every: int = INVERSES_EVERY) -> list[SimulatedRow]:
    """Simulate the default schedule of one process for each block, in which factors are computed every 10 steps."""
    blocks = {"qkv": (2304, 769), "out": (768, 769), "fc1": (3072, 769), "fc2": (768, 3073)}
    shapes = {f"{layer}.{name}": shape for layer in range(12) for name, shape in blocks.items()}
    averages = [_average(name, *shape) for name, shape in (shapes | {"head": (1000, 769)}).items()]
    total, largest = sum(a.cost for a in averages), max(a.cost for a in averages)
    rounds = list(_rounds(averages, every))
    rows = []
    for size in sizes:
        loads = [_loads(some, across_ranks.balanced_owners(some, size), size) for some in rounds]
        path = sum(max(load) for load in loads) / _INTERVALS
        busy = statistics.fmean(sum(work > 0 for work in load) for load in loads)
        best = max(largest, total / size) * size / total
        owners = across_ranks.owners_of(averages, False, size)
        held = [sum(2 * a.factors.nbytes for a in averages if owners[a.layout.key] == rank) for rank in range(size)]
        ratio, number = path * size / total, len(rounds) / _INTERVALS
        rows.append(SimulatedRow(size, path / 768**3, ratio, best, busy, number, max(held)))
    return rows


def _average(name: str, rows: int, columns: int) -> Average:
    """Return the average of a block, without memory."""
    A, B = (Factor.dense(torch.empty(1, size, size, device="meta")) for size in (columns, rows))
    zero = torch.zeros((), dtype=torch.float64)
    return Average(Layout(name, (rows, columns), (0, rows), (0, 1), 1), Kronecker(A, B), zero, zero)


def _rounds(averages: list[Average], every: int) -> Iterator[list[Average]]:
    """Yield the blocks that owners invert in each round, after a warm-up."""
    inverses = Inverses("factored", "relative", False)
    curvature = Curvature(0.7, inverses, every, 3, averages={a.layout.key: a for a in averages})
    first = 10 * every
    for step in range(0, first + _INTERVALS * every, FACTORS_EVERY):
        for average in averages:
            average.changed = True
        until = step + FACTORS_EVERY
        found = []
        for now in range(step, until):
            for average in (average for together in curvature.schedule(now)[0] for average in together):
                found.append(average)
                average.updated, average.changed, average.inverse = now, False, average.factors
        if step >= first:
            yield found


def _loads(averages: list[Average], owners: Mapping[Any, int], size: int) -> list[float]:
    """Return the work of each rank."""
    loads = [0.0] * size
    for average in averages:
        loads[owners[average.layout.key]] += average.cost
    return loads


def table_of_simulation(rows: list[SimulatedRow]) -> str:
    """Return rows as a table in Markdown."""
    lines = [
        "| ViT-B: ranks | path | / mean of ranks | at best | ranks busy | rounds | MB held, sharded |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.ranks} | {row.path:.0f} | {row.ratio:.1f} | {row.best:.1f} | {row.busy:.1f} | {row.rounds:.0f} | "
        f"{row.held / 1e6:.0f} |"
        for row in rows
    ]
    return "\n".join(lines)


def models() -> dict[str, nn.Module]:
    """Return the models to train."""

    def mlp(width: int) -> nn.Module:
        torch.manual_seed(0)
        hidden = [layer for _ in range(3) for layer in (nn.Linear(width, width), nn.Tanh())]
        return nn.Sequential(nn.Linear(64, width), nn.Tanh(), *hidden, nn.Linear(width, 10))

    return {"MLP, width 128": mlp(128), "MLP, width 512": mlp(512)}


def factor_bytes(optimizer: KFAC) -> tuple[int, int]:
    """Return bytes of all factors, and bytes of factors and inverses on this rank."""
    averages = optimizer.preconditioner.curvature.averages.values()
    factors = sum(f.values.nbytes for a in averages for f in (a.factors.A, a.factors.B))
    return factors, factors + sum(a.inverse.nbytes for a in averages if a.inverse is not None)


def measure(name: str, model: nn.Module, kfac: bool) -> DistributedRow:
    """Train one model on all ranks."""
    size = dist.get_world_size()
    wrapped = DistributedDataParallel(model)
    loss = nn.CrossEntropyLoss()
    optimizer: torch.optim.Optimizer
    if kfac:
        optimizer = KFAC(wrapped, loss, factors_every=FACTORS_EVERY, inverses_every=INVERSES_EVERY)
    else:
        optimizer = torch.optim.AdamW(wrapped.parameters())
    g = torch.Generator().manual_seed(dist.get_rank())
    traffic = Traffic()
    times = []
    busy = []
    before = 0.0
    for step in range(LAST):
        x = torch.randn(BATCH // size, 64, generator=g)
        y = x[:, :10].argmax(1)
        if step == FIRST:
            before = traffic.sent
        start = time.perf_counter()
        busy_before = time.thread_time()
        optimizer.zero_grad()
        with traffic.counted():
            loss(wrapped(x), y).backward()
            optimizer.step()
        times.append(time.perf_counter() - start)
        busy.append(time.thread_time() - busy_before)
    seconds, own = statistics.fmean(times[FIRST:]), statistics.fmean(busy[FIRST:])
    if not isinstance(optimizer, KFAC):
        return DistributedRow(name, "AdamW", size, seconds, own)
    factors, held = factor_bytes(optimizer)
    updates = (LAST - FIRST) / FACTORS_EVERY
    # Sums for all ranks in every update of factors, and copies in every update of inverses.
    share = 1 - 1 / size
    scheme = share * factors * (2 + FACTORS_EVERY / INVERSES_EVERY)
    sent = (traffic.sent - before) / updates
    return DistributedRow(name, "KFAC", size, seconds, own, sent, scheme, held, factors)


def work(rank: int, size: int, store: str, results: str) -> None:
    """Measure in one process."""
    torch.set_num_threads(1)
    file_store = dist.FileStore(store, size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=file_store, rank=rank, world_size=size)
    rows = [measure(name, model, kfac) for name, model in models().items() for kfac in (False, True)]
    if rank == 0:
        Path(results).write_text(json.dumps([asdict(row) for row in rows]), encoding="utf-8")
    dist.destroy_process_group()


def table(rows: list[DistributedRow]) -> str:
    """Return rows as a table in Markdown."""
    lines = [
        "| model | optimizer | ranks | ms per step | busy | MB sent per update | kfac-pytorch's scheme | MB held |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|")
    for row in rows:
        numbers = ("", "", "")
        if row.held:
            ratio = f"{row.scheme / 1e6:.2f} ({row.sent / row.scheme:.2f} of it)"
            numbers = (f"{row.sent / 1e6:.2f}", ratio, f"{row.held / 1e6:.2f}")
        cells = (
            row.model,
            row.optimizer,
            str(row.ranks),
            f"{1e3 * row.seconds:.1f}",
            f"{1e3 * row.busy:.1f}",
            *numbers,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(size: int = 2, results: Path = RESULTS) -> list[DistributedRow]:
    """Measure on some ranks, print a table, and write JSON."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        spawn(work, (size, f"{folder}/store", str(file)), nprocs=size)
        rows = [DistributedRow(**row) for row in json.loads(file.read_text(encoding="utf-8"))]
    print(f"{table(rows)}\n\n{table_of_simulation(simulated())}")
    settings: dict[str, object] = {"factors_every": FACTORS_EVERY, "inverses_every": INVERSES_EVERY, "batch": BATCH}
    save(rows, "distributed", settings, results)
    return rows


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
