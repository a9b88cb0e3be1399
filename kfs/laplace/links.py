r"""Links: from a normal distribution of a datum's logits, with mean $f$ and covariance $\Sigma$, to probabilities.

Probit replaces the logistic function by that of a normal distribution, for which the average is known (MacKay, 1992).
Only variances matter:

$$
p = \mathrm{softmax}\Big(f_k \big/ \sqrt{1 + \pi \Sigma_{kk} / 8}\Big)_k.
$$

Monte Carlo averages the softmax over draws. The Laplace bridge (Hobbhahn et al., 2022) is the mean of a Dirichlet
distribution whose parameters are $\alpha_k = (1 - 2 / C + e^{f_k} \sum_l e^{-f_l} / C^2) / \Sigma_{kk}$, for the
distribution of logits given that they sum up to zero. Of two classes it is the softmax of $f$, whatever $\Sigma$ is.
"""

from math import log, pi
from typing import Literal

import torch
from torch import Tensor

from kfs.errors import ModelError
from kfs.losses.binary import BinaryCrossEntropy
from kfs.losses.cross_entropy import CrossEntropy, TokenCrossEntropy
from kfs.losses.interface import Loss
from kfs.names import near

Link = Literal["probit", "mc", "bridge"]
LINKS = ("probit", "mc", "bridge")
# Draws of logits that are held together have about this many numbers.
_NUMBERS = 2**24


def check_link(loss: Loss, link: str) -> None:
    """Refuse links that do not exist, and losses without classes.

    Raises:
        ModelError: If it is one of these.
    """
    if link not in LINKS:
        raise ModelError(f"There is no link {link!r}.", near([link], LINKS))
    if not isinstance(loss, BinaryCrossEntropy | CrossEntropy | TokenCrossEntropy):
        raise ModelError(
            f"{loss.name} has no classes whose probabilities could be predicted.",
            "Use functional_variance, the covariance of the model's outputs.",
        )
    if link == "bridge" and isinstance(loss, BinaryCrossEntropy):
        raise ModelError(
            f"{loss.name} has two classes for each logit, for which the Laplace bridge changes nothing.",
            "Use link='probit' or link='mc'.",
        )


def probabilities(loss: Loss, f: Tensor, covariance: Tensor, link: str, num_samples: int, seed: int) -> Tensor:
    """Average the probabilities of classes over a normal distribution of logits, approximately.

    Args:
        loss: Says which axis of the logits has the classes.
        f: Mean of the logits, `[n, *outputs]`.
        covariance: Their covariance, `[n, outputs, outputs]`; several axes are flattened.
        link: How.
        num_samples: Number of draws for Monte Carlo.
        seed: Seed for them.

    Returns:
        Probabilities, shaped like the logits.
    """
    if link == "mc":
        return _monte_carlo(loss, f, covariance, num_samples, seed)
    if link == "bridge":
        return _bridge(f, covariance, _class_axis(loss))
    variance = covariance.diagonal(dim1=1, dim2=2).reshape(f.shape)
    return _squashed(loss, f / (1 + pi / 8 * variance).sqrt())


def _class_axis(loss: Loss) -> int:
    return -1 if isinstance(loss, TokenCrossEntropy) else 1


def _squashed(loss: Loss, logits: Tensor) -> Tensor:
    """Return the model's probabilities for some logits, `[n, *outputs]`."""
    return logits.sigmoid() if isinstance(loss, BinaryCrossEntropy) else logits.softmax(_class_axis(loss))


def _monte_carlo(loss: Loss, f: Tensor, covariance: Tensor, num_samples: int, seed: int) -> Tensor:
    """Average over draws. They come from the same numbers for all data, so that batches do not matter."""
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randn(covariance.shape[1], num_samples, dtype=f.dtype, generator=generator).to(f.device)
    means = []
    at_once = max(1, _NUMBERS // draws.numel())
    for mean, part in zip(f.split(at_once), covariance.split(at_once), strict=True):
        logits = mean.flatten(1).unsqueeze(1) + (_root(part) @ draws).transpose(1, 2)  # [n, samples, outputs]
        p = _squashed(loss, logits.reshape(-1, *f.shape[1:]))
        means.append(p.reshape(len(mean), num_samples, *f.shape[1:]).mean(1))
    return torch.cat(means)


def _root(covariance: Tensor) -> Tensor:
    """Return `L` with `L L^T = covariance`: Cholesky factors, and roots by eigenvalues of what is singular."""
    root: Tensor
    root, failed = torch.linalg.cholesky_ex(covariance)
    if not failed.any():
        return root
    values, vectors = torch.linalg.eigh(covariance)
    by_eigenvalues = vectors * values.clamp(min=0).sqrt().unsqueeze(1)
    return torch.where(failed.reshape(-1, 1, 1) > 0, by_eigenvalues, root)


def _bridge(f: Tensor, covariance: Tensor, axis: int) -> Tensor:
    """Return the mean of the Dirichlet distribution; see above."""
    by_position = f.movedim(axis, -1)
    classes = f.shape[axis]
    # Where the classes of each position are among the flattened outputs, [positions, classes].
    places = torch.arange(f[0].numel(), device=f.device).reshape(f.shape[1:])
    places = places.movedim(axis - 1 if axis > 0 else axis, -1).reshape(-1, classes)
    mean = by_position.reshape(len(f), -1, classes)
    sigma = covariance[:, places.unsqueeze(2), places.unsqueeze(1)]  # [n, positions, classes, classes]
    # Condition on a sum of zero. If the sum has no variance, subtract the mean.
    rows = sigma.sum(-1)
    total = rows.sum(-1, keepdim=True)
    variance = sigma.diagonal(dim1=-2, dim2=-1)
    is_certain = total <= torch.finfo(f.dtype).eps * classes * variance.sum(-1, keepdim=True)
    gain = torch.where(is_certain, 1 / classes, rows / total.masked_fill(is_certain, 1.0))
    mean = mean - gain * mean.sum(-1, keepdim=True)
    variance = (variance - gain * rows).clamp(min=torch.finfo(f.dtype).tiny)
    # In logarithms: exponentials of logits overflow.
    constant = mean.new_tensor(max(1 - 2 / classes, 0.0)).log()
    spread = mean + (-mean).logsumexp(-1, keepdim=True) - 2 * log(classes)
    alpha = torch.logaddexp(constant, spread) - variance.log()
    return alpha.softmax(-1).reshape(by_position.shape).movedim(-1, axis)
