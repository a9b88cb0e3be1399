"""Two dampings compared: the default, and the weight decay of training. `python -m benchmarks.influence damping`.

The linear datamodeling score, as in the study `lds`, on five data sets of scikit-learn: networks with one hidden layer
are trained with halves of the data, and sums of scores over a half predict margins of queries (for diabetes, the
prediction itself). Training has an L2 penalty: half of it times the squared norm is added to the mean loss, as by
`weight_decay` of an optimizer.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.influence_digits import Data, Recipe, Sizes, retrained_margins, subsets, trained
from benchmarks.influence_quality import ScoreRow, spearman
from kfs import EKFAC, KFAC, EmpiricalRisk, Influence, Relative
from kfs.factors import exact_blocks
from kfs.factors.blocks import BlockDiagonal

# Training data and queries of each data set.
COUNTS = {
    "iris": (100, 50),
    "wine": (120, 58),
    "breast cancer": (400, 169),
    "digits": (500, 100),
    "diabetes": (300, 142),
}
PENALTIES = (1e-3, 1e-2)
CURVATURES: dict[str, Callable[[EmpiricalRisk], BlockDiagonal]] = {
    "exact blocks": exact_blocks,
    "KFAC": KFAC,
    "EKFAC": EKFAC,
}


def damping(sizes: Sizes) -> Iterator[ScoreRow]:
    """Compare dampings on all data sets."""
    for name in COUNTS:
        for penalty in PENALTIES:
            problems = [_Problem(name, penalty, seed, sizes) for seed in range(sizes.seeds)]
            for curvature, compute in CURVATURES.items():
                operators = [compute(problem.risk) for problem in problems]
                for words, chosen in _dampings(penalty).items():
                    pairs = zip(problems, operators, strict=True)
                    values = tuple(problem.lds(Influence(K, **chosen)) for problem, K in pairs)
                    yield ScoreRow(f"LDS, {name}, penalty {penalty:g}", curvature, "kfs", words, values)


def _dampings(penalty: float) -> dict[str, dict[str, Any]]:
    return {
        "0.1 x mean eigenvalue (default)": {},
        "0.01 x mean eigenvalue": {"damping": Relative(0.01)},
        "weight decay": {"weight_decay": penalty},
        "0.1 x weight decay": {"damping": 0.1 * penalty},
        "10 x weight decay": {"damping": 10 * penalty},
    }


class _Problem:
    """A data set, networks that were trained with halves of it, and one that was trained with all."""

    def __init__(self, name: str, penalty: float, seed: int, sizes: Sizes) -> None:
        data, self.queries = _load(name, seed, sizes)
        self.regression = name == "diabetes"
        classes = 1 if self.regression else int(data[1].max()) + 1
        recipe = Recipe((data[0].shape[1], sizes.width, classes), sizes.steps, 1e-2, penalty, self.regression)
        self.kept = subsets(sizes.halves, len(data[1]), seed + 1)
        self.actual = retrained_margins(data, self.queries, self.kept, recipe, range(sizes.initializations))
        self.model = copy.deepcopy(trained(data, recipe, seed=0)).double()
        self.risk = self._risk(data)

    def _risk(self, data: Data) -> EmpiricalRisk:
        X, y = data
        if self.regression:
            return EmpiricalRisk(self.model, nn.MSELoss(), (X.double(), y.double()))
        return EmpiricalRisk(self.model, nn.CrossEntropyLoss(), (X.double(), y))

    def lds(self, influence: Influence) -> float:
        """Return the linear datamodeling score."""
        of = (lambda f, _: f[0]) if self.regression else "margin"
        scores = -influence.scores(self._risk(self.queries), self.risk, of=of)  # type: ignore[arg-type]
        inside = torch.zeros(len(self.kept), self.risk.num_data, dtype=scores.dtype).scatter_(1, self.kept, 1.0)
        return float(spearman(inside @ scores.T, self.actual).mean())


def _load(name: str, seed: int, sizes: Sizes) -> tuple[Data, Data]:
    """Return training data and queries, standardized, in an order that depends on the seed."""
    from sklearn import datasets  # noqa: PLC0415 (optional)

    X, y = getattr(datasets, f"load_{name.replace(' ', '_')}")(return_X_y=True)
    train, queries = (min(count, size) for count, size in zip(COUNTS[name], (sizes.train, sizes.queries), strict=True))
    order = torch.randperm(len(X), generator=torch.Generator().manual_seed(seed))
    inputs = _standardized(torch.tensor(X, dtype=torch.float32)[order])
    targets = torch.tensor(y)[order]
    if name == "diabetes":
        targets = _standardized(targets.float().unsqueeze(1))
    return (inputs[:train], targets[:train]), (inputs[train : train + queries], targets[train : train + queries])


def _standardized(t: Tensor) -> Tensor:
    return (t - t.mean(0)) / t.std(0).clamp(min=1e-6)
