"""The update rules applied to an optimizer's parameters and state, in place."""

from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import Tensor

from kfs.optim.averages import copied_to
from kfs.optim.parameters import Parameters
from kfs.optim.rule import Tensors, adamw_step, natural_step
from kfs.optim.trials import Trial, try_step

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


def tried_updates(
    params: Parameters,
    state: State,
    steps: dict[str, Tensor],
    grads: dict[str, Tensor],
    rest: dict[str, Tensor],
    change: Callable[[], float],
    noise: float,
) -> Trial:
    """Take given steps, and AdamW's for other parameters, as far as they make the loss smaller.

    Weights decay if a step is taken, however short it has become, and the loss may rise by that.

    Args:
        params: All parameters.
        state: The optimizer's.
        steps: Steps, to be multiplied by learning rates.
        grads: Gradients of the loss for these parameters.
        rest: Gradients of parameters that AdamW trains. Its averages change even if the step is taken back.
        change: Evaluates the change of the loss since the call.
        noise: Round-off of the loss.
    """
    old = {n: params.tensors[n].clone() for n in (*steps, *rest)}
    lrs = {n: float(params.groups[n]["lr"]) for n in steps}
    slope = sum(lrs[n] * float((grads[n] * s).sum()) for n, s in steps.items())
    for n, s in steps.items():
        params.tensors[n].add_(s, alpha=lrs[n])
    adamw_updates(params, state, rest, torch.tensor(True))
    trial = try_step([params.tensors[n] for n in old], list(old.values()), change, slope, noise)
    for n in steps if trial.share else ():
        params.tensors[n].sub_(old[n], alpha=lrs[n] * params.groups[n]["weight_decay"])
    return trial


def read_state(state: State, groups: list[dict[str, Any]], saved: dict[str, Any]) -> None:
    """Read the parameters' state again, after PyTorch has converted it to the precision of its parameter.

    Averages may have a better one.
    """
    ids = [i for group in saved["param_groups"] for i in group["params"]]
    for i, p in zip(ids, (p for group in groups for p in group["params"]), strict=True):
        state[p] = copied_to(p.device, saved["state"].get(i, {}))


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
