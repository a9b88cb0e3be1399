"""Finds predictions in the output of a model. `EmpiricalRisk` and the optimizer accept the same outputs.

The use of predictions lives in `kfs.problem.risk` and `kfs.optim`.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from kfs.errors import DataError, ModelError


def output_tensors(output: Any) -> list[Tensor]:
    """Return the tensors in a model's output: the output itself, or the items of a sequence, mapping or object."""
    if isinstance(output, Tensor):
        return [output]
    if not isinstance(output, (tuple, list, Mapping)):
        output = getattr(output, "__dict__", {})
    values = output.values() if isinstance(output, Mapping) else output
    return [t for t in values if isinstance(t, Tensor)]


def prediction_in(output: Any) -> Tensor:
    """Return the predictions in a model's output: its `logits`, or the first tensor that has an axis.

    Args:
        output: The output of a model: a tensor, an object or mapping with `logits`, or a tuple or list that starts with
            the prediction. Scalar tensors before the prediction, such as a loss, are skipped.

    Raises:
        ModelError: If there is no such tensor, or if an unordered output has several of them.
    """
    named = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(named, Tensor):
        return named
    found = [t for t in output_tensors(output) if t.ndim > 0]
    ordered = isinstance(output, (Tensor, tuple, list))
    if not found or (len(found) > 1 and not ordered):
        raise ModelError(
            f"The model returned a {type(output).__name__} with {len(found)} tensors that have a batch axis, none of "
            "them called `logits`.",
            "Return a tensor, an object or mapping with `logits`, or a tuple that starts with the prediction.",
        )
    return found[0]


def check_batch_axis(f: Tensor, y: Tensor) -> None:
    """Raise an error unless there is one prediction for each target.

    Raises:
        DataError: If the first axes of predictions and targets have different lengths.
    """
    if f.shape[:1] != y.shape[:1]:
        raise DataError(
            f"The model returned shape {list(f.shape)} for targets of shape {list(y.shape)}: not one prediction for "
            "each target.",
            "Put the batch axis first in both, or specify how to split a batch with unpack=.",
        )
