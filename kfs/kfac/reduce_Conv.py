r"""KFAC for a convolution, with weight sharing `reduce`: a layer on summed patches.

As in `expand_Conv`, a convolution multiplies flattened patches with its flattened
kernel, $z_{n,s} = W x_{n,s}$, at all $S$ output positions $s$. As in `reduce_Linear`,
suppose that positions are averaged later. Image classifiers do so just before their
last layer. Then only sums over positions matter:

$$
A = R \sum_n \Big( \sum_s x_{n,s} \Big) \Big( \sum_s x_{n,s} \Big)^\top
\qquad
B = \frac{1}{N S^2} \sum_{n,c}
\Big( \sum_s g_{n,s,c} \Big) \Big( \sum_s g_{n,s,c} \Big)^\top .
$$

The sum of all patches can be computed without patches. Its entry for one channel and
one place in the kernel is the sum of all pixels that this place meets while the kernel
moves over the image. A bias meets a one at every position; their sum is $S$. A
convolution with groups is several convolutions side by side, each with channels and
factors of its own.

KFAC-reduce is exact for a linear net with square loss that averages over positions. For
one example the rest of the net may be nonlinear, as long as the average comes first. If
every position has a loss term of its own, use `expand_Conv`.

Implements: KFAC-reduce for a convolution (chapter "Conclusion & Outlook", "KFAC for
linear layers with weight sharing": the paper names convolutions and leaves them to
future versions; Eschenhagen et al., 2023).
"""

from itertools import product

from torch import Tensor, cat, outer

from kfs.kfac import reduce_Linear
from kfs.kfac.expand_Conv import Window, corners, pixel


def summed_patches(image: Tensor, window: Window) -> Tensor:
    """Sum patches of `[batch, channels, height, width]` over positions.

    Returns:
        The sums, `[batch, d_in]`.
    """
    x, dilation = (
        image.new_zeros(*image.shape[:2], *window.kernel_size),
        window.dilation,
    )
    for i, j in product(*map(range, window.kernel_size)):
        for top, left in corners(image, window):
            x[:, :, i, j] += pixel(image, top + i * dilation[0], left + j * dilation[1])
    return x.flatten(1)


def input_factor(
    image: Tensor, window: Window, reduction_factor: float, bias: bool = False
) -> Tensor:
    """Compute `A` for images `[batch, channels, height, width]`."""
    x = summed_patches(image, window)
    if bias:
        S = len(corners(image, window))
        x = cat([x, x.new_full((len(x), 1), S)], dim=1)
    N, d_in = x.shape
    A = x.new_zeros(d_in, d_in)
    for n in range(N):
        A += outer(x[n], x[n])
    return reduction_factor * A


def gradient_factor(g: Tensor) -> Tensor:
    """Compute `B` for vectors `[columns, batch, channels, height, width]`."""
    g = g.flatten(3).movedim(2, 3)  # [columns, batch, shared, d_out]
    return reduce_Linear.gradient_factor(g)


if __name__ == "__main__":
    from functools import partial

    import torch
    from torch import nn
    from torch.nn.functional import conv2d

    from kfs.basics.flattening import rvec
    from kfs.basics.ggns import vec_ggn
    from kfs.basics.reduction_factors import Loss, reduction_factor
    from kfs.kfac._checks import verify_layer
    from kfs.kfac.backpropagated_vectors import backpropagated_vectors, send_back
    from kfs.kfac.expand_Conv import patches
    from kfs.kfac.expand_Linear import kfac_block
    from kfs.problem.risk import EmpiricalRisk
    from kfs.verification import one_row_per_claim, verify

    # Sizes differ for rows and columns, so that an exchange of the two is noticed.
    window = Window((3, 2), stride=(2, 3), padding=(2, 1), dilation=(2, 3))

    def check(case: str, loss: Loss, y: Tensor, phi: nn.Module, exact: bool) -> None:
        """Compute both factors, and verify them."""
        layer, mean = nn.Conv2d(2, 4, *window).double(), nn.AdaptiveAvgPool2d(1)
        rest = nn.Sequential(mean, nn.Flatten(), phi, nn.Linear(4, 3)).double()
        X = 2 * torch.randn(len(y), 2, 5, 6, dtype=torch.float64)
        b = layer.get_parameter("bias")
        W = torch.cat([layer.weight.flatten(1), b.unsqueeze(1)], dim=1)  # (W b)
        z = conv2d(X, W[:, :-1].reshape(layer.weight.shape), W[:, -1], *window[1:])
        f = rest(z)
        A = input_factor(X, window, reduction_factor(loss, y), bias=True)
        (g,) = send_back(backpropagated_vectors(loss, f, y), f, [z])
        B = gradient_factor(g)
        case = f"{case}, {loss}, {loss.reduction}"
        total = patches(X, window).sum(1)
        claim = "sums over pixels are sums of patches"
        verify(claim, summed_patches(X, window), total, case=case)
        risk = EmpiricalRisk(nn.Sequential(layer, rest), loss, (X, y))
        G = vec_ggn(loss(f, y), f, W, vec=rvec)
        kron = partial(kfac_block, vec=rvec)
        verify_layer(case, risk, "reduce", A, B, G, exact, shared=True, kron=kron)

    torch.manual_seed(0)
    values, labels = torch.randn(4, 3, dtype=torch.float64), torch.tensor([0, 1, 1, 2])
    with one_row_per_claim():
        for reduction in ("mean", "sum"):
            square = nn.MSELoss(reduction=reduction)
            cross_entropy = nn.CrossEntropyLoss(reduction=reduction)
            check("one example", cross_entropy, labels[:1], nn.Tanh(), exact=True)
            check("linear net that averages", square, values, nn.Identity(), exact=True)
            check("nonlinear net", cross_entropy, labels, nn.Tanh(), exact=False)
