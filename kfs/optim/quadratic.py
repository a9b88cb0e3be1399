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

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from kfs.errors import ModelError
from kfs.exact_derivatives import ExactDerivatives, explained
from kfs.kfac.live_pass import Record, prediction_in
from kfs.losses import Loss

Step = dict[str, Tensor]
_EVERY = 5
_RATE = (19 / 20) ** _EVERY


def coefficients(
    model: nn.Module, loss: Loss, record: Record, gradient: Step, directions: list[Step], damping: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Minimise the quadratic model along some directions.

    Args:
        model: The model, at the parameters that the gradient was taken at.
        loss: Describes the loss.
        record: Has inputs and targets of the last pass.
        gradient: Of the average over examples.
        directions: By parameter name.
        damping: By parameter name.

    Returns:
        One coefficient per direction, and the model in these coordinates: its linear and its quadratic part.
    """
    along = [_pushed(model, record, d) for d in directions]
    f = along[0][0].float()
    y = record.last[2]
    if y is None:
        raise ModelError(
            "The targets of the last batch are not known.", "Call the loss module that you passed as loss=."
        )
    examples = loss.examples(y)
    inner = []
    for i, left in enumerate(directions):
        product = loss.fisher_product(f, y, along[i][1].to(f.dtype)) / examples
        for j, right in enumerate(directions):
            damped = [(damping[n] * left[n] * right[n]).sum() for n in left]
            inner.append((product * along[j][1]).sum() + torch.stack(damped).sum())
    C = torch.stack(inner).reshape(len(directions), -1).double()
    b = torch.stack([torch.stack([(gradient[n] * d[n]).sum() for n in d]).sum() for d in directions]).double()
    C = (C + C.T) / 2
    x = -torch.linalg.lstsq(C, b.unsqueeze(1), driver="gelsd" if C.device.type == "cpu" else None).solution.squeeze(1)
    return x, b, C


def ratio_to_scale(ratio: float) -> float:
    """Return by how much damping changes, given the ratio of the actual to the predicted change of the loss."""
    if ratio > 0.75:
        return _RATE
    return 1 / _RATE if not ratio >= 0.25 else 1.0


def is_checked(step: int) -> bool:
    """Whether the loss is evaluated after this step."""
    return step % _EVERY == 0


@contextmanager
def as_before(model: nn.Module) -> Iterator[None]:
    """Leave buffers and random state as they are."""
    buffers = [(b, b.clone()) for b in model.buffers()]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        with torch.no_grad():
            for b, value in buffers:
                b.copy_(value)


def _pushed(model: nn.Module, record: Record, direction: Step) -> tuple[Tensor, Tensor]:
    """Return predictions for the last batch, and their derivative along a direction of the parameters."""
    args, kwargs, _ = record.last
    named = dict(model.named_parameters())
    names = [name for name in direction if name in named]

    def predict(*values: Tensor) -> Tensor:
        return prediction_in(functional_call(model, dict(zip(names, values, strict=True)), args, kwargs))

    primals = tuple(named[name].detach() for name in names)
    tangents = tuple(direction[name].to(p.dtype) for name, p in zip(names, primals, strict=True))
    with as_before(model), ExactDerivatives(), sdpa_kernel(SDPBackend.MATH), explained(), torch.no_grad():
        f, Jd = jvp(predict, primals, tangents)
    return f, Jd
