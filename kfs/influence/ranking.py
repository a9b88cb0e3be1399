"""The data that help and harm queries most, kept while scores come in: never all scores at once."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kfs.describing import Described, Description, Table, number
from kfs.distributed import Ranks

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
