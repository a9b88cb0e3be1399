r"""How fast the Monte Carlo Fisher converges.

An average of $M$ independent draws has $1/M$ of the variance of one draw. The Monte
Carlo Fisher $\tilde{F}_M$ is such an average, with the exact Fisher $F$ as its mean, so
its error in the Frobenius norm is

$$
\sqrt{ \mathbb{E} \lVert \tilde{F}_M - F \rVert^2 } = \sqrt{V / M},
$$

$$
V = R^2 \sum_n \Big( \mathbb{E} \lVert g_n g_n^\top \rVert^2
  - \lVert \mathbb{E}\, g_n g_n^\top \rVert^2 \Big).
$$

Four times as many samples halve the error. One sample, as is common in training, is
unbiased but noisy. For finitely many labels, even the constant $V$ can be computed.

Implements: convergence of the Monte Carlo Fisher (chapter 2, "The Fisher").
"""

from torch import Tensor, enable_grad, stack, tensordot
from torch.nn import Module, MSELoss

from kfs.basics._checks import check_loss
from kfs.basics._per_datum import Params, check_data, gradients, parameter_pair
from kfs.basics.exact_fishers import expected_labels
from kfs.basics.label_sampling import hide_ignored
from kfs.basics.reduction_factors import Loss, criterion, reduction_factor
from kfs.errors import LossError


@enable_grad()
def one_sample_variance(
    model: Module, loss: Loss, X: Tensor, y: Tensor, params: Params
) -> float:
    """Compute the variance `V` of the Monte Carlo Fisher with one sample.

    Args:
        model: The network, a function of one example (no batch normalization or dropout
            in training mode).
        loss: A `CrossEntropyLoss` without class weights and label smoothing.
        X: All inputs, stacked along the first axis.
        y: All targets, likewise. They matter only for the reduction factor and for
            labels that are ignored.
        params: A parameter of the model or its name; or two of them, for rows and for
            columns.

    Returns:
        The sum of the variances of its entries. With `M` samples the root mean squared
        error in the Frobenius norm is `sqrt(V / M)`.

    Raises:
        LossError: For the square loss, whose labels cannot be enumerated.
    """
    check_loss(loss)
    if isinstance(loss, MSELoss):
        raise LossError(
            f"{loss} has infinitely many labels, so their fourth moments cannot be "
            "summed up.",
            "Use CrossEntropyLoss, or estimate the variance from several seeds of "
            "mc_fisher.",
        )
    rows, columns = parameter_pair(model, params)
    check_data(model, loss, X, y, (rows, columns))
    c, R = criterion(loss), reduction_factor(loss, y)

    V = 0.0
    for x_n, y_n in zip(X, y, strict=True):
        f_n = model(x_n.unsqueeze(0))[0]
        weights, outer_products = [], []
        for weight, label in expected_labels(loss, f_n):
            g1, g2 = gradients(c(f_n, hide_ignored(loss, label, y_n)), rows, columns)
            weights.append(weight)
            outer_products.append(tensordot(g1, g2, dims=0).flatten().to(weight.dtype))
        w, outer = stack(weights), stack(outer_products)
        V += (w @ (outer - w @ outer) ** 2).sum().item()
    return R**2 * V


if __name__ == "__main__":
    from itertools import product

    import torch
    from torch.nn import CrossEntropyLoss, Linear

    from kfs.basics.emp_fishers import empirical_fisher
    from kfs.basics.exact_fishers import type1_fisher
    from kfs.basics.mc_fishers import mc_fisher
    from kfs.verification import verify, verify_at_most

    torch.manual_seed(0)
    model, loss = Linear(2, 3, bias=False).double(), CrossEntropyLoss(reduction="sum")
    X, y = torch.randn(3, 2, dtype=torch.float64), torch.tensor([2, -100, 0])
    F = type1_fisher(model, loss, X, y, "weight")
    V = one_sample_variance(model, loss, X, y, "weight")
    V_mean = one_sample_variance(model, CrossEntropyLoss(), X, y, "weight")

    # The expectation over all labels that can be drawn: the second one is missing.
    expected = torch.zeros((), dtype=torch.float64)
    p = model(X).softmax(1)
    for first, third in product(range(3), repeat=2):
        drawn = torch.tensor([first, -100, third])
        error = empirical_fisher(model, loss, X, drawn, "weight") - F
        expected += p[0, first] * p[2, third] * (error**2).sum()
    of_sum, of_mean = torch.tensor([V, V_mean], dtype=torch.float64)
    verify("V is the expected squared error of one draw", of_sum, expected)
    verify("it scales with R squared: the mean of two labels", of_mean, expected / 4)

    samples, repeats = (1, 4, 16), 24
    errors = []
    for M in samples:
        draws = [mc_fisher(model, loss, X, y, "weight", M, s) for s in range(repeats)]
        squared = ((torch.stack(draws) - F) ** 2).flatten(1).sum(1)
        errors.append(squared.mean().sqrt())
        ratio = errors[-1].item() / (V / M) ** 0.5
        claim = "the error with M draws is sqrt(V / M)"
        # A mean of 24 squared errors has a standard error of about 20 percent, its root
        # of 10; allow three times that.
        verify_at_most(claim, abs(ratio - 1), 0.3, case=f"M = {M}")

    log_M, log_error = torch.tensor(samples).log(), torch.stack(errors).log()
    slope = torch.stack([log_M, log_error]).cov()[0, 1] / log_M.var()
    # The three errors have a standard error of 10 percent each, and M spans a factor of
    # 16: that of the slope is 0.05.
    verify_at_most("the error falls like M^(-1/2)", abs(slope.item() + 0.5), 0.15)
