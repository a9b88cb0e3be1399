"""The user's state: random generators and a model's buffers are as before after any call, whatever happens.

A model that needs them changed is not a function of its input, and is refused.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor
from torch.nn import Module

from kfs.errors import ModelError


@contextmanager
def restored(model: object, device: torch.device) -> Iterator[None]:
    """Restore random state and a model's buffers afterwards, and refuse a model that changed a buffer.

    Args:
        model: A module, or anything else (which has no buffers).
        device: Where it runs; the generators of the CPU and of this device are restored.

    Raises:
        ModelError: If a buffer was changed.
    """
    named = model.named_buffers() if isinstance(model, Module) else ()
    buffers = {name: (b, b._version, b.clone()) for name, b in named}
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        changed = [name for name, (b, version, _) in buffers.items() if b._version != version]
        with torch.no_grad():
            for name in changed:
                buffers[name][0].copy_(buffers[name][2])
        for name, (b, _, _) in buffers.items():
            path, _, leaf = name.rpartition(".")
            owner = cast("Module", model).get_submodule(path)
            if owner._buffers[leaf] is not b:  # assigned anew instead of changed
                owner._buffers[leaf] = b
                changed.append(name)
    if changed:
        raise ModelError(
            f"The model changed its buffers {changed} in the forward pass, so its prediction depends on its past.",
            "Call model.eval() first.",
        )


@contextmanager
def no_randomness(device: torch.device) -> Iterator[None]:
    """Refuse a model that draws random numbers in this context.

    Args:
        device: Where it runs; the generators of the CPU and of this device are watched.

    Raises:
        ModelError: If random numbers were drawn.
    """

    def states() -> list[Tensor]:
        return [torch.get_rng_state()] + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])

    before = states()
    yield
    if not all(map(torch.equal, states(), before)):
        raise random_model()


def random_model() -> ModelError:
    """Return the error for a model that draws random numbers."""
    return ModelError(
        "The model drew random numbers in the forward pass, so its prediction is not a function of its input.",
        "Call model.eval() first, and remove randomness that does not depend on the mode.",
    )
