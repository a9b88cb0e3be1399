"""Running checks: one result after the other, whatever an implementation does."""

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
_RAISED = "It raised an error, so that nothing was compared."
BAD: tuple[Status, ...] = ("failed", "silently wrong", "unreadable", "unexpected pass")


@dataclass(frozen=True)
class Result:
    """What came of a check.

    Attributes:
        check: Its name.
        tags: Its tags.
        status: `"passed"`; `"not supported"`; `"failed"`, by an error or after a warning; `"silently wrong"`, without a
            word; `"unreadable"`, if the answer has not the form that it should have, so that nobody knows whether it is
            right; `"expected failure"`, or `"unexpected pass"` if it should have failed.
        outcome: What happened, whatever was expected.
        message: What was wrong, and what probably caused it; or why it is not supported.
        bug: What a failure points to; if there was an error, nothing was compared.
        seconds: How long it took.
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
        """Whether somebody must do something about it."""
        return self.status in BAD


def select(only: Iterable[str] = ()) -> list[Check]:
    """Return the checks that have all of some tags."""
    wanted = set(only)
    return [check for check in checks() if wanted <= check.tags]


def run(adapter: Adapter, chosen: Iterable[Check] | None = None) -> Iterator[Result]:
    """Run checks, all of them by default.

    Args:
        adapter: The implementation.
        chosen: Some of `checks()`.

    Yields:
        A result for every check, as soon as it is there.
    """
    for check in checks() if chosen is None else chosen:
        yield run_one(adapter, check)


def run_one(adapter: Adapter, check: Check) -> Result:
    """Run one check."""
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        status, message = _outcome(adapter, check)
    bug = _RAISED if status == "failed" else check.bug
    if status == "silently wrong" and any(issubclass(w.category, UserWarning) for w in caught):
        status, message = "failed", f"{message} It warned: {caught[0].message}"
    reason, outcome = adapter.expects_failure(check.name), status
    if reason is not None and status in {"failed", "silently wrong", "unreadable"}:
        status, message = "expected failure", f"{reason} ({message})"
    elif reason is not None and status == "passed":
        status, message = "unexpected pass", f"It should fail: {reason}"
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
        return "not supported", str(error) or "It says so."
    except (Exception, SystemExit) as error:  # noqa: BLE001 (anything may come out of somebody else's code)
        return "failed", f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    return "passed", ""


def script(target: str, check: str) -> str:
    """Return a program that repeats one check, and ends with its error."""
    return textwrap.dedent(f"""\
        from kfs.conformance import checks, find

        adapter = find({target!r})
        check = next(check for check in checks() if check.name == {check!r})
        check.run(adapter)
        """)
