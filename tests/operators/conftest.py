"""A stand-in for an accelerator."""

from collections.abc import Iterator

import pytest

from kfs.runtime import cuda_graphs, sync
from tests.factors.tape import Tapes


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tapes]]:
    """Treat the CPU as an accelerator whose graphs are tapes."""
    made: list[Tapes] = []

    def make() -> Tapes:
        made.append(Tapes())
        return made[-1]

    monkeypatch.setattr(cuda_graphs, "recorder_for", lambda *_: make)
    monkeypatch.setattr("kfs.runtime.sync.is_asynchronous", lambda _: True)
    sync._constants.clear()
    yield made
    sync._constants.clear()
