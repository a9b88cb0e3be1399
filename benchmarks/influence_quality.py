"""Quality of scores: predictions of networks that were trained with half of the data, and detection of wrong labels.

See `benchmarks/influence.py` for the measurements.
"""

import copy
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks.influence_digits import (
    Data,
    Recipe,
    Sizes,
    digits,
    flipped,
    retrained_margins,
    subsets,
    trained,
)
from benchmarks.influence_methods import RELATIVE, Method, detectors, in_words, predictors
from kfs.tour.mislabelled import area_under_curve

LEAST_LDS = {"KFAC type-2": 0.67, "EKFAC type-2": 0.67, "EKFAC mc": 0.62}
LEAST_AUROC = 0.96
HEADER = "| measure | method | library | damping | mean | recall | target |\n|---|---|---|---|---|---|---|"


@dataclass(frozen=True)
class ScoreRow:
    """The quality of one method.

    Attributes:
        study: The study.
        method: The method.
        library: Its library.
        damping: Its damping.
        values: One per seed; empty if the library is not installed.
        recall: The share of wrong labels among the first, on average; `None` in other studies.
        target: The target, or `None`.
    """

    study: str
    method: str
    library: str
    damping: str
    values: tuple[float, ...] = ()
    recall: float | None = None
    target: float | None = None

    def line(self) -> str:
        """Return a line of a Markdown table."""
        names = f"| {self.study} | {self.method} | {self.library} | {self.damping} |"
        if not self.values:
            return f"{names} not installed | | |"
        mean = statistics.mean(self.values)
        error = f" ± {statistics.stdev(self.values) / len(self.values) ** 0.5:.3f}" if len(self.values) > 1 else ""
        recall = "" if self.recall is None else f"{self.recall:.2f}"
        return f"{names} {mean:.3f}{error} | {recall} | {verdict(self.target, mean, least=True)} |"


def verdict(target: float | None, value: float | None, least: bool) -> str:
    """Return a sentence on the target, and whether it was reached."""
    if target is None or value is None:
        return ""
    reached = value >= target if least else value <= target
    return f"{'>=' if least else '<='} {target:g}: {'yes' if reached else 'no'}"


def lds(sizes: Sizes, results: Path) -> Iterator[ScoreRow]:
    """Measure how well each method predicts margins of networks that see half of the data."""
    problems = [_halves(seed, sizes, results) for seed in range(sizes.seeds)]
    agreement = tuple(float(spearman(problem.again, problem.actual).mean()) for problem in problems)
    yield ScoreRow("LDS", "the same halves, other initializations", "torch", "", agreement)
    for method in predictors():
        row = ScoreRow("LDS", method.name, method.library, method.damping)
        if method.fit is not None:
            values = tuple(_lds(method, problem, sizes, seed) for seed, problem in enumerate(problems))
            row = replace(row, values=values)
        if method.library == "kfs" and method.damping == in_words(RELATIVE):
            row = replace(row, target=LEAST_LDS.get(method.name))
        yield row


@dataclass(frozen=True)
class Halves:
    """Data, and results of networks that were trained with half of them.

    Attributes:
        data: The training data.
        queries: The queries whose margins are predicted.
        kept: Indices of the data in each half.
        actual: Margins, `[halves, queries]`.
        again: Margins of an equal number of networks with other initializations. Their agreement limits scores: no
            prediction is expected to have a higher correlation with `actual` than the root of this agreement.
        model: A network that was trained with all of them.
    """

    data: Data
    queries: Data
    kept: Tensor
    actual: Tensor
    again: Tensor
    model: nn.Module


def _halves(seed: int, sizes: Sizes, results: Path) -> Halves:
    """Train networks with halves of the data, or read their results from a file."""
    data, queries = digits(seed, sizes.train, sizes.queries)
    recipe = Recipe((64, sizes.width, 10), sizes.steps)
    kept = subsets(sizes.halves, sizes.train, seed + 1)
    count = sizes.initializations
    numbers = (sizes.train, sizes.queries, sizes.width, sizes.halves, count, sizes.steps, seed)
    file = results / f"influence_margins_twice_{'_'.join(map(str, numbers))}.safetensors"
    if not file.exists():
        both = {
            "margins": retrained_margins(data, queries, kept, recipe, range(count)),
            "again": retrained_margins(data, queries, kept, recipe, range(count, 2 * count)),
        }
        results.mkdir(parents=True, exist_ok=True)
        save_file(both, file)
    found = load_file(file)
    return Halves(data, queries, kept, found["margins"], found["again"], trained(data, recipe, seed=0))


def _lds(method: Method, problem: Halves, sizes: Sizes, seed: int) -> float:
    """Return the linear datamodeling score of a method, averaged over draws if it has some."""
    assert method.fit is not None  # noqa: S101 (it is installed)
    inside = torch.zeros(len(problem.kept), len(problem.data[1])).scatter_(1, problem.kept, 1.0)
    found = []
    for draw in range(sizes.draws if method.draws else 1):
        fitted = method.fit(copy.deepcopy(problem.model), problem.data, sizes.draws * seed + draw)
        scores = fitted.pairwise(problem.queries).detach().float()
        found.append(float(spearman(inside @ scores.T, problem.actual).mean()))
    return statistics.mean(found)


def spearman(a: Tensor, b: Tensor) -> Tensor:
    """Return the rank correlation of each column of two matrices, which have no ties."""
    ranks = torch.stack([a, b]).argsort(1).argsort(1).double()
    centered = ranks - ranks.mean(1, keepdim=True)
    return torch.cosine_similarity(centered[0], centered[1], dim=0)


def mislabelled(sizes: Sizes) -> Iterator[ScoreRow]:
    """Measure how well self-scores find wrong labels."""
    problems = []
    for seed in range(sizes.seeds):
        (X, y), _ = digits(seed, sizes.mislabelled, 0)
        labels, wrong = flipped(y, 0.1, seed)
        # Without a penalty, wrong labels are memorized. Otherwise the loss alone would reveal them.
        recipe = Recipe((64, 256, 10), sizes.memorizing, penalty=0.0)
        problems.append(((X, labels), wrong, trained((X, labels), recipe, seed)))
    for method in detectors():
        row = ScoreRow("AUROC", method.name, method.library, method.damping)
        values, recalls = [], []
        for seed, (data, wrong, model) in enumerate(problems if method.fit is not None else []):
            assert method.fit is not None  # noqa: S101 (otherwise there are no problems)
            own = method.fit(copy.deepcopy(model), data, seed).own().float()
            values.append(area_under_curve(own, wrong))
            first = own.argsort(descending=True)[: int(wrong.sum())]
            recalls.append(float(wrong[first].double().mean()))
        if values:
            target = LEAST_AUROC if method.library == "kfs" else None
            row = replace(row, values=tuple(values), recall=statistics.mean(recalls), target=target)
        yield row
