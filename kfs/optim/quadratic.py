r"""Steps from a quadratic model of the loss: learning rate, momentum and damping that nobody has to choose.

Martens & Grosse (2015) take a step $\alpha d + \mu d'$, along the natural gradient $d$ and the last step $d'$, with the
coefficients that minimise

$$
M(s) = g^\top s + \tfrac{1}{2}\, s^\top (F + \delta I)\, s,
$$

where $F$ is the exact Fisher matrix on the batch, not its approximation: two products with the Jacobian give all that
is needed. Every few steps the loss is evaluated after the step, too. If it fell by much less than the model predicts,
damping rises, and if the prediction was good, it falls (Levenberg-Marquardt).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from kfs.exact_derivatives import ExactDerivatives, explained
from kfs.losses import Loss
from kfs.optim.outputs import prediction_in
from kfs.optim.step_sums import StepSums
from kfs.state import restored

Step = dict[str, Tensor]


class QuadraticModel:
    """Finds steps along the natural gradient and the last step.

    Args:
        model: The model.
        loss: Describes the loss.

    Attributes:
        every: In how many steps damping is adapted.
        previous: The last step, by parameter name.
    """

    every = 5

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        """Start without a last step."""
        self._model, self._loss = model, loss
        self.previous: Step = {}
        self._predicted = (0.0, 0.0)

    def steps(self, gradient: Step, natural: Step, damping: Mapping[str, Tensor], record: StepSums) -> Step:
        """Return the step that minimises the quadratic model.

        Args:
            gradient: Of the average over examples, by parameter name.
            natural: The gradient times the damped inverse curvature.
            damping: What was added to the curvature.
            record: Has inputs and targets of all passes.
        """
        if not record.inputs:  # no target counts
            return {n: torch.zeros_like(d) for n, d in natural.items()}
        directions = [{n: -d for n, d in natural.items()}]
        if self.previous.keys() == natural.keys():
            directions.append(self.previous)
        b = torch.stack([_inner(gradient, d) for d in directions]).double().cpu()
        C = self._curvature(directions, damping, record)
        x = torch.linalg.pinv(C, hermitian=True) @ -b  # the last step may point along the natural gradient
        self._predicted = (float(b @ x), float(x @ C @ x))
        self.previous = {
            n: torch.stack([c * d[n] for c, d in zip(x.to(like), directions, strict=True)]).sum(0)
            for n, like in natural.items()
        }
        return self.previous

    def damping_factor(self, change: float, lr: float, noise: float = 0.0) -> float:
        """Return what to multiply damping with.

        Args:
            change: How the loss has changed after `lr` times the step.
            lr: The learning rate.
            noise: Round-off of losses; smaller changes say nothing.
        """
        predicted = lr * self._predicted[0] + 0.5 * lr**2 * self._predicted[1]
        if abs(predicted) <= noise:
            return 1.0
        ratio, rate = change / predicted, (19 / 20) ** self.every
        if ratio > 0.75:
            return rate
        return 1.0 if ratio >= 0.25 else 1 / rate

    def _curvature(self, directions: list[Step], damping: Mapping[str, Tensor], record: StepSums) -> Tensor:
        """Return the damped Fisher matrix on all data of the step, along the directions."""
        C, examples = torch.zeros(len(directions), len(directions), dtype=torch.float64), 0.0
        for args, kwargs, y in record.inputs:
            pushed = [self._pushed(d, args, kwargs) for d in directions]
            products = [self._loss.fisher_product(f, y, Jd) for f, Jd in pushed]
            C += torch.stack([torch.stack([(p * Jd).sum() for _, Jd in pushed]) for p in products]).double().cpu()
            examples += self._loss.examples(y)
        damped = [{n: damping[n] * t for n, t in d.items()} for d in directions]
        C = C / examples + torch.stack([torch.stack([_inner(a, d) for d in directions]) for a in damped]).double().cpu()
        return (C + C.T) / 2

    def _pushed(self, direction: Step, args: Any, kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return predictions for a batch, and their derivative along a direction of the parameters."""
        params = {n: p.detach() for n, p in self._model.named_parameters() if n in direction}
        device = next(iter(params.values())).device

        def predict(*values: Tensor) -> Tensor:
            buffers = {n: b.clone() for n, b in self._model.named_buffers()}  # it may change them in place
            tensors = dict(zip(params, values, strict=True)) | buffers
            f = prediction_in(functional_call(self._model, tensors, args, kwargs))
            return f.to(torch.promote_types(f.dtype, torch.float32))

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


def _inner(left: Step, right: Step) -> Tensor:
    return torch.stack([(left[n] * t).sum() for n, t in right.items()]).sum()
