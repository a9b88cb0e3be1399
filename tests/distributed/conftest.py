"""A fixture that runs functions on several ranks."""

from collections.abc import Iterator

import pytest

from tests.distributed.pool import Pool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """Return a function that runs another one on several ranks: `ranks(2, function, *arguments)`; see `Pool`."""
    pool = Pool()
    yield pool
    pool.close()
