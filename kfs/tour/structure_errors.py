"""Errors of structures relative to the exact blocks of a small convolutional network, before and after training.

Run it: `python kfs/tour/structure_errors.py errors.svg`.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from kfs.factors import Comparison, compare
from kfs.problem.risk import EmpiricalRisk

NAMES = {1: "convolution", 4: "hidden", 6: "output"}


def data(num_data: int = 300) -> tuple[Tensor, Tensor]:
    """Return small images of ten classes: a pattern for each class, plus noise."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(10, (num_data,), generator=generator)
    patterns = torch.randn(10, 64, generator=generator, dtype=torch.float64)
    return patterns[y] + 1.5 * torch.randn(num_data, 64, generator=generator, dtype=torch.float64), y


def compared(steps: int) -> Comparison:
    """Compare structures with exact blocks after some steps of training."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)),
            nn.Conv2d(1, 4, 3, stride=2),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(36, 12),
            nn.Tanh(),
            nn.Linear(12, 10),
        ).double()
    X, y = data()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(X), y).backward()
        optimizer.step()
    structures = ["diagonal", "KFAC", "EKFAC", "trace-scaled", "optimal Kronecker"]
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), (X, y), progress=False)  # the tour shows its own
    return compare(risk, structures)


def draw(path: str | Path, steps: int = 40) -> dict[str, Comparison]:
    """Draw the figure.

    Args:
        path: File to write.
        steps: Number of training steps.

    Returns:
        The comparisons, by panel.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 (optional)

    panels = {"at initialization": compared(0), f"after {steps} steps of Adam": compared(steps)}
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for axes, (title, comparison) in zip(figure.subplots(1, 2, sharey=True), panels.items(), strict=True):
        comparison.plot(axes=axes)
        axes.set_xticks(range(len(NAMES)), list(NAMES.values()))
        axes.set_title(title)
    figure.axes[1].set_ylabel("")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False)
    figure.savefig(path)
    return panels


if __name__ == "__main__":
    target = sys.argv[1] if len(sys.argv) > 1 else "structure_errors.svg"
    draw(target)
    print(f"Written: {target}")
