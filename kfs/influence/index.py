"""An index: the gradients of training data, computed once and kept in files or in memory, for many queries."""

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

# Details that people read in a message. Of all others, only that they differ is said.
_READABLE = ("damping", "method", "of_train", "rank", "compression", "dtype", "number of examples", "precision")


def identity(
    K: BlockDiagonal, train: EmpiricalRisk, of_train: Quantity, settings: Mapping[str, object]
) -> dict[str, Any]:
    """Describe what an index belongs to.

    Args:
        K: The curvature.
        train: The training data, with model and loss.
        of_train: What is differentiated.
        settings: What else has to be the same, by name.
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
    """Return digests of the values of parameters, and of everything else that a module has."""
    module = risk.model if isinstance(risk.model, torch.nn.Module) else torch.nn.Module()
    with risk.untouched():  # with all numbers of parameters that are sharded
        return {
            "values of parameters": digest(risk.params.values()),
            "values of other parameters and buffers": digest([*module.parameters(), *module.buffers()]),
        }


def differences(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> list[str]:
    """Say what differs, with both values of what people can read."""
    found = []
    for name in mine:
        if theirs.get(name) != mine[name]:
            both = f" ({theirs.get(name)} there, {mine[name]} here)" if name in _READABLE else ""
            found.append(f"{name}{both}")
    return found


def batch_identity(batch: Batch) -> list[str]:
    """Return what tells a batch from others: shapes, and a digest of all numbers.

    A gradient takes a pass through the model, beside which a digest of its input costs little.
    """
    found: Fingerprint = fingerprint(batch.x, batch.y, complete=True)
    return [*found.tensors, found.digest]


def _named(quantity: Quantity) -> str:
    """Return a quantity's name; of a function, also a digest of its code and of the values that it uses."""
    if isinstance(quantity, str):
        return quantity
    name = getattr(quantity, "__qualname__", type(quantity).__name__)
    return f"{name} ({function_digest(quantity)})"


class Shards(Protocol):
    """Keeps the state of an index, and of its shards."""

    def open(self, belongs_to: dict[str, Any]) -> tuple[dict[str, Any], int] | None:
        """Return the state that was written before, and the number of shards; `None` if there is none."""

    def save(self, state: dict[str, Any]) -> None:
        """Write the state of the index."""

    def write(self, place: int, state: dict[str, Any]) -> None:
        """Write a shard."""

    def read(self, place: int) -> Any:
        """Read a shard."""

    def size(self) -> int:
        """Return how many bytes there are."""


class InMemory:
    """Keeps everything in memory."""

    def __init__(self) -> None:
        self._shards: list[dict[str, Any]] = []

    def open(self, belongs_to: dict[str, Any]) -> None:
        """Start anew."""

    def save(self, state: dict[str, Any]) -> None:
        """Do nothing: whoever calls this has the state."""

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
    """Keeps everything in files.

    Args:
        path: The folder. It is made if it does not exist.
    """

    def __init__(self, path: str | Path) -> None:
        """Make the folder.

        Raises:
            StorageError: If that is not possible.
        """
        self.path = Path(path)
        self._belongs_to: dict[str, Any] = {}
        # Files whose digest was checked, with size and time of their last change.
        self._checked: dict[Path, tuple[int, int]] = {}
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"{path} cannot be made: {error}.",
                "An index is a folder. Choose one that is new, or that has an index.",
            ) from error

    def open(self, belongs_to: dict[str, Any]) -> tuple[dict[str, Any], int] | None:
        """Return the state in the folder, and how many shards there are.

        Raises:
            StorageError: If it belongs to something else, or is damaged.
        """
        self._belongs_to = json.loads(json.dumps(belongs_to))
        if not self._main.exists():
            return None
        header, state = files.read(self._main)
        with files.require_valid(self._main):
            differ = differences(json.loads(header["belongs_to"]), self._belongs_to)
            number = int(state["shards"]) if state["complete"] else None
        if differ:
            raise StorageError(
                f"The index in {self.path} was made for something else: {', '.join(differ)} differ.",
                "Use the same model, curvature, settings and data, delete the folder, or choose another one. A "
                "curvature that is computed again may differ in its last digits: keep it with K.save(...).",
            )
        return state, self._count(number)

    def save(self, state: dict[str, Any]) -> None:
        """Write what the index belongs to, and its state."""
        files.write(self._main, {"kind": "index", "belongs_to": self._belongs_to}, state)

    def _count(self, most: int | None) -> int:
        """Return how many shards are there, without a gap.

        Args:
            most: How many there have to be; `None` if that is not known yet.

        Raises:
            StorageError: If one is missing.
        """
        number = 0
        while number != most and self._file(number).exists():
            number += 1
        if most is not None and number < most:
            raise StorageError(
                f"{self._file(number)} is missing, and the index has {most} such files.",
                "Use another copy of the folder, or delete it and make the index again.",
            )
        return number

    def write(self, place: int, state: dict[str, Any]) -> None:
        """Write a shard."""
        file = self._file(place)
        files.write(file, {"kind": "shard of an index", "start": state["start"], "stop": state["stop"]}, state)
        self._checked[file] = _version(file)

    def read(self, place: int) -> Any:
        """Map a shard into memory; its digest is checked once.

        Raises:
            StorageError: If it is missing or damaged.
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
    """Return what changes when a file does."""
    found = file.stat()
    return found.st_size, found.st_mtime_ns


# Compressed scores of this many examples of a batch are compared with full ones.
_SAMPLE = 16


@dataclass(frozen=True)
class Plan:
    """What an index is to have.

    Attributes:
        K: Has the blocks.
        structures: The inverse of each block.
        train: The data.
        of_train: What is differentiated.
        rank: How many coordinates or singular vectors are kept; `None` for all.
        compression: Whether these are coordinates (`"projected"`) or singular vectors (`"low rank"`).
        dtype: Dtype of the stored numbers.
        shard_bytes: Write a file whenever this many bytes are there.
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
    """Fills shards.

    Attributes:
        plan: What the shards are to have.
        shards: Where gradients are kept.
        stored: How each block is stored; empty as long as no gradient was seen.
    """

    plan: Plan
    shards: Shards
    stored: dict[str, Stored] = field(default_factory=dict)

    def run(self, belongs_to: dict[str, Any]) -> dict[str, Any]:
        """Compute what is missing.

        Returns:
            The state of the complete index.

        Raises:
            StorageError: If there is an index of something else, or a damaged one.
        """
        found = self.shards.open(belongs_to)
        known = _CompletedBatches([])
        if found is not None:
            state, number = found
            with files.require_valid("The index"):
                self.stored = self._restored(state)
            # Every shard is read once, so that damage shows now.
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
        """Compute all batches that no shard has."""
        plan = self.plan
        waiting: list[dict[str, Any]] = []
        for batch in per_datum(plan.train, plan.of_train, blocks=plan.K, skip=known.has):
            if not self.stored:
                self.stored = self._chosen(batch)
                self.shards.save(self._state() | {"complete": False})
            waiting.append(self._of_batch(batch, known.last_seen, known.place))
            if sum(one["bytes"] for one in waiting) >= plan.shard_bytes:
                self._write(waiting, known)
                waiting = []
        if waiting:
            self._write(waiting, known)
        known.check_all_seen()

    def _write(self, waiting: list[dict[str, Any]], known: "_CompletedBatches") -> None:
        errors = [one.pop("error") for one in waiting]
        error = [sum(parts) for parts in zip(*errors, strict=True)]
        state = {"start": waiting[0]["start"], "stop": waiting[-1]["stop"], "error": error, "batches": waiting}
        self.shards.write(known.shards, state)
        known.shards += 1
        known.errors.append(error)

    def _of_batch(self, batch: GradientBatch, seen: list[str], place: int) -> dict[str, Any]:
        """Return what a shard has of a batch."""
        blocks = {name: self.stored[name].state(block, self.plan.dtype) for name, block in batch.blocks.items()}
        own = [self_products(block, self.plan.structures[name]) for name, block in batch.blocks.items()]
        # In all batches with a place 0, 1, 2, 4, 8, ..., some data are compared.
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
        """Return the squared norms of errors of scores, and of scores, between some data of a batch."""
        some = batch.some(slice(0, _SAMPLE))
        num_data = len(some)
        full: Tensor | float = 0.0
        found: Tensor | float = 0.0
        for name, block in some.blocks.items():
            way = choose(self.plan.structures[name], block, num_data, num_data)
            full = full + way.of_queries(block).inner(way.of_train(block))
            stored = self.stored[name]
            state = stored.state(block, self.plan.dtype)
            again = restored(state, block.layout, num_data, block.dtype, block.device)
            kept = stored.way(block, num_data, num_data, None)
            found = found + kept.of_queries(block).inner(kept.of_train(again))
        assert isinstance(full, Tensor)  # noqa: S101 (there are blocks)
        # Scores of data with themselves are stored as they are. Where there are others, these count.
        if num_data > 1:
            others = ~torch.eye(num_data, dtype=torch.bool, device=full.device)
            full, found = full[others], found[others]  # type: ignore[index]
        return [float((found - full).square().sum()), float(full.square().sum())]

    def _chosen(self, first: GradientBatch) -> dict[str, Stored]:
        """Choose the form of every block, by the gradients of the first batch."""
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
        """Return how blocks are stored, for a file."""
        forms = {name: one.form for name, one in self.stored.items()}
        kept = {name: one.coordinates for name, one in self.stored.items() if one.coordinates is not None}
        return {"forms": forms, "coordinates": kept}

    def _restored(self, state: Any) -> dict[str, Stored]:
        """Undo `_state`."""
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
    """The batches that shards have.

    Args:
        shards: What was read.

    Attributes:
        shards: Number of shards.
        errors: Errors in each of them.
        place: The place of the batch that was seen last.
        last_seen: What tells it from others.
    """

    def __init__(self, shards: list[Any]) -> None:
        with files.require_valid("The index"):
            self.shards = len(shards)
            self.errors = [[float(number) for number in shard["error"]] for shard in shards]
            self._identities = [list(batch["identity"]) for shard in shards for batch in shard["batches"]]
        self.place = -1
        self.last_seen: list[str] = []

    def has(self, place: int, batch: Batch) -> bool:
        """Whether a shard has a batch. If one does, it must be the same batch as before.

        Raises:
            StorageError: If it is another one.
        """
        self.place = place
        self.last_seen = batch_identity(batch)
        known = place < len(self._identities)
        if known and self._identities[place] != self.last_seen:
            raise _other_data(f"batch {place} is another one")
        return known

    def check_all(self, train: EmpiricalRisk) -> None:
        """Compare all batches with those of a complete index. The model does not run.

        Raises:
            StorageError: If one differs, or there are more or fewer.
        """
        for place, batch in enumerate(train.batches("comparing data with the index")):
            if not self.has(place, batch):
                raise _other_data("there are more batches now")
        self.check_all_seen()

    def check_all_seen(self) -> None:
        """Refuse data that have fewer batches than the shards."""
        if self.place + 1 < len(self._identities):
            raise _other_data("there are fewer batches now")


def _other_data(what: str) -> StorageError:
    return StorageError(
        f"The data differ from those that the index was made from: {what}.",
        "Pass the same data in the same batches and order, delete the folder, or choose another one.",
    )


def _error(parts: list[list[float]]) -> float:
    """Return the relative error of scores."""
    wrong, norm = (sum(numbers) for numbers in zip(*parts, strict=True))
    return (wrong / norm) ** 0.5 if norm else 0.0


def blocks_of(batch: Any, layouts: Mapping[str, Any], like: EmpiricalRisk) -> dict[str, BlockGradients]:
    """Return the gradients that a shard has of a batch, by block."""
    num_data = int(batch["stop"]) - int(batch["start"])
    return {
        name: restored(state, layouts[name], num_data, like.sum_dtype, like.device)
        for name, state in batch["blocks"].items()
    }


_ROUND_OFF = 1e-5  # smaller errors are not shown as a number


class Index(Described):
    """The gradients of all training data, kept in files or in memory. `Influence.index` makes one.

    Attributes:
        train: The training data.
        error: The relative error of scores that compression and the dtype cause, measured between some training data
            of some batches: the root of the sum of squares of errors, over that of scores. Self-scores have none.
        forms: How the gradients of each block are stored, by name; see `kfs.influence.stored`.
        nbytes: Bytes of all gradients.
        path: The folder. `None` if they are in memory.
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
        """Compute what the folder does not have.

        Args:
            K: The curvature.
            inverse: Its damped inverse.
            train: The training data.
            of_train: What is differentiated.
            settings: `rank`, `compression` and `dtype`, and what else has to be the same in a folder: `damping` and
                `method`.
            file: The folder; `None` for memory.
            shard_bytes: Write a file whenever this many bytes are there.
        """
        rank = settings["rank"]
        compression: Compression = settings["compression"] or "low rank"
        dtype = settings["dtype"]
        check_memory(shard_bytes, "shard_bytes")
        check_risk(K, train, "train")
        gradient_of(of_train, train.loss)
        warn_of_other_values(K, train.params, what="The curvature", owner="the model", stacklevel=4)
        self._K = K
        self._inverse = inverse
        self._of_train = of_train
        self._dtype = dtype
        self.train = train
        self.path = None if file is None else Path(file)
        self._shards: Shards = InMemory() if file is None else Folder(file)
        belongs_to = identity(K, train, of_train, settings)
        self._weights = {name: belongs_to[name] for name in weights(train)}
        plan = Plan(K, structures_of(inverse, train), train, of_train, rank, compression, dtype, shard_bytes)
        builder = Builder(plan, self._shards)
        state = builder.run(belongs_to)
        self._stored = builder.stored
        self._count = int(state["shards"])
        self.error = float(state["error"])
        self.forms = ByName({name: stored.form for name, stored in self._stored.items()}, "block")
        self.nbytes = self._shards.size()

    def describe(self) -> Description:
        """Describe size, error and forms."""
        of = f" of {self._K.of}" if self._K.of else ""
        dtype = str(self._dtype).removeprefix("torch.")
        where = "in memory" if self.path is None else f"in {self.path}"
        # Round-off differs between machines, and says nothing.
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
            by: As in `Influence.scores`, without `"token"`: what belongs to which token is not kept.
            normalize: As in `Influence.scores`.
            memory: As in `Influence.scores`. Files are read as often as there was a pass over the training data.
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
        """Find the training data that help and harm each query most, as `Influence.top` does.

        Args:
            queries: As in `scores`.
            k: How many of both for each query.
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
        """Check what was asked for."""
        request = Request(queries, self.train, of, self._of_train, normalize, memory, query_rank)
        self._check_weights()
        check_request(self._K, request)
        return _IndexStream(self._K, self._inverse, request, self._shards, self._count, self._stored)

    def _check_weights(self) -> None:
        """Refuse a model whose weights have changed since the index was made."""
        differ = differences(self._weights, weights(self.train))
        if differ:
            raise StorageError(
                f"The index was made with other weights: {', '.join(differ)} differ.",
                "Make a new index for the new weights, or load the old ones.",
            )


class _IndexStream(Stream):
    """Runs over queries, and over the gradients that shards have."""

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
        """Read the gradients of training data."""
        train = self.request.train
        shapes = {name: p.shape for name, p in train.params.items()}
        for place in range(self._count):
            shard = self._shards.read(place)
            found = []
            with files.require_valid("The index"):
                for batch in shard["batches"]:
                    blocks = ByName(blocks_of(batch, self._layouts, train), "block")
                    found.append(GradientBatch(int(batch["start"]), int(batch["stop"]), blocks, shapes))
                    self._own[found[-1].start] = batch["own"].to(train.device)
            yield from found

    def own_of_train(self, batch: GradientBatch) -> Tensor:
        """Return what was computed before compression."""
        return self._own[batch.start]

    def way(self, name: str, block: BlockGradients) -> Chosen:
        """Multiply with what is stored."""
        queries, train = self.request.queries.num_data, self.request.train.num_data
        return self._stored[name].way(block, queries, train, self.request.query_rank)


def settings_of(
    damping: Damping, method: Method, rank: int | None, compression: Compression, dtype: torch.dtype
) -> dict[str, Any]:
    """Return what has to be the same in a folder.

    Raises:
        ModelError: If a setting does not exist.
    """
    check_storage(rank, compression, dtype)
    # Without a rank, there is no compression.
    kind = compression if rank is not None else None
    return {"damping": damping, "method": method, "rank": rank, "compression": kind, "dtype": dtype}


def _check_by(by: object) -> None:
    """Refuse parts of scores that an index does not have.

    Raises:
        ModelError: If there are none.
    """
    if by == "token":
        raise ModelError(
            "An index has no scores by token: gradients are stored as sums over tokens where that takes fewer bytes.",
            "Find training data with index.top(queries), make an EmpiricalRisk of these alone, and pass it to "
            "Influence.scores(queries, train, by='token').",
        )
    check_choice("by", by, ("block", "layer"))


def _layouts(K: BlockDiagonal) -> dict[str, Any]:
    """Return the layouts of all blocks, by name."""
    return {layout.name: layout for stack in K.stacks for layout in stack.layouts}
