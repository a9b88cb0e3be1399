"""The index: gradients of training data that are computed once and stored in files or in memory, for many queries.

The forms of stored gradients live in `kfs.influence.stored`, the computation of scores in `kfs.influence.scoring`.

A `Folder` contains `index.safetensors`, which says what the index belongs to and whether it is complete, and one file
for every shard: the gradients of some consecutive batches. All files are in the safetensors format, with a digest; see
`kfs.files`. They are mapped into memory when they are read.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import Tensor

from kfs import files
from kfs.display.describe import Described, Description, Table, counted, number, readable_size, times
from kfs.display.suggestions import ByName
from kfs.distributed import Ranks
from kfs.errors import ModelError, StorageError
from kfs.factors.blocks import BlockDiagonal, Damping, Method, Structure
from kfs.factors.checkpoint import details, digest, function_digest
from kfs.factors.per_example import BlockGradients, GradientBatch, per_datum
from kfs.influence.scoring import (
    Inverse,
    Normalize,
    Request,
    Stream,
    Top,
    all_scores,
    best,
    check_bytes,
    check_choice,
)
from kfs.influence.stored import Form, Storage, Stored, choose_form, leading_coordinates, restored
from kfs.influence.ways import Chosen, choose, self_products
from kfs.losses.quantities import Quantity
from kfs.problem.data import Batch, fingerprint
from kfs.problem.risk import EmpiricalRisk
from kfs.runtime.nested import tensors_in

# Entries of an identity with readable values, which error messages show. For all other entries, messages only say that
# they differ.
_READABLE = ("damping", "method", "of_train", "rank", "compression", "dtype", "number of examples", "precision")


def weights(risk: EmpiricalRisk) -> dict[str, str]:
    """Return digests of the risk's parameters, and of all parameters and buffers of the model."""
    module = risk.model if isinstance(risk.model, torch.nn.Module) else torch.nn.Module()
    with risk.untouched():  # sharded parameters are gathered in this context
        return {
            "values of parameters": digest(risk.params.values()),
            "values of other parameters and buffers": digest([*module.parameters(), *module.buffers()]),
        }


def differences(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> list[str]:
    """Return the names of entries that differ between two identities, with both values if they are readable."""
    found = []
    for name in mine:
        if theirs.get(name) != mine[name]:
            both = f" ({theirs.get(name)} there, {mine[name]} here)" if name in _READABLE else ""
            found.append(f"{name}{both}")
    return found


def _named(quantity: Quantity) -> str:
    """Return the name of a quantity. The name of a function has a digest of its code and of the values that it uses."""
    if isinstance(quantity, str):
        return quantity
    name = getattr(quantity, "__qualname__", type(quantity).__name__)
    return f"{name} ({function_digest(quantity)})"


class InMemory:
    """Keeps shards in memory."""

    def __init__(self) -> None:
        self._shards: list[dict[str, Any]] = []

    def open(self, belongs_to: dict[str, Any]) -> None:
        """Return `None`: nothing is stored before the index is built."""

    def written(self) -> int:
        """Return the number of shards of this rank."""
        return len(self._shards)

    def save(self, state: dict[str, Any]) -> None:
        """Do nothing: the caller keeps the state."""

    def write(self, place: int, state: dict[str, Any]) -> None:
        """Keep a shard."""
        self._shards.append(state)

    def mine(self, counts: Sequence[int], ranks: Ranks) -> list[tuple[int, int]]:
        """Return the shards that this rank reads: those that it has computed."""
        return [(place, ranks.rank) for place in range(counts[ranks.rank])]

    def read(self, place: int, rank: int = 0) -> dict[str, Any]:
        """Return a shard."""
        return self._shards[place]

    def size(self) -> int:
        """Count the bytes of all tensors."""
        return sum(t.nbytes for t in tensors_in(self._shards))


class Folder:
    """Keeps the state and the shards of an index in files.

    Each rank writes the shards of its own data. The examples of all shards, by rank and then by place, are in order.

    Args:
        path: The folder. It is created if it does not exist.
        rank: The rank that writes.

    Raises:
        StorageError: If the folder cannot be created.
    """

    def __init__(self, path: str | Path, rank: int = 0) -> None:
        self.path = Path(path)
        self.rank = rank
        self._belongs_to: dict[str, Any] = {}
        # Files with a digest that was checked, with their size and modification time.
        self._checked: dict[Path, tuple[int, int]] = {}
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"The folder {path} cannot be created: {error}.",
                "An index is a folder. Choose a new folder, or a folder with an index.",
            ) from error

    def open(self, belongs_to: dict[str, Any]) -> dict[str, Any] | None:
        """Return the state, with this rank's number of shards; raise `StorageError` if it is of something else."""
        self._belongs_to = json.loads(json.dumps(belongs_to))  # the types that a file has
        if not self._main.exists():
            return None
        state: dict[str, Any]
        header, state = files.read(self._main)
        with files.require_valid(self._main):
            differ = differences(json.loads(header["belongs_to"]), self._belongs_to)
            counts = [int(number) for number in state["shards"]]
        if differ:
            raise StorageError(
                f"The index in {self.path} was made for something else: {', '.join(differ)} differ.",
                "Use the same model, curvature, settings and data, delete the folder, or choose another one. If the "
                "curvature is computed again, its last digits may differ: save it with K.save(...).",
            )
        if state["complete"]:
            for rank, most in enumerate(counts):
                self._count(rank, most)
        return state

    def save(self, state: dict[str, Any]) -> None:
        """Write the state of the index, and its identity, on rank 0."""
        if self.rank == 0:
            files.write(self._main, {"kind": "index", "belongs_to": self._belongs_to}, state)

    def written(self) -> int:
        """Return the number of consecutive shards of this rank."""
        return self._count(self.rank)

    def mine(self, counts: Sequence[int], ranks: Ranks) -> list[tuple[int, int]]:
        """Return the shards that this rank reads: an equal share of all, in the order of examples."""
        every = [(place, rank) for rank, number in enumerate(counts) for place in range(number)]
        return every[ranks.rank * len(every) // ranks.size : (ranks.rank + 1) * len(every) // ranks.size]

    def _count(self, rank: int, most: int | None = None) -> int:
        """Return the number of consecutive shards; raise `StorageError` if a complete index has fewer than `most`."""
        number = 0
        while number != most and self._file(number, rank).exists():
            number += 1
        if most is not None and number < most:
            raise StorageError(
                f"{self._file(number, rank)} is missing, and the index has {most} such files.",
                "Use another copy of the folder, or delete it and create the index again.",
            )
        return number

    def write(self, place: int, state: dict[str, Any]) -> None:
        """Write a shard."""
        file = self._file(place, self.rank)
        files.write(file, {"kind": "shard of an index", "start": state["start"], "stop": state["stop"]}, state)
        self._checked[file] = _version(file)

    def read(self, place: int, rank: int = 0) -> Any:
        """Map a shard into memory; raise `StorageError` if it is missing or damaged. A digest is checked once."""
        file = self._file(place, rank)
        known = file.exists() and self._checked.get(file) == _version(file)
        _, state = files.read(file, check_digest=not known)
        self._checked[file] = _version(file)
        return state

    def size(self) -> int:
        """Count the bytes of all files of the index."""
        return sum(file.stat().st_size for file in self.path.glob("*.safetensors"))

    @property
    def _main(self) -> Path:
        return self.path / "index.safetensors"

    def _file(self, place: int, rank: int) -> Path:
        return self.path / f"{f'rank-{rank:03}-' if rank else ''}shard-{place:06}.safetensors"


def _version(file: Path) -> tuple[int, int]:
    """Return size and modification time of a file, to detect changes."""
    found = file.stat()
    return found.st_size, found.st_mtime_ns


# Number of examples per batch for which compressed scores are compared with exact ones.
_SAMPLE = 16


@dataclass(frozen=True)
class IndexSettings:
    """The settings of an index. An existing index of other settings is not used, except for `shard_bytes`.

    Attributes:
        K: The curvature.
        inverse: The damped inverse of the curvature.
        damping: The damping of the inverse.
        method: How the damping was added.
        train: The training data, with model and loss.
        of_train: The quantity that is differentiated.
        storage: How gradients are stored.
        shard_bytes: Write a shard whenever this many bytes have been computed.
    """

    K: BlockDiagonal
    inverse: BlockDiagonal
    damping: Damping
    method: Method
    train: EmpiricalRisk
    of_train: Quantity
    storage: Storage
    shard_bytes: int

    def identity(self) -> dict[str, Any]:
        """Return the identity of an index: a description of the model, the curvature, the data and the settings."""
        train, storage = self.train, self.storage
        name = getattr(train.model, "__qualname__", type(train.model).__name__)
        return {
            "model": repr(train.model) if isinstance(train.model, torch.nn.Module) else name,
            "loss": details(train.loss),
            "parameters": {name: list(p.shape) for name, p in train.params.items()},
            "curvature": self._curvature(),
            "of_train": _named(self.of_train),
            "number of examples": train.num_data,
            "precision": f"{train.dtype} on {train.device.type}",
            "damping": str(self.damping),
            "method": self.method,
            "rank": str(storage.rank),
            # Without a rank, nothing is compressed, and `compression` has no effect.
            "compression": str(None if storage.rank is None else storage.compression),
            "dtype": str(storage.dtype),
            **weights(train),
        }

    def _curvature(self) -> dict[str, str]:
        """Return a digest of each block of the curvature, by name."""
        own = [block for stack in self.K.own_stacks for block in stack.blocks()]
        digests = [(layout.name, digest(tensors_in(structure.state()))) for layout, structure in own]
        return dict(self.K.distribution.union("digests", digests))


@dataclass
class Builder:
    """Computes the gradients of an index, and writes them to shards.

    Attributes:
        settings: The settings of the index.
        shards: The storage for gradients.
        stored: How each block is stored; empty before the first batch.
    """

    settings: IndexSettings
    shards: InMemory | Folder
    stored: dict[str, Stored] = field(default_factory=dict)

    @cached_property
    def inverse(self) -> Inverse:
        """The inverse, block by block."""
        return Inverse(self.settings.inverse, self.settings.train)

    def run(self, belongs_to: dict[str, Any]) -> dict[str, Any]:
        """Compute the gradients of all batches that no shard has, and return the state of the complete index.

        Raises:
            StorageError: If the storage has an index with another identity, or a damaged one.
        """
        train = self.settings.train
        ranks = train.ranks
        found = self.shards.open(belongs_to)
        known = _CompletedBatches([], ranks)
        if found is not None:
            number = len(found["shards"])
            with files.require_valid("The index"):
                self.stored = self._with_forms(found["forms"], found["coordinates"])
            # Read shards once, to detect damage now rather than in a later query.
            if found["complete"]:
                shards = [self.shards.read(*shard) for shard in self.shards.mine(found["shards"], ranks)]
                _CompletedBatches(shards, ranks, complete=True).check_all(train)
                return found
            if number != ranks.size:
                raise StorageError(
                    f"The index was begun by {counted(number, 'process')}, and is not complete.",
                    f"Continue in {number}, delete the folder, or choose another one.",
                )
            shards = [self.shards.read(place, ranks.rank) for place in range(self.shards.written())]
            known = _CompletedBatches(shards, ranks)
        self._fill(known)
        both = ranks.gather("shards", (known.shards, known.errors))
        errors = [error for _, some in both for error in some]
        wrong, norm = (sum(numbers) for numbers in zip(*errors, strict=True))
        error = (wrong / norm) ** 0.5 if norm else 0.0
        state = self._state() | {"complete": True, "shards": [count for count, _ in both], "error": error}
        self.shards.save(state)
        return state

    def _fill(self, known: "_CompletedBatches") -> None:
        """Compute the gradients of all batches that no shard has, and write a shard whenever it is large enough."""
        settings = self.settings
        batches = per_datum(settings.train, settings.of_train, blocks=settings.K, skip=known.has)
        if not self.stored:
            first = next(batches, None)
            batches = batches if first is None else chain([first], batches)
            self.stored = self._with_forms(self._forms(first))
            # Write the forms before the first shard, so that an interrupted index can be continued.
            self.shards.save(self._state() | {"complete": False, "shards": [0] * settings.train.ranks.size})
        pending: list[dict[str, Any]] = []
        for batch in self.inverse.in_step(batches):
            if batch is None:
                continue
            pending.append(self._of_batch(batch, known.last_seen, known.place))
            if sum(one["bytes"] for one in pending) >= settings.shard_bytes:
                self._write(pending, known)
                pending = []
        if pending:
            self._write(pending, known)
        known.check_all_seen()

    def _forms(self, first: GradientBatch | None) -> dict[str, Form]:
        """Return the forms of all blocks, given the first batch of this rank: those of the first rank with data."""
        blocks = {} if first is None else first.blocks
        storage = self.settings.storage
        forms = {name: choose_form(structure, blocks[name], storage) for name, structure in self.inverse.of(blocks)}
        return next(found for found in self.settings.train.ranks.gather("forms", forms) if found)

    def _write(self, pending: list[dict[str, Any]], known: "_CompletedBatches") -> None:
        errors = [one.pop("error") for one in pending]
        error = [sum(parts) for parts in zip(*errors, strict=True)]
        state = {"start": pending[0]["start"], "stop": pending[-1]["stop"], "error": error, "batches": pending}
        self.shards.write(known.shards, state)
        known.shards += 1
        known.errors.append(error)

    def _of_batch(self, batch: GradientBatch, seen: list[str], place: int) -> dict[str, Any]:
        """Return the entry of a shard for one batch."""
        # Measure the error in the batches 0, 1, 2, 4, 8, ...
        sample = batch.some(slice(0, _SAMPLE)) if place & (place - 1) == 0 else None
        blocks = {}
        own = []
        scores: list[tuple[Tensor, Tensor]] = []
        for name, structure in self.inverse.of(batch.blocks):
            blocks[name] = self.stored[name].state(batch.blocks[name], self.settings.storage.dtype, structure)
            own.append(self_products(batch.blocks[name], structure))
            if sample is not None:
                scores.append(self._compare(sample.blocks[name], structure))
        return {
            "start": batch.start,
            "stop": batch.stop,
            "identity": seen,
            "blocks": blocks,
            "own": torch.stack(own).sum(0),
            "bytes": sum(t.nbytes for t in tensors_in(blocks)),
            "error": _squared_errors(scores),
        }

    def _compare(self, block: BlockGradients, structure: Structure) -> tuple[Tensor, Tensor]:
        """Return exact scores between some examples for one block, and those of stored gradients."""
        num_data = block.num_data
        way = choose(structure, block, num_data, num_data)
        full = way.of_queries(block, structure).inner(way.of_train(block, structure))
        # Store the gradients and restore them, as an index does.
        stored = self.stored[block.layout.name]
        state = stored.state(block, self.settings.storage.dtype, structure)
        again = restored(state, block.layout, num_data, block.dtype, block.device)
        kept = stored.way(block, structure, num_data, num_data, None)
        return full, kept.of_queries(block, structure).inner(kept.of_train(again, structure))

    def _with_forms(
        self, forms: Mapping[str, Form], coordinates: Mapping[str, Tensor] | None = None
    ) -> dict[str, Stored]:
        """Return how blocks are stored, given their forms. Coordinates are chosen if they are not given."""
        rank = self.settings.storage.rank or 0
        coordinates = dict(coordinates or {})
        projected = {name for name, form in forms.items() if form == "projected"} - coordinates.keys()
        for name, structure in self.inverse.of(projected) if "projected" in forms.values() else ():
            coordinates[name] = leading_coordinates(structure, rank)
        device = self.settings.train.device
        kept = {name: found.to(device) for name, found in coordinates.items()}
        return {name: Stored(form, rank, kept.get(name)) for name, form in forms.items()}

    def _state(self) -> dict[str, Any]:
        """Return the forms and coordinates of all blocks, for a file."""
        forms = {name: one.form for name, one in self.stored.items()}
        kept = {name: one.coordinates for name, one in self.stored.items() if one.coordinates is not None}
        return {"forms": forms, "coordinates": kept}


def _squared_errors(scores: Sequence[tuple[Tensor, Tensor]]) -> list[float]:
    """Return the squared norms of score errors and of exact scores between examples, given both for each block."""
    if not scores:
        return [0.0, 0.0]
    full: Tensor | float = 0.0
    found: Tensor | float = 0.0
    for exact, stored in scores:
        full = full + exact
        found = found + stored
    assert isinstance(full, Tensor)  # noqa: S101 (there are blocks)
    # Self-scores are stored without compression. Leave them out if there are other scores.
    if len(full) > 1:
        others = ~torch.eye(len(full), dtype=torch.bool, device=full.device)
        full, found = full[others], found[others]  # type: ignore[index]
    return [float((found - full).square().sum()), float(full.square().sum())]


class _CompletedBatches:
    """The batches in the shards of an index.

    Args:
        shards: The shards of this rank, as read from the storage.
        ranks: The ranks that share the data.
        complete: Whether the index is complete. Then the shards of all ranks count, which may have been other ones.

    Attributes:
        shards: Number of shards.
        errors: Squared norms of score errors and of scores, for each shard.
        place: Index of the last batch passed to `has`.
        last_seen: Identity of this batch.
    """

    def __init__(self, shards: list[Any], ranks: Ranks, complete: bool = False) -> None:
        with files.require_valid("The index"):
            self.shards = len(shards)
            self.errors = [[float(number) for number in shard["error"]] for shard in shards]
            batches = [(int(one["start"]), list(one["identity"])) for shard in shards for one in shard["batches"]]
        if complete:
            batches = [batch for some in ranks.gather("batches of the index", batches) for batch in some]
        self._starts = [start for start, _ in batches]
        self._identities = [identity for _, identity in batches]
        self._ranks = ranks
        self._offset = 0  # index of the first batch of this rank
        self.place = -1
        self.last_seen: list[str] = []

    def has(self, place: int, batch: Batch) -> bool:
        """Return whether a shard has the batch with this index; raise `StorageError` if it has another one."""
        if place == 0 and batch.first in self._starts:
            self._offset = self._starts.index(batch.first)
        self.place = place
        # The digest of all numbers costs little compared to the forward and backward pass of the batch.
        found = fingerprint(batch.x, batch.y, complete=True)
        self.last_seen = [*found.tensors, found.digest]
        known = self._offset + place < len(self._identities)
        if known and self._identities[self._offset + place] != self.last_seen:
            raise _other_data(f"batch {place} is another one")
        return known

    def check_all(self, train: EmpiricalRisk) -> None:
        """Raise `StorageError` unless all batches are those of a complete index. The model does not run."""
        for place, batch in enumerate(train.batches("comparing data with the index")):
            if not self.has(place, batch):
                raise _other_data("there are more batches now")
        if sum(self._ranks.gather("batches", self.place + 1)) < len(self._identities):
            raise _other_data("there are fewer batches now")

    def check_all_seen(self) -> None:
        """Raise `StorageError` if the data of this rank have fewer batches than its shards."""
        if self.place + 1 < len(self._identities):
            raise _other_data("there are fewer batches now")


def _other_data(what: str) -> StorageError:
    return StorageError(
        f"The data differ from the data that the index was made from: {what}.",
        "Pass the same data in the same batches and order, delete the folder, or choose another one.",
    )


_ROUND_OFF = 1e-5  # smaller errors are shown as "below"


class Index(Described):
    """The gradients of all training data, stored in files or in memory. `Influence.index` creates an index.

    Attributes:
        train: The training data.
        error: Relative error of scores due to compression and the dtype, measured between some training data of some
            batches. It is the root of the sum of squared errors over the sum of squared scores. Self-scores are exact.
        forms: How the gradients of each block are stored, by name; see `kfs.influence.stored`.
        nbytes: Number of bytes of all gradients.
        path: The folder; `None` if the gradients are in memory.
    """

    def __init__(self, settings: IndexSettings, file: str | Path | None) -> None:
        """Compute the gradients that the folder does not have; without a folder, keep all of them in memory."""
        check_bytes("shard_bytes", settings.shard_bytes)
        train = settings.train
        Request(train, train, settings.of_train, settings.of_train).check(settings.K)
        self._settings = settings
        self.train = train
        self.path = None if file is None else Path(file)
        self._shards: InMemory | Folder = InMemory() if file is None else Folder(file, train.ranks.rank)
        # It has digests of the weights, to detect later whether the model has changed.
        self._belongs_to = settings.identity()
        builder = Builder(settings, self._shards)
        state = builder.run(self._belongs_to)
        self._stored = builder.stored
        counts = [int(number) for number in state["shards"]]
        self._count = sum(counts)
        self._mine = self._shards.mine(counts, train.ranks)
        self.error = float(state["error"])
        self.forms = ByName({name: stored.form for name, stored in self._stored.items()})
        sizes = train.ranks.gather("bytes", self._shards.size())  # of a folder, after rank 0 has written its last file
        self.nbytes = sum(sizes) if file is None else self._shards.size()

    def describe(self) -> Description:
        """Describe size, error and forms of the index."""
        K = self._settings.K
        of = f" of {K.of}" if K.of else ""
        dtype = str(self._settings.storage.dtype).removeprefix("torch.")
        where = "in memory" if self.path is None else f"in {self.path}"
        # Show a bound for small errors: the digits of round-off differ between machines.
        error = number(self.error) if self.error >= _ROUND_OFF else f"below {_ROUND_OFF}"
        fact = (
            f"{readable_size(self.nbytes)} {where}, {counted(self._count, 'shard')}, relative error of scores {error}"
        )
        layouts = {layout.name: layout for layout in K.layouts}
        rows = [(name, times(layouts[name].matrix_shape), form) for name, form in self.forms.items()]
        table = Table("blocks", ("block", "groups x d_B x d_A", "stored as"), rows)
        title = f"Index of {self.train.num_data:,} gradients{of}: {counted(len(rows), 'block')}, {dtype}"
        return Description(title, (fact,), (table,))

    @overload
    def scores(
        self,
        queries: EmpiricalRisk,
        *,
        of: Quantity = "loss",
        by: None = None,
        normalize: Normalize | None = None,
        memory: int = 2**32,
        query_rank: int | None = None,
    ) -> Tensor: ...
    @overload
    def scores(
        self,
        queries: EmpiricalRisk,
        *,
        of: Quantity = "loss",
        by: Literal["block", "layer"],
        normalize: Normalize | None = None,
        memory: int = 2**32,
        query_rank: int | None = None,
    ) -> dict[str, Tensor]: ...
    def scores(
        self,
        queries: EmpiricalRisk,
        *,
        of: Quantity = "loss",
        by: Literal["block", "layer"] | None = None,
        normalize: Normalize | None = None,
        memory: int = 2**32,
        query_rank: int | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """Compute the score of every pair of a query and a training example, as `Influence.scores` does.

        The arguments are the ones of `Influence.scores`. There are no scores by `"token"`, because the index does not
        store which rows belong to which token. All files are read once for each pass over the training data, and
        `query_rank` is for blocks that are stored as rows.

        Raises:
            ModelError: If models or parameters differ.
            StorageError: If parameters have changed since the index was made, or a file is damaged.
        """
        _check_by(by)
        request = Request(queries, self.train, of, self._settings.of_train, by, normalize, memory, query_rank)
        with self.train.ranks.agreed("scores"):
            return all_scores(self._stream(request))

    def top(
        self,
        queries: EmpiricalRisk,
        k: int = 10,
        *,
        of: Quantity = "loss",
        normalize: Normalize | None = None,
        memory: int = 2**32,
        query_rank: int | None = None,
    ) -> Top:
        """Find the most helpful and the most harmful training data of each query, as `Influence.top` does."""
        of_train = self._settings.of_train
        request = Request(
            queries, self.train, of, of_train, normalize=normalize, memory=memory, query_rank=query_rank, k=k
        )
        with self.train.ranks.agreed("top"):
            return best(self._stream(request))

    def self_scores(self) -> Tensor:
        """Return the score of every training example with itself, `[train]`, computed without compression."""
        with self.train.ranks.agreed("self-scores"):
            self._check_weights()
            shards = [self._shards.read(*shard) for shard in self._mine]
            with files.require_valid(self.path or "The index"):
                own = [batch["own"] for shard in shards for batch in shard["batches"]]
            found = self.train.ranks.gather_tensors("self-scores", {"own": torch.cat(own)} if own else {})
            return torch.cat([one["own"] for one in found if one]).to(self.train.device)

    def _stream(self, request: Request) -> "_IndexStream":
        """Check the request, and return a stream over queries and stored gradients."""
        self._check_weights()
        request.check(self._settings.K)
        return _IndexStream(self._settings, request, self._shards, self._mine, self._stored)

    def _check_weights(self) -> None:
        """Raise `StorageError` if the weights of the model have changed since the index was created."""
        differ = differences(self._belongs_to, weights(self.train))
        if differ:
            raise StorageError(
                f"The index was made with other weights: {', '.join(differ)} differ.",
                "Create a new index for the new weights, or load the old weights.",
            )


class _IndexStream(Stream):
    """A stream over queries, and over the stored gradients of training data."""

    def __init__(
        self,
        settings: IndexSettings,
        request: Request,
        shards: InMemory | Folder,
        mine: list[tuple[int, int]],
        stored: dict[str, Stored],
    ) -> None:
        super().__init__(settings.K, settings.inverse, request)
        self._shards = shards
        self._mine = mine
        self._stored = stored
        self._layouts = {layout.name: layout for layout in settings.K.layouts}

    def train(self) -> Iterator[GradientBatch]:
        """Yield the stored gradients of training data."""
        train = self.request.train
        shapes = {name: p.shape for name, p in train.params.items()}
        for place in self._mine:
            shard = self._shards.read(*place)
            found = []
            with files.require_valid("The index"):
                for batch in shard["batches"]:
                    start, stop = int(batch["start"]), int(batch["stop"])
                    blocks = {
                        name: restored(state, self._layouts[name], stop - start, train.sum_dtype, train.device)
                        for name, state in batch["blocks"].items()
                    }
                    found.append(GradientBatch(start, stop, ByName(blocks), shapes))
                    self._own[start] = batch["own"].to(train.device)
            yield from found

    def prepare(self) -> None:
        """Do nothing: self-scores are stored; they were computed before compression."""

    def way(self, name: str, block: BlockGradients, structure: Structure) -> Chosen:
        """Choose how queries are multiplied with the stored form of a block."""
        queries, train = self.request.queries.num_data, self.request.train.num_data
        return self._stored[name].way(block, structure, queries, train, self.request.query_rank)


def _check_by(by: object) -> None:
    """Raise `ModelError` if `by` is `"token"`, or not an option."""
    if by == "token":
        raise ModelError(
            "An index has no scores by token: gradients are stored as sums over tokens if that takes fewer bytes.",
            "Find training data with index.top(queries), create an EmpiricalRisk with these examples only, and pass it "
            "to Influence.scores(queries, train, by='token').",
        )
    check_choice("by", by, ("block", "layer"))
