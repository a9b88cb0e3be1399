"""Pairs of queries and training data, batch by batch: queries are multiplied with the inverse once, and kept."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kfs.errors import DataError
from kfs.influence.ways import Chosen, choose, self_products
from kfs.kfac.block_gradients import BlockGradients, joined_gradients
from kfs.kfac.datum_gradients import GradientBatch, per_datum
from kfs.kfac.structures import BlockDiagonal, Structure
from kfs.losses.quantities import Quantity
from kfs.progress import show_progress
from kfs.risk import EmpiricalRisk


@dataclass(frozen=True)
class Request:
    """What was asked for, after it was checked.

    Attributes:
        queries: Data to explain.
        train: Data to explain them by.
        of: Quantity of queries.
        of_train: Quantity of training data.
        normalize: `None`, `"cosine"` or `"self"`.
        memory: How many bytes of the queries' gradients are kept.
        query_rank: How many singular vectors of a query's gradients are kept, where that takes fewer operations.
    """

    queries: EmpiricalRisk
    train: EmpiricalRisk
    of: Quantity
    of_train: Quantity
    normalize: str | None
    memory: int
    query_rank: int | None = None


@dataclass(frozen=True)
class Queries:
    """Gradients of some queries, multiplied with the inverse.

    Attributes:
        start: Index of the first query.
        stop: End of the half-open range of queries, `start` to `stop`.
        gradients: By block.
        own: Their scores with themselves, if these are needed.
    """

    start: int
    stop: int
    gradients: Mapping[str, BlockGradients]
    own: Tensor | None

    def __len__(self) -> int:
        return self.stop - self.start


class Stream:
    """Runs over queries and training data.

    Args:
        K: Has the blocks.
        inverse: Its damped inverse.
        request: What was asked for.

    Attributes:
        request: What was asked for.
        operator: Has the blocks.
        structures: The inverse of each block.
        ways: How gradients of each block are multiplied; chosen when the first ones are there.
    """

    def __init__(self, K: BlockDiagonal, inverse: BlockDiagonal, request: Request) -> None:
        """Choose nothing yet: that depends on gradients."""
        self.operator = K
        self.request = request
        self.structures = structures_of(inverse, request.train)
        self.ways: dict[str, Chosen] = {}

    def chunks(self) -> Iterator[Queries]:
        """Yield the queries, as many at a time as memory allows, and show progress."""
        request = self.request
        total = request.queries.num_data
        with show_progress("influence", total, _wanted(request), "query") as line:
            waiting: list[Queries] = []
            for batch in per_datum(request.queries, request.of, blocks=self.operator):
                most = self.most(batch)
                start = batch.start
                while start < batch.stop:
                    stop = min(batch.stop, start + most - sum(map(len, waiting)))
                    waiting.append(self._prepared(batch, start, stop))
                    if sum(map(len, waiting)) == most or stop == total:
                        chunk = _joined(waiting)
                        waiting = []
                        yield chunk
                        line.advance(len(chunk))
                    start = stop

    def train(self) -> Iterator[GradientBatch]:
        """Yield the gradients of training data."""
        return per_datum(self.request.train, self.request.of_train, blocks=self.operator)

    def pairs(
        self,
        queries: Queries,
        batch: GradientBatch,
        product: Callable[[BlockGradients, BlockGradients, BlockGradients], Tensor] | None = None,
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the scores of all pairs by block, `[queries, batch]`; or another product of the same gradients.

        Args:
            queries: Gradients of queries.
            batch: Gradients of training data.
            product: Takes gradients of queries, of training data, and the latter as they were captured.
        """
        normalize = self.request.normalize
        scale = None if normalize is None else self._scale(queries, batch)
        for name, gradients in queries.gradients.items():
            block = batch.blocks[name]
            way = self.ways[name]
            if product is None:
                scores = gradients.inner(way.of_train(block))
            else:
                scores = product(gradients, way.of_train(block.by_place(), keep_rows=True), block)
            if scale is not None:
                scores = scores * scale.reshape(*scale.shape, *[1] * (scores.ndim - 2))
            yield name, scores

    def own(self, batch: GradientBatch) -> Tensor:
        """Return the scores of data with themselves, `[n]`."""
        found = [self_products(block, self.structures[name]) for name, block in batch.blocks.items()]
        return torch.stack(found).sum(0)

    def own_of_train(self, batch: GradientBatch) -> Tensor:
        """Return the scores of training data with themselves, `[n]`."""
        return self.own(batch)

    def way(self, name: str, block: BlockGradients) -> Chosen:
        """Choose how the gradients of a block are multiplied."""
        queries, train = self.request.queries.num_data, self.request.train.num_data
        return choose(self.structures[name], block, queries, train, self.request.query_rank)

    def _scale(self, queries: Queries, batch: GradientBatch) -> Tensor:
        """Return what scores are multiplied with, `[queries, batch]`. Gradients of zero have scores of zero."""
        own = self.own_of_train(batch)
        scale = _inverse_root(own).expand(len(queries), -1)
        return scale if queries.own is None else scale * _inverse_root(queries.own).unsqueeze(1)

    def most(self, batch: GradientBatch) -> int:
        """Return how many queries are kept at a time, after choosing how they are multiplied.

        Args:
            batch: Gradients of some queries.
        """
        if not self.ways:
            self.ways = {name: self.way(name, block) for name, block in batch.blocks.items()}
        each = sum(self.ways[name].bytes_of(block) for name, block in batch.blocks.items())
        return max(1, self.request.memory // max(each, 1))

    def _prepared(self, batch: GradientBatch, start: int, stop: int) -> Queries:
        """Multiply the gradients of some queries with the inverse."""
        part = slice(start - batch.start, stop - batch.start)
        some = batch if (start, stop) == (batch.start, batch.stop) else batch.some(part)
        prepared = {name: self.ways[name].of_queries(block) for name, block in some.blocks.items()}
        return Queries(start, stop, prepared, self.own(some) if self.request.normalize == "cosine" else None)


def structures_of(inverse: BlockDiagonal, risk: EmpiricalRisk) -> dict[str, Structure]:
    """Return the inverse of each block by name, where the gradients are."""
    return {
        layout.name: stack.structure[part].to(risk.device, risk.sum_dtype)
        for stack in inverse.stacks
        for layout, part in stack.slices()
    }


def _joined(parts: list[Queries]) -> Queries:
    """Put queries of several batches one after the other."""
    gradients = {name: joined_gradients([part.gradients[name] for part in parts]) for name in parts[0].gradients}
    own = [part.own for part in parts if part.own is not None]
    return Queries(parts[0].start, parts[-1].stop, gradients, torch.cat(own) if own else None)


def _inverse_root(own: Tensor) -> Tensor:
    """Return one over the root of numbers; zero for those that are not positive."""
    return torch.where(own > 0, own.clamp(min=torch.finfo(own.dtype).tiny).rsqrt(), 0.0)


def _wanted(request: Request) -> bool | None:
    """Whether to show progress: as both risks want it, and no if they disagree."""
    wishes = {request.queries.progress, request.train.progress}
    if False in wishes:
        return False
    return True if True in wishes else None


def check_finite(scores: Tensor, queries: Queries, batch: GradientBatch) -> None:
    """Refuse scores that are not finite, and name a pair of data.

    Raises:
        DataError: If one is.
    """
    if bool(scores.isfinite().all()):
        return
    query, datum = (~scores.isfinite()).nonzero()[0, :2].tolist()
    raise DataError(
        f"The score of query {queries.start + query} and training datum {batch.start + datum} is not finite.",
        "Look for NaN or infinity in their inputs, or for gradients that are so large that products overflow; "
        "float64 has more room.",
    )
