"""Checkpoints: sums over data in a file, from which an interrupted computation continues with the same results.

A journal writes all sums after some batches, atomically, together with what they belong to: settings, loss, values of
parameters and buffers, and a digest of the data seen so far. If the same computation is started again, it skips the
batches that are done. Other settings, parameters or data are refused.
"""

import hashlib
import json
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kfs import storage
from kfs.data import Batch, plain, tensors_in
from kfs.distributed import Ranks
from kfs.errors import StorageError
from kfs.kfac.capture import Audit
from kfs.kfac.settings import Settings
from kfs.kfac.sums.interface import Sums
from kfs.losses import Loss
from kfs.risk import EmpiricalRisk
from kfs.waiting import number


@dataclass(frozen=True)
class Checkpoint:
    """Where and how often intermediate results are written.

    Attributes:
        path: The file. `EKFAC` writes a second one, with `.eigenvalues` appended to its name.
        batches: Write whenever this many batches were added.
        minutes: Write after the first batch that ends this many minutes after the last writing. If neither is given,
            five minutes.

    Example:
        >>> Checkpoint("run.kfac", batches=100)
        Checkpoint(path='run.kfac', batches=100, minutes=None)
    """

    path: str | Path
    batches: int | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        """Refuse numbers that are not positive."""
        for name in ("batches", "minutes"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise StorageError(f"{name} is {value!r}.", "Use a positive number.")


@dataclass
class Progress:
    """What a pass over the data has counted.

    Attributes:
        batches: Number of batches.
        num_data: Number of data.
        count: What a mean over the targets divides by, up to the last time that somebody asked for it.
        counted: What it has to be increased by since then; a tensor if only a device knows it.
        unexplained: `(parameter, why)` of uses that no rule explains.
        audit: What was checked on a few data.
    """

    batches: int = 0
    num_data: int = 0
    count: float = 0.0
    unexplained: set[tuple[str, str]] = field(default_factory=set)
    audit: Audit | None = None
    counted: float | Tensor = 0

    def settle(self) -> None:
        """Ask the device for what only it knows."""
        self.count += number(self.counted)
        self.counted = 0

    def add_up(self, ranks: Ranks) -> None:
        """Replace all of it by that of all ranks together, after the last batch."""
        found = ranks.gather("progress", (self.batches, self.num_data, self.count, self.unexplained, self.audit))
        self.batches = sum(one[0] for one in found)
        self.num_data = sum(one[1] for one in found)
        self.count = float(sum(one[2] for one in found))
        self.unexplained = set().union(*(one[3] for one in found))
        audits = [one[4] for one in found if one[4] is not None]  # ranks without data have none
        self.audit = reduce(Audit.merged, audits) if audits else None

    def state(self) -> dict[str, Any]:
        """Return what has to be known to continue, for a file."""
        self.settle()
        return {
            "batches": self.batches,
            "num_data": self.num_data,
            "count": self.count,
            "unexplained": sorted(self.unexplained),
        }


class Journal:
    """Keeps the sums of a pass over the data in a file.

    Args:
        checkpoint: Where and how often to write.
        risk: Model, loss, data and parameters.
        settings: The settings of the computation.
        stage: Name of the pass, `"factors"` or `"eigenvalues"`.
        basis: The eigenvectors that sums refer to, if any.
    """

    def __init__(
        self, checkpoint: Checkpoint, risk: EmpiricalRisk, settings: Settings, stage: str, basis: Iterable[Tensor] = ()
    ) -> None:
        """Describe what the sums belong to."""
        path = Path(checkpoint.path)
        self.path = path if stage == "factors" else path.with_name(f"{path.name}.{stage}")
        ranks = risk.ranks
        if ranks.are_several:  # each rank keeps the sums over its own data
            self.path = self.path.with_name(f"{self.path.name}.rank-{ranks.rank}-of-{ranks.size}")
        self.checkpoint = checkpoint
        self._device = settings.factor_device or str(risk.device)
        module = risk.model if isinstance(risk.model, torch.nn.Module) else torch.nn.Module()
        name = getattr(risk.model, "__qualname__", type(risk.model).__name__)
        with risk.untouched():  # with all numbers of parameters that are sharded
            values = digest(risk.params.values())
            others = digest([*module.parameters(), *module.buffers()])
        self.belongs_to = {
            "stage": stage,
            "eigenvectors": digest(basis),
            "settings": settings.state(),
            "model": repr(module) if module is risk.model else name,
            "loss": details(risk.loss),
            "parameters": {name: list(p.shape) for name, p in risk.params.items()},
            "values of parameters": values,
            "values of other parameters and buffers": others,
            "precision": f"{risk.dtype} on {risk.device.type}",
        }
        self._start()

    def _start(self) -> None:
        """Forget all batches: a computation may start again, with vectors sent back one by one."""
        self._data = hashlib.blake2b(digest_size=32)
        self._batches_seen = 0
        self._batches_in_file = 0
        self._digest_in_file = ""
        self._written_at = time.monotonic()

    def resume(self, sums: Sums) -> Progress:
        """Restore what the file has, if there is one."""
        self._start()
        if not self.path.exists():
            return Progress()
        header, state = storage.read(self.path, self._device)
        with storage.valid(self.path):
            theirs = json.loads(header["belongs_to"])
            mine = json.loads(json.dumps(self.belongs_to))
            differs = [name for name in mine if theirs[name] != mine[name]]
            if not differs:
                found = state["progress"]
                unexplained = {(str(name), str(why)) for name, why in found["unexplained"]}
                progress = Progress(int(found["batches"]), int(found["num_data"]), float(found["count"]), unexplained)
                self._batches_in_file = progress.batches
                self._digest_in_file = str(found["digest"])
                sums.restore(state["uses"])
                return progress
        raise StorageError(
            f"The checkpoint {self.path} belongs to another computation: {', '.join(differs)} differ.",
            "Delete it, or choose another path.",
        )

    def knows(self, place: int, batch: Batch) -> bool:
        """Whether a batch is part of the sums already. If it is, it must be the same batch as before."""
        for t in (*tensors_in(batch.x), batch.y):
            self._data.update(_bytes(t))
        self._data.update(_text(plain(batch.x)).encode())
        self._batches_seen = place + 1
        if self._batches_seen == self._batches_in_file and self._data.hexdigest() != self._digest_in_file:
            raise self._other_data()
        return place < self._batches_in_file

    def _other_data(self) -> StorageError:
        return StorageError(
            f"The data differ from those that the checkpoint {self.path} was made from.",
            "Pass the same data in the same order, delete the checkpoint, or choose another path.",
        )

    def is_due(self, progress: Progress) -> bool:
        """Whether enough batches or minutes have passed to write the sums."""
        batches = self.checkpoint.batches
        minutes = self.checkpoint.minutes
        minutes = 5.0 if batches is None and minutes is None else minutes
        late = minutes is not None and time.monotonic() - self._written_at >= 60 * minutes
        return late or (batches is not None and progress.batches % batches == 0)

    def close(self, progress: Progress, sums: Sums) -> None:
        """Write the final sums. Refuse data that have fewer batches than the file."""
        if self._batches_seen < self._batches_in_file:
            raise self._other_data()
        if progress.batches != self._batches_in_file:
            self.write(progress, sums)

    def write(self, progress: Progress, sums: Sums) -> None:
        """Write the sums."""
        digest = {"digest": self._data.hexdigest()}
        about = {"kind": "checkpoint", "belongs_to": self.belongs_to, "batches": progress.batches}
        storage.write(self.path, about, {"progress": progress.state() | digest, "uses": sums.state()})
        self._batches_in_file = progress.batches
        self._written_at = time.monotonic()


def details(loss: Loss) -> str:
    """Return a loss's name and a digest of all its settings."""
    hashed = hashlib.blake2b(digest_size=8)
    for name, value in sorted(vars(loss).items()):
        hashed.update(name.encode())
        hashed.update(_bytes(value) if isinstance(value, Tensor) else _text(value).encode())
    return f"{loss.name} ({hashed.hexdigest()})"


def _text(value: object) -> str:
    """Describe something that is not a tensor, without its address in memory."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def digest(tensors: Iterable[Tensor]) -> str:
    """Return a digest of all values."""
    hashed = hashlib.blake2b(digest_size=32)
    for t in tensors:
        hashed.update(_bytes(t))
    return hashed.hexdigest()


def _bytes(t: Tensor) -> Any:
    """Return the values of a tensor as bytes."""
    return t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
