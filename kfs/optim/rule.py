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
from math import inf, sqrt

import torch
from torch import Tensor

Tensors = list[Tensor] | tuple[Tensor, ...]
# Singular values of a step count as at most this many times the radius of the trust region: a step that is longer is
# shortened as a whole first.
_LARGEST = 100.0
_FAR = 1e4  # entries of a step count as at most this many times the radius: more than `_LARGEST` changes nothing
# Relative error of singular values after the limit. In float64, where one wants exact numbers, it is round-off.
_PRECISION = 1e-3


def natural_step(
    params: Tensors,
    grads: Tensors,
    averages: Tensors,
    precondition: Callable[[Tensors], Tensors],
    *,
    lr: Sequence[float],
    weight_decay: Sequence[float],
    momentum: float,
    ages: Sequence[int],
) -> tuple[Tensors, Tensors]:
    """Return parameters and averages after one step.

    Args:
        params: Parameters.
        grads: Their gradients.
        averages: Averages of earlier gradients; zeros at first.
        precondition: Multiplies with a damped inverse curvature, and keeps steps in the trust region.
        lr: Learning rates, one for each parameter.
        weight_decay: Decoupled weight decays, one for each parameter.
        momentum: How much of the average is kept.
        ages: Number of gradients in each average.

    Example:
        >>> double = lambda u: [2 * t for t in u]
        >>> W, G, m = [torch.ones(1)], [torch.ones(1)], [torch.zeros(1)]
        >>> natural_step(W, G, m, double, lr=[0.1], weight_decay=[0.0], momentum=0.9, ages=[0])[0]
        (tensor([0.8000]),)
    """
    averages = torch._foreach_lerp(averages, grads, 1 - momentum)
    ahead = torch._foreach_lerp(grads, averages, momentum)
    steps = precondition(torch._foreach_div(ahead, [1 - momentum ** (age + 2) for age in ages]))
    decayed = torch._foreach_mul(params, [1 - eta * w for eta, w in zip(lr, weight_decay, strict=True)])
    return torch._foreach_sub(decayed, torch._foreach_mul(steps, list(lr))), averages


def limited(D: Tensor, trust: float | Tensor, input_size: Tensor, unit_vectors: bool) -> Tensor:
    r"""Keep steps of layers in a trust region.

    Each singular value $\sigma$ of a step becomes $\sigma / \sqrt{1 + (\sigma / r)^2}$, where $r$ is the radius: small
    ones stay, and large ones end at the radius. The whole step is not shortened with its largest singular value.
    That one often belongs to noise in a direction with little curvature, and all other directions would stand still.

    Args:
        D: Steps of some layers, as matrices `[stack, 1, d_B, d_A]` that multiply inputs from the left.
        trust: How much steps may change outputs, for all layers or for each, `[stack, 1, 1, 1]`; infinity for no limit.
            The radius is $\sqrt{\max(1, d_B / d_A)}$ times this number, over the size of inputs.
        input_size: Root mean squares of the layers' inputs, `[stack, 1, 1, 1]`.
        unit_vectors: Whether inputs are unit vectors (embeddings). Then each column is limited on its own.
    """
    if isinstance(trust, float) and trust == inf:
        return D
    rows, columns = D.shape[2:]
    if unit_vectors:
        share = D.norm(dim=2, keepdim=True) / (sqrt(rows) * trust)
        columnwise: Tensor = D * (1 + share.square()).rsqrt()
        return columnwise
    smallest = torch.finfo(D.dtype).tiny ** 0.5
    radius = trust * sqrt(max(1.0, rows / columns)) / input_size.clamp(min=smallest)
    # Squares of larger numbers could overflow. Steps that are so long are shortened in any case.
    peak = D.abs().amax(dim=(2, 3), keepdim=True).clamp(min=smallest)
    D = D * (_FAR * radius / peak).clamp(max=1.0)
    S = D / radius
    # The smaller of both Gram matrices is enough.
    return saturation(S @ S.mT) @ D if rows < columns else D @ saturation(S.mT @ S)


def saturation(G: Tensor) -> Tensor:
    r"""Return what limits the singular values of matrices $S$, given Gram matrices $S^\top S$, `[..., n, n]`.

    The product with $S$ has singular values $s / \sqrt{1 + s^2}$ instead of $s$: the result is $(I + G)^{-1/2}$. It is
    computed by a Newton-Schulz iteration with optimal scales (Chen & Chow, 2014), which makes all singular values of
    $S$ with the identity below it equal to one. It needs products only, at which GPUs are much better than at
    decompositions.
    """
    # An upper bound on the largest eigenvalue, which is close if few of them are large.
    bound = torch.linalg.matrix_norm(G, keepdim=True)
    shrink = (_LARGEST**2 / bound).clamp(max=1.0)
    identity = torch.eye(G.shape[-1], dtype=G.dtype, device=G.device)
    top = 1 + shrink * bound
    # R is the Gram matrix of the iterate, which starts with singular values of at most one; P is its product so far.
    R = (shrink * G + identity) / top
    scales = _scales(1e-12 if G.dtype == torch.float64 else _PRECISION)
    P = Q = scales[0][0] * identity - scales[0][1] * R
    for first, second in scales[1:]:
        R = R @ Q @ Q
        Q = first * identity - second * R
        P = P @ Q
    result: Tensor = P * (shrink / top).sqrt()
    return result


@lru_cache(maxsize=2)
def _scales(precision: float) -> list[tuple[float, float]]:
    """Return coefficients of the iteration that moves singular values up to one, until they are that close."""
    scales = []
    low = 1 / sqrt(1 + _LARGEST**2)  # a bound on the smallest singular value
    while 1 - low > precision:
        a = sqrt(3 / (1 + low + low**2))
        scales.append((1.5 * a, 0.5 * a**3))
        low = low * (1.5 * a - 0.5 * a**3 * low**2)
    return scales


def adamw_step(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, *, lr: float, weight_decay: float, betas: tuple[float, float], age: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return parameter and both averages after one step of AdamW (Loshchilov & Hutter, 2019)."""
    m = m.lerp(g, 1 - betas[0])
    v = v.lerp(g.square(), 1 - betas[1])
    mean = m / (1 - betas[0] ** (age + 1))
    variance = v / (1 - betas[1] ** (age + 1))
    step = mean / (variance.sqrt() + torch.finfo(v.dtype).tiny ** 0.5)
    return p * (1 - lr * weight_decay) - lr * step.to(p.dtype), m, v


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
        new, _ = natural_step(
            params, g, zeros, precondition, lr=[lr, lr], weight_decay=[0.0, 0.0], momentum=0.0, ages=[0, 0]
        )
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
