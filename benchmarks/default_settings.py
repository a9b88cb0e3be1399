"""KFAC with default settings against tuned optimizers: fine-tuning and training from scratch.

`python -m benchmarks.train defaults [cuda] [names] [--quick] [--seeds N] [--jobs N]` trains with constant learning
rates and with a cosine after 5 % of warm-up, and writes one JSON file per task and a plot of all to benchmarks/results.
AdamW, Muon and SOAP get the best of `GRIDS` by their loss at the end with the first seed; Prodigy needs no learning
rate. `kfs` has default settings, and `kfs-fixed` is the same with `noise=None`, at the best of three learning rates.
Each is then run with `SEEDS` seeds, or the number in `--seeds`: all optimizers with one seed after another, and files
are written after each. Names are those of tasks, of schedules (`constant`, `cosine`) and of optimizers; other results
stay as they are. `--jobs` is the number of processes that train at the same time.

`full` and `lora` start from a byte-level GPT that was trained on source text, and learn sentences about an invented
world; `lora` trains adapters of rank 8. On a GPU, the GPT has 5 million parameters, on a CPU 120 thousand. Losses are
held-out ones; for `deep` and for the small data sets of scikit-learn, they are those of the training data, which
optimizers minimize.
"""

import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import groupby, pairwise, product
from pathlib import Path

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from sklearn.datasets import load_breast_cancer, load_diabetes, load_wine
from torch import Tensor, nn

from benchmarks import gpu_training
from benchmarks.baseline_optimizers import Factory, Prodigy, factories
from benchmarks.gpu_training import GpuRun, GpuTask, source_text, text_task, train
from benchmarks.long_runs import RecurrentModel
from benchmarks.report import RESULTS, option, processes, save
from benchmarks.training_tasks import (
    Batch,
    CharacterGPT,
    Task,
    autoencoder_model,
    cnn_model,
    half_squared_error,
    sentences,
    shuffled,
)
from kfs.losses import HalfSquaredError
from kfs.optim import KFAC
from kfs.tour.digits import load

SEEDS = 3
GRIDS: dict[str, tuple[float, ...]] = {
    "adamw": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2),
    "muon": (6e-4, 0.002, 0.006, 0.02, 0.06),
    "soap": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2),
    "prodigy": (1.0,),
    "kfs-fixed": (0.1, 0.3, 1.0),
    "kfs": (1.0,),
}


class Adapted(nn.Module):
    """A frozen linear layer plus the product of two narrow ones (LoRA)."""

    def __init__(self, base: nn.Linear, rank: int = 8, alpha: float = 16.0) -> None:
        """Start with a product of zero."""
        super().__init__()
        self.base, self.scale = base, alpha / rank
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Add the product to the layer's output."""
        result: Tensor = self.base(x) + self.scale * self.up(self.down(x))
        return result


def adapted(model: CharacterGPT) -> CharacterGPT:
    """Return a model whose linear layers within blocks have adapters; only these are trained."""
    for p in model.parameters():
        p.requires_grad_(False)
    for block in model.blocks:
        for name in ("qkv", "out", "up", "down"):
            setattr(block, name, Adapted(getattr(block, name)))
    return model


@dataclass(frozen=True)
class Size:
    """Sizes of texts and models."""

    width: int
    depth: int
    length: int
    batch: int
    steps: int  # steps from scratch; half as many for fine-tuning

    def gpt(self) -> CharacterGPT:
        """Return a new model."""
        return CharacterGPT(256, width=self.width, heads=self.width // 32 or 1, depth=self.depth, length=self.length)


SIZES = {"cuda": Size(256, 6, 128, 64, 400), "cpu": Size(64, 2, 64, 32, 400), "quick": Size(16, 1, 16, 4, 8)}


@cache
def facts(device: str) -> tuple[Tensor, Tensor]:
    """Return sentences as bytes, and held-out ones."""
    made = [sentences(count, seed).encode() for count, seed in ((400_000, 1), (100_000, 2))]
    training, other = (torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device) for text in made)
    return training, other


PRETRAINED: dict[tuple[str, Size], dict[str, Tensor]] = {}  # by device and size


def pretrained(device: str, size: Size) -> dict[str, Tensor]:
    """Return the parameters of a model that was trained on source text."""
    if (device, size) not in PRETRAINED:
        task = text_task("pretraining", size.gpt, source_text(device), size.batch, size.length, size.steps, checks=4)
        kept: list[nn.Module] = []

        def make(model: nn.Module, lr: float) -> KFAC:
            kept.append(model)
            return KFAC(model, task.description, lr=lr)

        train(task, "kfs", make, 1.0, device, seed=7)
        PRETRAINED[device, size] = {name: t.detach().cpu().clone() for name, t in kept[0].state_dict().items()}
    return PRETRAINED[device, size]


def fine_tuning(device: str, size: Size, lora: bool) -> GpuTask:
    """Return sentences, and the pretrained model, with or without adapters."""
    state = pretrained(device, size)

    def model() -> nn.Module:
        made = size.gpt()
        made.load_state_dict(state)
        return adapted(made) if lora else made

    return text_task(
        "lora" if lora else "full", model, facts(device), size.batch, size.length, size.steps // 2, checks=4
    )


def table(name: str, device: str, steps: int) -> GpuTask:
    """Return a task with a small data set of scikit-learn, and a network with two hidden layers."""
    X, y = {"wine": load_wine, "cancer": load_breast_cancer, "diabetes": load_diabetes}[name](return_X_y=True)
    inputs = torch.tensor((X - X.mean(0)) / X.std(0)).float()
    regression = name == "diabetes"
    targets = torch.tensor((y - y.mean()) / y.std()).float().unsqueeze(1) if regression else torch.tensor(y).long()
    out = 1 if regression else int(targets.max()) + 1

    def model() -> nn.Module:
        widths = (inputs.shape[1], 64, 64, out)
        layers = [layer for before, after in pairwise(widths) for layer in (nn.Linear(before, after), nn.ReLU())]
        return nn.Sequential(*layers[:-1])

    loss = half_squared_error if regression else nn.functional.cross_entropy
    description = HalfSquaredError() if regression else nn.CrossEntropyLoss()
    return plain_task(name, model, (inputs, targets), 32, loss, description, device, steps)


def plain_task(
    name: str,
    model: Callable[[], nn.Module],
    data: Batch,
    batch: int,
    loss: Callable[[Tensor, Tensor], Tensor],
    description: object,
    device: str,
    steps: int,
) -> GpuTask:
    """Return a task whose loss is that of the training data."""
    X, y = data

    def batches(seed: int) -> Iterator[Batch]:
        for some, of_some in shuffled(X, y, batch, seed):
            yield some.to(device), of_some.to(device)

    check = [(X.to(device), y.to(device))]
    return GpuTask(name, model, batches, check, loss, description, target=0.0, steps=steps)


def digits(name: str, device: str, steps: int) -> GpuTask:
    """Return a CNN or a deep tanh network that classifies digits, or a deep one that reconstructs them."""
    pixels, y = load()
    X = pixels.float()
    if name == "tanh":
        return plain_task(name, autoencoder_model, (X, X), 64, half_squared_error, HalfSquaredError(), device, steps)
    model = cnn_model if name == "cnn" else gpu_training.deep_model
    images = X.view(-1, 1, 8, 8) if name == "cnn" else X
    cross_entropy = nn.functional.cross_entropy
    return plain_task(name, model, (images, y), 64, cross_entropy, nn.CrossEntropyLoss(), device, steps)


def lstm(device: str, size: Size) -> GpuTask:
    """Return a recurrent model of source text."""
    model = (lambda: RecurrentModel(256, 832)) if device == "cuda" else RecurrentModel
    return text_task("lstm", model, source_text(device), size.batch, size.length, size.steps, checks=4)


TASKS: dict[str, Callable[[str, Size], GpuTask]] = {
    "full": lambda device, size: fine_tuning(device, size, lora=False),
    "lora": lambda device, size: fine_tuning(device, size, lora=True),
    "gpt": lambda device, size: text_task(
        "gpt", size.gpt, source_text(device), size.batch, size.length, size.steps, checks=4
    ),
    "lstm": lstm,
    "deep": lambda device, size: digits("deep", device, size.steps),
    "cnn": lambda device, size: digits("cnn", device, size.steps),
    "tanh": lambda device, size: digits("tanh", device, size.steps),
    "wine": lambda device, size: table("wine", device, size.steps),
    "cancer": lambda device, size: table("cancer", device, size.steps),
    "diabetes": lambda device, size: table("diabetes", device, size.steps),
}


@dataclass(frozen=True)
class Result:
    """The best runs of an optimizer on a task: means over seeds.

    Attributes:
        task: The task.
        schedule: The schedule of the learning rate.
        optimizer: The optimizer.
        lr: The best learning rate.
        half: Loss after half of the steps.
        end: Loss at the end.
        ends: Losses at the end, by seed.
        tried: Losses at the end, by learning rate.
        seconds: Time of all steps.
        history: Steps, seconds and losses of the first seed.
    """

    task: str
    schedule: str
    optimizer: str
    lr: float
    half: float
    end: float
    ends: list[float]
    tried: dict[str, float]
    seconds: float
    history: list[tuple[int, float, float]]


def makers(task: Task) -> dict[str, Factory]:
    """Return functions that make each optimizer."""
    made = factories(task.description)
    return {
        **{name: made[name] for name in ("adamw", "muon", "soap")},
        "prodigy": lambda model, lr: Prodigy(model.parameters(), lr),
        "kfs-fixed": lambda model, lr: KFAC(model, task.description, lr=lr, noise=None),
        "kfs": lambda model, lr: KFAC(model, task.description, lr=lr),
    }


@cache
def task_of(name: str, device: str, quick: bool) -> GpuTask:
    """Return a task by its name."""
    task = TASKS[name](device, SIZES["quick" if quick else device])
    return replace(task, check=task.check[:1]) if quick else task


def trained(device: str, quick: bool, name: str, schedule: str, optimizer: str, lr: float, seed: int) -> GpuRun:
    """Train once."""
    task = task_of(name, device, quick)
    return train(task, optimizer, makers(task)[optimizer], lr, device, seed, schedule == "constant")


def best(tried: dict[float, GpuRun]) -> float:
    """Return the learning rate with the lowest loss at the end."""
    return min(tried, key=lambda lr: tried[lr].end)


def result(schedule: str, tried: dict[float, GpuRun], others: list[GpuRun]) -> Result:
    """Return reports of runs with the first seed, by learning rate, and of the best rate's runs with other seeds."""
    lr = best(tried)
    runs = [tried[lr], *others]
    halves = [run.history[len(run.history) // 2 - 1][2] for run in runs]
    ends = [run.end for run in runs]
    found = Result(
        runs[0].task,
        schedule,
        runs[0].optimizer,
        lr,
        statistics.fmean(halves),
        statistics.fmean(ends),
        ends,
        {f"{rate:g}": run.end for rate, run in tried.items()},
        runs[0].seconds,
        runs[0].history,
    )
    shown = f"{lr:g} | {found.half:.4g} | {found.end:.4g} | {found.seconds:.1f}"
    print(f"| {found.task} | {schedule} | {found.optimizer} | {shown} |", flush=True)
    return found


def compare(
    tasks: list[str], schedules: list[str], optimizers: list[str], device: str, quick: bool, seeds: int, jobs: int
) -> Iterator[list[Result]]:
    """Train all optimizers with the first seed, then the best of each with the second one, and so on.

    Yields the results of a task and a schedule whenever there are new ones.
    """
    groups = list(product(tasks, schedules))
    grids = {name: GRIDS[name][:1] if quick else GRIDS[name] for name in optimizers}
    if jobs > 1 and {"full", "lora"} & set(tasks):  # all processes begin with the same model
        pretrained(device, SIZES["quick" if quick else device])
    tried: dict[tuple[str, str, str], dict[float, GpuRun]] = {}
    others: dict[tuple[str, str, str], list[GpuRun]] = {}
    with processes(jobs, PRETRAINED.update, (PRETRAINED,)) as run:
        for seed in range(seeds):
            plan = [
                (*group, name, lr, seed)
                for group in groups
                for name, grid in grids.items()
                for lr in (grid if seed == 0 else [best(tried[*group, name])])
            ]
            done = zip(plan, run(partial(trained, device, quick), plan), strict=True)
            for group, inside in groupby(done, key=lambda pair: pair[0][:2]):
                for (*_, name, lr, _), one in inside:
                    if seed == 0:
                        tried.setdefault((*group, name), {})[lr] = one
                    else:
                        others.setdefault((*group, name), []).append(one)
                keys = [(*group, name) for name in grids]
                yield [result(group[1], tried[key], others.get(key, [])) for key in keys]


def draw(results: list[Result], file: Path) -> None:
    """Draw losses over steps: one column per task, one row per schedule."""
    tasks = list(dict.fromkeys(result.task for result in results))
    schedules = list(dict.fromkeys(result.schedule for result in results))
    figure = Figure(figsize=(3.2 * len(tasks), 2.8 * len(schedules)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(schedules), len(tasks), squeeze=False)
    for row, schedule in zip(panels, schedules, strict=True):
        for panel, task in zip(row, tasks, strict=True):
            for place, name in enumerate(GRIDS):
                for one in results:
                    if (one.task, one.schedule, one.optimizer) == (task, schedule, name) and one.history:
                        points = [
                            (step, loss) for step, _, loss in one.history if loss is not None and math.isfinite(loss)
                        ]
                        label = name if name in {"kfs", "prodigy"} else f"{name}, tuned"
                        width, style = (2.2, "-") if name == "kfs" else (1.1, "--" if name == "kfs-fixed" else "-")
                        panel.plot(
                            *zip(*points, strict=True), color=f"C{place}", linewidth=width, linestyle=style, label=label
                        )
            panel.set(yscale="log", xlabel="steps", title=f"{task}, {schedule}")
        row[0].set_ylabel("loss")
    panels[0][-1].legend(frameon=False, fontsize=7)
    figure.savefig(file, dpi=110)


SCHEDULES = ("constant", "cosine")


def known(file: Path) -> list[Result]:
    """Return the results in a file, if it exists. Losses that are not finite are `None` there."""
    return [Result(**row) for row in json.loads(file.read_text())["rows"]] if file.exists() else []


def chosen_of(names: list[str], all_names: Iterable[str]) -> list[str]:
    """Return the names that were given; all names if none was."""
    return [name for name in all_names if name in names] or list(all_names)


def main(arguments: list[str], results: Path = RESULTS) -> None:
    """Run the named parts, by default all of them."""
    arguments, seeds = option(arguments, "--seeds", 1 if "--quick" in arguments else SEEDS)
    arguments, jobs = option(arguments, "--jobs")
    quick, device = "--quick" in arguments, "cuda" if "cuda" in arguments else "cpu"
    names = [argument for argument in arguments if argument not in {"--quick", "cuda"}]
    if unknown := set(names) - {*TASKS, *SCHEDULES, *GRIDS}:
        choices = ", ".join([*TASKS, *SCHEDULES, *GRIDS])
        sys.exit(f"Unknown: {', '.join(sorted(unknown))}. Say {choices}, cuda, and --quick if you like.")
    tasks, schedules, optimizers = (chosen_of(names, some) for some in (TASKS, SCHEDULES, GRIDS))
    start = f"train_defaults_{device}{'_quick' if quick else ''}"
    print("| task | schedule | optimizer | learning rate | at half | at the end | seconds |")
    print("|---|---|---|---|---|---|---|")
    for new in compare(tasks, schedules, optimizers, device, quick, seeds, jobs):
        measured = {(one.schedule, one.optimizer) for one in new}
        file = results / f"{start}_{new[0].task}.json"
        old = [one for one in known(file) if (one.schedule, one.optimizer) not in measured]
        found = sorted([*old, *new], key=lambda one: (SCHEDULES.index(one.schedule), [*GRIDS].index(one.optimizer)))
        print(
            f"Written: {save(found, file.stem, {'seeds': max(len(one.ends) for one in found), 'jobs': jobs}, results)}"
        )
    picture = results / f"{start}.png"
    draw([one for name in TASKS for one in known(results / f"{start}_{name}.json")], picture)
    print(f"Written: {picture}")
