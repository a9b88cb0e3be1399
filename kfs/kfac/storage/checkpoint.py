"""Checkpoints: sums over data that survive the process, and go on to the last bit as if nothing had happened.

A journal writes all sums after some batches, atomically, together with what they belong to: settings, loss, values of
parameters and buffers, and a digest of the data seen so far. Whoever starts the same computation again skips the
batches that are done. Other settings, parameters or data are refused.
"""

import hashlib
import json
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kfs import storage
from kfs.data import Batch, mapped, tensors_in
from kfs.errors import StorageError
from kfs.kfac.settings import Settings
from kfs.kfac.sums.interface import Sums
from kfs.losses import Loss
from kfs.risk import EmpiricalRisk


@dataclass(frozen=True)
class Checkpoint:
    """Where and how often intermediate results are written.

    Attributes:
        path: The file. `EKFAC` writes a second one, with `.eigenvalues` appended to its name.
        batches: Write after so many batches.
        minutes: Write when so many minutes have passed, after the next batch. Five, if nothing is said.

    Example:
        >>> Checkpoint("run.kfac", batches=100)
        Checkpoint(path='run.kfac', batches=100, minutes=None)
    """

    path: str | Path
    batches: int | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        """Refuse what is not positive."""
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
        count: What a mean over the targets divides by.
        unexplained: `(parameter, operation)` of uses that no rule explains.
    """

    batches: int = 0
    num_data: int = 0
    count: float = 0.0
    unexplained: set[tuple[str, str]] = field(default_factory=set)

    def add(self, num_data: int, count: float, unexplained: set[tuple[str, str]]) -> None:
        """Count a batch."""
        self.batches += 1
        self.num_data += num_data
        self.count += count
        self.unexplained |= unexplained


class Journal:
    """Keeps the sums of a pass over the data in a file.

    Args:
        checkpoint: Where and how often.
        risk: Model, loss, data and parameters.
        settings: What was asked for.
        stage: Which pass it is.
        basis: What the sums are relative to: eigenvectors.
    """

    def __init__(
        self, checkpoint: Checkpoint, risk: EmpiricalRisk, settings: Settings, stage: str, basis: Iterable[Tensor] = ()
    ) -> None:
        """Find out what the sums belong to."""
        path = Path(checkpoint.path)
        self.path = path if stage == "factors" else path.with_name(f"{path.name}.{stage}")
        self.checkpoint, self._device = checkpoint, settings.factor_device or str(risk.device)
        module = risk.model if isinstance(risk.model, torch.nn.Module) else None
        tensors = [] if module is None else [*module.parameters(), *module.buffers()]
        self.belongs_to = {
            "stage": stage,
            "eigenvectors": _digest(basis),
            "settings": settings.state(),
            "model": repr(module)
            if module is not None
            else getattr(risk.model, "__qualname__", type(risk.model).__name__),
            "loss": details(risk.loss),
            "parameters": {name: list(p.shape) for name, p in risk.params.items()},
            "values of parameters": _digest(risk.params.values()),
            "values of other parameters and buffers": _digest(tensors),
            "precision": f"{risk.dtype} on {risk.device.type}",
        }
        self._start()

    def _start(self) -> None:
        self._hash = hashlib.blake2b(digest_size=32)
        self._seen, self._done, self._expected = 0, 0, ""
        self._saved, self._time = -1, time.monotonic()

    def resume(self, sums: Sums) -> Progress:
        """Restore what the file has, if there is one."""
        self._start()
        if not self.path.exists():
            return Progress()
        header, state = storage.read(self.path, self._device)
        with storage.valid(self.path):
            theirs, found = json.loads(header["belongs_to"]), state["progress"]
            differs = [name for name, value in self.belongs_to.items() if theirs[name] != json.loads(json.dumps(value))]
            if not differs:
                unexplained = {(str(name), str(operation)) for name, operation in found["unexplained"]}
                progress = Progress(int(found["batches"]), int(found["num_data"]), float(found["count"]), unexplained)
                self._done, self._expected = progress.batches, str(found["digest"])
                self._saved = progress.batches
                sums.restore(state["uses"])
        if differs:
            raise StorageError(
                f"The checkpoint {self.path} belongs to another computation: {', '.join(differs)} differ.",
                "Delete it, or choose another path.",
            )
        return progress

    def knows(self, place: int, batch: Batch) -> bool:
        """Whether a batch is part of the sums already; it must be the one that it was."""
        for t in (*tensors_in(batch.x), batch.y):
            self._hash.update(_bytes(t))
        self._hash.update(_words(mapped(batch.x, lambda _: torch.empty(0))).encode())  # what is no tensor
        self._seen = place + 1
        if self._seen == self._done and self._hash.hexdigest() != self._expected:
            raise self._other_data()
        return place < self._done

    def _other_data(self) -> StorageError:
        return StorageError(
            f"The data differ from those that the checkpoint {self.path} was made from.",
            "Pass the same data in the same order, delete the checkpoint, or choose another path.",
        )

    def note(self, progress: Progress, sums: Sums) -> None:
        """Write, if it is time to."""
        batches, minutes = self.checkpoint.batches, self.checkpoint.minutes
        minutes = 5.0 if batches is None and minutes is None else minutes
        late = minutes is not None and time.monotonic() - self._time >= 60 * minutes
        if late or (batches is not None and progress.batches % batches == 0):
            self._write(progress, sums)

    def close(self, progress: Progress, sums: Sums) -> None:
        """Write the last time; refuse data that are fewer than before."""
        if self._seen < self._done:
            raise self._other_data()
        if progress.batches != self._saved:
            self._write(progress, sums)

    def _write(self, progress: Progress, sums: Sums) -> None:
        found = {
            "batches": progress.batches,
            "num_data": progress.num_data,
            "count": progress.count,
            "unexplained": [list(pair) for pair in sorted(progress.unexplained)],
            "digest": self._hash.hexdigest(),
        }
        about = {"kind": "checkpoint", "belongs_to": self.belongs_to, "batches": progress.batches}
        storage.write(self.path, about, {"progress": found, "uses": sums.state()})
        self._saved, self._time = progress.batches, time.monotonic()


def details(loss: Loss) -> str:
    """Return a loss's name and a digest of all its settings."""
    hashed = hashlib.blake2b(digest_size=8)
    for name, value in sorted(vars(loss).items()):
        hashed.update(name.encode())
        hashed.update(_bytes(value) if isinstance(value, Tensor) else _words(value).encode())
    return f"{loss.name} ({hashed.hexdigest()})"


def _words(value: object) -> str:
    """Describe something that is no tensor; where it is in memory does not matter."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _digest(tensors: Any) -> str:
    """Return a digest of all values."""
    hashed = hashlib.blake2b(digest_size=32)
    for t in tensors:
        hashed.update(_bytes(t))
    return hashed.hexdigest()


def _bytes(t: Tensor) -> Any:
    """Return the values of a tensor as bytes."""
    return t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
