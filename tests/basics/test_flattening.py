from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kfs.basics.flattening import VecFunction, cvec, matricize, rvec, unflatten_cvec, unflatten_rvec
from kfs.errors import DtypeError, FlatteningError, ShapeError
from tests.basics.cases import assert_close, shapes

# NumPy's two memory orders are an independent implementation of the two flattenings.
ORDERS = [(cvec, unflatten_cvec, "F"), (rvec, unflatten_rvec, "C")]


def tensor(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


@pytest.mark.parametrize(("vec", "_unflatten", "order"), ORDERS)
@given(shape=shapes)
def test_full_flattening_is_numpys(
    vec: VecFunction, _unflatten: object, order: Literal["C", "F"], shape: tuple[int, ...]
) -> None:
    t = tensor(shape)
    assert_close(vec(t), torch.from_numpy(np.reshape(t.numpy(), -1, order=order)))


@pytest.mark.parametrize(("vec", "unflatten", "order"), ORDERS)
@given(before=shapes, middle=st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple), after=shapes)
def test_partial_flattening_keeps_the_other_axes(vec, unflatten, order, before, middle, after) -> None:  # type: ignore[no-untyped-def]
    t = tensor((*before, *middle, *after))
    start, end = len(before), len(before) + len(middle) - 1
    flat = vec(t, start, end)
    for index in np.ndindex(*before):
        rest = t[index].movedim(tuple(range(len(middle))), tuple(range(-len(middle), 0)))
        for last in np.ndindex(*after):
            expected = np.reshape(rest[last].numpy(), -1, order=order)
            assert_close(flat[(*index, slice(None), *last)], torch.from_numpy(expected.copy()))
    assert_close(vec(t, start - t.ndim, end - t.ndim), flat)
    assert_close(unflatten(flat, middle, dim=start), t)
    assert_close(unflatten(flat, middle, dim=start - flat.ndim), t)


@pytest.mark.parametrize(("vec", "unflatten", "_order"), ORDERS)
@given(shape=shapes)
def test_unflattening_is_the_inverse(vec, unflatten, _order, shape) -> None:  # type: ignore[no-untyped-def]
    t = tensor(shape)
    assert_close(unflatten(vec(t), shape), t)
    v = tensor((t.numel(),))
    assert_close(vec(unflatten(v, shape)), v)


@pytest.mark.parametrize(("vec", "_unflatten", "order"), ORDERS)
@given(rows=shapes, columns=shapes)
def test_matricization_flattens_rows_and_columns(vec, _unflatten, order, rows, columns) -> None:  # type: ignore[no-untyped-def]
    t = tensor((*rows, *columns))
    num_rows, num_columns = int(np.prod(rows)), int(np.prod(columns))
    matrix = matricize(t, len(rows), vec)
    assert matrix.shape == (num_rows, num_columns)
    assert_close(matrix, torch.from_numpy(np.reshape(t.numpy(), (num_rows, num_columns), order=order).copy()))


def test_the_flattenings_are_not_interchangeable() -> None:
    t = torch.arange(6).reshape(2, 3)
    assert not torch.equal(cvec(t), rvec(t))
    assert not torch.equal(unflatten_cvec(rvec(t), t.shape), t)


@pytest.mark.parametrize("vec", [cvec, rvec])
@pytest.mark.parametrize(("start", "end"), [(1, 0), (0, 2), (-3, 1), (2, 2)])
def test_bad_ranges_are_refused(vec: VecFunction, start: int, end: int) -> None:
    with pytest.raises(ShapeError, match=f"Axes {start} to {end} .*shape \\[2, 3\\]"):
        vec(torch.zeros(2, 3), start, end)


@pytest.mark.parametrize("unflatten", [unflatten_cvec, unflatten_rvec])
def test_wrong_sizes_are_refused(unflatten) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ShapeError, match=r"\[5\] cannot become \[2, 3\] \(6 entries\)"):
        unflatten(torch.zeros(5), (2, 3))
    with pytest.raises(ShapeError, match="cannot become"):
        unflatten(torch.tensor(1.0), ())


def test_only_tensors_and_known_flattenings_are_accepted() -> None:
    with pytest.raises(DtypeError, match="t is a list"):
        cvec([1, 2])  # type: ignore[arg-type]
    with pytest.raises(FlatteningError, match="expected one of the functions cvec and rvec"):
        matricize(torch.zeros(2, 2), 1, torch.flatten)  # type: ignore[arg-type]
    with pytest.raises(FlatteningError, match="vec is 'fvec'"):
        matricize(torch.zeros(2, 2), 1, "fvec")  # type: ignore[arg-type]
