"""Tiers of tests: all paths exist, and covering combinations cover all pairs."""

from itertools import combinations, product

import pytest

from tests.tiers import ROOT, TIERS, covering, tier_of


@pytest.mark.parametrize("start", TIERS)
def test_places_exist(start: str) -> None:
    """The tier of a moved file must be listed with its new path."""
    assert (ROOT / start).exists()


def test_the_longest_start_decides() -> None:
    assert tier_of(ROOT / "tests/distributed/test_factors.py") == "library"
    assert tier_of(ROOT / "tests/distributed/test_resume.py") == "ranks"
    assert tier_of(ROOT / "tests/distributed") == ""
    assert tier_of(ROOT / "tests/docs") == "book"
    assert tier_of(ROOT / "tests/factors/test_kfac.py") == tier_of(ROOT / "kfs/problem/data.py") == "library"


def test_every_pair_of_three_parameters_is_there() -> None:
    """There are fewer combinations than all; without any of the chosen ones, at least one pair is missing."""
    rows = list(product(range(4), range(3), range(2)))
    chosen = [rows[place] for place in sorted(covering(rows))]
    pairs = {pair for row in rows for pair in combinations(enumerate(row), 2)}
    assert {pair for row in chosen for pair in combinations(enumerate(row), 2)} == pairs
    assert len(chosen) < len(rows) / 1.5


def test_one_parameter_and_none_keep_everything() -> None:
    assert covering([("a",), ("b",), ("c",)]) == {0, 1, 2}
    assert covering([()]) == {0}
