r"""The empirical Fisher: gradient outer products with the labels at hand.

If the labels that the network would predict are replaced by the labels of the dataset,
no sampling is needed:

$$
E(\theta) = R \sum_{n=1}^N g_n g_n^\top, \qquad g_n = \nabla_\theta\, c(f_n, y_n).
$$

It is cheap, since the gradients are those of training, and popular for that reason. But
it is *not* the Fisher. The expectation over the network's own predictions is gone, and
with it the connection to curvature: where the network fits its targets, $g_n = 0$ and
the empirical Fisher vanishes; with the square loss, Fisher and GGN stay the same there,
since they do not depend on targets at all (Kunstner et al., 2019 discuss the
consequences). Adam averages squared gradients of mini-batches (Kingma & Ba, 2015). That
is motivated by the diagonal of this matrix, but not equal to it: the square of a mean
of gradients is not the mean of their squares. Where the empirical Fisher helps
training, the reason may be that it attenuates gradient noise, not that it is a
curvature.

As everywhere in this package, $R$ is the loss's reduction factor, and $g_n$ is the
gradient of the *criterion* of one example, not the gradient of the averaged loss.

Implements: empirical Fisher (chapter 2, "The Empirical Fisher").
"""

from torch import Tensor, enable_grad, tensordot
from torch.nn import Module

from kfs.basics._per_datum import (
    Params,
    check_data,
    empty_block,
    gradients,
    parameter_pair,
)
from kfs.basics.flattening import Vec, check_vec, matricize, rvec
from kfs.basics.reduction_factors import Loss, criterion, reduction_factor


@enable_grad()
def empirical_fisher(
    model: Module, loss: Loss, X: Tensor, y: Tensor, params: Params
) -> Tensor:
    """Compute the empirical Fisher tensor with respect to one parameter, or a pair.

    Args:
        model: The network, a function of one example (no batch normalization or dropout
            in training mode).
        loss: A `MSELoss` or `CrossEntropyLoss`.
        X: All inputs, stacked along the first axis.
        y: All targets, likewise.
        params: A parameter of the model or its name; or two of them, for rows and for
            columns.

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
        >>> empirical_fisher(model, torch.nn.MSELoss(), X, y, "weight").shape
        torch.Size([2, 3, 2, 3])
    """
    rows, columns = parameter_pair(model, params)
    check_data(model, loss, X, y, (rows, columns))
    c, R = criterion(loss), reduction_factor(loss, y)

    E = empty_block(rows, columns)
    for x_n, y_n in zip(X, y, strict=True):
        f_n = model(x_n.unsqueeze(0))[0]
        g1, g2 = gradients(c(f_n, y_n), rows, columns)
        E += tensordot(g1, g2, dims=0)
    return R * E


def vec_empirical_fisher(
    model: Module, loss: Loss, X: Tensor, y: Tensor, params: Params, vec: Vec = rvec
) -> Tensor:
    """Compute the empirical Fisher matrix with respect to flattened parameters.

    Args:
        model: The network.
        loss: A `MSELoss` or `CrossEntropyLoss`.
        X: All inputs, stacked along the first axis.
        y: All targets, likewise.
        params: A parameter of the model or its name; or two of them, for rows and for
            columns.
        vec: The flattening of both parameters, `cvec` or `rvec`.

    Returns:
        A matrix of shape `[rows.numel(), columns.numel()]`.
    """
    check_vec(vec)
    rows, _ = parameter_pair(model, params)
    E = empirical_fisher(model, loss, X, y, params)
    return matricize(E, rows.ndim, vec)


if __name__ == "__main__":
    import torch
    from torch.nn import CrossEntropyLoss, Linear, MSELoss, Sequential, Tanh

    from kfs.basics.flattening import cvec
    from kfs.basics.ggns import ggn
    from kfs.verification import verify, verify_differs

    torch.manual_seed(0)
    N, C = 4, 3
    first, last = Linear(3, 2), Linear(2, C)
    model = Sequential(first, Tanh(), last).double()
    W, b = first.weight, first.bias
    X, values = torch.randn(N, 3, dtype=torch.float64), torch.randn(N, C).double()
    labels = torch.randint(C, (N,))

    # The criterion of one example is PyTorch's loss, summed, times the factor (a half
    # for the square loss). R is that of the table in `reduction_factors`.
    for loss, y, factor, R in (
        (MSELoss(), values, 0.5, 2 / (N * C)),
        (MSELoss(reduction="sum"), values, 0.5, 2),
        (CrossEntropyLoss(), labels, 1, 1 / N),
        (CrossEntropyLoss(reduction="sum"), labels, 1, 1),
    ):
        criterion_n = type(loss)(reduction="sum")
        for vec in (cvec, rvec):
            expected = torch.zeros(6, 6, dtype=torch.float64)
            mixed = torch.zeros(6, 2, dtype=torch.float64)
            for f_n, y_n in zip(model(X), y, strict=True):
                c_n = factor * criterion_n(f_n, y_n)
                g, h = torch.autograd.grad(c_n, (W, b), retain_graph=True)
                expected += torch.outer(vec(g), vec(g))
                mixed += torch.outer(vec(g), h)
            case = f"{loss}, {loss.reduction}, {vec.__name__}"
            E = vec_empirical_fisher(model, loss, X, y, W, vec)
            claim = "R times summed outer products of gradients"
            verify(claim, E, R * expected, case=case)
            E = vec_empirical_fisher(model, loss, X, y, (W, b), vec)
            verify("also for an off-diagonal block", E, R * mixed, case=case)
        prediction = model(X)
        G = ggn(loss(prediction, y), prediction, W)
        E = empirical_fisher(model, loss, X, y, W)
        case = f"{loss}, {loss.reduction}"
        verify_differs("the empirical Fisher is not the GGN", E, G, case=case)

    fitted = model(X).detach()
    E = empirical_fisher(model, MSELoss(), X, fitted, b)
    verify("it vanishes where the data are fitted", E, torch.zeros(2, 2))
