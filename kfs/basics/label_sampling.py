r"""Label sampling: a loss function is a likelihood in disguise.

The criteria of regression and classification are negative log-likelihoods, $c(f, y) = -\log\, r(y \mid f)$ up to a
constant. The network's prediction parameterizes a distribution over targets:

| loss | likelihood $r(y \mid f)$ |
|---|---|
| `MSELoss` | $\mathcal{N}(y \mid f, I)$, a normal distribution around the prediction |
| `CrossEntropyLoss` | $\mathrm{softmax}(f)_y$, a categorical distribution over the classes |

Minimizing the empirical risk is maximum likelihood estimation. We can therefore ask the network which targets it
*expects*, by drawing them. The Fisher information matrix is built from such draws. For tensor-valued
predictions the entries (square loss) or positions (cross-entropy) are independent.

With class weights or label smoothing, this does not hold: $-w_y \log\, \mathrm{softmax}(f)_y$ is not the negative
logarithm of a distribution, and sampling raises an error. A label that equals `ignore_index` is missing, and stays
missing. If targets are probabilities, a draw is still a label, because the likelihood depends only on the prediction.

Implements: probabilistic interpretation of both losses (chapter 2, "Probabilistic Interpretation").
"""

import torch
from torch import Generator, Tensor
from torch.nn import MSELoss

from kfs.basics._checks import check_floating
from kfs.basics.reduction_factors import Loss, check_logits, check_loss
from kfs.errors import DtypeError, LossError


def sample_label(loss: Loss, prediction: Tensor, generator: Generator | None = None) -> Tensor:
    """Draw a target for one example from the likelihood that the loss implies.

    Args:
        loss: A `MSELoss` or `CrossEntropyLoss`, the latter without class weights and label smoothing.
        prediction: One example's prediction, shape `[...]` (square loss) or `[C, ...]` (cross-entropy).
        generator: The random number generator; PyTorch's global generator by default.

    Returns:
        A target, detached from the graph: shape `[...]`, the prediction's dtype for the square loss, `torch.int64` for
        cross-entropy.

    Raises:
        LossError: If the loss is not a negative log-likelihood.

    Example:
        >>> confident = torch.tensor([-100.0, 100.0, -100.0])
        >>> sample_label(torch.nn.CrossEntropyLoss(), confident)
        tensor(1)
    """
    check_likelihood(loss, prediction)
    f = prediction.detach()
    if not isinstance(generator, Generator | None):
        raise DtypeError(
            f"generator is a {type(generator).__name__}, expected a torch.Generator.",
            "Make one from a seed: torch.Generator().manual_seed(seed).",
        )
    if generator is not None and generator.device.type != f.device.type:
        raise DtypeError(
            f"The generator is on {generator.device}, but the prediction is on {f.device}.",
            f"Make one there: torch.Generator({f.device.type!r}).",
        )
    if isinstance(loss, MSELoss):
        return f + torch.randn(f.shape, generator=generator, dtype=f.dtype, device=f.device)
    probabilities = f.softmax(0).flatten(start_dim=1).T if f.ndim > 1 else f.softmax(0).unsqueeze(0)
    labels = torch.multinomial(probabilities, num_samples=1, generator=generator)
    return labels.reshape(f.shape[1:])


def hide_ignored(loss: Loss, label: Tensor, target: Tensor) -> Tensor:
    """Return a drawn label, set to missing wherever the true target is missing (equals `ignore_index`)."""
    if isinstance(loss, MSELoss) or target.is_floating_point():
        return label
    return torch.where(target == loss.ignore_index, target, label)


def check_likelihood(loss: Loss, prediction: Tensor) -> None:
    """Raise an error if the criterion is not a negative log-likelihood, or the prediction does not fit it."""
    check_loss(loss)
    check_floating("The prediction", prediction)
    if isinstance(loss, MSELoss):
        return
    check_logits(prediction)
    if loss.weight is not None or loss.label_smoothing != 0:
        raise LossError(
            f"{loss} with class weights or label smoothing is not the negative logarithm of a distribution.",
            "Drop both settings, or use a curvature matrix that needs no samples (Hessian, GGN, empirical Fisher).",
        )
    if 0 <= loss.ignore_index < prediction.shape[0]:
        raise LossError(
            f"ignore_index={loss.ignore_index} is one of the {prediction.shape[0]} classes that can be drawn.",
            "Mark missing labels by a number that is no class, such as PyTorch's default -100.",
        )


if __name__ == "__main__":
    from torch.nn import CrossEntropyLoss

    from kfs.basics.reduction_factors import criterion
    from kfs.verification import verify

    generator = Generator().manual_seed(0)
    torch.manual_seed(0)
    draws = 5_000
    # A mean of 5,000 draws of unit variance has an error of 0.014 typically, and four times that once in 16,000.
    noise = 4 / draws**0.5

    f = torch.tensor([0.5, -1.0], dtype=torch.float64)
    square = MSELoss()
    y = torch.stack([sample_label(square, f, generator) for _ in range(draws)])
    verify("square loss: draws have the prediction as mean", y.mean(0), f, noise)
    verify("square loss: draws have the identity as covariance", y.T.cov(), torch.eye(2), 2 * noise)

    f = torch.tensor([0.3, -0.2, 1.0], dtype=torch.float64)
    cross_entropy = CrossEntropyLoss()
    y = torch.stack([sample_label(cross_entropy, f, generator) for _ in range(draws)])
    verify("cross-entropy: frequencies are the softmax", y.bincount(minlength=3) / draws, f.softmax(0), noise)

    c = criterion(cross_entropy)
    likelihood = torch.stack([torch.exp(-c(f, label)) for label in torch.arange(3)])
    verify("cross-entropy: exp(-c) is a distribution over the labels", likelihood.sum(), torch.tensor(1.0))
    one, other = torch.randn(2, 2, dtype=torch.float64)
    normal = torch.distributions.Normal(f[:2], 1.0)
    difference = normal.log_prob(one).sum() - normal.log_prob(other).sum()
    c = criterion(square)
    verify("square loss: c is the negative log-density up to a constant", c(f[:2], other) - c(f[:2], one), difference)
