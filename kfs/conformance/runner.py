"""The runner, which runs checks one after the other and turns every outcome, also an error, into a result."""

import textwrap
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from kfs.conformance.adapter import Adapter, UnreadableError
from kfs.conformance.checks import Check, CheckError, checks

Status = Literal[
    "passed", "not supported", "failed", "silently wrong", "unreadable", "expected failure", "unexpected pass"
]
_RAISED = "It raised an error, so nothing was compared."
BAD: tuple[Status, ...] = ("failed", "silently wrong", "unreadable", "unexpected pass")


@dataclass(frozen=True)
class Result:
    """The result of a check.

    Attributes:
        check: Name of the check.
        tags: Tags of the check.
        status: `"passed"`; `"not supported"`; `"failed"`, with an error or a warning; `"silently wrong"`, without error
            or warning; `"unreadable"`, if the answer has an invalid format and cannot be compared;
            `"expected failure"`; or `"unexpected pass"`, if a failure was expected.
        outcome: The status without regard to expected failures.
        message: What is wrong and the probable cause, or why the check is not supported.
        bug: The bug that a failure indicates. After an error, it says that nothing was compared.
        seconds: Duration of the check.
    """

    check: str
    tags: tuple[str, ...]
    status: Status
    message: str = ""
    bug: str = ""
    seconds: float = 0.0
    outcome: str = ""

    @property
    def bad(self) -> bool:
        """Whether the result needs attention."""
        return self.status in BAD


def select(only: Iterable[str] = ()) -> list[Check]:
    """Return the checks that have all given tags."""
    wanted = set(only)
    return [check for check in checks() if wanted <= check.tags]


def run(adapter: Adapter, chosen: Iterable[Check] | None = None) -> Iterator[Result]:
    """Run checks, and yield their results one by one.

    Args:
        adapter: The implementation.
        chosen: The checks to run. If not given, all checks run.

    Yields:
        The result of each check, as soon as it has run.
    """
    for check in checks() if chosen is None else chosen:
        yield run_one(adapter, check)


def run_one(adapter: Adapter, check: Check) -> Result:
    """Run one check, and return its result."""
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        status, message = _outcome(adapter, check)
    bug = _RAISED if status == "failed" else check.bug
    # A wrong result with a warning is not silent.
    if status == "silently wrong" and any(issubclass(w.category, UserWarning) for w in caught):
        status, message = "failed", f"{message} It warned: {caught[0].message}"
    # Take expected failures into account.
    reason, outcome = adapter.expects_failure(check.name), status
    if reason is not None and status in {"failed", "silently wrong", "unreadable"}:
        status, message = "expected failure", f"{reason} ({message})"
    elif reason is not None and status == "passed":
        status, message = "unexpected pass", f"A failure was expected: {reason}"
    seconds = time.perf_counter() - start
    return Result(check.name, tuple(sorted(check.tags)), status, message, bug, seconds, outcome)


def _outcome(adapter: Adapter, check: Check) -> tuple[Status, str]:
    not_claimed = sorted(adapter.unsupported & check.tags)
    if not_claimed:
        return "not supported", f"It does not claim to support {', '.join(not_claimed)}."
    try:
        check.run(adapter)
    except CheckError as failure:
        return "silently wrong", str(failure)
    except UnreadableError as error:
        return "unreadable", str(error)
    except NotImplementedError as error:
        return "not supported", str(error) or "It raised NotImplementedError."
    except (Exception, SystemExit) as error:  # noqa: BLE001 (an implementation may raise anything)
        return "failed", f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    return "passed", ""


def script(target: str, check: str) -> str:
    """Return the source of a program that repeats one check, and raises its error."""
    return textwrap.dedent(f"""\
        from kfs.conformance import checks, find

        adapter = find({target!r})
        check = next(check for check in checks() if check.name == {check!r})
        check.run(adapter)
        """)
