r"""KFAC for a linear layer, with weight sharing `expand`: a position is an example.

A linear layer maps inputs $x_{n,s}$ to $z_{n,s} = W x_{n,s}$, with one weight for all
data $n$ and for all $S$ positions $s$ of an example: words of a sentence, patches of an
image. Without weight sharing, $S = 1$. Let $f_n$ be the network's prediction and
$\blacktriangle_{n,c}$ the vectors that are sent back from it. At the layer's output
they have become $g_{n,s,c}$, which the paper calls *pseudo-gradients*:

$$
g_{n,s,c} = (\mathrm{J}_{z_{n,s}} f_n)^\top \blacktriangle_{n,c},
\qquad
C(\mathrm{cvec}\, W)
= R \sum_{n,c}
\Big( \sum_s x_{n,s} \otimes g_{n,s,c} \Big)
\Big( \sum_s x_{n,s} \otimes g_{n,s,c} \Big)^\top .
$$

KFAC-expand approximates this curvature in two steps. It drops products of different
positions, so that every position counts as a separate example. Then it replaces a sum
of Kronecker products by a single one (`expectation_approximation`), of an input-based
and a gradient-based factor, which the paper calls *grad-output-based*:

$$
C(\mathrm{cvec}\, W)
\approx R \sum_{n,s,c} x_{n,s} x_{n,s}^\top \otimes g_{n,s,c} g_{n,s,c}^\top
\approx
\underbrace{\Big( R \sum_{n,s} x_{n,s} x_{n,s}^\top \Big)}_{A}
\otimes
\underbrace{\Big( \frac{1}{N S} \sum_{n,s,c} g_{n,s,c} g_{n,s,c}^\top \Big)}_{B}.
$$

In `rvec` the factors change places. A bias is one more column of $W$, with one more
input that is always one.

Both steps are exact for one example with one position. They are also exact for a linear
net with square loss that makes a prediction at every position: the first step because a
prediction depends on its own position only, the second because gradients are the same
for all data and positions. If positions are added up before the loss, use
`reduce_Linear`. `scaffold` computes these factors for all layers of a net, and the
engine for every operation.

Implements: KFAC for a linear layer without weight sharing (chapter "KFAC for Linear
Layers (No Weight Sharing)"; Martens and Grosse, 2015), extended to shared positions by
the variant `expand` (chapter "Conclusion & Outlook", "KFAC for linear layers with
weight sharing"; Eschenhagen et al., 2023).
"""

from torch import Tensor, kron, outer

from kfs.basics.flattening import Vec, check_vec, cvec
from kfs.basics.jacobians_linear_layer import append_one


def input_factor(x: Tensor, reduction_factor: float, bias: bool = False) -> Tensor:
    """Compute `A` from inputs `[batch, shared, d_in]`, or `[batch, d_in]`.

    A bias appends a one to every input.
    """
    x = x.reshape(len(x), -1, x.shape[-1])
    N, S, d_in = x.shape
    A = x.new_zeros(d_in + bias, d_in + bias)
    for n in range(N):
        for s in range(S):
            x_ns = append_one(x[n, s]) if bias else x[n, s]
            A += outer(x_ns, x_ns)
    return reduction_factor * A


def gradient_factor(g: Tensor) -> Tensor:
    """Compute `B` from vectors at the layer's output.

    They are `[columns, batch, shared, d_out]`, or `[columns, batch, d_out]`.
    """
    g = g.reshape(*g.shape[:2], -1, g.shape[-1])
    C, N, S, d_out = g.shape
    B = g.new_zeros(d_out, d_out)
    for n in range(N):
        for s in range(S):
            for c in range(C):
                B += outer(g[c, n, s], g[c, n, s])
    return B / (N * S)


def kfac_block(A: Tensor, B: Tensor, vec: Vec) -> Tensor:
    """Return the Kronecker product of both factors, for `W` flattened by `vec`."""
    vec = check_vec(vec)
    return kron(A, B) if vec is cvec else kron(B, A)


if __name__ == "__main__":
    from functools import partial

    import torch
    from torch.nn import Identity, Linear, Module, MSELoss, Sequential, Tanh
    from torch.nn.functional import linear

    from kfs.basics.flattening import rvec
    from kfs.basics.ggns import vec_ggn
    from kfs.basics.reduction_factors import reduction_factor
    from kfs.kfac._checks import verify_layer
    from kfs.kfac.backpropagated_vectors import backpropagated_vectors, send_back
    from kfs.problem.risk import EmpiricalRisk
    from kfs.verification import one_row_per_claim, verify, verify_differs

    def check(
        case: str, loss: MSELoss, N: int, S: int, activation: Module, exact: bool
    ) -> None:
        """Compute both factors, and verify them in both flattenings."""
        layer, head = Linear(4, 5).double(), Linear(5, 3).double()
        X = torch.randn(N, S, 4, dtype=torch.float64)
        y = torch.randn(N, S, 3, dtype=torch.float64)
        W = torch.cat([layer.weight, layer.bias.unsqueeze(1)], dim=1)  # (W b)
        z = linear(X, W[:, :-1], W[:, -1])
        f = head(activation(z))
        R = reduction_factor(loss, y)
        A = input_factor(X, R, bias=True)
        (g,) = send_back(backpropagated_vectors(loss, f, y), f, [z])
        B = gradient_factor(g)
        claim = "without a bias, A lacks a row and a column"
        verify(claim, input_factor(X, R), A[:-1, :-1], case=case)
        risk = EmpiricalRisk(Sequential(layer, activation, head), loss, (X, y))
        for vec, wrong in ((cvec, rvec), (rvec, cvec)):
            setting = f"{case}, {loss.reduction}, {vec.__name__}"
            G = vec_ggn(loss(f, y), f, W, vec=vec)
            kron_of = partial(kfac_block, vec=vec)
            verify_layer(setting, risk, "expand", A, B, G, exact, S > 1, kron_of)
            if exact:
                claim = "the other order of factors does not"
                verify_differs(claim, kfac_block(A, B, wrong), G, case=setting)

    torch.manual_seed(0)
    with one_row_per_claim():
        for loss in (MSELoss(), MSELoss(reduction="sum")):
            check("one example, one position", loss, 1, 1, Tanh(), exact=True)
            check("linear, a loss per position", loss, 4, 3, Identity(), exact=True)
            check("nonlinear, several of both", loss, 4, 3, Tanh(), exact=False)
