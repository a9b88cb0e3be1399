"""How much Python runs per batch, and in three calls that readers follow: functions, files, and depth.

An engine is readable only if a batch passes through few functions, and for small layers Python overhead dominates.
"""

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import kfs

ROOT = Path(kfs.__file__).parent
# Files of the engine; and all files, including those of data and of the loss, where few functions are called.
MAX_CALLS, MAX_ENGINE_FILES, MAX_FILES = 127, 8, 18
# These were calls of their own until Python 3.11, and are inlined since.
COMPREHENSIONS = {"<listcomp>", "<dictcomp>", "<setcomp>"}
# Modules of PyTorch that other tests may have imported; if they are loaded, `kfs` calls more functions.
MODULES = ("torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo")


@dataclass
class Walk:
    """Counts calls of functions of `kfs` while it is switched on; a generator that continues counts as a call.

    Attributes:
        calls: Number of calls by file and function.
        depth: The largest number of frames of `kfs` on the stack at a time.
    """

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    depth: int = 0

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """Record a call; the arguments are those of `sys.setprofile`."""
        name = frame.f_code.co_name
        if event != "call" or name in COMPREHENSIONS or (file := _own_file(frame)) is None:
            return
        self.calls[file, name] += 1
        self.depth = max(self.depth, _own_frames(frame))

    @property
    def files(self) -> list[str]:
        """The files that were visited, the busiest first."""
        counts: Counter[str] = Counter()
        for (file, _), count in self.calls.items():
            counts[file] += count
        return [file for file, _ in counts.most_common()]

    def __str__(self) -> str:
        """List calls by file and function."""
        lines = [f"{self.calls.total()} calls through {len(self.files)} files, {self.depth} frames deep:"]
        for file in self.files:
            inside = Counter({name: count for (where, name), count in self.calls.items() if where == file})
            functions = ", ".join(f"{name} {count}" for name, count in inside.most_common())
            lines.append(f"{inside.total():4d} {file}: {functions}")
        return "\n".join(lines)


class Batches:
    """Five batches; `walk` is active during the third one in every pass."""

    def __init__(self, walk: Walk) -> None:
        """Make the batches."""
        self.walk = walk
        self.batches = [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(5)]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches; activate `walk` from the third batch until the fourth one is requested."""
        for place, batch in enumerate(self.batches):
            before = sys.getprofile()
            if place == 2:
                # The backward pass on a CPU runs in this thread, so its calls are recorded, too.
                sys.setprofile(self.walk)
            yield batch
            if place == 2:
                sys.setprofile(before)


def _own_file(frame: FrameType) -> str | None:
    """Return a frame's file relative to `kfs`; `None` if it is elsewhere."""
    path = Path(frame.f_code.co_filename)
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else None


def _own_frames(frame: FrameType | None) -> int:
    """Count the frames of `kfs` on the stack."""
    count = 0
    while frame is not None:
        count += _own_file(frame) is not None
        frame = frame.f_back
    return count


class Hooked(nn.Module):
    """A linear layer that records which function profiles calls when the gradient of its output arrives."""

    def __init__(self) -> None:
        """Make the layer."""
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.watchers: list[object] = []

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        z: Tensor = self.layer(x)
        if z.requires_grad:
            z.register_hook(lambda _: self.watchers.append(sys.getprofile()))
        return z


def watched(model: nn.Module) -> Walk:
    """Compute factors of a model, and return the calls of the third batch."""
    walk = Walk()
    before = sys.getprofile()
    try:
        kfs.KFAC(kfs.EmpiricalRisk(model, nn.CrossEntropyLoss(), Batches(walk)), fisher="mc")
    finally:
        sys.setprofile(before)
    return walk


def test_a_batch_takes_a_short_walk() -> None:
    walk = watched(nn.Linear(4, 3))
    calls, files = walk.calls.total(), len(walk.files)
    assert calls > 0
    assert calls <= MAX_CALLS, str(walk)
    assert files <= MAX_FILES, str(walk)
    assert len([file for file in walk.files if file.startswith("factors/")]) <= MAX_ENGINE_FILES, str(walk)


def test_calls_of_the_backward_pass_are_seen() -> None:
    model = Hooked()
    walk = watched(model)
    assert sum(watcher is walk for watcher in model.watchers) == 1  # in one of five batches
    assert len(model.watchers) >= 5


class Limits(NamedTuple):
    """Upper limits of a route.

    Attributes:
        files: Files of `kfs` that it visits.
        functions: Distinct functions that it calls.
        depth: The largest number of frames of `kfs` on the stack at a time.
    """

    files: int
    functions: int
    depth: int


def linear_risk(model: nn.Module, num_data: int = 8) -> kfs.EmpiricalRisk:
    """Return the cross-entropy of one batch."""
    data = torch.randn(num_data, 4), torch.randint(3, (num_data,))
    return kfs.EmpiricalRisk(model, nn.CrossEntropyLoss(), data)


def factors_route() -> Callable[[], object]:
    """Compute the factors of one linear layer, with audit."""
    risk = linear_risk(nn.Linear(4, 3))
    return lambda: kfs.KFAC(risk)


def step_route() -> Callable[[], object]:
    """Take the first step of training one linear layer: forward and backward pass, and `step()`."""
    model, loss = nn.Linear(4, 3), nn.CrossEntropyLoss()
    optimizer = kfs.optim.KFAC(model, loss)
    x, y = torch.randn(8, 4), torch.randint(3, (8,))

    def step() -> None:
        loss(model(x), y).backward()
        optimizer.step()

    return step


def scores_route() -> Callable[[], object]:
    """Score training data for queries. Factors are computed before."""
    model = nn.Linear(4, 3)
    train, queries = linear_risk(model), linear_risk(model, 2)
    E = kfs.EKFAC(train)
    return lambda: kfs.Influence(E).scores(queries, train)


ROUTES: dict[Callable[[], Callable[[], object]], Limits] = {
    factors_route: Limits(files=38, functions=285, depth=20),
    step_route: Limits(files=54, functions=496, depth=19),
    scores_route: Limits(files=45, functions=372, depth=19),
}


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.__name__)
def test_routes_get_shorter(route: Callable[[], Callable[[], object]]) -> None:
    """These limits may only fall: if a change makes a route shorter, lower its limits to the measured numbers.

    The route is taken twice, with two models. The first time imports modules and fills caches.
    """
    for module in MODULES:
        import_module(module)
    route()()
    run, walk = route(), Walk()
    before, collects = sys.getprofile(), gc.isenabled()
    gc.collect()
    gc.disable()  # callbacks of objects that are freed are not part of the route
    sys.setprofile(walk)
    try:
        run()
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
    limits = ROUTES[route]
    assert walk.calls
    assert len(walk.files) <= limits.files, str(walk)
    assert len(walk.calls) <= limits.functions, str(walk)
    assert walk.depth <= limits.depth, str(walk)
