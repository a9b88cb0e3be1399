r"""Backpropagated vectors: they determine which curvature matrix is approximated.

The curvature of each example is
$J_n^\top [\sum_c \blacktriangle_{n,c} \blacktriangle_{n,c}^\top] J_n$. The matrix in
the middle belongs to the example's prediction $f_n$, and is small. It is the sum of
outer products of vectors $\blacktriangle_{n,c}$, and each curvature matrix has its own:

| curvature matrix | $\blacktriangle_{n,c}$ | how many |
|---|---|---|
| GGN, type-II Fisher | $[S_n]_{:,c}$ | $\dim f_n$ |
| Monte Carlo Fisher | $\nabla_{f_n} c(f_n, \tilde{y}_{n,m}) / \sqrt{M}$ | $M$ |
| empirical Fisher | $\nabla_{f_n} c(f_n, y_n)$ | 1 |

In closed form, with $\sigma = \mathrm{softmax}(f_n)$ and one-hot $e_k$, they are:

| | square loss | cross-entropy |
|---|---|---|
| $[S_n]_{:,c}$ | $e_c$ | $\sqrt{\sigma_c}\, (e_c - \sigma)$ |
| $\nabla_{f_n} c(f_n, y)$ | $f_n - y$ | $\sigma - e_y$ |

Here $S_n S_n^\top = \mathrm{H}_{f_n} c(f_n, y_n)$, and $\tilde{y}_{n,m}$ are labels
that the model draws. Sent back to a layer's output $z_n$, a vector becomes the
*pseudo-gradient* $g_{n,c} = (\mathrm{J}_{z_n} f_n)^\top \blacktriangle_{n,c}$. For the
empirical Fisher this is the gradient of the example's loss: the backward pass of
training has it already. One drawn label costs as much. All columns of $S_n$ cost
$\dim f_n$ backward passes, for any number of layers.

Implements: backpropagated vectors (chapter "KFAC: An Overview", "Backpropagated
Vectors"). The engine's are in `kfs/factors/compute.py`: for whole batches, other
losses, and two more kinds.
"""

from collections.abc import Callable, Sequence
from math import sqrt

from torch import Generator, Tensor, stack
from torch.autograd import grad

from kfs.basics.hessian_factorizations import hessian_factor
from kfs.basics.label_sampling import hide_ignored, sample_label
from kfs.basics.reduction_factors import Loss, criterion

# From loss, prediction and target of one example to its vectors [columns, *f_n.shape].
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


def mc_vectors(
    loss: Loss,
    f_n: Tensor,
    y_n: Tensor,
    mc_samples: int = 1,
    generator: Generator | None = None,
) -> Tensor:
    """Return gradients for drawn labels, divided by the root of their number."""
    vectors = []
    for _ in range(mc_samples):
        label = hide_ignored(loss, sample_label(loss, f_n, generator), y_n)
        vectors.append(empirical_vectors(loss, f_n, label)[0])
    return stack(vectors) / sqrt(mc_samples)


def backpropagated_vectors(
    loss: Loss, f: Tensor, y: Tensor, vectors: OfDatum = type2_vectors
) -> Tensor:
    """Return vectors `[columns, *f.shape]` for predictions `f` and targets `y`."""
    data = zip(f.detach(), y, strict=True)
    return stack([vectors(loss, f_n, y_n) for f_n, y_n in data], dim=1)


def send_back(V: Tensor, f: Tensor, outputs: Sequence[Tensor]) -> list[Tensor]:
    """Send vectors `[columns, *f.shape]` back to outputs `z`: `[columns, *z.shape]`.

    Each column is one backward pass. A row of `f` depends on its own row of `z` only.
    """
    passes = [grad(f, outputs, column, retain_graph=True) for column in V]
    return [stack(g) for g in zip(*passes, strict=True)]


if __name__ == "__main__":
    from functools import partial

    import torch
    from torch.nn import CrossEntropyLoss, MSELoss

    from kfs.basics.hessians import vec_hessian
    from kfs.factors import compute as engine
    from kfs.factors.settings import Fisher, Settings
    from kfs.losses import describe
    from kfs.verification import one_row_per_claim, verify

    def middle(vectors: Tensor) -> Tensor:
        """Sum outer products of all vectors of every example."""
        return torch.einsum("cni,cnj->nij", vectors, vectors)

    def middle_of_engine(loss: Loss, y: Tensor, fisher: Fisher) -> Tensor:
        """Do the same for the engine's vectors."""
        settings = Settings(fisher=fisher, mc_samples=200)
        of_batch = engine.backpropagated_vectors(describe(loss), f, y, settings, 0, 2)
        return middle(torch.cat(list(of_batch)))

    def closed_form(loss: Loss, f_n: Tensor, y_n: Tensor) -> tuple[Tensor, Tensor]:
        """Return the columns of S as rows, and the gradient, as the cheatsheet does."""
        onehot, sigma = torch.eye(C, dtype=torch.float64), f_n.softmax(0)
        if isinstance(loss, MSELoss):
            return onehot, f_n - y_n
        return sigma.sqrt().unsqueeze(1) * (onehot - sigma), sigma - onehot[y_n]

    def check_cheatsheet(loss: Loss, f_n: Tensor, y_n: Tensor, case: str) -> None:
        """Compare the vectors of one example with their closed form."""
        columns, gradient = closed_form(loss, f_n, y_n)
        claim = "cheatsheet: type-2 vectors are e_c, or sqrt(sigma_c) (e_c - sigma)"
        verify(claim, type2_vectors(loss, f_n, y_n), columns, case=case)
        claim = "cheatsheet: the empirical vector is f - y, or sigma - e_y"
        verify(claim, empirical_vectors(loss, f_n, y_n)[0], gradient, case=case)
        here, there = (Generator().manual_seed(1) for _ in range(2))
        labels = [sample_label(loss, f_n, there) for _ in range(4)]
        expected = torch.stack([closed_form(loss, f_n, y)[1] for y in labels]) / 2
        claim = "cheatsheet: vectors of M drawn labels are the same over sqrt(M)"
        verify(claim, mc_vectors(loss, f_n, y_n, 4, here), expected, case=case)

    def check(loss: Loss, y: Tensor) -> None:
        """Compare all vectors with their definitions, and with the engine's."""
        type2 = middle(backpropagated_vectors(loss, f, y))
        drawn = middle(backpropagated_vectors(loss, f, y, mc_200))
        empirical = middle(backpropagated_vectors(loss, f, y, empirical_vectors))
        for n in range(N):
            f_n = f[n].clone().requires_grad_()
            c = criterion(loss)(f_n, y[n])
            H, (g,) = vec_hessian(c, f_n), grad(c, f_n)
            case = f"{loss}, example {n}"
            claim = "type-2 vectors are a factor of the criterion's Hessian"
            verify(claim, type2[n], H, case=case)
            # The error of 200 draws is about 10 percent; allow four times that.
            claim = "vectors of drawn labels converge to the Hessian"
            verify(claim, drawn[n], H, 0.4, case)
            claim = "the empirical vector is the gradient"
            verify(claim, empirical[n], torch.outer(g, g), case=case)
            check_cheatsheet(loss, f[n], y[n], case)

        # Two layers: their outputs are hidden and the prediction itself.
        V = backpropagated_vectors(loss, f, y)
        hidden = torch.randn(N, 5, dtype=torch.float64, requires_grad=True)
        prediction = hidden @ W.T
        at_hidden, at_prediction = send_back(V, prediction, [hidden, prediction])
        claim = "sent back, they are multiplied by the transposed Jacobian"
        verify(claim, at_hidden, V @ W, case=str(loss))
        claim = "at the prediction, they are as they were"
        verify(claim, at_prediction, V, case=str(loss))

        claim = "the engine's vectors have the same outer products"
        kinds: tuple[Fisher, ...] = ("type-2", "ggn", "empirical")
        for kind, expected in zip(kinds, (type2, type2, empirical), strict=True):
            found = middle_of_engine(loss, y, kind)
            verify(claim, found, expected, case=f"{loss}, {kind}")
        claim = "the engine's draws converge to the Hessian, too"
        verify(claim, middle_of_engine(loss, y, "mc"), type2, 0.4, str(loss))

    torch.manual_seed(0)
    N, C = 3, 4
    f = torch.randn(N, C, dtype=torch.float64)
    W = torch.randn(C, 5, dtype=torch.float64)
    mc_200 = partial(mc_vectors, mc_samples=200)
    with one_row_per_claim():
        check(MSELoss(), torch.randn(N, C, dtype=torch.float64))
        check(CrossEntropyLoss(), torch.arange(N))
