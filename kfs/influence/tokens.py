"""Scores by token: the share of each position of the training data, by the rows that it has in every block."""

from collections import Counter

import torch
from torch import Tensor

from kfs.errors import DataError
from kfs.kfac.block_gradients import BlockGradients
from kfs.kfac.datum_gradients import GradientBatch
from kfs.kfac.sums import Captured


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
        positions: How many positions each datum has.

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
            raise _error(captured, f"{part.shared} rows for each datum")
        total += share.unflatten(2, (positions, -1)).sum(3)
    return total


def _error(gradients: BlockGradients, what: str) -> DataError:
    return DataError(
        f"Block {gradients.layout.name!r} has {what}, so that it is not known which token they belong to.",
        "Use by='block', or leave this parameter out of the curvature and of both risks with params=.",
    )
