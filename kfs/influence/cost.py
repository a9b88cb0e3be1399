"""What scores will cost: operations and bytes by phase, passes over the training data, and the size of an index."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kfs.describing import DescribedByTables, Description, Table, readable_count, readable_size, times
from kfs.influence.stored import Compression, check_storage, choose_form, numbers_stored
from kfs.influence.stream import Stream
from kfs.influence.ways import Sizes, Work, work
from kfs.kfac.block_gradients import BlockGradients
from kfs.kfac.datum_gradients import GradientBatch, per_datum

# An operation is a multiplication or an addition, and one of each makes a product of matrices.
_OPERATIONS = 2


class Phase(NamedTuple):
    """A part of the computation.

    Attributes:
        name: What is done.
        flops: How many operations it takes, all passes together.
        nbytes: How much memory it needs.
    """

    name: str
    flops: int
    nbytes: int


class BlockCost(NamedTuple):
    """The cost of one block.

    Attributes:
        name: The block.
        shape: Groups, `d_B` and `d_A`.
        rows: Rows of each query.
        way: How gradients are multiplied; see `kfs.influence.ways`.
        flops: How many operations that takes, all passes together.
        form: How an index stores it; see `kfs.influence.stored`.
        nbytes: How many bytes an index stores.
    """

    name: str
    shape: tuple[int, int, int]
    rows: int
    way: str
    flops: int
    form: str
    nbytes: int


@dataclass(frozen=True, repr=False)
class Cost(DescribedByTables):
    """What scores will cost. Operations are those of layers that the curvature covers; see `Influence.cost`.

    Attributes:
        queries: Number of queries.
        train: Number of training data.
        passes: Number of passes over the training data.
        phases: Operations and bytes.
        blocks: The same, block by block, without forward and backward passes.
    """

    queries: int
    train: int
    passes: int
    phases: Sequence[Phase]
    blocks: Sequence[BlockCost]

    @property
    def flops(self) -> int:
        """Operations of all phases."""
        return sum(phase.flops for phase in self.phases)

    @property
    def index_bytes(self) -> int:
        """Bytes of the gradients in an index."""
        return sum(block.nbytes for block in self.blocks)

    def describe(self) -> Description:
        """Describe phases and blocks."""
        operations = readable_count(self.flops)
        title = f"Scores of {self.queries:,} queries and {self.train:,} training data: {operations} operations"
        passes = f"{self.passes} pass{'' if self.passes == 1 else 'es'} over the training data"
        facts = (f"{passes}; an index takes {readable_size(self.index_bytes)}",)
        phases = Table(
            "phases",
            ("phase", "operations", "memory"),
            [(phase.name, readable_count(phase.flops), readable_size(phase.nbytes)) for phase in self.phases],
            ("operations", "memory"),
        )
        blocks = Table(
            "blocks",
            ("block", "groups x d_B x d_A", "rows", "way", "operations", "stored as", "index"),
            [
                (
                    block.name,
                    times(block.shape),
                    f"{block.rows:,}",
                    block.way,
                    readable_count(block.flops),
                    block.form,
                    readable_size(block.nbytes),
                )
                for block in self.blocks
            ],
            ("rows", "operations", "index"),
        )
        return Description(title, facts, (phases, blocks))


def cost_of(stream: Stream, rank: int | None, compression: Compression, dtype: torch.dtype) -> Cost:
    """Count, after a pass over one batch of queries and one of training data, which say how many rows there are.

    Args:
        stream: What was asked for.
        rank: Rank of an index.
        compression: Compression of an index.
        dtype: Dtype of an index.

    Raises:
        ModelError: If an index has no such setting.
    """
    check_storage(rank, compression, dtype)
    request = stream.request
    queries, train = request.queries.num_data, request.train.num_data
    of_queries = next(per_datum(request.queries, request.of, blocks=stream.operator))
    of_train = next(per_datum(request.train, request.of_train, blocks=stream.operator))
    most = stream.most(of_queries)
    passes = -(-queries // most)
    works: dict[str, Work] = {}
    blocks = []
    for name, block in of_queries.blocks.items():
        way = stream.ways[name]
        found = work(way.way, Sizes.of(block, queries, train, way.query_rank))
        works[name] = Work(found.queries, passes * found.train, found.products)
        form = choose_form(stream.structures[name], of_train.blocks[name], rank, compression)
        nbytes = train * numbers_stored(form, of_train.blocks[name], rank) * dtype.itemsize
        flops = _OPERATIONS * works[name].total
        blocks.append(BlockCost(name, block.layout.matrix_shape, block.shared, way.way, flops, form, nbytes))
    itemsize = request.train.sum_dtype.itemsize
    kept = sum(stream.ways[name].bytes_of(block) for name, block in of_queries.blocks.items())
    phases = (
        Phase("gradients of queries", queries * _passes(of_queries), _bytes(of_queries)),
        Phase("queries times the inverse", _total(works, "queries"), min(most, queries) * kept),
        Phase("gradients of training data", passes * train * _passes(of_train), _bytes(of_train)),
        Phase("training data into their form", _total(works, "train"), 0),
        Phase("products", _total(works, "products"), queries * train * itemsize),
    )
    return Cost(queries, train, passes, phases, blocks)


def _total(works: dict[str, Work], phase: str) -> int:
    """Sum a phase over blocks."""
    return sum(_OPERATIONS * int(getattr(found, phase)) for found in works.values())


def _passes(batch: GradientBatch) -> int:
    """Return how many operations forward and backward pass of a datum take: a product with the weight each."""
    return sum(2 * _OPERATIONS * block.shared * _touched(block) for block in batch.blocks.values())


def _touched(block: BlockGradients) -> int:
    """Return how many multiplications a row takes: none where rows of a table are looked up."""
    return 0 if any(any(use.units) for use in block.uses) else block.numbers


def _bytes(batch: GradientBatch) -> int:
    """Return how many bytes the rows of a batch take."""
    some = next(iter(batch.blocks.values()))
    numbers = sum(numbers_stored("rows", block, None) for block in batch.blocks.values())
    return len(batch) * numbers * some.dtype.itemsize
