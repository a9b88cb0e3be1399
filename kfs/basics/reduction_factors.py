r"""Reduction factors: the scale of a loss function, separated from its criterion.

Training minimizes a number $\mathcal{L}$ that is made of three independent things: the
network $f$, a *criterion* $c$ that scores one prediction against one target, and a
*reduction factor* $R$ that scales the sum of the scores,

$$
\mathcal{L}(\theta) = R \sum_{n=1}^N c(f(x_n, \theta), y_n).
$$

PyTorch's loss modules mix the last two. Nearly every scaling bug in curvature code
comes from this, so we separate them. The square loss has the customary one half in the
criterion, hence a two in the factor; $d = \dim\, \mathcal{Y}$ is the number of
entries of one target:

| loss | criterion $c(f, y)$ | $R$ for `"sum"` | $R$ for `"mean"` |
|---|---|---|---|
| `MSELoss` | $\tfrac12 \lVert f - y \rVert^2$ | $2$ | $2 / (N d)$ |
| `CrossEntropyLoss` | $-\log\, \mathrm{softmax}(f)_y$ | $1$ | $1 / (N d)$ |

A class label has $d = 1$ for any number of classes, and a sequence of $S$ labels has
$d = S$, also if labels are replaced by probabilities.
The mean is over *targets*, never over logits. With class weights $w$ or an ignored
index it is a weighted mean: $R_{\mathrm{mean}} = 1 / \sum w_{y}$ over the labels that
count, and the criterion contains the weight of its own label.

Implements: square loss, cross-entropy loss and their reduction factors (chapter 2,
"Empirical Risk Minimization").
"""

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor
from torch.nn import CrossEntropyLoss, MSELoss
from torch.nn.functional import cross_entropy

from kfs.basics._checks import check_counted, check_datum, check_loss, check_targets

Loss: TypeAlias = MSELoss | CrossEntropyLoss


def reduction_factor(loss: Loss, target: Tensor) -> float:
    """Compute `R` such that the loss is `R` times the summed criterion.

    Args:
        loss: A `MSELoss` or `CrossEntropyLoss` whose reduction is `"mean"` or `"sum"`.
        target: All targets, stacked along the first axis. For cross-entropy either
            class labels `[N, ...]` (integers) or class probabilities `[N, C, ...]`.

    Returns:
        The reduction factor.

    Raises:
        LossError: If the loss is another one, or is not reduced.
        DataError: If there is no target that counts.

    Example:
        >>> import torch
        >>> reduction_factor(MSELoss(), torch.zeros(5, 2))
        0.2
        >>> reduction_factor(CrossEntropyLoss(), torch.tensor([0, 1, 1, 0]))
        0.25
    """
    check_targets(loss, target)
    if isinstance(loss, MSELoss):
        return 2.0 if loss.reduction == "sum" else 2.0 / target.numel()
    return 1.0 if loss.reduction == "sum" else 1.0 / _num_labels(loss, target)


def criterion(loss: Loss) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the criterion `c(f, y)`, the score of a prediction against a target.

    Args:
        loss: A `MSELoss` or `CrossEntropyLoss`. Its reduction (`"mean"` or `"sum"`)
            plays no role in the result.

    Returns:
        A function of one prediction, shape `[...]` (square loss) or `[C, ...]`
        (cross-entropy), and its target, without a batch axis. It returns a scalar.

    Raises:
        LossError: If the loss is another one, or is not reduced.

    Example:
        >>> import torch
        >>> c = criterion(MSELoss())
        >>> c(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))
        tensor(2.)
    """
    check_loss(loss)

    def c(f: Tensor, y: Tensor) -> Tensor:
        check_datum(loss, f, y)
        if isinstance(loss, MSELoss):
            return 0.5 * ((f - y) ** 2).sum()
        return cross_entropy(
            f.unsqueeze(0),
            y.unsqueeze(0),
            weight=loss.weight,
            ignore_index=loss.ignore_index,
            label_smoothing=loss.label_smoothing,
            reduction="sum",
        )

    return c


def _num_labels(loss: CrossEntropyLoss, target: Tensor) -> float:
    """Return the divisor of PyTorch's mean: how many labels count, or their weights."""
    if target.is_floating_point():  # probabilities [N, C, ...]
        return target.numel() / target.shape[1]
    counted = target[target != loss.ignore_index]
    total = (
        counted.numel() if loss.weight is None else loss.weight[counted].sum().item()
    )
    check_counted(total)
    return total


if __name__ == "__main__":
    import torch

    from kfs.verification import verify

    torch.manual_seed(0)
    N, C, S = 5, 3, 4
    logits, values = (
        torch.randn(N, C, S, dtype=torch.float64),
        torch.randn(N, C, S, dtype=torch.float64),
    )
    labels = torch.randint(C, (N, S))
    labels[0, 1] = labels[3, 2] = -100  # PyTorch's default ignore_index
    weight = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)

    for reduction in ("mean", "sum"):
        for name, loss, y in (
            ("MSELoss", MSELoss(reduction=reduction), values),
            (
                "CrossEntropyLoss",
                CrossEntropyLoss(reduction=reduction),
                labels.clamp(min=0),
            ),
            ("labels ignored", CrossEntropyLoss(reduction=reduction), labels),
            (
                "weighted, smoothed",
                CrossEntropyLoss(weight, label_smoothing=0.1, reduction=reduction),
                labels,
            ),
            ("probabilities", CrossEntropyLoss(reduction=reduction), values.softmax(1)),
        ):
            c = criterion(loss)
            total = torch.stack(
                [c(f_n, y_n) for f_n, y_n in zip(logits, y, strict=True)]
            ).sum()
            risk, case = reduction_factor(loss, y) * total, f"{name}, {reduction}"
            verify(
                "R times the summed criterion is PyTorch's loss",
                risk,
                loss(logits, y),
                case=case,
            )
