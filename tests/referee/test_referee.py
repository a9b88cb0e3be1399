"""Results of all configurations are the stored ones, to round-off; `python -m tests.referee compare` compares bits."""

from functools import cache
from math import inf

import pytest
import torch
from torch import Tensor

from tests.referee.__main__ import main
from tests.referee.configurations import CONFIGURATIONS, TOLERANCE
from tests.referee.results import FOLDER, compare, digest, largest_difference, stored, stored_digests

SOME = "factors/mlp/type-2/expand"
MOST_BYTES = 1_500_000


@cache
def all_stored() -> dict[str, dict[str, Tensor]]:
    """Read results once."""
    return stored()


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_results_are_the_stored_ones(name: str) -> None:
    assert not compare({name: CONFIGURATIONS[name].compute()}, all_stored())


def test_everything_is_stored() -> None:
    assert all_stored().keys() == stored_digests().keys() == CONFIGURATIONS.keys()
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < MOST_BYTES


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_changed_number_is_noticed(name: str) -> None:
    """The largest entry of one result is changed by 1e-9, or by ten times the tolerance if that is larger."""
    old = all_stored()[name]
    assert not compare({name: old}, all_stored())
    change = max(1e-9, 10 * CONFIGURATIONS[name].tolerance)
    key = max(old, key=lambda one: float(old[one].abs().max()))
    changed = old[key].clone().flatten()
    changed[changed.abs().argmax()] *= 1 + change
    new = old | {key: changed.reshape(old[key].shape)}
    (difference,) = compare({name: new}, all_stored())
    assert difference.name == name
    assert difference.result == key
    assert difference.error == pytest.approx(change, rel=1e-3)
    assert digest(new) != digest(old)


def test_the_last_bit_changes_the_digest() -> None:
    old = all_stored()[SOME]
    key = next(iter(old))
    new = old | {key: torch.nextafter(old[key], torch.tensor(inf, dtype=torch.float64))}
    assert largest_difference(SOME, new, old).error < TOLERANCE
    digests = {SOME: digest(old)}
    assert not compare({SOME: old}, all_stored(), digests)
    assert len(compare({SOME: new}, all_stored(), digests)) == 1


def test_other_names_shapes_and_missing_numbers_are_noticed() -> None:
    old = all_stored()[SOME]
    key = next(iter(old))
    without = {name: t for name, t in old.items() if name != key}
    for new in (without, old | {"more": old[key]}, old | {key: old[key][:1]}, old | {key: old[key] * torch.nan}):
        assert largest_difference(SOME, new, old).error == inf
        assert len(compare({SOME: new}, all_stored())) == 1
    (difference,) = compare({SOME: old}, {})
    assert difference.result == "nothing is stored"


def test_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The comparison prints one row per configuration that differs, and its exit status shows whether there is one."""
    assert main(["compare", "--tolerant", SOME]) == 0
    assert capsys.readouterr().out.startswith("0 of 1 configurations differ (within tolerances")
    wrong = {SOME: {key: 1.001 * t for key, t in all_stored()[SOME].items()}}
    monkeypatch.setattr("tests.referee.__main__.stored", lambda: wrong)
    assert main(["compare", "--tolerant", SOME]) == 1
    row, last = capsys.readouterr().out.splitlines()
    assert row.startswith(SOME)
    assert last.startswith("1 of 1 configurations differ")
    assert main([]) == 2
    with pytest.raises(SystemExit, match="No configuration begins with 'nothing'"):
        main(["compare", "nothing"])
