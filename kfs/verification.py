"""How a runnable file checks itself: state a claim, compare two tensors, print the outcome.

`recording` collects the outcomes for whoever runs many files. Test tolerances and conformance cases do not live here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from torch import Tensor, linalg

from kfs.errors import VerificationError

# Float64 rounds at 2.2e-16. The worked examples chain at most some thousand roundings of numbers of size one.
ROUND_OFF = 1e-12


@dataclass(frozen=True)
class Check:
    """One verified claim.

    Attributes:
        claim: What was verified, as a sentence.
        error: The largest error found; `None` if the claim is not an equality.
        case: For which of several settings the claim was verified; empty if there is only one.
    """

    claim: str
    error: float | None
    case: str = ""


_recorded: ContextVar[list[Check] | None] = ContextVar("recorded", default=None)


@contextmanager
def recording() -> Iterator[list[Check]]:
    """Collect every check that is made inside the context.

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


def verify(claim: str, actual: Tensor, expected: Tensor, tolerance: float = ROUND_OFF, case: str = "") -> None:
    """Verify that two tensors agree: entry by entry, relative to the largest entry if that exceeds one.

    Args:
        claim: What equality of the two means, as a sentence.
        actual: The tensor under test.
        expected: What it should be, obtained in another way; same shape.
        tolerance: The largest error that the arithmetic explains.
        case: For which of several settings the claim is made.

    Raises:
        VerificationError: If shapes differ, or the error exceeds the tolerance or is not a number.
    """
    if actual.shape != expected.shape:
        raise VerificationError(
            f"False: {_sentence(claim, case)}. Shapes differ: {list(actual.shape)} and {list(expected.shape)}.",
            "Mend the definition, or compare tensors of one shape.",
        )
    actual, expected = actual.detach().double(), expected.detach().double()
    scale = max(1.0, _largest(expected))
    verify_at_most(claim, _largest(actual - expected) / scale, tolerance, case)


def verify_at_most(claim: str, error: float, tolerance: float, case: str = "") -> None:
    """Verify that an error which the caller measured stays within its tolerance.

    Args:
        claim: What it means that the error is small, as a sentence.
        error: The measured error.
        tolerance: The largest error that is acceptable; the caller states why beside the number.
        case: For which of several settings the claim is made.

    Raises:
        VerificationError: If the error exceeds the tolerance or is not a number.
    """
    if not error <= tolerance:
        raise VerificationError(
            f"False: {_sentence(claim, case)}. The error is {error:.1e}, allowed is {tolerance:.1e}.",
            "Mend the definition, or state a tolerance that the arithmetic explains.",
        )
    _record(Check(claim, error, case), f"largest error {error:.1e}")


def verify_differs(claim: str, one: Tensor, other: Tensor, at_least: float = 1e-3, case: str = "") -> None:
    """Verify that two tensors of one shape do *not* agree, by more than any round-off.

    Args:
        claim: What the inequality means, as a sentence.
        one: A tensor.
        other: Another one of the same shape.
        at_least: How large their largest difference must be.
        case: For which of several settings the claim is made.

    Raises:
        VerificationError: If the tensors are closer than that.
    """
    distance = _largest(one.detach() - other.detach())
    if not distance >= at_least:
        raise VerificationError(
            f"False: {_sentence(claim, case)}. They differ by {distance:.1e} only, expected at least {at_least:.1e}.",
            "Choose an example in which the two differ, or drop the claim.",
        )
    _record(Check(claim, None, case), f"they differ by {distance:.1e}")


def verify_psd(claim: str, matrix: Tensor, tolerance: float = ROUND_OFF, case: str = "") -> None:
    """Verify that a symmetric matrix has no negative eigenvalue, relative to the largest one if that exceeds one.

    Args:
        claim: What that means, as a sentence.
        matrix: A symmetric matrix.
        tolerance: By how much an eigenvalue may be negative.
        case: For which of several settings the claim is made.

    Raises:
        VerificationError: If an eigenvalue is negative by more than the tolerance, or not a number.
    """
    eigenvalues = linalg.eigvalsh(matrix.detach().double())
    scale = max(1.0, _largest(eigenvalues))
    verify_at_most(claim, _largest(eigenvalues.clamp(max=0)) / scale, tolerance, case)


def verify_that(claim: str, holds: bool, case: str = "") -> None:
    """Verify a claim that is no equality.

    Args:
        claim: The claim, as a sentence.
        holds: Whether it is true.
        case: For which of several settings the claim is made.

    Raises:
        VerificationError: If it is not.
    """
    if not holds:
        raise VerificationError(f"False: {_sentence(claim, case)}.", "Mend the definition, or drop the claim.")
    _record(Check(claim, None, case), "it holds")


def _largest(t: Tensor) -> float:
    """Return the largest magnitude in a tensor, 0 if it is empty."""
    return t.abs().max().item() if t.numel() else 0.0


def _sentence(claim: str, case: str) -> str:
    """Return the claim, followed by the case that it is made for if there are several."""
    return f"{claim} [{case}]" if case else claim


def _record(check: Check, detail: str) -> None:
    """Print a check that held, and hand it to whoever records."""
    print(f"[ok] {_sentence(check.claim, check.case)} ({detail})")
    recorded = _recorded.get()
    if recorded is not None:
        recorded.append(check)
