r"""The update rule: momentum, natural gradient, step.

These are pure functions, which know nothing about models or state. With gradients $g_t$, a momentum $\beta$, a
curvature approximation $F$ with damping $\delta$, a learning rate $\eta$ and decoupled weight decay $w$,

$$
m_t = \beta m_{t-1} + (1 - \beta) g_t, \quad
u_t = \frac{\beta m_t + (1 - \beta) g_t}{1 - \beta^{t+1}},
$$

$$
\theta_{t+1} = (1 - \eta w)\, \theta_t - \eta\, \tau\left((F + \delta I)^{-1} u_t\right).
$$

Gradients are averaged before they are multiplied by the inverse, so all of them are multiplied by the latest one. The
vector $u_t$ looks one step ahead (Nesterov), and the bias towards $m_0 = 0$ is corrected. The *trust region* $\tau$
shortens a layer's step if its curvature is implausibly small: see `limited`.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor

Tensors = list[Tensor] | tuple[Tensor, ...]
Scalar = float | Tensor  # a tensor without axes, if a number is decided on an accelerator


class Share(NamedTuple):
    """Parameters with the same numbers.

    Attributes:
        params: The parameters.
        grads: Their gradients.
        averages: Averages of earlier gradients; zeros at first.
        momentum: How much of the averages is kept.
        lr: The learning rate.
        kept: What decoupled weight decay leaves of the parameters, `1 - lr * weight_decay`.
        correction: Multiplies averages, against their bias: see `correction`.
    """

    params: Tensors
    grads: Tensors
    averages: Tensors
    momentum: float
    lr: Scalar
    kept: Scalar
    correction: Scalar


def correction(decay: float, age: int) -> float:
    """Return what an average that keeps `decay`, and started at zero `age` gradients ago, is to be multiplied with."""
    return float(1 / (1 - decay**age))


def natural_step(shares: Sequence[Share], precondition: Callable[[Tensors], Tensors]) -> list[tuple[Tensors, Tensors]]:
    """Return parameters and averages after one step, for each share of all parameters.

    Args:
        shares: All parameters.
        precondition: Multiplies with a damped inverse curvature, and keeps steps in the trust region. It takes
            and returns tensors for the parameters of all shares.

    Example:
        >>> double = lambda u: [2 * t for t in u]
        >>> W, G, m = [torch.ones(1)], [torch.ones(1)], [torch.zeros(1)]
        >>> share = Share(W, G, m, momentum=0.9, lr=0.1, kept=1.0, correction=correction(0.9, 2))
        >>> natural_step([share], double)[0][0]
        (tensor([0.8000]),)
    """
    averages: list[Tensors] = []
    ahead: list[Tensor] = []
    for share in shares:
        m = torch._foreach_lerp(share.averages, share.grads, 1 - share.momentum)
        ahead += multiplied(torch._foreach_lerp(share.grads, m, share.momentum), share.correction)
        averages.append(m)
    steps = iter(precondition(ahead))
    params = [moved(share.params, [next(steps) for _ in share.params], share.lr, share.kept) for share in shares]
    return list(zip(params, averages, strict=True))


def moved(params: Tensors, steps: Tensors, lr: Scalar, kept: Scalar) -> Tensors:
    """Return decayed parameters after a step."""
    return torch._foreach_sub(multiplied(params, kept), multiplied(steps, lr))


def multiplied(tensors: Tensors, factor: Scalar) -> Tensors:
    """Multiply all tensors with a number."""
    if isinstance(factor, Tensor) and tensors[0].dtype in {torch.float32, torch.float64}:
        factor = factor.to(tensors[0].dtype)  # PyTorch is slow for lists with a factor of another precision.
    result: Tensors = torch._foreach_mul(tensors, factor)
    return result


def limited(D: Tensor, trust: float | Tensor, unit_vectors: bool) -> Tensor:
    r"""Keep steps of layers in a trust region.

    Args:
        D: Steps of some layers, as matrices `[stack, 1, d_B, d_A]` that multiply inputs from the left.
        trust: How much steps may change outputs, for all layers or for each, `[stack, 1, 1, 1]`; infinity for no limit.
            A layer's step is shortened if its spectral norm exceeds $\sqrt{\max(1, d_B / d_A)}$ times this number.
        unit_vectors: Whether inputs are unit vectors (embeddings). Then each column is limited on its own.
    """
    rows, columns = D.shape[2:]
    if unit_vectors:
        size = D.norm(dim=2, keepdim=True) / sqrt(rows)
    else:
        size = spectral_norm(D) / sqrt(max(1.0, rows / columns))
    shorter: Tensor = D * (trust / size).clamp(max=1.0)
    return shorter


def spectral_norm(D: Tensor, iterations: int = 4) -> Tensor:
    """Estimate the largest singular values of `[..., m, n]` from below, `[..., 1, 1]`, by power iteration."""
    norms: Tensor = torch.linalg.vector_norm(D, dim=(-2, -1), keepdim=True)
    if 1 in D.shape[-2:]:
        return norms
    # A product of single matrices has less overhead than one of stacks.
    M = D.reshape(D.shape[-2:]) if D.shape[:-2].numel() == 1 else D
    # Without this scale, the iteration would overflow.
    shrink = norms.reshape(1, 1) if M.ndim == 2 else norms
    shrink = shrink.square().clamp(min=torch.finfo(D.dtype).tiny).reciprocal()
    v = _start(D.shape[-1], D.dtype, D.device)
    for _ in range(iterations):
        v = M.mT @ (M @ v) * shrink
    length = torch.linalg.vector_norm(v, dim=-2, keepdim=True)
    top: Tensor = torch.linalg.vector_norm(M @ v, dim=-2, keepdim=True) / length
    return torch.where(length > 0, top, norms)


def _start(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a fixed vector `[n, 1]` that is unlikely to be orthogonal to a singular vector."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():  # pragma: no cover (tested on a GPU)
        return _kept_start.__wrapped__(size, dtype, device)  # What is recorded has no values yet, and is not kept.
    return _kept_start(size, dtype, device)


@lru_cache(maxsize=256)
def _kept_start(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.cos(torch.arange(size, device=device).square()).to(dtype).unsqueeze(-1)


def adamw_step(
    share: Share, squares: Tensors, kept_squares: float, correction_of_squares: Scalar
) -> tuple[Tensors, Tensors, Tensors]:
    """Return parameters and both averages after one step of AdamW (Loshchilov & Hutter, 2019).

    Args:
        share: Parameters, gradients and their averages.
        squares: Averages of squared gradients.
        kept_squares: How much of these is kept.
        correction_of_squares: Multiplies them, against their bias.
    """
    m = torch._foreach_lerp(share.averages, share.grads, 1 - share.momentum)
    v = torch._foreach_lerp(squares, torch._foreach_mul(share.grads, share.grads), 1 - kept_squares)
    sizes = torch._foreach_sqrt(multiplied(v, correction_of_squares))
    torch._foreach_add_(sizes, torch.finfo(v[0].dtype).tiny ** 0.5)
    steps = torch._foreach_div(multiplied(m, share.correction), sizes)
    rounded = [step.to(p.dtype) for step, p in zip(steps, share.params, strict=True)]
    return moved(share.params, rounded, share.lr, share.kept), m, v


if __name__ == "__main__":
    from torch.nn import Linear, MSELoss, Sequential

    from kfs.kfac import KFAC
    from kfs.kfac.settings import Fisher
    from kfs.risk import EmpiricalRisk
    from kfs.verification import verify, verify_differs

    torch.manual_seed(0)
    X, y = torch.randn(20, 5, dtype=torch.float64), torch.randn(20, 2, dtype=torch.float64)
    model = Sequential(Linear(5, 4), Linear(4, 3), Linear(3, 2)).double()

    def gradient_after_step(layer: list[str], lr: float, fisher: Fisher = "type-2") -> Tensor:
        """Return the gradient with respect to one layer, after a step for this layer alone."""
        risk = EmpiricalRisk(model, MSELoss(), (X, y), params=layer)
        inverse = KFAC(risk, fisher=fisher).inverse(damping=1e-12)

        def precondition(u: Tensors) -> list[Tensor]:
            D = inverse @ dict(zip(layer, u, strict=True))
            return [D[name] for name in layer]

        params, g = list(risk.params.values()), list(risk.gradient().values())
        zeros = [torch.zeros_like(p) for p in params]
        share = Share(params, g, zeros, momentum=0.0, lr=lr, kept=1.0, correction=1.0)
        ((new, _),) = natural_step([share], precondition)
        moved = EmpiricalRisk(model, MSELoss(), (X, y), params=dict(zip(layer, new, strict=True)))
        return torch.cat([t.flatten() for t in moved.gradient().values()])

    for i in range(3):
        layer, case = [f"{i}.weight", f"{i}.bias"], f"layer {i} of a deep linear network"
        g = gradient_after_step(layer, 1.0)
        zero = torch.zeros_like(g)
        claim = "one step with learning rate 1 reaches the minimum of the square loss over one layer"
        verify(claim, g, zero, 1e-8, case)
        verify_differs("half a step does not", gradient_after_step(layer, 0.5), zero, case=case)
        wrong = gradient_after_step(layer, 1.0, "empirical")
        verify_differs("nor does one with the empirical Fisher", wrong, zero, case=case)
