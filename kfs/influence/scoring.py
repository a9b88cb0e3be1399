"""Loops over queries and training data: the scores of all pairs, or the best of them. `Stream` says where data are."""

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from kfs.data import fingerprint
from kfs.distributed import Same, check_same
from kfs.errors import DataError
from kfs.influence.checks import (
    check_alone,
    check_choice,
    check_count,
    check_memory,
    check_risk,
    check_same_parameters,
)
from kfs.influence.ranking import Best, Ranked, Top
from kfs.influence.stream import Queries, Request, Stream, check_finite
from kfs.influence.tokens import by_token, positions_of
from kfs.kfac.block_gradients import BlockGradients
from kfs.kfac.datum_gradients import GradientBatch
from kfs.kfac.structures import BlockDiagonal
from kfs.losses.quantities import gradient_of, sign_of
from kfs.nested import tensors_in
from kfs.operators.computed_at import warn_of_other_values

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
            rows.setdefault(key, []).append(_joined(parts, 1))
    result = {key: _joined(parts, 0) for key, parts in rows.items()}
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
    """Compute the score of every datum with itself."""
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
    own = {key: _joined(parts, 1) for key, parts in columns.items()}
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


def _joined(parts: Sequence[Tensor], axis: int) -> Tensor:
    """Put scores one after the other; those of fewer positions get zeros."""
    most = [max(part.shape[place] for part in parts) for place in range(2, parts[0].ndim)]
    padded = [pad(part, (0, most[0] - part.shape[2])) if most else part for part in parts]
    return torch.cat(padded, axis)
