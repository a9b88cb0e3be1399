r"""Steps from a quadratic model of the loss: learning rate, momentum and damping that need no tuning.

Martens & Grosse (2015) take a step $\alpha d + \mu d'$, along the natural gradient $d$ and the last step $d'$, with the
coefficients that minimize

$$
M(s) = g^\top s + \tfrac{1}{2}\, s^\top (F + \delta I)\, s,
$$

where $F$ is the exact Fisher matrix on the batch, not its approximation. It takes two products with the Jacobian. The
loss is also evaluated after the step, on the same batch. If it does not fall, the step is shortened, or taken back
(`trials`). If it falls by much less than the model predicts, damping rises. If the prediction was good, damping falls
(Levenberg-Marquardt).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from kfs.exact_derivatives import ExactDerivatives, explained
from kfs.kfac.structures import computable
from kfs.losses import Loss
from kfs.optim.exchange import Exchange
from kfs.optim.step_sums import StepSums
from kfs.optim.trials import Trial
from kfs.outputs import prediction_in
from kfs.state import restored

Step = dict[str, Tensor]
_DECREASE = 0.95**5  # of damping, after a good prediction; the inverse of a rise after a bad one
_FAST_DECREASE = 0.5  # after one that came true, or was too careful
# Limits for the rise of damping after a step that had to be shortened.
_LEAST_RISE, _LARGEST_RISE = 2.0, 10.0


class QuadraticModel:
    """Finds steps along the natural gradient and the last step.

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
        if sums is None or not sums.examples or not natural:  # No target counts, or AdamW trains all parameters.
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
        """Remember a step that was tried, and return what to multiply damping with.

        After a step that was taken back, the last step is still the one before: only damping has changed.

        Args:
            steps: The step.
            trial: How `lr` times the step went.
            lr: The learning rate.
            noise: Round-off of losses. Predicted changes below it leave damping as it is.
        """
        if trial.share:
            self.previous = steps
        if trial.share < 1:
            # The model is wrong by more than a ratio can tell. How much too long the step was says by how much.
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
        """Return the damped Fisher matrix on all data of the step, along the directions."""
        C = torch.zeros(len(directions), len(directions), dtype=torch.float64)
        for args, kwargs, y in sums.inputs:
            pushed = [self._push_forward(d, args, kwargs) for d in directions]
            products = [{"f": self._loss.fisher_product(f, y, Jd)} for f, Jd in pushed]
            C += _inner_products(products, [{"f": Jd} for _, Jd in pushed])
        damped = [{n: damping[n] * t for n, t in d.items()} for d in directions]
        C = self._exchange.sum(C) / sums.examples + _inner_products(damped, directions)
        return (C + C.T) / 2

    def _push_forward(self, direction: Step, args: Any, kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return predictions for a batch, and their derivative along a direction of the parameters."""
        params = {n: p.detach() for n, p in self._model.named_parameters() if n in direction}
        device = next(iter(params.values())).device

        def predict(*values: Tensor) -> Tensor:
            buffers = {n: b.clone() for n, b in self._model.named_buffers()}  # The model may change them in place.
            tensors = dict(zip(params, values, strict=True)) | buffers
            return computable(prediction_in(functional_call(self._model, tensors, args, kwargs)))

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
