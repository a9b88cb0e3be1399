r"""Would-be gradients in closed form.

The gradients of both criteria with respect to the prediction are differences between
what the network predicts and what it should have predicted,

| loss | $\nabla_f\, c(f, y) = -\nabla_f \log\, r(y \mid f)$ |
|---|---|
| `MSELoss` | $f - y$ |
| `CrossEntropyLoss` | $\mathrm{softmax}(f) - \mathrm{onehot}(y)$ |

For labels $\tilde{y}_m \sim r(y \mid f)$ that the network draws itself, these are the
*would-be gradients*. Put the gradients of $M$ draws into the columns of a matrix
$\tilde{S}$. Their mean is zero and their covariance is the Hessian of the criterion, so
$\tilde{S} \tilde{S}^\top / M$ estimates it, and backpropagated to the parameters they
give the Monte Carlo Fisher, without differentiating a loss,

$$
\tilde{F}(\theta) = \frac{R}{M} \sum_{n=1}^N
  (\mathrm{J}_\theta f_n)^\top \tilde{S}_n \tilde{S}_n^\top (\mathrm{J}_\theta f_n).
$$

A missing label has no gradient. A target of class probabilities takes the place of
$\mathrm{onehot}(y)$.

Implements: gradients of square loss and of softmax cross-entropy loss (chapter 2, "The
Fisher").
"""

from torch import Generator, Tensor, stack
from torch.nn import MSELoss

from kfs.basics._checks import check_datum, check_draws, check_likelihood
from kfs.basics.label_sampling import sample_label
from kfs.basics.reduction_factors import Loss


def criterion_gradient(loss: Loss, prediction: Tensor, target: Tensor) -> Tensor:
    """Return the gradient of the criterion of one example in closed form.

    Args:
        loss: A `MSELoss` or `CrossEntropyLoss`, the latter without class weights and
            label smoothing.
        prediction: One example's prediction, shape `[...]` (square loss) or `[C, ...]`
            (cross-entropy).
        target: Its target, from the data or drawn.

    Returns:
        A tensor like the prediction, detached from the graph.

    Raises:
        LossError: If the loss is not a negative log-likelihood.

    Example:
        >>> import torch
        >>> loss = torch.nn.CrossEntropyLoss()
        >>> criterion_gradient(loss, torch.zeros(2), torch.tensor(0))
        tensor([-0.5000,  0.5000])
    """
    check_likelihood(loss, prediction)
    check_datum(loss, prediction, target)
    f, y = prediction.detach(), target.detach()
    if isinstance(loss, MSELoss):
        return f - y
    onehot = y
    if not y.is_floating_point():
        onehot = stack([y == k for k in range(len(f))]).to(f.dtype)
    return onehot.sum(0) * f.softmax(0) - onehot  # the sum is zero for a missing label


def would_be_gradients(
    loss: Loss,
    prediction: Tensor,
    mc_samples: int = 1,
    generator: Generator | None = None,
) -> Tensor:
    """Draw labels for one example, and return the gradient for each of them.

    Args:
        loss: A `MSELoss` or `CrossEntropyLoss`, the latter without class weights and
            label smoothing.
        prediction: One example's prediction, shape `[...]` (square loss) or `[C, ...]`
            (cross-entropy).
        mc_samples: How many labels to draw.
        generator: The random number generator; PyTorch's global generator by default.

    Returns:
        A tensor of shape `[*prediction.shape, mc_samples]`: gradients are columns.

    Raises:
        LossError: If the loss is not a negative log-likelihood.

    Example:
        >>> import torch
        >>> would_be_gradients(torch.nn.MSELoss(), torch.zeros(2), 5).shape
        torch.Size([2, 5])
    """
    check_draws(mc_samples)
    labels = [sample_label(loss, prediction, generator) for _ in range(mc_samples)]
    return stack([criterion_gradient(loss, prediction, y) for y in labels], dim=-1)


if __name__ == "__main__":
    import torch
    from torch.nn import CrossEntropyLoss, Linear, Sequential, Tanh

    from kfs.basics.exact_fishers import expected_labels
    from kfs.basics.hessians import vec_hessian
    from kfs.basics.jacobian_products import vjp
    from kfs.basics.jacobians import vec_jacobian
    from kfs.basics.mc_fishers import vec_mc_fisher
    from kfs.basics.reduction_factors import criterion, reduction_factor
    from kfs.verification import verify

    torch.manual_seed(0)
    f = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    one = torch.ones((), dtype=torch.float64)
    for loss, formula in (
        (MSELoss(), "f - y"),
        (CrossEntropyLoss(), "softmax(f) - onehot(y)"),
    ):
        c = criterion(loss)
        for draw in range(3):
            y = sample_label(loss, f)
            gradient, autodiff = criterion_gradient(loss, f, y), vjp(c(f, y), f, one)
            claim = f"the gradient for a drawn label is {formula}"
            verify(claim, gradient, autodiff, case=f"draw {draw}")

        weights, labels = zip(*expected_labels(loss, f), strict=True)
        p = torch.stack(weights)
        S = torch.stack([criterion_gradient(loss, f, y).flatten() for y in labels], 1)
        verify("their mean is zero", S @ p, torch.zeros(6), case=str(loss))
        H = vec_hessian(c(f, labels[0]), f)
        verify("their covariance is the Hessian", S * p @ S.T, H, case=str(loss))

    missing = torch.tensor([1, -100])  # PyTorch's default ignore_index
    probabilities = torch.rand(3, 2, dtype=torch.float64)
    for case, y in (("missing label", missing), ("probabilities", probabilities)):
        gradient, autodiff = criterion_gradient(loss, f, y), vjp(c(f, y), f, one)
        verify("targets of the data have such gradients", gradient, autodiff, case=case)

    N, M, seed = 4, 3, 1
    first, last = Linear(2, 2), Linear(2, 3)
    model, W = Sequential(first, Tanh(), last).double(), first.weight
    X = torch.randn(N, 2, dtype=torch.float64)
    for loss, y in (
        (MSELoss(), torch.randn(N, 3, dtype=torch.float64)),
        (CrossEntropyLoss(reduction="sum"), torch.randint(3, (N,))),
    ):
        generator = Generator().manual_seed(seed)
        F = torch.zeros(4, 4, dtype=torch.float64)
        for x_n in X:
            f_n = model(x_n)
            J, S = vec_jacobian(f_n, W), would_be_gradients(loss, f_n, M, generator)
            F += J.T @ S @ S.T @ J
        verify(
            "backpropagated, they give the Monte Carlo Fisher",
            reduction_factor(loss, y) / M * F,
            vec_mc_fisher(model, loss, X, y, W, M, seed),
            case=str(loss),
        )
