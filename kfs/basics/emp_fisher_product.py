r"""Empirical Fisher products: multiply with the matrix, one gradient at a time.

The empirical Fisher is a sum of outer products, so multiplication with it needs one
inner product per example,

$$
E v = R \sum_n g_n \, \langle g_n, v \rangle, \qquad g_n = \nabla_\theta\, c(f_n, y_n).
$$

Implements: multiplication with the empirical Fisher (chapter 2, "The Empirical
Fisher").
"""

from torch import Tensor, enable_grad, zeros_like
from torch.nn import Module

from kfs.basics._checks import check_like
from kfs.basics._per_datum import Params, check_data, gradients, parameter_pair
from kfs.basics.reduction_factors import Loss, criterion, reduction_factor


@enable_grad()
def empirical_fisher_vp(
    model: Module, loss: Loss, X: Tensor, y: Tensor, params: Params, v: Tensor
) -> Tensor:
    """Multiply the empirical Fisher with a tensor.

    Args:
        model: The network, a function of one example (no batch normalization or dropout
            in training mode).
        loss: A `MSELoss` or `CrossEntropyLoss`.
        X: All inputs, stacked along the first axis.
        y: All targets, likewise.
        params: A parameter of the model or its name; or two of them, for rows and for
            columns.
        v: A tensor like the parameter that indexes columns.

    Returns:
        A tensor like the parameter that indexes rows.

    Raises:
        LossError: If the loss is not supported here.
        ModelError: If the model is not a function of one example, or has no such
            parameter.
        GraphError: If the parameter is frozen or not used.
        DataError: If data or targets do not fit.

    Example:
        >>> import torch
        >>> model, X, y = torch.nn.Linear(3, 2), torch.rand(5, 3), torch.rand(5, 2)
        >>> loss, v = torch.nn.MSELoss(), torch.ones(2)
        >>> empirical_fisher_vp(model, loss, X, y, "bias", v).shape
        torch.Size([2])
    """
    rows, columns = parameter_pair(model, params)
    check_data(model, loss, X, y, (rows, columns))
    check_like("v", v, "the parameter for columns", columns)
    c, R = criterion(loss), reduction_factor(loss, y)

    u = zeros_like(rows)
    for x_n, y_n in zip(X, y, strict=True):
        f_n = model(x_n.unsqueeze(0))[0]
        g1, g2 = gradients(c(f_n, y_n), rows, columns)
        u += g1 * (g2 * v.detach()).sum()
    return R * u


if __name__ == "__main__":
    import torch
    from torch.nn import CrossEntropyLoss, Linear, MSELoss, Sequential, Tanh

    from kfs.basics.emp_fishers import empirical_fisher
    from kfs.verification import verify

    torch.manual_seed(0)
    N = 4
    first, last = Linear(3, 2), Linear(2, 3)
    model = Sequential(first, Tanh(), last).double()
    W, b = first.weight, first.bias
    X, values = torch.randn(N, 3, dtype=torch.float64), torch.randn(N, 3).double()
    labels = torch.randint(3, (N,))
    V, v = torch.randn_like(W), torch.randn_like(b)

    for reduction in ("mean", "sum"):
        for loss, y in (
            (MSELoss(reduction=reduction), values),
            (CrossEntropyLoss(reduction=reduction), labels),
        ):
            case = f"{loss}, {reduction}"
            E = empirical_fisher(model, loss, X, y, W)
            product = empirical_fisher_vp(model, loss, X, y, W, V)
            EV = torch.tensordot(E, V)
            verify("the product is tensor times vector", product, EV, case=case)
            E = empirical_fisher(model, loss, X, y, (W, b))
            product = empirical_fisher_vp(model, loss, X, y, (W, b), v)
            verify("also for an off-diagonal block", product, E @ v, case=case)
