"""A soak test: ranks are killed at random moments, and every computation ends in the same factors.

    python -m tests.distributed.soak --minutes 5

Each round computes factors with a random number of ranks, kills one of them at a random moment, and starts again with
another random number, until no rank is killed. Factors must then equal those of one process without checkpoints.
"""

import argparse
import gc
import multiprocessing
import os
import random
import shutil
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import kfs
from kfs.errors import DistributedError
from tests.distributed.problems import batches, problem, risk_of_all

SETTINGS: list[dict[str, Any]] = [
    {"fisher": "mc"},
    {"fisher": "mc", "placement": "owner"},
    {"fisher": "mc", "factor_memory": 1600, "placement": "owner"},
    {"fisher": "empirical", "sharing": "reduce"},
]
KINDS: dict[str, Any] = {"KFAC": kfs.KFAC, "EKFAC": kfs.EKFAC}
LOST = 3  # exit status of a rank that has noticed that another one was killed


class Slow(list[Any]):
    """Batches that take some time."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            time.sleep(0.01)
            yield batch


def work(rank: int, size: int, store: str, folder: str, kind: str, settings: dict[str, Any]) -> None:
    """Compute factors on one rank of several, and save them."""
    gc.freeze()  # see `pool`
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, size),  # type: ignore[attr-defined]
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=60),
        )
        Path(f"{store}.{rank}").touch()
        model, loss, X, y = problem("tokens")
        own = slice(rank * len(X) // size, (rank + 1) * len(X) // size)
        risk = kfs.EmpiricalRisk(model, loss, Slow(batches(X[own], y[own], 2)), group=dist.group.WORLD)
        K = KINDS[kind](risk, checkpoint=kfs.Checkpoint(f"{folder}/run", batches=1), **settings)
        dense = K.to_dense()
        if rank == 0:
            torch.save(dense, f"{folder}/partial result")
            os.replace(f"{folder}/partial result", f"{folder}/result")
        dist.barrier()
    except (DistributedError, RuntimeError):
        os._exit(LOST)
    os._exit(0)


def attempt(folder: Path, size: int, kind: str, settings: dict[str, Any], after: float | None, victim: int) -> bool:
    """Run all ranks once, and kill one of them after some time. Return whether all ranks finished."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as place:
        arguments = size, f"{place}/store", str(folder), kind, settings
        processes = [context.Process(target=work, args=(rank, *arguments)) for rank in range(size)]
        for process in processes:
            process.start()
        # A rank that waits for connections does not notice that another one is gone.
        while len(list(Path(place).glob("store.*"))) < size:
            time.sleep(0.01)
        if after is not None:
            processes[victim % size].join(after)
            processes[victim % size].kill()
        for process in processes:
            process.join(120)
            assert process.exitcode is not None, "a rank hangs"
    return (folder / "result").exists()


def run(folder: Path, rounds: int | None, seed: int, kills: int = 4, seconds: float = 0.0) -> int:
    """Run some rounds, or for some time, and return the number of ranks that were killed.

    Raises:
        AssertionError: If factors differ, or a rank hangs.
    """
    chance = random.Random(seed)
    deaths = 0
    end = time.monotonic() + seconds
    done = 0
    while done < rounds if rounds is not None else time.monotonic() < end:
        place = folder / f"round-{done}"
        place.mkdir(parents=True)
        kind = chance.choice(list(KINDS))
        settings = chance.choice(SETTINGS)
        finished = False
        for number in range(kills + 1):
            after = chance.uniform(0.0, 0.7) if number < kills else None
            finished = attempt(place, chance.randint(1, 4), kind, settings, after, chance.randrange(4))
            if finished:
                break
            deaths += 1
        assert finished, f"round {done} has no result"
        plain = {name: value for name, value in settings.items() if name in {"fisher", "sharing"}}
        expected = KINDS[kind](risk_of_all("tokens"), **plain).to_dense()
        # Eigenvalues belong to eigenvectors, which magnify round-off of factors.
        tolerance = 1e-13 if kind == "KFAC" else 1e-9
        torch.testing.assert_close(torch.load(place / "result"), expected, rtol=tolerance, atol=tolerance / 100)
        shutil.rmtree(place)
        done += 1
        if rounds is None:
            print(f"round {done}: {kind} {settings}, {deaths} ranks killed so far", flush=True)
    return deaths


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as somewhere:
        killed = run(Path(somewhere), None, given.seed, seconds=60 * given.minutes)
    print(f"{killed} ranks were killed, and all factors were the same.")
