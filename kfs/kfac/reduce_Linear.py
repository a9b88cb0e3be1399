r"""KFAC for a linear layer, with weight sharing `reduce`: positions are summed first.

A linear layer maps inputs $x_{n,s}$ to $z_{n,s} = W x_{n,s}$, with one weight for all
data $n$ and for all $S$ positions $s$ of an example. Suppose that the network adds up
or averages positions later, so that it sees only $\sum_s z_{n,s} = W \sum_s x_{n,s}$.
Then the layer is one without weight sharing, whose input is $\sum_s x_{n,s}$. The
vectors $g_{n,s,c}$ that come back are the same at all positions of an example, so each
is their mean, $\tfrac{1}{S} \sum_s g_{n,s,c}$. KFAC for such a layer is

$$
A = R \sum_n \Big( \sum_s x_{n,s} \Big) \Big( \sum_s x_{n,s} \Big)^\top
\qquad
B = \frac{1}{N S^2} \sum_{n,c}
\Big( \sum_s g_{n,s,c} \Big) \Big( \sum_s g_{n,s,c} \Big)^\top .
$$

KFAC-reduce uses these formulas for every network: it sums over positions before it
takes outer products. A bias appends a one at every position; their sum is $S$.

It is exact for a linear net with square loss that sums or averages over positions. For
one example the rest of the net may be nonlinear, as long as the sum comes first. If
every position has a loss term of its own, use `expand_Linear`. With one position both
are the same.

Implements: KFAC-reduce for a linear layer (chapter "Conclusion & Outlook", "KFAC for
linear layers with weight sharing": the paper describes it in words and leaves it to
future versions; Eschenhagen et al., 2023).
"""

from torch import Tensor, outer

from kfs.basics.jacobians_linear_layer import append_one


def input_factor(x: Tensor, reduction_factor: float, bias: bool = False) -> Tensor:
    """Compute `A` from inputs `[batch, shared, d_in]`.

    A bias appends a one to every input.
    """
    N, S, d_in = x.shape
    A = x.new_zeros(d_in + bias, d_in + bias)
    for n in range(N):
        x_n = x.new_zeros(d_in + bias)
        for s in range(S):
            x_n += append_one(x[n, s]) if bias else x[n, s]
        A += outer(x_n, x_n)
    return reduction_factor * A


def gradient_factor(g: Tensor) -> Tensor:
    """Compute `B` from vectors `[columns, batch, shared, d_out]` at the output."""
    C, N, S, d_out = g.shape
    B = g.new_zeros(d_out, d_out)
    for n in range(N):
        for c in range(C):
            g_nc = g.new_zeros(d_out)
            for s in range(S):
                g_nc += g[c, n, s]
            B += outer(g_nc, g_nc)
    return B / (N * S**2)


if __name__ == "__main__":
    from functools import partial

    import torch
    from torch import nn

    from kfs.basics.flattening import rvec
    from kfs.basics.ggns import vec_ggn
    from kfs.basics.reduction_factors import Loss, reduction_factor
    from kfs.kfac._checks import verify_layer
    from kfs.kfac.backpropagated_vectors import backpropagated_vectors, send_back
    from kfs.kfac.expand_Linear import kfac_block
    from kfs.problem.risk import EmpiricalRisk
    from kfs.verification import one_row_per_claim, verify

    def check(
        case: str, loss: Loss, y: Tensor, activation: nn.Module, exact: bool
    ) -> None:
        """Compute both factors, and verify them."""
        layer, mean = nn.Linear(4, 5).double(), nn.AvgPool2d((5, 1))  # five positions
        rest = nn.Sequential(mean, nn.Flatten(), activation, nn.Linear(5, 3)).double()
        X = 2 * torch.randn(len(y), 5, 4, dtype=torch.float64)
        W = torch.cat([layer.weight, layer.bias.unsqueeze(1)], dim=1)  # (W b)
        z = nn.functional.linear(X, W[:, :-1], W[:, -1])
        f = rest(z)
        R = reduction_factor(loss, y)
        A = input_factor(X, R, bias=True)
        (g,) = send_back(backpropagated_vectors(loss, f, y), f, [z])
        B = gradient_factor(g)
        case = f"{case}, {loss}, {loss.reduction}"
        claim = "without a bias, A lacks a row and a column"
        verify(claim, input_factor(X, R), A[:-1, :-1], case=case)
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
            check("one example", square, values[:1], nn.Tanh(), exact=True)
            check("one example", cross_entropy, labels[:1], nn.Tanh(), exact=True)
            check("linear net that averages", square, values, nn.Identity(), exact=True)
            check("nonlinear net", square, values, nn.Tanh(), exact=False)
            check("nonlinear net", cross_entropy, labels, nn.Tanh(), exact=False)
