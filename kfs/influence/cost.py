"""Cost estimates for scores (operations, bytes and passes over the data), and the error of compressed queries."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kfs.display.describe import (
    Described,
    DescribedByTables,
    Description,
    Table,
    counted,
    number,
    readable_count,
    readable_size,
    times,
)
from kfs.factors.per_example import BlockGradients, GradientBatch, per_datum
from kfs.influence.scoring import Stream
from kfs.influence.stored import Storage, choose_form, numbers_stored
from kfs.influence.ways import Sizes, Work, choose, truncated, work


@dataclass(frozen=True, repr=False)
class QueryError(Described):
    """The error of scores if only the leading singular vectors of every query are kept.

    Attributes:
        query_rank: Number of singular vectors per query.
        left_out: By block, the norm of the truncation error over all queries, relative to the norm of their gradients
            times the inverse. It lists only blocks that are compressed, because compression takes fewer operations.
        bound: A number for every query, `[queries]`. The error of a score is at most this number times the norm of the
            training example's gradient.
        measured: Measured relative error of the scores of all queries with the training data of the first batch.
    """

    query_rank: int
    left_out: Mapping[str, float]
    bound: Tensor
    measured: float

    def describe(self) -> Description:
        """Describe the truncation error by block, and the measured error."""
        title = f"Queries by {counted(self.query_rank, 'singular vector')}: {counted(len(self.left_out), 'block')}"
        rows = [(name, number(share)) for name, share in self.left_out.items()]
        table = Table("blocks", ("block", "norm left out, relative"), rows, ("norm left out, relative",))
        return Description(title, (f"relative error of scores, as measured: {number(self.measured)}",), (table,))


def query_error(stream: Stream, query_rank: int) -> QueryError:
    """Compare compressed and exact scores of all queries with the training data of the first batch."""
    request = stream.request
    train = next(stream.train())
    squares: dict[str, list[float]] = {}  # of the norms of truncation errors and of full gradients, by block
    wrong = norm = 0.0
    bounds = []
    for batch in per_datum(request.queries, request.of, blocks=stream.operator):
        first = next(iter(batch.blocks.values()))
        full = torch.zeros(len(batch), len(train), dtype=first.dtype, device=first.device)
        difference = torch.zeros_like(full)
        left_out = full.new_zeros(len(batch))
        for name, structure in stream.inverse.of(batch.blocks):
            block = batch.blocks[name]
            exact = choose(structure, block, request.queries.num_data, request.train.num_data)
            scores = exact.of_queries(block, structure).inner(exact.of_train(train.blocks[name], structure))
            full += scores
            way = stream.way(name, block, structure)
            if way.way != "low rank":
                continue
            product = block.multiplied(structure)
            found = truncated(product, way.query_rank)
            difference += found.kept.inner(train.blocks[name]) - scores
            left_out += found.left_out.square()
            total = squares.setdefault(name, [0.0, 0.0])
            total[0] += float(found.left_out.square().sum())
            total[1] += float(product.squared_norms().sum())
        wrong += float(difference.square().sum())
        norm += float(full.square().sum())
        bounds.append(left_out.sqrt())
    shares = {name: (part / whole) ** 0.5 if whole else 0.0 for name, (part, whole) in squares.items()}
    measured = (wrong / norm) ** 0.5 if norm else 0.0
    return QueryError(query_rank, shares, torch.cat(bounds), measured)


# Operations per multiply-add: one multiplication and one addition.
_OPERATIONS = 2


class Phase(NamedTuple):
    """The cost of one phase of the computation.

    Attributes:
        name: Name of the phase.
        flops: Number of operations in all passes.
        nbytes: Number of bytes of memory.
    """

    name: str
    flops: int
    nbytes: int


class BlockCost(NamedTuple):
    """The cost of one block.

    Attributes:
        name: Name of the block.
        shape: Number of groups, `d_B` and `d_A`.
        rows: Number of rows of each query.
        way: How gradients are multiplied; see `kfs.influence.ways`.
        flops: Number of operations of this multiplication in all passes.
        form: How an index stores the block; see `kfs.influence.stored`.
        nbytes: Number of bytes that an index stores.
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
    """Estimated cost of scores. Only operations of layers that the curvature covers count; see `Influence.cost`.

    Attributes:
        queries: Number of queries.
        train: Number of training data.
        passes: Number of passes over the training data.
        phases: Operations and bytes of each phase.
        blocks: Operations and bytes of each block, without forward and backward passes.
    """

    queries: int
    train: int
    passes: int
    phases: Sequence[Phase]
    blocks: Sequence[BlockCost]

    @property
    def flops(self) -> int:
        """Number of operations of all phases."""
        return sum(phase.flops for phase in self.phases)

    @property
    def index_bytes(self) -> int:
        """Number of bytes of the gradients in an index."""
        return sum(block.nbytes for block in self.blocks)

    def describe(self) -> Description:
        """Describe the cost of phases and blocks."""
        operations = readable_count(self.flops)
        pairs = f"{counted(self.queries, 'query')} and {counted(self.train, 'training example')}"
        title = f"Scores of {pairs}: {operations} operations"
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


def cost_of(stream: Stream, storage: Storage) -> Cost:
    """Estimate the cost of scores, and of an index with this storage, from the first batch of queries and of data."""
    request = stream.request
    queries, train = request.queries.num_data, request.train.num_data
    of_queries = next(per_datum(request.queries, request.of, blocks=stream.operator))
    of_train = next(per_datum(request.train, request.of_train, blocks=stream.operator))
    # There is one pass over the training data for each part of the queries that fits into memory.
    most = stream.most(of_queries)
    passes = -(-queries // most)
    works: dict[str, Work] = {}
    blocks = []
    for name, structure in stream.inverse.of(of_queries.blocks):
        block, way = of_queries.blocks[name], stream.ways[name]
        found = work(way.way, Sizes.of(block, queries, train, way.query_rank))
        works[name] = Work(found.queries, passes * found.train, found.products)
        form = choose_form(structure, of_train.blocks[name], storage)
        nbytes = train * numbers_stored(form, of_train.blocks[name], storage.rank) * storage.dtype.itemsize
        flops = _OPERATIONS * works[name].total
        blocks.append(BlockCost(name, block.layout.matrix_shape, block.shared, way.way, flops, form, nbytes))
    # Add the phases that are not split by block.
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
    """Return the operations of one phase, summed over blocks."""
    return sum(_OPERATIONS * int(getattr(found, phase)) for found in works.values())


def _passes(batch: GradientBatch) -> int:
    """Return the number of operations per example of a forward and a backward pass: one weight product for each."""
    return sum(2 * _OPERATIONS * block.shared * _touched(block) for block in batch.blocks.values())


def _touched(block: BlockGradients) -> int:
    """Return the number of multiplications per row. It is zero for embeddings, which look up rows of a table."""
    return 0 if any(any(use.units) for use in block.uses) else block.numbers


def _bytes(batch: GradientBatch) -> int:
    """Return the number of bytes of the rows of a batch."""
    some = next(iter(batch.blocks.values()))
    numbers = sum(numbers_stored("rows", block, None) for block in batch.blocks.values())
    return len(batch) * numbers * some.dtype.itemsize
