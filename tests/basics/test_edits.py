"""Every definition notices mistakes: one line of it is changed at a time, and then its own check must fail."""

import pytest

from kfs.basics import mc_fishers
from tests.edits import Edit, check_edit, failure

EDITS = [
    Edit(mc_fishers, "return reduction_factor(loss, y) / mc_samples", "return reduction_factor(loss, y)", "come close"),
]


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.name)
def test_an_edit_is_noticed(edit: Edit) -> None:
    check_edit(edit)


def test_without_an_edit_nothing_is_noticed() -> None:
    assert failure(mc_fishers) is None


def test_what_is_no_edit() -> None:
    with pytest.raises(AssertionError, match="occurs 0 times"):
        failure(mc_fishers, "no such text", "")
    with pytest.raises(AssertionError, match=r"occurs \d+ times"):
        failure(mc_fishers, "loss", "lost")
    with pytest.raises(AssertionError, match="one line"):
        failure(mc_fishers, "\n\n", "\n")
    with pytest.raises(NameError):  # a copy that crashes has not noticed anything
        failure(mc_fishers, "vec: Vec = rvec", "vec: Vec = undefined")
