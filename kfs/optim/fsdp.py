"""Training of models that `fully_shard` (FSDP2) has sharded over processes.

PyTorch unshards parameters, layer by layer, while the model runs, and leaves each process its part of averaged
gradients. The optimizer works in the same way: momentum and updates are sharded. This module contains what needs
unsharded tensors: an *audit*, and vectors that are sent back for factors. How gradients are sent to inverses is in
`across_ranks`. Computations outside of training live in `kfs.problem.whole_parameters`.

How `fully_shard` stores unsharded parameters is not a public interface of PyTorch. Only this file depends on it.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn

from kfs.distributed import Group, Ranks
from kfs.errors import ModelError
from kfs.problem.whole_parameters import is_sharded, sharded_like, whole

# Disabled while vectors of the optimizer are sent back: gradients of the user's loss come later.
_IN_BACKWARD = ("reduce_grads", "reshard_after_backward")


def is_fully_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` was called on a model, or on a part of it.

    Example:
        >>> is_fully_sharded(nn.Linear(3, 2))
        False
    """
    return bool(_fsdp_modules(model))


def local_part(t: Tensor) -> Tensor:
    """Return this process's part of a tensor, in the same memory; the tensor itself if it is not sharded.

    Example:
        >>> import torch
        >>> local_part(torch.ones(2))
        tensor([1., 1.])
    """
    return cast("Tensor", cast("Any", t).to_local()) if is_sharded(t) else t


def gathered(parts: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return unsharded tensors, given the parts of all processes. All processes must call this together.

    Args:
        parts: Parts of this process, by name.
        like: Tensors that are sharded in the same way, or not at all.

    Example:
        >>> import torch
        >>> gathered({"b": torch.ones(2)}, {"b": torch.zeros(2)})
        {'b': tensor([1., 1.])}
    """
    return {name: whole(_with_part(like[name], part)) for name, part in parts.items()}


def own_parts(tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Invert `gathered`: return this process's parts of unsharded tensors, without communication.

    Example:
        >>> import torch
        >>> own_parts({"b": torch.ones(2)}, {"b": torch.zeros(2)})
        {'b': tensor([1., 1.])}
    """
    return {name: local_part(sharded_like(t, like[name])) for name, t in tensors.items()}


def group_of(model: nn.Module, group: Group | None) -> Group | None:
    """Return the processes that train a model together. A sharded model determines them.

    Args:
        model: Any module.
        group: The group that the user passed. It is returned if the model is not sharded.

    Raises:
        ModelError: If the model is sharded in a way that the optimizer does not support, or over other processes than
            the group.
    """
    named = [(name, p) for name, p in model.named_parameters() if is_sharded(p)]
    if not named:
        return group
    groups = {id(one.sharded_param): some for some in _param_groups(model) for one in some.fsdp_params}
    for name, p in named:
        _refuse_other_ways(name, p, groups.get(id(p)))
    meshes = [cast("Any", p).device_mesh for _, p in named]
    for (name, _), mesh in zip(named, meshes, strict=True):
        if mesh != meshes[0]:
            raise ModelError(
                f"Parameters {named[0][0]!r} and {name!r} are sharded over different meshes.",
                "Call fully_shard with the same mesh for all layers: factors use the data of all processes.",
            )
    return _over_mesh(meshes[0], group)


def reshard(model: nn.Module) -> None:
    """Reshard the parameters of a model, before a step changes them.

    After some forward passes, parameters stay unsharded. The next pass would use these outdated values.

    Raises:
        ModelError: If gradients are not averaged over processes.
    """
    for group in _param_groups(model):
        if group.gradient_divide_factor is not None:
            raise ModelError(
                f"Gradients of the sharded model are divided by {group.gradient_divide_factor:g}, not by the number of "
                "processes: set_gradient_divide_factor() was called.",
                "Leave it out, so that gradients are averages over processes, and divide the loss if necessary.",
            )
        group.reshard()


def leaves(model: nn.Module) -> list[Tensor]:
    """Return the leaf parameters of computation graphs: unsharded parameters in place of sharded ones.

    Example:
        >>> [list(p.shape) for p in leaves(nn.Linear(3, 2))]
        [[2, 3], [2]]
    """
    own = [p for p in model.parameters() if not is_sharded(p)]
    # Before the first pass, there are none.
    return own + [one._unsharded_param for one in _sharded_params(model) if hasattr(one, "_unsharded_param")]


def has_gradients(model: nn.Module) -> bool:
    """Whether a parameter of a model has a gradient, even if it is not averaged over processes yet.

    Example:
        >>> has_gradients(nn.Linear(3, 2))
        False
    """
    sharded = list(_sharded_params(model))
    found: list[Tensor | None] = [p.grad for p in (*leaves(model), *(one.sharded_param for one in sharded))]
    return any(g is not None for g in (*found, *(one.unsharded_accumulated_grad for one in sharded)))


@contextmanager
def whole_in_backward(model: nn.Module, ranks: Ranks, is_needed: bool) -> Iterator[None]:
    """Unshard all parameters in this context, and until the user's backward pass has used them.

    Passes in this context do not communicate, so that processes may run different numbers of them. All processes must
    enter it.

    Args:
        model: The model in training. Without sharded parameters, nothing happens.
        ranks: All processes.
        is_needed: Whether this process is about to run a pass. If no process is, parameters stay as they are.
    """
    modules = _fsdp_modules(model)
    if not modules or not any(ranks.gather("vectors to send back", is_needed)):
        yield
        return
    for module in modules:
        module.unshard()
    groups = list(_param_groups(model))
    before = [{name: getattr(group, name) for name in _IN_BACKWARD} for group in groups]
    try:
        for group in groups:
            for name in _IN_BACKWARD:
                setattr(group, name, False)
        yield
    finally:
        for group, values in zip(groups, before, strict=True):
            for name, value in values.items():
                setattr(group, name, value)


def _with_part(like: Tensor, part: Tensor) -> Tensor:
    """Return a tensor that is sharded like another one, given the part of this process."""
    if not is_sharded(like):
        return part
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 (slow to import)

    spec = cast("Any", like)
    result: Tensor = DTensor.from_local(
        part, spec.device_mesh, spec.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return result


def _fsdp_modules(model: nn.Module) -> list[Any]:
    """Return the modules on which `fully_shard` was called."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # takes long to import; without it, there are none
    return [] if fsdp is None else [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]


def _param_groups(model: nn.Module) -> Iterator[Any]:
    """Yield FSDP's internal parameter groups, which are unsharded together."""
    for module in _fsdp_modules(model):
        state = module._get_fsdp_state()
        # Before PyTorch 2.12, there is at most one.
        several = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        yield from (one for one in several if one is not None)


def _sharded_params(model: nn.Module) -> Iterator[Any]:
    """Return FSDP's internal object for each parameter."""
    return (one for group in _param_groups(model) for one in group.fsdp_params)


def _refuse_other_ways(name: str, p: Tensor, group: Any) -> None:
    """Raise if a parameter is not sharded by `fully_shard` alone.

    Args:
        name: Its name.
        p: The parameter.
        group: FSDP's internal parameter group; `None` if `fully_shard` was not called.
    """
    if group is None or group.mesh_info.mesh != cast("Any", p).device_mesh:
        raise ModelError(
            f"Parameter {name!r} is split by tensor or expert parallelism, which the optimizer does not support: its "
            "gradients and factors belong to a part of a layer only.",
            "Shard the model with torch.distributed.fsdp.fully_shard alone. Curvature outside of training, kfs.KFAC, "
            "supports tensor-parallel models.",
        )
    if any(one.offload_to_cpu for one in group.fsdp_params):
        raise ModelError(
            f"Parameter {name!r} is kept on the CPU by CPUOffloadPolicy, but factors are where the model computes.",
            "Call fully_shard without offload_policy=.",
        )


def _over_mesh(mesh: Any, group: Group | None) -> Group:
    """Return the group of all processes of a mesh: each process has its own data."""
    members = sorted(mesh.mesh.flatten().tolist())
    if group is None and mesh.ndim == 1:
        result: Group = mesh
        return result
    if group is None:
        group = dist.group.WORLD
    found = Ranks(group).group
    ranks = [] if found is None else sorted(dist.get_process_group_ranks(found))
    if ranks != members:
        raise ModelError(
            f"The model is sharded over the processes {members}, but the group has the processes {ranks}.",
            "Pass a group= with all processes of the mesh, or leave it out if the mesh has one axis or all processes.",
        )
    return cast("Group", group)
