"""Journals: sums over data in files, from which an interrupted computation continues with the same results.

A journal writes all sums after some batches, atomically, together with what they belong to: settings, loss, values of
parameters and buffers, the ranges of data that were seen, and a digest of these. If the same computation is started
again, it leaves out the data that are done. Other settings, parameters or data are refused.

With several processes, each of them writes a file of its own. A file says which data are in it, and not who wrote it.
So any number of processes can continue: each goes on with the file of its own name, if there is one, and sums in other
files are added at the end, each by one of the processes that see it. When all sums are added up, rank 0 writes them to
one file, which replaces all others.
"""

import glob
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kfs import storage
from kfs.data import Batch, cut
from kfs.distributed.states import joined, write_joined
from kfs.errors import StorageError
from kfs.kfac.settings import Settings
from kfs.kfac.storage.checkpoint import Checkpoint, Progress
from kfs.kfac.storage.function_digest import function_digest
from kfs.kfac.storage.seen_data import SeenData, bytes_of, digest, digests_of, text_of
from kfs.kfac.sums.interface import Sums
from kfs.losses import Loss
from kfs.risk import EmpiricalRisk

# Items of sums that are lists with something for each block.
_LISTS = ("blocks", "totals")


@dataclass(frozen=True)
class _File:
    """A file with sums.

    Attributes:
        name: Its name.
        seen: The data in it.
    """

    name: str
    seen: SeenData


class Journal:
    """Keeps the sums of a pass over the data in files.

    Args:
        checkpoint: Where and how often to write.
        risk: Model, loss, data and parameters.
        settings: The settings of the computation.
        stage: Name of the pass, `"factors"` or `"eigenvalues"`; with a number, if there are several of them.
        basis: Digests of the eigenvectors that sums refer to, if any, by block.
        blocks: Names of the blocks that the pass is for. `None` for all of them.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        risk: EmpiricalRisk,
        settings: Settings,
        stage: str,
        basis: Mapping[str, str] | None = None,
        blocks: Sequence[str] | None = None,
    ) -> None:
        path = Path(checkpoint.path)
        self.path = path if stage == "factors" else path.with_name(f"{path.name}.{stage}")
        self.ranks = risk.ranks
        self.own_path = self.path
        if self.ranks.are_several:
            self.own_path = path.with_name(self._name_of(self.ranks.rank))
        self.checkpoint = checkpoint
        self._loss = risk.loss
        self._batch_axis = settings.batch_axis
        self._owned = settings.placement == "owner"
        self._device = settings.factor_device or str(risk.device)
        module = risk.model if isinstance(risk.model, torch.nn.Module) else torch.nn.Module()
        name = getattr(risk.model, "__qualname__", type(risk.model).__name__)
        with risk.untouched():  # with all numbers of parameters that are sharded
            values = digest(risk.params.values())
            others = digest([*module.parameters(), *module.buffers()])
        self.belongs_to = {
            "stage": stage,
            "eigenvectors": digest(()) if basis is None else dict(basis),
            "settings": settings.state(),
            "model": repr(module) if module is risk.model else name,
            "loss": details(risk.loss),
            "parameters": {name: list(p.shape) for name, p in risk.params.items()},
            "values of parameters": values,
            "values of other parameters and buffers": others,
            "precision": f"{risk.dtype} on {risk.device.type}",
        }
        if blocks is not None:
            self.belongs_to["blocks of a pass"] = list(blocks)
        self._start()

    def _name_of(self, rank: int) -> str:
        """Return the name of a rank's file."""
        return f"{self.path.name}.rank-{rank}-of-{self.ranks.size}"

    def _start(self) -> None:
        """Forget all batches: a computation may start again, with vectors sent back one by one."""
        self._seen = SeenData()  # what is in the sums of this process
        self._in_file = -1  # how many of them the file has
        self._done = SeenData()  # what is in any file
        self._files: list[_File] = []
        self._others: list[_File] = []  # of these, those that this process adds in the end
        self._checked: dict[str, SeenData] = {}  # what this process has met of the data in each file
        self._digests: dict[int, int] = {}  # of parts of the present batch, by the index of their first datum
        self._written_at = time.monotonic()

    def resume(self, sums: Sums) -> Progress:
        """Restore what files have, if there are any. All ranks call it."""
        self._start()
        every = self.ranks.gather("checkpoints", self._listed())
        # What was written last has the most data, and replaces files that it was made from.
        found = {file.name: file for files in every for file in files}
        for file in sorted(found.values(), key=lambda file: (-file.seen.number, file.name)):
            if not file.seen.overlaps(self._done):
                self._files.append(file)
                self._done.add_all(file.seen)
        progress = Progress()
        for number, file in enumerate(self._files):
            self._checked[file.name] = SeenData()
            rank = self._reader(file, every, number)
            if rank == self.ranks.rank and file.name == self.own_path.name:
                progress = self._read(file, sums.restore)
                self._seen.add_all(file.seen)
                self._in_file = self._seen.number
            elif rank == self.ranks.rank:
                self._others.append(file)
        return progress

    def _listed(self) -> list[_File]:
        """Return what is in all files that this process sees."""
        pattern = f"{glob.escape(self.path.name)}.rank-*-of-*"
        paths = sorted(self.path.parent.glob(pattern)) if self.path.parent.is_dir() else []
        files = []
        for path in [self.path, *paths] if self.path.exists() else paths:
            header, state = storage.read(path, check_digest=False)
            with storage.valid(path):
                theirs = json.loads(header["belongs_to"])
                mine = json.loads(json.dumps(self.belongs_to))
                differs = [name for name in mine | theirs if theirs.get(name) != mine.get(name)]
                found = state["progress"]
                ranges = [(int(start), int(stop)) for start, stop in found["ranges"]]
                files.append(_File(path.name, SeenData(ranges, int(found["digest"], 16))))
            if differs:
                raise StorageError(
                    f"The checkpoint {path} belongs to another computation: {', '.join(differs)} differ.",
                    "Delete it, or choose another path.",
                )
        return files

    def _reader(self, file: _File, every: Sequence[Sequence[_File]], number: int) -> int:
        """Return the rank that takes the sums of a file: the one that it is named after, or one of those who see it."""
        seers = [rank for rank, files in enumerate(every) if file in files]
        named = [rank for rank in seers if self.ranks.are_several and file.name == self._name_of(rank)]
        return (named or seers)[0 if named else number % len(seers)]

    def _read(self, file: _File, take: Any) -> Progress:
        """Read a file, let somebody take the sums, and return what was counted."""
        path = self.path.with_name(file.name)
        _, state = storage.read(path, self._device)
        with storage.valid(path):
            take(state["uses"])
            return Progress.from_state(state["progress"])

    def rest_of(self, batch: Batch) -> list[Batch]:
        """Return the parts of a batch that are not done. What is done must be the same as before."""
        digests = digests_of(batch, self._batch_axis)
        whole = (batch.first, batch.first + len(batch.y))
        for file in self._files:
            checked = self._checked[file.name]
            for start, stop in file.seen.common(whole):
                checked.add((start, stop), sum(digests[start - batch.first : stop - batch.first]))
            if checked.number == file.seen.number and checked.digest != file.seen.digest:
                raise self._other_data(file)
        gaps = self._done.gaps(whole)
        self._digests = {start: sum(digests[start - batch.first : stop - batch.first]) for start, stop in gaps}
        return [batch] if gaps == [whole] else [self._part(batch, start, stop) for start, stop in gaps]

    def _part(self, batch: Batch, start: int, stop: int) -> Batch:
        """Return some data of a batch. What has no batch axis was the same in another batch, by the digests."""
        chosen = range(start - batch.first, stop - batch.first)
        y = batch.y[chosen.start : chosen.stop]
        x = cut(batch.x, len(batch.y), chosen, self._batch_axis)
        return batch._replace(x=x, y=y, first=start, counted=self._loss.count(y))

    def notes(self, batch: Batch, progress: Progress) -> bool:
        """Take note that a batch, or a part of it, is in the sums, and return whether these are to be written."""
        self._seen.add((batch.first, batch.first + len(batch.y)), self._digests[batch.first])
        return self._is_due(progress)

    def _other_data(self, file: _File) -> StorageError:
        return StorageError(
            f"The data differ from those that the checkpoint {self.path.with_name(file.name)} was made from.",
            "Pass the same data in the same order (if inputs have no batch axis, in the same batches), delete the "
            "checkpoint, or choose another path.",
        )

    def _is_due(self, progress: Progress) -> bool:
        """Whether enough batches or minutes have passed to write the sums."""
        batches = self.checkpoint.batches
        minutes = self.checkpoint.minutes
        minutes = 5.0 if batches is None and minutes is None else minutes
        late = minutes is not None and time.monotonic() - self._written_at >= 60 * minutes
        return late or (batches is not None and progress.batches % batches == 0)

    def close(self, progress: Progress, sums: Sums) -> None:
        """Write the final sums of this process, and add those of other files. All ranks call it.

        Raises:
            StorageError: If data that are in a file are missing, or differ.
        """
        met = self.ranks.gather("data of checkpoints", self._checked)
        for file in self._files:
            total = SeenData()
            for one in met:
                total.add_all(one[file.name])
            if total.number != file.seen.number or total.digest != file.seen.digest:
                raise self._other_data(file)
        if self._seen.number not in {self._in_file, 0}:
            self.write(progress, sums)
        for file in self._others:
            progress.add(self._read(file, sums.add))

    def write(self, progress: Progress, sums: Sums) -> None:
        """Write the sums of this process."""
        storage.write(self.own_path, *self._content(progress.state(), self._seen, sums.state()))
        self._in_file = self._seen.number
        self._written_at = time.monotonic()

    def _content(self, progress: Mapping[str, Any], seen: SeenData, uses: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return header and state of a file."""
        about = {"kind": "checkpoint", "belongs_to": self.belongs_to, "batches": progress["batches"]}
        ranges = [list(some) for some in seen.ranges]
        return about, {"progress": {**progress, "ranges": ranges, "digest": f"{seen.digest:032x}"}, "uses": uses}

    def unite(self, progress: Progress, sums: Sums) -> None:
        """Replace all files by one, after the sums of all ranks were added up. All ranks call it.

        Args:
            progress: What all ranks have counted.
            sums: Those of all ranks.
        """
        is_united = [file.name for file in self._files] == [self.path.name]
        if not self.ranks.are_several and not self._others:
            return  # this process has written the file
        mine = SeenData()
        for one in (self._seen, *(file.seen for file in self._others)):
            mine.add_all(one)
        seen = SeenData()
        for one in self.ranks.gather("data seen", mine):
            seen.add_all(one)
        with self.ranks.agreed("checkpoint"):
            if not is_united or seen.number != self._done.number:
                self._write_united(progress.state(), seen, sums)
        name = glob.escape(self.path.name)
        for pattern in (f"{name}.rank-*-of-*", f".{name}.rank-*-of-*.partial"):
            for path in self.path.parent.glob(pattern):
                with suppress(OSError):  # another rank may have deleted it
                    path.unlink()
        self.ranks.gather("deleted files", None)  # nobody goes on and looks for files before

    def _write_united(self, progress: Mapping[str, Any], seen: SeenData, sums: Sums) -> None:
        """Let rank 0 write the sums of all blocks, also of those that others own."""
        # If all ranks have all sums, those of rank 0 are enough.
        is_copy = not self._owned and self.ranks.rank > 0
        own = {name: [] if is_copy and name in _LISTS else value for name, value in sums.state().items()}
        about, state = self._content(progress, seen, joined(self.ranks, own, _LISTS, root=0))
        write_joined(self.ranks, self.path, about, state)


def details(loss: Loss) -> str:
    """Return a loss's name and a digest of all its settings."""
    hashed = hashlib.blake2b(digest_size=8)
    for name, value in sorted(vars(loss).items()):
        hashed.update(name.encode())
        if isinstance(value, Tensor):
            hashed.update(bytes_of(value))
        else:
            hashed.update((function_digest(value) if callable(value) else text_of(value)).encode())
    return f"{loss.name} ({hashed.hexdigest()})"
