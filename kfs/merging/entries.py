"""Merging state dict entries without curvature: other parameters, buffers and BatchNorm statistics."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from kfs.display.progress import tracked
from kfs.errors import DataError, DtypeError, ModelError
from kfs.problem.data import arguments, as_batches, default_unpack, repeatably
from kfs.runtime.nested import mapped
from kfs.runtime.precision import at_least_float32

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def average(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return a weighted mean, computed in float32 or better, with dtype and device of the first tensor.

    If all tensors are equal, the result is equal to them to the last bit.
    """
    first = tensors[0]
    if all_equal(tensors):
        return first.clone()
    wide = at_least_float32(first.dtype)
    total = torch.zeros_like(first, dtype=wide)
    for t, weight in zip(tensors, weights, strict=True):
        total += weight / sum(weights) * t.to(first.device, wide)
    return total.to(first.dtype)


def all_equal(values: Sequence[Any]) -> bool:
    """Whether all tensors, or other values, are equal."""
    if all(isinstance(value, Tensor) for value in values):
        return all(torch.equal(values[0], other.to(values[0].device)) for other in values[1:])
    return all(bool(values[0] == other) for other in values[1:])


def check_buffers(buffers: str, data: object, models: Sequence[nn.Module]) -> None:
    """Check that buffers can be averaged or recomputed: raise `ModelError` or `DtypeError` if they cannot."""
    if buffers not in {"average", "recompute"}:
        raise ModelError(f"buffers is {buffers!r}.", "Choose 'average' or 'recompute'.")
    if (data is not None) != (buffers == "recompute"):
        raise ModelError(
            f"buffers is {buffers!r}, and data is {'None' if data is None else 'given'}.",
            "Pass both buffers='recompute' and data=..., or neither.",
        )
    if buffers == "recompute" and not _normalizations(models[0]):
        raise ModelError("The models have no BatchNorm statistics to recompute.", "Leave out buffers= and data=.")
    params = dict(models[0].named_parameters(remove_duplicate=False))
    states = [model.state_dict() for model in models]
    for name in states[0].keys() - params.keys():
        values = [state[name] for state in states]
        is_number = all(isinstance(value, Tensor) and value.is_floating_point() for value in values)
        if not is_number and not is_count(name) and not all_equal(values):
            raise DtypeError(
                f"The entry {name!r} of the state dicts differs between models, and cannot be averaged: it is not a "
                "floating-point tensor.",
                "Give it the same value in all models.",
            )


def not_saved(models: Sequence[nn.Module]) -> list[str]:
    """Return the names of buffers that differ between models and are not part of the state dict."""
    saved = models[0].state_dict()
    buffers = [dict(model.named_buffers()) for model in models]
    others = [name for name in buffers[0] if name not in saved]
    return [name for name in others if not all_equal([mine.get(name) for mine in buffers])]


def is_count(name: str) -> bool:
    """Whether an entry is the batch counter of a normalization."""
    return name.rpartition(".")[2] == "num_batches_tracked"


def merged_buffer(name: str, values: Sequence[Any], weights: Sequence[float]) -> tuple[Any, str]:
    """Return a merged entry that is not a parameter, and a verb for the report; empty if all values are equal."""
    if all_equal(values):
        return (values[0].clone() if isinstance(values[0], Tensor) else deepcopy(values[0])), ""
    if is_count(name):
        total = torch.stack([value.to(values[0].device) for value in values]).sum(0)
        return total, "added up"
    return average(values, weights), "averaged"


def _normalizations(model: nn.Module) -> dict[str, _BatchNorm]:
    return {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}


def recomputed(model: nn.Module, state: Mapping[str, Any], data: object, progress: bool | None) -> dict[str, Tensor]:
    """Return BatchNorm statistics for the merged parameters by name, computed in a copy of one of the models.

    Each is the plain mean over batches, as in `torch.optim.swa_utils.update_bn`. All other modules stay in evaluation
    mode.

    Raises:
        DataError: If there are no data, or a statistic is not finite.
    """
    # Only modules with statistics are in training mode.
    copied = deepcopy(model)
    copied.load_state_dict(state)
    places = _normalizations(copied)
    for module in places.values():
        module.reset_running_stats()
        module.momentum = None  # a cumulative average
        module.train()
    device = next(copied.parameters()).device
    seen = 0
    batches = tracked(_inputs(data), "statistics of BatchNorm", None, progress, "batch")
    # The forward passes must not change the global random state.
    with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for x in batches:
            args, kwargs = arguments(mapped(x, lambda t: t.to(device)), copied)
            copied(*args, **kwargs)
            seen += 1
    if seen == 0:
        raise DataError("The data are empty.", "Pass at least one batch.")
    new = {
        f"{path}.{leaf}".lstrip("."): getattr(module, leaf) for path, module in places.items() for leaf in _STATISTICS
    }
    for name, t in new.items():
        if not t.isfinite().all():
            raise DataError(
                f"The statistic {name!r} is not finite for the merged model.",
                "Look for NaN or infinity in the data, and pass batches of more than one example.",
            )
    return new


def _inputs(data: object) -> Iterator[Any]:
    """Yield the inputs of the model, batch by batch."""
    batches: Iterable[Any] = [data] if isinstance(data, Tensor) else as_batches(data)
    for batch in repeatably(batches):
        is_labeled = isinstance(batch, Mapping) and "labels" in batch
        is_pair = isinstance(batch, (tuple, list)) and len(batch) == 2
        yield default_unpack(batch)[0] if is_labeled or is_pair else batch
