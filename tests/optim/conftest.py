"""A stand-in for an accelerator."""

from collections.abc import Callable, Iterator

import pytest
import torch

from kfs.optim import apply, factor_graphs, inverses, recorded_update
from kfs.runtime import sync
from tests.factors.tape import Tapes


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tapes]]:
    """Let the CPU count as an accelerator whose graphs are tapes."""
    made: list[Tapes] = []

    def recorder_for(_: torch.device, _share: float | None = None) -> Callable[[], Tapes]:
        def make() -> Tapes:
            made.append(Tapes())
            return made[-1]

        return make

    for module in (factor_graphs, apply, recorded_update, inverses):
        monkeypatch.setattr(module, "recorder_for", recorder_for)
    monkeypatch.setattr("kfs.runtime.sync.is_asynchronous", lambda _: True)
    sync._constants.clear()
    yield made
    sync._constants.clear()
