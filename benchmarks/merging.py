"""Merging two models of digits: averages, Fisher merging, RegMean, KFAC, EKFAC and the GGN.

`python -m benchmarks.applications merging [--quick]` trains a common start on a few examples of both tasks, trains a
copy of it on each task, and merges the two. The *strong* start has 200 examples of each task and 60 epochs, then 8
epochs on each task; the *weak* start has 60 examples and 12 epochs, then 25. The tasks are `rotate` (digits, and digits
rotated by 90 degrees) and `halves` (digits below five, and the others). Everything is repeated with three seeds.

Accuracies are those on held-out data, the mean over both tasks. Seconds are those of the CPU for curvatures and
`kfs.merge` together; iterations are those of conjugate gradients. For comparison: the start, each model on its own
task, and one model that was trained on both. KFAC and RegMean are close to each other, so their difference is measured
with ten seeds, and printed with its standard error. JSON and a picture are written to benchmarks/results.
"""

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor, nn

import kfs
from benchmarks.report import save
from kfs.display.charts import INK, open_frame
from kfs.operators import LinearOperator, solve
from kfs.tour.digits import load

Data = tuple[Tensor, Tensor]
DAMPING = kfs.Relative(0.01)
OWN = "own model (each on its task)"
JOINT = "trained on both"
KFAC = "KFAC"
REGMEAN = "RegMean (forward-only)"


@dataclass(frozen=True)
class Task:
    """Images with labels, for training and for testing."""

    training: Data
    test: Data


@dataclass(frozen=True)
class Start:
    """The training of models.

    Attributes:
        num_data: Number of examples of each task for the start.
        epochs: Epochs on them.
        epochs_on_task: Epochs on each task, afterwards.
        epochs_on_both: Epochs of the model that is trained on both tasks.
        num_digits: Number of digits in the tasks; all if `None`.
    """

    num_data: int
    epochs: int
    epochs_on_task: int
    epochs_on_both: int = 25
    num_digits: int | None = None


@dataclass(frozen=True)
class Merge:
    """A way to merge: the curvature of a risk, its damping, and the solver."""

    curvature: Callable[[kfs.EmpiricalRisk], LinearOperator]
    method: kfs.factors.blocks.Method = "exact"
    preconditioned: bool = False
    tolerance: float | None = None


class Cost(NamedTuple):
    """The cost of a merge: iterations, CPU time with curvatures, and CPU time without them."""

    iterations: int
    seconds: float
    merge_seconds: float


@dataclass(frozen=True)
class MergeRow:
    """Results of a way to merge.

    Attributes:
        start: `"strong"` or `"weak"`.
        tasks: `"rotate"` or `"halves"`.
        way: The way to merge.
        accuracies: Percent of correct predictions, the mean of both tasks, for each seed.
        iterations: Iterations of conjugate gradients, in the median; `None` without any.
        seconds: CPU time of curvatures and merge, in the median; `None` for models that were not merged.
        merge_seconds: CPU time of the merge alone.
    """

    start: str
    tasks: str
    way: str
    accuracies: list[float]
    iterations: float | None = None
    seconds: float | None = None
    merge_seconds: float | None = None


QUICK = Start(20, 1, 1, 1, 200)
STARTS = {"strong": Start(200, 60, 8), "weak": Start(60, 12, 25)}
WAYS: dict[str, Merge] = {
    "diagonal (Fisher merging)": Merge(kfs.factors.exact_diagonal),
    REGMEAN: Merge(lambda risk: kfs.KFAC(risk, "forward-only")),
    KFAC: Merge(kfs.KFAC),
    "KFAC, factored damping": Merge(kfs.KFAC, "factored"),
    "EKFAC": Merge(kfs.EKFAC),
    "GGN": Merge(lambda risk: kfs.GGN(risk, reuse=True), preconditioned=True, tolerance=1e-3),
}


def tasks(name: str, num_data: int | None = None) -> list[Task]:
    """Return two tasks, made of all digits or of some of them; 60 percent of each are for training."""
    X, y = load()
    order = torch.randperm(len(X), generator=torch.Generator().manual_seed(0))[:num_data]
    images = X[order].reshape(-1, 8, 8)
    labels = y[order]
    low = labels < 5
    turned = torch.rot90(images, 1, (1, 2))
    parts = {
        "rotate": [(images, labels), (turned, labels)],
        "halves": [(images[low], labels[low]), (images[~low], labels[~low])],
    }[name]
    cuts = [int(0.6 * len(part)) for part, _ in parts]
    flat = [(part.flatten(1), target) for part, target in parts]
    return [Task((x[:n], t[:n]), (x[n:], t[n:])) for (x, t), n in zip(flat, cuts, strict=True)]


def network() -> nn.Module:
    """Return a network with two hidden layers."""
    layers = (nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return nn.Sequential(*layers).double()


def trained(model: nn.Module, data: Data, epochs: int) -> nn.Module:
    """Train a copy with AdamW, and return it."""
    model = copy.deepcopy(model).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(data[0])).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(data[0][batch]), data[1][batch]).backward()
            optimizer.step()
    return model.eval()


def together(parts: list[Data]) -> Data:
    """Concatenate some data sets."""
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


@torch.no_grad()
def accuracy(model: nn.Module, data: Data) -> float:
    """Return the percentage of correct predictions."""
    return 100 * float((model(data[0]).argmax(1) == data[1]).double().mean())


def merged(way: Merge, models: list[nn.Module], both: list[Task]) -> tuple[nn.Module, Cost]:
    """Merge two models. Return the model, and the cost."""
    began = time.process_time()
    risks = [
        kfs.EmpiricalRisk(m, nn.CrossEntropyLoss(), task.training, progress=False)
        for m, task in zip(models, both, strict=True)
    ]
    near = [kfs.KFAC(risk) for risk in risks] if way.preconditioned else None
    curvatures = [way.curvature(risk) for risk in risks]
    computed = time.process_time()
    state, report = kfs.merge(
        models,
        curvatures,
        DAMPING,
        method=way.method,
        preconditioner=near,
        tolerance=way.tolerance,
        progress=False,
        report=True,
    )
    ended = time.process_time()
    result = copy.deepcopy(models[0])
    result.load_state_dict(state)
    return result, Cost(report.iterations, ended - began, ended - computed)


def iterations_alone(models: list[nn.Module], both: list[Task], preconditioned: bool) -> int:
    """Count iterations for the blocks of KFAC, with or without a preconditioner."""
    pairs = zip(models, both, strict=True)
    risks = [kfs.EmpiricalRisk(m, nn.CrossEntropyLoss(), task.training, progress=False) for m, task in pairs]
    curvatures = [kfs.KFAC(risk) for risk in risks]
    if preconditioned:
        return kfs.merge(models, curvatures, DAMPING, report=True)[1].iterations
    total = 0
    for block in curvatures[0].blocks.values():
        params = list(block.layout.params)
        damped = [K.shift(DAMPING).submatrix(params) for K in curvatures]
        values = [{name: model.get_parameter(name).detach() for name in params} for model in models]
        difference = {name: (values[1][name] - values[0][name]) / 2 for name in params}
        # As in `kfs.merge`, the iteration starts from the average, half of the difference away from both models.
        b = {name: (damped[1] @ difference)[name] - (damped[0] @ difference)[name] for name in params}
        total += solve(damped[0] + damped[1], b, progress=False).iterations
    return total


def averaged(models: list[nn.Module]) -> nn.Module:
    """Return a model with the averages of all parameters."""
    result = copy.deepcopy(models[0])
    with torch.no_grad():
        for p, *others in zip(result.parameters(), *(m.parameters() for m in models[1:]), strict=True):
            p.copy_((p + sum(others)) / len(models))
    return result


def start_and_models(both: list[Task], plan: Start) -> tuple[nn.Module, list[nn.Module]]:
    """Train a common start, and a model for each task."""
    few = [(task.training[0][: plan.num_data], task.training[1][: plan.num_data]) for task in both]
    common = trained(network(), together(few), plan.epochs)
    return common, [trained(common, task.training, plan.epochs_on_task) for task in both]


def measure(start: str, tasks_name: str, seeds: range, plan: Start, ways: dict[str, Merge]) -> list[MergeRow]:
    """Train and merge for each seed."""
    both = tasks(tasks_name, plan.num_digits)
    accuracies: dict[str, list[float]] = {}
    costs: dict[str, list[Cost]] = {}
    for seed in seeds:
        torch.manual_seed(seed)
        common, models = start_and_models(both, plan)
        joint = trained(common, together([task.training for task in both]), plan.epochs_on_both)
        found = {"start": common, JOINT: joint, "average": averaged(models)}
        for name, way in ways.items():
            found[name], cost = merged(way, models, both)
            costs.setdefault(name, []).append(cost)
        own = [accuracy(model, task.test) for model, task in zip(models, both, strict=True)]
        accuracies.setdefault(OWN, []).append(statistics.mean(own))
        for name, model in found.items():
            accuracies.setdefault(name, []).append(statistics.mean(accuracy(model, task.test) for task in both))
    rows = []
    for name, values in accuracies.items():
        medians = [statistics.median(numbers) for numbers in zip(*costs.get(name, []), strict=True)]
        rows.append(MergeRow(start, tasks_name, name, values, *medians))
    return rows


def leads(start: str, tasks_name: str, seeds: range, plan: Start) -> list[float]:
    """Return by how many percent KFAC is better than RegMean, for each seed."""
    ways = {name: WAYS[name] for name in (KFAC, REGMEAN)}
    rows = measure(start, tasks_name, seeds, replace(plan, epochs_on_both=0), ways)
    found = {row.way: row.accuracies for row in rows}
    return [mine - other for mine, other in zip(found[KFAC], found[REGMEAN], strict=True)]


def show(rows: list[MergeRow]) -> None:
    """Print a Markdown table."""
    print("| start | tasks | way | accuracy | of each seed | iterations | seconds | of them merging |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        each = ", ".join(f"{value:.1f}" for value in row.accuracies)
        costs = [row.iterations, row.seconds, row.merge_seconds]
        shown = " | ".join("" if cost is None else f"{cost:.3g}" for cost in costs)
        print(f"| {row.start} | {row.tasks} | {row.way} | {statistics.mean(row.accuracies):.2f} | {each} | {shown} |")


def draw(rows: list[MergeRow], file: Path) -> None:
    """Draw accuracies as bars, one panel per start and pair of tasks, with a dot per seed."""
    panels = list(dict.fromkeys((row.start, row.tasks) for row in rows))
    figure = Figure(figsize=(8.5, 2.4 * (len(panels) // 2)), layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(len(panels) // 2, 2, squeeze=False)
    for axes, panel in zip(all_axes.flat, panels, strict=True):
        inside = [row for row in rows if (row.start, row.tasks) == panel and row.way not in {"start", OWN, JOINT}]
        means = [statistics.mean(row.accuracies) for row in inside]
        colors = ["C0" if mean == max(means) else "#b9c4d0" for mean in means]
        axes.barh(range(len(inside)), means, color=colors, height=0.7)
        lowest = min(min(row.accuracies) for row in inside)
        highest = max(max(row.accuracies) for row in inside)
        width = max(highest - lowest, 1.0)
        for place, row in enumerate(inside):
            axes.plot(row.accuracies, [place] * len(row.accuracies), ".", color=INK, markersize=3)
            end = max(row.accuracies) + 0.03 * width
            axes.text(end, place, f"{means[place]:.1f}", fontsize=6.5, color=INK, va="center")
        left = max(lowest - 0.5 * width, 0.0)
        axes.set_xlim(left, highest + 0.15 * width)
        axes.set_title(f"{panel[0]} start, {panel[1]}", fontsize=8, color=INK)
        note = f"; the axis starts at {left:.0f}" if left else ""
        axes.set_xlabel(f"accuracy in percent{note}", fontsize=7)
        axes.set_yticks(range(len(inside)), [row.way for row in inside], fontsize=7)
        axes.tick_params(axis="x", labelsize=7)
        axes.invert_yaxis()
        open_frame(axes)
    figure.savefig(file, dpi=150)


def main(quick: bool, results: Path) -> None:
    """Measure, print a table, and write JSON and a picture."""
    seeds = range(1 if quick else 3)
    rows = []
    for start, plan in STARTS.items():
        for name in ("rotate", "halves"):
            rows += measure(start, name, seeds, QUICK if quick else plan, WAYS)
    show(rows)
    torch.manual_seed(0)
    plan = QUICK if quick else STARTS["strong"]
    both = tasks("rotate", plan.num_digits)
    _, models = start_and_models(both, plan)
    counts = [iterations_alone(models, both, preconditioned) for preconditioned in (True, False)]
    print(f"Iterations for KFAC (strong, rotate): {counts[0]}, without preconditioner {counts[1]}")
    more = range(2 if quick else 10)
    by_seed: dict[str, list[float]] = {}
    for start, plan in STARTS.items():
        for name in ("rotate", "halves"):
            by_seed[f"{start}, {name}"] = values = leads(start, name, more, QUICK if quick else plan)
            error = statistics.stdev(values) / len(values) ** 0.5
            print(
                f"KFAC minus RegMean ({start}, {name}): {statistics.mean(values):.2f} ± {error:.2f}, {len(more)} seeds"
            )
    end = "_quick" if quick else ""  # results of full runs stay
    settings: dict[str, object] = {
        "seeds": len(seeds),
        "damping": DAMPING.fraction,
        "iterations with and without preconditioner": counts,
        "KFAC minus RegMean": by_seed,
    }
    file = save(rows, f"applications_merging{end}", settings, results)
    picture = results / f"applications_merging{end}.png"
    draw(rows, picture)
    print(f"Written: {file}, {picture}")
