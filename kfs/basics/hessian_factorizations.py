r"""Symmetric factors of the criterion's Hessian.

A convex criterion has a positive semi-definite Hessian with respect to the prediction,
so it can be written as $\mathrm{H}_f c = S S^\top$. One example's share of the GGN is
then a self-outer product,

$$
(\mathrm{J}_\theta f)^\top (\mathrm{H}_f c)\, (\mathrm{J}_\theta f) = V V^\top,
\qquad V = (\mathrm{J}_\theta f)^\top S,
$$

and backpropagating the columns of $S$ through the network yields $V$. For the two
common criteria, with $\sigma = \mathrm{softmax}(f)$ and the square root taken entry by
entry (Papyan, 2019),

| loss | $S$ |
|---|---|
| `MSELoss` | $I$ |
| `CrossEntropyLoss` | $\mathrm{diag}(\sqrt{\sigma}) - \sigma \sqrt{\sigma}^\top$ |

The label does not appear, unless the loss weighs it: a target that puts mass $p_k$ on
class $k$, whose weight is $w_k$, has the Hessian above times $\sum_k w_k p_k$, and $S$
times the square root of that. This covers class weights, ignored labels (no mass),
label smoothing and probability targets.

Implements: symmetric factorizations of both losses' Hessians (chapter 2, "The
Generalized Gauss-Newton").
"""

from torch import Tensor, diag, outer, tensordot, where, zeros, zeros_like
from torch.nn import CrossEntropyLoss, MSELoss

from kfs.basics._checks import check_datum, check_loss
from kfs.basics.hessian_mse_loss import mse_hessian
from kfs.basics.reduction_factors import Loss
from kfs.errors import LossError


def hessian_factor(loss: Loss, prediction: Tensor, target: Tensor) -> Tensor:
    """Compute `S` such that `S S^T` is the criterion's Hessian for one prediction.

    Args:
        loss: A `MSELoss` or `CrossEntropyLoss`.
        prediction: One example's prediction, shape `[...]` (square loss) or `[C, ...]`
            (cross-entropy).
        target: Its target. It matters only if it is weighted, ignored or smoothed.

    Returns:
        A tensor of shape `[*prediction.shape, *prediction.shape]`: first the indices of
        rows, then those of columns.

    Raises:
        LossError: If the loss is another one, or is not reduced.

    Example:
        >>> import torch
        >>> S = hessian_factor(CrossEntropyLoss(), torch.zeros(2), torch.tensor(0))
        >>> S @ S.T
        tensor([[ 0.25, -0.25],
                [-0.25,  0.25]])
    """
    check_loss(loss)
    check_datum(loss, prediction, target)
    f = prediction.detach()
    if isinstance(loss, MSELoss):
        return mse_hessian(f)
    sigma = f.softmax(0).reshape(f.shape[0], -1)  # [C, positions]
    mass = _mass(loss, f, target).flatten()
    S = zeros(*sigma.shape, *sigma.shape, dtype=f.dtype, device=f.device)
    for position, (s, m) in enumerate(zip(sigma.T, mass, strict=True)):
        S[:, position, :, position] = m.sqrt() * (diag(s.sqrt()) - outer(s, s.sqrt()))
    return S.reshape((*f.shape, *f.shape))


def _mass(loss: CrossEntropyLoss, f: Tensor, target: Tensor) -> Tensor:
    """Return the mass `sum_k w_k p_k` of the target, per position: `[...]`."""
    if target.is_floating_point():
        counts, p = f.new_ones(target.shape[1:]), target.detach().to(f.dtype)
    else:
        counts = (target != loss.ignore_index).to(f.dtype)
        labels = where(target != loss.ignore_index, target, 0)
        p = zeros_like(f).scatter(0, labels.unsqueeze(0), 1.0)
    p = (1 - loss.label_smoothing) * p + loss.label_smoothing / f.shape[0]
    w = f.new_ones(f.shape[0]) if loss.weight is None else loss.weight
    mass: Tensor = counts * tensordot(w, p, dims=1)
    if (mass < 0).any():
        raise LossError(
            "The target has a negative mass (a negative class weight or probability), "
            "so no real factor exists.",
            "Use weights and probabilities that are not negative.",
        )
    return mass


if __name__ == "__main__":
    import torch

    from kfs.basics.flattening import cvec, matricize, rvec
    from kfs.basics.hessians import hessian, vec_hessian
    from kfs.basics.reduction_factors import criterion
    from kfs.verification import verify

    torch.manual_seed(0)
    f = torch.randn(4, dtype=torch.float64, requires_grad=True)
    for loss, y in (
        (MSELoss(), torch.randn(4, dtype=torch.float64)),
        (CrossEntropyLoss(), torch.tensor(2)),
    ):
        S = hessian_factor(loss, f, y)
        verify(
            "S S^T is the Hessian",
            S @ S.T,
            hessian(criterion(loss)(f, y), f),
            case=str(loss),
        )

    f = torch.randn(
        3, 2, 2, dtype=torch.float64, requires_grad=True
    )  # 3 classes at 2 x 2 positions
    labels = torch.tensor([[0, 2], [-100, 1]])
    weight = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    for name, loss, y in (
        ("square loss", MSELoss(), torch.randn_like(f)),
        ("cross-entropy", CrossEntropyLoss(), labels.clamp(min=0)),
        (
            "weighted, smoothed, one label ignored",
            CrossEntropyLoss(weight, label_smoothing=0.1),
            labels,
        ),
        (
            "probability targets",
            CrossEntropyLoss(weight),
            torch.rand_like(f).softmax(0),
        ),
    ):
        S = hessian_factor(loss, f, y)
        for vec in (cvec, rvec):
            S_vec = matricize(S, f.ndim, vec)
            H_vec = vec_hessian(criterion(loss)(f, y), f, vec=vec)
            case = f"{name}, {vec.__name__}"
            verify(
                "S S^T is the Hessian for tensor-valued predictions",
                S_vec @ S_vec.T,
                H_vec,
                case=case,
            )
