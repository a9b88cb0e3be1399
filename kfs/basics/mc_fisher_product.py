r"""Monte Carlo Fisher products: multiply with the matrix, one would-be gradient at a time.

The Monte Carlo Fisher is a sum of outer products, so multiplication with it needs one inner product per gradient,

$$
\tilde{F} v = \frac{R}{M} \sum_{n, m} \tilde{g}_{n,m} \, \langle \tilde{g}_{n,m}, v \rangle .
$$

For the same seed, the labels are those of the matrix in `mc_fishers`, and the product equals matrix times vector.

Implements: multiplication with the Monte Carlo Fisher (chapter 2, "The Fisher").
"""

from torch import Tensor, enable_grad
from torch.nn import Module

from kfs.basics._per_datum import Params, parameter_pair, sum_of_products
from kfs.basics.mc_fishers import would_be_gradients
from kfs.basics.reduction_factors import Loss, reduction_factor


@enable_grad()
def mc_fisher_vp(
    model: Module, loss: Loss, X: Tensor, y: Tensor, params: Params, v: Tensor, mc_samples: int = 1, seed: int = 0
) -> Tensor:
    """Multiply the Monte Carlo Fisher with a tensor.

    Args:
        model: The network, a function of one example (no batch normalization or dropout in training mode).
        loss: A `MSELoss` or `CrossEntropyLoss`, the latter without class weights and label smoothing.
        X: All inputs, stacked along the first axis.
        y: All targets, likewise.
        params: A parameter of the model or its name; or two of them, for rows and for columns.
        v: A tensor like the parameter that indexes columns.
        mc_samples: How many labels to draw per example.
        seed: Equal seeds give equal draws.

    Returns:
        A tensor like the parameter that indexes rows.

    Raises:
        LossError: If the loss is not supported here.
        ModelError: If the model is not a function of one example, or has no such parameter.
        GraphError: If the parameter is frozen or not used.
        DataError: If data or targets do not fit.

    Example:
        >>> import torch
        >>> model, X, y = torch.nn.Linear(3, 2), torch.rand(5, 3), torch.rand(5, 2)
        >>> mc_fisher_vp(model, torch.nn.MSELoss(), X, y, ("weight", "bias"), torch.ones(2)).shape
        torch.Size([2, 3])
    """
    pair = parameter_pair(model, params)
    u = sum_of_products(would_be_gradients(model, loss, X, y, pair, mc_samples, seed), pair, v)
    return reduction_factor(loss, y) / mc_samples * u


if __name__ == "__main__":
    import torch
    from torch.nn import CrossEntropyLoss, Linear, MSELoss, Sequential, Tanh

    from kfs.basics.mc_fishers import mc_fisher
    from kfs.verification import verify

    torch.manual_seed(0)
    N, M, seed = 4, 3, 42
    first, last = Linear(3, 2), Linear(2, 2)
    model = Sequential(first, Tanh(), last).double()
    W, b = first.weight, first.bias
    X = torch.randn(N, 3, dtype=torch.float64)
    V, v = torch.randn_like(W), torch.randn_like(b)

    for loss, y in ((MSELoss(), torch.randn(N, 2, dtype=torch.float64)), (CrossEntropyLoss(), torch.randint(2, (N,)))):
        F = mc_fisher(model, loss, X, y, W, M, seed)
        product = mc_fisher_vp(model, loss, X, y, W, V, M, seed)
        verify("the product is tensor times vector", product, torch.tensordot(F, V), case=str(loss))
        F = mc_fisher(model, loss, X, y, (W, b), M, seed)
        product = mc_fisher_vp(model, loss, X, y, (W, b), v, M, seed)
        verify("also for an off-diagonal block", product, F @ v, case=str(loss))
