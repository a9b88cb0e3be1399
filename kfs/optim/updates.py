"""The update rules applied to an optimizer's parameters and state, in place."""

from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

import torch
from torch import Tensor

from kfs.optim.parameters import Parameters
from kfs.optim.rule import Tensors, adamw_step, natural_step

State = MutableMapping[Tensor, dict[str, Any]]
_BETAS = (0.9, 0.95)


def natural_updates(
    params: Parameters,
    state: State,
    grads: dict[str, Tensor],
    precondition: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    kl_clip: float | None,
    good: Tensor,
) -> None:
    """Update parameters that have curvature.

    Args:
        params: Parameters and their groups.
        state: The optimizer's state, by parameter.
        grads: Gradients of the average over examples, by name.
        precondition: Multiplies with the damped inverse curvature.
        kl_clip: Limits the change of predictions, as the curvature sees it.
        good: Whether gradients are finite.
    """
    names = list(grads)
    if not names:
        return
    tensors, groups = [params.tensors[n] for n in names], [params.groups[n] for n in names]
    states, lrs = [_state_of(state, p, ("average",)) for p in tensors], [float(group["lr"]) for group in groups]

    def clipped(u: Tensors) -> Tensors:
        D = precondition(dict(zip(names, u, strict=True)))
        if kl_clip is None:
            return [D[n] for n in names]
        change = torch.stack([lr**2 * (v * D[n]).sum() for n, v, lr in zip(names, u, lrs, strict=True)]).sum()
        shorter = (kl_clip / change.clamp(min=1e-30)).sqrt().clamp(max=1.0)
        return [shorter * D[n] for n in names]

    new, averages = natural_step(
        tensors,
        [g.to(s["average"].dtype) for g, s in zip(grads.values(), states, strict=True)],
        [s["average"] for s in states],
        clipped,
        lr=lrs,
        weight_decay=[group["weight_decay"] for group in groups],
        momentum=groups[0]["momentum"],
        ages=[s["age"] for s in states],
    )
    _assign([*tensors, *(s["average"] for s in states)], [*new, *averages], good)
    for s in states:
        s["age"] += 1


def adamw_updates(params: Parameters, state: State, grads: dict[str, Tensor], good: Tensor) -> None:
    """Update the others by AdamW; see `natural_updates`."""
    for name, g in grads.items():
        p, group = params.tensors[name], params.groups[name]
        s = _state_of(state, p, ("exp_avg", "exp_avg_sq"))
        old = [p, s["exp_avg"], s["exp_avg_sq"]]
        new = adamw_step(
            p,
            g.to(s["exp_avg"].dtype),
            *old[1:],
            lr=float(group["lr"]) * group["adamw_lr"],
            weight_decay=group["weight_decay"] / group["adamw_lr"],  # relative to lr, as for all parameters
            betas=_BETAS,
            age=s["age"],
        )
        _assign(old, list(new), good)
        s["age"] += 1


def _state_of(state: State, p: Tensor, names: Iterable[str]) -> dict[str, Any]:
    """Return a parameter's state, new at first, with averages in float32 or better."""
    mine = state[p]
    for name in names:
        if name not in mine:
            dtype = torch.promote_types(p.dtype, torch.float32)
            mine[name] = torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)
            mine["age"] = 0
    return mine


def _assign(targets: list[Tensor], values: list[Tensor], good: Tensor) -> None:
    """Write new values; where the device has not been asked yet, only if gradients were finite."""
    if good.is_cuda:  # pragma: no cover (tested on a GPU)
        values = [torch.where(good, value, target) for target, value in zip(targets, values, strict=True)]
    torch._foreach_copy_(targets, values)
