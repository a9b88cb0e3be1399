r"""The Monte Carlo Fisher: curvature from labels that the network draws itself.

The type-I Fisher is the covariance of the log-likelihood's gradient, for labels that
follow the *network's own* predictive distribution $r(y \mid f_n)$. The Monte Carlo
version replaces that expectation by an average over $M$ draws,

$$
\tilde{F}(\theta)
  = \frac{R}{M} \sum_{n=1}^N \sum_{m=1}^M \tilde{g}_{n,m} \tilde{g}_{n,m}^\top,
\qquad
\tilde{g}_{n,m} = \nabla_\theta\, c(f_n, \tilde{y}_{n,m}),
\quad \tilde{y}_{n,m} \sim r(y \mid f_n).
$$

The $\tilde{g}$ are *would-be gradients*: gradients for labels that the network draws.
As a sum of outer products, the matrix is positive semi-definite. Only first derivatives
are needed.

The derivation via the KL divergence gives a factor $1/N$ in place of $R$. We use the
reduction factor of the loss, so that every matrix in this package approximates the
curvature of the same empirical risk. Labels are drawn example by example from one
seeded stream, so they change if `mc_samples` or the order of the data does.

Implements: Monte Carlo-approximated type-I Fisher (chapter 2, "The Fisher").
"""

from torch import Generator, Tensor, enable_grad, tensordot
from torch.nn import Module

from kfs.basics._checks import check_draws
from kfs.basics._per_datum import (
    Params,
    check_data,
    empty_block,
    gradients,
    parameter_pair,
)
from kfs.basics.flattening import Vec, check_vec, matricize, rvec
from kfs.basics.label_sampling import hide_ignored, sample_label
from kfs.basics.reduction_factors import Loss, criterion, reduction_factor


@enable_grad()
def mc_fisher(
    model: Module,
    loss: Loss,
    X: Tensor,
    y: Tensor,
    params: Params,
    mc_samples: int = 1,
    seed: int = 0,
) -> Tensor:
    """Compute the Monte Carlo Fisher tensor with respect to one parameter, or a pair.

    Args:
        model: The network, a function of one example (no batch normalization or dropout
            in training mode).
        loss: A `MSELoss` or `CrossEntropyLoss`, the latter without class weights and
            label smoothing.
        X: All inputs, stacked along the first axis.
        y: All targets, likewise. They matter only for the reduction factor and for
            labels that are ignored.
        params: A parameter of the model or its name; or two of them, for rows and for
            columns.
        mc_samples: How many labels to draw per example.
        seed: Equal seeds give equal draws. PyTorch's global generator is not used.

    Returns:
        A tensor of shape `[*rows.shape, *columns.shape]`.

    Raises:
        LossError: If the loss is not supported here.
        ModelError: If the model is not a function of one example, or has no such
            parameter.
        GraphError: If the parameter is frozen or not used.
        DataError: If data or targets do not fit.

    Example:
        >>> import torch
        >>> model, X, y = torch.nn.Linear(3, 2), torch.rand(5, 3), torch.rand(5, 2)
        >>> mc_fisher(model, torch.nn.MSELoss(), X, y, ("weight", "bias")).shape
        torch.Size([2, 3, 2])
    """
    check_draws(mc_samples, seed)
    rows, columns = parameter_pair(model, params)
    check_data(model, loss, X, y, (rows, columns))
    c, R = criterion(loss), reduction_factor(loss, y)
    generator = Generator(rows.device).manual_seed(seed)

    F = empty_block(rows, columns)
    for x_n, y_n in zip(X, y, strict=True):
        f_n = model(x_n.unsqueeze(0))[0]
        for _ in range(mc_samples):
            label = hide_ignored(loss, sample_label(loss, f_n, generator), y_n)
            g1, g2 = gradients(c(f_n, label), rows, columns)
            F += tensordot(g1, g2, dims=0)
    return R / mc_samples * F


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
        params: A parameter of the model or its name; or two of them, for rows and for
            columns.
        mc_samples: How many labels to draw per example.
        seed: Equal seeds give equal draws.
        vec: The flattening of both parameters, `cvec` or `rvec`.

    Returns:
        A matrix of shape `[rows.numel(), columns.numel()]`.
    """
    check_vec(vec)
    rows, _ = parameter_pair(model, params)
    F = mc_fisher(model, loss, X, y, params, mc_samples, seed)
    return matricize(F, rows.ndim, vec)


if __name__ == "__main__":
    import torch
    from torch.nn import CrossEntropyLoss, Linear, MSELoss, Sequential, Tanh

    from kfs.basics.emp_fishers import empirical_fisher
    from kfs.basics.flattening import cvec
    from kfs.basics.ggns import vec_ggn
    from kfs.verification import verify, verify_at_most, verify_psd

    torch.manual_seed(0)
    N, M = 4, 100
    first, last = Linear(2, 2), Linear(2, 3)
    model = Sequential(first, Tanh(), last).double()
    W, b = first.weight, first.bias
    X, values = torch.randn(N, 2, dtype=torch.float64), torch.randn(N, 3).double()
    labels = torch.tensor([2, 0, -100, 1])  # PyTorch's ignore_index: one is missing

    for reduction, vec in (("mean", cvec), ("sum", rvec)):
        for loss, y in (
            (MSELoss(reduction=reduction), values),
            (CrossEntropyLoss(reduction=reduction), labels),
        ):
            case = f"{loss}, {reduction}, {vec.__name__}"
            prediction = model(X)
            F = vec_mc_fisher(model, loss, X, y, W, M, vec=vec)
            G = vec_ggn(loss(prediction, y), prediction, W, vec=vec)
            error = ((F - G).norm() / G.norm()).item()
            claim = f"{M} draws come close to the exact Fisher"
            # The relative error of an average of M draws is about sqrt(2 / M), since
            # the variance of a squared normal is 2. Allow three times that.
            verify_at_most(claim, error, 3 * (2 / M) ** 0.5, case)
            verify_psd("the matrix has no negative eigenvalue", F, case=case)

            # Draw the same labels again, from the same stream.
            generator = Generator().manual_seed(7)
            labels_n = [
                torch.stack([sample_label(loss, f_n, generator) for _ in range(3)])
                for f_n in prediction
            ]
            drawn = torch.stack(labels_n, 1)  # [draws, N, ...]
            drawn = hide_ignored(loss, drawn, y.expand_as(drawn))
            of_draws = [empirical_fisher(model, loss, X, y_m, (W, b)) for y_m in drawn]
            verify(
                "the average of the empirical Fishers of drawn labels",
                mc_fisher(model, loss, X, y, (W, b), mc_samples=3, seed=7),
                torch.stack(of_draws).mean(0),
                case=case,
            )
