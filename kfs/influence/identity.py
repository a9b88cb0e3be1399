"""What an index belongs to: weights, curvature, settings and data, in a form that can be compared and told apart."""

from collections.abc import Mapping
from typing import Any

import torch

from kfs.data import Batch, Fingerprint, fingerprint
from kfs.kfac.storage.function_digest import function_digest
from kfs.kfac.storage.journal import details
from kfs.kfac.storage.seen_data import digest
from kfs.kfac.structures import BlockDiagonal
from kfs.losses.quantities import Quantity
from kfs.nested import tensors_in
from kfs.risk import EmpiricalRisk

# Details that people read in a message. Of all others, only that they differ is said.
_READABLE = ("damping", "method", "of_train", "rank", "compression", "dtype", "number of data", "precision")


def identity(
    K: BlockDiagonal, train: EmpiricalRisk, of_train: Quantity, settings: Mapping[str, object]
) -> dict[str, Any]:
    """Describe what an index belongs to.

    Args:
        K: The curvature.
        train: The training data, with model and loss.
        of_train: What is differentiated.
        settings: What else has to be the same, by name.
    """
    name = getattr(train.model, "__qualname__", type(train.model).__name__)
    return {
        "model": repr(train.model) if isinstance(train.model, torch.nn.Module) else name,
        "loss": details(train.loss),
        "parameters": {name: list(p.shape) for name, p in train.params.items()},
        "curvature": digest(t for stack in K.stacks for t in tensors_in(stack.state()["blocks"])),
        "of_train": _named(of_train),
        "number of data": train.num_data,
        "precision": f"{train.dtype} on {train.device.type}",
        **{name: str(value) for name, value in settings.items()},
        **weights(train),
    }


def weights(risk: EmpiricalRisk) -> dict[str, str]:
    """Return digests of the values of parameters, and of everything else that a module has."""
    module = risk.model if isinstance(risk.model, torch.nn.Module) else torch.nn.Module()
    with risk.untouched():  # with all numbers of parameters that are sharded
        return {
            "values of parameters": digest(risk.params.values()),
            "values of other parameters and buffers": digest([*module.parameters(), *module.buffers()]),
        }


def differences(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> list[str]:
    """Say what differs, with both values of what people can read."""
    found = []
    for name in mine:
        if theirs.get(name) != mine[name]:
            both = f" ({theirs.get(name)} there, {mine[name]} here)" if name in _READABLE else ""
            found.append(f"{name}{both}")
    return found


def batch_identity(batch: Batch) -> list[str]:
    """Return what tells a batch from others: shapes, and a digest of all numbers.

    A gradient takes a pass through the model, beside which a digest of its input costs little.
    """
    found: Fingerprint = fingerprint(batch.x, batch.y, complete=True)
    return [*found.tensors, found.digest]


def _named(quantity: Quantity) -> str:
    """Return a quantity's name; of a function, also a digest of its code and of the values that it uses."""
    if isinstance(quantity, str):
        return quantity
    name = getattr(quantity, "__qualname__", type(quantity).__name__)
    return f"{name} ({function_digest(quantity)})"
