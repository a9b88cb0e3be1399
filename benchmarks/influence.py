"""Influence functions: how well scores predict, and what they take. `python -m benchmarks.influence [study] [--quick]`.

Without a study, all but `gpu` run. Libraries that are not installed have rows that say so.

- `lds`: the linear datamodeling score (Park et al., 2023). Networks are trained with halves of scikit-learn's digits
  (500 digits, an MLP 64-32-10, 100 halves, margins averaged over three initializations). For each of 100 queries, the
  sum of scores over a half predicts its margin. The score is Spearman's correlation of predicted and actual margins
  over halves, averaged over queries. Methods that draw labels are run with several seeds. Margins are kept in
  `benchmarks/results`, so that a second run takes less.
- `mislabelled`: 10 % of 1,000 digits have a wrong label, and an MLP 64-256-10 learns them by heart. Self-scores should
  be larger for these: the area under the ROC curve, and how many of the wrong ones are among the first 10 %.
- `time`: an MLP 64-256-256-10 with 85,002 parameters, 1,500 training data and 297 queries. CPU seconds of the process
  with one thread: the least of several runs, each with a new copy of the model, so that audits are included.
- `errors`: scores against brute force in float64 (`benchmarks/influence_errors.py`).
- `gpu`: a language model of GPT-2 small's size on a GPU (`benchmarks/influence_gpt.py`, which has options of its own).

Numbers are means over three seeds, which choose the data, the halves and the network, with their standard errors.
"""

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from sklearn.metrics import roc_auc_score
from torch import Tensor

from benchmarks import influence_errors, influence_gpt
from benchmarks.influence_digits import (
    Data,
    Recipe,
    digits,
    flipped,
    retrained_margins,
    subsets,
    trained,
)
from benchmarks.influence_methods import Fitted, Method, detectors, predictors, timed
from benchmarks.report import RESULTS, save

LEAST_LDS = {"KFAC type-2": 0.67, "EKFAC type-2": 0.67, "EKFAC mc": 0.62}
LEAST_AUROC = 0.96
MOST_TIME = {"factors": 0.1, "pairwise": 0.4, "self": 0.01}  # in units of Kronfluence's


@dataclass(frozen=True)
class Sizes:
    """How much is computed.

    Attributes:
        seeds: Seeds of data, halves and networks.
        train: Training data for `lds`.
        queries: Queries for `lds`.
        halves: Number of subsets.
        initializations: Networks for each subset.
        draws: How often methods run that draw labels.
        steps: Steps of training.
        mislabelled: Data for `mislabelled`.
        memorizing: Steps of training for it.
        timed: Training data and queries for `time`.
        repeats: How often everything is timed.
    """

    seeds: int = 3
    train: int = 500
    queries: int = 100
    halves: int = 100
    initializations: int = 3
    draws: int = 5
    steps: int = 300
    mislabelled: int = 1000
    memorizing: int = 600
    timed: tuple[int, int] = (1500, 297)
    repeats: int = 3


QUICK = Sizes(1, 60, 7, 6, 1, 2, 20, 60, 40, (40, 9), 1)


@dataclass(frozen=True)
class ScoreRow:
    """How good one method is.

    Attributes:
        study: What was measured.
        method: What was computed.
        library: Whose implementation.
        damping: How it was damped.
        values: One for each seed; empty if the library is not installed.
        recall: How many wrong labels are among the first, on average; `None` in other studies.
        target: What was hoped for, if anything.
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


@dataclass(frozen=True)
class TimeRow:
    """What one method takes.

    Attributes:
        program: What was timed.
        method: Which approximation.
        library: Whose implementation.
        seconds: CPU time; `None` if the library is not installed, or has no such program.
        ratio: That time in units of Kronfluence's; `None` if there is none.
        target: What was hoped for, if anything.
    """

    program: str
    method: str
    library: str
    seconds: float | None
    ratio: float | None = None
    target: float | None = None

    def line(self) -> str:
        """Return a line of a Markdown table."""
        seconds = "not installed" if self.seconds is None else f"{self.seconds:.3f}"
        ratio = "" if self.ratio is None else f"{self.ratio:.4f}"
        target = verdict(self.target, self.ratio, least=False)
        return f"| {self.program} | {self.method} | {self.library} | {seconds} | {ratio} | {target} |"


def verdict(target: float | None, value: float | None, least: bool) -> str:
    """Say what was hoped for, and whether it was reached."""
    if target is None or value is None:
        return ""
    reached = value >= target if least else value <= target
    return f"{'>=' if least else '<='} {target:g}: {'yes' if reached else 'no'}"


def lds(sizes: Sizes, results: Path) -> Iterator[ScoreRow]:
    """Measure how well each method predicts margins of networks that see half of the data."""
    problems = [_halves(seed, sizes, results) for seed in range(sizes.seeds)]
    for method in predictors():
        row = ScoreRow("LDS", method.name, method.library, method.damping)
        values = []
        if method.fit is not None:
            row = replace(row, target=LEAST_LDS.get(method.name) if method.library == "kfs" else None)
            values = [_lds(method, problem, sizes, seed) for seed, problem in enumerate(problems)]
        # Absolute damping has no target: how much of it is right depends on the data.
        yield replace(row, values=tuple(values), target=row.target if "mean" in method.damping else None)


@dataclass(frozen=True)
class Halves:
    """Data, and what networks that saw half of them do.

    Attributes:
        data: What to train with.
        queries: Whose margins are predicted.
        kept: Indices of the data in each half.
        actual: Margins, `[halves, queries]`.
        recipe: How networks are trained.
    """

    data: Data
    queries: Data
    kept: Tensor
    actual: Tensor
    recipe: Recipe


def _halves(seed: int, sizes: Sizes, results: Path) -> Halves:
    """Train networks with halves of the data, or read from a file what they do."""
    data, queries = digits(seed, sizes.train, sizes.queries)
    recipe = Recipe((64, 32, 10), sizes.steps)
    kept = subsets(sizes.halves, sizes.train, seed + 1)
    numbers = (sizes.train, sizes.queries, sizes.halves, sizes.initializations, sizes.steps, seed)
    file = results / f"influence_margins_{'_'.join(map(str, numbers))}.safetensors"
    if file.exists():
        actual = load_file(file)["margins"]
    else:
        actual = retrained_margins(data, queries, kept, recipe, range(sizes.initializations))
        results.mkdir(parents=True, exist_ok=True)
        save_file({"margins": actual}, file)
    return Halves(data, queries, kept, actual, recipe)


def _lds(method: Method, problem: Halves, sizes: Sizes, seed: int) -> float:
    """Return the linear datamodeling score of a method, averaged over draws if there are any."""
    assert method.fit is not None  # noqa: S101 (it is installed)
    model = trained(problem.data, problem.recipe, seed=0)
    inside = torch.zeros(len(problem.kept), len(problem.data[1])).scatter_(1, problem.kept, 1.0)
    found = []
    for draw in range(sizes.draws if method.draws else 1):
        fitted = method.fit(copy.deepcopy(model), problem.data, sizes.draws * seed + draw)
        scores = fitted.pairwise(problem.queries).detach().float()
        found.append(float(spearman(inside @ scores.T, problem.actual).mean()))
    return statistics.mean(found)


def spearman(a: Tensor, b: Tensor) -> Tensor:
    """Return the rank correlation of each column of two matrices, which have no ties."""
    ranks = torch.stack([a, b]).argsort(1).argsort(1).double()
    ranks = ranks - ranks.mean(1, keepdim=True)
    ranks = ranks / ranks.norm(dim=1, keepdim=True)
    return (ranks[0] * ranks[1]).sum(0)


def mislabelled(sizes: Sizes) -> Iterator[ScoreRow]:
    """Measure how well self-scores find wrong labels."""
    problems = []
    for seed in range(sizes.seeds):
        (X, y), _ = digits(seed, sizes.mislabelled, 0)
        labels, wrong = flipped(y, 0.1, seed)
        # Without a penalty wrong labels are learnt by heart. Otherwise the loss alone would tell.
        recipe = Recipe((64, 256, 10), sizes.memorizing, penalty=0.0)
        problems.append(((X, labels), wrong, trained((X, labels), recipe, seed)))
    for method in detectors():
        row = ScoreRow("AUROC", method.name, method.library, method.damping)
        values, recalls = [], []
        for seed, (data, wrong, model) in enumerate(problems if method.fit is not None else []):
            assert method.fit is not None  # noqa: S101 (otherwise there are no problems)
            own = method.fit(copy.deepcopy(model), data, seed).own().float()
            values.append(float(roc_auc_score(wrong, own)))
            first = own.argsort(descending=True)[: int(wrong.sum())]
            recalls.append(float(wrong[first].double().mean()))
        if values:
            target = LEAST_AUROC if method.library == "kfs" else None
            row = replace(row, values=tuple(values), recall=statistics.mean(recalls), target=target)
        yield row


def times(sizes: Sizes) -> Iterator[TimeRow]:
    """Time factors, scores of all pairs, and self-scores: everything in turn."""
    data, queries = digits(0, *sizes.timed)
    model = trained(data, Recipe((64, 256, 256, 10), 60), seed=0)
    methods = timed()
    found: dict[tuple[str, int], list[float]] = {}
    for repeat in range(sizes.repeats):
        for place, method in enumerate(methods):
            if method.fit is None:
                continue
            copied = copy.deepcopy(model)
            start = time.process_time()
            fitted: Fitted = method.fit(copied, data, repeat)
            found.setdefault(("factors", place), []).append(time.process_time() - start)
            start = time.process_time()
            fitted.pairwise(queries)
            found.setdefault(("pairwise", place), []).append(time.process_time() - start)
            if method.has_own:
                start = time.process_time()
                fitted.own()
                found.setdefault(("self", place), []).append(time.process_time() - start)
    theirs = next(place for place, method in enumerate(methods) if method.library == "kronfluence")
    for program, target in MOST_TIME.items():
        unit = found.get((program, theirs))
        for place, method in enumerate(methods):
            seconds = found.get((program, place))
            row = TimeRow(program, method.name, method.library, None if seconds is None else min(seconds))
            if seconds is not None and unit is not None:
                row = replace(row, ratio=min(seconds) / min(unit), target=target if method.library == "kfs" else None)
            if seconds is not None or method.fit is None:
                yield row


SCORE_HEADER = "| measure | method | library | damping | mean | recall | target |\n|---|---|---|---|---|---|---|"
TIME_HEADER = "| program | method | library | CPU seconds | / Kronfluence | target |\n|---|---|---|---|---|---|"


def report(
    name: str,
    header: str,
    rows: Iterable[ScoreRow] | Iterable[TimeRow] | Iterable[influence_errors.ErrorRow],
    settings: dict[str, object],
    results: Path,
) -> None:
    """Print a table as rows come, and write JSON."""
    print(f"\n{header}")
    kept = []
    for row in rows:
        print(row.line(), flush=True)
        kept.append(row)
    print(f"Written: {save(kept, f'influence_{name}', settings | peer_versions(), results)}")


def peer_versions() -> dict[str, object]:
    """Return the versions of other libraries; `None` for those that are not installed."""
    found: dict[str, object] = {}
    for name in ("kronfluence", "dattri", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


STUDIES = ("lds", "mislabelled", "time", "errors")


def main(words: Sequence[str] | None = None, results: Path = RESULTS) -> None:
    """Run one study, or all that need no GPU."""
    words = sys.argv[1:] if words is None else list(words)
    if words[:1] == ["gpu"]:
        influence_gpt.main(words[1:], results)
        return
    parser = argparse.ArgumentParser(prog="python -m benchmarks.influence")
    parser.add_argument("study", nargs="?", choices=[*STUDIES, "gpu"], help="default: all but gpu")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--train", type=int, help="training data for lds")
    parser.add_argument("--queries", type=int, help="queries for lds")
    given = parser.parse_args(words)
    torch.set_num_threads(1)
    sizes = QUICK if given.quick else Sizes()
    sizes = replace(sizes, train=given.train or sizes.train, queries=given.queries or sizes.queries)
    settings = vars(sizes)
    chosen = STUDIES if given.study is None else (given.study,)
    if "lds" in chosen:
        report("lds", SCORE_HEADER, lds(sizes, results), settings, results)
    if "mislabelled" in chosen:
        report("mislabelled", SCORE_HEADER, mislabelled(sizes), settings, results)
    if "time" in chosen:
        report("time", TIME_HEADER, times(sizes), settings, results)
    if "errors" in chosen:
        report("errors", influence_errors.HEADER, influence_errors.errors(), settings, results)


if __name__ == "__main__":
    main()
