"""The conformance kit, which checks whether an implementation of KFAC is correct.

`kfs check package.module:compute` runs it. `cases` has the settings in which KFAC is exact, `checks` has the checks.
"""

from kfs.conformance import report
from kfs.conformance.adapter import Adapter, built_in, find
from kfs.conformance.checks import Check, CheckError, checks
from kfs.conformance.runner import Result, run, run_one, script, select

__all__ = [
    "Adapter",
    "Check",
    "CheckError",
    "Result",
    "built_in",
    "checks",
    "find",
    "report",
    "run",
    "run_one",
    "script",
    "select",
]
