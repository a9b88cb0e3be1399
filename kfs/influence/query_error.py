"""What the compression of queries costs: a bound by the singular values that are left out, and what was measured."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kfs.describing import Described, Description, Table, counted, number
from kfs.influence.low_rank import truncated
from kfs.influence.stream import Stream
from kfs.influence.ways import choose
from kfs.kfac.datum_gradients import GradientBatch, per_datum


@dataclass(frozen=True, repr=False)
class QueryError(Described):
    """The error of scores if few singular vectors of every query are kept.

    Attributes:
        query_rank: How many are kept.
        left_out: The norm of what is left out, relative to that of all queries' gradients times the inverse, by block.
            Only blocks for which compression takes fewer operations are compressed; others are not in here.
        bound: For every query, `[queries]`: the error of its score with a training datum is at most this number times
            the norm of the datum's gradient.
        measured: The relative error of the scores of all queries and the training data of the first batch.
    """

    query_rank: int
    left_out: Mapping[str, float]
    bound: Tensor
    measured: float

    def describe(self) -> Description:
        """Describe what is left out."""
        title = f"Queries by {counted(self.query_rank, 'singular vector')}: {counted(len(self.left_out), 'block')}"
        rows = [(name, number(share)) for name, share in self.left_out.items()]
        table = Table("blocks", ("block", "norm left out, relative"), rows, ("norm left out, relative",))
        return Description(title, (f"relative error of scores, as measured: {number(self.measured)}",), (table,))


def query_error(stream: Stream) -> QueryError:
    """Compress all queries, and compare their scores with training data of the first batch."""
    request = stream.request
    num_queries, num_train = request.queries.num_data, request.train.num_data
    train = next(stream.train())
    squares: dict[str, list[float]] = {}
    wrong = 0.0
    norm = 0.0
    bounds = []
    for batch in per_datum(request.queries, request.of, blocks=stream.operator):
        difference, full, left_out = _compared(stream, batch, train, num_queries, num_train, squares)
        wrong += float(difference.square().sum())
        norm += float(full.square().sum())
        bounds.append(left_out.sqrt())
    shares = {name: (part / whole) ** 0.5 if whole else 0.0 for name, (part, whole) in squares.items()}
    measured = (wrong / norm) ** 0.5 if norm else 0.0
    return QueryError(request.query_rank or 0, shares, torch.cat(bounds), measured)


def _compared(
    stream: Stream,
    batch: GradientBatch,
    train: GradientBatch,
    num_queries: int,
    num_train: int,
    squares: dict[str, list[float]],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return errors of scores, scores, and squares of what is left out for each query; and add the latter by block."""
    first = next(iter(batch.blocks.values()))
    full = torch.zeros(len(batch), len(train), dtype=first.dtype, device=first.device)
    difference = torch.zeros_like(full)
    left_out = full.new_zeros(len(batch))
    for name, block in batch.blocks.items():
        exact = choose(stream.structures[name], block, num_queries, num_train)
        scores = exact.of_queries(block).inner(exact.of_train(train.blocks[name]))
        full += scores
        way = stream.way(name, block)
        if way.way != "low rank":
            continue
        product = block.multiplied(way.structure)
        found = truncated(product, way.query_rank)
        difference += found.kept.inner(train.blocks[name]) - scores
        left_out += found.left_out.square()
        total = squares.setdefault(name, [0.0, 0.0])
        total[0] += float(found.left_out.square().sum())
        total[1] += float(product.squared_norms().sum())
    return difference, full, left_out
