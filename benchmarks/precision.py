"""Accuracy of factors and steps if outer products are rounded: `python -m benchmarks.precision [cuda|cpu]`.

The models are the encoder of a ViT-B/16, with a batch of 64, and the GPT of the factor benchmark, in float32 and under
bf16 autocast. On a CPU, both are scaled down, and there is no TF32. The reference are factors of the same model in
float64 or, if these do not fit into memory, in float32 without TF32. Curvature is the empirical Fisher, since drawn
labels could depend on the rounding of probabilities, which is not measured here.

Errors are relative, in the Frobenius norm, for each linear layer. Cells have the median over layers and, in brackets,
the largest error. Columns:

- A, B: the factors. Their errors have two sources: passes through the model, and products.
- A alone, B alone: the difference to factors with `products="float32"` after the same passes, so that only products
  contribute.
- step: `K.inverse(damping) @ gradient`, exactly damped, with the gradient of the reference. The damping of a layer is a
  multiple of the mean eigenvalue of its block. Decompositions of wide factors take long, so only the first and the last
  transformer block, and the head, are used. Decompositions and products with inverses are computed without TF32.

"auto, TF32" allows TF32 for everything, passes through the model included.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.factor_problems import Batches, factor_problems, vit
from benchmarks.factor_programs import kfs_factors, layers, risk_of
from benchmarks.problems import GPT
from benchmarks.replayed_factors import device_name, device_of
from benchmarks.report import RESULTS, save
from kfs import KFAC
from kfs.errors import SolverError
from kfs.runtime.precision import tf32

DAMPINGS = (1e-1, 1e-2, 1e-3)  # in units of the mean eigenvalue
SMALL = 16  # factor by which the encoder's batch is smaller on a CPU
# For each row: products=, and whether TF32 is allowed everywhere. The first row is the reference of the others.
CHOICES = {
    "float32": ("float32", False),
    "tf32": ("tf32", False),
    "bf16": ("bf16", False),
    "auto": ("auto", False),
    "auto, TF32": ("auto", True),
}
Parts = dict[str, list[Tensor]]  # some tensors for each block, by its name


@dataclass(frozen=True)
class Errors:
    """Relative errors of all layers: the median and the largest."""

    median: float
    worst: float

    def __str__(self) -> str:
        return f"{self.median:.1e} ({self.worst:.1e})"


@dataclass(frozen=True)
class ErrorRow:
    """One measured precision.

    Attributes:
        problem: The model and data.
        products: The precision of outer products.
        A: Errors of input-based factors.
        B: Errors of gradient-based factors.
        A_alone: Errors of input-based factors due to products alone.
        B_alone: Errors of gradient-based factors due to products alone.
        steps: Errors of steps, by damping; `None` if a factor could not be inverted.
    """

    problem: str
    products: str
    A: Errors
    B: Errors
    A_alone: Errors | None = None
    B_alone: Errors | None = None
    steps: dict[str, Errors | None] = field(default_factory=dict)

    def line(self) -> str:
        """Return a line of a Markdown table."""
        alone = ["" if errors is None else str(errors) for errors in (self.A_alone, self.B_alone)]
        steps = ["refused" if errors is None else str(errors) for errors in self.steps.values()]
        return f"| {' | '.join([self.problem, self.products, str(self.A), str(self.B), *alone, *steps])} |"


COLUMNS = ("problem", "products", "A", "B", "A alone", "B alone", *(f"step, damping {d:g}" for d in DAMPINGS))


@dataclass(frozen=True)
class Reference:
    """The reference results.

    Attributes:
        A: Input-based factors of all layers.
        B: Gradient-based factors.
        gradient: The gradient that inverses are multiplied with.
        dampings: Dampings by multiple of the mean eigenvalue, for each block whose step is computed.
        steps: The steps, by the same multiple.
    """

    A: Parts
    B: Parts
    gradient: dict[str, Tensor]
    dampings: dict[float, dict[str, float]]
    steps: dict[float, Parts | None]


def factors(problem: Batches, params: list[str], products: str, allow_tf32: bool = False) -> KFAC:
    """Compute factors of some layers."""
    with tf32(allow_tf32):
        K: KFAC = kfs_factors(problem, params, fisher="empirical", products=products)
    return K


def sides(K: KFAC) -> tuple[Parts, Parts]:
    """Return the factors A and B of all blocks."""
    A = {name: [block.A] for name, block in K.blocks.items()}
    B = {name: [block.B] for name, block in K.blocks.items()}
    return A, B


def with_steps(problem: Batches) -> list[str]:
    """Return the parameters of the layers whose steps are computed."""
    last = len(problem.model.blocks) - 1  # type: ignore[arg-type]
    return [name for name in layers(problem) if name.startswith(("blocks.0.", f"blocks.{last}.", "head."))]


def mean_eigenvalues(K: KFAC) -> dict[str, float]:
    """Return the mean eigenvalue of each block."""
    structures = {name: block.structure() for name, block in K.blocks.items()}
    return {name: float(one.trace().mean()) / (one.rows * one.columns) for name, one in structures.items()}


def step(K: KFAC, damping: Mapping[str, float], gradient: Mapping[str, Tensor]) -> Parts | None:
    """Multiply a damped inverse with a gradient; `None` if a factor is refused. The result is by block."""
    rounded = {name: g.to(K.dtype) for name, g in gradient.items()}
    try:
        with tf32(False):
            product: Any = K.inverse(damping=damping) @ rounded
    except SolverError as error:
        print(f"refused: {error!s:.300}")
        return None
    return {name: [product[param] for param in block.layout.params] for name, block in K.blocks.items()}


def in_double(problem: Batches) -> Batches:
    """Return a problem in float64, without autocast."""
    data = [(X.double() if X.is_floating_point() else X, y) for X, y in problem.data]
    return replace(problem, model=copy.deepcopy(problem.model).double(), data=data, autocast=None)


def reference(problem: Batches) -> Reference:
    """Compute factors and steps in float64; in float32 if memory is too small for that."""
    try:
        return reference_of(in_double(problem), "auto")  # float64 has no options
    except torch.OutOfMemoryError:
        print(f"{problem.name}: there is not enough memory for float64, so the reference is in float32.")
    return reference_of(replace(problem, autocast=None), "float32")


def reference_of(problem: Batches, products: str) -> Reference:
    """Compute the reference."""
    chosen = with_steps(problem)
    with tf32(False):
        gradient = risk_of(problem, chosen).gradient()
    A, B = sides(factors(problem, layers(problem), products))
    K = factors(problem, chosen, products)
    means = mean_eigenvalues(K)
    dampings = {d: {name: d * mean for name, mean in means.items()} for d in DAMPINGS}
    return Reference(A, B, gradient, dampings, {d: step(K, dampings[d], gradient) for d in DAMPINGS})


def relative_errors(found: Parts, expected: Parts) -> Errors:
    """Compare blocks in the Frobenius norm."""
    errors = []
    for name, right in expected.items():
        size = sum(float(t.double().square().sum()) for t in right)
        distance = sum(
            float((mine.double() - theirs.double()).square().sum())
            for mine, theirs in zip(found[name], right, strict=True)
        )
        errors.append((distance / size) ** 0.5)
    return Errors(statistics.median(errors), max(errors))


def choices(device: torch.device) -> dict[str, tuple[str, bool]]:
    """Return the precisions that a device supports."""
    if device.type == "cuda":
        return CHOICES
    return {name: choice for name, choice in CHOICES.items() if "tf32" not in name.lower()}


def measure(problem: Batches, right: Reference) -> Iterator[ErrorRow]:
    """Measure all precisions on a problem."""
    precise: tuple[Parts, Parts] | None = None
    for name, (products, allow_tf32) in choices(device_of(problem)).items():
        A, B = sides(factors(problem, layers(problem), products, allow_tf32))
        if precise is None:
            precise = A, B
            alone: tuple[Errors | None, Errors | None] = None, None
        else:
            alone = relative_errors(A, precise[0]), relative_errors(B, precise[1])
        K = factors(problem, with_steps(problem), products, allow_tf32)
        steps: dict[str, Errors | None] = {}
        for d, expected in right.steps.items():
            found = step(K, right.dampings[d], right.gradient)
            steps[f"{d:g}"] = None if found is None or expected is None else relative_errors(found, expected)
        yield ErrorRow(problem.name, name, relative_errors(A, right.A), relative_errors(B, right.B), *alone, steps)


def problems(device: str, scale: int) -> list[list[Batches]]:
    """Return models, each in float32 and under autocast; they are small unless `scale` is one."""
    encoder = [problem for problem in vit(scale, device) if not problem.tf32]
    gpt = (
        next(problem for problem in factor_problems(1, device) if problem.name == "GPT") if scale == 1 else narrow_gpt()
    )
    language_model = [
        replace(gpt, name="GPT float32"),
        replace(gpt, name="GPT bf16 autocast", autocast=torch.bfloat16),
    ]
    return [encoder, language_model]


def narrow_gpt() -> Batches:
    """Return a language model that is small enough for a CPU."""
    torch.manual_seed(0)
    sentences = torch.randint(50, (8, 16))
    model = GPT(vocabulary=50, width=32, heads=4, depth=2, length=16)
    return Batches("GPT", model, [(sentences, sentences.roll(-1, 1))], few_columns=False, terms=16)


def main(words: Sequence[str] | None = None, results: Path = RESULTS) -> None:
    """Measure, print a table, and write JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.precision")
    parser.add_argument("device", nargs="?", default="cuda" if torch.cuda.is_available() else "cpu")
    device: str = parser.parse_args(words).device
    start = time.perf_counter()
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
    rows = []
    for same in problems(device, 1 if device.startswith("cuda") else SMALL):
        right = reference(same[0])
        for problem in same:
            for row in measure(problem, right):
                print(row.line(), flush=True)  # a run may be stopped
                rows.append(row)
    file = save(rows, "precision", {"device": device_name(torch.device(device))}, results)
    print(f"Written: {file}; {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
