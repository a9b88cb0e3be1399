"""The kit itself is tested: it rejects every wrong implementation, with the right check and the right hint."""

import pytest

from kfs.conformance import Adapter, checks, run_one
from tests.conformance.zoo import ZOO

CHECKS = checks()


@pytest.mark.parametrize("name", ZOO)
def test_wrong_implementation(name: str) -> None:
    wrong = ZOO[name]
    adapter = Adapter(name, wrong.compute)
    for check in CHECKS:
        if check.name.startswith(wrong.check):
            result = run_one(adapter, check)
            assert result.status == wrong.status, check.name
            assert wrong.hint in result.message
            assert ("nothing was compared" in result.bug) == (result.outcome == "failed")
        if wrong.fine is not None and check.name.startswith(wrong.fine):
            assert run_one(adapter, check).status == "passed", check.name


def test_names_in_the_zoo_are_those_of_checks() -> None:
    for wrong in ZOO.values():
        assert any(check.name.startswith(wrong.check) for check in CHECKS)
        assert wrong.fine is None or any(check.name.startswith(wrong.fine) for check in CHECKS)
