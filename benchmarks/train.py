"""Training with KFAC and other optimizers: steps and seconds to a fixed loss, and the cost of a step.

`python -m benchmarks.train [autoencoder|cnn|gpt|resnet|cost|all] [--quick] [--jobs N]` runs on one CPU thread and
writes JSON to benchmarks/results, in about 25 minutes for all if `singd` is installed. With `--jobs`, optimizers of a
task are measured at the same time, in N processes of one thread each. Learning rates are constant. Every optimizer gets
the same tuning: of the five values in `baseline_optimizers.GRIDS`, the one that reaches a task's loss in the fewest
steps with the seed `TUNING_SEED` is used for the reported seeds. The loss is checked every few steps; seconds are those
of forward pass, backward pass and optimizer, without the checks.

`cost [MLP] [CNN] [GPT]` measures a step on problems of the factor benchmark, in units of a step of SGD: see
`step_costs`. `cuda` does the same on a GPU, with larger tasks and a schedule: see `gpu_training`. `defaults` compares
default settings with tuned optimizers: see `default_settings`. `--quick` only shows, in less than a minute, that
everything runs; its numbers mean nothing.
"""

import math
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks import default_settings, gpu_training, step_costs
from benchmarks.baseline_optimizers import GRIDS, PEERS, Factory, factories, left_out
from benchmarks.factor_problems import factor_problems
from benchmarks.report import RESULTS, option, processes, save
from benchmarks.step_costs import training_step
from benchmarks.training_tasks import TASKS, Task

SEEDS = (0, 1, 2)
TUNING_SEED = 100
CHECK_EVERY = 5
SECONDS = 15.0  # seconds of training, after which a run is stopped


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        seed: Seed of initialization and batches.
        lr: The learning rate.
        steps: Number of steps.
        seconds: Time of all steps.
        loss: Loss at the last check.
        reached: Whether that is at most the target.
        history: Steps, seconds and loss at every check.
    """

    seed: int
    lr: float
    steps: int
    seconds: float
    loss: float
    reached: bool
    history: list[tuple[int, float, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Result:
    """The report of an optimizer on a task; without runs, the reason."""

    task: str
    optimizer: str
    lr: float | None
    runs: list[Run]
    tuning: list[Run]
    note: str = ""


def train(task: Task, make: Factory, lr: float, seed: int, steps: int) -> Run:
    """Train until the target is reached, the loss is not finite, or the limit of steps or seconds is reached."""
    torch.manual_seed(seed)
    model = task.model()
    optimizer, batches = make(model, lr), task.batches(seed)
    seconds, done, loss, history = 0.0, 0, math.inf, list[tuple[int, float, float]]()
    while done < steps and seconds < SECONDS:
        batch = next(batches)
        start = time.perf_counter()
        training_step(model, optimizer, task.loss, batch)
        seconds += time.perf_counter() - start
        done += 1
        if done % CHECK_EVERY == 0:
            loss = task.checked_loss(model)
            history.append((done, seconds, loss))
            if loss <= task.target or not math.isfinite(loss):
                break
    return Run(seed, lr, done, seconds, loss, loss <= task.target, history)


def tune(task: Task, make: Factory, grid: tuple[float, ...], steps: int) -> list[Run]:
    """Try learning rates with the tuning seed, and return the runs, the best one first.

    The grid is tried from the middle, and a run stops as soon as it cannot be better than the best one so far.
    """
    runs: list[Run] = []
    limit = steps
    for lr in sorted(grid, key=lambda lr: abs(math.log(lr / grid[len(grid) // 2]))):
        runs.append(train(task, make, lr, TUNING_SEED, limit))
        limit = min([limit, *(run.steps for run in runs if run.reached)])
    return sorted(runs, key=lambda run: (not run.reached, run.steps if run.reached else loss_or_inf(run)))


def loss_or_inf(run: Run) -> float:
    """Return the last loss, for sorting: infinity in place of NaN, which cannot be compared."""
    return run.loss if math.isfinite(run.loss) else math.inf


def compare(task: Task, quick: bool = False, jobs: int = 1) -> Iterator[Result]:
    """Tune and run all optimizers on a task."""
    names = list(factories(task.description))
    if jobs == 1:
        yield from (compared(task, name, quick) for name in names)
    else:
        with processes(jobs) as run:
            yield from run(compared_by_name, [(task.name, name, quick) for name in names])
    for name, note in left_out().items():
        yield Result(task.name, name, None, [], [], note)


def compared_by_name(task: str, name: str, quick: bool) -> Result:
    """Tune and run an optimizer on a task of `TASKS`, in a separate process."""
    return compared(TASKS[task](), name, quick)


def compared(task: Task, name: str, quick: bool) -> Result:
    """Tune and run an optimizer on a task."""
    steps, seeds = (2 * CHECK_EVERY, SEEDS[:1]) if quick else (task.steps, SEEDS)
    make = factories(task.description)[name]
    grid = GRIDS[name][2:3] if quick else GRIDS[name]
    shown = "adam" if (name, task.name) == ("adamw", "autoencoder") else name  # the same without weight decay
    try:
        tuning = tune(task, make, grid, steps)
        runs = [train(task, make, tuning[0].lr, seed, steps) for seed in seeds]
    except Exception as error:
        if name not in PEERS:
            raise
        return Result(task.name, shown, None, [], [], f"not supported: {reason(error)}")
    edge = tuning[0].lr in {grid[0], grid[-1]} and not quick
    return Result(task.name, shown, tuning[0].lr, runs, tuning, "at the grid's edge" if edge else "")


def reason(error: Exception) -> str:
    """Return a short text for a cell of the table: the kind of an error and the first line of its message."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}".replace("|", "/")


def line(result: Result) -> str:
    """Return a row of the table."""
    start = f"| {result.task} | {result.optimizer} |"
    if result.lr is None:
        return f"{start} | | | | {result.note} |"
    steps = ", ".join(str(run.steps) if run.reached else f"not reached ({run.loss:.3g})" for run in result.runs)
    seconds = ", ".join(f"{run.seconds:.2f}" for run in result.runs)
    middle = [
        statistics.median(value if run.reached else math.inf for run, value in zip(result.runs, values, strict=True))
        for values in ([run.steps for run in result.runs], [run.seconds for run in result.runs])
    ]
    median = f"{middle[0]:.0f} steps, {middle[1]:.2f} s" if math.isfinite(middle[0]) else "not reached"
    return f"{start} {result.lr:g} | {steps} | {seconds} | {median} | {result.note} |"


def table(task: Task, quick: bool = False, jobs: int = 1) -> list[Result]:
    """Run all optimizers on a task, and print rows as they are measured."""
    print(f"{task.name}: to a loss of {task.target:g} in at most {task.steps} steps and {SECONDS:g} seconds")
    print("| task | optimizer | learning rate | steps | seconds | median | |")
    print("|---|---|---|---|---|---|---|")
    results = []
    for result in compare(task, quick, jobs):
        print(line(result), flush=True)
        results.append(result)
    return results


def draw(task: Task, results: list[Result], file: Path) -> None:
    """Draw losses over steps and over seconds, one line per run."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    for axis, (panel, label) in enumerate(zip(panels, ("steps", "seconds on one CPU thread"), strict=True)):
        for color, result in enumerate(results):
            for run in result.runs:
                places, losses = [point[axis] for point in run.history], [point[2] for point in run.history]
                name = result.optimizer if run is result.runs[0] else None
                panel.plot(places, losses, color=f"C{color}", linewidth=1, label=name)
        panel.axhline(task.target, color="black", linewidth=0.8, linestyle=":")
        panel.set(xlabel=label, xscale="log", yscale="log")
    first = [run.history[0][2] for result in results for run in result.runs]
    top = max((loss for loss in first if math.isfinite(loss)), default=2 * task.target)  # some diverge later
    panels[0].set(ylabel="loss", title=task.name, ylim=(0.8 * task.target, 1.5 * max(top, task.target)))
    panels[1].legend(frameon=False)
    figure.savefig(file, dpi=150)


def main(arguments: list[str], results: Path = RESULTS) -> None:
    """Run the named parts, by default all of them."""
    if "defaults" in arguments:
        default_settings.main([argument for argument in arguments if argument != "defaults"], results)
        return
    if "cuda" in arguments:
        others = [argument for argument in arguments if argument != "cuda"]
        if "cost" in others:
            step_costs.on_gpu([argument for argument in others if argument != "cost"], results)
        else:
            gpu_training.main(others, results)
        return
    arguments, jobs = option(arguments, "--jobs")
    quick = "--quick" in arguments
    chosen = [argument for argument in arguments if argument != "--quick"] or ["all"]
    problems = factor_problems(8 if quick else 1)
    of_cost = [problem for problem in problems if problem.name in chosen]
    if unknown := set(chosen) - {"all", "cost", *TASKS, *(problem.name for problem in problems)}:
        sys.exit(
            f"Unknown: {', '.join(sorted(unknown))}. Say {', '.join(TASKS)}, cost or all, and --quick if you like; "
            "cuda first for a GPU."
        )
    tasks = list(TASKS) if "all" in chosen else [name for name in TASKS if name in chosen]
    end = "_quick" if quick else ""  # results of full runs stay
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name in tasks:
            task = TASKS[name]()
            found = table(task, quick, jobs)
            file = save(found, f"train_{name}{end}", {"target": task.target, "jobs": jobs}, results)
            draw(task, found, file.with_suffix(".png"))
            print(f"Written: {file}, {file.with_suffix('.png')}")
        if {"all", "cost"} & set(chosen):
            measured = step_costs.costs(of_cost or problems, quick)
            print(f"Written: {save(measured, f'train_cost{end}', {'block': step_costs.BLOCK}, results)}")
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    main(sys.argv[1:])
