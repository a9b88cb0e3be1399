"""Training to the end of a schedule: held-out losses of KFAC and other optimizers at a quarter, at half and at the end.

`python -m benchmarks.long_runs [lstm] [gpt] [tanh] [classifier] [why] [--quick]` runs on one CPU thread and writes JSON
to benchmarks/results, in one or two minutes per run of `lstm` and `gpt`, and about an hour for all tasks. Learning
rates rise for 5 % of the steps and then fall to zero along a cosine. Every optimizer gets the best of the five values
in `GRIDS` by its loss at the end. For tasks in `SEEDS`, the two best are trained with further seeds, which choose the
network and the order of data; losses are means then, with a standard error for those at the end.

`why` trains the LSTM with variants of KFAC that differ in the trust region, and in the layers that AdamW trains. It
prints the length of steps before the limit, in units of it, and their number of directions: the *stable rank*, which is
the squared Frobenius norm over the squared spectral norm. `--quick` only shows that everything runs; its numbers mean
nothing.
"""

import math
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from benchmarks.baseline_optimizers import Factory, MatrixOptimizer, Prodigy, Stepper, Together, factories
from benchmarks.report import RESULTS, save
from benchmarks.training_tasks import (
    Task,
    autoencoder_model,
    gpt,
    half_squared_error,
    shuffled,
    token_cross_entropy,
    windows,
)
from kfs.losses import HalfSquaredError, TokenCrossEntropy
from kfs.optim import KFAC, inverses
from kfs.optim.update_rule import limited
from kfs.tour.digits import load

CORPUS = 4_700_000  # bytes
WARMUP = 0.05  # share of all steps
GRIDS: dict[str, tuple[float, ...]] = {
    "adamw": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2),
    "muon": (0.002, 0.006, 0.02, 0.06, 0.2),
    "soap": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2),
    "kfs": (0.03, 0.1, 0.3, 1.0, 3.0),
}
SEEDS = {"lstm": 1, "gpt": 1, "tanh": 5, "classifier": 5}
Limit = Callable[..., Tensor]


@dataclass(frozen=True)
class LongRun:
    """One training run, or the mean of several; losses are held-out ones, infinite after a divergence."""

    task: str
    optimizer: str
    lr: float
    quarter: float
    half: float
    end: float
    seconds: float
    ends: tuple[float, ...] = ()  # losses at the end by seed, if there are several
    # By layer, over the last quarter: medians of the step's length in units of the trust region, and of stable ranks.
    lengths: dict[str, float] = field(default_factory=dict)
    ranks: dict[str, float] = field(default_factory=dict)


def corpus(size: int) -> Tensor:
    """Return source text of Python's standard library as bytes, the same for each version of Python."""
    root = Path(sysconfig.get_path("stdlib"))
    text = b""
    for file in chain(sorted(root.glob("*.py")), sorted(root.glob("[a-z]*/*.py"))):
        if len(text) >= size:
            break
        if file.parent.name not in {"site-packages", "test"}:
            text += file.read_bytes()
    return torch.frombuffer(bytearray(text[:size]), dtype=torch.uint8).long()


class RecurrentModel(nn.Module):
    """Predicts the next byte of a text at every position, logits `[N, T, 256]`."""

    def __init__(self, embedded: int = 64, hidden: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, embedded)
        self.lstm = nn.LSTM(embedded, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 256)

    def forward(self, x: Tensor) -> Tensor:
        """Run over all positions."""
        logits: Tensor = self.head(self.lstm(self.embedding(x))[0])
        return logits


def lstm() -> Task:
    """Predict bytes of source text; the last twentieth is held out."""
    text = corpus(CORPUS)
    cut = int(0.95 * len(text))
    held_out = windows(text[cut:], 128, seed=0)
    return Task(
        name="lstm",
        model=RecurrentModel,
        batches=lambda seed: windows(text[:cut], 32, seed),
        check=[next(held_out) for _ in range(4)],
        loss=token_cross_entropy,
        description=TokenCrossEntropy(),
        target=0.0,
        steps=1000,
    )


def tanh() -> Task:
    """Reconstruct digits with a deep network; every fifth is held out."""
    X = load()[0].float()
    held_out = torch.arange(len(X)) % 5 == 0
    training, other = X[~held_out], X[held_out]
    return Task(
        name="tanh",
        model=autoencoder_model,
        batches=lambda seed: shuffled(training, training, 64, seed),
        check=[(other, other)],
        loss=half_squared_error,
        description=HalfSquaredError(),
        target=0.0,
        steps=600,
    )


def classifier() -> Task:
    """Classify digits with ten layers, long after the training data are memorized; every fifth is held out."""
    pixels, y = load()
    X = pixels.float()
    held_out = torch.arange(len(X)) % 5 == 0
    widths = (64, *[96] * 9, 10)

    def model() -> nn.Module:
        layers = [layer for before, after in pairwise(widths) for layer in (nn.Linear(before, after), nn.Tanh())]
        return nn.Sequential(*layers[:-1])

    return Task(
        name="classifier",
        model=model,
        batches=lambda seed: shuffled(X[~held_out], y[~held_out], 64, seed),
        check=[(X[held_out], y[held_out])],
        loss=nn.functional.cross_entropy,
        description=nn.CrossEntropyLoss(),
        target=0.0,
        steps=1000,
    )


TASKS: dict[str, Callable[[], Task]] = {
    "lstm": lstm,
    "gpt": lambda: replace(gpt(), steps=400),
    "tanh": tanh,
    "classifier": classifier,
}


def share_of_lr(step: int, steps: int) -> float:
    """Return the factor on learning rates: a linear rise, then a cosine that ends at zero."""
    warmup = max(1, round(WARMUP * steps))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


def places_of_lr(optimizer: Stepper) -> list[dict[str, Any]]:
    """Return mappings whose `"lr"` can be set: parameter groups, or attributes."""
    if isinstance(optimizer, Together):
        return [place for part in optimizer.parts for place in places_of_lr(part)]
    if isinstance(optimizer, MatrixOptimizer | Prodigy):
        return [vars(optimizer)]
    return list(optimizer.param_groups)  # type: ignore[attr-defined]


def train(task: Task, name: str, make: Factory, lr: float, seed: int = 0) -> LongRun:
    """Train to the end of the schedule, or until the loss is not finite."""
    torch.manual_seed(seed)
    model = task.model()
    optimizer, batches = make(model, lr), task.batches(seed)
    places = places_of_lr(optimizer)
    full = [place["lr"] for place in places]
    found, seconds = dict[int, float](), 0.0
    for step in range(task.steps):
        X, y = next(batches)
        start = time.perf_counter()
        for place, base in zip(places, full, strict=True):
            place["lr"] = base * share_of_lr(step, task.steps)
        optimizer.zero_grad()
        loss = task.loss(model(X), y)
        loss.backward()
        optimizer.step()
        seconds += time.perf_counter() - start
        if not loss.isfinite():
            break
        if step + 1 in {task.steps // 4, task.steps // 2, task.steps}:
            found[step + 1] = task.checked_loss(model)
    quarter, half, end = (found.get(at, math.inf) for at in (task.steps // 4, task.steps // 2, task.steps))
    return LongRun(task.name, name, lr, quarter, half, end, seconds)


def mean(runs: Sequence[LongRun]) -> LongRun:
    """Return the mean of runs that differ by their seeds."""
    ends = tuple(run.end for run in runs)
    return replace(
        runs[0],
        quarter=statistics.fmean(run.quarter for run in runs),
        half=statistics.fmean(run.half for run in runs),
        end=statistics.fmean(ends),
        seconds=statistics.fmean(run.seconds for run in runs),
        ends=ends,
    )


def line(run: LongRun, best: bool) -> str:
    """Return a row of the table."""
    losses = " | ".join(f"{loss:.4f}" for loss in (run.quarter, run.half, run.end))
    if len(run.ends) > 1:
        losses += f" ± {statistics.stdev(run.ends) / math.sqrt(len(run.ends)):.4f}"
    end = "best" if best else ""
    if run.lengths:
        end = "; ".join(f"{layer}: {run.lengths[layer]:.3g}, {run.ranks[layer]:.2g}" for layer in run.lengths)
    return f"| {run.task} | {run.optimizer} | {run.lr:g} | {losses} | {run.seconds:.0f} | {end} |"


def compare(task: Task, makers: Mapping[str, tuple[Factory, tuple[float, ...]]], seeds: int) -> list[LongRun]:
    """Train with all learning rates, and print each optimizer's runs from best to worst, as described above."""
    print("| task | optimizer | learning rate | at a quarter | at half | at the end | seconds | |")
    print("|---|---|---|---|---|---|---|---|")
    found = []
    for name, (make, grid) in makers.items():
        runs = sorted((train(task, name, make, lr) for lr in grid), key=lambda run: run.end)
        for place, run in enumerate(runs[:2] if seeds > 1 else []):
            runs[place] = mean([run, *(train(task, name, make, run.lr, seed) for seed in range(1, seeds))])
        runs.sort(key=lambda run: (not run.ends and seeds > 1, run.end))
        for run in runs:
            print(line(run, run is runs[0]), flush=True)
        found += runs
    return found


def shortened(by_inputs: bool) -> Limit:
    """Return a trust region that shortens a layer's whole step if its spectral norm is too large."""

    def limit(D: Tensor, trust: float | Tensor, input_size: Tensor, unit_vectors: bool, _: object = None) -> Tensor:
        rows, columns = D.shape[2:]
        if unit_vectors:
            size = D.norm(dim=2, keepdim=True) / rows**0.5
        else:
            size = torch.linalg.matrix_norm(D, 2, keepdim=True) / max(1.0, rows / columns) ** 0.5
            size = size * input_size if by_inputs else size
        result: Tensor = D * (trust / size).clamp(max=1.0)
        return result

    return limit


def of_unit_inputs(
    D: Tensor, trust: float | Tensor, input_size: Tensor, unit_vectors: bool, _: object = None
) -> Tensor:
    """Limit singular values, as if inputs had size one."""
    return limited(D, trust, torch.ones_like(input_size), unit_vectors)


BY_INPUTS = "singular values, by size of inputs (the default)"
LIMITS: dict[str, Limit] = {
    "whole step": shortened(by_inputs=False),
    "whole step, by size of inputs": shortened(by_inputs=True),
    "singular values": of_unit_inputs,
    BY_INPUTS: limited,
}


@contextmanager
def limit(rule: Limit, seen: list[tuple[str, float, float]]) -> Iterator[None]:
    """Replace the optimizer's trust region, and record lengths and stable ranks of steps."""

    def noting(D: Tensor, trust: float | Tensor, input_size: Tensor, unit_vectors: bool, *_: object) -> Tensor:
        short = rule(D, trust, input_size, unit_vectors)
        if not unit_vectors:
            before, after = (float(torch.linalg.matrix_norm(M, 2).max()) for M in (D, short))
            rank = float(D.norm()) ** 2 / max(before, 1e-30) ** 2
            seen.append(("x".join(map(str, D.shape[2:])), before / max(after, 1e-30), rank))
        return short

    with patch.object(inverses, "limited", noting):
        yield


def layer_by_adamw(prefix: str, loss: object, adamw_lr: float = 1e-2) -> Factory:
    """Return KFAC with one layer trained by AdamW, at the learning rate that is best for AdamW alone."""

    def make(model: nn.Module, lr: float) -> Stepper:
        inside = [p for name, p in model.named_parameters() if name.startswith(prefix)]
        others = [p for name, p in model.named_parameters() if not name.startswith(prefix)]
        adamw = {"params": inside, "method": "adamw", "adamw_lr": adamw_lr / lr}
        return KFAC(model, loss, [adamw, {"params": others}], lr=lr)

    return make


def why(task: Task, quick: bool) -> list[LongRun]:
    """Train with all variants of the trust region, and with each layer trained by AdamW."""
    kfs = factories(task.description)["kfs"]
    variants: list[tuple[str, Limit, Factory]] = [(name, rule, kfs) for name, rule in LIMITS.items()]
    for name in ("whole step", BY_INPUTS):
        for layer in ("embedding", "lstm", "head"):
            make = layer_by_adamw(layer, task.description)
            variants.append((f"{name}; {layer} by AdamW", LIMITS[name], make))
    print("| task | limit | learning rate | at a quarter | at half | at the end | seconds | length and rank of steps |")
    print("|---|---|---|---|---|---|---|---|")
    found = []
    for name, rule, make in variants[:: 4 if quick else 1]:
        seen: list[tuple[str, float, float]] = []
        with limit(rule, seen):
            # A step that is shortened as a whole has few large directions, and needs a larger learning rate.
            run = train(task, name, make, 3.0 if name.startswith("whole") else 1.0)
        last = seen[3 * len(seen) // 4 :]
        layers = dict.fromkeys(layer for layer, _, _ in last)
        lengths = {layer: statistics.median(s for at, s, _ in last if at == layer) for layer in layers}
        ranks = {layer: statistics.median(r for at, _, r in last if at == layer) for layer in layers}
        found.append(replace(run, lengths=lengths, ranks=ranks))
        print(line(found[-1], best=True), flush=True)
    return found


def main(arguments: list[str], results: Path = RESULTS) -> None:
    """Run the named tasks, by default all of them."""
    quick = "--quick" in arguments
    chosen = [argument for argument in arguments if argument != "--quick"] or list(TASKS)
    if unknown := set(chosen) - {"why", *TASKS}:
        sys.exit(f"Unknown: {', '.join(sorted(unknown))}. Say {', '.join(TASKS)} or why, and --quick if you like.")
    end = "_quick" if quick else ""  # results of full runs stay
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name in chosen:
            task = TASKS["lstm" if name == "why" else name]()
            task = replace(task, steps=4, check=task.check[:1]) if quick else task
            if name == "why":
                found = why(task, quick)
            else:
                grids = {key: grid[:1] if quick else grid for key, grid in GRIDS.items()}
                makers = factories(task.description)
                found = compare(
                    task, {key: (makers[key], grid) for key, grid in grids.items()}, 2 if quick else SEEDS[name]
                )
            print(f"Written: {save(found, f'long_runs_{name}{end}', {'steps': task.steps}, results)}")
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    main(sys.argv[1:])
