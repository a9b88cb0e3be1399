"""A plugin for pytest: `pytest --kfs-adapter=package.module:compute` makes a test of every conformance check.

It stands beside the package, not in it, since pytest imports plugins in every run, and PyTorch takes long to import.
"""

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from kfs.conformance import Adapter, Check, Result


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("kfs", "conformance of KFAC implementations")
    group.addoption(
        "--kfs-adapter", metavar="TARGET", help="check this implementation: package.module:compute, or a name"
    )
    group.addoption("--kfs-only", action="append", default=[], metavar="TAG", help="run checks with this tag only")


def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add a test for every check."""
    target = config.getoption("--kfs-adapter")
    if target:
        from kfs.conformance import find, select  # noqa: PLC0415 (only if wanted)
        from kfs.errors import KfsError  # noqa: PLC0415

        only = config.getoption("--kfs-only")
        try:
            adapter, chosen = find(target), select(only)
        except KfsError as error:
            raise pytest.UsageError(str(error)) from error
        if not chosen:
            raise pytest.UsageError(
                f"No check has all of the tags {only}. `kfs check {target} --only {only[0]}` lists them."
            )
        items += [
            ConformanceItem.from_parent(session, name=check.name, adapter=adapter, check=check) for check in chosen
        ]


class ConformanceItem(pytest.Item):
    """One check of one implementation."""

    def __init__(self, *, adapter: "Adapter", check: "Check", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.adapter, self.check = adapter, check

    def runtest(self) -> None:
        """Run the check; what is not supported is skipped, what is expected to fail is expected to."""
        from kfs.conformance import run_one  # noqa: PLC0415

        result: Result = run_one(self.adapter, self.check)
        if result.status == "not supported":
            pytest.skip(result.message)
        if result.status == "expected failure":
            pytest.xfail(result.message)
        if result.bad:
            pytest.fail(f"{result.status}: {result.message}\n{result.bug}", pytrace=False)

    def reportinfo(self) -> tuple[Any, None, str]:
        """Name the test."""
        return self.path, None, f"{self.adapter.name}: {self.name}"
