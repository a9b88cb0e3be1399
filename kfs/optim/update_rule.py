r"""The update rule: momentum, natural gradient, step.

These functions do not depend on models or optimizer state. With gradients $g_t$, a momentum $\beta$, a
curvature approximation $F$ with damping $\delta$, a learning rate $\eta$ and decoupled weight decay $w$,

$$
m_t = \beta m_{t-1} + (1 - \beta) g_t, \quad
u_t = \frac{\beta m_t + (1 - \beta) g_t}{1 - \beta^{t+1}},
$$

$$
\theta_{t+1} = (1 - \eta w)\, \theta_t - \eta\, \tau\left((F + \delta I)^{-1} u_t\right).
$$

Gradients are averaged before they are multiplied by the inverse, so the latest inverse multiplies all of them. The
vector $u_t$ looks one step ahead (Nesterov), and the bias towards $m_0 = 0$ is corrected. The *trust region* $\tau$
limits how much a layer's step may change outputs, in every direction: see `limited`.
"""

from collections.abc import Callable, Sequence
from itertools import compress
from math import inf, sqrt
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kfs.factors.accumulate import add_gram, mirror
from kfs.factors.blocks import computable
from kfs.runtime.precision import tf32

Tensors = list[Tensor] | tuple[Tensor, ...]
# Singular values of a step may be at most this many times the radius of the trust region: a longer step is first
# shortened as a whole.
_LARGEST = 30.0
_HUGE = 1e6
# Coefficients `a, b, c, d`: `a + b * x + c / (x + d)` is `1 / sqrt(1 + x)` up to 13 %, from zero to `_LARGEST` squared,
# and one at zero: short steps do not change. No other such coefficients are closer.
_RATIONAL = (0.0665864841, -4.54517679e-05, 3.11195134, 3.33394716)
# Factorizations on a CPU are slow if rows have a multiple of 256 numbers, because of cache conflicts. A margin helps.
_CONFLICT = 256
_MARGIN = 16
# Coefficients of odd polynomials of degree five. Applied one after the other, they move all numbers between
# `1 / sqrt(1 + _LARGEST**2)` and one to one, up to 3 %; no others are closer (Amsel et al., 2025).
# `tests/optim/test_rule_constants.py` computes these coefficients, and the ones above, from their optimality.
_QUINTICS = ((7.253831, -20.316468, 14.821728), (2.838153, -2.119765, 0.468511), (2.013579, -1.396625, 0.389938))
# This polynomial reduces the errors of numbers close to one, roughly to their third power.
_LAST_QUINTIC = (1.875, -1.25, 0.375)
# Fraction of averages of steps that is kept in every step.
KEPT_OF_STEPS = 0.9
Scalar = float | Tensor  # a scalar tensor, if the number is on an accelerator


class ParameterGroup(NamedTuple):
    """Parameters updated with the same hyperparameters.

    Attributes:
        params: The parameters.
        grads: Their gradients.
        averages: Moving averages of gradients; zeros at first.
        momentum: Fraction of the averages that is kept.
        lr: The learning rate.
        kept: Factor by which decoupled weight decay multiplies parameters, `1 - lr * weight_decay`.
        correction: Bias correction of the averages (see `correction`).
        taken: A flag, if an accelerator decides whether the step is taken. `natural_step` reads it after `precondition`
            was called. If it is false, nothing changes, whatever gradients and steps are.
        mean_steps: Moving averages of steps before they are multiplied by the learning rate, which keep
            `KEPT_OF_STEPS`; `None` if they are not needed.
    """

    params: Tensors
    grads: Tensors
    averages: Tensors
    momentum: float
    lr: Scalar
    kept: Scalar
    correction: Scalar
    taken: Tensor | None = None
    mean_steps: Tensors | None = None


def correction(decay: float, age: Scalar) -> Scalar:
    """Return the bias correction of an average that keeps `decay`, and started at zero `age` gradients ago."""
    return 1 / (1 - decay**age)


def natural_step(shares: Sequence[ParameterGroup], precondition: Callable[[Tensors], Tensors]) -> None:
    """Take one step: change parameters and averages in place.

    Args:
        shares: Groups of all parameters.
        precondition: Multiplies with a damped inverse curvature, and keeps steps in the trust region. It takes
            and returns tensors for the parameters of all groups. If it raises an error, nothing has changed.

    Example:
        >>> double = lambda u: [2 * t for t in u]
        >>> W, G, m = [torch.ones(1)], [torch.ones(1)], [torch.zeros(1)]
        >>> group = ParameterGroup(W, G, m, momentum=0.9, lr=0.1, kept=1.0, correction=correction(0.9, 2))
        >>> natural_step([group], double)
        >>> W
        [tensor([0.8000])]
    """
    ahead: list[Tensor] = []
    for share in shares:
        # Looking one step ahead, the average keeps the square of the momentum.
        u = torch._foreach_lerp(share.averages, share.grads, 1 - share.momentum**2)
        torch._foreach_mul_(u, in_precision_of(u, share.correction))
        ahead += u
    steps = iter(precondition(ahead))
    for share in shares:
        mine = [next(steps) for _ in share.params]
        if share.taken is None:
            torch._foreach_lerp_(share.averages, share.grads, 1 - share.momentum)
        else:
            # Steps are often views of larger matrices, which fused kernels do not accept.
            mine = [_like(p, step) for p, step in zip(share.params, mine, strict=True)]
            average_if(share.taken, share.averages, share.grads, 1 - share.momentum)
        if share.mean_steps is not None:
            _average_steps(share.taken, share.mean_steps, mine)
        apply_step(share.params, mine, share.lr, share.kept, share.taken)


def _average_steps(taken: Tensor | None, averages: Tensors, steps: Tensors) -> None:
    """Update averages of steps, in place."""
    if taken is not None:
        average_if(taken, averages, steps, 1 - KEPT_OF_STEPS)
        return
    for m, step in zip(averages, steps, strict=True):
        m.lerp_(step.to(m.dtype), 1 - KEPT_OF_STEPS)


def decay_if(taken: Tensor | None, kept: Scalar) -> Scalar:
    """Return the factor for weight decay: one if the step is not taken."""
    if taken is None or (isinstance(kept, float) and kept == 1):
        return kept
    result: Tensor = 1 - (1 - kept) * taken.double()
    return result


def apply_step(params: Tensors, steps: Tensors, lr: Scalar, kept: Scalar, taken: Tensor | None = None) -> None:
    """Apply weight decay and a step, in place; with a flag `taken`, only if it is true."""
    kept = decay_if(taken, kept)
    if not (isinstance(kept, float) and kept == 1):
        torch._foreach_mul_(params, in_precision_of(params, kept))
    pairs = list(zip(params, steps, strict=True))
    if taken is not None:
        # The fused kernel has learning rates in float32, and requires memory without gaps.
        single = [p.dtype == step.dtype == torch.float32 and _is_dense(p) for p, step in pairs]
        _sgd_step(list(compress(pairs, single)), lr.float() if isinstance(lr, Tensor) else lr, 0.0, taken)
        pairs = [(p, torch.where(taken, step, 0.0)) for (p, step), done in zip(pairs, single, strict=True) if not done]
    back: dict[torch.dtype, Tensor] = {}
    for p, step in pairs:
        if p.dtype not in {torch.float32, torch.float64}:
            p.sub_(lr * step.float())  # The learning rate is not rounded to half precision.
            continue
        if p.dtype not in back:
            back[p.dtype] = p.new_full((), -lr) if isinstance(lr, float) else (-lr).to(p.dtype)
        # Steps are often views of larger matrices. PyTorch's functions for lists are slow for these.
        p.addcmul_(step, back[p.dtype])


def average_if(taken: Tensor, averages: Tensors, grads: Tensors, new: float) -> None:
    """Add gradients to moving averages with the weight `new`, in place, if a step is taken."""
    alike: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
    for m, g in zip(averages, grads, strict=True):
        alike.setdefault(m.dtype, []).append((m, g))
    for pairs in alike.values():
        # SGD subtracts `lr * (g + weight_decay * m)`.
        _sgd_step(pairs, -new, -1.0, taken)


def _sgd_step(pairs: Sequence[tuple[Tensor, Tensor]], lr: Scalar, weight_decay: float, taken: Tensor) -> None:
    """Take a step of SGD on tensors of one precision, given their gradients, if it is `taken`.

    PyTorch's fused kernel reads and writes memory once. It accepts a flag on the device: if it is false, neither
    gradients nor learning rates have to be finite.
    """
    if not pairs:
        return
    grads = [_like(p, g) for p, g in pairs]
    torch._fused_sgd_(
        [p for p, _ in pairs],
        grads,
        [],
        lr=lr,
        weight_decay=weight_decay,
        momentum=0.0,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
        found_inf=torch.logical_not(taken).float(),
    )


def _like(p: Tensor, t: Tensor) -> Tensor:
    """Return a tensor with the strides of `p`."""
    return t if t.stride() == p.stride() else torch.empty_like(p, dtype=t.dtype).copy_(t)


def _is_dense(t: Tensor) -> bool:
    """Whether a tensor fills its memory; a view of a larger tensor may not."""
    return t.is_contiguous() or torch.empty_like(t, device="meta").stride() == t.stride()


def in_precision_of(tensors: Tensors, factor: Scalar) -> Scalar:
    """Return a factor in the precision of tensors, because PyTorch's list operations are slow otherwise."""
    if isinstance(factor, Tensor) and tensors[0].dtype in {torch.float32, torch.float64}:
        return factor.to(tensors[0].dtype)
    return factor


def limited(
    D: Tensor,
    trust: float | Tensor,
    input_size: Tensor,
    by_column: bool,
    shape: tuple[int, int] | None = None,
    half: bool = False,
) -> Tensor:
    r"""Limit the steps of layers to a trust region.

    Each singular value $\sigma$ of a step becomes $\sigma / \sqrt{1 + (\sigma / r)^2}$, where $r$ is the radius: small
    singular values stay, and large ones end at the radius. The whole step is not shortened by its largest singular
    value. It often belongs to noise in a direction with little curvature, and would stop all other directions.

    Args:
        D: Steps of some layers, as matrices `[stack, 1, d_B, d_A]` that multiply inputs from the left.
        trust: How much steps may change outputs, for all layers or for each, `[stack, 1, 1, 1]`; infinity for no limit.
            The radius is $\sqrt{\max(1, d_B / d_A)}$ times this number, over the size of inputs.
        input_size: Root mean squares of the layers' inputs, `[stack, 1, 1, 1]`.
        by_column: Whether each column is limited separately. This applies to diagonal factors $A$: of embeddings, with
            unit vectors as inputs, and of wide layers.
        shape: `d_B` and `d_A`, if `D` has margins of zeros.
        half: Whether a GPU may round to bfloat16 to compute the limit (not the step), which is then accurate to 25 %.
    """
    if isinstance(trust, float) and trust == inf:
        return D
    rows, columns = shape or D.shape[2:]
    if by_column:
        # The norm of inputs is one for unit vectors. An average of several (`reduce`) is shorter, and counts as one.
        norm = (input_size * sqrt(columns)).clamp(min=1.0)
        share = D.norm(dim=2, keepdim=True) * norm / (sqrt(rows) * trust)
        short: Tensor = D * (1 + share.square()).rsqrt()
        return short
    smallest = torch.finfo(D.dtype).tiny ** 0.5
    radius = trust * sqrt(max(1.0, rows / columns)) / input_size.clamp(min=smallest)
    low = torch.bfloat16 if half and D.is_cuda and D.dtype == torch.float32 else D.dtype
    # Squares of very large numbers would overflow. Such a step is beyond all limits, and is shortened as a whole.
    smaller = (_HUGE * radius / _largest(D)).clamp(max=1.0)
    S = torch.mul(D, smaller / radius, out=torch.empty_like(D, dtype=low))
    # The smaller of both Gram matrices suffices. TF32 is precise enough for a limit.
    with tf32(True):
        P = smaller * saturation(_gram(S.mT if rows < columns else S))
        limited_step: Tensor = P @ D if rows < columns else D @ P
    return limited_step


def _gram(S: Tensor) -> Tensor:
    """Return the Gram matrices `S.mT @ S`."""
    if S.device.type != "cpu" or S.shape[:2] != (1, 1):
        return S.mT @ S
    result = S.new_zeros(1, 1, S.shape[3], S.shape[3])
    add_gram(result[0, 0], S[0, 0])
    mirror(result)
    return result


def _largest(D: Tensor) -> Tensor:
    """Return the largest absolute entry of each matrix."""
    if D.device.type == "cpu":  # Infinity norms are slow there.
        return D.abs().amax((-2, -1), keepdim=True)
    result: Tensor = torch.linalg.vector_norm(D, torch.inf, (-2, -1), keepdim=True)
    return result


def total_size(tensors: Tensors) -> Tensor:
    """Return the sum of the absolute values of all entries. It is not finite if one of them is not.

    Example:
        >>> total_size([torch.ones(2), -torch.ones(3)])
        tensor(5.)
    """
    if tensors and all(t.is_cpu for t in tensors):  # Norms of this kind are slow there.
        return torch.stack([t.abs().sum(dtype=torch.promote_types(t.dtype, torch.float32)) for t in tensors]).sum()
    return torch.nn.utils.get_total_norm(list(tensors), 1.0)


def saturation(G: Tensor) -> Tensor:
    r"""Return a matrix that limits the singular values of $S$, given Gram matrices $S^\top S$, `[..., n, n]`.

    The product with $S$ has singular values $s / \sqrt{1 + s^2}$ instead of $s$: the result is $(I + G)^{-1/2}$. It is
    in float32 or better, even if Gram matrices are not.
    """
    low = G.dtype
    G = computable(G)
    # An upper bound on the largest eigenvalue, which is tight if few eigenvalues are large.
    bound = torch.linalg.matrix_norm(G, keepdim=True)
    shrink = (_LARGEST**2 / bound).clamp(max=1.0)
    if G.device.type == "cpu" and G.dtype == torch.float32:
        P = _by_inverse(shrink * G)
    else:
        P = _by_products(shrink * G, 1 + shrink * bound, low)
    result: Tensor = P * shrink.sqrt()
    return result


def _by_inverse(G: Tensor) -> Tensor:
    """Return $(I + G)^{-1/2}$ up to 13 %, for eigenvalues up to `_LARGEST` squared, using one inverse."""
    a, b, c, d = _RATIONAL
    n = G.shape[-1]
    margin = _MARGIN if n % _CONFLICT == 0 else 0
    shifted = pad(G, (0, margin, 0, margin)) if margin else G.clone()
    shifted.diagonal(dim1=-2, dim2=-1).add_(d)
    # If the step is not finite, this result is not finite either; callers check it.
    factor, _ = torch.linalg.cholesky_ex(shifted)
    result = torch.cholesky_inverse(factor)[..., :n, :n].mul_(c)
    # All matrices are symmetric. The inverse is stored column by column, and so is the transpose.
    result.add_(G.mT, alpha=b)
    result.diagonal(dim1=-2, dim2=-1).add_(a)
    return result


def _by_products(G: Tensor, top: Tensor, low: torch.dtype) -> Tensor:
    r"""Return $(I + G)^{-1/2}$, given a bound on the largest eigenvalue of $I + G$.

    This iteration makes all singular values of $S$, stacked on the identity, equal to one. It needs products only,
    which are much faster on GPUs than decompositions. It is accurate to 3 %, in float64 to round-off. Products are
    computed in the precision `low`.
    """
    # R is the Gram matrix of the iterate, which starts with singular values of at most one; P is its product so far.
    R = G / top
    R.diagonal(dim1=-2, dim2=-1).add_(1 / top.squeeze(-1))
    R = R.to(low)
    polynomials = [*_QUINTICS, *(3 * [_LAST_QUINTIC] if G.dtype == torch.float64 else [])]
    P: Tensor | None = None
    for i, (a, b, c) in enumerate(polynomials):
        # The iterate is multiplied by Q, so its Gram matrix is multiplied by the square of Q.
        Q = (R @ R).mul_(c).add_(R, alpha=b)
        Q.diagonal(dim1=-2, dim2=-1).add_(a)
        P = Q if P is None else P @ Q
        if i < len(polynomials) - 1:
            R = R @ Q @ Q
    assert P is not None  # noqa: S101 (there are polynomials)
    return P / top.sqrt()  # in the precision of G


def adamw_step(share: ParameterGroup, squares: Tensors, kept_squares: float, correction_of_squares: Scalar) -> None:
    """Take one step of AdamW (Loshchilov & Hutter, 2019): change parameters and both averages in place.

    Args:
        share: Parameters, gradients and their averages.
        squares: Moving averages of squared gradients.
        kept_squares: Fraction of these averages that is kept.
        correction_of_squares: Bias correction of these averages.
    """
    m: Tensors = torch._foreach_lerp(share.averages, share.grads, 1 - share.momentum)
    v: Tensors = torch._foreach_lerp(squares, torch._foreach_mul(share.grads, share.grads), 1 - kept_squares)
    taken = share.taken
    if taken is not None:
        m = [torch.where(taken, new, old) for new, old in zip(m, share.averages, strict=True)]
        v = [torch.where(taken, new, old) for new, old in zip(v, squares, strict=True)]
    sizes = torch._foreach_sqrt(torch._foreach_mul(v, in_precision_of(v, correction_of_squares)))
    torch._foreach_add_(sizes, torch.finfo(v[0].dtype).tiny ** 0.5)
    steps = torch._foreach_div(torch._foreach_mul(m, in_precision_of(m, share.correction)), sizes)
    apply_step(share.params, steps, share.lr, share.kept, taken)
    torch._foreach_copy_([*share.averages, *squares], [*m, *v])


if __name__ == "__main__":
    from torch.nn import Linear, MSELoss, Sequential

    from kfs.factors import KFAC
    from kfs.factors.settings import Fisher
    from kfs.problem.risk import EmpiricalRisk
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

        params, g = [p.detach().clone() for p in risk.params.values()], list(risk.gradient().values())
        zeros = [torch.zeros_like(p) for p in params]
        natural_step([ParameterGroup(params, g, zeros, momentum=0.0, lr=lr, kept=1.0, correction=1.0)], precondition)
        moved = EmpiricalRisk(model, MSELoss(), (X, y), params=dict(zip(layer, params, strict=True)))
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
