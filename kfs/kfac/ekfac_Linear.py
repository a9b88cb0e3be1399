r"""EKFAC for a linear layer: KFAC's eigenvectors, with the right eigenvalues.

KFAC approximates the curvature of a linear layer by a Kronecker product of $A$ and $B$
(`expand_Linear`). With $A = Q_A \Lambda_A Q_A^\top$ and $B = Q_B \Lambda_B Q_B^\top$,
the product has eigenvectors $Q_A \otimes Q_B$ in `cvec`, and its eigenvalues are
products of eigenvalues. EKFAC (George et al., 2018) keeps the eigenvectors. It replaces
each eigenvalue by the curvature along its eigenvector: the sum of squared gradients,
in these coordinates. With $G_{n,c} = \sum_s g_{n,s,c}\, x_{n,s}^\top$, the gradient of
$\blacktriangle_{n,c}^\top f_n$ with respect to $W$, and with squares of entries,

$$
\Lambda = R \sum_{n,c} \left( Q_B^\top G_{n,c}\, Q_A \right)^{\odot 2},
\qquad
C(\mathrm{cvec}\, W) \approx
(Q_A \otimes Q_B)\, \mathrm{diag}(\mathrm{cvec}\, \Lambda)\, (Q_A \otimes Q_B)^\top .
$$

For given eigenvectors $Q$, this is the best choice. The Frobenius norm does not change
if a matrix is rotated, so the squared error of eigenvalues $\lambda$ is
$\lVert Q^\top C Q - \mathrm{diag}(\lambda) \rVert_F^2$. Entries beside the diagonal
do not depend on $\lambda$. Those on the diagonal vanish if $\lambda$ is the diagonal of
$Q^\top C Q$, which is what the sums of squares are. With other eigenvalues,
$\lambda + d$, the squared error is larger by $\lVert d \rVert^2$. KFAC's eigenvalues
are of this kind. So EKFAC is never farther from $C$ than KFAC. It has the trace of $C$.

EKFAC needs both factors first, and then their eigenvectors: the data are visited twice.
The engine's EKFAC is in `kfs/factors/ekfac.py`.

Implements: eigenvalue-corrected KFAC (chapter "Conclusion & Outlook": the paper
describes it in words and leaves it to future versions).
"""

from torch import Tensor, diag
from torch.linalg import eigh

from kfs.basics.flattening import Vec, check_vec
from kfs.basics.jacobians_linear_layer import append_one
from kfs.kfac.expand_Linear import kfac_block


def eigenvectors(A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eigenvectors of both factors, as columns of `Q_A` and `Q_B`."""
    return eigh(A).eigenvectors, eigh(B).eigenvectors


def corrected_eigenvalues(
    x: Tensor,
    g: Tensor,
    Q_A: Tensor,
    Q_B: Tensor,
    reduction_factor: float,
    bias: bool = False,
) -> Tensor:
    """Compute the curvature along all eigenvectors, `[d_out, d_in]`.

    Args:
        x: Inputs, `[batch, shared, d_in]`. A bias appends a one to each of them.
        g: Vectors at the layer's output, `[columns, batch, shared, d_out]`.
        Q_A: Eigenvectors of the input-based factor.
        Q_B: Eigenvectors of the gradient-based factor.
        reduction_factor: Scale of the loss.
        bias: Whether the layer has a bias.
    """
    C, N, S, _ = g.shape
    eigenvalues = x.new_zeros(len(Q_B), len(Q_A))
    for n in range(N):
        for c in range(C):
            G_nc = x.new_zeros(len(Q_B), len(Q_A))
            for s in range(S):
                x_ns = append_one(x[n, s]) if bias else x[n, s]
                G_nc += g[c, n, s].outer(x_ns)
            eigenvalues += (Q_B.T @ G_nc @ Q_A) ** 2
    return reduction_factor * eigenvalues


def ekfac_block(Q_A: Tensor, Q_B: Tensor, eigenvalues: Tensor, vec: Vec) -> Tensor:
    """Return the approximation of a block, for `W` flattened by `vec`."""
    vec = check_vec(vec)
    Q = kfac_block(Q_A, Q_B, vec)  # Q_A (x) Q_B in cvec, Q_B (x) Q_A in rvec
    return Q @ diag(vec(eigenvalues)) @ Q.T


if __name__ == "__main__":
    import torch
    from torch.nn import CrossEntropyLoss, Flatten, Linear, MSELoss, Sequential, Tanh
    from torch.nn.functional import linear

    from kfs import EKFAC, EmpiricalRisk
    from kfs.basics.flattening import cvec, rvec
    from kfs.basics.ggns import vec_ggn
    from kfs.basics.reduction_factors import Loss, reduction_factor
    from kfs.kfac.backpropagated_vectors import backpropagated_vectors, send_back
    from kfs.kfac.expand_Linear import gradient_factor, input_factor
    from kfs.verification import one_row_per_claim, verify, verify_that

    def squared_error(approximation: Tensor, C: Tensor) -> Tensor:
        """Compute the squared Frobenius norm of the difference."""
        return (approximation - C).square().sum()

    def check(loss: Loss, y: Tensor, S: int) -> None:
        """Compare with the GGN, with other eigenvalues, and with the engine."""
        case = f"{len(y)} examples, {S} positions, {loss}, {loss.reduction}"
        layer = Linear(4, 3).double()
        after = Sequential(Tanh(), Flatten(), Linear(3 * S, 3), Tanh()).double()
        X = torch.randn(len(y), S, 4, dtype=torch.float64)
        W = torch.cat([layer.weight, layer.bias.unsqueeze(1)], dim=1)  # (W b)
        z = linear(X, W[:, :-1], W[:, -1])
        f, R = after(z), reduction_factor(loss, y)
        (g,) = send_back(backpropagated_vectors(loss, f, y), f, [z])
        A, B = input_factor(X, R, bias=True), gradient_factor(g)
        Q_A, Q_B = eigenvectors(A, B)
        eigenvalues = corrected_eigenvalues(X, g, Q_A, Q_B, R, bias=True)
        for vec in (cvec, rvec):
            here = f"{case}, {vec.__name__}"
            C = vec_ggn(loss(f, y), f, W, vec=vec)
            E = ekfac_block(Q_A, Q_B, eigenvalues, vec)
            Q = kfac_block(Q_A, Q_B, vec)
            claim = "eigenvalues are the diagonal of the GGN in the eigenbasis"
            verify(claim, vec(eigenvalues), (Q.T @ C @ Q).diag(), case=here)
            verify("the trace is that of the GGN", E.trace(), C.trace(), case=here)

            least = squared_error(E, C)
            for d in torch.eye(15, dtype=torch.float64).reshape(15, 3, 5):
                other = ekfac_block(Q_A, Q_B, eigenvalues + 0.1 * d, vec)
                claim = "one eigenvalue changed by 0.1: the squared error grows by 0.01"
                verify(claim, squared_error(other, C), least + 0.01, case=here)
            d = torch.randn_like(eigenvalues)
            other = ekfac_block(Q_A, Q_B, eigenvalues + d, vec)
            claim = "all of them changed by d: it grows by |d|^2"
            verify(claim, squared_error(other, C), least + d.square().sum(), case=here)
            K = kfac_block(A, B, vec)
            rotated = Q.T @ K @ Q
            claim = "KFAC has the same eigenvectors, so it is one of the others"
            verify(claim, rotated, torch.diag(rotated.diag()), case=here)
            claim = "KFAC is farther from the GGN"
            verify_that(claim, bool(squared_error(K, C) > 1.01 * least), here)

        risk = EmpiricalRisk(Sequential(layer, after), loss, (X, y))
        names = ["0.weight", "0.bias"]
        engine = EKFAC(risk).submatrix(names).to_dense("cvec")
        listing = ekfac_block(Q_A, Q_B, eigenvalues, cvec)
        verify("the engine computes the same", engine, listing, case=case)

    torch.manual_seed(0)
    values, labels = torch.randn(6, 3, dtype=torch.float64), torch.arange(6) % 3
    with one_row_per_claim():
        for reduction in ("mean", "sum"):
            for S in (1, 2):
                check(MSELoss(reduction=reduction), values, S)
                check(CrossEntropyLoss(reduction=reduction), labels, S)
