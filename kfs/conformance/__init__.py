"""The conformance kit: is your KFAC right?

`kfs check package.module:compute` runs it. `cases` has the settings in which KFAC is exact, `checks` the questions.
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
