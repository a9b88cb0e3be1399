r"""The Fisher is the metric of the KL divergence.

How far apart are two networks? The distance of their parameters says little. The KL
divergence of their *predictions*, averaged over the inputs, says more. For two nearby
parameter vectors it is, to second order, a quadratic form, and its matrix is the
Fisher,

$$
\frac1N \sum_n \mathrm{KL}\big(
  r(\cdot \mid f_n(\theta)) \,\Vert\, r(\cdot \mid f_n(\theta + \Delta)) \big)
  = \tfrac12\, \Delta^\top F\, \Delta + O(\lVert \Delta \rVert^3).
$$

Here $F = F_R / (N R)$, where $F_R$ is the Fisher with the loss's reduction factor $R$,
as computed in this package (for data without missing labels, which the divergence does
not have). The divergences have closed forms,

| loss | divergence of the predictions $f$ and $f'$ |
|---|---|
| `MSELoss` | $\tfrac12 \lVert f - f' \rVert^2$ |
| `CrossEntropyLoss` | $\sum_k \sigma_k (\log\, \sigma_k - \log\, \sigma'_k)$ |

Implements: the Fisher as metric of the KL divergence (chapter 2, "The Fisher").
"""

from torch import Tensor
from torch.nn import MSELoss

from kfs.basics._checks import check_like, check_likelihood
from kfs.basics.reduction_factors import Loss


def kl_divergence(loss: Loss, prediction: Tensor, other: Tensor) -> Tensor:
    """Compute the KL divergence between the distributions of two predictions.

    Args:
        loss: A `MSELoss` or `CrossEntropyLoss`, the latter without class weights and
            label smoothing.
        prediction: Parameterizes the distribution that the expectation is taken over;
            `[...]` or `[C, ...]`.
        other: Parameterizes the other distribution; a tensor like `prediction`.

    Returns:
        A scalar.

    Example:
        >>> import torch
        >>> kl_divergence(MSELoss(), torch.tensor([0.0, 0.0]), torch.tensor([3.0, 4.0]))
        tensor(12.5000)
    """
    check_likelihood(loss, prediction)
    check_like("other", other, "prediction", prediction)
    if isinstance(loss, MSELoss):
        return 0.5 * ((prediction - other) ** 2).sum()
    log_p, log_q = prediction.log_softmax(0), other.log_softmax(0)
    return (log_p.exp() * (log_p - log_q)).sum()


if __name__ == "__main__":
    from math import log2

    import torch
    from torch import distributions
    from torch.func import functional_call
    from torch.nn import CrossEntropyLoss, Linear, Sequential, Tanh

    from kfs.basics.exact_fishers import type2_fisher
    from kfs.basics.hessians import hessian
    from kfs.basics.reduction_factors import reduction_factor
    from kfs.verification import verify, verify_at_most

    torch.manual_seed(0)
    N = 4
    first, last = Linear(3, 2), Linear(2, 3)
    model = Sequential(first, Tanh(), last).double()
    X, values = torch.randn(N, 3, dtype=torch.float64), torch.randn(N, 3).double()
    W, step = first.weight, torch.randn(2, 3, dtype=torch.float64)

    for loss, y, r in (
        (MSELoss(), values, lambda f: distributions.Normal(f, 1.0)),
        (
            CrossEntropyLoss(),
            torch.randint(3, (N,)),
            lambda f: distributions.Categorical(logits=f),
        ),
    ):
        case = str(loss)
        f, g = torch.randn(2, 3, dtype=torch.float64)
        expected = distributions.kl_divergence(r(f), r(g)).sum()
        claim = "the closed form is PyTorch's divergence"
        verify(claim, kl_divergence(loss, f, g), expected, case=case)

        F = type2_fisher(model, loss, X, y, W) / (N * reduction_factor(loss, y))
        here = model(X).detach()

        def mean_kl(delta: Tensor, loss: Loss = loss, here: Tensor = here) -> Tensor:
            """Average the divergence from the network with a moved weight over data."""
            there = functional_call(model, {"0.weight": W.detach() + delta}, X)
            pairs = zip(here, there, strict=True)
            return torch.stack([kl_divergence(loss, f, g) for f, g in pairs]).mean()

        delta = torch.zeros_like(step, requires_grad=True)
        H = hessian(mean_kl(delta), delta)
        verify("the divergence's Hessian at zero distance is F", H, F, case=case)

        quadratic = 0.5 * (torch.tensordot(F, step) * step).sum()
        two, one = (mean_kl(t * step) - t**2 * quadratic for t in (2e-3, 1e-3))
        # The remainder is a t^3 + O(t^4), so the estimated order is 3 up to O(t).
        error = abs(log2((two / one).abs().item()) - 3)
        claim = "what the quadratic form misses has order 3"
        verify_at_most(claim, error, 0.02, case)
