"""Every file runs, verifies what it claims, and does nothing when it is imported."""

from importlib import import_module
from pathlib import Path

import pytest
import torch

from kfs import kfac_tests
from kfs.errors import VerificationError
from kfs.kfac import KFAC
from kfs.kfac_tests import _claims
from kfs.tour import definitions, run_definition

FILES = {file.stem: file for file in definitions() if file.parent.name in {"kfac", "kfac_tests"}}


@pytest.mark.parametrize("name", FILES)
def test_file(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    import_module(f"kfs.{FILES[name].parent.name}.{name}")
    assert capsys.readouterr().out == ""


def test_all_files_are_listed() -> None:
    folder = Path(kfac_tests.__file__).parent
    assert {file.stem for file in folder.glob("[a-z]*.py")} == set(kfac_tests.CONTENTS)


def test_a_wrong_kfac_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scaled by the number of data, the deep linear test fails; one datum does not see it."""

    class Wrong(KFAC):
        """Forgets to divide by the number of data."""

        def _scale(self) -> None:
            super()._scale()
            for block in self.blocks.values():
                block.reduction_factor *= self.num_data

    monkeypatch.setattr(_claims, "KFAC", Wrong)
    report = run_definition(FILES["deep_linear_regression"])
    assert "False: KFAC-type-II equals the GGN" in (report.failure or "")
    assert issubclass(VerificationError, AssertionError)
    torch.manual_seed(0)
    assert run_definition(FILES["mlp_batch_size_1"]).failure is None
