"""Choosing what to remove: the cheapest first, until few enough numbers are left. And choosing the damping."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from math import ceil, inf, isfinite, log

import torch
from torch import nn

from kfs.compress.layers import Keep, Layer
from kfs.errors import DataError, ModelError, SolverError
from kfs.factors import Relative
from kfs.problem.risk import EmpiricalRisk

# Shares such as 0.29 are no binary fractions: 0.29 * 100 is a little less than 29.
_ROUND_OFF = 1e-9
# What is tried, from a quadratic model that is trusted far away to one that is hardly trusted at all.
DAMPINGS = tuple(Relative(fraction) for fraction in (1e-3, 1e-2, 1e-1, 1.0))
WITHOUT_DATA = Relative(0.03)  # in the middle
_BATCHES = 8  # that the training loss is computed from
_STEP = 2 / 3  # share of the weights that one step leaves, about: see `surgery`


def allowed(share: float, total: int) -> int:
    """Return how many of some numbers may be kept.

    Example:
        >>> allowed(0.29, 100), allowed(0.5, 5)
        (29, 2)
    """
    return int(share * total + _ROUND_OFF)


def some_of(layers: Sequence[Layer], share: float) -> int:
    """Return how many numbers of some layers may be kept.

    Raises:
        ModelError: If that is not even one.
    """
    total = sum(layer.size for layer in layers)
    number = allowed(share, total)
    if number == 0:
        where = f"layer {layers[0].name!r}" if len(layers) == 1 else f"{len(layers)} layers"
        raise ModelError(
            f"A share of {share:g} of the {total:,} numbers in {where} is less than one number, so nothing would be "
            "left.",
            "Keep more.",
        )
    return number


def steps(share: float) -> list[float]:
    """Return the shares that are left after each of several steps, of equal ratio.

    Example:
        >>> steps(0.8), [round(share, 3) for share in steps(0.2)]
        ([0.8], [0.669, 0.447, 0.299, 0.2])
    """
    number = max(1, round(log(share) / log(_STEP)))
    return [*(share ** (step / number) for step in range(1, number)), share]


def groups(layers: Sequence[Layer], keep: Keep) -> list[tuple[list[Layer], float]]:
    """Return which layers compete with each other, and the share that they keep together."""
    if isinstance(keep, Mapping):
        return [([layer], keep[layer.name]) for layer in layers]
    return [(list(layers), keep)]


def shortest(size: Callable[[int], int], most: int, budget: int, what: str) -> int:
    """Return how many candidates must be removed until a size is within the budget.

    Args:
        size: The size after so many candidates, in the order of their costs; it does not grow.
        most: How many candidates there are.
        budget: The largest size allowed.
        what: What is removed.

    Raises:
        ModelError: If removing all of them does not suffice.

    Example:
        >>> shortest(lambda removed: 10 - 2 * removed, 4, 5, "rows")
        3
    """
    if size(most) > budget:
        raise ModelError(
            f"Without all {what} that can be removed, {size(most):,} numbers are left, more than the {budget:,} that "
            "keep allows.",
            "Keep more.",
        )
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        if size(middle) <= budget:
            high = middle
        else:
            low = middle + 1
    return low


class TrainingLoss:
    """The loss of models on a few batches, which are read once.

    Args:
        risk_of: Makes the risk of a model.
        model: The model that is compressed.

    Attributes:
        before: The loss of this model.
        num_data: The number of examples that losses are computed from.
    """

    def __init__(self, risk_of: Callable[..., EmpiricalRisk], model: nn.Module) -> None:
        """Choose batches from all over the data, if it is known how many there are, or else the first ones.

        Raises:
            DataError: If all targets of all batches are ignored.
        """
        self._risk_of = risk_of
        with _evaluated(model):
            risk = self._risk(model)
            apart = ceil((risk.num_batches or 1) / _BATCHES)
            # A batch whose targets are all ignored says nothing.
            told = (batch for batch in risk.batches() if batch.counted)
            self._batches = list(islice(islice(told, 0, None, apart), _BATCHES))
        self.num_data = sum(risk.ranks.gather("data of training losses", sum(len(batch.y) for batch in self._batches)))
        if not self.num_data:
            raise DataError(
                "All targets are ignored, so that there is no training loss to choose the damping by.",
                "Pass damping=, or risk= with data that have targets.",
            )
        self.before = self(model)

    def __call__(self, model: nn.Module) -> float:
        """Return the mean loss of a model; infinity if it is not finite."""
        with _evaluated(model), torch.no_grad():
            risk = self._risk(model)
            with risk.ranks.agreed("training losses"), risk.untouched():
                losses = [risk.loss.criterion(risk.evaluate(batch), batch.y).double().sum() for batch in self._batches]
                total = float(torch.stack(losses).sum()) if losses else 0.0
                own = total, float(sum(batch.counted for batch in self._batches))
            totals = [sum(numbers) for numbers in zip(*risk.ranks.gather("training loss", own), strict=True)]
        loss = totals[0] / totals[1]
        return loss if isfinite(loss) else inf

    def _risk(self, model: nn.Module) -> EmpiricalRisk:
        """Return the risk of a model, with all of its parameters: it may be frozen."""
        return self._risk_of(model, params=[name for name, _ in model.named_parameters()])


@contextmanager
def _evaluated(model: nn.Module) -> Iterator[None]:
    """Put all modules into evaluation mode, in this context."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def best(attempt: Callable[[Relative], nn.Module], loss: TrainingLoss) -> tuple[Relative, dict[Relative, float]]:
    """Compress with several dampings, and return the one with the lowest training loss.

    Args:
        attempt: Compresses with a damping.
        loss: The loss of a model.

    Returns:
        The best damping, and all losses. Where systems were not solved, the loss is infinite.

    Raises:
        SolverError: If systems were not solved with any damping.
    """
    losses: dict[Relative, float] = {}
    for damping in DAMPINGS:
        try:
            losses[damping] = loss(attempt(damping))
        except SolverError:
            if damping == DAMPINGS[-1] and min(losses.values()) == inf:
                raise
            losses[damping] = inf
    return min(losses, key=lambda damping: losses[damping]), losses
