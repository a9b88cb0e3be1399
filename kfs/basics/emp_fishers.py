r"""The empirical Fisher: gradient outer products with the labels at hand.

If the labels that the network would predict are replaced by the labels of the dataset, no sampling is needed:

$$
E(\theta) = R \sum_{n=1}^N g_n g_n^\top, \qquad g_n = \nabla_\theta\, c(f_n, y_n).
$$

It is cheap, since the gradients are those of training, and popular for that reason. But it is *not* the Fisher. The
expectation over the network's own predictions is gone, and with it the connection to curvature: where the network
fits its targets, $g_n = 0$ and the empirical Fisher vanishes; with the square loss, Fisher and GGN stay the same
there, since they do not depend on targets at all (Kunstner et al., 2019 discuss the consequences).

As everywhere in this package, $R$ is the loss's reduction factor, and $g_n$ is the gradient of the *criterion* of
one example, not the gradient of the averaged loss.

Implements: empirical Fisher (chapter 2, "The Empirical Fisher").
"""

from collections.abc import Iterator

from torch import Tensor, enable_grad
from torch.nn import Module

from kfs.basics._per_datum import Pair, Params, gradients, parameter_pair, predictions, sum_of_outer_products
from kfs.basics.flattening import Vec, check_vec, matricize, rvec
from kfs.basics.reduction_factors import Loss, criterion, reduction_factor


@enable_grad()
def empirical_fisher(model: Module, loss: Loss, X: Tensor, y: Tensor, params: Params) -> Tensor:
    """Compute the empirical Fisher tensor with respect to one parameter, or a pair of them.

    Args:
        model: The network, a function of one example (no batch normalization or dropout in training mode).
        loss: A `MSELoss` or `CrossEntropyLoss`.
        X: All inputs, stacked along the first axis.
        y: All targets, likewise.
        params: A parameter of the model or its name; or two of them, for rows and for columns.

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
        >>> empirical_fisher(model, torch.nn.MSELoss(), X, y, "weight").shape
        torch.Size([2, 3, 2, 3])
    """
    pair = parameter_pair(model, params)
    E = sum_of_outer_products(per_datum_gradients(model, loss, X, y, pair), pair)
    return reduction_factor(loss, y) * E


def vec_empirical_fisher(model: Module, loss: Loss, X: Tensor, y: Tensor, params: Params, vec: Vec = rvec) -> Tensor:
    """Compute the empirical Fisher matrix with respect to flattened parameters.

    Args:
        model: The network.
        loss: A `MSELoss` or `CrossEntropyLoss`.
        X: All inputs, stacked along the first axis.
        y: All targets, likewise.
        params: A parameter of the model or its name; or two of them, for rows and for columns.
        vec: The flattening of both parameters, `cvec` or `rvec`.

    Returns:
        A matrix of shape `[rows.numel(), columns.numel()]`.
    """
    check_vec(vec)
    rows, _ = parameter_pair(model, params)
    return matricize(empirical_fisher(model, loss, X, y, params), rows.ndim, vec)


def per_datum_gradients(model: Module, loss: Loss, X: Tensor, y: Tensor, pair: Pair) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield, example by example, the criterion's gradients with respect to both parameters."""
    c = criterion(loss)
    for f_n, y_n in predictions(model, loss, X, y, pair):
        yield gradients(c(f_n, y_n), pair)


if __name__ == "__main__":
    import torch
    from torch.nn import CrossEntropyLoss, Linear, MSELoss, Sequential, Tanh

    from kfs.basics.flattening import cvec
    from kfs.basics.ggns import ggn
    from kfs.verification import verify, verify_differs

    torch.manual_seed(0)
    N = 4
    first, last = Linear(3, 2), Linear(2, 2)
    model = Sequential(first, Tanh(), last).double()
    W, b = first.weight, first.bias
    X = torch.randn(N, 3, dtype=torch.float64)

    for loss, y in ((MSELoss(), torch.randn(N, 2, dtype=torch.float64)), (CrossEntropyLoss(), torch.randint(2, (N,)))):
        R = reduction_factor(loss, y)
        for vec in (cvec, rvec):
            # Independent route: PyTorch's own loss and backward pass on a data set of one, and its own factor undone.
            expected = torch.zeros(W.numel(), W.numel(), dtype=torch.float64)
            for n in range(N):
                value = loss(model(X[n : n + 1]), y[n : n + 1]) / reduction_factor(loss, y[n : n + 1])
                (g,) = torch.autograd.grad(value, W)
                expected += torch.outer(vec(g), vec(g))
            E = vec_empirical_fisher(model, loss, X, y, W, vec)
            verify("R times summed outer products of gradients", E, R * expected, case=f"{loss}, {vec.__name__}")
        prediction = model(X)
        G = ggn(loss(prediction, y), prediction, W)
        E = empirical_fisher(model, loss, X, y, W)
        verify_differs("the empirical Fisher is not the GGN", E, G, case=str(loss))
        mixed, swapped = (empirical_fisher(model, loss, X, y, pair) for pair in ((W, b), (b, W)))
        verify("off-diagonal blocks are transposes of each other", mixed, swapped.permute(1, 2, 0), case=str(loss))

    fitted = model(X).detach()
    verify("it vanishes where the data are fitted", empirical_fisher(model, MSELoss(), X, fitted, b), torch.zeros(2, 2))
