"""Computing the gradients of an index, shard by shard, from where an earlier attempt has ended."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kfs import storage
from kfs.data import Batch
from kfs.errors import StorageError
from kfs.influence.identity import batch_identity
from kfs.influence.shards import Shards
from kfs.influence.stored import Compression, Stored, basis_of, choose_form, leading_coordinates, restored
from kfs.influence.ways import choose, self_products
from kfs.kfac.block_gradients import BlockGradients
from kfs.kfac.datum_gradients import GradientBatch, per_datum
from kfs.kfac.structures import BlockDiagonal, Structure
from kfs.losses.quantities import Quantity
from kfs.nested import tensors_in
from kfs.risk import EmpiricalRisk

# Compressed scores of this many data of a batch are compared with full ones.
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
        known = _Known([])
        if found is not None:
            state, number = found
            with storage.valid("The index"):
                self.stored = self._restored(state)
            # Every shard is read once, so that damage shows now.
            known = _Known([self.shards.read(place) for place in range(number)])
            if state["complete"]:
                known.check_all(self.plan.train)
                return state
        self._fill(known)
        error = _error(known.errors)
        state = self._state() | {"complete": True, "shards": known.shards, "error": error}
        self.shards.save(state)
        return state

    def _fill(self, known: "_Known") -> None:
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

    def _write(self, waiting: list[dict[str, Any]], known: "_Known") -> None:
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


class _Known:
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
        with storage.valid("The index"):
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
