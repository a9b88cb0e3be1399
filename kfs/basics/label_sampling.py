r"""Label sampling: a loss function is a likelihood in disguise.

The criteria of regression and classification are negative log-likelihoods,
$c(f, y) = -\log\, r(y \mid f)$ up to a constant. The network's prediction parameterizes
a distribution over targets:

| loss | likelihood $r(y \mid f)$ |
|---|---|
| `MSELoss` | $\mathcal{N}(y \mid f, I)$, a normal distribution around $f$ |
| `CrossEntropyLoss` | $\mathrm{softmax}(f)_y$, a distribution over the classes |

Minimizing the empirical risk is maximum likelihood estimation. We can therefore ask the
network which targets it *expects*, by drawing them. The Fisher information matrix is
built from such draws. For tensor-valued predictions the entries (square loss) or
positions (cross-entropy) are independent.

With class weights or label smoothing, this does not hold:
$-w_y \log\, \mathrm{softmax}(f)_y$ is not the negative logarithm of a distribution, and
sampling raises an error. A label that equals `ignore_index` is missing, and stays
missing. If targets are probabilities, a draw is still a label, because the likelihood
depends only on the prediction.

Implements: probabilistic interpretation of both losses (chapter 2, "Probabilistic
Interpretation").
"""

import torch
from torch import Generator, Tensor
from torch.nn import MSELoss

from kfs.basics._checks import check_generator, check_likelihood
from kfs.basics.reduction_factors import Loss


def sample_label(
    loss: Loss, prediction: Tensor, generator: Generator | None = None
) -> Tensor:
    """Draw a target for one example from the likelihood that the loss implies.

    Args:
        loss: A `MSELoss` or `CrossEntropyLoss`, the latter without class weights and
            label smoothing.
        prediction: One example's prediction, shape `[...]` (square loss) or `[C, ...]`
            (cross-entropy).
        generator: The random number generator; PyTorch's global generator by default.

    Returns:
        A target, detached from the graph: shape `[...]`, the prediction's dtype for the
        square loss, `torch.int64` for cross-entropy.

    Raises:
        LossError: If the loss is not a negative log-likelihood.

    Example:
        >>> confident = torch.tensor([-100.0, 100.0, -100.0])
        >>> sample_label(torch.nn.CrossEntropyLoss(), confident)
        tensor(1)
    """
    check_likelihood(loss, prediction)
    check_generator(generator, prediction)
    f = prediction.detach()
    if isinstance(loss, MSELoss):
        noise = torch.randn(
            f.shape, generator=generator, dtype=f.dtype, device=f.device
        )
        return f + noise
    probabilities = f.softmax(0).reshape(len(f), -1).T  # [positions, C]
    labels = torch.multinomial(probabilities, num_samples=1, generator=generator)
    return labels.reshape(f.shape[1:])


def hide_ignored(loss: Loss, label: Tensor, target: Tensor) -> Tensor:
    """Return a drawn label, but the target where that is missing (`ignore_index`)."""
    if isinstance(loss, MSELoss) or target.is_floating_point():
        return label
    return torch.where(target == loss.ignore_index, target, label)


if __name__ == "__main__":
    from torch.nn import CrossEntropyLoss

    from kfs.basics.reduction_factors import criterion
    from kfs.verification import verify

    generator = Generator().manual_seed(1)
    torch.manual_seed(0)
    draws = 5_000
    # A mean of 5,000 draws of unit variance has an error of 0.014 typically, and four
    # times that once in 16,000.
    noise = 4 / draws**0.5

    f = torch.tensor([0.5, -1.0], dtype=torch.float64)
    square = MSELoss()
    y = sample_label(square, f.expand(draws, 2), generator)  # entries are independent
    verify("square loss: draws have the prediction as mean", y.mean(0), f, noise)
    claim = "square loss: draws have the identity as covariance"
    verify(claim, y.T.cov(), torch.eye(2), 2 * noise)

    f = torch.tensor([[0.3, 2.0], [-0.2, 0.0], [1.0, -1.0]], dtype=torch.float64)
    ce = CrossEntropyLoss()
    many = f.unsqueeze(-1).expand(3, 2, draws)  # three classes at positions [2, draws]
    y = sample_label(ce, many, generator)
    frequencies = torch.stack([(y == k).double().mean(1) for k in range(3)])
    verify(
        "cross-entropy: frequencies are the softmax", frequencies, f.softmax(0), noise
    )
    target = torch.tensor([2, ce.ignore_index])
    drawn = torch.tensor([0, 1])
    hidden = torch.tensor([0, ce.ignore_index])
    verify("a missing label stays missing", hide_ignored(ce, drawn, target), hidden)

    c, f = criterion(ce), f[:, 0]
    likelihood = torch.stack([torch.exp(-c(f, label)) for label in torch.arange(3)])
    claim = "cross-entropy: exp(-c) is a distribution over the labels"
    verify(claim, likelihood.sum(), torch.tensor(1.0))
    one, other = torch.randn(2, 2, dtype=torch.float64)
    normal = torch.distributions.Normal(f[:2], 1.0)
    difference = normal.log_prob(one).sum() - normal.log_prob(other).sum()
    c = criterion(square)
    claim = "square loss: c is the negative log-density up to a constant"
    verify(claim, c(f[:2], other) - c(f[:2], one), difference)

    p, c = torch.rand(3, dtype=torch.float64).softmax(0), criterion(ce)
    data, r = (torch.distributions.Categorical(q) for q in (p, f.softmax(0)))
    risk = sum(p[k] * c(f, k) for k in torch.arange(3))
    claim = "cheatsheet: KL(p, r) is the risk, minus the entropy of the data"
    kl = torch.distributions.kl_divergence(data, r)
    verify(claim, risk - data.entropy(), kl)
