"""The user's state: random generators and a model's buffers are as before after any call, whatever happens.

A model that needs them changed is not a function of its input, and is refused.
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
    """Refuse a module whose prediction for one example depends on chance, on other data or on the past.

    Args:
        model: The module.

    Raises:
        ModelError: If it is in a training mode that matters, normalizes over batches, or caches its parametrizations.
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
                "Leave parametrize.cached() first.",
            )


@contextmanager
def unchanged(inputs: Sequence[Tensor]) -> Iterator[None]:
    """Refuse a model that changes its input in this context.

    Args:
        inputs: All tensors that it is given.

    Raises:
        ModelError: If one of them was changed in place.
    """
    tracked = [t for t in inputs if not t.is_inference()]  # the others do not count their changes
    before = [t._version for t in tracked]
    yield
    if [t._version for t in tracked] != before:
        raise ModelError(
            "The model changed its input in place in the forward pass, so the data are not what they were.",
            "Write it without (x = x - 1 instead of x -= 1, inplace=False), or let it clone its input first.",
        )


@contextmanager
def restored(model: object, device: torch.device, refuse: bool = True) -> Iterator[None]:
    """Restore random state and a model's buffers afterwards, and refuse a model that changed a buffer.

    Args:
        model: A module, or anything else (which has no buffers).
        device: Where it runs; the generators of the CPU and of this device are restored, and those of Python and NumPy.
        refuse: Whether a changed buffer is an error. In training, it is not.

    Raises:
        ModelError: If a buffer was changed.
    """
    named = model.named_buffers() if isinstance(model, Module) else ()
    buffers = {name: (b, b._version, b.clone()) for name, b in named}
    try:
        with same_random_state(device):
            yield
    finally:
        changed = [name for name, (b, version, _) in buffers.items() if b._version != version]
        with torch.no_grad():
            for name in changed if refuse else buffers:
                # Batch normalization does not count its changes. And a graph that somebody needs may hold the buffer:
                # writing to its data does not count either.
                buffers[name][0].data.copy_(buffers[name][2])
        for name, (b, _, _) in buffers.items():
            path, _, leaf = name.rpartition(".")
            owner = cast("Module", model).get_submodule(path)
            if owner._buffers[leaf] is not b:  # assigned anew instead of changed
                owner._buffers[leaf] = b
                changed.append(name)
    if changed and refuse:
        raise ModelError(
            f"The model changed its buffers {changed} in the forward pass, so its prediction depends on its past.",
            "Call model.eval() first.",
        )


@contextmanager
def same_random_state(device: torch.device) -> Iterator[None]:
    """Restore the random state of PyTorch, on the CPU and on a device, of Python and of NumPy afterwards."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), _other_generators():
        yield


@contextmanager
def _other_generators() -> Iterator[None]:
    """Restore the random state of Python, and of NumPy if somebody has imported it."""
    python = random.getstate()
    numpy = sys.modules.get("numpy")
    array_state = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(array_state)


def random_state(device: torch.device) -> list[Tensor]:
    """Return the states of the generators of the CPU and of a device."""
    return [torch.get_rng_state()] + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])


def other_random_state() -> tuple[Any, ...]:
    """Return the states of the generators of Python, and of NumPy if somebody has imported it; they can be compared."""
    numpy = sys.modules.get("numpy")
    state = () if numpy is None else numpy.random.get_state()
    return random.getstate(), *(part.tobytes() if hasattr(part, "tobytes") else part for part in state)


def is_same(states: Sequence[Tensor], others: Sequence[Tensor] | None) -> bool:
    """Whether random states are equal."""
    return others is not None and all(map(torch.equal, states, others))


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the generators of the CPU and of a device in this context, and leave them as before."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":  # pragma: no cover (tested on a GPU)
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


class ExtremeDraws(TorchFunctionMode):
    """Replaces uniform random numbers by the smallest or by the largest possible ones.

    A model that compares them with a small probability, as one that leaves out layers in training does, would behave
    in the same way for most random states.

    Args:
        largest: Whether to take the largest ones.
    """

    # Further draws are as they are: a loop may wait for a number between the extremes.
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


@contextmanager
def exchanged(owner: Any, params: dict[str, Tensor]) -> Iterator[None]:
    """Let an object have other `params` in this context."""
    before = owner.params
    try:
        owner.params = params
        yield
    finally:
        owner.params = before


class UnusedDraws:
    """Finds out whether predictions depend on random numbers that a model draws.

    It does so once, and again if a model draws other random numbers than before.

    Args:
        device: Where the model runs; the generators of the CPU and of this device are watched.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: list[Tensor] | None = None  # the random state after draws that are not used

    def check(self, before: list[Tensor], predict: Callable[[], Tensor]) -> None:
        """Refuse a model that has drawn random numbers, unless its predictions are the same for other numbers.

        Args:
            before: The random state before it ran. It is restored.
            predict: Evaluates the model once more.

        Raises:
            ModelError: If predictions differ.
        """
        after = random_state(self._device)
        if is_same(after, before):
            return
        torch.set_rng_state(before[0])
        if self._device.type == "cuda":  # pragma: no cover (tested on a GPU)
            torch.cuda.set_rng_state(before[1], self._device)
        if is_same(after, self._known):
            return
        predictions = []
        for seed in (0, 1):
            with seeded(seed, self._device), ExtremeDraws(largest=seed == 1):
                predictions.append(predict())
        if not equal_up_to_round_off(*predictions):
            raise random_model()
        self._known = after


@contextmanager
def no_randomness(device: torch.device) -> Iterator[None]:
    """Refuse a model that draws random numbers in this context.

    Args:
        device: Where it runs; the generators of the CPU and of this device are watched.

    Raises:
        ModelError: If random numbers were drawn.
    """
    before = random_state(device)
    yield
    if not is_same(random_state(device), before):
        raise random_model()


def random_model() -> ModelError:
    """Return the error for a model that draws random numbers and uses them."""
    return ModelError(
        "The model drew random numbers in the forward pass, so its prediction is not a function of its input.",
        "Call model.eval() first, and remove randomness that does not depend on the mode.",
    )


def equal_up_to_round_off(a: Tensor, b: Tensor) -> bool:
    """Whether predictions are equal, up to the order in which a device adds numbers up."""
    if torch.equal(a, b):
        return True
    if a.shape != b.shape or not a.is_floating_point():
        return False
    # A hundred roundings of the largest number.
    tolerance = 100 * torch.finfo(a.dtype).eps
    scale = float(a.nan_to_num(0.0, 0.0, 0.0).abs().max())
    return torch.allclose(a, b, rtol=0.0, atol=tolerance * scale, equal_nan=True)


def uncompiled() -> AbstractContextManager[Any]:
    """Return a context in which a compiled model runs as it was written: compiled code hides its operations.

    Nothing is compiled as long as nobody has imported PyTorch's compiler, which takes seconds.
    """
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


_evaluations = threading.local()  # in each thread: how many predictions are being computed


@contextmanager
def evaluating() -> Iterator[None]:
    """Let `is_evaluating` return true in this context."""
    before = getattr(_evaluations, "number", 0)
    _evaluations.number = before + 1
    try:
        yield
    finally:
        _evaluations.number = before


def is_evaluating() -> bool:
    """Whether a model is running for a risk, so that nobody trains with what it computes."""
    return getattr(_evaluations, "number", 0) > 0


def check_no_inference_mode() -> None:
    """Refuse to work inside of inference mode, where PyTorch records no graph and derivatives would be zero."""
    if is_inference_mode_enabled():
        raise GraphError(
            "torch.inference_mode() is on, in which PyTorch records nothing to differentiate.",
            "Leave it; torch.no_grad() is fine around calls of kfs.",
        )
