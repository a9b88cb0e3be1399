"""Scores of several libraries against brute force, in float64, for small models with one kind of layer each.

Gradients of every example come from autograd. Two quantities are compared:

- inner products of gradients of queries and of training data, without curvature. Their brute force needs no other
  results, and is the same for all libraries.
- EKFAC: scores with a library's own eigenvectors and eigenvalues. Brute force multiplies these out, so that the error
  does not measure the approximation, but only the computation with it.

Errors are the largest difference in units of the largest score. An error of 1e-15 is round-off; with an error of 1,
scores are unrelated to the right ones.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.influence_digits import Data
from benchmarks.influence_methods import flat, gradients, losses
from kfs import EKFAC, EmpiricalRisk, Influence, per_datum

TRAIN = 12
QUERIES = 5
CLASSES = 3
DAMPING = 0.01
HEADER = "| model | quantity | library | error |\n|---|---|---|---|"
# The library's result and the right one, by quantity.
Checked = Mapping[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class ErrorRow:
    """One comparison with brute force.

    Attributes:
        model: The kind of its layers.
        quantity: The compared quantity.
        library: The library.
        error: The largest difference, in units of the largest score; `None` without scores.
        why: The reason if there are none.
    """

    model: str
    quantity: str
    library: str
    error: float | None
    why: str = ""

    def line(self) -> str:
        """Return a line of a Markdown table."""
        error = self.why if self.error is None else f"{self.error:.1e}"
        return f"| {self.model} | {self.quantity} | {self.library} | {error} |"


def models() -> dict[str, Callable[[], nn.Module]]:
    """Return functions that make models, by their special property; inputs are `[N, 4, 5, 5]`."""

    def convolution(**settings: Any) -> Callable[[], nn.Module]:
        return lambda: nn.Sequential(
            nn.Conv2d(4, 4, 3, padding=1, **settings), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 5 * 5, CLASSES)
        )

    return {
        "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(100, 6), nn.Tanh(), nn.Linear(6, CLASSES)),
        "convolution": convolution(),
        "convolution, 2 groups": convolution(groups=2),
        "convolution, depthwise": convolution(groups=4),
        "convolution, circular": convolution(padding_mode="circular"),
    }


def errors() -> Iterator[ErrorRow]:
    """Compare all libraries on all models."""
    for name, make in models().items():
        for library in ("kfs", "kronfluence", "dattri"):
            if library == "dattri" and name != "linear":
                yield ErrorRow(name, "EKFAC", library, None, "leaves convolutions out")
                continue
            if library != "kfs" and find_spec(library) is None:
                yield ErrorRow(name, "EKFAC", library, None, "not installed")
                continue
            torch.manual_seed(0)
            model = make().double().eval()
            data, queries = (
                (torch.randn(n, 4, 5, 5, dtype=torch.float64), torch.randint(CLASSES, (n,))) for n in (TRAIN, QUERIES)
            )
            checked = ours if library == "kfs" else import_module(f"benchmarks.influence_{library}").checked
            for quantity, (found, expected) in checked(model, data, queries).items():
                error = float((found - expected).abs().max() / expected.abs().max())
                yield ErrorRow(name, quantity, library, error)


def ours(model: nn.Module, data: Data, queries: Data) -> Checked:
    """Return inner products and scores of kfs, and by brute force."""
    train, asked = (EmpiricalRisk(model, nn.CrossEntropyLoss(), one) for one in (data, queries))
    G, G_asked = (flat(gradients(model, losses, one)) for one in (data, queries))
    ((batch,), (batch_asked,)) = (list(per_datum(risk)) for risk in (train, asked))
    influence = Influence(EKFAC(train), DAMPING)
    K = influence.K.to_dense()
    inverse = torch.linalg.inv(K + DAMPING * torch.eye(len(K), dtype=K.dtype))
    return {
        "inner products": (batch_asked.inner(batch), G_asked @ G.T),
        "EKFAC": (influence.scores(asked, train), G_asked @ inverse @ G.T),
    }


def matrices(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a matrix for each layer, `[N, d_B, d_A]`, with the bias as its last column."""
    layers = [name.removesuffix(".weight") for name in found if name.endswith(".weight")]
    return {
        layer: torch.cat([found[f"{layer}.weight"].flatten(2), found[f"{layer}.bias"].unsqueeze(2)], 2)
        for layer in layers
    }


def multiplied_out(
    queries: Tensor, train: Tensor, Q_A: Tensor, Q_B: Tensor, eigenvalues: Tensor, damping: float = DAMPING
) -> Tensor:
    """Return a layer's scores by the dense inverse with eigenvectors (columns) and eigenvalues `[d_B, d_A]`."""
    basis = torch.kron(Q_B, Q_A)
    inverse = basis @ torch.diag(1 / (eigenvalues.flatten() + damping)) @ basis.T
    return queries.flatten(1) @ inverse @ train.flatten(1).T
