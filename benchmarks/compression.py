"""Pruning and low rank in one shot: accuracy of a small convolutional network on digits, without further training.

`python -m benchmarks.applications compression` takes about six minutes on one CPU thread. It trains three networks,
compresses each by all methods to several shares, and prints means over seeds: accuracy on 597 held-out digits,
floating-point operations and time of a forward pass over them, in units of the whole network's. The baselines without
curvature, magnitude pruning and plain singular value decomposition, use the same code with the identity as curvature.
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from benchmarks.report import medians, save
from kfs import EKFAC, KFAC, EmpiricalRisk
from kfs.compress import Compressed, low_rank, prune
from kfs.compress.factorization import decomposed
from kfs.compress.layers import layers_of
from kfs.errors import KfsWarning
from kfs.factors import BlockDiagonal, Relative, exact_diagonal
from kfs.factors.blocks import Factor, Kronecker, Stack
from kfs.tour.digits import load

TABLE = 0.3  # the share for which a table shows sizes and times
NUM_TRAIN = 1200
DAMPINGS = (1e-4, 1e-3, 1e-2, 1e-1)  # fractions of the mean eigenvalue, for optimal brain surgeon
DAMPED_SHARE = 0.2  # its share of weights
LOW_RANK_SHARE = 0.3  # shares of low rank for which two allocations of ranks are compared
LOW_RANK_SEEDS = 12
Data = tuple[Tensor, Tensor]
Method = Callable[[nn.Module, float, Tensor], Compressed]


@dataclass(frozen=True)
class Effort:
    """How many networks and settings are measured.

    Attributes:
        seeds: Number of networks.
        shares: The shares of weights to keep.
        epochs: Number of training epochs.
        num_data: Number of examples to train on.
        repeats: Number of timed repetitions.
    """

    seeds: int = 3
    shares: tuple[float, ...] = (0.5, 0.3, 0.2, 0.1, 0.05)
    epochs: int = 15
    num_data: int = NUM_TRAIN
    repeats: int = 20


QUICK = Effort(seeds=1, shares=(0.2,), epochs=1, num_data=100, repeats=1)


@dataclass(frozen=True)
class Point:
    """Results of a method on a network; means over seeds.

    Attributes:
        method: The method.
        keep: The share of numbers that is kept.
        accuracy: In percent. One number for each seed is in `accuracies`.
        accuracies: By seed.
        stored: Share of stored numbers in the new model's parameters, including zeros and bases.
        flops: Floating-point operations, in units of the whole network's.
        time: Time of a forward pass, in the same units.
    """

    method: str
    keep: float
    accuracy: float
    accuracies: list[float]
    stored: float
    flops: float
    time: float


def digits() -> tuple[Data, Data]:
    """Return images and labels for training, and for evaluation."""
    pixels, y = load()
    X = pixels.float().reshape(-1, 1, 8, 8)
    order = torch.randperm(len(X), generator=torch.Generator().manual_seed(0))
    X, y = X[order], y[order]
    return (X[:NUM_TRAIN], y[:NUM_TRAIN]), (X[NUM_TRAIN:], y[NUM_TRAIN:])


def network() -> nn.Sequential:
    """Return a network with 24 thousand parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def trained(data: Data, seed: int, epochs: int, new_network: Callable[[], nn.Sequential] = network) -> nn.Sequential:
    """Train a new network; the global random state does not change."""
    X, y = data
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = new_network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-3)
        for _ in range(epochs):
            for batch in torch.randperm(len(X)).split(100):
                optimizer.zero_grad()
                F.cross_entropy(model(X[batch]), y[batch]).backward()
                optimizer.step()
    return model.eval()


def accuracy(model: nn.Module, data: Data) -> float:
    """Return the share of correct predictions, in percent."""
    X, y = data
    with torch.no_grad():
        return 100 * float((model(X).argmax(1) == y).float().mean())


def nll(model: nn.Module, data: Data) -> float:
    """Return the mean negative log-likelihood of labels."""
    X, y = data
    with torch.no_grad():
        return float(F.cross_entropy(model(X), y))


def identity_like(K: KFAC) -> BlockDiagonal:
    """Return the identity with the blocks of another operator."""
    stacks = []
    for stack in K.stacks:
        ones = stack.structure.like.new_ones(len(stack.structure))
        A, B = (Factor.identity(size, ones) for size in (stack.structure.columns, stack.structure.rows))
        stacks.append(Stack(stack.layouts, Kronecker(A, B)))
    return BlockDiagonal(K.domain, stacks).called("identity")


def same_share_of_channels(model: nn.Module, K: BlockDiagonal, keep: float, sample: Tensor) -> Compressed:
    """Remove channels such that all layers keep the same share, a usual baseline without curvature."""
    budget = keep * sum(p.numel() for p in model.parameters())
    for share in (count / 64 for count in range(64, 1, -1)):
        shares = dict.fromkeys(("2", "5", "9", "11"), share)
        found = prune(model, K, shares, update=False, structured=True, damping=0.0, sample=sample)
        if found.report.stored_after <= budget:
            break
    return found


def methods(risk: EmpiricalRisk) -> dict[str, Method]:
    """Return all methods, with curvature of one network."""
    K = KFAC(risk, fisher="mc")
    E = EKFAC.from_kfac(K, risk)
    D = exact_diagonal(risk, fisher="mc")
    none = identity_like(K)
    return {
        "magnitude": lambda m, keep, x: prune(m, none, keep, update=False, damping=0.0, sample=x),
        "OBD, exact diagonal": lambda m, keep, x: prune(m, D, keep, update=False, risk=risk, sample=x),
        "OBD, KFAC": lambda m, keep, x: prune(m, K, keep, update=False, sample=x),
        "OBS, KFAC": lambda m, keep, x: prune(m, K, keep, sample=x),
        "eigenbasis, KFAC": lambda m, keep, x: prune(m, K, keep, basis="eigen", sample=x),
        "eigenbasis, EKFAC": lambda m, keep, x: prune(m, E, keep, basis="eigen", sample=x),
        "channels by magnitude": lambda m, keep, x: same_share_of_channels(m, none, keep, x),
        "channels, OBS": lambda m, keep, x: prune(m, K, keep, structured=True, sample=x),
        "EigenDamage, bases not counted": lambda m, keep, x: prune(
            m, E, keep, basis="eigen", structured=True, sample=x
        ),
        "EigenDamage, bases counted": lambda m, keep, x: prune(
            m, E, keep, basis="eigen", structured=True, count_bases=True, sample=x
        ),
        "low rank, SVD": lambda m, keep, x: low_rank(m, none, keep, damping=0.0, sample=x),
        "low rank, KFAC's metric": lambda m, keep, x: low_rank(m, K, keep, sample=x),
    }


def networks(effort: Effort) -> Iterator[tuple[nn.Module, EmpiricalRisk, Data]]:
    """Train networks with different seeds. Yield each with its risk, and held-out data."""
    (X, y), held_out = digits()
    training = X[: effort.num_data], y[: effort.num_data]
    batches = list(zip(training[0].split(400), training[1].split(400), strict=True))
    for seed in range(effort.seeds):
        model = trained(training, seed, effort.epochs)
        yield model, EmpiricalRisk(model, nn.CrossEntropyLoss(), batches), held_out


def measured(effort: Effort) -> tuple[float, list[Point]]:
    """Return the mean accuracy of whole networks, and all points."""
    found: dict[tuple[str, float], list[tuple[float, float, float, float]]] = {}
    whole = []
    for model, risk, held_out in networks(effort):
        whole.append(accuracy(model, held_out))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", KfsWarning)  # a warning about empty layers, which show in accuracies
            small = {
                (name, keep): method(model, keep, held_out[0][:1])
                for name, method in methods(risk).items()
                for keep in effort.shares
            }
        with torch.no_grad():
            timed: dict[Any, nn.Module] = {key: new for key, (new, _) in small.items()} | {"whole": model}
            programs = {key: partial(net, held_out[0]) for key, net in timed.items()}
            times = medians(programs, effort.repeats, "Timing")
        for key, (new, report) in small.items():
            flops = (report.flops_after or 0) / (report.flops_before or 1)
            stored = report.stored_after / report.parameters_before
            numbers = accuracy(new, held_out), stored, flops, times[key] / times["whole"]
            found.setdefault(key, []).append(numbers)
    points = []
    for (name, keep), by_seed in found.items():
        accuracies, stored_shares, flop_shares, time_shares = (list(column) for column in zip(*by_seed, strict=True))
        points.append(
            Point(name, keep, mean(accuracies), accuracies, mean(stored_shares), mean(flop_shares), mean(time_shares))
        )
    return mean(whole), points


def accuracies_by_damping(effort: Effort) -> dict[float, float]:
    """Return mean accuracies of optimal brain surgeon, for several fractions of the mean eigenvalue as damping."""
    found: dict[float, list[float]] = {fraction: [] for fraction in DAMPINGS}
    for model, risk, held_out in networks(effort):
        K = KFAC(risk, fisher="mc")
        for fraction in DAMPINGS:
            small, _ = prune(model, K, DAMPED_SHARE, damping=Relative(fraction))
            found[fraction].append(accuracy(small, held_out))
    return {fraction: mean(values) for fraction, values in found.items()}


@dataclass(frozen=True)
class Difference:
    """The advantage of choosing ranks by cost per number over one threshold for singular values.

    Attributes:
        measure: The measured quantity.
        by_cost: Mean over networks if ranks are chosen by cost per number, as in `low_rank`.
        by_threshold: Mean if ranks are chosen by one threshold.
        error: Standard error of the difference over networks.
    """

    measure: str
    by_cost: float
    by_threshold: float
    error: float


def above_one_threshold(model: nn.Module, K: BlockDiagonal, keep: float) -> Compressed:
    """Drop the smallest singular values of all layers, for any number of saved entries."""
    parts = [decomposed(layer) for layer in layers_of(model, K, keep, Relative(1e-3))]
    ranks = [len(part.costs) for part in parts]
    each = [part.columns.shape[0] + part.rows.shape[1] for part in parts]
    budget = keep * sum(part.layer.size for part in parts)

    def sizes() -> list[int]:
        return [min(part.layer.size, r * size) for part, r, size in zip(parts, ranks, each, strict=True)]

    candidates = sorted((float(cost), place) for place, part in enumerate(parts) for cost in part.costs)
    for _, place in candidates:
        if sum(sizes()) <= budget:
            break
        ranks[place] = max(1, ranks[place] - 1)
    shares = {part.layer.name: size / part.layer.size for part, size in zip(parts, sizes(), strict=True)}
    return low_rank(model, K, shares)


def sharing_of_ranks(effort: Effort) -> list[Difference]:
    """Compare two ways to divide a budget between the ranks of layers."""
    seeds = min(LOW_RANK_SEEDS, 4 * effort.seeds)
    found: dict[str, list[tuple[float, float]]] = {}
    for model, risk, held_out in networks(replace(effort, seeds=seeds)):
        K = KFAC(risk, fisher="mc")
        both = [low_rank(model, K, LOW_RANK_SHARE).model, above_one_threshold(model, K, LOW_RANK_SHARE).model]
        for name, measure in (("accuracy", accuracy), ("negative log-likelihood", nll)):
            found.setdefault(name, []).append((measure(both[0], held_out), measure(both[1], held_out)))
    rows = []
    for name, pairs in found.items():
        differences = [ours - other for ours, other in pairs]
        error = stdev(differences) / len(pairs) ** 0.5
        rows.append(Difference(name, mean(ours for ours, _ in pairs), mean(other for _, other in pairs), error))
    return rows


def draw(whole: float, points: list[Point], file: Path) -> None:
    """Draw accuracy against the kept share: single numbers on the left, smaller layers on the right."""
    figure = Figure(figsize=(9, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    names = list(dict.fromkeys(point.method for point in points))
    smaller = [name for name in names if name.startswith(("channels", "EigenDamage", "low rank"))]
    panels = {
        "single numbers (eigenbases not counted)": [name for name in names if name not in smaller],
        "smaller layers": smaller,
    }
    for axes, (title, inside) in zip(figure.subplots(1, 2, sharey=True), panels.items(), strict=True):
        for name in inside:
            own = sorted((point.keep, point.accuracy) for point in points if point.method == name)
            axes.plot(*zip(*own, strict=True), marker="o", markersize=3, label=name)
        axes.axhline(whole, color="gray", linewidth=0.8, linestyle="--")
        axes.set_xscale("log")
        shares = sorted({point.keep for point in points})
        axes.set_xticks(shares, [f"{share:g}" for share in shares], minor=False)
        axes.minorticks_off()
        axes.set_xlabel("keep")
        axes.set_title(title)
        axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.15))
    figure.axes[0].set_ylabel("accuracy in percent")
    figure.savefig(file, dpi=110)


def main(quick: bool, results: Path) -> None:
    """Compress, print a table, and write JSON and plot."""
    effort = QUICK if quick else Effort()
    whole, points = measured(effort)
    by_damping = accuracies_by_damping(effort)
    shared = sharing_of_ranks(effort)
    shares = list(dict.fromkeys(point.keep for point in points))
    name = "compression_quick" if quick else "compression"
    settings: dict[str, object] = {"accuracy of whole networks": round(whole, 1), "seeds": effort.seeds}
    settings[f"accuracy of OBS at {DAMPED_SHARE}, by relative damping"] = {f"{d:g}": a for d, a in by_damping.items()}
    settings[f"low rank at {LOW_RANK_SHARE}, ranks by cost or by one threshold"] = [vars(one) for one in shared]
    file = save(points, name, settings, results)
    draw(whole, points, results / f"{name}.png")
    shown = TABLE if TABLE in shares else shares[-1]
    print(f"Accuracy in percent of whole networks: {whole:.1f}; compressed to a share of numbers; and for the share")
    print(f"{shown}: numbers stored, floating-point operations and time, in units of the whole network's.\n")
    print(f"| method | {' | '.join(f'{share:g}' for share in shares)} | stored | FLOPs | time |")
    print("|---|" + "---|" * (len(shares) + 3))
    for method in dict.fromkeys(point.method for point in points):
        own = [point for point in points if point.method == method]
        numbers = " | ".join(f"{point.accuracy:.1f}" for point in own)
        one = next(point for point in own if point.keep == shown)
        print(f"| {method} | {numbers} | {one.stored:.2f} | {one.flops:.2f} | {one.time:.2f} |")
    by_fraction = ", ".join(f"{value:.1f} for {fraction:g}" for fraction, value in by_damping.items())
    print(f"\nOBS with KFAC at {DAMPED_SHARE}, by relative damping: {by_fraction}.")
    for row in shared:
        print(
            f"Low rank at {LOW_RANK_SHARE}, {row.measure}: {row.by_cost:.4g} with ranks by cost per number, "
            f"{row.by_threshold:.4g} with one threshold for singular values; standard error of the difference "
            f"{row.error:.2g}."
        )
    print(f"\nWritten: {file}, {file.with_suffix('.png')}")
