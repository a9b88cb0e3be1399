"""Every file runs, verifies its claims, and has no effect when it is imported."""

import runpy
from importlib import import_module
from pathlib import Path

import pytest
import torch

import kfs
from kfs import kfac_tests
from kfs.errors import VerificationError
from kfs.factors import KFAC
from kfs.factors.block import Factors
from kfs.kfac_tests import _checks
from kfs.tour.run import definitions, run_definition
from kfs.verification import by_claim, recording

PACKAGE = Path(kfs.__file__).parent
FILES = {file.stem: file for file in definitions() if not file.is_relative_to(PACKAGE / "basics")}


@pytest.mark.parametrize("name", FILES)
def test_file(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    parts = FILES[name].relative_to(PACKAGE).with_suffix("").parts
    import_module(".".join(("kfs", *parts)))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("folder", ["basics", "factors", "kfac", "kfac_tests", "optim"])
def test_the_tour_runs_every_file_that_verifies_something(folder: str) -> None:
    programs = {file for file in (PACKAGE / folder).rglob("*.py") if "if __name__ ==" in file.read_text("utf-8")}
    assert programs == {file for file in definitions() if file.is_relative_to(PACKAGE / folder)}


def test_all_files_are_listed() -> None:
    folder = Path(kfac_tests.__file__).parent
    assert {file.stem for file in folder.glob("[a-z]*.py")} == set(kfac_tests.CONTENTS)


@pytest.mark.parametrize("name", kfac_tests.CONTENTS)
def test_a_program_prints_one_row_per_claim(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with recording() as checks:
        runpy.run_path(str(FILES[name]), run_name="__main__")
    head, *rows = capsys.readouterr().out.splitlines()
    claims = by_claim(checks)
    assert head.split() == ["claim", "cases", "largest", "error"]
    assert [row.removeprefix("[ok] ").rsplit(maxsplit=2)[0] for row in rows] == list(claims)
    assert [int(row.split()[-2]) for row in rows] == [len(cases) for cases in claims.values()]
    # Claims about the listings are verified for the engine, too, which supports more layers.
    ours = [claim for claim in claims if claim.startswith("the engine's")]
    assert len(ours) == len(claims) - len(ours)


def test_a_wrong_kfac_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """With factors scaled by the number of examples, the deep linear test fails; one example does not reveal it."""

    class Wrong(KFAC):
        """Forgets to divide by the number of examples."""

        def _set(self, factors: Factors) -> None:
            super()._set(factors)
            for block in self.blocks.values():
                block.reduction_factor *= self.num_data

    monkeypatch.setattr(_checks, "KFAC", Wrong)
    report = run_definition(FILES["deep_linear_regression"])
    assert "False: the engine's KFAC-type-II (expand) equals the GGN" in (report.failure or "")
    assert issubclass(VerificationError, AssertionError)
    torch.manual_seed(0)
    assert run_definition(FILES["mlp_batch_size_1"]).failure is None
