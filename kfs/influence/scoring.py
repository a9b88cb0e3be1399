"""Scores of pairs of queries and training data: all scores, the best scores, self-scores, and scores by token.

A `Request` has the arguments and checks them, a `Stream` computes scores batch by batch. Products of gradients live in
`kfs.influence.ways`, scores from stored gradients in `kfs.influence.index`.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from kfs.display.describe import Described, Description, Table, number
from kfs.display.progress import show_progress
from kfs.display.suggestions import few, suggest
from kfs.distributed import Ranks, Same, check_same
from kfs.errors import DataError, DistributedError, ModelError
from kfs.factors.accumulate import Captured
from kfs.factors.blocks import BlockDiagonal, Structure
from kfs.factors.match import check_risk, check_same_values, warn_of_other_values
from kfs.factors.per_example import BlockGradients, GradientBatch, joined_gradients, per_datum
from kfs.influence.ways import Chosen, choose, self_products
from kfs.losses.quantities import Quantity, gradient_of, sign_of
from kfs.problem.data import fingerprint
from kfs.problem.risk import EmpiricalRisk
from kfs.runtime.nested import tensors_in

By = Literal["block", "layer", "token"]
Normalize = Literal["cosine", "self"]


@dataclass(frozen=True)
class Request:
    """The arguments of `Influence.scores`, and of the methods that share them.

    Attributes:
        queries: The examples to explain.
        train: The training data.
        of: Quantity of queries.
        of_train: Quantity of training data.
        by: Parts that scores are split into; `None` for totals.
        normalize: `None`, `"cosine"` or `"self"`.
        memory: Number of bytes for the gradients of queries.
        query_rank: Number of singular vectors to keep of a query's gradients, if that takes fewer operations.
        k: Number of training examples to find for each query; `None` if all scores are returned.
    """

    queries: EmpiricalRisk
    train: EmpiricalRisk
    of: Quantity = "loss"
    of_train: Quantity = "loss"
    by: By | None = None
    normalize: Normalize | None = None
    memory: int = 2**32
    query_rank: int | None = None
    k: int | None = None

    def check(self, K: BlockDiagonal) -> None:
        """Check all arguments, and warn if parameters have changed since the curvature was computed.

        Raises:
            ModelError: If models or parameters differ, or an option is invalid.
            DataError: If there are no data.
        """
        check_choice("by", self.by, get_args(By))
        check_choice("normalize", self.normalize, get_args(Normalize))
        check_bytes("memory", self.memory)
        check_count("query_rank", self.query_rank)
        if not K.distribution.is_complete:
            K.distribution.check(self.train.ranks)
        _check_data(K, self.train, self.of_train, "train")
        _check_data(K, self.queries, self.of, "queries")
        check_same_values(K, self.queries, self.train)
        # The warning points to the caller of the method of `Influence` or `Index`.
        warn_of_other_values(K, self.train.params, stacklevel=5)


def _check_data(K: BlockDiagonal, risk: EmpiricalRisk, of: Quantity, what: str) -> None:
    """Check that there are data, for a model with the parameters of the curvature, and that the quantity exists."""
    check_risk(K, risk, what, owner=what)
    settings = getattr(K, "settings", None)
    # With `uncovered="skip"`, the operator may lack parameters that no rule covers.
    exhaustive = settings is not None and settings.uncovered != "skip"
    extra = [name for name in risk.params if name not in K.domain.shapes] if exhaustive else []
    if extra:
        raise ModelError(
            f"{what} has the parameters {few(extra)}, which the curvature lacks.",
            "Use the same model, and the same params= for both.",
        )
    risk.count()  # raises an error if there are no data
    gradient_of(of, risk.loss)  # raises an error for unknown quantities


def check_choice(what: str, value: object, choices: Sequence[str]) -> None:
    """Raise `ModelError` unless a value is `None` or one of the choices."""
    if value is not None and value not in choices:
        raise ModelError(f"{what} is {value!r}.", f"{suggest([value], choices)} Or leave it out.")


def check_bytes(what: str, nbytes: object) -> None:
    """Raise `ModelError` unless a value is a number of bytes."""
    if type(nbytes) is not int or nbytes < 0:
        raise ModelError(f"{what} is {nbytes!r}.", "Use a number of bytes, such as 2**30.")


def check_count(what: str, number: object, *, optional: bool = True) -> None:
    """Raise `ModelError` unless a value is a positive integer, or `None` if it is optional."""
    if number is None and optional:
        return
    if type(number) is not int or number < 1:
        raise ModelError(f"{what} is {number!r}.", f"Use a positive integer{', or leave it out' if optional else ''}.")


def check_alone(risk: EmpiricalRisk, what: str) -> None:
    """Raise `DistributedError` if the data of a risk are split over processes. `what` is the computation."""
    if risk.ranks.are_several:
        raise DistributedError(
            f"{what} cannot be computed from data that are split over {risk.ranks.size} processes.",
            "Pass an EmpiricalRisk of all these data, without kfs.shard and group=.",
        )


@dataclass(frozen=True)
class Queries:
    """Gradients of some queries, multiplied by the inverse.

    Attributes:
        start: Index of the first query.
        stop: End of the half-open range of queries, `start` to `stop`.
        gradients: Gradients times the inverse, by block.
        own: Self-scores of the queries; `None` if they are not needed.
    """

    start: int
    stop: int
    gradients: dict[str, BlockGradients]
    own: Tensor | None

    def __len__(self) -> int:
        return self.stop - self.start


class Stream:
    """Iterates over queries and training data, and computes their scores.

    Args:
        K: The curvature.
        inverse: The damped inverse of the curvature.
        request: The arguments.

    Attributes:
        request: The arguments.
        operator: The curvature.
        inverse: The damped inverse, block by block.
        ways: How gradients of each block are multiplied. They are chosen from the first batch of gradients.
    """

    def __init__(self, K: BlockDiagonal, inverse: BlockDiagonal, request: Request) -> None:
        self.operator = K
        self.request = request
        self.inverse = Inverse(inverse, request.train)
        self.ways: dict[str, Chosen] = {}
        self._own: dict[int, Tensor] = {}  # self-scores of training data by the index of the first example of a batch

    def check_ranks(self) -> None:
        """Raise `DistributedError` if queries, options or the inverse differ between the ranks of the training data."""
        train, queries = self.request.train, self.request.queries
        if not train.ranks.are_several:
            return
        # Functions differ between processes, so compare their names.
        settings: dict[str, object] = {}
        for name in ("of", "of_train", "by", "normalize", "memory", "query_rank", "k"):
            value = getattr(self.request, name)
            settings[name] = getattr(value, "__qualname__", type(value).__name__) if callable(value) else value
        batches = [] if queries is train else [fingerprint(batch.x, batch.y) for batch in queries.batches()]
        K = self.inverse.operator
        inverse = (
            {}
            if not K.distribution.is_complete
            else {
                f"{name} {place}": t
                for name, structure in K.structures.items()
                for place, t in enumerate(tensors_in(structure.state()))
            }
        )
        same_queries = "Pass the same queries in all processes; only training data are split."
        facts = {
            "Options": Same(settings, "Pass the same arguments in all processes."),
            "Queries": Same({"queries": batches}, same_queries),
            "Inverses of the curvature": Same(inverse, "Use the same curvature and damping in all processes."),
        }
        check_same(train.ranks, "influence", facts)

    def chunks(self) -> Iterator[Queries]:
        """Yield prepared queries, as many at a time as memory allows, and show progress."""
        request = self.request
        total = request.queries.num_data
        # `False` wins over `True`, and `True` over `None`.
        wishes = {request.queries.progress, request.train.progress}
        wanted = False if False in wishes else (True in wishes or None)
        with show_progress("influence", total, wanted, "query") as line:
            pending: list[Queries] = []
            for batch in per_datum(request.queries, request.of, blocks=self.operator):
                most = self.most(batch)
                # A chunk may contain several batches, and a batch may be split over several chunks.
                start = batch.start
                while start < batch.stop:
                    stop = min(batch.stop, start + most - sum(map(len, pending)))
                    pending.append(self._prepared(batch, start, stop))
                    number = sum(map(len, pending))
                    if number == most or stop == total:
                        chunk = _joined(pending)
                        pending = []
                        yield chunk
                        del chunk  # before the gradients of the next queries
                        line.advance(number)
                    start = stop

    def train(self) -> Iterator[GradientBatch]:
        """Yield the gradients of training data."""
        return per_datum(self.request.train, self.request.of_train, blocks=self.operator)

    def pairs(self, queries: Queries, batch: GradientBatch) -> Iterator[tuple[str, Tensor]]:
        """Yield block names with the scores of all pairs, `[queries, batch]`, or `[queries, batch, positions]`."""
        request = self.request
        scale = None if request.normalize is None else self._scale(queries, batch)
        positions = positions_of(batch) if request.by == "token" else None
        for name, gradients in queries.gradients.items():
            block = batch.blocks[name]
            way, structure = self.ways[name], self.inverse.kept.get(name)
            if positions is None:
                scores = gradients.inner(way.of_train(block, structure))
            else:
                train = way.of_train(block.by_place(), structure, keep_rows=True)
                scores = by_token(gradients, train, block, positions)
            if scale is not None:
                scores = scores * scale.reshape(*scale.shape, *[1] * (scores.ndim - 2))
            yield name, scores

    def own(self, batch: GradientBatch) -> Tensor:
        """Return the self-scores of a batch, `[n]`."""
        found = [self_products(batch.blocks[name], structure) for name, structure in self.inverse.of(batch.blocks)]
        return torch.stack(found).sum(0)

    def own_of_train(self, batch: GradientBatch) -> Tensor:
        """Return the self-scores of a batch of training data, `[n]`."""
        return self._own[batch.start] if self._own else self.own(batch)

    def prepare(self) -> None:
        """Compute the self-scores of training data before all others, if they need blocks that are not kept."""
        if not self.inverse.are_kept:
            self._own = dict(self.own_of_each_batch())

    def own_of_each_batch(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the index of the first example of each batch of training data, with the self-scores of the batch.

        Raises:
            ModelError: If blocks have owners, and parameters are gathered layer by layer: both wait for other ranks.
        """
        if self.request.train.whole.by_layer and self.inverse.operator.distribution.ranks.are_several:
            raise ModelError(
                "Scores of examples with themselves, which normalize= needs, are not supported if blocks have owners "
                "and parameters are gathered layer by layer.",
                "Use a curvature with placement='replicated', or a risk without by_layer=True.",
            )
        for batch in self.inverse.in_step(self.train()):
            if batch is not None:
                yield batch.start, self.own(batch)

    def way(self, name: str, block: BlockGradients, structure: Structure) -> Chosen:
        """Choose how the gradients of a block are multiplied."""
        queries, train = self.request.queries.num_data, self.request.train.num_data
        return choose(structure, block, queries, train, self.request.query_rank, rotate=self.inverse.are_kept)

    def _scale(self, queries: Queries, batch: GradientBatch) -> Tensor:
        """Return the normalization factors of scores, `[queries, batch]`. They are zero for gradients of zero."""
        own = self.own_of_train(batch)
        scale = _inverse_root(own).expand(len(queries), -1)
        return scale if queries.own is None else scale * _inverse_root(queries.own).unsqueeze(1)

    def most(self, batch: GradientBatch) -> int:
        """Return the number of queries that fit into memory, and choose how gradients are multiplied if necessary."""
        if not self.ways:
            self.ways = {n: self.way(n, batch.blocks[n], structure) for n, structure in self.inverse.of(batch.blocks)}
        each = sum(self.ways[name].bytes_of(block) for name, block in batch.blocks.items())
        return max(1, self.request.memory // max(each, 1))

    def _prepared(self, batch: GradientBatch, start: int, stop: int) -> Queries:
        """Multiply the gradients of queries `start` to `stop` by the inverse."""
        part = slice(start - batch.start, stop - batch.start)
        some = batch if (start, stop) == (batch.start, batch.stop) else batch.some(part)
        inverse = self.inverse.of(some.blocks)
        prepared = {name: self.ways[name].of_queries(some.blocks[name], structure) for name, structure in inverse}
        return Queries(start, stop, prepared, self.own(some) if self.request.normalize == "cosine" else None)


class Inverse:
    """The inverse, block by block, on the device of gradients and in their precision.

    Blocks are kept if they are in this process and on this device. Otherwise, they arrive one after the other, from
    host memory or from the processes that own them, whenever gradients are multiplied.

    Args:
        operator: The damped inverse of the curvature.
        risk: The training data.

    Attributes:
        operator: The damped inverse of the curvature.
        are_kept: Whether blocks are kept.
        kept: The blocks by name; empty if they are not kept.
    """

    def __init__(self, operator: BlockDiagonal, risk: EmpiricalRisk) -> None:
        self.operator = operator
        self._ranks = operator.distribution.ranks
        self._device, self._dtype = risk.device, risk.sum_dtype
        self.are_kept = operator.distribution.is_complete and not operator.is_elsewhere
        self.kept = {n: s.to(risk.device, self._dtype) for n, s in operator.structures.items()} if self.are_kept else {}

    def of(self, blocks: Collection[str]) -> Iterator[tuple[str, Structure]]:
        """Yield the inverses of some blocks by name. If blocks have owners, all ranks must iterate together."""
        if self.are_kept:
            for name in blocks:
                yield name, self.kept[name]
            return
        for name, structure in self.operator.each():
            if name in blocks:
                yield name, structure.to(self._device, self._dtype)

    def in_step(self, batches: Iterator[GradientBatch]) -> Iterator[GradientBatch | None]:
        """Yield batches. If blocks have owners, also yield `None` until all ranks have ended, after a use of `of`."""
        while any(self._ranks.gather("batches", (batch := next(batches, None)) is not None)):
            yield batch
            if batch is None:
                for _ in self.of(()):
                    pass


def _joined(parts: list[Queries]) -> Queries:
    """Concatenate queries of several batches. Their gradients are freed block by block."""
    names = list(parts[0].gradients)
    gradients = {name: joined_gradients([part.gradients.pop(name) for part in parts]) for name in names}
    own = [part.own for part in parts if part.own is not None]
    return Queries(parts[0].start, parts[-1].stop, gradients, torch.cat(own) if own else None)


def _inverse_root(own: Tensor) -> Tensor:
    """Return the inverse square root of numbers, and zero for numbers that are not positive."""
    return torch.where(own > 0, own.clamp(min=torch.finfo(own.dtype).tiny).rsqrt(), 0.0)


def check_finite(scores: Tensor, queries: Queries, batch: GradientBatch) -> None:
    """Raise `DataError` if a score is not finite; the message names the pair."""
    if bool(scores.isfinite().all()):
        return
    query, datum = (~scores.isfinite()).nonzero()[0, :2].tolist()
    raise DataError(
        f"The score of query {queries.start + query} and training example {batch.start + datum} is not finite.",
        "Look for NaN or infinity in their inputs, or for gradients that are so large that products overflow. In the "
        "latter case, use float64.",
    )


_SHOWN = 5  # number of queries, and of training examples per query, that `Top` shows


class Ranked(NamedTuple):
    """Selected training data for every query, in descending order of influence.

    Attributes:
        values: Scores, `[queries, k]`.
        indices: Indices of the training examples, `[queries, k]`.
    """

    values: Tensor
    indices: Tensor


@dataclass(frozen=True, repr=False)
class Top(Described):
    """The most helpful and the most harmful training data of each query.

    Attributes:
        helpful: The training examples for which removal is predicted to make the query worse by the largest amount.
        harmful: The training examples for which removal is predicted to make the query better by the largest amount.

    Example:
        >>> values, indices = torch.tensor([[2.0, -1.0]]), torch.tensor([[7, 3]])
        >>> print(Top(Ranked(values, indices), Ranked(values.flip(1), indices.flip(1))))
        The 2 most helpful and 2 most harmful examples of 1 query
        query  helpful        harmful
        -----  -------------  -------------
        0      7 (2), 3 (-1)  3 (-1), 7 (2)
    """

    helpful: Ranked
    harmful: Ranked

    def describe(self) -> Description:
        """Describe the number of examples, with a few indices and scores if they are on the CPU."""
        queries, k = self.helpful.indices.shape
        of_each = "1 query" if queries == 1 else f"each of {queries:,} queries"
        title = f"The {k} most helpful and {k} most harmful examples of {of_each}"
        if self.helpful.values.device.type != "cpu":
            return Description(title)
        rows = []
        for query in range(min(queries, _SHOWN)):
            cells = [_shown(ranked.values[query], ranked.indices[query]) for ranked in (self.helpful, self.harmful)]
            rows.append((str(query), *cells))
        return Description(title, (), (Table("", ("query", "helpful", "harmful"), rows),))


class Best:
    """Keeps the largest numbers of a stream of batches.

    Args:
        k: Number of values to keep for every query.
    """

    def __init__(self, k: int) -> None:
        self.k = k
        self._kept: Ranked | None = None

    def add(self, values: Tensor, first: int) -> None:
        """Add numbers `[queries, m]` of consecutive examples, where `first` is the index of the first one."""
        indices = torch.arange(first, first + values.shape[1], device=values.device).expand(values.shape)
        self._add(values, indices)

    def merge(self, ranks: Ranks, device: torch.device) -> None:
        """Keep the largest numbers of all ranks, which have processed different examples."""
        if not ranks.are_several:
            return
        own = self._kept
        self._kept = None
        for one in ranks.gather_tensors("ranking", {} if own is None else own._asdict()):
            if one:  # a rank without data has none
                self._add(one["values"].to(device), one["indices"].to(device))

    def _add(self, values: Tensor, indices: Tensor) -> None:
        """Add numbers with their indices, and keep the largest ones."""
        if self._kept is not None:
            values = torch.cat([self._kept.values, values], 1)
            indices = torch.cat([self._kept.indices, indices], 1)
        best = values.topk(min(self.k, values.shape[1]), 1)
        self._kept = Ranked(best.values, indices.gather(1, best.indices))

    def ranked(self, sign: int) -> Ranked:
        """Return the kept numbers times `sign`, with their indices."""
        assert self._kept is not None  # noqa: S101 (there are data)
        return Ranked(sign * self._kept.values, self._kept.indices)


def _shown(values: Tensor, indices: Tensor) -> str:
    """Return a few indices with their scores as text."""
    pairs = zip(indices[:_SHOWN].tolist(), values[:_SHOWN].tolist(), strict=True)
    more = ", ..." if len(indices) > _SHOWN else ""
    return ", ".join(f"{index} ({number(value)})" for index, value in pairs) + more


def positions_of(batch: GradientBatch) -> int:
    """Return the number of positions per example: the most common number of rows per use of a parameter."""
    uses = [use for block in batch.blocks.values() for use in block.uses if isinstance(use, Captured)]
    counts = Counter(use.places or use.shared for use in uses)
    most = max(counts, key=lambda count: (counts[count], count), default=1)
    if most < 2:
        raise DataError(
            "The examples have one position each, so there are no scores by token.",
            "Use by='block', or leave by= out.",
        )
    return most


def by_token(queries: BlockGradients, train: BlockGradients, captured: BlockGradients, positions: int) -> Tensor:
    """Return the share of every position in inner products of gradients, `[n, m, positions]`.

    Gradients of queries were multiplied by the inverse. The rows of `captured` show how those of `train` belong to
    positions. If they do not, this raises `DataError`.
    """
    total = torch.zeros(queries.num_data, train.num_data, positions, dtype=queries.dtype, device=queries.device)
    if captured.whole is not None:
        raise _error(captured, "no rows, because no rule covers it")
    for use, part, share in zip(captured.uses, train.parts, queries.inner_by_row(train), strict=True):
        assert isinstance(use, Captured)  # noqa: S101 (captured gradients were not multiplied yet)
        # There must be one row per position; or a parameter was broadcast to positions, with several rows for each.
        if not use.in_order or positions not in {part.shared, use.places}:
            raise _error(captured, f"{part.shared} rows for each example")
        total += share.unflatten(2, (positions, -1)).sum(3)
    return total


def _error(gradients: BlockGradients, what: str) -> DataError:
    return DataError(
        f"Block {gradients.layout.name!r} has {what}, so the token of each row is not known.",
        "Use by='block', or leave this parameter out of the curvature and of both risks with params=.",
    )


def all_scores(stream: Stream) -> Tensor | dict[str, Tensor]:
    """Compute the scores of all pairs, in total or by block, layer or token."""
    request = stream.request
    check_alone(request.queries, "Scores of queries")
    stream.check_ranks()
    if request.normalize is not None:
        stream.prepare()
    rows: dict[str, list[Tensor]] = {}
    for chunk in stream.chunks():
        columns = _columns(stream, chunk)
        if request.train.ranks.are_several:
            columns = _of_all_ranks(request.train, columns)
        for key, parts in columns.items():
            rows.setdefault(key, []).append(_joined_scores(parts, 1))
        del chunk  # as in `chunks`
    result = {key: _joined_scores(parts, 0) for key, parts in rows.items()}
    return result if request.by in {"block", "layer"} else result[""]


def _columns(stream: Stream, chunk: Queries) -> dict[str, list[Tensor]]:
    """Return the scores of some queries with all training data of this rank, as a list with one item per batch."""
    columns: dict[str, list[Tensor]] = {}
    for batch in stream.train():
        found: dict[str, Tensor] = {}
        for name, scores in stream.pairs(chunk, batch):
            key = _key(stream.request.by, batch.blocks[name])
            found[key] = scores if key not in found else found[key].add_(scores)
        for key, scores in found.items():
            check_finite(scores, chunk, batch)
            columns.setdefault(key, []).append(scores)
    return columns


def self_scores(stream: Stream) -> Tensor:
    """Compute the score of every training example with itself, `[train]`."""
    train = stream.request.train
    stream.check_ranks()
    own = [scores for _, scores in stream.own_of_each_batch()]
    # A rank without data has no scores.
    found = train.ranks.gather_tensors("self-scores", {"own": torch.cat(own)} if own else {})
    return torch.cat([one["own"].to(train.device) for one in found if one])


def _of_all_ranks(train: EmpiricalRisk, columns: dict[str, list[Tensor]]) -> dict[str, list[Tensor]]:
    """Gather scores with the training data of all ranks, in the order of the data."""
    own = {key: _joined_scores(parts, 1) for key, parts in columns.items()}
    result: dict[str, list[Tensor]] = {}
    for one in train.ranks.gather_tensors("scores", own):
        for key, part in one.items():
            result.setdefault(key, []).append(part.to(train.device))
    return result


def best(stream: Stream) -> Top:
    """Find the training data with the largest and the smallest scores, without storing all scores.

    Raises:
        DataError: If there are fewer than `k` training data.
    """
    request = stream.request
    k, num_data = request.k, request.train.num_data
    if type(k) is not int or not 1 <= k <= num_data:
        raise DataError(f"k is {k!r}, and there are {num_data:,} training examples.", f"Use 1 to {num_data}.")
    sign = sign_of(request.of) * sign_of(request.of_train)
    found: list[tuple[Ranked, Ranked]] = []
    check_alone(request.queries, "Scores of queries")
    stream.check_ranks()
    if request.normalize is not None:
        stream.prepare()
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
        del chunk  # as in `chunks`
    both = [Ranked(*map(torch.cat, zip(*parts, strict=True))) for parts in zip(*found, strict=True)]
    return Top(*both)


def _key(by: By | None, block: BlockGradients) -> str:
    """Return the key under which the scores of a block are summed: the block, its layer, or `""` for the total."""
    if by == "block":
        return block.layout.name
    if by == "layer":
        return block.layout.weight.rpartition(".")[0] or block.layout.name
    return ""


def _joined_scores(parts: Sequence[Tensor], axis: int) -> Tensor:
    """Concatenate scores along an axis. Scores of fewer positions are padded with zeros."""
    most = [max(part.shape[place] for part in parts) for place in range(2, parts[0].ndim)]
    padded = [pad(part, (0, most[0] - part.shape[2])) if most else part for part in parts]
    return torch.cat(padded, axis)
