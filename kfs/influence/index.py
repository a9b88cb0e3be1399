"""The index: gradients of training data that are computed once and stored in files or in memory, for many queries.

The forms of stored gradients live in `kfs.influence.stored`, the computation of scores in `kfs.influence.scoring`.

A `Folder` contains `index.safetensors`, which says what the index belongs to and whether it is complete, and one file
for every shard: the gradients of some consecutive batches. All files are in the safetensors format, with a digest; see
`kfs.files`. They are mapped into memory when they are read.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, overload

import torch
from torch import Tensor

from kfs import files
from kfs.display.describe import Described, Description, Table, counted, number, readable_size, times
from kfs.display.suggestions import ByName
from kfs.errors import ModelError, StorageError
from kfs.factors.blocks import BlockDiagonal, Damping, Method, Structure
from kfs.factors.checkpoint import details, digest, function_digest
from kfs.factors.per_example import BlockGradients, GradientBatch, per_datum
from kfs.influence.checks import check_choice, check_memory, check_risk
from kfs.influence.scoring import Normalize, Request, Stream, Top, all_scores, best, check_request, structures_of
from kfs.influence.stored import (
    Compression,
    Stored,
    basis_of,
    check_storage,
    choose_form,
    leading_coordinates,
    restored,
)
from kfs.influence.ways import Chosen, choose, self_products
from kfs.losses.quantities import Quantity, gradient_of
from kfs.operators.match import warn_of_other_values
from kfs.problem.data import Batch, Fingerprint, fingerprint
from kfs.problem.risk import EmpiricalRisk
from kfs.runtime.nested import tensors_in

# Entries of an identity with readable values, which error messages show. For all other entries, messages only say that
# they differ.
_READABLE = ("damping", "method", "of_train", "rank", "compression", "dtype", "number of examples", "precision")


def identity(
    K: BlockDiagonal, train: EmpiricalRisk, of_train: Quantity, settings: Mapping[str, object]
) -> dict[str, Any]:
    """Return the identity of an index: a description of the model, the curvature, the data and the settings.

    Args:
        K: The curvature.
        train: The training data, with model and loss.
        of_train: The quantity that is differentiated.
        settings: Further settings that must be the same, by name.
    """
    name = getattr(train.model, "__qualname__", type(train.model).__name__)
    return {
        "model": repr(train.model) if isinstance(train.model, torch.nn.Module) else name,
        "loss": details(train.loss),
        "parameters": {name: list(p.shape) for name, p in train.params.items()},
        "curvature": digest(t for stack in K.stacks for t in tensors_in(stack.state()["blocks"])),
        "of_train": _named(of_train),
        "number of examples": train.num_data,
        "precision": f"{train.dtype} on {train.device.type}",
        **{name: str(value) for name, value in settings.items()},
        **weights(train),
    }


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


def batch_identity(batch: Batch) -> list[str]:
    """Return the identity of a batch: shapes, and a digest of all numbers.

    The digest costs little compared to the forward and backward pass of the batch.
    """
    found: Fingerprint = fingerprint(batch.x, batch.y, complete=True)
    return [*found.tensors, found.digest]


def _named(quantity: Quantity) -> str:
    """Return the name of a quantity. The name of a function has a digest of its code and of the values that it uses."""
    if isinstance(quantity, str):
        return quantity
    name = getattr(quantity, "__qualname__", type(quantity).__name__)
    return f"{name} ({function_digest(quantity)})"


class Shards(Protocol):
    """Interface of the storage of an index and its shards."""

    def open(self, belongs_to: dict[str, Any]) -> tuple[dict[str, Any], int] | None:
        """Return the stored state and the number of shards; `None` if nothing is stored."""

    def save(self, state: dict[str, Any]) -> None:
        """Write the state of the index."""

    def write(self, place: int, state: dict[str, Any]) -> None:
        """Write a shard."""

    def read(self, place: int) -> Any:
        """Read a shard."""

    def size(self) -> int:
        """Return the number of bytes of the stored shards."""


class InMemory:
    """Keeps shards in memory."""

    def __init__(self) -> None:
        self._shards: list[dict[str, Any]] = []

    def open(self, belongs_to: dict[str, Any]) -> None:
        """Return `None`: nothing is stored before the index is built."""

    def save(self, state: dict[str, Any]) -> None:
        """Do nothing: the caller keeps the state."""

    def write(self, place: int, state: dict[str, Any]) -> None:
        """Keep a shard."""
        self._shards.append(state)

    def read(self, place: int) -> dict[str, Any]:
        """Return a shard."""
        return self._shards[place]

    def size(self) -> int:
        """Count the bytes of all tensors."""
        return sum(t.nbytes for t in tensors_in(self._shards))


class Folder:
    """Keeps the state and the shards of an index in files.

    Args:
        path: The folder. It is created if it does not exist.

    Raises:
        StorageError: If the folder cannot be created.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
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

    def open(self, belongs_to: dict[str, Any]) -> tuple[dict[str, Any], int] | None:
        """Return the state in the folder and the number of shards; `None` if the folder has no index.

        Raises:
            StorageError: If the index was made for something else, or is damaged.
        """
        self._belongs_to = json.loads(json.dumps(belongs_to))  # the types that a file has
        if not self._main.exists():
            return None
        header, state = files.read(self._main)
        with files.require_valid(self._main):
            differ = differences(json.loads(header["belongs_to"]), self._belongs_to)
            number = int(state["shards"]) if state["complete"] else None
        if differ:
            raise StorageError(
                f"The index in {self.path} was made for something else: {', '.join(differ)} differ.",
                "Use the same model, curvature, settings and data, delete the folder, or choose another one. If the "
                "curvature is computed again, its last digits may differ: save it with K.save(...).",
            )
        return state, self._count(number)

    def save(self, state: dict[str, Any]) -> None:
        """Write the state of the index, and its identity."""
        files.write(self._main, {"kind": "index", "belongs_to": self._belongs_to}, state)

    def _count(self, most: int | None) -> int:
        """Return the number of consecutive shards in the folder.

        Args:
            most: Number of shards of a complete index; `None` if the index is not complete.

        Raises:
            StorageError: If a shard of a complete index is missing.
        """
        number = 0
        while number != most and self._file(number).exists():
            number += 1
        if most is not None and number < most:
            raise StorageError(
                f"{self._file(number)} is missing, and the index has {most} such files.",
                "Use another copy of the folder, or delete it and create the index again.",
            )
        return number

    def write(self, place: int, state: dict[str, Any]) -> None:
        """Write a shard."""
        file = self._file(place)
        files.write(file, {"kind": "shard of an index", "start": state["start"], "stop": state["stop"]}, state)
        self._checked[file] = _version(file)

    def read(self, place: int) -> Any:
        """Map a shard into memory. The digest of a file is checked once.

        Raises:
            StorageError: If the shard is missing or damaged.
        """
        file = self._file(place)
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

    def _file(self, place: int) -> Path:
        return self.path / f"shard-{place:06}.safetensors"


def _version(file: Path) -> tuple[int, int]:
    """Return size and modification time of a file, to detect changes."""
    found = file.stat()
    return found.st_size, found.st_mtime_ns


# Number of examples per batch for which compressed scores are compared with exact ones.
_SAMPLE = 16


@dataclass(frozen=True)
class IndexSettings:
    """The settings of an index.

    Attributes:
        K: The curvature.
        structures: The inverse of each block, by name.
        train: The training data, with model and loss.
        of_train: The quantity that is differentiated.
        rank: Number of coordinates or singular vectors to keep; `None` for all.
        compression: Whether to keep coordinates (`"projected"`) or singular vectors (`"low rank"`).
        dtype: Dtype of the stored numbers.
        shard_bytes: Write a shard whenever this many bytes have been computed.
    """

    K: BlockDiagonal
    structures: Mapping[str, Structure]
    train: EmpiricalRisk
    of_train: Quantity
    rank: int | None
    compression: Compression
    dtype: torch.dtype
    shard_bytes: int


@dataclass
class Builder:
    """Computes the gradients of an index, and writes them to shards.

    Attributes:
        plan: The settings of the index.
        shards: The storage for gradients.
        stored: How each block is stored; empty before the first batch.
    """

    plan: IndexSettings
    shards: Shards
    stored: dict[str, Stored] = field(default_factory=dict)

    def run(self, belongs_to: dict[str, Any]) -> dict[str, Any]:
        """Compute the gradients of all batches that no shard has.

        Args:
            belongs_to: The identity of the index.

        Returns:
            The state of the complete index.

        Raises:
            StorageError: If the storage has an index of something else, or a damaged one.
        """
        found = self.shards.open(belongs_to)
        known = _CompletedBatches([])
        if found is not None:
            state, number = found
            with files.require_valid("The index"):
                self.stored = self._restored(state)
            # Read every shard once, to detect damage now rather than in a later query.
            known = _CompletedBatches([self.shards.read(place) for place in range(number)])
            if state["complete"]:
                known.check_all(self.plan.train)
                return state
        self._fill(known)
        error = _error(known.errors)
        state = self._state() | {"complete": True, "shards": known.shards, "error": error}
        self.shards.save(state)
        return state

    def _fill(self, known: "_CompletedBatches") -> None:
        """Compute the gradients of all batches that no shard has, and write a shard whenever it is large enough."""
        plan = self.plan
        pending: list[dict[str, Any]] = []
        for batch in per_datum(plan.train, plan.of_train, blocks=plan.K, skip=known.has):
            if not self.stored:
                # Write the forms before the first shard, so that an interrupted index can be continued.
                self.stored = self._chosen(batch)
                self.shards.save(self._state() | {"complete": False})
            pending.append(self._of_batch(batch, known.last_seen, known.place))
            if sum(one["bytes"] for one in pending) >= plan.shard_bytes:
                self._write(pending, known)
                pending = []
        if pending:
            self._write(pending, known)
        known.check_all_seen()

    def _write(self, pending: list[dict[str, Any]], known: "_CompletedBatches") -> None:
        errors = [one.pop("error") for one in pending]
        error = [sum(parts) for parts in zip(*errors, strict=True)]
        state = {"start": pending[0]["start"], "stop": pending[-1]["stop"], "error": error, "batches": pending}
        self.shards.write(known.shards, state)
        known.shards += 1
        known.errors.append(error)

    def _of_batch(self, batch: GradientBatch, seen: list[str], place: int) -> dict[str, Any]:
        """Return the entry of a shard for one batch."""
        blocks = {name: self.stored[name].state(block, self.plan.dtype) for name, block in batch.blocks.items()}
        own = [self_products(block, self.plan.structures[name]) for name, block in batch.blocks.items()]
        # Measure the error in the batches 0, 1, 2, 4, 8, ...
        compared = place & (place - 1) == 0
        return {
            "start": batch.start,
            "stop": batch.stop,
            "identity": seen,
            "blocks": blocks,
            "own": torch.stack(own).sum(0),
            "bytes": sum(t.nbytes for t in tensors_in(blocks)),
            "error": self._compare(batch) if compared else [0.0, 0.0],
        }

    def _compare(self, batch: GradientBatch) -> list[float]:
        """Return the squared norms of score errors and of exact scores, between the first examples of a batch."""
        some = batch.some(slice(0, _SAMPLE))
        num_data = len(some)
        full: Tensor | float = 0.0
        found: Tensor | float = 0.0
        for name, block in some.blocks.items():
            way = choose(self.plan.structures[name], block, num_data, num_data)
            full = full + way.of_queries(block).inner(way.of_train(block))
            # Store the gradients and restore them, as an index does.
            stored = self.stored[name]
            state = stored.state(block, self.plan.dtype)
            again = restored(state, block.layout, num_data, block.dtype, block.device)
            kept = stored.way(block, num_data, num_data, None)
            found = found + kept.of_queries(block).inner(kept.of_train(again))
        assert isinstance(full, Tensor)  # noqa: S101 (there are blocks)
        # Self-scores are stored without compression. Leave them out if there are other scores.
        if num_data > 1:
            others = ~torch.eye(num_data, dtype=torch.bool, device=full.device)
            full, found = full[others], found[others]  # type: ignore[index]
        return [float((found - full).square().sum()), float(full.square().sum())]

    def _chosen(self, first: GradientBatch) -> dict[str, Stored]:
        """Choose the form of every block from the gradients of the first batch."""
        plan = self.plan
        stored = {}
        for name, block in first.blocks.items():
            form = choose_form(plan.structures[name], block, plan.rank, plan.compression)
            structure = plan.structures[name]
            coordinates = None
            if form == "projected":
                structure = basis_of(structure)
                coordinates = leading_coordinates(structure, plan.rank or 0)
            stored[name] = Stored(form, structure, plan.rank or 0, coordinates)
        return stored

    def _state(self) -> dict[str, Any]:
        """Return the forms and coordinates of all blocks, for a file."""
        forms = {name: one.form for name, one in self.stored.items()}
        kept = {name: one.coordinates for name, one in self.stored.items() if one.coordinates is not None}
        return {"forms": forms, "coordinates": kept}

    def _restored(self, state: Any) -> dict[str, Stored]:
        """Return how blocks are stored; the inverse of `_state`."""
        stored = {}
        for name, form in state["forms"].items():
            structure = self.plan.structures[name]
            coordinates = state["coordinates"].get(name)
            if form == "projected":
                structure = basis_of(structure)
                coordinates = coordinates.to(self.plan.train.device)
            stored[name] = Stored(form, structure, self.plan.rank or 0, coordinates)
        return stored


class _CompletedBatches:
    """The batches in the shards of an index.

    Args:
        shards: The shards, as read from the storage.

    Attributes:
        shards: Number of shards.
        errors: Squared norms of score errors and of scores, for each shard.
        place: Index of the last batch passed to `has`.
        last_seen: Identity of this batch.
    """

    def __init__(self, shards: list[Any]) -> None:
        with files.require_valid("The index"):
            self.shards = len(shards)
            self.errors = [[float(number) for number in shard["error"]] for shard in shards]
            self._identities = [list(batch["identity"]) for shard in shards for batch in shard["batches"]]
        self.place = -1
        self.last_seen: list[str] = []

    def has(self, place: int, batch: Batch) -> bool:
        """Return whether a shard has the batch with this index.

        Raises:
            StorageError: If a shard has another batch with this index.
        """
        self.place = place
        self.last_seen = batch_identity(batch)
        known = place < len(self._identities)
        if known and self._identities[place] != self.last_seen:
            raise _other_data(f"batch {place} is another one")
        return known

    def check_all(self, train: EmpiricalRisk) -> None:
        """Compare all batches of the training data with a complete index, without running the model.

        Raises:
            StorageError: If a batch differs, or the number of batches differs.
        """
        for place, batch in enumerate(train.batches("comparing data with the index")):
            if not self.has(place, batch):
                raise _other_data("there are more batches now")
        self.check_all_seen()

    def check_all_seen(self) -> None:
        """Raise `StorageError` if the data have fewer batches than the shards."""
        if self.place + 1 < len(self._identities):
            raise _other_data("there are fewer batches now")


def _other_data(what: str) -> StorageError:
    return StorageError(
        f"The data differ from the data that the index was made from: {what}.",
        "Pass the same data in the same batches and order, delete the folder, or choose another one.",
    )


def _error(parts: list[list[float]]) -> float:
    """Return the relative error of scores from squared norms of errors and scores."""
    wrong, norm = (sum(numbers) for numbers in zip(*parts, strict=True))
    return (wrong / norm) ** 0.5 if norm else 0.0


def blocks_of(batch: Any, layouts: Mapping[str, Any], like: EmpiricalRisk) -> dict[str, BlockGradients]:
    """Return the gradients of one batch of a shard, by block."""
    num_data = int(batch["stop"]) - int(batch["start"])
    return {
        name: restored(state, layouts[name], num_data, like.sum_dtype, like.device)
        for name, state in batch["blocks"].items()
    }


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

    def __init__(
        self,
        K: BlockDiagonal,
        inverse: BlockDiagonal,
        train: EmpiricalRisk,
        of_train: Quantity,
        settings: dict[str, Any],
        file: str | Path | None,
        shard_bytes: int,
    ) -> None:
        """Compute the gradients that the folder does not have.

        Args:
            K: The curvature.
            inverse: The damped inverse of the curvature.
            train: The training data.
            of_train: The quantity that is differentiated.
            settings: `rank`, `compression` and `dtype`; and `damping` and `method`, which must be the same if the
                folder already has an index.
            file: The folder; `None` for memory.
            shard_bytes: Write a shard whenever this many bytes have been computed.
        """
        rank = settings["rank"]
        compression: Compression = settings["compression"] or "low rank"
        dtype = settings["dtype"]
        check_memory(shard_bytes, "shard_bytes")
        check_risk(K, train, "train")
        gradient_of(of_train, train.loss)  # raises an error for unknown quantities
        warn_of_other_values(K, train.params, what="The curvature", owner="the model", stacklevel=4)
        self._K = K
        self._inverse = inverse
        self._of_train = of_train
        self._dtype = dtype
        self.train = train
        self.path = None if file is None else Path(file)
        self._shards: Shards = InMemory() if file is None else Folder(file)
        # Keep digests of the weights, to detect later whether the model has changed.
        belongs_to = identity(K, train, of_train, settings)
        self._weights = {name: belongs_to[name] for name in weights(train)}
        plan = IndexSettings(K, structures_of(inverse, train), train, of_train, rank, compression, dtype, shard_bytes)
        builder = Builder(plan, self._shards)
        state = builder.run(belongs_to)
        self._stored = builder.stored
        self._count = int(state["shards"])
        self.error = float(state["error"])
        self.forms = ByName({name: stored.form for name, stored in self._stored.items()})
        self.nbytes = self._shards.size()

    def describe(self) -> Description:
        """Describe size, error and forms of the index."""
        of = f" of {self._K.of}" if self._K.of else ""
        dtype = str(self._dtype).removeprefix("torch.")
        where = "in memory" if self.path is None else f"in {self.path}"
        # Show a bound for small errors: the digits of round-off differ between machines.
        error = number(self.error) if self.error >= _ROUND_OFF else f"below {_ROUND_OFF}"
        fact = (
            f"{readable_size(self.nbytes)} {where}, {counted(self._count, 'shard')}, relative error of scores {error}"
        )
        layouts = _layouts(self._K)
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

        Args:
            queries: Data to explain, with the same model and parameters.
            of: As in `Influence.scores`.
            by: As in `Influence.scores`, without `"token"`, because the index does not store which rows belong to which
                token.
            normalize: As in `Influence.scores`.
            memory: As in `Influence.scores`. All files are read once for each pass over the training data.
            query_rank: As in `Influence.scores`, for blocks that are stored as rows.

        Raises:
            ModelError: If models or parameters differ.
            StorageError: If parameters have changed since the index was made, or a file is damaged.
        """
        _check_by(by)
        return all_scores(self._stream(queries, of, normalize, memory, query_rank), by)

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
        """Find the most helpful and the most harmful training data of each query, as `Influence.top` does.

        Args:
            queries: As in `scores`.
            k: Number of helpful and of harmful examples per query.
            of: As in `scores`.
            normalize: As in `scores`.
            memory: As in `scores`.
            query_rank: As in `scores`.
        """
        return best(self._stream(queries, of, normalize, memory, query_rank), k)

    def self_scores(self) -> Tensor:
        """Return the score of every training example with itself, `[train]`, computed without compression."""
        self._check_weights()
        shards = [self._shards.read(place) for place in range(self._count)]
        with files.require_valid(self.path or "The index"):
            return torch.cat([batch["own"] for shard in shards for batch in shard["batches"]]).to(self.train.device)

    def _stream(
        self, queries: EmpiricalRisk, of: Quantity, normalize: Normalize | None, memory: int, query_rank: int | None
    ) -> "_IndexStream":
        """Check the arguments, and return a stream over queries and stored gradients."""
        request = Request(queries, self.train, of, self._of_train, normalize, memory, query_rank)
        self._check_weights()
        check_request(self._K, request)
        return _IndexStream(self._K, self._inverse, request, self._shards, self._count, self._stored)

    def _check_weights(self) -> None:
        """Raise `StorageError` if the weights of the model have changed since the index was created."""
        differ = differences(self._weights, weights(self.train))
        if differ:
            raise StorageError(
                f"The index was made with other weights: {', '.join(differ)} differ.",
                "Create a new index for the new weights, or load the old weights.",
            )


class _IndexStream(Stream):
    """A stream over queries, and over the stored gradients of training data."""

    def __init__(
        self,
        K: BlockDiagonal,
        inverse: BlockDiagonal,
        request: Request,
        shards: Shards,
        count: int,
        stored: dict[str, Stored],
    ) -> None:
        super().__init__(K, inverse, request)
        self._shards = shards
        self._count = count
        self._stored = stored
        self._layouts = _layouts(K)
        self._own: dict[int, Tensor] = {}

    def train(self) -> Iterator[GradientBatch]:
        """Yield the stored gradients of training data."""
        train = self.request.train
        shapes = {name: p.shape for name, p in train.params.items()}
        for place in range(self._count):
            shard = self._shards.read(place)
            found = []
            with files.require_valid("The index"):
                for batch in shard["batches"]:
                    blocks = ByName(blocks_of(batch, self._layouts, train))
                    found.append(GradientBatch(int(batch["start"]), int(batch["stop"]), blocks, shapes))
                    self._own[found[-1].start] = batch["own"].to(train.device)
            yield from found

    def own_of_train(self, batch: GradientBatch) -> Tensor:
        """Return the stored self-scores, which were computed before compression."""
        return self._own[batch.start]

    def way(self, name: str, block: BlockGradients) -> Chosen:
        """Choose how queries are multiplied with the stored form of a block."""
        queries, train = self.request.queries.num_data, self.request.train.num_data
        return self._stored[name].way(block, queries, train, self.request.query_rank)


def settings_of(
    damping: Damping, method: Method, rank: int | None, compression: Compression, dtype: torch.dtype
) -> dict[str, Any]:
    """Return the settings that must be the same if a folder already has an index.

    Raises:
        ModelError: If a setting is invalid.
    """
    check_storage(rank, compression, dtype)
    # Without a rank, nothing is compressed, and `compression` has no effect.
    kind = compression if rank is not None else None
    return {"damping": damping, "method": method, "rank": rank, "compression": kind, "dtype": dtype}


def _check_by(by: object) -> None:
    """Check that an index has the requested partition of scores.

    Raises:
        ModelError: If `by` is `"token"`, or not an option.
    """
    if by == "token":
        raise ModelError(
            "An index has no scores by token: gradients are stored as sums over tokens if that takes fewer bytes.",
            "Find training data with index.top(queries), create an EmpiricalRisk with these examples only, and pass it "
            "to Influence.scores(queries, train, by='token').",
        )
    check_choice("by", by, ("block", "layer"))


def _layouts(K: BlockDiagonal) -> dict[str, Any]:
    """Return the layouts of all blocks, by name."""
    return {layout.name: layout for stack in K.stacks for layout in stack.layouts}
