"""Settings for all tests: tiers, repeatable property-based tests, and a check that no test leaves state behind."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch.overrides import TorchFunctionMode
from xdist.scheduler import LoadFileScheduling

from kfs.runtime.cuda_graphs import Recorded
from tests.tiers import ROOT, TIERS, covering, tier_of

# On some CPUs oneDNN chooses instructions for bfloat16 products that the CPU does not have.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# Plots need no display.
os.environ.setdefault("MPLBACKEND", "agg")

# Derandomized: the same examples on every machine and in every run. No deadline, since these tests do not measure time.
settings.register_profile("short", deadline=None, derandomize=True, max_examples=10)
settings.register_profile("long", deadline=None, derandomize=True, max_examples=300)
settings.load_profile("short")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add an option for the tier. Without it, every test that is named runs."""
    parser.addoption("--tier", choices=sorted({"library", *TIERS.values()}), help="run this tier of the tests only")
    parser.addoption(
        "--products",
        choices=["all", "covering", "rest"],
        default="all",
        help="of tests with several parameters, run all combinations, a covering part of them, or the others",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files and folders of other tiers, before they are imported."""
    tier = config.getoption("--tier")
    if not tier or not collection_path.is_relative_to(ROOT):
        return None
    return True if tier_of(collection_path) not in {tier, ""} else None


# Small tensors gain nothing from threads, and lose much if other processes compete for the cores.
torch.set_num_threads(1)


@pytest.hookimpl(trylast=True)  # Hypothesis has marked its tests before.
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect combinations of parameters, as `--products` says. Property-based tests are in both parts."""
    products = config.getoption("--products")
    if products == "all":
        return
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept: set[pytest.Item] = set()
    for same in functions.values():
        # One name for each `parametrize`; pytest has no public attribute for it.
        names = [tuple(item.callspec._idlist) if hasattr(item, "callspec") else () for item in same]
        kept |= {same[place] for place in covering(names)}
    if products == "rest":
        kept = {item for item in items if item not in kept or item.get_closest_marker("hypothesis")}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


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
    """Exclude collected tests and imported modules, which live to the end, from garbage collection."""
    gc.freeze()


THE_BOOK = ("tests/docs/", "tests/basics/test_definitions.py")


class FilesAndTheBook(LoadFileScheduling):  # type: ignore[misc]
    """Gives all tests of a file to one worker, so that fixtures are made once, and likewise all tests of the book."""

    def _split_scope(self, nodeid: str) -> str:
        """Return the group of a test: its file, or all tests that need the book or run its definitions."""
        return "the book" if nodeid.startswith(THE_BOOK) else super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FilesAndTheBook | None:
    """Use this distribution if `--dist loadfile` was chosen."""
    return FilesAndTheBook(config, log) if config.getoption("dist") == "loadfile" else None


class GroupedInDouble(TorchFunctionMode):
    """Lets `torch._grouped_mm` take float64 on the CPU; PyTorch's own does not."""

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
