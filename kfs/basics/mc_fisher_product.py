r"""Monte Carlo Fisher products: multiply with one would-be gradient at a time.

The Monte Carlo Fisher is a sum of outer products, so multiplication with it needs one
inner product per gradient,

$$
\tilde{F} v
  = \frac{R}{M} \sum_{n, m} \tilde{g}_{n,m} \, \langle \tilde{g}_{n,m}, v \rangle .
$$

For the same seed, the labels are those of the matrix in `mc_fishers`, and the product
equals matrix times vector.

Implements: multiplication with the Monte Carlo Fisher (chapter 2, "The Fisher").
"""

from torch import Generator, Tensor, enable_grad, zeros_like
from torch.nn import Module

from kfs.basics._checks import check_draws, check_like
from kfs.basics._per_datum import Params, check_data, gradients, parameter_pair
from kfs.basics.label_sampling import hide_ignored, sample_label
from kfs.basics.reduction_factors import Loss, criterion, reduction_factor


@enable_grad()
def mc_fisher_vp(
    model: Module,
    loss: Loss,
    X: Tensor,
    y: Tensor,
    params: Params,
    v: Tensor,
    mc_samples: int = 1,
    seed: int = 0,
) -> Tensor:
    """Multiply the Monte Carlo Fisher with a tensor.

    Args:
        model: The network, a function of one example (no batch normalization or dropout
            in training mode).
        loss: A `MSELoss` or `CrossEntropyLoss`, the latter without class weights and
            label smoothing.
        X: All inputs, stacked along the first axis.
        y: All targets, likewise.
        params: A parameter of the model or its name; or two of them, for rows and for
            columns.
        v: A tensor like the parameter that indexes columns.
        mc_samples: How many labels to draw per example.
        seed: Equal seeds give equal draws.

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
        >>> loss, params, v = torch.nn.MSELoss(), ("weight", "bias"), torch.ones(2)
        >>> mc_fisher_vp(model, loss, X, y, params, v).shape
        torch.Size([2, 3])
    """
    check_draws(mc_samples, seed)
    rows, columns = parameter_pair(model, params)
    check_data(model, loss, X, y, (rows, columns))
    check_like("v", v, "the parameter for columns", columns)
    c, R = criterion(loss), reduction_factor(loss, y)
    generator = Generator(rows.device).manual_seed(seed)

    u = zeros_like(rows)
    for x_n, y_n in zip(X, y, strict=True):
        f_n = model(x_n.unsqueeze(0))[0]
        for _ in range(mc_samples):
            label = hide_ignored(loss, sample_label(loss, f_n, generator), y_n)
            g1, g2 = gradients(c(f_n, label), rows, columns)
            u += g1 * (g2 * v.detach()).sum()
    return R / mc_samples * u


if __name__ == "__main__":
    import torch
    from torch.nn import CrossEntropyLoss, Linear, MSELoss, Sequential, Tanh

    from kfs.basics.mc_fishers import mc_fisher
    from kfs.verification import verify

    torch.manual_seed(0)
    N, M, seed = 4, 3, 42
    first, last = Linear(3, 2), Linear(2, 3)
    model = Sequential(first, Tanh(), last).double()
    W, b = first.weight, first.bias
    X, values = torch.randn(N, 3, dtype=torch.float64), torch.randn(N, 3).double()
    labels = torch.tensor([2, 0, -100, 1])  # PyTorch's ignore_index: one is missing
    V, v = torch.randn_like(W), torch.randn_like(b)

    for reduction in ("mean", "sum"):
        for loss, y in (
            (MSELoss(reduction=reduction), values),
            (CrossEntropyLoss(reduction=reduction), labels),
        ):
            case = f"{loss}, {reduction}"
            F = mc_fisher(model, loss, X, y, W, M, seed)
            product = mc_fisher_vp(model, loss, X, y, W, V, M, seed)
            FV = torch.tensordot(F, V)
            verify("the product is tensor times vector", product, FV, case=case)
            F = mc_fisher(model, loss, X, y, (W, b), M, seed)
            product = mc_fisher_vp(model, loss, X, y, (W, b), v, M, seed)
            verify("also for an off-diagonal block", product, F @ v, case=case)
