"""Fixtures of the engine's tests."""

import pytest

from kfs.factors.accumulate import patches, row_products


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Form patches and per-example gradients for one example at a time, so that small data need many chunks.

    This is the only place that knows where the limits are.
    """
    nothing = {False: 1, True: 1}  # bytes, on a CPU and on an accelerator
    monkeypatch.setattr(patches, "_PATCH_BYTES", nothing)
    monkeypatch.setattr(row_products, "_BYTES", nothing)
