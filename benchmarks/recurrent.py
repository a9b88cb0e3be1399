"""Cost of recurrent layers while their parameters are watched: `python -m benchmarks.recurrent [cpu|cuda]`.

In a captured pass, a recurrent layer is not run as a single operation of PyTorch: see `kfs.factors.rules.recurrent`.
Ratios are to one training step of SGD, with momentum, of the same model with PyTorch's own operation:

- watched pass: forward and backward pass with gradients of all parameters while every use is captured, without any
  statistics.
- KFAC, watched step: a step of `kfs.optim.KFAC` that computes factors (`factors_every=1`), with its other defaults.
  Labels are drawn for it, so it has a second backward pass.
- KFAC, step: a step with default settings, on average over 10 steps among the first 60, in which factors are computed
  more often than later.

Models are 1 or 2 layers of width 256 over 64 times, and a linear head on the last state, with 10 classes. Everything is
measured in turn, and times are medians. On a CPU one thread is used.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.report import RESULTS, Row, medians, save
from kfs.factors.accumulate import FactorSums
from kfs.factors.capture import forward
from kfs.factors.rules import new_trace
from kfs.factors.settings import Settings
from kfs.optim import KFAC
from kfs.problem.risk import EmpiricalRisk

KINDS: dict[str, type[nn.RNNBase]] = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}
WIDTH, TIMES, CLASSES = 256, 64, 10
LAYERS, BATCHES = (1, 2), (32, 64)
STEPS = 10  # number of steps over which KFAC is averaged
REPEATS = 5
Step = Callable[[], object]


class Classifier(nn.Module):
    """A recurrent network, and a linear layer on its last output.

    Args:
        kind: The recurrent network.
        layers: Number of layers.
        width: Number of features of inputs and states.
    """

    def __init__(self, kind: type[nn.RNNBase], layers: int, width: int) -> None:
        super().__init__()
        make: Callable[..., nn.RNNBase] = kind
        self.recurrent = make(width, width, num_layers=layers, batch_first=True)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Classify sequences `[batch, time, features]`."""
        result: Tensor = self.head(self.recurrent(x)[0][:, -1])
        return result


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """Take a step."""
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()


def watched_pass(risk: EmpiricalRisk) -> None:
    """Compute gradients of all parameters while every use is captured."""
    (batch,) = risk.batches()
    sums = FactorSums(Settings(), dry=True)
    with torch.enable_grad():
        f, _ = forward(risk, batch, new_trace(risk.params), [sums])
        loss = nn.functional.cross_entropy(f, batch.y)
        torch.autograd.grad(loss, list(risk.params.values()))


def steps(count: int, step: Step) -> None:
    """Repeat a step."""
    for _ in range(count):
        step()


def programs(kind: str, layers: int, batch: int, device: str, width: int, times: int) -> dict[str, tuple[int, Step]]:
    """Return the programs, and their numbers of steps."""
    x = torch.randn(batch, times, width, device=device)
    y = torch.randint(CLASSES, (batch,), device=device)

    def model() -> Classifier:
        torch.manual_seed(0)
        return Classifier(KINDS[kind], layers, width).to(device)

    plain, every, default = model(), model(), model()
    loss = nn.CrossEntropyLoss()
    sgd = torch.optim.SGD(plain.parameters(), lr=1e-3, momentum=0.9)
    often = KFAC(every, loss, lr=1e-3, factors_every=1)
    kfac = KFAC(default, loss, lr=1e-3)
    risk = EmpiricalRisk(model(), loss, (x, y))
    return {
        "SGD, step": (1, partial(training_step, plain, sgd, x, y)),
        "watched pass": (1, partial(watched_pass, risk)),
        "KFAC, watched step": (STEPS, partial(steps, STEPS, partial(training_step, every, often, x, y))),
        "KFAC, step": (STEPS, partial(steps, STEPS, partial(training_step, default, kfac, x, y))),
    }


def measure(
    device: str,
    repeats: int = REPEATS,
    kinds: tuple[str, ...] = tuple(KINDS),
    layers: tuple[int, ...] = LAYERS,
    batches: tuple[int, ...] = BATCHES,
    width: int = WIDTH,
    times: int = TIMES,
) -> Iterator[Row]:
    """Measure all models, and yield rows as they are measured."""
    for kind, depth, batch in product(kinds, layers, batches):
        problem = f"{kind}, layers: {depth}, batch: {batch}"
        found = programs(kind, depth, batch, device, width, times)
        seconds = medians({name: step for name, (_, step) in found.items()}, repeats, problem)
        each = {name: value / found[name][0] for name, value in seconds.items()}
        unit = each["SGD, step"]
        for name, value in each.items():
            library = "torch" if name == "SGD, step" else "kfs"
            yield Row(problem, name, library, value, value / unit)


def main(device: str, results: Path = RESULTS, repeats: int = REPEATS) -> None:
    """Measure, print a table, and write JSON."""
    if device == "cpu":
        torch.set_num_threads(1)
    rows = []
    print("| problem | program | milliseconds | / (SGD, step) |\n|---|---|---|---|")
    for row in measure(device, repeats):
        print(f"| {row.problem} | {row.program} | {1e3 * row.seconds:.2f} | {row.ratio:.2f} |", flush=True)
        rows.append(row)
    print(f"Written: {save(rows, f'recurrent_{device}', {'repeats': repeats, 'device': device}, results)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recurrent")
    parser.add_argument("device", nargs="?", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--repeats", type=int, default=REPEATS)
    arguments = parser.parse_args()
    main(arguments.device, repeats=arguments.repeats)
