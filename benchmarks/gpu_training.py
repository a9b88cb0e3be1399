"""Training on a GPU to the end of a schedule: losses over steps and over seconds, KFAC and others.

`python -m benchmarks.train cuda [gpt|deep|lstm|large ...] [--quick]` prints a table for each task, and writes JSON and
a plot to benchmarks/results. Learning rates rise for 5 % of the steps and then fall to zero along a cosine, for all
optimizers; each gets the best of its `GRIDS` by its loss at the end, with one seed. Seconds are those of forward pass,
backward pass and optimizer, without the evaluations. *Seconds to the best of the others* are measured until the final
loss of the best other optimizer is reached.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor, nn

from benchmarks.baseline_optimizers import Factory, factories
from benchmarks.long_runs import RecurrentModel, corpus, places_of_lr, share_of_lr
from benchmarks.report import RESULTS, save, synchronize
from benchmarks.training_tasks import Batch, CharacterGPT, Task, token_cross_entropy
from kfs.losses import TokenCrossEntropy
from kfs.tour.digits import load

EVALUATIONS = 20  # in a run
GRIDS: dict[str, tuple[float, ...]] = {
    "adamw": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2),
    "muon": (0.006, 0.02, 0.06),
    "soap": (1e-3, 3e-3, 1e-2, 3e-2),
    "kfs": (0.1, 0.3, 1.0),
}
# For runs that take a minute, only the rates around the best one, 0.003: at 0.0003 and 0.03, SOAP's final loss was
# worse by 0.17 and 0.46.
GRIDS_OF_TASKS: dict[str, dict[str, tuple[float, ...]]] = {"large": {"soap": (1e-3, 3e-3, 1e-2)}}


@dataclass(frozen=True)
class GpuTask(Task):
    """A task on a device, trained to the end of a schedule.

    Attributes:
        autocast: The precision of autocast; `None` for the model's own.
    """

    autocast: torch.dtype | None = None

    def precision(self) -> AbstractContextManager[object]:
        """Return the context to run the model in."""
        return nullcontext() if self.autocast is None else torch.autocast("cuda", self.autocast)

    def value(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss of a batch."""
        with self.precision():
            return self.loss(model(batch[0]), batch[1])


@dataclass(frozen=True)
class GpuRun:
    """One training run.

    Attributes:
        task: The task.
        optimizer: The optimizer.
        lr: The largest learning rate.
        seconds: Time of all steps.
        end: The loss at the end; infinite after a divergence.
        history: Steps, seconds and loss at every evaluation.
    """

    task: str
    optimizer: str
    lr: float
    seconds: float
    end: float
    history: list[tuple[int, float, float]]

    def seconds_to(self, loss: float) -> float:
        """Return the time at which a loss was reached, interpolated between evaluations; infinity if it was not."""
        for (_, start, before), (_, stop, after) in pairwise([(0, 0.0, math.inf), *self.history]):
            if after <= loss:
                share = 1.0 if math.isinf(before) else (before - loss) / max(before - after, 1e-30)
                return start + share * (stop - start)
        return math.inf


def text_batches(text: Tensor, size: int, length: int, seed: int) -> Iterator[Batch]:
    """Return endless batches of random pieces of a text, with the same pieces shifted by one character as labels."""
    generator = torch.Generator().manual_seed(seed)
    pieces = text.unfold(0, length + 1, 1)
    while True:
        chosen = pieces[torch.randint(len(pieces), (size,), generator=generator).to(text.device)].long()
        yield chosen[:, :-1].contiguous(), chosen[:, 1:].contiguous()


@cache
def source_text(device: str) -> tuple[Tensor, Tensor]:
    """Return source text as bytes, and its held-out last twentieth."""
    text = corpus(4_700_000).to(torch.uint8).to(device)
    cut = int(0.95 * len(text))
    return text[:cut], text[cut:]


def text_task(
    name: str,
    model: Callable[[], nn.Module],
    texts: tuple[Tensor, Tensor],
    size: int,
    length: int,
    steps: int,
    checks: int = 8,
) -> GpuTask:
    """Predict the next byte of a text; some batches of another text are held out."""
    training, other = texts
    held_out = text_batches(other, 64, length, seed=0)
    return GpuTask(
        name=name,
        model=model,
        batches=lambda seed: text_batches(training, size, length, seed),
        check=[next(held_out) for _ in range(checks)],
        loss=token_cross_entropy,
        description=TokenCrossEntropy(),
        target=0.0,
        steps=steps,
    )


def gpt(device: str) -> GpuTask:
    """Return a byte-level GPT of 5 million parameters."""
    return text_task(
        "gpt", lambda: CharacterGPT(256, width=256, heads=8, depth=6, length=128), source_text(device), 64, 128, 400
    )


def large(device: str) -> GpuTask:
    """Return a byte-level GPT of 86 million parameters, in bfloat16."""
    task = text_task(
        "large", lambda: CharacterGPT(256, width=768, heads=12, depth=12, length=256), source_text(device), 16, 256, 300
    )
    return replace(task, autocast=torch.bfloat16)


def lstm(device: str) -> GpuTask:
    """Return a recurrent model of 3.7 million parameters."""
    return text_task("lstm", lambda: RecurrentModel(256, 832), source_text(device), 64, 64, 600)


def deep_model() -> nn.Module:
    """Return twenty linear layers with tanh between them, 5 million parameters."""
    widths = (64, *[512] * 20, 10)
    layers = [layer for before, after in pairwise(widths) for layer in (nn.Linear(before, after), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def deep(device: str) -> GpuTask:
    """Classify digits with a deep network; the loss is that of the training data."""
    X, y = load()
    images, labels = X.float().to(device), y.to(device)

    def batches(seed: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            chosen = torch.randint(len(images), (256,), generator=generator).to(device)
            yield images[chosen], labels[chosen]

    return GpuTask(
        name="deep",
        model=deep_model,
        batches=batches,
        check=[(images, labels)],
        loss=nn.functional.cross_entropy,
        description=nn.CrossEntropyLoss(),
        target=0.0,
        steps=400,
    )


TASKS: dict[str, Callable[[str], GpuTask]] = {"gpt": gpt, "deep": deep, "lstm": lstm, "large": large}


def evaluated(task: GpuTask, model: nn.Module) -> float:
    """Return the mean loss on the evaluation data."""
    with torch.no_grad():
        return float(torch.stack([task.value(model, batch) for batch in task.check]).mean())


def train(
    task: GpuTask, name: str, make: Factory, lr: float, device: str, seed: int = 0, constant: bool = False
) -> GpuRun:
    """Train to the end of the schedule, or with a constant learning rate, or until the loss is not finite."""
    torch.manual_seed(seed)
    model = task.model().to(device)
    optimizer, batches = make(model, lr), task.batches(seed)
    places = places_of_lr(optimizer)
    full = [place["lr"] for place in places]
    history: list[tuple[int, float, float]] = []
    seconds = 0.0
    every = max(1, task.steps // EVALUATIONS)
    synchronize()
    start = time.perf_counter()
    for step in range(1, task.steps + 1):
        for place, base in zip(places, full, strict=True):
            place["lr"] = base if constant else base * share_of_lr(step - 1, task.steps)
        optimizer.zero_grad()
        task.value(model, next(batches)).backward()
        optimizer.step()
        if step % every == 0:
            synchronize()
            seconds += time.perf_counter() - start
            loss = evaluated(task, model)
            history.append((step, seconds, loss))
            if not math.isfinite(loss):
                break
            start = time.perf_counter()
    end = history[-1][2] if math.isfinite(history[-1][2]) else math.inf
    return GpuRun(task.name, name, lr, seconds, end, history)


def line(run: GpuRun, best_of_others: float) -> str:
    """Return a row of the table."""
    losses = [run.history[min(int(share * len(run.history)), len(run.history)) - 1][2] for share in (0.25, 0.5)]
    cells = [run.task, run.optimizer, f"{run.lr:g}", *(f"{loss:.4f}" for loss in (*losses, run.end))]
    cells += [f"{run.seconds:.1f}", f"{1e3 * run.seconds / run.history[-1][0]:.1f}"]
    reached = run.seconds_to(best_of_others)
    return f"| {' | '.join(cells)} | {'not reached' if math.isinf(reached) else f'{reached:.1f}'} |"


def compare(task: GpuTask, device: str, grids: dict[str, tuple[float, ...]]) -> list[GpuRun]:
    """Train with all optimizers and learning rates, and print the best run of each."""
    makers = factories(task.description)
    found = [train(task, name, makers[name], lr, device) for name, grid in grids.items() for lr in grid]
    best = {name: min((run for run in found if run.optimizer == name), key=lambda run: run.end) for name in grids}
    target = min((run.end for name, run in best.items() if name != "kfs"), default=math.inf)
    print(f"{task.name}: {sum(p.numel() for p in task.model().parameters()) / 1e6:.1f} million parameters")
    head = "at a quarter | at half | at the end | seconds | milliseconds per step | seconds to the best of the others"
    print(f"| task | optimizer | learning rate | {head} |")
    print("|---|---|---|---|---|---|---|---|---|")
    for run in best.values():
        print(line(run, target), flush=True)
    return found


def draw(runs: dict[str, list[GpuRun]], file: Path) -> None:
    """Draw the best run of each optimizer, over steps and over seconds; one row for each task."""
    figure = Figure(figsize=(9, 3.2 * len(runs)), layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subplots(len(runs), 2, sharey="row", squeeze=False)
    for panels, (task, mine) in zip(rows, runs.items(), strict=True):
        for axis, (panel, label) in enumerate(zip(panels, ("steps", "seconds"), strict=True)):
            for name in sorted({run.optimizer for run in mine}, key=list(GRIDS).index):
                run = min((run for run in mine if run.optimizer == name), key=lambda run: run.end)
                places, losses = [point[axis] for point in run.history], [point[2] for point in run.history]
                panel.plot(places, losses, label=f"{name}, lr {run.lr:g}", linewidth=2 if name == "kfs" else 1.2)
            panel.set(xlabel=label, yscale="log")
        panels[0].set(ylabel="loss", title=task)
        panels[1].legend(frameon=False)
    figure.savefig(file, dpi=120)


def main(arguments: list[str], results: Path = RESULTS, device: str = "cuda") -> None:
    """Run the named parts, by default all of them."""
    quick = "--quick" in arguments
    chosen = [argument for argument in arguments if argument != "--quick"] or list(TASKS)
    if unknown := set(chosen) - set(TASKS):
        sys.exit(f"Unknown: {', '.join(sorted(unknown))}. Say {', '.join(TASKS)}, and --quick if you like.")
    grids = {name: grid[1:2] if quick else grid for name, grid in GRIDS.items()}
    found = {}
    end = "_quick" if quick else ""
    for name in chosen:
        task = TASKS[name](device)
        task = replace(task, steps=4, check=task.check[:1]) if quick else task
        found[name] = compare(task, device, grids if quick else grids | GRIDS_OF_TASKS.get(name, {}))
        print(f"Written: {save(found[name], f'train_cuda_{name}{end}', {'steps': task.steps}, results)}")
    picture = results / f"train_cuda{end}.png"
    draw(found, picture)
    print(f"Written: {picture}")
