"""Settings for all tests: repeatable property-based tests, and a check that no test leaves global state behind."""

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch.overrides import TorchFunctionMode
from xdist.scheduler import LoadFileScheduling

from kfs.recording import Recorded

# On some CPUs oneDNN chooses instructions for bfloat16 products that they do not have.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# Plots need no display.
os.environ.setdefault("MPLBACKEND", "agg")

# Derandomized: the same examples on every machine and in every run. No deadline: timing is no subject of unit tests.
settings.register_profile("kfs", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("kfs")

# Small tensors gain nothing from threads, and lose much where other processes compete for the cores.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fixed_seed() -> Iterator[None]:
    """Start every test from the same random state, and insist on float32 as default dtype afterwards."""
    torch.manual_seed(0)
    yield
    assert torch.get_default_dtype() == torch.float32


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that has an entry for every replay of a batch."""
    times: list[int] = []
    replay = Recorded.replay

    def note(*args: Any) -> None:
        times.append(1)
        replay(*args)

    monkeypatch.setattr(Recorded, "replay", note)
    return times


def pytest_collection_finish() -> None:
    """Let garbage collection leave out thousands of tests, which live to the end, and all imported modules."""
    gc.freeze()


THE_BOOK = ("tests/docs/", "tests/basics/test_definitions.py")


class FilesAndTheBook(LoadFileScheduling):  # type: ignore[misc]
    """Gives all tests of a file to one worker, so that its fixtures are made once, and likewise all of the book."""

    def _split_scope(self, nodeid: str) -> str:
        """Return what stays together: a file, or everything that needs the book or runs its definitions."""
        return "the book" if nodeid.startswith(THE_BOOK) else super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FilesAndTheBook | None:
    """Distribute tests as above if `--dist loadfile` was chosen."""
    return FilesAndTheBook(config, log) if config.getoption("dist") == "loadfile" else None


class GroupedInDouble(TorchFunctionMode):
    """Lets `torch._grouped_mm` take float64 on the CPU, which PyTorch's own does not."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Multiply group by group."""
        kwargs = kwargs or {}
        if func is not torch._grouped_mm or args[0].dtype != torch.float64:
            return func(*args, **kwargs)
        a, b, *rest = args
        offs = rest[0] if rest else kwargs.get("offs")
        if offs is None:
            return torch.bmm(a, b)
        ends = offs.tolist()
        parts = zip([0, *ends[:-1]], ends, b, strict=True)
        return torch.cat([a[start:stop] @ one for start, stop, one in parts])


@pytest.fixture
def grouped_in_double() -> Iterator[None]:
    """Let models with `torch._grouped_mm` run in float64."""
    with GroupedInDouble():
        yield
