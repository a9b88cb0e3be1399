r"""Steps that minimize a quadratic model of the loss, and steps that are shortened until the batch loss falls.

The natural gradient and the inverses that it needs live in `kfs.optim.curvature`.

Martens & Grosse (2015) take a step $\alpha d + \mu d'$, along the natural gradient $d$ and the last step $d'$, with the
coefficients that minimize

$$
M(s) = g^\top s + \tfrac{1}{2}\, s^\top (F + \delta I)\, s,
$$

where $F$ is the exact Fisher matrix on the batch, not its approximation. `QuadraticModel` needs two products with the
Jacobian.

The loss is also evaluated after the step, on the same batch. If it does not fall, the step is shortened, or taken back
(`try_step`). Damping follows the rule of Levenberg and Marquardt: if the loss falls by much less than the model
predicts, damping rises; if the prediction was good, damping falls.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from kfs.errors import ModelError
from kfs.factors.blocks import computable
from kfs.losses import Loss
from kfs.optim.across_ranks import Exchange
from kfs.optim.averages import StepSums
from kfs.problem.isolation import restored
from kfs.problem.risk import prediction_in
from kfs.problem.torch_fixes import ExactDerivatives, call_with, explained

# The loss must change by at least this fraction of the change that the slope predicts (Armijo's condition).
_SUFFICIENT = 1e-4
# Bounds of the factor by which a step is shortened: the loss is not exactly a parabola.
_SHORTEST, _LONGEST = 0.1, 0.5
_MOST_TRIALS = 10
# Two evaluations of one loss may differ by this many units of round-off, relative to its value.
_ROUND_OFF = 4.0


@dataclass(frozen=True)
class Trial:
    """Result of trying a step.

    Attributes:
        share: Fraction of the step that was taken; zero if it was taken back.
        change: Change of the loss after the whole step.
    """

    share: float
    change: float


def try_step(params: list[Tensor], old: list[Tensor], change: Callable[[], float], slope: float, noise: float) -> Trial:
    """Shorten a step until the loss falls. If it never does, restore all parameters.

    Args:
        params: Parameters after the whole step. They are changed in place.
        old: Parameters before the step.
        change: Evaluates the change of the loss since then.
        slope: Change of the loss for the whole step if the loss was linear; not positive.
        noise: Round-off of losses: changes below it do not count.

    Example:
        >>> p, old = torch.tensor([-9.0]), torch.tensor([1.0])  # a step that is ten times too long, for a parabola
        >>> try_step([p], [old], lambda: float(p**2 - old**2), slope=-20.0, noise=0.0)
        Trial(share=0.1, change=80.0)
        >>> p
        tensor([0.])
    """
    new = [p.clone() for p in params]
    share = 1.0
    first = now = _or_infinite(change())
    for _ in range(_MOST_TRIALS):
        if now <= _SUFFICIENT * share * slope + noise:
            return Trial(share, first)
        share *= _next_share(now, share * slope)
        torch._foreach_copy_(params, torch._foreach_lerp(old, new, share))
        now = _or_infinite(change())
    torch._foreach_copy_(params, old)
    return Trial(0.0, first)


def _or_infinite(change: float) -> float:
    return change if isfinite(change) else inf


def _next_share(change: float, slope: float) -> float:
    """Return the factor to try next: the minimum of the parabola through the known values, within bounds."""
    beyond = change - slope  # excess of the loss over the line of its slope
    share = 0.0 if beyond <= 0 else -0.5 * slope / beyond
    return min(max(share, _SHORTEST), _LONGEST)


class BatchLoss:
    """The loss on the batch of a step, as the user's closure computes it.

    Args:
        closure: The user's closure.
        model: The model that it trains.
        device: Device of the model.
        mean: Returns the mean of a number over all processes.

    Attributes:
        result: Return value of the first call of the closure.
    """

    def __init__(
        self, closure: Callable[[], Any], model: nn.Module, device: torch.device, mean: Callable[[float], float]
    ) -> None:
        self._mean = mean
        self._closure = closure
        self._model = model
        self._device = device
        self._random_state = torch.get_rng_state()
        if device.type == "cuda":  # pragma: no cover (tested on a GPU)
            self._cuda_random_state = torch.cuda.get_rng_state(device)
        with torch.enable_grad():
            self.result = closure()

    @cached_property
    def value(self) -> float:
        """The loss of the first call. This synchronizes with an accelerator, and with other processes."""
        return self._mean(_value_of(self.result))

    @property
    def round_off(self) -> float:
        """How much two evaluations of the loss may differ."""
        tensors = [torch.as_tensor(self.result), *self._model.parameters()]
        dtypes = {t.dtype for t in tensors if t.is_floating_point()}
        return _ROUND_OFF * max(torch.finfo(dtype).eps for dtype in dtypes) * abs(self.value)

    def evaluate(self) -> float:
        """Return the loss with the current parameters. Buffers do not change, and the same random numbers are drawn."""
        with restored(self._model, self._device, refuse=False), torch.enable_grad():
            torch.set_rng_state(self._random_state)
            if self._device.type == "cuda":  # pragma: no cover (tested on a GPU)
                torch.cuda.set_rng_state(self._cuda_random_state, self._device)
            return self._mean(_value_of(self._closure()))


def _value_of(result: object) -> float:
    """Return the loss as a number, given the return value of a closure.

    Raises:
        ModelError: If the closure returned something else.
    """
    try:
        return float(torch.as_tensor(result).detach())
    except (TypeError, ValueError, RuntimeError) as error:
        raise ModelError(
            f"The closure returned a {type(result).__name__} instead of the loss.",
            "Return the loss on which the closure has called backward().",
        ) from error


Step = dict[str, Tensor]
_DECREASE = 0.95**5  # factor for damping after a good prediction; its inverse after a bad one
_FAST_DECREASE = 0.5  # factor for damping after an accurate or too careful prediction
# Bounds of the factor for damping after a step that had to be shortened.
_LEAST_RISE, _LARGEST_RISE = 2.0, 10.0


class QuadraticModel:
    """Finds steps along the natural gradient and the previous step.

    Attributes:
        previous: The last step that was taken, by parameter name. Its length does not matter.
    """

    def __init__(self, model: nn.Module, loss: Loss, exchange: Exchange) -> None:
        self._exchange = exchange
        self.previous: Step = {}
        self._model = model
        self._loss = loss
        self._predicted = (0.0, 0.0)  # linear and quadratic term of the last step

    def steps(self, gradient: Step, natural: Step, damping: Mapping[str, Tensor], sums: StepSums | None) -> Step:
        """Return the step that minimizes the quadratic model, given the gradient and the natural gradient."""
        self._predicted = (0.0, 0.0)
        if sums is None or not sums.examples or not natural:  # All targets are ignored, or AdamW trains all parameters.
            return {n: torch.zeros_like(d) for n, d in natural.items()}
        directions = [{n: -d for n, d in natural.items()}]
        if self.previous.keys() == natural.keys():
            directions.append(self.previous)
        b = _inner_products([gradient], directions)[0]
        C = self._curvature(directions, damping, sums)
        # The matrix is singular if the last step points along the natural gradient.
        x = torch.linalg.pinv(C, hermitian=True) @ -b
        self._predicted = (float(b @ x), float(x @ C @ x))
        return {
            n: torch.stack([c * d[n] for c, d in zip(x.to(like), directions, strict=True)]).sum(0)
            for n, like in natural.items()
        }

    def finish(self, steps: Step, trial: Trial, lr: float, noise: float) -> float:
        """Store a step that was tried, and return the factor to multiply damping with.

        If the step was taken back, the previous step stays the last one, and only damping changes.

        Args:
            steps: The step.
            trial: Result of trying `lr` times the step.
            lr: The learning rate.
            noise: Round-off of losses. Predicted changes below it leave damping as it is.
        """
        if trial.share:
            self.previous = steps
        if trial.share < 1:
            # The model is too inaccurate for a ratio. Damping rises by how much too long the step was.
            return min(max(1 / trial.share, _LEAST_RISE), _LARGEST_RISE) if trial.share else _LARGEST_RISE
        predicted = lr * self._predicted[0] + 0.5 * lr**2 * self._predicted[1]
        if abs(predicted) <= noise:
            return 1.0
        ratio = trial.change / predicted
        if ratio > 0.9:
            return _FAST_DECREASE
        if ratio > 0.75:
            return _DECREASE
        return 1.0 if ratio >= 0.25 else 1 / _DECREASE

    def _curvature(self, directions: list[Step], damping: Mapping[str, Tensor], sums: StepSums) -> Tensor:
        """Return the damped Fisher matrix on all data of the step, projected onto the directions."""
        C = torch.zeros(len(directions), len(directions), dtype=torch.float64)
        for args, kwargs, y in sums.inputs:
            pushed = [self._push_forward(d, args, kwargs) for d in directions]
            products = [{"f": self._loss.fisher_product(f, y, Jd)} for f, Jd in pushed]
            C += _inner_products(products, [{"f": Jd} for _, Jd in pushed])
        damped = [{n: damping[n] * t for n, t in d.items()} for d in directions]
        C = self._exchange.sum(C) / sums.examples + _inner_products(damped, directions)
        return (C + C.T) / 2

    def _push_forward(self, direction: Step, args: Any, kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return predictions for a batch, and their derivative along a direction in parameter space."""
        params = {n: p.detach() for n, p in self._model.named_parameters() if n in direction}
        device = next(iter(params.values())).device

        def predict(*values: Tensor) -> Tensor:
            buffers = {n: b.clone() for n, b in self._model.named_buffers()}  # The model may change them in place.
            tensors = dict(zip(params, values, strict=True)) | buffers
            output = call_with(self._model, tensors, args, kwargs)
            return computable(prediction_in(output, self._loss.output))

        tangents = tuple(direction[n].to(p.dtype) for n, p in params.items())
        with (
            restored(self._model, device, refuse=False),
            ExactDerivatives(),
            sdpa_kernel(SDPBackend.MATH),
            explained(),
            torch.no_grad(),
        ):
            f, pushed, *_ = jvp(predict, tuple(params.values()), tangents)
        return f, pushed


def _inner_products(left: list[Step], right: list[Step]) -> Tensor:
    """Return the inner products of all pairs, `[left, right]`, in float64 on the CPU."""
    rows = [[torch.stack([(a[n] * t).sum() for n, t in b.items()]).sum() for b in right] for a in left]
    return torch.stack([torch.stack(row) for row in rows]).double().cpu()
