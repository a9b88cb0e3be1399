"""Restores the user's state, random generators and buffers of the model, after every call, also after an error.

A model that changes its buffers or uses random numbers is not a function of its input, and raises an error.

`restored` is entered once around a computation, `evaluating` around every call of the model. `check_draws` compares
predictions if a call has drawn random numbers.
"""

import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, is_inference_mode_enabled
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from kfs.errors import GraphError, ModelError


def check_module(model: Module) -> None:
    """Raise an error if a prediction for one example would be random or depend on other examples.

    Args:
        model: The module.

    Raises:
        ModelError: If dropout or BatchNorm is in training mode, if BatchNorm has no running statistics, or if
            parametrizations are cached.
    """
    for name, module in model.named_modules():
        random = isinstance(module, _DropoutNd) and module.p > 0
        if module.training and (random or isinstance(module, _BatchNorm)):
            raise ModelError(
                f"Module {name!r} ({type(module).__name__}) is in training mode: the prediction for one example "
                f"depends on {'chance' if random else 'the rest of its batch'}, so curvature is not defined.",
                "Call model.eval() first.",
            )
        if isinstance(module, _BatchNorm) and module.running_mean is None:
            raise ModelError(
                f"Module {name!r} ({type(module).__name__}) keeps no running statistics: the prediction for one "
                "example depends on the rest of its batch, so curvature is not defined.",
                "Use track_running_stats=True, or another normalization.",
            )
        if parametrize._cache_enabled and parametrize.is_parametrized(module):
            raise ModelError(
                f"Module {name!r} ({type(module).__name__}) is parametrized and parametrize.cached() is active, so "
                "its weight would not depend on the parameters.",
                "Exit the context parametrize.cached() first.",
            )


@contextmanager
def restored(model: object, device: torch.device, refuse: bool = True) -> Iterator[None]:
    """Restore random state and the model's buffers after this context, and raise an error if a buffer was changed.

    Args:
        model: A module, or any other object (which has no buffers).
        device: Device of the model. The random states of the CPU, this device, Python and NumPy are restored.
        refuse: Whether a changed buffer is an error. In training, it is not.

    Raises:
        ModelError: If a buffer was changed and `refuse` is true.
    """
    numbers, python, numpy = random_state(device), random.getstate(), sys.modules.get("numpy")
    array_state = None if numpy is None else numpy.random.get_state()
    named = model.named_buffers() if isinstance(model, Module) else ()
    buffers = {name: (b, b._version, b.clone()) for name, b in named}
    try:
        yield
    finally:
        set_random_state(numbers, device)
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(array_state)
        changed = [name for name, (b, version, _) in buffers.items() if b._version != version]
        with torch.no_grad():
            for name in changed if refuse else buffers:
                # If changes are allowed, copy all buffers: BatchNorm does not increase the version counter. Write to
                # `.data`, since an increased counter would invalidate an autograd graph that saved the buffer.
                buffers[name][0].data.copy_(buffers[name][2])
        for name, (b, _, _) in buffers.items():
            path, _, leaf = name.rpartition(".")
            owner = cast("Module", model).get_submodule(path)
            if owner._buffers[leaf] is not b:  # replaced by another tensor instead of changed in place
                owner._buffers[leaf] = b
                changed.append(name)
    if changed and refuse:
        raise ModelError(
            f"The model changed its buffers {changed} in the forward pass, so its prediction depends on earlier calls.",
            "Call model.eval() first.",
        )


def random_state(device: torch.device) -> list[Tensor]:
    """Return the random states of PyTorch: of the CPU and of a GPU."""
    return [torch.get_rng_state()] + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])


def set_random_state(states: Sequence[Tensor], device: torch.device) -> None:
    """Restore random states, as returned by `random_state`."""
    torch.set_rng_state(states[0])
    if device.type == "cuda":  # pragma: no cover (tested on a GPU)
        torch.cuda.set_rng_state(states[1], device)


def other_random_state() -> tuple[Any, ...]:
    """Return the random states of Python, and of NumPy if it is imported, as values that can be compared."""
    numpy = sys.modules.get("numpy")
    state = () if numpy is None else numpy.random.get_state()
    return random.getstate(), *(part.tobytes() if hasattr(part, "tobytes") else part for part in state)


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the generators of the CPU and of a device in this context, and restore their states afterwards."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":  # pragma: no cover (tested on a GPU)
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


class ExtremeDraws(TorchFunctionMode):
    """Replaces uniform random numbers by the smallest or by the largest possible numbers.

    A model that compares uniform numbers with a small probability, such as one that skips layers in training, behaves
    in the same way for most random states. The extreme numbers reveal that it is random.

    Args:
        largest: Whether to return the largest numbers instead of the smallest ones.
    """

    # Only this many draws are replaced: a loop may wait for a number between the extremes.
    most = 1000

    def __init__(self, largest: bool) -> None:
        super().__init__()
        self.largest = largest
        self.draws = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in {torch.rand, torch.rand_like}:
            self.draws += 1
            if self.draws <= self.most:
                result = torch.full_like(result, 1 - torch.finfo(result.dtype).eps if self.largest else 0)
        return result


def check_draws(
    before: Sequence[Tensor], unused: Sequence[Tensor] | None, device: torch.device, predict: Callable[[], Tensor]
) -> Sequence[Tensor]:
    """Raise an error if the random numbers that a model has drawn affect its predictions.

    Args:
        before: Random state before the model ran. It is restored.
        unused: Random state after draws that do not affect predictions, if there were any. Predictions are compared
            only if the model has drawn other numbers since.
        device: Device of the model.
        predict: Evaluates the model once more.

    Returns:
        The random state after the draws.

    Raises:
        ModelError: If predictions differ between random states.
    """
    after = random_state(device)
    set_random_state(before, device)
    if unused is None or not all(map(torch.equal, after, unused)):
        predictions = []
        for seed in (0, 1):
            with seeded(seed, device), ExtremeDraws(largest=seed == 1):
                predictions.append(predict())
        if not equal_up_to_round_off(*predictions):
            raise random_model()
    return after


def random_model() -> ModelError:
    """Return the error for a model that draws random numbers and uses them."""
    return ModelError(
        "The model drew random numbers in the forward pass, so its prediction is not a function of its input.",
        "Call model.eval() first, and remove randomness that is active in evaluation mode.",
    )


def equal_up_to_round_off(a: Tensor, b: Tensor) -> bool:
    """Return whether predictions are equal up to rounding, since the order of summation may differ between runs."""
    if torch.equal(a, b):
        return True
    if a.shape != b.shape or not a.is_floating_point():
        return False
    # Allow a hundred rounding errors of the largest entry.
    tolerance = 100 * torch.finfo(a.dtype).eps
    scale = float(a.nan_to_num(0.0, 0.0, 0.0).abs().max())
    return torch.allclose(a, b, rtol=0.0, atol=tolerance * scale, equal_nan=True)


def uncompiled() -> AbstractContextManager[Any]:
    """Return a context in which compiled models run eagerly, because compiled code hides its operations.

    The context does nothing if PyTorch's compiler was not imported: nothing is compiled then, and importing takes
    seconds.
    """
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


class _Thread(threading.local):
    """The state of a thread."""

    is_evaluating = False  # whether a risk runs its model


_thread = _Thread()


@contextmanager
def evaluating(inputs: Sequence[Tensor] = ()) -> Iterator[None]:
    """Make `is_evaluating` return true in this context, and raise an error if the model changes its input.

    Args:
        inputs: All input tensors of the model.

    Raises:
        ModelError: If an input was changed in place.
    """
    tracked = [(t, t._version) for t in inputs if not t.is_inference()]  # inference tensors have no version counter
    before, _thread.is_evaluating = _thread.is_evaluating, True
    try:
        yield
    finally:
        _thread.is_evaluating = before
    if any([t._version != version for t, version in tracked]):  # noqa: C419 (runs for every batch)
        raise ModelError(
            "The model changed its input in place in the forward pass, which modifies the data.",
            "Avoid in-place operations (x = x - 1 instead of x -= 1, inplace=False), or let the model clone its input "
            "first.",
        )


def is_evaluating() -> bool:
    """Return whether a risk is running its model in this thread, so that the pass is not a training step."""
    return _thread.is_evaluating


def check_no_inference_mode() -> None:
    """Raise an error inside of inference mode, where PyTorch records no graph and derivatives would be zero."""
    if is_inference_mode_enabled():
        raise GraphError(
            "torch.inference_mode() is on, so PyTorch records no graph to differentiate.",
            "Use torch.no_grad() instead, which is supported around calls of kfs.",
        )
