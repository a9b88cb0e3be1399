"""Row maps alone: given, guessed, measured, and applied to other batches."""

import pytest
import torch

from kfs.errors import DataError
from kfs.factors.rows.measure import measured
from kfs.factors.rows.row_map import IndexedRows, KnownUse, StridedRows, UnknownRows, by_length


def test_owners() -> None:
    assert not IndexedRows(torch.tensor([1, 0]), 2).in_order(2)
    assert StridedRows(2, 3).by_datum(torch.ones(0, 4)).shape == (2, 0, 4)
    assert by_length(3, (6,), axis=1) == StridedRows(3, 1)
    assert by_length(3, (4, 3), axis=1) == StridedRows(3, 1)
    assert by_length(3, (6, 2)) == StridedRows(3, 4)
    assert by_length(3, (0, 2)) == StridedRows(3, 1)
    for leading, axis in (((4, 2), None), ((2, 3, 3), None), ((4, 2), 1)):
        with pytest.raises(DataError, match="is not found"):
            by_length(3, leading, axis)


def test_owners_that_are_not_known() -> None:
    owners = UnknownRows(DataError("Whose is it?", "Ask."), 2)
    assert not owners.in_order(2)
    with pytest.raises(DataError, match="Whose"):
        owners.by_datum(torch.ones(2, 1))
    with pytest.raises(DataError, match="Whose"):
        owners.counts(2, torch.ones(()))
    with pytest.raises(DataError, match="Whose"):
        owners.index(2)
    with pytest.raises(DataError, match="Whose"):
        owners.most(2)


def test_number_of_owners() -> None:
    gradients = torch.tensor([[1.0], [2.0], [0.0]], dtype=torch.float64)
    (found,) = measured([gradients, gradients * torch.tensor([[1.0], [2.0], [1.0]])], [3], 2, torch.float32)
    assert found.row_map.tolist() == [0, 1, -1]
    assert found.number_of_owners == 2
    assert not found.mixes


def test_orders_in_other_batches() -> None:
    """An order is valid for other batches if only the batch axis has another length."""
    first, last = (KnownUse(("linear", "W"), shape, 4, inner) for shape, inner in (((4, 5), 5), ((5, 4), 1)))
    assert first.row_map(8, (8, 5)) == StridedRows(8, 5)
    assert last.row_map(8, (5, 8)) == StridedRows(8, 1)
    for num_data, leading in ((8, (8, 6)), (8, (7, 5)), (8, (8,)), (5, (4, 5))):
        assert first.row_map(num_data, leading) is None
    assert last.row_map(8, (10, 4)) is None
