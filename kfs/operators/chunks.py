"""How many columns are multiplied at once: what the user says, or what is fast for a model and fits into memory."""

from typing import Any

import torch
from torch.nn import Module
from torch.nn.modules.conv import _ConvNd
from torch.utils._python_dispatch import TorchDispatchMode

from kfs.errors import ModelError
from kfs.nested import tensors_in
from kfs.risk import EmpiricalRisk


def choose_chunk_size(risk: EmpiricalRisk, chunk_size: int | None, memory: int | None, reuse: bool = False) -> int:
    """Return how many columns to multiply at once: what the user says, or what is fast for the model and fits."""
    for name, value in {"chunk_size": chunk_size, "memory": memory}.items():
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ModelError(f"{name} is {value!r}.", "Multiply at least one column at once.")
    if chunk_size is None:
        modules = risk.model.modules() if isinstance(risk.model, Module) and risk.device.type == "cpu" else ()
        groups = [module.groups for module in modules if isinstance(module, _ConvNd)]
        with_convolutions = 1 if reuse or any(number > 1 for number in groups) else 4
        chunk_size = with_convolutions if groups else 16
    return chunk_size if memory is None else max(1, min(chunk_size, memory // bytes_per_column(risk)))


def bytes_per_column(risk: EmpiricalRisk) -> int:
    """Estimate what a column takes: all that a forward pass makes for the largest batch, and the parameters twice."""
    made = CountBytes()
    with risk.ranks.agreed("counting bytes"), risk.untouched(), torch.no_grad():
        largest = max(risk.batches("counting bytes"), key=lambda batch: batch.y.numel(), default=None)
        if largest is not None:
            with made:
                risk.evaluate(largest)
    # All processes multiply as many columns at once.
    activations = max(risk.ranks.gather("counting bytes", sum(made.bytes.values())))
    return activations + 2 * sum(p.numel() * p.element_size() for p in risk.params.values())


class CountBytes(TorchDispatchMode):
    """Collects the sizes of all tensors that are made, by their addresses: views do not count."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for t in tensors_in(result):
            self.bytes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return result
