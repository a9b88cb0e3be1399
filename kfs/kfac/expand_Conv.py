r"""KFAC for a convolution, with weight sharing `expand`: a linear layer on patches.

At each output position $s$ a convolution cuts a patch out of the image, with as many
pixels as its kernel has, and multiplies the flattened patch $x_{n,s}$ with the
flattened kernel: $z_{n,s} = W x_{n,s}$. All positions share one weight. So only the
patches are new, and the rule is that of `expand_Linear`:

$$
A = R \sum_{n,s} x_{n,s} x_{n,s}^\top
\qquad
B = \frac{1}{N S} \sum_{n,s,c} g_{n,s,c} g_{n,s,c}^\top .
$$

An entry of a patch has three indices, in PyTorch's order: channel, row and column
within the kernel. Row $i$ of the kernel meets row $t_s + i\, d$ of the image, where
$t_s$ is the top row of position $s$ and $d$ is the dilation. The next position below
starts one stride further down. Padding surrounds the image with zeros. A convolution
with groups is several convolutions side by side, each with channels and factors of its
own.

KFAC-expand is exact for one example with one position, and for a linear net with square
loss that makes a prediction at every position. If positions are averaged before the
loss, as in most image classifiers, use `reduce_Conv`.

Implements: KFAC-expand for a convolution (chapter "Conclusion & Outlook", "KFAC for
linear layers with weight sharing": the paper names convolutions and leaves them to
future versions; Grosse and Martens, 2016).
"""

from itertools import product
from typing import NamedTuple

from torch import Tensor

from kfs.kfac import expand_Linear

Pair = tuple[int, int]


class Window(NamedTuple):
    """The pixels that an output position reads: rows and columns, as in `Conv2d`."""

    kernel_size: Pair
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)


def corners(image: Tensor, window: Window) -> list[Pair]:
    """Return row and column of the upper left pixel of every output position.

    They are negative in the padding.
    """
    axes = zip(image.shape[2:], *window, strict=True)
    tops, lefts = (
        range(-p, size + p - d * (k - 1), stride) for size, k, stride, p, d in axes
    )
    return list(product(tops, lefts))


def pixel(image: Tensor, row: int, column: int) -> Tensor:
    """Return all channels of one pixel, `[batch, channels]`; zeros in the padding."""
    inside = 0 <= row < image.shape[2] and 0 <= column < image.shape[3]
    return image[:, :, row, column] if inside else image.new_zeros(image.shape[:2])


def patches(image: Tensor, window: Window) -> Tensor:
    """Cut images `[batch, channels, height, width]` into `[batch, shared, d_in]`."""
    positions, dilation = corners(image, window), window.dilation
    x = image.new_zeros(len(image), len(positions), image.shape[1], *window.kernel_size)
    for s, (top, left) in enumerate(positions):
        for i, j in product(*map(range, window.kernel_size)):
            x[:, s, :, i, j] = pixel(
                image, top + i * dilation[0], left + j * dilation[1]
            )
    return x.flatten(2)


def input_factor(
    image: Tensor, window: Window, reduction_factor: float, bias: bool = False
) -> Tensor:
    """Compute `A` for images `[batch, channels, height, width]`."""
    return expand_Linear.input_factor(patches(image, window), reduction_factor, bias)


def gradient_factor(g: Tensor) -> Tensor:
    """Compute `B` for vectors `[columns, batch, channels, height, width]`."""
    g = g.flatten(3).movedim(2, 3)  # [columns, batch, shared, d_out]
    return expand_Linear.gradient_factor(g)


if __name__ == "__main__":
    from functools import partial

    import torch
    from torch.nn import Conv2d, Identity, Module, MSELoss, Sequential, Tanh
    from torch.nn.functional import conv2d

    from kfs.basics.flattening import rvec
    from kfs.basics.ggns import vec_ggn
    from kfs.basics.reduction_factors import reduction_factor
    from kfs.kfac._checks import verify_layer
    from kfs.kfac.backpropagated_vectors import backpropagated_vectors, send_back
    from kfs.kfac.expand_Linear import kfac_block
    from kfs.problem.risk import EmpiricalRisk
    from kfs.verification import one_row_per_claim, verify

    def check(
        case: str, loss: MSELoss, N: int, window: Window, phi: Module, exact: bool
    ) -> None:
        """Compute both factors, and verify them."""
        layer, head = Conv2d(2, 4, *window).double(), Conv2d(4, 3, 1).double()
        X = 2 * torch.randn(N, 2, 5, 6, dtype=torch.float64)
        b = layer.get_parameter("bias")
        W = torch.cat([layer.weight.flatten(1), b.unsqueeze(1)], dim=1)  # (W b)
        z = conv2d(X, W[:, :-1].reshape(layer.weight.shape), W[:, -1], *window[1:])
        f = head(phi(z))
        y = torch.randn_like(f)
        A = input_factor(X, window, reduction_factor(loss, y), bias=True)
        (g,) = send_back(backpropagated_vectors(loss, f, y), f, [z])
        B = gradient_factor(g)
        case = f"{case}, {loss.reduction}"
        product_with_patches = patches(X, window) @ W[:, :-1].T + W[:, -1]
        claim = "a convolution multiplies patches"
        verify(claim, product_with_patches, z.flatten(2).mT, case=case)
        risk = EmpiricalRisk(Sequential(layer, phi, head), loss, (X, y))
        shared = z[0, 0].numel() > 1
        G = vec_ggn(loss(f, y), f, W, vec=rvec)
        kron = partial(kfac_block, vec=rvec)
        verify_layer(case, risk, "expand", A, B, G, exact, shared, kron)

    torch.manual_seed(0)
    # Sizes differ for rows and columns, so that an exchange of the two is noticed.
    one = Window((2, 2), dilation=(4, 5))  # one output position
    several = Window((3, 2), stride=(2, 3), padding=(2, 1), dilation=(2, 3))
    with one_row_per_claim():
        for loss in (MSELoss(), MSELoss(reduction="sum")):
            check("one example, one position", loss, 1, one, Tanh(), exact=True)
            check(
                "linear, a loss per position", loss, 3, several, Identity(), exact=True
            )
            check("nonlinear, several of both", loss, 3, several, Tanh(), exact=False)
