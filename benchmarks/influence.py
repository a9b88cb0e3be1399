"""Influence functions: accuracy and cost of scores. `python -m benchmarks.influence [study] [--quick]`.

Without a study, all but `gpu` run. Libraries that are not installed have rows that say so.

- `lds`: the linear datamodeling score (Park et al., 2023). Networks are trained with halves of scikit-learn's digits
  (500 digits, an MLP 64-32-10, 100 halves, margins averaged over three initializations). For each of 100 queries, the
  sum of scores over a half predicts its margin. The score is Spearman's correlation of predicted and actual margins
  over halves, averaged over queries. Methods that draw labels are run with several seeds. The first line is the
  correlation with an equal number of networks that used the same halves and other initializations. No method is
  expected to exceed its root. Margins are stored in `benchmarks/results`, so that a second run is faster.
- `damping`: the same score for the default damping and for the weight decay of training, on five data sets
  (`benchmarks/influence_damping.py`).
- `mislabelled`: 10 % of 1,000 digits have a wrong label, and an MLP 64-256-10 memorizes them. Self-scores should be
  larger for these: the area under the ROC curve, and the share of the wrong ones among the first 10 %.
- `time`: an MLP 64-256-256-10 with 85,002 parameters, 1,500 training data and 297 queries. CPU seconds of the process
  with one thread: the least of several runs, each with a new copy of the model, so that audits are included.
- `errors`: scores against brute force in float64 (`benchmarks/influence_errors.py`).
- `gpu`: a language model of GPT-2 small's size on a GPU (`benchmarks/influence_gpt.py`, which has options of its own).

Numbers are means over three seeds, which choose the data, the halves and the network, with their standard errors.
Targets are those of the default damping, 0.1 times the mean eigenvalue (Grosse et al., 2023).
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import influence_damping, influence_errors, influence_gpt, influence_quality, influence_times
from benchmarks.influence_digits import QUICK, Sizes
from benchmarks.report import RESULTS, save

# The text above each study's table, and a function that computes its rows.
STUDIES: dict[str, tuple[str, Callable[[Sizes, Path], Iterable[Any]]]] = {
    "lds": (influence_quality.HEADER, influence_quality.lds),
    "damping": (influence_quality.HEADER, lambda sizes, _: influence_damping.damping(sizes)),
    "mislabelled": (influence_quality.HEADER, lambda sizes, _: influence_quality.mislabelled(sizes)),
    "time": (influence_times.HEADER, lambda sizes, _: influence_times.times(sizes)),
    "errors": (influence_errors.HEADER, lambda *_: influence_errors.errors()),
}


def run(study: str, sizes: Sizes, results: Path, suffix: str) -> None:
    """Print a table row by row, and write JSON."""
    header, measure = STUDIES[study]
    print(f"\n{header}")
    rows = []
    for row in measure(sizes, results):
        print(row.line(), flush=True)
        rows.append(row)
    print(f"Written: {save(rows, f'influence_{study}{suffix}', vars(sizes), results)}")


def main(words: Sequence[str] | None = None, results: Path = RESULTS) -> None:
    """Run one study, or all that do not need a GPU."""
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
    for study in STUDIES if given.study is None else [given.study]:
        run(study, sizes, results, "_quick" if given.quick else "")


if __name__ == "__main__":
    main()
