"""Models that `fully_shard` (FSDP2) has sharded over processes, in training.

PyTorch makes parameters whole, layer by layer, while the model runs, and leaves each process its part of averaged
gradients. The optimizer keeps to that: momentum and updates are those of the own parts. What needs whole tensors is
here: an *audit*, and vectors that are sent back for factors. How gradients come to inverses is in `at_owners`.
Computations outside of training live in `kfs.problem.whole_parameters`.

How `fully_shard` keeps whole parameters is no public interface of PyTorch. Only this file knows about it.
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

# What is switched off while vectors of the optimizer go back: gradients of the user's loss come later.
_IN_BACKWARD = ("reduce_grads", "reshard_after_backward")


def is_fully_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` was called with a model, or with a part of it.

    Example:
        >>> is_fully_sharded(nn.Linear(3, 2))
        False
    """
    return bool(_fsdp_modules(model))


def part_of(t: Tensor) -> Tensor:
    """Return the part of a tensor that this process has, in the same memory; all of it if it is not sharded.

    Example:
        >>> import torch
        >>> part_of(torch.ones(2))
        tensor([1., 1.])
    """
    return cast("Tensor", cast("Any", t).to_local()) if is_sharded(t) else t


def gathered(parts: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return whole tensors, given the parts of all processes, which call this together.

    Args:
        parts: Those of this process, by name.
        like: Tensors that are sharded in the same way, or not at all.

    Example:
        >>> import torch
        >>> gathered({"b": torch.ones(2)}, {"b": torch.zeros(2)})
        {'b': tensor([1., 1.])}
    """
    return {name: whole(_with_part(like[name], part)) for name, part in parts.items()}


def own_parts(tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Undo `gathered`: return this process's parts of whole tensors. Nothing is exchanged.

    Example:
        >>> import torch
        >>> own_parts({"b": torch.ones(2)}, {"b": torch.zeros(2)})
        {'b': tensor([1., 1.])}
    """
    return {name: part_of(sharded_like(t, like[name])) for name, t in tensors.items()}


def group_of(model: nn.Module, group: Group | None) -> Group | None:
    """Return the processes that train a model together: those that it is sharded over.

    Args:
        model: Any module.
        group: What the user says. For a model that is not sharded, this is the answer.

    Raises:
        ModelError: If the model is sharded in a way that the optimizer does not support, or over other processes than
            those of the group.
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
                "Call fully_shard with the same mesh for all layers: factors are those of the data of all processes.",
            )
    return _over_mesh(meshes[0], group)


def reshard(model: nn.Module) -> None:
    """Let a model have its sharded parameters, which a step is about to change.

    After some forward passes, parameters stay whole. The next pass would use these, as they were before the step.

    Raises:
        ModelError: If gradients are not averages over processes.
    """
    for group in _param_groups(model):
        if group.gradient_divide_factor is not None:
            raise ModelError(
                f"Gradients of the sharded model are divided by {group.gradient_divide_factor:g}, not by the number of "
                "processes: set_gradient_divide_factor() was called.",
                "Leave it out, such that gradients are averages over processes, and divide the loss if it has to be.",
            )
        group.reshard()


def leaves(model: nn.Module) -> list[Tensor]:
    """Return parameters as they are in computation graphs: whole ones in place of sharded ones.

    Example:
        >>> [list(p.shape) for p in leaves(nn.Linear(3, 2))]
        [[2, 3], [2]]
    """
    own = [p for p in model.parameters() if not is_sharded(p)]
    # Before the first pass, there are none.
    return own + [one._unsharded_param for one in _sharded_params(model) if hasattr(one, "_unsharded_param")]


def has_gradients(model: nn.Module) -> bool:
    """Whether a parameter of a model has a gradient, also one that is not yet averaged over processes.

    Example:
        >>> has_gradients(nn.Linear(3, 2))
        False
    """
    sharded = list(_sharded_params(model))
    found: list[Tensor | None] = [p.grad for p in (*leaves(model), *(one.sharded_param for one in sharded))]
    return any(g is not None for g in (*found, *(one.unsharded_accumulated_grad for one in sharded)))


@contextmanager
def whole_in_backward(model: nn.Module, ranks: Ranks, is_needed: bool) -> Iterator[None]:
    """Let all parameters be whole in this context, and until the user's backward pass has come by.

    Passes in this context exchange nothing, so that processes may run different numbers of them. All processes have to
    enter it.

    Args:
        model: What is trained. Without sharded parameters, nothing happens.
        ranks: All processes.
        is_needed: Whether this process is about to run a pass. If none is, parameters stay as they are.
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
    """Return modules that `fully_shard` was called with."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # takes long to import; without it, there are none
    return [] if fsdp is None else [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]


def _param_groups(model: nn.Module) -> Iterator[Any]:
    """Return what `fully_shard` keeps about parameters that are made whole together."""
    for module in _fsdp_modules(model):
        state = module._get_fsdp_state()
        # Before PyTorch 2.12, there is one at most.
        several = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        yield from (one for one in several if one is not None)


def _sharded_params(model: nn.Module) -> Iterator[Any]:
    """Return what `fully_shard` keeps about each parameter."""
    return (one for group in _param_groups(model) for one in group.fsdp_params)


def _refuse_other_ways(name: str, p: Tensor, group: Any) -> None:
    """Refuse a parameter that is sharded in another way than by `fully_shard` alone.

    Args:
        name: Its name.
        p: The parameter.
        group: What `fully_shard` keeps about it; `None` if it was not called.
    """
    if group is None or group.mesh_info.mesh != cast("Any", p).device_mesh:
        raise ModelError(
            f"Parameter {name!r} is split by tensor or expert parallelism, which the optimizer does not support: its "
            "gradients and factors are those of a part of a layer.",
            "Shard the model with torch.distributed.fsdp.fully_shard alone. Curvature outside of training, kfs.KFAC, "
            "takes tensor-parallel models as they are.",
        )
    if any(one.offload_to_cpu for one in group.fsdp_params):
        raise ModelError(
            f"Parameter {name!r} is kept on the CPU by CPUOffloadPolicy, but factors are where the model computes.",
            "Call fully_shard without offload_policy=.",
        )


def _over_mesh(mesh: Any, group: Group | None) -> Group:
    """Return the group of all processes of a mesh: each of them has data of its own."""
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
