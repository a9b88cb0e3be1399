"""Cost of a training step, in units of a step of SGD.

`python -m benchmarks.train cost` measures on one CPU thread, `python -m benchmarks.train cost cuda [names]` on a GPU,
with default settings, on models up to ViT-B/16 in three precisions. Factors are computed more often in the first 90
steps; later steps are measured.
"""

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.baseline_optimizers import Factory, Stepper, factories
from benchmarks.factor_problems import Batches, factor_problems, vit
from benchmarks.problems import GPT
from benchmarks.report import RESULTS, medians, save
from benchmarks.training_tasks import Batch
from kfs.optim import KFAC
from kfs.runtime.precision import tf32

BLOCK = 20  # number of steps in an average: a multiple of the intervals of all periodic work
BLOCKS = 2


@dataclass(frozen=True)
class Cost:
    """Mean seconds of a training step, and their ratio to SGD's."""

    problem: str
    optimizer: str
    seconds: float
    ratio: float


def training_step(
    model: nn.Module,
    optimizer: Stepper,
    loss: Callable[..., Tensor],
    batch: Batch,
    autocast: torch.dtype | None = None,
) -> None:
    """Train on one batch."""
    X, y = batch
    optimizer.zero_grad()
    with nullcontext() if autocast is None else torch.autocast(X.device.type, autocast):
        value = loss(model(X), y)
    value.backward()
    optimizer.step()


def every(k: int, model: nn.Module, lr: float) -> Stepper:
    """Return `kfs.optim.KFAC` with all of its work done every `k` steps."""
    return KFAC(model, nn.CrossEntropyLoss(), lr=lr, factors_every=k, inverses_every=k)


def later(model: nn.Module, lr: float, replay: bool = True) -> Stepper:
    """Return `kfs.optim.KFAC` with default settings, as after 90 steps, optionally without recordings."""
    return KFAC(model, nn.CrossEntropyLoss(), lr=lr, factors_every=10, replay=replay)


def block_of_steps(problem: Batches, make: Factory, steps: int) -> Callable[[], None]:
    """Return a program that takes some steps; each call continues from the last one."""
    model = copy.deepcopy(problem.model)
    optimizer = make(model, 1e-4)  # labels are random, and the measured training should not diverge
    batches, loss = cycle(problem.data), nn.CrossEntropyLoss()

    def program() -> None:
        with tf32(problem.tf32):
            for _ in range(steps):
                training_step(model, optimizer, loss, next(batches), problem.autocast)

    return program


def costs(problems: list[Batches], quick: bool = False) -> list[Cost]:
    """Measure steps on problems; the first block, which creates states, does not count."""
    makers = factories(nn.CrossEntropyLoss())  # a mean over the GPT's tokens also for SINGD: other scales, same cost
    del makers["kfs"]
    makers |= {f"kfs, every {k}": partial(every, k) for k in (1, 10)} | {"kfs": later}
    return measured(problems, makers, 1 if quick else BLOCK, 1 if quick else BLOCKS)


def byte_gpt(scale: int, device: str) -> Batches:
    """Return a GPT for bytes: six layers of width 256, and 64 sequences of length 128."""
    torch.manual_seed(0)
    model = GPT(vocabulary=256, width=256 // scale, heads=8, depth=6 // scale, length=128).to(device)
    tokens = torch.randint(256, (64 // scale, 129), device=device)
    return Batches("byte GPT", model, [(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())])


def on_gpu(names: list[str], results: Path = RESULTS, device: str = "cuda") -> None:
    """Measure steps with default settings on a GPU, on all problems, or those with given beginnings of their names."""
    quick = "--quick" in names
    scale = 2 if quick else 1
    problems = [*factor_problems(8 * scale if quick else 1, device), byte_gpt(scale, device), *vit(scale, device)]
    wanted = [name for name in names if name != "--quick"]
    problems = [problem for problem in problems if not wanted or problem.name.startswith(tuple(wanted))]
    makers = factories(nn.CrossEntropyLoss())
    makers = {name: makers[name] for name in ("sgd", "adamw", "muon", "soap")}
    makers |= {"kfs": later, "kfs, replay=False": partial(later, replay=False)}
    # All recordings are made before a step is measured: passes for factors are recorded at the second one.
    found = []
    for problem in problems:
        # SOAP decomposes in float64, which takes minutes for the ViT.
        chosen = {name: make for name, make in makers.items() if not (problem.large and name == "soap")}
        found += measured([problem], chosen, 1 if quick else BLOCK, 1 if quick else 3, warm_up=1 if quick else 2)
        torch.cuda.empty_cache()
        name = f"train_cost_cuda{'_quick' if quick else ''}"
        print(f"Written: {save(found, name, {'block': BLOCK, 'device': device}, results)}")  # a run may be stopped


def measured(
    problems: list[Batches], makers: Mapping[str, Factory], steps: int, blocks: int, warm_up: int = 0
) -> list[Cost]:
    """Measure some blocks of steps on each problem, and print a table."""
    found = []
    for problem in problems:
        programs = {name: block_of_steps(problem, make, steps) for name, make in makers.items()}
        for program in programs.values():
            for _ in range(warm_up):
                program()
        seconds = medians(programs, blocks, problem.name)
        found += [Cost(problem.name, name, t / steps, t / seconds["sgd"]) for name, t in seconds.items()]
    print("| problem | optimizer | milliseconds per step | step / (step of SGD) |")
    print("|---|---|---|---|")
    for cost in found:
        print(f"| {cost.problem} | {cost.optimizer} | {1e3 * cost.seconds:.1f} | {cost.ratio:.2f} |")
    return found
