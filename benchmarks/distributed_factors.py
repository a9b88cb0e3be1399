"""Factors on many processes: bytes that each rank holds and sends, and times, replicated and with owners.

    python -m benchmarks.distributed_factors          # on 2 and 4 ranks of this machine, connected by gloo

Bytes held are those of factors and of the tensors of a damped inverse. Bytes sent are counted from the sizes of
messages, for a ring: a sum for all ranks takes `2 (W - 1) / W` of the size per rank, and a sum for one rank half of
that. The scheme of kfac-pytorch, by count, averages whole factors on all ranks, in every update. Here, the upper
triangles are sent once.
"""

import multiprocessing
import os
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import kfs
from benchmarks.report import RESULTS, save

WIDTHS = [256, 512, 512, 512, 384, 384, 384, 256, 256, 10]
NUM_DATA = 2048


class Measured(NamedTuple):
    """Measurements of one rank: seconds, and bytes of factors and their inverses."""

    seconds: float
    seconds_of_inverse: float
    held: int


@dataclass(frozen=True)
class PlacementRow:
    """Measurements of all ranks.

    Attributes:
        ranks: Number of ranks.
        placement: Placement of the factors.
        most_held: Bytes on the rank that holds most.
        all_held: Bytes on all ranks together.
        sent: Bytes that a rank sends for one update.
        sent_by_kfac_pytorch: The same, in the scheme of kfac-pytorch.
        seconds: Time for factors, on the slowest rank.
        seconds_of_inverse: Time for inverses, on the slowest rank.
    """

    ranks: int
    placement: str
    most_held: int
    all_held: int
    sent: float
    sent_by_kfac_pytorch: float
    seconds: float
    seconds_of_inverse: float


def network() -> nn.Module:
    """Return a net with blocks of several sizes."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(WIDTHS):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def risk_of(group: Any) -> kfs.EmpiricalRisk:
    """Return the risk of random data, split over a group."""
    generator = torch.Generator().manual_seed(1)
    X = torch.randn(NUM_DATA, WIDTHS[0], generator=generator)
    y = torch.randint(WIDTHS[-1], (NUM_DATA,), generator=generator)
    batches = [(X[n : n + 128], y[n : n + 128]) for n in range(0, NUM_DATA, 128)]
    return kfs.EmpiricalRisk(network(), nn.CrossEntropyLoss(), kfs.shard(batches, group))


def sizes() -> tuple[int, int]:
    """Return the bytes of all factors, and of their upper triangles."""
    sides = [side for inputs, outputs in pairwise(WIDTHS) for side in (inputs + 1, outputs)]
    return 4 * sum(side**2 for side in sides), 4 * sum(side * (side + 1) // 2 for side in sides)


def held_by(operators: list[Any]) -> int:
    """Count the bytes of operators on this rank, each memory once."""
    found: dict[int, int] = {}
    for K in operators:
        for stack in K.own_stacks:
            for t in _tensors(stack.structure):
                storage = t.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for part in vars(value).values() for t in _tensors(part)] if hasattr(value, "__dict__") else []


def measure(placement: Any, memory: int | None) -> Measured:
    """Compute factors and inverses on this rank."""
    risk = risk_of(dist.group.WORLD)
    risk.count()
    start = time.perf_counter()
    K = kfs.KFAC(risk, "empirical", placement=placement, factor_memory=memory, audit=False)
    middle = time.perf_counter()
    inverse = K.inverse(1e-3, "factored")
    end = time.perf_counter()
    return Measured(middle - start, end - middle, held_by([K, inverse]))


def work(rank: int, size: int, store: str, results: Any, arguments: tuple[Any, ...]) -> None:
    """Measure on one of several ranks."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    found = dist.FileStore(store, size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=found, rank=rank, world_size=size)
    results.put((rank, measure(*arguments)))
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(size: int, *arguments: Any) -> list[Measured]:
    """Measure on several processes."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        given = size, f"{folder}/store", results, arguments
        processes = [context.Process(target=work, args=(rank, *given)) for rank in range(size)]
        for process in processes:
            process.start()
        rows = dict(results.get(timeout=600) for _ in processes)
        for process in processes:
            process.join()
    return [rows[rank] for rank in range(size)]


def sent(size: int, owner: bool) -> tuple[float, float]:
    """Return the bytes that a rank sends for one update: with kfs, and in the scheme of kfac-pytorch."""
    whole, triangles = sizes()
    ring = (size - 1) / size
    return ring * triangles * (1 if owner else 2), 2 * ring * whole


def line(row: PlacementRow) -> str:
    """Return a row of the table."""
    mebibytes = [row.most_held, row.all_held, row.sent, row.sent_by_kfac_pytorch]
    cells = [str(row.ranks), row.placement, *(f"{n / 2**20:.1f}" for n in mebibytes)]
    return f"| {' | '.join([*cells, f'{row.seconds:.2f}', f'{row.seconds_of_inverse:.2f}'])} |"


def main(results: Path = RESULTS, numbers: tuple[int, ...] = (2, 4)) -> None:
    """Measure, print a table, and write JSON."""
    rows = []
    print("| ranks | placement | most held, MiB | all held | sent | kfac-pytorch | factors, s | inverses, s |")
    print("|---|---|---|---|---|---|---|---|")
    for size in numbers:
        for name, placement, memory in (
            ("replicated", "replicated", None),
            ("owner", "owner", None),
            ("owner, 4 MiB a pass", "owner", 4 * 2**20),
        ):
            found = on_ranks(size, placement, memory)
            here, there = sent(size, placement == "owner")
            held = [one.held for one in found]
            seconds = max(one.seconds for one in found)
            inverses = max(one.seconds_of_inverse for one in found)
            rows.append(PlacementRow(size, name, max(held), sum(held), here, there, seconds, inverses))
            print(line(rows[-1]), flush=True)
    print(f"Written: {save(rows, 'distributed_factors', {'widths': WIDTHS, 'data': NUM_DATA}, results)}")


if __name__ == "__main__":
    main()
