"""Self-checks of runnable files: state a claim, compare two tensors, print the outcome.

`recording` collects the outcomes of several files, and `one_row_per_claim` prints those of many cases as a table.
Test tolerances and conformance cases do not live here.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from torch import Tensor, linalg

from kfs.errors import VerificationError

# The machine precision of float64 is 2.2e-16. The worked examples accumulate at most a few thousand rounding errors of
# numbers of order one.
ROUND_OFF = 1e-12


@dataclass(frozen=True)
class Check:
    """One verified claim.

    Attributes:
        claim: What was verified, as a sentence.
        error: The largest error; `None` if the claim is not an equality.
        case: The setting for which the claim was verified; empty if there is only one setting.
    """

    claim: str
    error: float | None
    case: str = ""


_recorded: ContextVar[list[Check] | None] = ContextVar("recorded", default=None)
_tabulated: ContextVar[list[Check] | None] = ContextVar("tabulated", default=None)


@contextmanager
def recording() -> Iterator[list[Check]]:
    """Collect all checks that are made inside the context.

    Example:
        >>> import torch
        >>> with recording() as checks:
        ...     verify("one is one", torch.ones(1), torch.ones(1))
        [ok] one is one (largest error 0.0e+00)
        >>> checks
        [Check(claim='one is one', error=0.0, case='')]
    """
    checks: list[Check] = []
    token = _recorded.set(checks)
    try:
        yield checks
    finally:
        _recorded.reset(token)


@contextmanager
def one_row_per_claim() -> Iterator[None]:
    """Print a table at the end, with one row per claim, instead of one line for each case.

    Example:
        >>> import torch
        >>> with one_row_per_claim():
        ...     for n in (1, 2, 3):
        ...         verify("zeros are zero", torch.zeros(n), torch.zeros(n), case=f"{n} of them")
        claim                cases  largest error
        [ok] zeros are zero      3        0.0e+00
    """
    checks: list[Check] = []
    token = _tabulated.set(checks)
    try:
        yield
    finally:
        _tabulated.reset(token)
    rows = by_claim(checks)
    width = max((len(f"[ok] {claim}") for claim in rows), default=0)
    print(f"{'claim':{width}}  cases  largest error")
    for claim, cases in rows.items():
        error = largest_error(cases)
        print(f"{f'[ok] {claim}':{width}}  {len(cases):5}  {'-' if error is None else f'{error:.1e}':>13}")


def by_claim(checks: Iterable[Check]) -> dict[str, list[Check]]:
    """Group checks of the same claim, in the order in which claims were first made."""
    grouped: dict[str, list[Check]] = {}
    for check in checks:
        grouped.setdefault(check.claim, []).append(check)
    return grouped


def largest_error(checks: Iterable[Check]) -> float | None:
    """Return the largest error of some checks; `None` if none of them has an error."""
    return max((check.error for check in checks if check.error is not None), default=None)


def verify(claim: str, actual: Tensor, expected: Tensor, tolerance: float = ROUND_OFF, case: str = "") -> None:
    """Verify that two tensors are equal entry by entry, relative to the largest entry if it exceeds one.

    Args:
        claim: The claim that the equality verifies, as a sentence.
        actual: The tensor under test.
        expected: The expected value, computed in another way; same shape.
        tolerance: The largest error that rounding explains.
        case: The setting for which the claim is made, if there are several.

    Raises:
        VerificationError: If the shapes differ, or if the error exceeds the tolerance or is NaN.
    """
    if actual.shape != expected.shape:
        raise VerificationError(
            f"False: {_sentence(claim, case)}. Shapes differ: {list(actual.shape)} and {list(expected.shape)}.",
            "Fix the definition, or compare tensors of the same shape.",
        )
    actual, expected = actual.detach().double(), expected.detach().double()
    scale = max(1.0, _largest(expected))
    verify_at_most(claim, _largest(actual - expected) / scale, tolerance, case)


def verify_at_most(claim: str, error: float, tolerance: float, case: str = "") -> None:
    """Verify that an error measured by the caller does not exceed a tolerance.

    Args:
        claim: The claim that a small error verifies, as a sentence.
        error: The measured error.
        tolerance: The largest acceptable error; the caller states the reason next to the number.
        case: The setting for which the claim is made, if there are several.

    Raises:
        VerificationError: If the error exceeds the tolerance or is NaN.
    """
    if not error <= tolerance:
        raise VerificationError(
            f"False: {_sentence(claim, case)}. The error is {error:.1e}, allowed is {tolerance:.1e}.",
            "Fix the definition, or state a tolerance that rounding explains.",
        )
    _record(Check(claim, error, case), f"largest error {error:.1e}")


def verify_differs(claim: str, one: Tensor, other: Tensor, at_least: float = 1e-3, case: str = "") -> None:
    """Verify that two tensors of the same shape differ by more than round-off.

    Args:
        claim: The claim that the difference verifies, as a sentence.
        one: The first tensor.
        other: The second tensor, of the same shape.
        at_least: Lower bound on the largest absolute difference.
        case: The setting for which the claim is made, if there are several.

    Raises:
        VerificationError: If the largest difference is smaller than `at_least` or NaN.
    """
    distance = _largest(one.detach() - other.detach())
    if not distance >= at_least:
        raise VerificationError(
            f"False: {_sentence(claim, case)}. They differ by {distance:.1e} only, expected at least {at_least:.1e}.",
            "Choose an example in which the two differ, or drop the claim.",
        )
    _record(Check(claim, None, case), f"they differ by {distance:.1e}")


def verify_psd(claim: str, matrix: Tensor, tolerance: float = ROUND_OFF, case: str = "") -> None:
    """Verify that a symmetric matrix has no negative eigenvalue, relative to the largest one if it exceeds one.

    Args:
        claim: The claim that this verifies, as a sentence.
        matrix: A symmetric matrix.
        tolerance: The largest magnitude of a negative eigenvalue that is accepted.
        case: The setting for which the claim is made, if there are several.

    Raises:
        VerificationError: If an eigenvalue is negative by more than the tolerance, or is NaN.
    """
    eigenvalues = linalg.eigvalsh(matrix.detach().double())
    scale = max(1.0, _largest(eigenvalues))
    verify_at_most(claim, _largest(eigenvalues.clamp(max=0)) / scale, tolerance, case)


def verify_that(claim: str, holds: bool, case: str = "") -> None:
    """Verify a claim that is not an equality.

    Args:
        claim: The claim, as a sentence.
        holds: Whether the claim is true.
        case: The setting for which the claim is made, if there are several.

    Raises:
        VerificationError: If the claim is false.
    """
    if not holds:
        raise VerificationError(f"False: {_sentence(claim, case)}.", "Fix the definition, or drop the claim.")
    _record(Check(claim, None, case), "it holds")


def _largest(t: Tensor) -> float:
    """Return the largest absolute entry of a tensor; 0 if the tensor is empty."""
    return t.abs().max().item() if t.numel() else 0.0


def _sentence(claim: str, case: str) -> str:
    """Return the claim, followed by its case if one is given."""
    return f"{claim} [{case}]" if case else claim


def _record(check: Check, detail: str) -> None:
    """Print a successful check, or keep it for a table, and append it to the recording if one is active."""
    tabulated, recorded = _tabulated.get(), _recorded.get()
    if tabulated is None:
        print(f"[ok] {_sentence(check.claim, check.case)} ({detail})")
    else:
        tabulated.append(check)
    if recorded is not None:
        recorded.append(check)
