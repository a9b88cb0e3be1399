"""Overhead of the KFAC engine if arithmetic is cheap: many small layers, and learned positions.

`python -m benchmarks.overhead` measures on one CPU thread. It uses only public names, so that it runs with any version.
Numbers are measured as follows.

- Clock: CPU time of this process, which other processes on the same cores disturb less than wall time. Python's garbage
  collector runs as usual, but does not search objects that existed before: modules of libraries.
- A batch: the time for 25 batches minus the time for 5, over 20. One-time work for all data cancels out.
- A use, that is one call of a linear layer (16 x 16, with bias, batch of 32, float32): the time of a batch for a chain
  of 40 layers minus that for a chain of 20, over 20. Work that is done once per batch cancels out. The chain has only
  these layers. Plain passes use the same chain, and `F.linear` is a call without a module around it.
- Forward and backward pass of a use: the chain itself records when its second layer begins and its last one ends, and
  when the gradients of the outputs of its last and first layer arrive. Both spans cover all layers but one.
  "The rest" is the engine's work for a use at other times: the total minus both spans.
- "set-up": the time for one batch minus the time of a batch, as above.

Everything is measured in turn, 9 times. Times are medians. Ratios divide, within one turn, by a plain forward+backward
with weight gradients of the same use or the same batch, and are medians as well. Plain backward passes "without weight
gradients" are those of frozen layers, the minimum for KFAC's vectors. The last table names the divisor of its ratios.
The "plain forward pass" of a use is that of a module in the chain, with a graph.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, nn
from torch.nn import CrossEntropyLoss
from torch.nn.functional import linear

from benchmarks.factor_problems import Batches
from benchmarks.factor_programs import curvlinops_operator
from benchmarks.report import RESULTS, Row, draw, save
from kfs import EKFAC, KFAC, EmpiricalRisk

WIDTH, BATCH = 16, 32
DEPTHS = (20, 40)
FEW_BATCHES, MANY_BATCHES = 5, 25
FEW_LARGE_BATCHES, MANY_LARGE_BATCHES = 1, 5  # a batch of positions takes about a hundred milliseconds
REPEATS = 9
CALLS = 2_000  # number of calls of F.linear alone

USE, DEEP, POSITIONS = "a use of a 16 x 16 layer", "20 layers, width 16", "positions [1, 1024, 768]"
UNIT = ("forward+backward", "torch")
Key = tuple[str, str]  # program and library, as in the table
Data = list[tuple[Tensor, Tensor]]
Program = Callable[[int], object]  # takes the number of batches
ChainProgram = Callable[["Chain", Data, int], object]

clock = time.process_time


class Chain(nn.Module):
    """Consecutive linear layers, which record the time of passes through all layers except for the first one.

    Args:
        depth: Number of layers.

    Attributes:
        forward_spans: Seconds between the end of the first layer and the end of the last one, per forward pass.
        backward_spans: Seconds between the gradients of the last layer's output and of the first one's.
    """

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.forward_spans: list[float] = []
        self.backward_spans: list[float] = []
        self._last_gradient = 0.0

    def forward(self, x: Tensor) -> Tensor:
        """Apply all layers."""
        first, *others = self.layers
        x = first(x)
        if x.requires_grad:
            x.register_hook(self._end_backward)
        start = clock()
        for layer in others:
            x = layer(x)
        self.forward_spans.append(clock() - start)
        if x.requires_grad:
            x.register_hook(self._begin_backward)
        return x

    def _begin_backward(self, _: Tensor) -> None:
        self._last_gradient = clock()

    def _end_backward(self, _: Tensor) -> None:
        self.backward_spans.append(clock() - self._last_gradient)


class Positions(nn.Module):
    """Learned positions that are added to data `[N, length, width]`, and a linear head on the mean."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.positions = nn.Parameter(0.02 * torch.randn(1, length, width))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Add, average and classify."""
        result: Tensor = self.head((x + self.positions).mean(1))
        return result


@dataclass(frozen=True)
class Spans:
    """Measurements of one turn on a chain: seconds of a batch, and of passes through all layers but one."""

    batch: float
    forward: float
    backward: float


def deep_network(depth: int) -> nn.Module:
    """Return linear layers of width 16 with hyperbolic tangents in between."""
    layers = [layer for _ in range(depth) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def small_batches(count: int) -> Data:
    """Return batches of 32 examples with 16 features and as many classes."""
    return [(torch.randn(BATCH, WIDTH), torch.randint(WIDTH, (BATCH,))) for _ in range(count)]


def seconds(call: Callable[[], object]) -> float:
    """Return the CPU time of a call."""
    start = clock()
    call()
    return clock() - start


def forward(model: nn.Module, data: Data, count: int) -> None:
    """Evaluate the model on some batches, with graphs."""
    for X, _ in data[:count]:
        model(X)


def forward_backward(model: nn.Module, data: Data, count: int) -> None:
    """Compute plain gradients of some batches."""
    loss = CrossEntropyLoss()
    for X, y in data[:count]:
        loss(model(X), y).backward()
    model.zero_grad()


def without_weight_gradients(model: nn.Module, data: Data, count: int) -> None:
    """Send the loss's gradients back to the data, without gradients of parameters."""
    loss = CrossEntropyLoss()
    model.requires_grad_(False)
    for X, y in data[:count]:
        x = X.detach().requires_grad_()
        torch.autograd.grad(loss(model(x), y), x)
    model.requires_grad_(True)


def kfs_factors(model: nn.Module, data: Data, count: int, kind: Any = KFAC, fisher: Any = "mc") -> Any:
    """Compute our factors from some batches."""
    return kind(EmpiricalRisk(model, CrossEntropyLoss(), data[:count]), fisher=fisher)


def curvlinops_factors(problem: Batches, count: int, fisher: str, corrected: bool = False) -> None:
    """Compute curvlinops' factors from some batches, and optionally corrected eigenvalues."""
    some = Batches(problem.name, problem.model, problem.data[:count])
    name = "EKFACLinearOperator" if corrected else "KFACLinearOperator"
    K = curvlinops_operator(some, fisher, "expand", name)
    K.compute_kronecker_factors()
    if corrected:
        K.compute_eigenvalue_correction()


def chain_programs() -> dict[Key, ChainProgram]:
    """Return the programs for chains."""
    programs: dict[Key, ChainProgram] = {
        UNIT: forward_backward,
        ("without weight gradients", "torch"): without_weight_gradients,
    }
    for fisher in ("mc", "empirical", "forward-only"):
        programs[f"KFAC {fisher}", "kfs"] = partial(kfs_factors, fisher=fisher)
    return programs


def deep_programs(problem: Batches) -> dict[Key, Program]:
    """Return the programs for the deep network: those of kfs, and of curvlinops if it is installed."""
    model, data = problem.model, problem.data
    programs: dict[Key, Program] = {
        UNIT: partial(forward_backward, model, data),
        ("forward", "torch"): partial(forward, model, data),
    }
    theirs = curvlinops_operator(problem, "mc", "expand") is not None
    for fisher in ("mc", "empirical", "type-2"):
        programs[f"KFAC {fisher}", "kfs"] = partial(kfs_factors, model, data, fisher=fisher)
        if theirs:
            programs[f"KFAC {fisher}", "curvlinops"] = partial(curvlinops_factors, problem, fisher=fisher)
    programs["EKFAC mc", "kfs"] = partial(kfs_factors, model, data, kind=EKFAC)
    if theirs:
        programs["EKFAC mc", "curvlinops"] = partial(curvlinops_factors, problem, fisher="mc", corrected=True)
    return programs


def positions_programs(model: nn.Module, data: Data) -> dict[Key, Program]:
    """Return the programs for learned positions."""
    return {
        UNIT: partial(forward_backward, model, data),
        ("forward", "torch"): partial(forward, model, data),
        ("KFAC mc", "kfs"): partial(kfs_factors, model, data),
        ("KFAC forward-only", "kfs"): partial(kfs_factors, model, data, fisher="forward-only"),
    }


def per_batch(program: Program, few: int, many: int) -> float:
    """Return the time of a batch without one-time work: the time of many batches minus the time of few."""
    return (seconds(partial(program, many)) - seconds(partial(program, few))) / (many - few)


def spans(chain: Chain, program: Program, few: int, many: int) -> Spans:
    """Run a program on a chain. The median of all passes counts, because an engine may run additional ones at first."""
    chain.forward_spans.clear()
    chain.backward_spans.clear()
    batch = per_batch(program, few, many)
    return Spans(batch, statistics.median(chain.forward_spans), statistics.median(chain.backward_spans))


def measure_use(repeats: int) -> list[Row]:
    """Time a use of a small layer by chains of two lengths."""
    torch.manual_seed(0)
    data = small_batches(MANY_BATCHES)
    programs = chain_programs()
    chains = [Chain(depth) for depth in DEPTHS]
    x, layer = data[0][0], chains[0].layers[0]
    weight, bias = layer.get_parameter("weight"), layer.get_parameter("bias")

    def alone() -> None:
        for _ in range(CALLS):
            linear(x, weight, bias)

    def turn() -> dict[Key, float]:
        found: dict[Key, float] = {("F.linear, forward", "torch"): seconds(alone) / CALLS}
        for (name, library), program in programs.items():
            short, long = (spans(c, partial(program, c, data), FEW_BATCHES, MANY_BATCHES) for c in chains)
            uses = DEPTHS[1] - DEPTHS[0]
            whole = (long.batch - short.batch) / uses
            ahead = (long.forward - short.forward) / uses
            back = (long.backward - short.backward) / uses
            found[name, library] = whole
            found[f"{name}: forward", library] = ahead
            found[f"{name}: backward", library] = back
            if library == "kfs":
                found[f"{name}: rest", library] = whole - ahead - back
        return found

    return all_turns(turn, repeats, USE)


def measure_batches(problem: str, programs: dict[Key, Program], few: int, many: int, repeats: int) -> list[Row]:
    """Time batches of one problem, and one batch with its set-up."""

    def turn() -> dict[Key, float]:
        found: dict[Key, float] = {}
        for (name, library), program in programs.items():
            found[name, library] = per_batch(program, few, many)
            if library != "torch":
                found[f"{name}: set-up", library] = seconds(partial(program, 1)) - found[name, library]
        return found

    return all_turns(turn, repeats, problem)


def all_turns(turn: Callable[[], dict[Key, float]], repeats: int, problem: str) -> list[Row]:
    """Measure everything once to warm up, then `repeats` times."""
    turn()
    return rows(problem, [turn() for _ in track(range(repeats), problem, transient=True)])


def rows(problem: str, found: list[dict[Key, float]]) -> list[Row]:
    """Return medians over turns: of times, and of ratios within a turn."""
    return [
        Row(
            problem,
            *key,
            statistics.median(turn[key] for turn in found),
            statistics.median(turn[key] / turn[UNIT] for turn in found),
        )
        for key in found[0]
    ]


def measure(repeats: int = REPEATS, scale: int = 1) -> list[Row]:
    """Time everything; a larger `scale` shortens the positions, for tests."""
    found = measure_use(repeats)
    torch.manual_seed(0)
    deep = Batches(DEEP, deep_network(DEPTHS[0]), small_batches(MANY_BATCHES))
    found += measure_batches(DEEP, deep_programs(deep), FEW_BATCHES, MANY_BATCHES, repeats)
    length, width = 1024 // scale, 768 // scale
    model = Positions(length, width)
    # The same batch is repeated, since only the number of batches matters.
    data = [(torch.randn(8, length, width), torch.randint(10, (8,)))] * MANY_LARGE_BATCHES
    large = positions_programs(model, data)
    return found + measure_batches(POSITIONS, large, FEW_LARGE_BATCHES, MANY_LARGE_BATCHES, repeats)


def summary(found: list[Row]) -> list[tuple[str, float]]:
    """Return the main numbers: costs in microseconds, and ratios of programs."""
    us = {(row.problem, row.program, row.library): 1e6 * row.seconds for row in found}
    ratios = {(row.problem, row.program, row.library): row.ratio for row in found}
    alone = us[USE, "F.linear, forward", "torch"]
    plain = us[USE, "forward+backward: forward", "torch"]
    whole = us[USE, "KFAC mc", "kfs"]
    ahead, back = us[USE, "KFAC mc: forward", "kfs"], us[USE, "KFAC mc: backward", "kfs"]
    return [
        ("a use: engine's whole batch, us", whole),
        ("a use: engine's forward pass minus plain one, us", ahead - plain),
        (
            "a use: engine's backward pass minus plain one without weight gradients, us",
            back - us[USE, "without weight gradients: backward", "torch"],
        ),
        ("a use: engine's forward pass / F.linear alone", ahead / alone),
        ("a use: engine's forward pass / plain forward pass", ahead / plain),
        ("a use: engine's whole batch / plain forward pass", whole / plain),
        ("20 layers: batch of KFAC mc / forward+backward", ratios[DEEP, "KFAC mc", "kfs"]),
        ("20 layers: batch of KFAC type-2 / forward+backward", ratios[DEEP, "KFAC type-2", "kfs"]),
        ("20 layers: batch of EKFAC mc (two passes) / forward+backward", ratios[DEEP, "EKFAC mc", "kfs"]),
        ("positions: batch of KFAC mc, ms", us[POSITIONS, "KFAC mc", "kfs"] / 1e3),
        ("positions: plain forward pass, ms", us[POSITIONS, "forward", "torch"] / 1e3),
    ]


def show(found: list[Row]) -> None:
    """Print all times in microseconds, then the main numbers."""
    print("| problem | program | library | microseconds | time / (forward+backward) |")
    print("|---|---|---|---|---|")
    for row in found:
        print(f"| {row.problem} | {row.program} | {row.library} | {1e6 * row.seconds:.1f} | {row.ratio:.2f} |")
    print("\n| main numbers | |")
    print("|---|---|")
    for name, value in summary(found):
        print(f"| {name} | {value:.1f} |")


@contextmanager
def one_thread() -> Iterator[None]:
    """Run on one thread, with a garbage collector that ignores existing objects."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        torch.set_num_threads(threads)


def main(results: Path = RESULTS, repeats: int = REPEATS, scale: int = 1) -> None:
    """Measure on one CPU thread, and write tables, JSON and plot."""
    with one_thread():
        found = measure(repeats, scale)
    settings = {"threads": 1, "repeats": repeats, "batches": (FEW_BATCHES, MANY_BATCHES), "depths": DEPTHS}
    file = save(found, "overhead", settings, results)
    draw([row for row in found if ":" not in row.program], "overhead", results / "overhead.png")
    show(found)
    print(f"Written: {file}, {results / 'overhead'}.png")


if __name__ == "__main__":
    main()
