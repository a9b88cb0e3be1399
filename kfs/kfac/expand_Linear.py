r"""KFAC for a linear layer without weight sharing: the rule that everything else generalises.

A linear layer maps $x_n$ to $z_n = W x_n$. With $g_{n,c}$ the backpropagated vectors at its output, the curvature is
a sum of Kronecker products, which KFAC approximates by one:

$$
C(\mathrm{cvec}\, W) = R \sum_{n,c} x_n x_n^\top \otimes g_{n,c} g_{n,c}^\top
\approx
\underbrace{\Big( R \sum_n x_n x_n^\top \Big)}_{A}
\otimes
\underbrace{\Big( \frac{1}{N} \sum_{n,c} g_{n,c} g_{n,c}^\top \Big)}_{B}.
$$

In `rvec` the factors change places. A bias is one more column of $W$, with one more input that is always one. The two
are equal if all $x_n$ are, or all $g_{n,c}$: in particular for one datum. The engine computes the same factors for
every operation; see `scaffold`.

Implements: KFAC for a linear layer without weight sharing (chapter 4).
"""

from torch import Tensor, cat, einsum, kron, ones

from kfs.basics.flattening import Vec, check_vec, cvec


def input_factor(x: Tensor, reduction_factor: float, bias: bool = False) -> Tensor:
    """Compute the input-based factor `A`.

    Args:
        x: The layer's inputs, shape `[N, d_in]`.
        reduction_factor: `R`.
        bias: Whether to append a one to every input.

    Returns:
        A matrix of shape `[d_in, d_in]`, with one more row and column for a bias.
    """
    if bias:
        x = cat([x, ones(len(x), 1, dtype=x.dtype, device=x.device)], dim=1)
    return reduction_factor * einsum("ni,nj->ij", x, x)


def gradient_factor(g: Tensor) -> Tensor:
    """Compute the gradient-based factor `B`.

    Args:
        g: Backpropagated vectors at the layer's output, shape `[columns, N, d_out]`.

    Returns:
        A matrix of shape `[d_out, d_out]`.
    """
    return einsum("cni,cnj->ij", g, g) / g.shape[1]


def kfac_block(A: Tensor, B: Tensor, vec: Vec) -> Tensor:
    """Put the two factors together, for a flattening of the weight.

    Args:
        A: The input-based factor.
        B: The gradient-based factor.
        vec: `cvec` or `rvec`.

    Returns:
        A matrix of shape `[d_out * d_in, d_out * d_in]`.
    """
    check_vec(vec)
    return kron(A, B) if vec is cvec else kron(B, A)


if __name__ == "__main__":
    import torch
    from torch.autograd import grad
    from torch.nn import Linear, MSELoss, Sequential, Tanh

    from kfs.basics.flattening import rvec
    from kfs.basics.ggns import vec_ggn
    from kfs.kfac import KFAC
    from kfs.risk import EmpiricalRisk
    from kfs.verification import verify, verify_differs

    torch.manual_seed(0)
    layer, head, loss = Linear(4, 3, bias=False).double(), Linear(3, 2).double(), MSELoss(reduction="sum")
    for N in (1, 5):
        X, y = torch.randn(N, 4, dtype=torch.float64), torch.randn(N, 2, dtype=torch.float64)
        z = layer(X)
        f = head(z.tanh())
        # For this loss, R = 2 (it has no factor 1/2), and the criterion's Hessian is the identity: send its columns
        # back.
        columns = torch.eye(2, dtype=torch.float64).unsqueeze(1).expand(2, N, 2)
        g = torch.stack([grad(f, z, column, retain_graph=True)[0] for column in columns])
        A, B = input_factor(X, 2.0), gradient_factor(g)

        model = Sequential(layer, Tanh(), head)
        K = KFAC(EmpiricalRisk(model, loss, (X, y), params=["0.weight"]))
        verify("the engine computes the same input-based factor", K.blocks["0.weight"].A, A, case=f"{N} data")
        verify("the engine computes the same gradient-based factor", K.blocks["0.weight"].B, B, case=f"{N} data")
        for vec in (cvec, rvec):
            G, block = vec_ggn(loss(f, y), f, layer.weight, vec=vec), kfac_block(A, B, vec)
            name = vec.__name__
            if N == 1:
                verify("for one datum, KFAC equals the GGN", block, G, case=name)
                other = rvec if vec is cvec else cvec
                verify_differs(
                    "the other flattening's order of factors is wrong", kfac_block(A, B, other), G, case=name
                )
            else:
                verify_differs("for several data, KFAC is an approximation", block, G, case=name)
