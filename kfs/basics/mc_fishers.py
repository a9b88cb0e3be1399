r"""The Monte Carlo Fisher: curvature from labels that the network draws itself.

The type-I Fisher is the covariance of the log-likelihood's gradient, for labels that follow the *network's own*
predictive distribution $r(y \mid f_n)$. The Monte Carlo version replaces that expectation by an average over $M$
draws,

$$
\tilde{F}(\theta) = \frac{R}{M} \sum_{n=1}^N \sum_{m=1}^M \tilde{g}_{n,m} \tilde{g}_{n,m}^\top,
\qquad
\tilde{g}_{n,m} = \nabla_\theta\, c(f_n, \tilde{y}_{n,m}),
\quad \tilde{y}_{n,m} \sim r(y \mid f_n).
$$

The $\tilde{g}$ are *would-be gradients*: gradients for labels that the network draws. As a sum of outer products, the
matrix is positive semi-definite. Only first derivatives are needed.

The derivation via the KL divergence gives a factor $1/N$ in place of $R$. We use the reduction factor of the loss,
so that every matrix in this package approximates the curvature of the same empirical risk. Labels are drawn example
by example from one seeded stream, so they change if `mc_samples` or the order of the data does.

Implements: Monte Carlo-approximated type-I Fisher (chapter 2, "The Fisher").
"""

from collections.abc import Iterator

from torch import Generator, Tensor, enable_grad
from torch.nn import Module

from kfs.basics._per_datum import Pair, Params, gradients, parameter_pair, predictions, sum_of_outer_products
from kfs.basics.flattening import Vec, check_vec, matricize, rvec
from kfs.basics.label_sampling import hide_ignored, sample_label
from kfs.basics.reduction_factors import Loss, criterion, reduction_factor
from kfs.errors import DataError


@enable_grad()
def mc_fisher(
    model: Module, loss: Loss, X: Tensor, y: Tensor, params: Params, mc_samples: int = 1, seed: int = 0
) -> Tensor:
    """Compute the Monte Carlo Fisher tensor with respect to one parameter, or a pair of them.

    Args:
        model: The network, a function of one example (no batch normalization or dropout in training mode).
        loss: A `MSELoss` or `CrossEntropyLoss`, the latter without class weights and label smoothing.
        X: All inputs, stacked along the first axis.
        y: All targets, likewise. They matter only for the reduction factor and for labels that are ignored.
        params: A parameter of the model or its name; or two of them, for rows and for columns.
        mc_samples: How many labels to draw per example.
        seed: Equal seeds give equal draws. PyTorch's global generator is not used.

    Returns:
        A tensor of shape `[*rows.shape, *columns.shape]`.

    Raises:
        LossError: If the loss is not supported here.
        ModelError: If the model is not a function of one example, or has no such parameter.
        GraphError: If the parameter is frozen or not used.
        DataError: If data or targets do not fit.

    Example:
        >>> import torch
        >>> model, X, y = torch.nn.Linear(3, 2), torch.rand(5, 3), torch.rand(5, 2)
        >>> mc_fisher(model, torch.nn.MSELoss(), X, y, ("weight", "bias")).shape
        torch.Size([2, 3, 2])
    """
    pair = parameter_pair(model, params)
    F = sum_of_outer_products(would_be_gradients(model, loss, X, y, pair, mc_samples, seed), pair)
    return reduction_factor(loss, y) / mc_samples * F


def vec_mc_fisher(
    model: Module,
    loss: Loss,
    X: Tensor,
    y: Tensor,
    params: Params,
    mc_samples: int = 1,
    seed: int = 0,
    vec: Vec = rvec,
) -> Tensor:
    """Compute the Monte Carlo Fisher matrix with respect to flattened parameters.

    Args:
        model: The network.
        loss: A `MSELoss` or `CrossEntropyLoss`.
        X: All inputs, stacked along the first axis.
        y: All targets, likewise.
        params: A parameter of the model or its name; or two of them, for rows and for columns.
        mc_samples: How many labels to draw per example.
        seed: Equal seeds give equal draws.
        vec: The flattening of both parameters, `cvec` or `rvec`.

    Returns:
        A matrix of shape `[rows.numel(), columns.numel()]`.
    """
    check_vec(vec)
    rows, _ = parameter_pair(model, params)
    return matricize(mc_fisher(model, loss, X, y, params, mc_samples, seed), rows.ndim, vec)


def would_be_gradients(
    model: Module,
    loss: Loss,
    X: Tensor,
    y: Tensor,
    pair: Pair,
    mc_samples: int,
    seed: int,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield, for each example and each drawn label, the gradients with respect to both parameters."""
    if not isinstance(mc_samples, int) or mc_samples < 1 or not isinstance(seed, int):
        raise DataError(
            f"mc_samples is {mc_samples!r} and seed is {seed!r}, expected integers.",
            "Draw at least one label per example: mc_samples >= 1.",
        )
    c = criterion(loss)
    generator = Generator(pair[0].device).manual_seed(seed)
    for f_n, y_n in predictions(model, loss, X, y, pair):
        for _ in range(mc_samples):
            label = hide_ignored(loss, sample_label(loss, f_n, generator), y_n)
            yield gradients(c(f_n, label), pair)


if __name__ == "__main__":
    import torch
    from torch.nn import CrossEntropyLoss, Linear, MSELoss, Sequential, Tanh

    from kfs.basics.flattening import cvec
    from kfs.basics.ggns import vec_ggn
    from kfs.verification import verify, verify_at_most, verify_psd

    torch.manual_seed(0)
    N, M = 4, 100
    first, last = Linear(2, 2), Linear(2, 2)
    model = Sequential(first, Tanh(), last).double()
    W, b = first.weight, first.bias
    X = torch.randn(N, 2, dtype=torch.float64)

    for loss, y in ((MSELoss(), torch.randn(N, 2, dtype=torch.float64)), (CrossEntropyLoss(), torch.randint(2, (N,)))):
        prediction = model(X)
        for vec in (cvec, rvec):
            F = vec_mc_fisher(model, loss, X, y, W, M, vec=vec)
            G = vec_ggn(loss(prediction, y), prediction, W, vec=vec)
            # The relative error of an average of M draws is about sqrt(2/M) (the variance of a squared normal is 2).
            error = ((F - G).norm() / G.norm()).item()
            case = f"{loss}, {vec.__name__}"
            verify_at_most(f"{M} draws come close to the exact Fisher", error, 3 * (2 / M) ** 0.5, case)
            verify_psd("the matrix has no negative eigenvalue", F, case=case)
        mixed, swapped = (mc_fisher(model, loss, X, y, pair, mc_samples=10, seed=1) for pair in ((W, b), (b, W)))
        verify("off-diagonal blocks are transposes of each other", mixed, swapped.permute(1, 2, 0), case=str(loss))
