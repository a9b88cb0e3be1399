"""Pruning as a user would call it, `prune(model, kfs.KFAC(risk), keep)`, beside magnitude pruning and SparseGPT.

`python -m benchmarks.applications pruning [--quick]` trains networks on four tasks, with three seeds each, and removes
weights in one shot, without further training. Accuracies are those on held-out data. For every peer, the difference to
it is printed with its standard error over seeds.

- `digits, CNN`: the network of `benchmarks.compression`.
- `digits, MLP`: a network with two hidden layers, trained until its training loss is a thousandth.
- `table, MLP`: generated data with ten numbers and 44 binary columns, seven classes, a tenth of the labels wrong.
- `series, CNN`: generated series of 48 numbers in two channels, six classes; three convolutions in one dimension.

The default was chosen on the first two tasks, and on a third one that is not included. The last two were not used
before the default was fixed.

SparseGPT (Frantar & Alistarh, 2023) is implemented here from its paper: layers in sequence, with inputs from the pruned
layers before; the same share in every layer; columns from left to right, with masks for 128 columns at a time; one
percent of the mean diagonal as damping. Its biases stay, and count.
"""

import copy
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import kfs
from benchmarks import compression
from benchmarks.compression import Data, accuracy, identity_like, nll, trained
from benchmarks.report import save
from kfs.compress import prune

SHARES = (0.5, 0.3, 0.2)
MAGNITUDE, SPARSEGPT = "magnitude", "SparseGPT"
PEERS = (MAGNITUDE, SPARSEGPT)
DEFAULT = "prune, KFAC"
BLOCK = 128  # number of columns for which SparseGPT chooses a mask


@dataclass(frozen=True)
class Task:
    """Training data, test data, a network, and its number of epochs."""

    training: Data
    test: Data
    network: Callable[[], nn.Sequential]
    epochs: int


@dataclass(frozen=True)
class Pruned:
    """Results of a method on a task's networks.

    Attributes:
        task: The task.
        method: The method; empty for whole networks.
        keep: The share that is kept.
        accuracies: Percent of correct predictions on test data, by seed.
        losses: Negative log-likelihoods of test data, by seed.
        dampings: Relative dampings that `prune` has chosen, by seed; empty for peers.
    """

    task: str
    method: str
    keep: float
    accuracies: list[float]
    losses: list[float]
    dampings: list[float]


def table(num_data: int = 2000) -> tuple[Data, Data]:
    """Return generated data with ten numbers, two categories out of 4 and of 40, and one of seven classes."""
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randn(2 * num_data, 10, generator=generator)
    choices = [torch.randint(n, (2 * num_data,), generator=generator) for n in (4, 40)]
    X = torch.cat([numbers, *(F.one_hot(c, n).float() for c, n in zip(choices, (4, 40), strict=True))], 1)
    # Classes are regions in products of features: a random network with one hidden layer.
    hidden = torch.tanh(X @ torch.randn(54, 20, generator=generator) / 2)
    y = (hidden @ torch.randn(20, 7, generator=generator)).argmax(1)
    wrong = torch.rand(len(y), generator=generator) < 0.1
    y = torch.where(wrong, torch.randint(7, (len(y),), generator=generator), y)
    return (X[:num_data], y[:num_data]), (X[num_data:], y[num_data:])


def series(num_data: int = 1200) -> tuple[Data, Data]:
    """Return generated series `[N, 2, 48]` of six kinds: three rhythms, each shifted in two ways."""
    generator = torch.Generator().manual_seed(2)
    y = torch.randint(6, (2 * num_data,), generator=generator)
    phase = 6.3 * torch.rand(2 * num_data, 1, generator=generator)
    t = torch.linspace(0, 6.3, 48)
    speed = torch.tensor([1.0, 1.6, 2.4])[y % 3].unsqueeze(1)
    shift = torch.tensor([0.8, 2.2])[y // 3].unsqueeze(1)
    clean = torch.stack([torch.sin(speed * t + phase), torch.sin(speed * t + phase + shift)], 1)
    X = clean + 0.7 * torch.randn(clean.shape, generator=generator)
    return (X[:num_data], y[:num_data]), (X[num_data:], y[num_data:])


def _flat(data: Data) -> Data:
    return data[0].flatten(1), data[1]


def _mlp(*sizes: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), activation()]
    return nn.Sequential(*layers[:-1])


def _convolutions() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv1d(2, 24, 5, padding=2), nn.GELU(), nn.Conv1d(24, 32, 5, padding=2), nn.GELU(), nn.MaxPool1d(2)),
        *(nn.Conv1d(32, 32, 3, padding=1), nn.GELU(), nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(128, 6)),
    )


def tasks() -> dict[str, Task]:
    """Return all tasks."""
    digits = compression.digits()
    flat = _flat(digits[0]), _flat(digits[1])
    return {
        "digits, CNN": Task(*digits, compression.network, 15),
        "digits, MLP": Task(*flat, lambda: _mlp(64, 96, 64, 10), 100),
        "table, MLP": Task(*table(), lambda: _mlp(54, 96, 64, 7, activation=nn.Tanh), 40),
        "series, CNN": Task(*series(), _convolutions, 20),
    }


@torch.no_grad()
def sparsegpt(model: nn.Sequential, X: Tensor, keep: float) -> nn.Module:
    """Prune a sequence of layers by SparseGPT, so that a share of all numbers in layers is left."""
    result = copy.deepcopy(model)
    layers = [module for module in result if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d))]
    num_weights = sum(layer.weight.numel() for layer in layers)
    total = sum(p.numel() for layer in layers for p in layer.parameters())
    share = (keep * total - (total - num_weights)) / num_weights
    for module in result:
        if module in layers:
            W = without_weights(module.weight.flatten(1).double(), patches(module, X).double(), share)
            module.weight.copy_(W.reshape(module.weight.shape))
        X = module(X)
    return result


def patches(module: nn.Module, X: Tensor) -> Tensor:
    """Return the vectors that a layer's matrix is multiplied with, one row per product."""
    if isinstance(module, nn.Linear):
        return X
    assert isinstance(module, (nn.Conv1d, nn.Conv2d))  # noqa: S101
    if isinstance(module, nn.Conv1d):
        found = F.unfold(X.unsqueeze(2), (1, *module.kernel_size), padding=(0, int(module.padding[0])))
    else:
        found = F.unfold(X, module.kernel_size, padding=module.padding)  # type: ignore[arg-type]
    return found.transpose(1, 2).flatten(0, 1)


def without_weights(W: Tensor, X: Tensor, share: float) -> Tensor:
    """SparseGPT of one layer: return a matrix `[d_B, d_A]` with a share of its entries, for inputs `[rows, d_A]`."""
    W = W.clone()
    H = X.T @ X
    dead = H.diagonal() == 0
    H[dead, dead] = 1.0
    W[:, dead] = 0.0
    H.diagonal().add_(0.01 * H.diagonal().mean())
    U = torch.linalg.cholesky(torch.linalg.inv(H), upper=True)
    for start in range(0, W.shape[1], BLOCK):
        end = min(start + BLOCK, W.shape[1])
        scores = (W[:, start:end] / U.diagonal()[start:end]).square().flatten()
        removed = torch.zeros_like(scores, dtype=torch.bool)
        removed[scores.argsort()[: round((1 - share) * len(scores))]] = True
        removed = removed.reshape(len(W), -1)
        errors = torch.zeros_like(W[:, start:end])
        for column in range(start, end):
            left = torch.where(removed[:, column - start], 0.0, W[:, column])
            error = (W[:, column] - left) / U[column, column]
            W[:, column:end] -= torch.outer(error, U[column, column:end])
            W[:, column] = left
            errors[:, column - start] = error
        W[:, end:] -= errors @ U[start:end, end:]
    return W


def measured(name: str, task: Task, seeds: int, shares: tuple[float, ...], epochs: int | None) -> list[Pruned]:
    """Train and prune networks of one task."""
    found: dict[tuple[str, float], list[tuple[nn.Module, float | None]]] = {}
    for seed in range(seeds):
        model = trained(task.training, seed, task.epochs if epochs is None else epochs, task.network)
        found.setdefault(("", 1.0), []).append((model, None))
        batches = list(zip(*(part.split(400) for part in task.training), strict=True))
        risk = kfs.EmpiricalRisk(model, nn.CrossEntropyLoss(), batches, progress=False)
        K = kfs.KFAC(risk)
        drawn = kfs.KFAC(risk, fisher="mc")
        for keep in shares:
            by_size = prune(model, identity_like(K), keep, update=False, damping=0.0).model
            found.setdefault((MAGNITUDE, keep), []).append((by_size, None))
            found.setdefault((SPARSEGPT, keep), []).append((sparsegpt(model, task.training[0], keep), None))
            # Without `damping=` it is chosen; without data it is not.
            for method, made in {
                DEFAULT: prune(model, K, keep),
                "prune, KFAC with drawn labels": prune(model, drawn, keep),
                "prune, KFAC without data": prune(model, copy.deepcopy(K), keep),
            }.items():
                assert isinstance(made.report.damping, kfs.Relative)  # noqa: S101
                found.setdefault((method, keep), []).append((made.model, made.report.damping.fraction))
    rows = []
    for (method, keep), by_seed in found.items():
        accuracies = [accuracy(model, task.test) for model, _ in by_seed]
        losses = [nll(model, task.test) for model, _ in by_seed]
        dampings = [damping for _, damping in by_seed if damping is not None]
        rows.append(Pruned(name, method, keep, accuracies, losses, dampings))
    return rows


def difference(rows: list[Pruned], method: str, peer: str, task: str, keep: float) -> tuple[float, float]:
    """Return by how many percent a method is better than a peer, on average, and the standard error."""
    mine, other = (
        next(row.accuracies for row in rows if (row.task, row.method, row.keep) == (task, name, keep))
        for name in (method, peer)
    )
    each = [a - b for a, b in zip(mine, other, strict=True)]
    return statistics.mean(each), statistics.stdev(each) / len(each) ** 0.5


def main(quick: bool, results: Path) -> None:
    """Measure, print tables, and write JSON."""
    seeds, shares, epochs = (2, (0.7,), 1) if quick else (3, SHARES, None)
    chosen = {"table, MLP": tasks()["table, MLP"]} if quick else tasks()
    rows = [row for name, task in chosen.items() for row in measured(name, task, seeds, shares, epochs)]
    print("Accuracy in percent, the mean over seeds, of networks of which a share of the numbers was kept.\n")
    print(f"| task | method | whole | {' | '.join(f'{share:g}' for share in shares)} |")
    print("|---|---|---|" + "---|" * len(shares))
    for name in chosen:
        own = [row for row in rows if row.task == name]
        whole = statistics.mean(own[0].accuracies)
        for method in dict.fromkeys(row.method for row in own[1:]):
            numbers = [f"{statistics.mean(row.accuracies):.1f}" for row in own if row.method == method]
            print(f"| {name} | {method} | {whole:.1f} | {' | '.join(numbers)} |")
    for peer in PEERS:
        print(f"\n{DEFAULT} minus {peer}, with the standard error over {seeds} seeds:\n")
        print(f"| task | {' | '.join(f'{share:g}' for share in shares)} |")
        print("|---|" + "---|" * len(shares))
        for name in chosen:
            each = [difference(rows, DEFAULT, peer, name, share) for share in shares]
            print(f"| {name} | {' | '.join(f'{mean:+.1f} ± {error:.1f}' for mean, error in each)} |")
    file = save(rows, f"pruning{'_quick' if quick else ''}", {"seeds": seeds}, results)  # results of full runs stay
    print(f"\nWritten: {file}")
