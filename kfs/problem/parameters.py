"""Parameters: which of them a risk considers, and where they are in a model.

Their use lives in `kfs.problem.risk`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from kfs.display.suggestions import few, suggest
from kfs.errors import DtypeError, ModelError

Params = dict[str, Tensor]


class Places:
    """Knows where parameters are in a model, so that it is fast to ask whether they are still there."""

    def __init__(self) -> None:
        self._known: list[tuple[dict[str, Any], str, Any]] = []

    def have(self, model: nn.Module, params: Params) -> bool:
        """Whether a model has these very parameters. The model must be the same one in every call."""
        if not all([owner.get(name) is part for owner, name, part in self._known]):  # noqa: C419 (asked for every batch)
            self._known = []
        if not self._known:
            own = dict(model.named_parameters())
            if not all(p is own[name] for name, p in params.items()):
                return False
            self._known = _places(model, params)
        return True


def _places(model: nn.Module, params: Params) -> list[tuple[dict[str, Any], str, Any]]:
    """Return where parameters, and the modules on the way to them, are: in which dictionary, by which name."""
    found: dict[tuple[int, str], tuple[dict[str, Any], str, Any]] = {}
    for full_name in params:
        module, *path, leaf = model, *full_name.split(".")
        for name in path:
            child = module._modules[name]
            found[id(module), name] = (module._modules, name, child)
            module = cast("nn.Module", child)
        found[id(module), leaf] = (module._parameters, leaf, module._parameters[leaf])
    return list(found.values())


def refuse_scripted(model: nn.Module, modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Refuse modules that `torch.jit` has compiled.

    Raises:
        ModelError: If there is one among the given ones, which belong to the model.
    """
    for name, module in modules:
        if isinstance(module, torch.jit.ScriptModule):
            which = "The model" if module is model else f"Module {name!r}"
            raise ModelError(
                f"{which} was scripted or traced by torch.jit, which hides its operations and its parameters.",
                "Pass the module that it was made from.",
            )


def module_params(model: nn.Module, params: Sequence[str] | Mapping[str, Tensor] | None) -> Params:
    """Choose parameters of a module, all trainable ones by default."""
    refuse_scripted(model, model.named_modules())
    named = dict(model.named_parameters())
    if params is None:
        chosen: Params = {name: p for name, p in named.items() if p.requires_grad}
        if not chosen:
            raise ModelError(
                "No parameter of the model requires gradients, so there is nothing to differentiate.",
                f"Name those to consider: params=[...] with names from {few(named)}."
                if named
                else "Pass a model with parameters.",
            )
        return checked(chosen)
    if isinstance(params, str):
        params = [params]
    if not isinstance(params, Iterable):
        raise ModelError(f"params is {params!r}.", f"Pass a list of names, or a dictionary, from {few(named)}.")
    unknown = [name for name in params if name not in named]
    if unknown:
        raise ModelError(f"The model has no parameters {unknown}.", suggest(unknown, named))
    values = params if isinstance(params, Mapping) else named
    for name in params:
        if values[name].shape != named[name].shape:
            raise ModelError(
                f"Parameter {name!r} has shape {list(named[name].shape)}, but the given value has shape "
                f"{list(values[name].shape)}.",
                "Pass values shaped like the model's.",
            )
    return checked({name: values[name] for name in params})


def function_params(params: object) -> Params:
    """Check the parameters of a function."""
    if not isinstance(params, Mapping):
        raise ModelError(
            f"The model is a function, but params is {type(params).__name__}.",
            "Pass its parameters as a dictionary: params={'W': W, ...}; the function is called as f(params, x).",
        )
    return checked(dict(params))


def checked(params: Params) -> Params:
    """Refuse no parameters, integers, and mixed dtypes or devices."""
    if not params:
        raise ModelError("There are no parameters to consider.", "Name at least one with params=.")
    for name, p in params.items():
        if not isinstance(p, Tensor) or not p.is_floating_point():
            kind = p.dtype if isinstance(p, Tensor) else type(p).__name__
            raise DtypeError(
                f"Parameter {name!r} is {kind}, expected a tensor of real floating-point numbers.",
                "Leave it out with params=.",
            )
    kinds = {(p.dtype, p.device) for p in params.values()}
    if len(kinds) > 1:
        raise DtypeError(
            f"Parameters have different dtypes or devices: {sorted(map(str, kinds))}.",
            "Choose those of one kind with params=, or convert the model.",
        )
    return params


def check_not_meta(device: torch.device) -> None:
    """Refuse parameters without values.

    Raises:
        ModelError: If their device is that of tensors without any.
    """
    if device.type == "meta":
        raise ModelError(
            "The parameters are on the meta device, where tensors have shapes but no values.",
            "Move the model to another device, or see what KFAC would cost with kfs.inspect(model, sample).",
        )


@contextmanager
def switched_on(params: Iterable[Tensor]) -> Iterator[None]:
    """Let parameters require gradients in this context, and leave them as before."""
    frozen = [p for p in params if not p.requires_grad]
    try:
        for p in frozen:
            p.requires_grad_()
        yield
    finally:
        for p in frozen:
            p.requires_grad_(False)


def has_memory_of(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same numbers in the same memory."""
    if one.untyped_storage()._cdata != other.untyped_storage()._cdata or one.dtype != other.dtype:
        return False
    where = [(t.storage_offset(), t.shape, t.stride()) for t in (one, other)]
    return where[0] == where[1]


def with_gradients(params: Params) -> Params:
    """Return parameters that require gradients; leaves with the same values in place of those that do not."""
    return {name: p if p.requires_grad else p.detach().requires_grad_() for name, p in params.items()}


def leaves_of(params: Params, kept: Params) -> Params:
    """Return parameters as `with_gradients` does: earlier ones if they still have the same memory."""
    same = kept.keys() == params.keys() and all(has_memory_of(kept[name], p) for name, p in params.items())
    # Some of them may be the parameters themselves, which somebody has frozen since.
    return kept if same and all(p.requires_grad for p in kept.values()) else with_gradients(params)
