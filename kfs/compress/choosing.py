"""Budgets for removal in the order of costs, and the choice of damping by training loss."""

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

# Shares such as 0.29 are not binary fractions: 0.29 * 100 is a little less than 29.
_ROUND_OFF = 1e-9
# Candidates. Large damping keeps changes small, where the quadratic model holds.
DAMPINGS = tuple(Relative(fraction) for fraction in (1e-3, 1e-2, 1e-1, 1.0))
WITHOUT_DATA = Relative(0.03)  # between the candidates
_BATCHES = 8  # number of batches for the training loss
_STEP = 2 / 3  # approximate share of weights that one step keeps: see `surgery`


def allowed(share: float, total: int) -> int:
    """Return the number of entries that a share of a total allows.

    Example:
        >>> allowed(0.29, 100), allowed(0.5, 5)
        (29, 2)
    """
    return int(share * total + _ROUND_OFF)


def some_of(layers: Sequence[Layer], share: float) -> int:
    """Return how many entries of the given layers may be kept together; at least one, or this raises `ModelError`."""
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
    """Return the shares that are left after each of several steps with equal ratios.

    Example:
        >>> steps(0.8), [round(share, 3) for share in steps(0.2)]
        ([0.8], [0.669, 0.447, 0.299, 0.2])
    """
    number = max(1, round(log(share) / log(_STEP)))
    return [*(share ** (step / number) for step in range(1, number)), share]


def groups(layers: Sequence[Layer], keep: Keep) -> list[tuple[list[Layer], float]]:
    """Return groups of layers that compete with each other, and the share that each group keeps."""
    if isinstance(keep, Mapping):
        return [([layer], keep[layer.name]) for layer in layers]
    return [(list(layers), keep)]


def shortest(size: Callable[[int], int], most: int, budget: int, what: str) -> int:
    """Return how many of the `most` candidates must be removed to make a size, which falls, fit a budget.

    Raises:
        ModelError: If removing all candidates does not suffice. The message calls them `what`.

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
    """The training loss of models on a few batches, which are read once.

    Args:
        risk_of: Function from a model to its risk.
        model: The original model.

    Attributes:
        before: The loss of the original model.
        num_data: The number of examples that losses are computed on.

    Raises:
        DataError: If all targets of all batches are ignored.
    """

    def __init__(self, risk_of: Callable[..., EmpiricalRisk], model: nn.Module) -> None:
        self._risk_of = risk_of
        with _evaluated(model):
            risk = self._risk(model)
            # Spread the batches evenly over the data if their number is known; otherwise, use the first ones.
            apart = ceil((risk.num_batches or 1) / _BATCHES)
            # Skip batches in which all targets are ignored.
            told = (batch for batch in risk.batches() if batch.counted)
            self._batches = list(islice(islice(told, 0, None, apart), _BATCHES))
        self.num_data = sum(risk.ranks.gather("data of training losses", sum(len(batch.y) for batch in self._batches)))
        if not self.num_data:
            raise DataError(
                "All targets are ignored, so there is no training loss for choosing the damping.",
                "Pass damping=, or risk= with data that have targets.",
            )
        self.before = self(model)

    def __call__(self, model: nn.Module) -> float:
        """Return the mean loss of a model over all ranks; infinity if it is not finite."""
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
        """Return the risk of a model, with all of its parameters, even if they are frozen."""
        return self._risk_of(model, params=[name for name, _ in model.named_parameters()])


@contextmanager
def _evaluated(model: nn.Module) -> Iterator[None]:
    """Context in which all modules are in evaluation mode."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def best(attempt: Callable[[Relative], nn.Module], loss: TrainingLoss) -> tuple[Relative, dict[Relative, float]]:
    """Compress with several dampings; return the one with the lowest training loss, and all losses.

    The loss is infinite if the compression raised a `SolverError`. If no loss is finite, this raises the last one.
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
