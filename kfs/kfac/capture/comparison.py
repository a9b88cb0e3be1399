"""Comparing passes, with capture and without, of some data and of more: are results the same, and if not, why?"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kfs.errors import ModelError
from kfs.kfac.capture.audit_report import percent
from kfs.kfac.capture.tracking import Tracker, tensors_of
from kfs.precision import at_least_float32


class Results(TorchFunctionMode):
    """Keeps results of all operations, in their order, with the parameters that they use."""

    def __init__(self, tracker: Tracker) -> None:
        super().__init__()
        self.tracker = tracker
        self.results: list[tuple[str, list[str], Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = [self.tracker.find(t) for t in tensors_of((*args, *kwargs.values()))]
        result = func(*args, **kwargs)
        names = sorted({tracked.name for tracked in found if tracked is not None})
        for t in tensors_of([result]):  # attention and recurrent networks have several
            if t.is_floating_point():
                self.results.append((getattr(func, "__name__", str(func)), names, t.detach().clone()))
        return result


@contextmanager
def both(first: AbstractContextManager[Any], second: AbstractContextManager[Any]) -> Iterator[None]:
    """Enter two contexts, the second one inside of the first."""
    with first, second:
        yield


def wrong_rule(plain: Results, captured: Results, difference: float, tolerance: float) -> ModelError:
    """Return the error for predictions that are others under capture; it names the first result that differs."""
    culprit = ""
    for (name, params, one), (_, _, other) in zip(plain.results, captured.results, strict=False):
        if difference_of(one, other) > tolerance:
            used = f" (parameter {', '.join(map(repr, params))})" if params else ""
            culprit = f" {name}{used} is the first operation whose result differs: the rule for it is wrong."
            break
    return ModelError(
        f"Predictions under capture differ by {percent(difference)} from those of the model.{culprit}",
        "Leave the parameters of that operation out with params=, and report it as an error of kfs. audit=False would "
        "go on with other predictions than those of the model.",
    )


def mixing_error(cause: str) -> ModelError:
    """Return the error for a model that mixes data, given how one knows."""
    return ModelError(
        f"{cause} The prediction for one datum depends on the rest of its batch, so that curvature per datum is not "
        "defined.",
        "Change the model such that it treats data one by one, or let a datum be what influences each other (a graph, "
        "a group). If you know better, pass audit=False.",
    )


def compare_whole(f: Tensor, few: Tensor, tolerance: float) -> None:
    """Compare predictions of a whole batch with those of its last data alone.

    Raises:
        ModelError: If they differ.
    """
    difference = difference_of(f[len(f) - len(few) :], few)
    if difference > tolerance:
        raise mixing_error(
            f"The predictions for the last {len(few)} data differ by {percent(difference)} if they are computed in a "
            f"batch of {len(f)}."
        )


def difference_of(a: Tensor, b: Tensor) -> float:
    """Return the relative difference of two results, where they are finite."""
    if a.shape != b.shape:
        return torch.inf
    finite = a.isfinite() & b.isfinite()
    dtype = at_least_float32(a.dtype)
    a, b = torch.where(finite, a, 0).to(dtype), torch.where(finite, b, 0).to(dtype)
    size = float(a.abs().max()) if a.numel() else 0.0
    distance = float((a - b).abs().max()) if a.numel() else 0.0
    return distance / size if size > 0 else float(distance > 0)
