"""Checkpoints: an interrupted computation resumes from sums in files, with the same results.

The file format lives in `kfs.files`. `Checkpoint` is the user's option, `Journal` writes and reads the files.

A journal writes all sums after some batches, atomically, with a description of the computation: settings, loss, values
of parameters and buffers, the ranges of examples in the sums, and a digest of these examples. If the same computation
is started again, it skips these examples. If settings, parameters or data differ, it raises an error.

`SeenData` is a set of examples: half-open ranges of indices, and a digest. Each example has a digest of its index, its
inputs and its target, and the digest of several examples is the sum of theirs. So different processes can compute it in
parts, and it does not depend on batches or ranks.

With several processes, each of them writes its own file. A file says which examples are in it, but not which process
wrote it. So any number of processes can continue. Each one resumes from the file with its own name, if there is one.
Each other file is added at the end, by one of the processes that can read it. When the sums of all ranks have been
added up, rank 0 writes them to one file, which replaces all others.
"""

import glob
import hashlib
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from inspect import getclosurevars
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

from kfs import files
from kfs.distributed import Ranks
from kfs.distributed.collectives import joined, write_joined
from kfs.errors import LostRankError, StorageError
from kfs.factors.accumulate.statistic import Statistic
from kfs.factors.audit import Audit
from kfs.factors.settings import Settings
from kfs.losses import Loss
from kfs.problem.data import Batch, axis_to_cut, cut
from kfs.problem.risk import EmpiricalRisk
from kfs.runtime.nested import plain, tensors_in
from kfs.runtime.sync import number

Range = tuple[int, int]
_MODULUS = 2**128


@dataclass
class SeenData:
    """A set of examples, by their indices.

    Attributes:
        ranges: Half-open ranges of indices, sorted, with gaps between them.
        digest: The sum of the digests of all examples.

    Example:
        >>> seen = SeenData()
        >>> seen.add((0, 4), 1)
        >>> seen.add((6, 8), 2)
        >>> seen.add((4, 5), 3)
        >>> seen.ranges, seen.number, seen.gaps((3, 9)), seen.common((3, 9))
        ([(0, 5), (6, 8)], 7, [(5, 6), (8, 9)], [(3, 5), (6, 8)])
    """

    ranges: list[Range] = field(default_factory=list)
    digest: int = 0

    @property
    def number(self) -> int:
        """Number of examples."""
        return sum(stop - start for start, stop in self.ranges)

    def add(self, some: Range, digest: int) -> None:
        """Add a range of examples that are not in the set."""
        self.digest = (self.digest + digest) % _MODULUS
        ranges: list[Range] = []
        for start, stop in sorted([*self.ranges, some]):
            if ranges and ranges[-1][1] == start:
                ranges[-1] = ranges[-1][0], stop
            else:
                ranges.append((start, stop))
        self.ranges = ranges

    def add_all(self, other: "SeenData") -> None:
        """Add all examples of another set."""
        for some in other.ranges:
            self.add(some, 0)
        self.digest = (self.digest + other.digest) % _MODULUS

    def common(self, some: Range) -> list[Range]:
        """Return the parts of a range that are in the set."""
        found = [(max(start, some[0]), min(stop, some[1])) for start, stop in self.ranges]
        return [(start, stop) for start, stop in found if start < stop]

    def gaps(self, some: Range) -> list[Range]:
        """Return the parts of a range that are not in the set."""
        edges = [some[0], *(edge for common in self.common(some) for edge in common), some[1]]
        pairs = zip(edges[::2], edges[1::2], strict=True)
        return [(start, stop) for start, stop in pairs if start < stop]

    def overlaps(self, other: "SeenData") -> bool:
        """Whether some example is in both sets."""
        return any(self.common(some) for some in other.ranges)


def digests_of(batch: Batch, batch_axis: int | None) -> list[int]:
    """Return a digest for each example of a batch.

    An input without a batch axis counts for every example: it must be the same in other batches of the same data.
    """
    number = len(batch.y)
    shared = hashlib.blake2b(text_of(plain(batch.x)).encode(), digest_size=32)
    rows: list[Any] = [_bytes_by_datum(batch.y, 0)]
    for t in tensors_in(batch.x):
        axis = axis_to_cut(t.shape, number, batch_axis)
        if axis is None:
            shared.update(bytes_of(t))
        else:
            rows.append(_bytes_by_datum(t, axis))
    digests = []
    for place in range(number):
        hashed = hashlib.blake2b(shared.digest(), digest_size=16)
        hashed.update((batch.first + place).to_bytes(8, "little"))
        for row in rows:
            hashed.update(row[place])
        digests.append(int.from_bytes(hashed.digest(), "little"))
    return digests


def digest(tensors: Iterable[Tensor]) -> str:
    """Return a digest of the values of tensors."""
    hashed = hashlib.blake2b(digest_size=32)
    for t in tensors:
        hashed.update(bytes_of(t))
    return hashed.hexdigest()


def bytes_of(t: Tensor) -> Any:
    """Return the values of a tensor as bytes."""
    return t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _bytes_by_datum(t: Tensor, axis: int) -> Any:
    """Return the values of a tensor as bytes, `[batch, bytes]`."""
    return bytes_of(t.movedim(axis, 0)).reshape(t.shape[axis], -1)


def text_of(value: object) -> str:
    """Return the `repr` of an object without its address in memory."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def function_digest(value: object) -> str:
    """Return a digest of a function, or of an object that contains functions."""
    hashed = hashlib.blake2b(digest_size=8)
    for part in _content(value, None, {}):
        hashed.update(part)
    return hashed.hexdigest()


def _content(value: object, home: str | None, seen: dict[int, object]) -> Iterator[Any]:
    """Generate bytes that identify a value.

    Args:
        value: A function, or a value that a function uses.
        home: The module of the function that uses it. Functions of other modules are identified by name alone.
        seen: Visited objects by address, because functions may use themselves.
    """
    if home is None and isinstance(value, FunctionType):
        home = value.__module__
    parts = _parts(value, home)
    if isinstance(value, Tensor):
        yield text_of((value.shape, value.dtype)).encode()
        yield bytes_of(value)
    elif parts is None:
        yield text_of(value).encode()
    elif id(value) not in seen:
        seen[id(value)] = value  # kept alive, so that its address is not reused
        yield f"{type(value).__qualname__} of {len(parts)}".encode()
        for part in parts:
            yield from _content(part, home, seen)


def _parts(value: object, home: str | None) -> list[object] | None:
    """Return the parts of a value; `None` if its text identifies it."""
    if isinstance(value, Mapping):
        return [part for pair in value.items() for part in pair]
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, CodeType):
        return [value.co_code, value.co_names, *value.co_consts]
    if isinstance(value, torch.nn.Module):
        return [text_of(value), value.state_dict()]
    return _parts_of_function(value, home) if callable(value) else None


def _parts_of_function(value: Callable[..., Any], home: str | None) -> list[object] | None:
    """Return the code and the values that a function uses; `None` if it is from another module."""
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, FunctionType) and value.__module__ == home:
        used = getclosurevars(value)
        named = {name: one for name, one in used.globals.items() if not isinstance(one, ModuleType)}
        return [value.__code__, value.__defaults__, value.__kwdefaults__, dict(used.nonlocals), named]
    # An object of a class with a `__call__` method in Python.
    call = type(value).__call__
    return [call, vars(value)] if isinstance(call, FunctionType) else None


@dataclass(frozen=True)
class Checkpoint:
    """Where and how often to write intermediate results.

    Attributes:
        path: The file. `EKFAC` writes a second one, with `.eigenvalues` appended to its name.
        batches: Write after every this many batches.
        minutes: Write after the first batch that ends at least this many minutes after the last write. If neither is
            given, five minutes.

    Example:
        >>> Checkpoint("run.kfac", batches=100)
        Checkpoint(path='run.kfac', batches=100, minutes=None)
    """

    path: str | Path
    batches: int | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        """Raise for numbers that are not positive."""
        for name in ("batches", "minutes"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise StorageError(f"{name} is {value!r}.", "Use a positive number.")


@contextmanager
def naming(checkpoint: Checkpoint | None) -> Iterator[None]:
    """Add the checkpoint to continue from to errors about lost processes, in this context."""
    try:
        yield
    except LostRankError as error:
        if checkpoint is None:
            raise
        again = "Start the program again, with any number of processes: it continues from the checkpoint"
        raise LostRankError(error.cause, f"{again} {checkpoint.path}.") from error


@dataclass
class Progress:
    """The counts and findings of a pass over the data.

    Attributes:
        batches: Number of batches.
        num_data: Number of examples.
        count: The divisor of a mean over the targets, as of the last call of `read_counts`.
        counted: The increase of `count` since then; a tensor if it is on a device.
        unexplained: `(parameter, why)` of uses that no rule covers.
        reached: Parameters that predictions depend on.
        audit: The report of the audit.
    """

    batches: int = 0
    num_data: int = 0
    count: float = 0.0
    unexplained: set[tuple[str, str]] = field(default_factory=set)
    audit: Audit | None = None
    counted: float | Tensor = 0
    reached: set[str] = field(default_factory=set)

    def read_counts(self) -> None:
        """Add the pending count, which may be on a device, to `count`."""
        self.count += number(self.counted)
        self.counted = 0

    def add(self, other: "Progress") -> None:
        """Add the counts and findings of other data."""
        self.batches += other.batches
        self.num_data += other.num_data
        self.count += other.count
        self.unexplained |= other.unexplained
        self.reached |= other.reached
        both = [audit for audit in (self.audit, other.audit) if audit is not None]  # ranks without data have none
        self.audit = reduce(Audit.merged, both) if both else None

    def add_up(self, ranks: Ranks) -> None:
        """Replace all counts by the totals over ranks, after the last batch."""
        total = Progress()
        for one in ranks.gather("progress", replace(self, counted=0)):
            total.add(one)
        vars(self).update(vars(total))

    def state(self) -> dict[str, Any]:
        """Return the state to store in a file."""
        self.read_counts()
        return {
            "batches": self.batches,
            "num_data": self.num_data,
            "count": self.count,
            "unexplained": sorted(self.unexplained),
            "reached": sorted(self.reached),
        }

    @classmethod
    def from_state(cls, state: Any) -> "Progress":
        """Return the object from its state."""
        unexplained = {(str(name), str(why)) for name, why in state["unexplained"]}
        reached = set(map(str, state["reached"]))
        counts = int(state["batches"]), int(state["num_data"]), float(state["count"])
        return cls(*counts, unexplained, reached=reached)


# Items in the state of sums that are lists with one element per block.
_LISTS = ("blocks", "totals")


class Journal:
    """Keeps the sums of a pass over the data in files.

    `stage` is the name of the pass, `"factors"` or `"eigenvalues"`, with a number if there are several of them. If
    sums refer to eigenvectors, `basis` has a digest of those of each block. `blocks` are the names of the blocks of
    the pass; by default, all.
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
        self.own_path = path.with_name(self._name_of(self.ranks.rank)) if self.ranks.are_several else self.path
        self.checkpoint = checkpoint
        self._loss = risk.loss
        self._batch_axis = settings.batch_axis
        self._owned = settings.placement == "owner"
        self._device = str(risk.device)
        module = risk.model if isinstance(risk.model, torch.nn.Module) else torch.nn.Module()
        name = getattr(risk.model, "__qualname__", type(risk.model).__name__)
        with risk.untouched():  # with unsharded parameters
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
        """Reset the journal: a computation may start again, with vectors sent back one by one."""
        self._seen = SeenData()  # in the sums of this process
        self._in_file = -1  # number of examples in this process's file
        self._done = SeenData()  # in any file
        self._files: dict[str, SeenData] = {}  # the examples in each file, by its name
        self._others: list[str] = []  # names of the files that this process adds in the end
        self._checked: dict[str, SeenData] = {}  # the examples of each file that this process has met
        self._digests: dict[int, int] = {}  # of parts of the current batch, by the index of their first example
        self._written_at = time.monotonic()

    def resume(self, sums: Statistic) -> Progress:
        """Add the sums in this rank's file to nothing, if there is one, and return the counts. All ranks call it."""
        self._start()
        every = self.ranks.gather("checkpoints", self._listed())
        # Take files with the most examples first: a united file replaces the files that it was made from.
        found = {name: seen for listed in every for name, seen in listed.items()}
        for name, seen in sorted(found.items(), key=lambda item: (-item[1].number, item[0])):
            if not seen.overlaps(self._done):
                self._files[name] = seen
                self._done.add_all(seen)
        progress = Progress()
        for index, (name, seen) in enumerate(self._files.items()):
            self._checked[name] = SeenData()
            # The rank that wrote a file loads it, if that is here; otherwise any rank that can read it.
            readers = [rank for rank, listed in enumerate(every) if listed.get(name) == seen]
            writers = [rank for rank in readers if self.ranks.are_several and name == self._name_of(rank)]
            if self.ranks.rank != (writers[0] if writers else readers[index % len(readers)]):
                continue
            if name == self.own_path.name:
                progress = self._read(name, sums)
                self._seen.add_all(seen)
                self._in_file = self._seen.number
            else:
                self._others.append(name)
        return progress

    def _listed(self) -> dict[str, SeenData]:
        """Return the examples in each file that this process can read, by name."""
        pattern = f"{glob.escape(self.path.name)}.rank-*-of-*"
        paths = sorted(self.path.parent.glob(pattern)) if self.path.parent.is_dir() else []
        listed = {}
        for path in [self.path, *paths] if self.path.exists() else paths:
            header, state = files.read(path, check_digest=False)
            with files.require_valid(path):
                theirs = json.loads(header["belongs_to"])
                mine = json.loads(json.dumps(self.belongs_to))
                differs = [name for name in mine | theirs if theirs.get(name) != mine.get(name)]
                found = state["progress"]
                ranges = [(int(start), int(stop)) for start, stop in found["ranges"]]
                listed[path.name] = SeenData(ranges, int(found["digest"], 16))
            if differs:
                raise StorageError(
                    f"The checkpoint {path} belongs to another computation: {', '.join(differs)} differ.",
                    "Delete it, or choose another path.",
                )
        return listed

    def _read(self, name: str, sums: Statistic) -> Progress:
        """Add the sums in a file, and return its counts."""
        path = self.path.with_name(name)
        _, state = files.read(path, self._device)
        with files.require_valid(path):
            sums.add(state["uses"])
            return Progress.from_state(state["progress"])

    def rest_of(self, batch: Batch) -> list[Batch]:
        """Return the parts of a batch that are in no file, and check that the other parts are unchanged."""
        # Check the digests of examples that are in files, once all examples of a file were met.
        digests = digests_of(batch, self._batch_axis)
        whole = (batch.first, batch.first + len(batch.y))
        for name, seen in self._files.items():
            checked = self._checked[name]
            for start, stop in seen.common(whole):
                checked.add((start, stop), sum(digests[start - batch.first : stop - batch.first]))
            if checked.number == seen.number and checked.digest != seen.digest:
                raise self._other_data(name)
        # Only examples in no file are left to do.
        gaps = self._done.gaps(whole)
        self._digests = {start: sum(digests[start - batch.first : stop - batch.first]) for start, stop in gaps}
        return [batch] if gaps == [whole] else [self._part(batch, start, stop) for start, stop in gaps]

    def _part(self, batch: Batch, start: int, stop: int) -> Batch:
        """Return some examples of a batch. Inputs without a batch axis are the same, as the digests show."""
        chosen = range(start - batch.first, stop - batch.first)
        y = batch.y[chosen.start : chosen.stop]
        x = cut(batch.x, len(batch.y), chosen, self._batch_axis)
        return batch._replace(x=x, y=y, first=start, counted=self._loss.count(y))

    def notes(self, batch: Batch, progress: Progress) -> bool:
        """Record that a batch, or a part of it, is in the sums, and return whether to write them now."""
        self._seen.add((batch.first, batch.first + len(batch.y)), self._digests[batch.first])
        batches, minutes = self.checkpoint.batches, self.checkpoint.minutes
        minutes = 5.0 if batches is None and minutes is None else minutes
        late = minutes is not None and time.monotonic() - self._written_at >= 60 * minutes
        return late or (batches is not None and progress.batches % batches == 0)

    def _other_data(self, name: str) -> StorageError:
        return StorageError(
            f"The data differ from those that the checkpoint {self.path.with_name(name)} was made from.",
            "Pass the same data in the same order (if inputs have no batch axis, in the same batches), delete the "
            "checkpoint, or choose another path.",
        )

    def close(self, progress: Progress, sums: Statistic) -> None:
        """Write the final sums of this process, and add those of other files. All ranks call it.

        Raises:
            StorageError: If examples in a file are missing from the data, or differ.
        """
        met = self.ranks.gather("data of checkpoints", self._checked)
        for name, seen in self._files.items():
            total = SeenData()
            for one in met:
                total.add_all(one[name])
            if total != seen:
                raise self._other_data(name)
        if self._seen.number not in {self._in_file, 0}:
            self.write(progress, sums)
        for name in self._others:
            progress.add(self._read(name, sums))

    def write(self, progress: Progress, sums: Statistic) -> None:
        """Write the sums of this process."""
        files.write(self.own_path, *self._content(progress.state(), self._seen, sums.state()))
        self._in_file = self._seen.number
        self._written_at = time.monotonic()

    def _content(self, progress: Mapping[str, Any], seen: SeenData, uses: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the header and the state for a file."""
        about = {"kind": "checkpoint", "belongs_to": self.belongs_to, "batches": progress["batches"]}
        ranges = [list(some) for some in seen.ranges]
        return about, {"progress": {**progress, "ranges": ranges, "digest": f"{seen.digest:032x}"}, "uses": uses}

    def unite(self, progress: Progress, sums: Statistic) -> None:
        """Replace all files by a single one, after the sums of all ranks were added up. All ranks call it.

        Args:
            progress: The totals over all ranks.
            sums: The sums over all ranks.
        """
        is_united = [*self._files] == [self.path.name]
        if not self.ranks.are_several and not self._others:
            return  # this process has already written the file
        # Which examples are in the sums of all ranks?
        mine = SeenData()
        for one in (self._seen, *map(self._files.__getitem__, self._others)):
            mine.add_all(one)
        seen = SeenData()
        for one in self.ranks.gather("data seen", mine):
            seen.add_all(one)
        with self.ranks.agreed("checkpoint"):
            if not is_united or seen.number != self._done.number:
                self._write_united(progress.state(), seen, sums)
        # Delete the files of single ranks.
        name = glob.escape(self.path.name)
        for pattern in (f"{name}.rank-*-of-*", f".{name}.rank-*-of-*.partial"):
            for path in self.path.parent.glob(pattern):
                with suppress(OSError):  # another rank may have deleted it
                    path.unlink()
        self.ranks.gather("deleted files", None)  # no rank continues before, because it may look for files

    def _write_united(self, progress: Mapping[str, Any], seen: SeenData, sums: Statistic) -> None:
        """Write the sums of all blocks on rank 0, including blocks that other ranks own."""
        # If all ranks have all sums, those of rank 0 are enough.
        is_copy = not self._owned and self.ranks.rank > 0
        own = {name: [] if is_copy and name in _LISTS else value for name, value in sums.state().items()}
        about, state = self._content(progress, seen, joined(self.ranks, own, _LISTS, root=0))
        write_joined(self.ranks, self.path, about, state)


def details(loss: Loss) -> str:
    """Return the name of a loss with a digest of all its settings."""
    hashed = hashlib.blake2b(digest_size=8)
    for name, value in sorted(vars(loss).items()):
        hashed.update(name.encode())
        if isinstance(value, Tensor):
            hashed.update(bytes_of(value))
        else:
            hashed.update((function_digest(value) if callable(value) else text_of(value)).encode())
    return f"{loss.name} ({hashed.hexdigest()})"
