import pytest
import torch

from kfs.errors import VerificationError
from kfs.verification import (
    Check,
    one_row_per_claim,
    recording,
    verify,
    verify_at_most,
    verify_differs,
    verify_psd,
    verify_that,
)

ONE, NAN = torch.ones(2), torch.full((2,), torch.nan)


def test_true_claims_are_printed_and_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    verify("not recorded", ONE, ONE)
    with recording() as checks:
        verify("equal", ONE, ONE + 1e-6, tolerance=1e-5, case="float32")
        verify_at_most("small", 0.25, 0.5)
        verify_differs("unequal", ONE, 2 * ONE)
        verify_psd("semi-definite", torch.diag(torch.tensor([0.0, 1.0])))
        verify_that("true", True)
    verify("not recorded", ONE, ONE)
    assert [check.claim for check in checks] == ["equal", "small", "unequal", "semi-definite", "true"]
    assert checks[0].case == "float32"
    assert checks[0].error == pytest.approx(1e-6, rel=0.1)
    assert checks[1:] == [
        Check("small", 0.25),
        Check("unequal", None),
        Check("semi-definite", 0.0),
        Check("true", None),
    ]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7
    assert lines[1].startswith("[ok] equal [float32] (largest error ")
    assert lines[3] == "[ok] unequal (they differ by 1.0e+00)"


def test_errors_are_relative_to_large_entries_and_absolute_for_small_ones() -> None:
    with recording() as checks:
        verify("large", torch.tensor(1e6) + 1, torch.tensor(1e6), tolerance=1e-5)
        verify("small", torch.tensor(2e-6), torch.tensor(1e-6), tolerance=1e-5)
        verify("empty", torch.zeros(0), torch.zeros(0))
    assert [check.error for check in checks] == pytest.approx([1e-6, 1e-6, 0.0], rel=1e-3)


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (lambda: verify("it", ONE, 2 * ONE), r"False: it\. The error is 5\.0e-01, allowed is 1\.0e-12"),
        (lambda: verify("it", ONE, torch.ones(3), case="c"), r"False: it \[c\]\. Shapes differ: \[2\] and \[3\]"),
        (lambda: verify("it", NAN, ONE), "The error is nan"),
        (lambda: verify("it", ONE, NAN), "The error is nan"),
        (lambda: verify("it", NAN, NAN), "The error is nan"),
        (lambda: verify_at_most("it", 2.0, 1.0), r"error is 2\.0e\+00, allowed is 1\.0e\+00"),
        (lambda: verify_at_most("it", torch.nan, 1.0), "The error is nan"),
        (lambda: verify_differs("it", ONE, ONE), r"differ by 0\.0e\+00 only"),
        (lambda: verify_differs("it", ONE, NAN), "differ by nan only"),
        (lambda: verify_psd("it", torch.diag(torch.tensor([-1.0, 1.0]))), r"The error is 1\.0e\+00"),
        (lambda: verify_that("it", False, case="c"), r"False: it \[c\]"),
    ],
)
def test_false_claims_raise_and_are_not_recorded(check, message: str) -> None:  # type: ignore[no-untyped-def]
    with recording() as checks, pytest.raises(VerificationError, match=message):
        check()
    assert checks == []


def test_recordings_nest() -> None:
    with recording() as outer:
        with recording() as inner:
            verify_that("inner", True)
        verify_that("outer", True)
    assert [c.claim for c in inner] == ["inner"]
    assert [c.claim for c in outer] == ["outer"]


def test_a_table_has_one_row_per_claim(capsys: pytest.CaptureFixture[str]) -> None:
    with recording() as checks, one_row_per_claim():
        verify("equal", ONE, ONE, case="first")
        verify_differs("unequal", ONE, 2 * ONE)
        verify("equal", ONE, ONE + 1e-6, 1e-5, case="second")
    assert [check.claim for check in checks] == ["equal", "unequal", "equal"]
    _, equal, unequal = capsys.readouterr().out.splitlines()
    assert equal.split()[:3] == ["[ok]", "equal", "2"]
    assert unequal.split() == ["[ok]", "unequal", "1", "-"]
    with pytest.raises(VerificationError, match="unequal"), one_row_per_claim():
        verify_differs("unequal", ONE, ONE)
    assert capsys.readouterr().out == ""
