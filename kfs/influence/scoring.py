"""Scores of pairs of queries and training data: streams of pairs, all scores or the best ones, scores by token."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kfs.display.describe import Described, Description, Table, number
from kfs.display.progress import show_progress
from kfs.distributed import Ranks, Same, check_same
from kfs.errors import DataError
from kfs.factors.accumulate import Captured
from kfs.factors.blocks import BlockDiagonal, Structure
from kfs.factors.per_example import BlockGradients, GradientBatch, joined_gradients, per_datum
from kfs.influence.checks import (
    check_alone,
    check_choice,
    check_count,
    check_memory,
    check_risk,
    check_same_parameters,
)
from kfs.influence.ways import Chosen, choose, self_products
from kfs.losses.quantities import Quantity, gradient_of, sign_of
from kfs.operators.match import warn_of_other_values
from kfs.problem.data import fingerprint
from kfs.problem.risk import EmpiricalRisk
from kfs.runtime.nested import tensors_in


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
        f"The score of query {queries.start + query} and training example {batch.start + datum} is not finite.",
        "Look for NaN or infinity in their inputs, or for gradients that are so large that products overflow; "
        "float64 has more room.",
    )


_SHOWN = 5  # queries, and data of each


class Ranked(NamedTuple):
    """Some training data for every query, the one with most influence first.

    Attributes:
        values: Scores, `[queries, k]`.
        indices: Which data these are, `[queries, k]`.
    """

    values: Tensor
    indices: Tensor


@dataclass(frozen=True, repr=False)
class Top(Described):
    """The training data that help and harm each query most.

    Attributes:
        helpful: Those whose removal is predicted to make the query worse, most of all.
        harmful: Those whose removal is predicted to make it better, most of all.

    Example:
        >>> values, indices = torch.tensor([[2.0, -1.0]]), torch.tensor([[7, 3]])
        >>> print(Top(Ranked(values, indices), Ranked(values.flip(1), indices.flip(1))))
        The 2 most helpful and 2 most harmful data of each of 1 queries
        query  helpful        harmful
        -----  -------------  -------------
        0      7 (2), 3 (-1)  3 (-1), 7 (2)
    """

    helpful: Ranked
    harmful: Ranked

    def describe(self) -> Description:
        """Describe what is there; a few indices with their scores, if these are on a CPU."""
        queries, k = self.helpful.indices.shape
        title = f"The {k} most helpful and {k} most harmful data of each of {queries:,} queries"
        if self.helpful.values.device.type != "cpu":
            return Description(title)
        rows = []
        for query in range(min(queries, _SHOWN)):
            cells = [_shown(ranked.values[query], ranked.indices[query]) for ranked in (self.helpful, self.harmful)]
            rows.append((str(query), *cells))
        return Description(title, (), (Table("", ("query", "helpful", "harmful"), rows),))


class Best:
    """Keeps the largest of some numbers that come in batches.

    Args:
        k: How many to keep, for every query.
    """

    def __init__(self, k: int) -> None:
        self.k = k
        self._kept: Ranked | None = None

    def add(self, values: Tensor, first: int) -> None:
        """Look at numbers `[queries, m]` that belong to consecutive data."""
        indices = torch.arange(first, first + values.shape[1], device=values.device).expand(values.shape)
        self._add(values, indices)

    def merge(self, ranks: Ranks, device: torch.device) -> None:
        """Keep the largest of all ranks, which have looked at different data."""
        if not ranks.are_several:
            return
        own = self._kept
        self._kept = None
        for one in ranks.gather_tensors("ranking", {} if own is None else own._asdict()):
            if one:  # a rank without data has none
                self._add(one["values"].to(device), one["indices"].to(device))

    def _add(self, values: Tensor, indices: Tensor) -> None:
        """Look at numbers with their indices."""
        if self._kept is not None:
            values = torch.cat([self._kept.values, values], 1)
            indices = torch.cat([self._kept.indices, indices], 1)
        best = values.topk(min(self.k, values.shape[1]), 1)
        self._kept = Ranked(best.values, indices.gather(1, best.indices))

    def ranked(self, sign: int) -> Ranked:
        """Return what was kept, with the sign that numbers had before."""
        assert self._kept is not None  # noqa: S101 (there are data)
        return Ranked(sign * self._kept.values, self._kept.indices)


def _shown(values: Tensor, indices: Tensor) -> str:
    """Return a few indices with their scores."""
    pairs = zip(indices[:_SHOWN].tolist(), values[:_SHOWN].tolist(), strict=True)
    more = ", ..." if len(indices) > _SHOWN else ""
    return ", ".join(f"{index} ({number(value)})" for index, value in pairs) + more


def positions_of(batch: GradientBatch) -> int:
    """Return how many positions the data of a batch have: as many as most uses of parameters have rows.

    Raises:
        DataError: If there is only one.
    """
    uses = [use for block in batch.blocks.values() for use in block.uses if isinstance(use, Captured)]
    counts = Counter(use.places or use.shared for use in uses)
    most = max(counts, key=lambda count: (counts[count], count), default=1)
    if most < 2:
        raise DataError(
            "The data have one position each, so that there are no tokens.", "Use by='block', or leave by= out."
        )
    return most


def by_token(queries: BlockGradients, train: BlockGradients, captured: BlockGradients, positions: int) -> Tensor:
    """Return the share of every position in inner products, `[n, m, positions]`.

    Args:
        queries: Gradients of queries, multiplied with the inverse.
        train: Gradients of training data, by place.
        captured: The same, as they were captured.
        positions: How many positions each example has.

    Raises:
        DataError: If rows of the block are not those of positions.
    """
    total = torch.zeros(queries.num_data, train.num_data, positions, dtype=queries.dtype, device=queries.device)
    if captured.whole is not None:
        raise _error(captured, "no rows, since no rule covers it")
    for use, part, share in zip(captured.uses, train.parts, queries.inner_by_row(train), strict=True):
        assert isinstance(use, Captured)  # noqa: S101 (they were not multiplied yet)
        # Rows are those of positions; or all places of a broadcast parameter are, with several rows each.
        if not use.in_order or positions not in {part.shared, use.places}:
            raise _error(captured, f"{part.shared} rows for each example")
        total += share.unflatten(2, (positions, -1)).sum(3)
    return total


def _error(gradients: BlockGradients, what: str) -> DataError:
    return DataError(
        f"Block {gradients.layout.name!r} has {what}, so that it is not known which token they belong to.",
        "Use by='block', or leave this parameter out of the curvature and of both risks with params=.",
    )


By = Literal["block", "layer", "token"]
Normalize = Literal["cosine", "self"]
BY = ("block", "layer", "token")
_NORMALIZE = ("cosine", "self")


def check_request(K: BlockDiagonal, request: Request) -> None:
    """Refuse what cannot be computed, before anything is. Warn if the model was trained after its curvature.

    Raises:
        ModelError: If models or parameters differ, or an option does not exist.
        DataError: If there are no data.
    """
    check_choice("normalize", request.normalize, _NORMALIZE)
    check_memory(request.memory)
    check_count("query_rank", request.query_rank)
    check_risk(K, request.train, "train")
    check_risk(K, request.queries, "queries")
    gradient_of(request.of, request.queries.loss)
    gradient_of(request.of_train, request.train.loss)
    check_same_parameters(K, request.queries, request.train)
    # The level is that of whoever calls a method of `Influence` or `Index`.
    warn_of_other_values(K, request.train.params, what="The curvature", owner="the model", stacklevel=5)


def check_same_request(stream: Stream, **settings: object) -> None:
    """Refuse queries, options and curvature that differ between the processes that share training data.

    Args:
        stream: What was asked for.
        **settings: Further options.

    Raises:
        DistributedError: If something differs.
    """
    request = stream.request
    train, queries = request.train, request.queries
    if not train.ranks.are_several:
        return
    for name in ("of", "of_train", "normalize", "memory", "query_rank"):
        value = getattr(request, name)
        settings[name] = getattr(value, "__qualname__", type(value).__name__) if callable(value) else value
    batches = [] if queries is train else [fingerprint(batch.x, batch.y) for batch in queries.batches()]
    inverse = {
        f"{name} {place}": t
        for name, structure in stream.structures.items()
        for place, t in enumerate(tensors_in(structure.state()))
    }
    facts = {
        "Options": Same(settings, "Pass the same arguments in all processes."),
        "Queries": Same({"queries": batches}, "Pass the same queries in all processes; only training data are split."),
        "Inverses of the curvature": Same(inverse, "Use the same curvature and damping in all processes."),
    }
    check_same(train.ranks, "influence", facts)


def all_scores(stream: Stream, by: By | None) -> Tensor | dict[str, Tensor]:
    """Compute the scores of all pairs, or parts of them by block, layer or token."""
    rows: dict[str, list[Tensor]] = {}
    check_alone(stream.request.queries, "Scores of queries")
    check_same_request(stream, by=by)
    for chunk in stream.chunks():
        for key, parts in _of_all_ranks(stream, _columns(stream, chunk, by)).items():
            rows.setdefault(key, []).append(_joined_scores(parts, 1))
    result = {key: _joined_scores(parts, 0) for key, parts in rows.items()}
    return result if by in {"block", "layer"} else result[""]


def _columns(stream: Stream, chunk: Queries, by: By | None) -> dict[str, list[Tensor]]:
    """Return scores of some queries with all training data of this process, batch by batch."""
    columns: dict[str, list[Tensor]] = {}
    for batch in stream.train():
        found: dict[str, Tensor] = {}
        for name, scores in _pairs(stream, chunk, batch, by):
            key = _key(by, batch.blocks[name])
            found[key] = scores if key not in found else found[key].add_(scores)
        for key, scores in found.items():
            check_finite(scores, chunk, batch)
            columns.setdefault(key, []).append(scores)
    return columns


def self_scores(stream: Stream) -> Tensor:
    """Compute the score of every example with itself."""
    train = stream.request.train
    check_same_request(stream)
    own = [stream.own(batch) for batch in stream.train()]
    # A rank without data has no scores.
    found = train.ranks.gather_tensors("self-scores", {"own": torch.cat(own)} if own else {})
    return torch.cat([one["own"].to(train.device) for one in found if one])


def _of_all_ranks(stream: Stream, columns: dict[str, list[Tensor]]) -> dict[str, list[Tensor]]:
    """Return scores with the data of all ranks, in the order of data, given those with the data of this one."""
    train = stream.request.train
    if not train.ranks.are_several:
        return columns
    own = {key: _joined_scores(parts, 1) for key, parts in columns.items()}
    result: dict[str, list[Tensor]] = {}
    for one in train.ranks.gather_tensors("scores", own):
        for key, part in one.items():
            result.setdefault(key, []).append(part.to(train.device))
    return result


def best(stream: Stream, k: int) -> Top:
    """Find the data with the largest and the smallest scores, without keeping all of them.

    Raises:
        DataError: If there are fewer than `k` training data.
    """
    request = stream.request
    num_data = request.train.num_data
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= num_data:
        raise DataError(f"k is {k!r}, and there are {num_data:,} training data.", f"Use 1 to {num_data}.")
    sign = sign_of(request.of) * sign_of(request.of_train)
    found: list[tuple[Ranked, Ranked]] = []
    check_alone(request.queries, "Scores of queries")
    check_same_request(stream, k=k)
    for chunk in stream.chunks():
        helpful, harmful = Best(k), Best(k)
        for batch in stream.train():
            scores = torch.stack([part for _, part in stream.pairs(chunk, batch)]).sum(0)
            check_finite(scores, chunk, batch)
            helpful.add(sign * scores, batch.start)
            harmful.add(-sign * scores, batch.start)
        for kept in (helpful, harmful):
            kept.merge(request.train.ranks, request.train.device)
        found.append((helpful.ranked(sign), harmful.ranked(-sign)))
    both = [Ranked(*map(torch.cat, zip(*parts, strict=True))) for parts in zip(*found, strict=True)]
    return Top(*both)


def _pairs(stream: Stream, chunk: Queries, batch: GradientBatch, by: By | None) -> Iterator[tuple[str, Tensor]]:
    """Yield scores by block, or those of every token."""
    if by != "token":
        return stream.pairs(chunk, batch)
    positions = positions_of(batch)
    return stream.pairs(chunk, batch, lambda queries, train, use: by_token(queries, train, use, positions))


def _key(by: By | None, block: BlockGradients) -> str:
    """Return what the scores of a block are added to: themselves, those of its layer, or all."""
    if by == "block":
        return block.layout.name
    if by == "layer":
        return block.layout.weight.rpartition(".")[0] or block.layout.name
    return ""


def _joined_scores(parts: Sequence[Tensor], axis: int) -> Tensor:
    """Put scores one after the other; those of fewer positions get zeros."""
    most = [max(part.shape[place] for part in parts) for place in range(2, parts[0].ndim)]
    padded = [pad(part, (0, most[0] - part.shape[2])) if most else part for part in parts]
    return torch.cat(padded, axis)
