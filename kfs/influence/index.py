"""An index: the gradients of training data, computed once and kept, to be multiplied with those of many queries."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import Tensor

from kfs import storage
from kfs.describing import Described, Description, Table, counted, number, readable_size, times
from kfs.errors import ModelError, StorageError
from kfs.influence.building import Builder, Plan, blocks_of
from kfs.influence.checks import check_choice, check_memory, check_risk
from kfs.influence.identity import differences, identity, weights
from kfs.influence.ranking import Top
from kfs.influence.scoring import Normalize, all_scores, best, check_request
from kfs.influence.shards import Folder, InMemory, Shards
from kfs.influence.stored import Compression, Stored, check_storage
from kfs.influence.stream import Request, Stream, structures_of
from kfs.influence.ways import Chosen
from kfs.kfac.block_gradients import BlockGradients
from kfs.kfac.datum_gradients import GradientBatch
from kfs.kfac.structures import BlockDiagonal, Damping, Method
from kfs.losses.quantities import Quantity, gradient_of
from kfs.names import ByName
from kfs.operators.computed_at import warn_of_other_values
from kfs.risk import EmpiricalRisk

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
        """Compute the score of every pair of a query and a training datum, as `Influence.scores` does.

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
        """Return the score of every training datum with itself, `[train]`. These were computed without compression."""
        self._check_weights()
        shards = [self._shards.read(place) for place in range(self._count)]
        with storage.valid(self.path or "The index"):
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
            with storage.valid("The index"):
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
