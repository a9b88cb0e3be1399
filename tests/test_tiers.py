"""Tiers of tests: all places exist, and what covers combinations covers them."""

from itertools import combinations, product

import pytest

from tests.tiers import ROOT, TIERS, covering, tier_of


@pytest.mark.parametrize("start", TIERS)
def test_places_exist(start: str) -> None:
    """A file that was moved is in no tier by its old name."""
    assert (ROOT / start).exists()


def test_the_longest_start_decides() -> None:
    assert tier_of(ROOT / "tests/distributed/test_factors.py") == "library"
    assert tier_of(ROOT / "tests/distributed/test_resume.py") == "ranks"
    assert tier_of(ROOT / "tests/distributed") == ""
    assert tier_of(ROOT / "tests/docs") == "book"
    assert tier_of(ROOT / "tests/factors/test_kfac.py") == tier_of(ROOT / "kfs/problem/data.py") == "library"


def test_every_pair_of_three_parameters_is_there() -> None:
    """In fewer combinations than all; without any of those that are chosen, a pair is missing at least once."""
    rows = list(product(range(4), range(3), range(2)))
    chosen = [rows[place] for place in sorted(covering(rows))]
    pairs = {pair for row in rows for pair in combinations(enumerate(row), 2)}
    assert {pair for row in chosen for pair in combinations(enumerate(row), 2)} == pairs
    assert len(chosen) < len(rows) / 1.5


def test_one_parameter_and_none_keep_everything() -> None:
    assert covering([("a",), ("b",), ("c",)]) == {0, 1, 2}
    assert covering([()]) == {0}
