"""A stand-in for an accelerator."""

from collections.abc import Iterator

import pytest

from kfs.operators import recorded_products
from kfs.runtime import sync
from tests.factors.tape import Tapes


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tapes]]:
    """Let the CPU count as an accelerator whose graphs are tapes."""
    made: list[Tapes] = []

    def make() -> Tapes:
        made.append(Tapes())
        return made[-1]

    monkeypatch.setattr(recorded_products, "recorder_for", lambda _: make)
    monkeypatch.setattr("kfs.runtime.sync.is_asynchronous", lambda _: True)
    sync._constants.clear()
    yield made
    sync._constants.clear()
