"""The update rules applied to an optimizer's parameters and state, in place."""

from collections.abc import Callable, MutableMapping
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
    finite: Tensor,
) -> None:
    """Update parameters that have curvature, given gradients of the average over examples.

    With `kl_clip`, the change of predictions, as measured by the curvature, is limited.
    """
    if not grads:
        return
    tensors = [params.tensors[n] for n in grads]
    groups = [params.groups[n] for n in grads]
    states = [_state_of(state, p, "average") for p in tensors]
    averages = [s["average"] for s in states]
    lrs = [float(group["lr"]) for group in groups]

    def clipped(u: Tensors) -> Tensors:
        steps = precondition(dict(zip(grads, u, strict=True)))
        D = [steps[n] for n in grads]
        if kl_clip is None:
            return D
        change = torch.stack([lr**2 * (v * d).sum() for lr, v, d in zip(lrs, u, D, strict=True)]).sum()
        shorter = (kl_clip / change.clamp(min=1e-30)).sqrt().clamp(max=1.0)
        return [shorter * d for d in D]

    new_tensors, new_averages = natural_step(
        tensors,
        [g.to(average.dtype) for g, average in zip(grads.values(), averages, strict=True)],
        averages,
        clipped,
        lr=lrs,
        weight_decay=[group["weight_decay"] for group in groups],
        momentum=groups[0]["momentum"],
        ages=[s["age"] for s in states],
    )
    _assign([*tensors, *averages], [*new_tensors, *new_averages], finite)
    for s in states:
        s["age"] += 1


def adamw_updates(params: Parameters, state: State, grads: dict[str, Tensor], finite: Tensor) -> None:
    """Update other parameters by AdamW."""
    for name, g in grads.items():
        p, group = params.tensors[name], params.groups[name]
        s = _state_of(state, p, "exp_avg", "exp_avg_sq")
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
        _assign(old, list(new), finite)
        s["age"] += 1


def _state_of(state: State, p: Tensor, *names: str) -> dict[str, Any]:
    """Return a parameter's state. At first, averages are zeros in float32 or better."""
    mine = state[p]
    for name in names:
        if name not in mine:
            mine[name] = torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32))
            mine["age"] = 0
    return mine


def _assign(targets: list[Tensor], values: list[Tensor], finite: Tensor) -> None:
    """Write new values. On a GPU, which was not asked yet, this happens only if gradients were finite."""
    if finite.is_cuda:  # pragma: no cover (tested on a GPU)
        values = [torch.where(finite, value, target) for target, value in zip(targets, values, strict=True)]
    torch._foreach_copy_(targets, values)
