r"""The Hessian of the softmax cross-entropy criterion.

With logits $f \in \mathbb{R}^C$ and $\sigma = \mathrm{softmax}(f)$, the criterion
$c(f, y) = -\log\, \sigma_y$ has the gradient $\sigma - \mathrm{onehot}(y)$ and the
Hessian

$$
\mathrm{H}_f\, c(f, y) = \mathrm{diag}(\sigma) - \sigma \sigma^\top.
$$

It is a covariance matrix, that of a one-hot label drawn from $\sigma$, and so positive
semi-definite: the criterion is convex in the logits. The label has disappeared! This
will make the Gauss-Newton matrix equal to the Fisher.

A tensor of logits with shape $[C, \dots]$ predicts one label per position. The
positions do not interact: the Hessian has the block above for each of them and is zero
elsewhere.

Implements: softmax cross-entropy loss Hessian (chapter 2, "Hessians, HVPs").
"""

from torch import Tensor, diag, outer, zeros

from kfs.basics._checks import check_floating, check_logits


def ce_hessian(logits: Tensor) -> Tensor:
    """Return the Hessian of the cross-entropy criterion of one example in closed form.

    Args:
        logits: One example's logits, shape `[C, ...]`.

    Returns:
        A tensor of shape `[C, ..., C, ...]`. It does not depend on the label.

    Raises:
        ShapeError: If there is no class axis.

    Example:
        >>> import torch
        >>> ce_hessian(torch.zeros(2))
        tensor([[ 0.25, -0.25],
                [-0.25,  0.25]])
    """
    check_floating("logits", logits)
    check_logits(logits)
    sigma = logits.detach().softmax(0).reshape(logits.shape[0], -1)  # [C, positions]
    H = zeros(*sigma.shape, *sigma.shape, dtype=sigma.dtype, device=sigma.device)
    for position, s in enumerate(sigma.T):
        H[:, position, :, position] = diag(s) - outer(s, s)
    return H.reshape((*logits.shape, *logits.shape))


if __name__ == "__main__":
    import torch
    from torch.nn import CrossEntropyLoss

    from kfs.basics.flattening import matricize, rvec
    from kfs.basics.hessians import hessian
    from kfs.basics.reduction_factors import criterion
    from kfs.verification import verify, verify_psd

    torch.manual_seed(0)
    c = criterion(CrossEntropyLoss())
    f = torch.randn(4, dtype=torch.float64, requires_grad=True)
    for label in torch.arange(4):
        H = hessian(c(f, label), f)
        verify(
            "the closed form equals autodiff, for every label",
            ce_hessian(f),
            H,
            case=f"label {label}",
        )
    verify_psd("the Hessian has no negative eigenvalue", ce_hessian(f))

    f = torch.randn(3, 2, 2, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(3, (2, 2))
    verify(
        "also for a tensor of labels, one per position",
        ce_hessian(f),
        hessian(c(f, labels), f),
    )
    blocks = matricize(ce_hessian(f), 3, rvec).reshape(3, 4, 3, 4)
    mask = torch.eye(4, dtype=torch.bool).logical_not()
    verify(
        "different positions do not interact",
        blocks.permute(0, 2, 1, 3)[..., mask],
        torch.zeros(3, 3, 12),
    )
