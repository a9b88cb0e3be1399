r"""Reduction factors: the scale of a loss function, separated from its criterion.

Training minimizes a number $\mathcal{L}$ that is made of three independent things: the network $f$, a *criterion* $c$
that scores one prediction against one target, and a *reduction factor* $R$ that scales the sum of the scores,

$$
\mathcal{L}(\theta) = R \sum_{n=1}^N c(f(x_n, \theta), y_n).
$$

PyTorch's loss modules mix the last two. Nearly every scaling bug in curvature code comes from this, so we separate
them. The square loss has the customary one half in the criterion, hence a two in the factor; $\dim\, \mathcal{Y}$ is
the number of entries of one target:

| loss | criterion $c(f, y)$ | $R$ for `"sum"` | $R$ for `"mean"` |
|---|---|---|---|
| `MSELoss` | $\tfrac12 \lVert f - y \rVert^2$ | $2$ | $2 / (N \dim\, \mathcal{Y})$ |
| `CrossEntropyLoss` | $-\log\, \mathrm{softmax}(f)_y$ | $1$ | $1 / (N \dim\, \mathcal{Y})$ |

A class label has $\dim\, \mathcal{Y} = 1$ for any number of classes, and a sequence of $S$ labels has
$\dim\, \mathcal{Y} = S$, also if labels are replaced by probabilities. The mean is over *targets*, never over logits.
With class weights $w$ or an ignored index it is a weighted mean: $R_{\mathrm{mean}} = 1 / \sum w_{y}$ over the labels
that count, and the criterion contains the weight of its own label.

Implements: square loss, cross-entropy loss and their reduction factors (chapter 2, "Empirical Risk Minimization").
"""

from collections.abc import Callable
from typing import TypeAlias

from torch import Size, Tensor, int64
from torch.nn import CrossEntropyLoss, Module, MSELoss
from torch.nn.functional import cross_entropy

from kfs.basics._checks import check_floating, check_like, check_tensor
from kfs.errors import DataError, DtypeError, LossError, ShapeError

Loss: TypeAlias = MSELoss | CrossEntropyLoss


def reduction_factor(loss: Loss, target: Tensor) -> float:
    """Compute `R` such that the loss is `R` times the sum of the criterion over the data.

    Args:
        loss: A `MSELoss` or `CrossEntropyLoss` whose reduction is `"mean"` or `"sum"`.
        target: All targets, stacked along the first axis. For cross-entropy either class labels `[N, ...]`
            (integers) or class probabilities `[N, C, ...]`.

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
    check_loss(loss)
    check_tensor("The target", target)
    if target.ndim == 0 or target.numel() == 0:
        raise DataError(
            f"The target has shape {list(target.shape)}: there is no example in it.",
            "Pass all targets, stacked along the first axis.",
        )
    if isinstance(loss, MSELoss):
        return 2.0 if loss.reduction == "sum" else 2.0 / target.numel()
    return 1.0 if loss.reduction == "sum" else 1.0 / _num_labels(loss, target)


def criterion(loss: Loss) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss's criterion `c(f, y)`: the score of one prediction against one target.

    Args:
        loss: A `MSELoss` or `CrossEntropyLoss`. Its reduction (`"mean"` or `"sum"`) plays no role in the result.

    Returns:
        A function of one prediction, shape `[...]` (square loss) or `[C, ...]` (cross-entropy), and its target,
        without a batch axis. It returns a scalar.

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


def check_loss(loss: Module) -> None:
    """Raise an error unless the loss is reduced, and of a supported type (subclasses may redefine anything)."""
    if type(loss) is not MSELoss and type(loss) is not CrossEntropyLoss:
        raise LossError(
            f"The loss is {loss!r}, but kfs.basics defines MSELoss and CrossEntropyLoss (and no subclass of them).",
            "Pass an instance of one of the two: torch.nn.MSELoss() or torch.nn.CrossEntropyLoss().",
        )
    if loss.reduction not in {"mean", "sum"}:
        raise LossError(
            f"The loss has reduction={loss.reduction!r}, so it is not one number.",
            "Choose reduction='mean' or reduction='sum'.",
        )


def check_datum(loss: Loss, f: Tensor, y: Tensor) -> None:
    """Raise an error if prediction and target of one example do not fit."""
    check_floating("The prediction", f)
    check_tensor("The target", y)
    if isinstance(loss, MSELoss):
        check_floating("The target", y)
        _check_target_shape(f, y, f.shape)
        return
    check_logits(f)
    if loss.weight is not None:
        check_like("The loss's weight", loss.weight, "a prediction's class axis", f.reshape(f.shape[0], -1)[:, 0])
    _check_labels(loss, y)
    _check_target_shape(f, y, f.shape if y.is_floating_point() else f.shape[1:])
    if not y.is_floating_point():
        _check_range(loss, y, f.shape[0])


def check_logits(f: Tensor) -> None:
    """Raise an error for a prediction without classes."""
    if f.ndim == 0 or f.numel() == 0:
        raise ShapeError(
            f"The prediction has shape {list(f.shape)}, but cross-entropy needs one logit per class.",
            "Pass one example's logits, shape [C, ...].",
        )


def _check_target_shape(f: Tensor, y: Tensor, expected: Size) -> None:
    """Raise an error if a target does not have the expected shape."""
    if y.shape != expected:
        raise ShapeError(
            f"The prediction has shape {list(f.shape)}, so one example's target has shape {list(expected)}, "
            f"but it has shape {list(y.shape)} (dtype {y.dtype}).",
            "Pass one example without its batch axis; class labels as torch.int64, probabilities like the logits.",
        )


def _check_labels(loss: CrossEntropyLoss, y: Tensor) -> None:
    """Raise an error if targets are neither class labels nor class probabilities."""
    if y.is_floating_point() and loss.ignore_index >= 0:
        raise LossError(
            f"The target is class probabilities, but ignore_index={loss.ignore_index}, which is for labels.",
            "Leave ignore_index at its default of -100.",
        )
    if not y.is_floating_point() and y.dtype != int64:
        raise DtypeError(f"The target has dtype {y.dtype}, but class labels are torch.int64.", "Convert it: y.long().")


def _check_range(loss: CrossEntropyLoss, y: Tensor, num_classes: int) -> None:
    """Raise an error if labels are out of range."""
    counted = y[y != loss.ignore_index]
    if counted.numel() and not 0 <= counted.min() <= counted.max() < num_classes:
        raise DataError(
            f"Labels go from {counted.min().item()} to {counted.max().item()}, but there are {num_classes} classes.",
            f"Use labels from 0 to {num_classes - 1}, or ignore_index ({loss.ignore_index}) for missing ones.",
        )


def _num_labels(loss: CrossEntropyLoss, target: Tensor) -> float:
    """Return the divisor of PyTorch's mean: the (weighted) number of labels, without ignored ones."""
    _check_labels(loss, target)
    if target.is_floating_point():
        if target.ndim < 2:
            raise ShapeError(
                f"The target has shape {list(target.shape)}, dtype {target.dtype}: neither labels nor probabilities.",
                "Pass labels [N, ...] as torch.int64, or probabilities [N, C, ...].",
            )
        return target.numel() / target.shape[1]
    counted = target[target != loss.ignore_index]
    if loss.weight is not None:
        _check_range(loss, target, len(loss.weight))
    total = counted.numel() if loss.weight is None else loss.weight[counted].sum().item()
    if total == 0:
        raise DataError(
            "Every label is ignore_index or of a class with weight zero, so their mean is 0/0.",
            "Pass data with at least one counted label, or use reduction='sum'.",
        )
    return total


if __name__ == "__main__":
    import torch

    from kfs.verification import verify

    torch.manual_seed(0)
    N, C, S = 5, 3, 4
    logits, values = torch.randn(N, C, S, dtype=torch.float64), torch.randn(N, C, S, dtype=torch.float64)
    labels = torch.randint(C, (N, S))
    labels[0, 1] = labels[3, 2] = -100  # PyTorch's default ignore_index
    weight = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)

    for reduction in ("mean", "sum"):
        for name, loss, y in (
            ("MSELoss", MSELoss(reduction=reduction), values),
            ("CrossEntropyLoss", CrossEntropyLoss(reduction=reduction), labels.clamp(min=0)),
            ("labels ignored", CrossEntropyLoss(reduction=reduction), labels),
            ("weighted, smoothed", CrossEntropyLoss(weight, label_smoothing=0.1, reduction=reduction), labels),
            ("probabilities", CrossEntropyLoss(reduction=reduction), values.softmax(1)),
        ):
            c = criterion(loss)
            total = torch.stack([c(f_n, y_n) for f_n, y_n in zip(logits, y, strict=True)]).sum()
            risk, case = reduction_factor(loss, y) * total, f"{name}, {reduction}"
            verify("R times the summed criterion is PyTorch's loss", risk, loss(logits, y), case=case)
