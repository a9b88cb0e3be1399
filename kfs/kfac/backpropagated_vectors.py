r"""Backpropagated vectors $\blacktriangle_{n,c}$: they determine which curvature matrix is approximated.

The curvature of each example is $J_n^\top [\sum_c \blacktriangle_{n,c} \blacktriangle_{n,c}^\top] J_n$. The matrix in
the middle belongs to the example's prediction $f_n$, and is small. Each curvature matrix has its own:

| curvature matrix | $\blacktriangle_{n,c}$ | how many |
|---|---|---|
| GGN, type-II Fisher | columns of $S_n$, where $S_n S_n^\top = \mathrm{H}_{f_n} c(f_n, y_n)$ | $\dim f_n$ |
| Monte Carlo Fisher | $\nabla_{f_n} c(f_n, \tilde{y}_{n,m}) / \sqrt{M}$ for drawn labels $\tilde{y}_{n,m}$ | $M$ |
| empirical Fisher | $\nabla_{f_n} c(f_n, y_n)$ | 1 |

Sent back to a layer's output $z_n$, a vector becomes $g_{n,c} = (\mathrm{J}_{z_n} f_n)^\top \blacktriangle_{n,c}$. For
the empirical Fisher this is the gradient of the example's loss: the backward pass of training has it already. One drawn
label costs as much. All columns of $S_n$ cost $\dim f_n$ backward passes.

Implements: backpropagated vectors (chapter "KFAC: An Overview", "Backpropagated Vectors"). The engine's are in
`kfs/factors/compute.py`: for whole batches, other losses, and two more kinds.
"""

from collections.abc import Callable
from math import sqrt

from torch import Generator, Tensor, stack
from torch.autograd import grad

from kfs.basics.hessian_factorizations import hessian_factor
from kfs.basics.label_sampling import hide_ignored, sample_label
from kfs.basics.reduction_factors import Loss, criterion

# Function from the loss, and prediction and target of one example, to its vectors [columns, *f_n.shape].
OfDatum = Callable[[Loss, Tensor, Tensor], Tensor]


def type2_vectors(loss: Loss, f_n: Tensor, y_n: Tensor) -> Tensor:
    """Return the columns of a symmetric factor of the criterion's Hessian."""
    S = hessian_factor(loss, f_n, y_n)  # [*f_n.shape, *f_n.shape]
    return S.flatten(f_n.ndim).movedim(-1, 0)


def empirical_vectors(loss: Loss, f_n: Tensor, y_n: Tensor) -> Tensor:
    """Return the criterion's gradient, as the only vector."""
    f_n = f_n.detach().requires_grad_()
    (gradient,) = grad(criterion(loss)(f_n, y_n), f_n)
    return gradient.unsqueeze(0)


def mc_vectors(loss: Loss, f_n: Tensor, y_n: Tensor, mc_samples: int = 1, generator: Generator | None = None) -> Tensor:
    """Return gradients for labels that the model draws, divided by the root of their number."""
    labels = [hide_ignored(loss, sample_label(loss, f_n, generator), y_n) for _ in range(mc_samples)]
    gradients = [empirical_vectors(loss, f_n, label)[0] for label in labels]
    return stack(gradients) / sqrt(mc_samples)


def backpropagated_vectors(loss: Loss, f: Tensor, y: Tensor, vectors: OfDatum = type2_vectors) -> Tensor:
    """Return the vectors of all examples, `[columns, *f.shape]`, for predictions `f` and targets `y`."""
    return stack([vectors(loss, f_n.detach(), y_n) for f_n, y_n in zip(f, y, strict=True)], dim=1)


def send_back(vectors: Tensor, f: Tensor, z: Tensor) -> Tensor:
    """Send vectors `[columns, *f.shape]` from predictions back to a layer's output `z`: `[columns, *z.shape]`.

    An example's `f` must depend on its own row of `z` only.
    """
    return stack([grad(f, z, column, retain_graph=True)[0] for column in vectors])


if __name__ == "__main__":
    from functools import partial

    import torch
    from torch.nn import CrossEntropyLoss, MSELoss

    from kfs.basics.hessians import vec_hessian
    from kfs.factors import compute as engine
    from kfs.factors.settings import Fisher, Settings
    from kfs.losses import describe
    from kfs.verification import verify

    def middle(vectors: Tensor) -> Tensor:
        """Sum outer products of all vectors of every example."""
        return torch.einsum("cni,cnj->nij", vectors, vectors)

    def middle_of_engine(loss: Loss, f: Tensor, y: Tensor, fisher: Fisher) -> Tensor:
        """Do the same for the engine's vectors."""
        settings = Settings(fisher=fisher, mc_samples=200)
        return middle(torch.cat(list(engine.backpropagated_vectors(describe(loss), f, y, settings, 0, at_once=2))))

    torch.manual_seed(0)
    N, C, d = 3, 4, 5
    f, W = torch.randn(N, C, dtype=torch.float64), torch.randn(C, d, dtype=torch.float64)
    z = torch.randn(N, d, dtype=torch.float64, requires_grad=True)
    for loss, y in ((MSELoss(), torch.randn(N, C, dtype=torch.float64)), (CrossEntropyLoss(), torch.arange(N))):
        name = type(loss).__name__
        type2 = middle(backpropagated_vectors(loss, f, y))
        drawn = middle(backpropagated_vectors(loss, f, y, partial(mc_vectors, mc_samples=200)))
        empirical = middle(backpropagated_vectors(loss, f, y, empirical_vectors))
        for n in range(N):
            f_n = f[n].clone().requires_grad_()
            c = criterion(loss)(f_n, y[n])
            H, (g,) = vec_hessian(c, f_n), grad(c, f_n)
            case = f"{name}, example {n}"
            verify("type-2 vectors are a factor of the criterion's Hessian", type2[n], H, case=case)
            # The error of 200 draws is about 10 percent; allow three times that.
            verify("vectors of drawn labels converge to the Hessian", drawn[n], H, 0.3, case)
            verify("the empirical vector is the gradient", empirical[n], torch.outer(g, g), case=case)
        V = backpropagated_vectors(loss, f, y)
        verify("sent back, they are multiplied by the transposed Jacobian", send_back(V, z @ W.T, z), V @ W, case=name)

        claim = "the engine's vectors have the same outer products"
        verify(claim, middle_of_engine(loss, f, y, "type-2"), type2, case=f"{name}, type-2")
        verify(claim, middle_of_engine(loss, f, y, "ggn"), type2, case=f"{name}, ggn")
        verify(claim, middle_of_engine(loss, f, y, "empirical"), empirical, case=f"{name}, empirical")
        verify("the engine's draws converge to the Hessian, too", middle_of_engine(loss, f, y, "mc"), type2, 0.3, name)
