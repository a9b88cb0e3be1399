"""What models return: finding predictions in it. A risk and the optimizer take the same outputs.

What is done with predictions lives in `kfs.problem.risk` and `kfs.optim`.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from kfs.errors import DataError, ModelError


def parts_of(output: Any) -> list[Tensor]:
    """Return the tensors in a model's output: itself, or the parts of a sequence, a mapping or an object."""
    if isinstance(output, Tensor):
        return [output]
    if not isinstance(output, (tuple, list, Mapping)):
        output = getattr(output, "__dict__", {})
    values = output.values() if isinstance(output, Mapping) else output
    return [t for t in values if isinstance(t, Tensor)]


def prediction_in(output: Any) -> Tensor:
    """Return the predictions in a model's output: its `logits`, or the first tensor that has an axis.

    Args:
        output: What a model returned: a tensor, an object or mapping with `logits`, or a tuple or list that starts with
            the prediction. Numbers before the prediction, such as a loss, are passed over.

    Raises:
        ModelError: If there is none, or if there are several without an order.
    """
    named = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(named, Tensor):
        return named
    found = [t for t in parts_of(output) if t.ndim > 0]
    ordered = isinstance(output, (Tensor, tuple, list))
    if not found or (len(found) > 1 and not ordered):
        raise ModelError(
            f"The model returned a {type(output).__name__} with {len(found)} tensors that have a batch axis, none of "
            "them called `logits`.",
            "Return a tensor, an object or mapping with `logits`, or a tuple that starts with the prediction.",
        )
    return found[0]


def check_batch_axis(f: Tensor, y: Tensor) -> None:
    """Refuse predictions of which there is not one for each target.

    Raises:
        DataError: If their first axes differ.
    """
    if f.shape[:1] != y.shape[:1]:
        raise DataError(
            f"The model returned shape {list(f.shape)} for targets of shape {list(y.shape)}: not one prediction for "
            "each target.",
            "Put the batch axis first in both, or say how batches are split with unpack=.",
        )
