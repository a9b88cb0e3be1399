r"""The Hessian of the square-loss criterion.

With a prediction $f$ and a target $y$ of any common shape, the criterion
$c(f, y) = \tfrac12 \lVert f - y \rVert^2$ has the gradient $f - y$ and, as Hessian, the
identity,

$$
\mathrm{H}_f\, c(f, y) = I.
$$

It depends neither on the target nor on the prediction. PyTorch's `MSELoss` has no
factor of one half; the missing two is part of its reduction factor.

Implements: square loss Hessian (chapter 2, "Hessians, HVPs").
"""

from torch import Tensor, eye

from kfs.basics._checks import check_floating


def mse_hessian(prediction: Tensor) -> Tensor:
    """Return the Hessian of the square-loss criterion of one example in closed form.

    Args:
        prediction: One example's prediction, shape `[...]`.

    Returns:
        The identity, a tensor of shape `[*prediction.shape, *prediction.shape]`.

    Example:
        >>> import torch
        >>> mse_hessian(torch.zeros(2))
        tensor([[1., 0.],
                [0., 1.]])
    """
    check_floating("prediction", prediction)
    identity = eye(prediction.numel(), dtype=prediction.dtype, device=prediction.device)
    return identity.reshape((*prediction.shape, *prediction.shape))


if __name__ == "__main__":
    import torch
    from torch.nn import MSELoss

    from kfs.basics.hessians import hessian
    from kfs.basics.reduction_factors import criterion, reduction_factor
    from kfs.verification import verify

    torch.manual_seed(0)
    c = criterion(MSELoss())
    for shape in ((4,), (2, 3), (2, 1, 2)):
        f = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        y = torch.randn(shape, dtype=torch.float64)
        verify(
            "the closed form equals autodiff",
            mse_hessian(f),
            hessian(c(f, y), f),
            case=f"shape {list(shape)}",
        )
        for reduction in ("mean", "sum"):
            loss = MSELoss(reduction=reduction)
            R = reduction_factor(loss, y.unsqueeze(0))
            verify(
                "the Hessian of PyTorch's loss is R times it",
                hessian(loss(f.unsqueeze(0), y.unsqueeze(0)), f),
                R * mse_hessian(f),
                case=f"{reduction}, shape {list(shape)}",
            )
