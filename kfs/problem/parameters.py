"""Selects the parameters of a risk, validates them, and finds them in the model.

Their use lives in `kfs.problem.risk`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from kfs.display.suggestions import few, suggest
from kfs.errors import DtypeError, ModelError

Params = dict[str, Tensor]


def refuse_scripted(model: nn.Module, modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Raise an error if a module was compiled by `torch.jit`.

    Args:
        model: The model.
        modules: Names and modules of the model to check.

    Raises:
        ModelError: If one of the modules was scripted or traced.
    """
    for name, module in modules:
        if isinstance(module, torch.jit.ScriptModule):
            which = "The model" if module is model else f"Module {name!r}"
            raise ModelError(
                f"{which} was scripted or traced by torch.jit, which hides its operations and its parameters.",
                "Pass the module that it was made from.",
            )


def module_params(model: nn.Module, params: Sequence[str] | Mapping[str, Tensor] | None) -> Params:
    """Return the chosen parameters of a module by name, by default all trainable ones."""
    refuse_scripted(model, model.named_modules())
    named = dict(model.named_parameters())
    if params is None:
        chosen: Params = {name: p for name, p in named.items() if p.requires_grad}
        if not chosen:
            raise ModelError(
                "No parameter of the model requires gradients, so there is nothing to differentiate.",
                f"Name the parameters to consider: params=[...] with names from {few(named)}."
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
    """Validate and return the parameters of a model that is a function."""
    if not isinstance(params, Mapping):
        raise ModelError(
            f"The model is a function, but params is {type(params).__name__}.",
            "Pass its parameters as a dictionary: params={'W': W, ...}; the function is called as f(params, x).",
        )
    return checked(dict(params))


def checked(params: Params) -> Params:
    """Return the parameters; raise an error if they are empty, or not floating-point."""
    if not params:
        raise ModelError("There are no parameters to consider.", "Name at least one with params=.")
    for name, p in params.items():
        if not isinstance(p, Tensor) or not p.is_floating_point():
            kind = p.dtype if isinstance(p, Tensor) else type(p).__name__
            raise DtypeError(
                f"Parameter {name!r} is {kind}, expected a tensor of real floating-point numbers.",
                "Leave it out with params=.",
            )
    return params


@contextmanager
def switched_on(frozen: Sequence[Tensor]) -> Iterator[None]:
    """Set `requires_grad` of frozen parameters in this context."""
    try:
        for p in frozen:
            p.requires_grad_()
        yield
    finally:
        for p in frozen:
            p.requires_grad_(False)


def has_memory_of(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are the same view of the same memory."""
    if one.untyped_storage()._cdata != other.untyped_storage()._cdata or one.dtype != other.dtype:
        return False
    where = [(t.storage_offset(), t.shape, t.stride()) for t in (one, other)]
    return where[0] == where[1]


def leaves_of(params: Params, kept: Params) -> Params:
    """Return the parameters, with each frozen one replaced by a leaf that shares its memory and requires gradients.

    Args:
        params: The parameters.
        kept: An earlier result, which is returned if it still shares memory with all parameters.
    """
    same = kept.keys() == params.keys() and all(has_memory_of(kept[name], p) for name, p in params.items())
    # Some leaves may be the parameters themselves, and the user may have frozen them since.
    if same and all(p.requires_grad for p in kept.values()):
        return kept
    return {name: p if p.requires_grad else p.detach().requires_grad_() for name, p in params.items()}
