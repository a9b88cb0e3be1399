"""Models whose parameters are sharded over processes, as plain modules with whole parameters for a while.

`fully_shard` (FSDP2) and `parallelize_module` (tensor parallelism) leave each process parts of parameters, `DTensor`s,
and put hooks on modules that bring these parts together while the model runs. So each pass is an exchange in which all
processes take part, and derivatives other than plain gradients know nothing about it: `functional_call` at other
parameters would silently run at the model's own. Here, parameters are gathered once before a computation. Hooks of
PyTorch that distribute a model are off in the meantime, and those of users are not. After that, processes may run as
many passes as they have data, in forward mode and with `vmap`, too. Which processes agree on what lives in
`kfs.distributed`.
"""

import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from kfs.distributed import Ranks
from kfs.errors import DistributedError, ModelError
from kfs.problem.data import fingerprint, repeatably, unpacked
from kfs.problem.data_shards import Unpack
from kfs.problem.parameters import Params, checked
from kfs.runtime.nested import mapped

# PyTorch 2.8 divides rows in the wrong order if two axes of a mesh shard one dimension; 2.13 does not.
_DIVIDES_TWICE = "2.13"
M = TypeVar("M")
# Where the hooks come from that distribute a model.
_PYTORCH = ("torch.distributed.fsdp.", "torch.distributed.tensor.")


def is_sharded(t: object) -> bool:
    """Whether a tensor is sharded over processes: a `DTensor`.

    Example:
        >>> is_sharded(torch.ones(2))
        False
    """
    module = sys.modules.get("torch.distributed.tensor")  # takes long to import; without it, there are none
    return module is not None and isinstance(t, module.DTensor)


def whole(t: Tensor) -> Tensor:
    """Return all numbers of a tensor that may be sharded over processes. All of these have to call it then.

    Example:
        >>> whole(torch.ones(2))
        tensor([1., 1.])
    """
    return cast("Any", t).full_tensor() if is_sharded(t) else t


def sharded_like(t: Tensor, other: Tensor) -> Tensor:
    """Return a tensor, which all processes have, sharded in the way of another one. Nothing is exchanged.

    Raises:
        ModelError: If this version of PyTorch cannot do so.

    Example:
        >>> sharded_like(torch.ones(2), torch.zeros(2))
        tensor([1., 1.])
    """
    if not is_sharded(other):
        return t
    from torch.distributed.tensor import distribute_tensor  # noqa: PLC0415 (slow to import)

    like = cast("Any", other)
    result: Tensor = distribute_tensor(t, like.device_mesh, like.placements, src_data_rank=None)
    if torch.__version__ < _DIVIDES_TWICE and not torch.equal(whole(result), t):
        raise ModelError(
            f"PyTorch {torch.__version__} puts rows of tensors that are sharded along two axes of a mesh into a wrong "
            "order.",
            f"Use PyTorch {_DIVIDES_TWICE} or newer, or vectors of whole tensors.",
        )
    return result


def model_to_run(model: M) -> M:
    """Return the module that computes predictions, with sharded parameters in their places.

    `DistributedDataParallel` adds nothing to predictions but exchanges. `fully_shard` leaves whole parameters in the
    places of sharded ones after some forward passes.

    Args:
        model: A module, or a function.

    Raises:
        ModelError: If its parameters are those of `FullyShardedDataParallel`.
    """
    if not isinstance(model, nn.Module):
        return model
    found: nn.Module = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        for name, module in found.named_modules():
            if isinstance(module, fsdp.FullyShardedDataParallel):
                raise ModelError(
                    f"Module {name!r} is a FullyShardedDataParallel, which makes one flat vector of its parameters.",
                    "Use torch.distributed.fsdp.fully_shard(module), which keeps names and shapes.",
                )
    _reshard(found)
    return cast("M", found)


def check_same_data(model: Any, ranks: Ranks, data: Iterable[Any], unpack: Unpack) -> None:
    """Refuse data that differ between the processes of a model that is sharded over them, if there is no group.

    Without a group, a risk is about the data of one process. Each process would get another result.

    Args:
        model: A module, or a function.
        ranks: The group, if there is one.
        data: Batches. The first one is looked at.
        unpack: Splits a batch.

    Raises:
        DistributedError: If they differ.
    """
    mesh = None if ranks.are_several else _mesh_of([place.owner[place.name] for place in _places(model)])
    if mesh is None:
        return
    first = None
    for batch in repeatably(data):
        first = fingerprint(*unpacked(unpack, batch))
        break
    if any(other != first for other in _gathered_over(mesh, "first batches", first)):
        raise DistributedError(
            f"The model is sharded over {mesh.size()} processes, which have different data, but the risk has no group.",
            "Pass group=torch.distributed.group.WORLD if each process has data of its own, or kfs.shard(data, group) "
            "if all processes have all data.",
        )


def refuse_sharded(model: nn.Module) -> None:
    """Refuse a model whose own parameters are about to be read or replaced.

    Raises:
        ModelError: If one of them is sharded.

    Example:
        >>> refuse_sharded(nn.Linear(3, 2))
    """
    for name, p in model.named_parameters():
        if is_sharded(p):
            raise ModelError(
                f"Parameter {name!r} is sharded over processes.",
                "Load a plain module with whole parameters. torch.distributed.checkpoint.state_dict has them: "
                "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)). Curvature of the sharded "
                "model fits to it.",
            )


def _mesh_of(tensors: Iterable[Any]) -> Any:
    """Return the device mesh of tensors that are sharded over several processes; `None` if there is none."""
    return next((t.device_mesh for t in tensors if is_sharded(t) and t.device_mesh.size() > 1), None)


def _gathered_over(mesh: Any, where: str, value: Any) -> list[Any]:
    """Return the values of all processes of a mesh."""
    values = [value]
    for axis in range(mesh.ndim):
        values = [one for some in Ranks(mesh.get_group(axis)).gather(where, values) for one in some]
    return values


class WholeParameters:
    """Puts whole parameters into the places of those that are sharded over processes.

    Args:
        model: A module, or a function, which has none.
        ranks: Processes that agree before they gather.
    """

    def __init__(self, model: Any, ranks: Ranks) -> None:
        self._model = model
        self._ranks = ranks
        self._held: dict[int, tuple[Tensor, Tensor]] | None = None  # by identity: what is sharded, and all of it

    @contextmanager
    def held(self, params: Params) -> Iterator[None]:
        """Gather all parameters and buffers, and hold them in this context. All processes have to enter it.

        Args:
            params: Further tensors.
        """
        if self._held is not None or "torch.distributed.tensor" not in sys.modules:
            yield
            return
        _reshard(self._model)
        self._agree(params)
        self._held = _gathered(self._model, params.values())
        try:
            yield
        finally:
            self._held = None

    def of(self, t: Tensor) -> Tensor:
        """Return all numbers of a tensor, within `held`."""
        return t if self._held is None else self._held.get(id(t), (t, t))[1]

    def _agree(self, params: Params) -> None:
        """Make sure that all processes are about to gather the same tensors, if there is one to gather."""
        places = list(_places(self._model))
        tensors = [(place.name, place.owner[place.name]) for place in places]
        sharded = [(name, list(t.shape)) for name, t in [*tensors, *params.items()] if is_sharded(t)]
        if not sharded:
            return
        mesh = _mesh_of([t for _, t in [*tensors, *params.items()]])
        if self._ranks.are_several or mesh is None:
            found = self._ranks.gather("gathering parameters", sharded)
        else:
            found = _gathered_over(mesh, "gathering parameters", sharded)
        if any(other != sharded for other in found):
            raise DistributedError(
                "Names or shapes of parameters differ between processes.", "Shard the same model in all of them."
            )

    @contextmanager
    def in_place(self, params: Params) -> Iterator[Params]:
        """Let the model have whole parameters in this context, and no hooks that distribute it.

        Args:
            params: Some tensors, by the names of parameters.

        Yields:
            The same tensors, as the model uses them: in whole, and in the precision that it computes in.
        """
        with self.held(params):
            if not self._held:
                yield params
                return
            replaced = self._held
            with _replaced(self._model, replaced), _without_distribution(self._model):
                own = dict(self._model.named_parameters()) if isinstance(self._model, nn.Module) else {}
                found = {name: replaced.get(id(p), (p, p))[1] for name, p in params.items()}
                yield checked({name: p.to(own[name].dtype) if name in own else p for name, p in found.items()})


class _Place(NamedTuple):
    """Where a tensor is, and in which precision the model computes with it."""

    owner: dict[str, Any]
    name: str
    dtype: torch.dtype | None  # `None` for its own


def _gathered(model: Any, others: Iterable[Tensor]) -> dict[int, tuple[Tensor, Tensor]]:
    """Return all that is sharded over processes, by identity, and all of its numbers."""
    found: dict[int, tuple[Tensor, Tensor]] = {}
    with torch.no_grad():
        for place in _places(model):
            t = place.owner[place.name]
            if is_sharded(t) and id(t) not in found:
                all_of_it = whole(t.detach() if place.dtype is None else t.detach().to(place.dtype))
                if isinstance(t, nn.Parameter):
                    all_of_it = nn.Parameter(all_of_it, requires_grad=t.requires_grad)
                found[id(t)] = t, all_of_it
        for t in others:
            if is_sharded(t) and id(t) not in found:
                found[id(t)] = t, whole(t.detach()).requires_grad_(t.requires_grad)
    return found


def _places(model: Any) -> Iterator[_Place]:
    """Return where parameters and buffers of a module are."""
    if isinstance(model, nn.Module):
        for module, policy in _with_policies(model, None):
            dtype = None if policy is None else policy.param_dtype
            yield from (_Place(module._parameters, name, dtype) for name in module._parameters)
            yield from (_Place(module._buffers, name, None) for name in module._buffers)


def _with_policies(module: nn.Module, policy: Any) -> Iterator[tuple[nn.Module, Any]]:
    """Return all modules with the mixed precision policy of `fully_shard` that their own parameters have."""
    policy = _policy_of(module) or policy
    yield module, policy
    for child in module.children():
        yield from _with_policies(child, policy)


def _policy_of(module: nn.Module) -> Any:
    """Return the mixed precision policy that `fully_shard` was called with; `None` if it was not."""
    return cast("Any", module)._get_fsdp_state()._mp_policy if _is_fsdp(module) else None


def _is_fsdp(module: nn.Module) -> bool:
    """Whether `fully_shard` was called with a module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def _reshard(model: Any) -> None:
    """Let modules have their sharded parameters, if they have whole ones after a forward pass."""
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if _is_fsdp(module):
            cast("Any", module).reshard()


@contextmanager
def _replaced(model: Any, tensors: dict[int, tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Let the model have other tensors in this context, also where it has one of them in several places."""
    before = [(place, place.owner[place.name]) for place in _places(model)]
    before = [(place, t) for place, t in before if id(t) in tensors]
    try:
        for place, t in before:
            place.owner[place.name] = tensors[id(t)][1]
        yield
    finally:
        for place, t in before:
            place.owner[place.name] = t


@contextmanager
def _without_distribution(model: Any) -> Iterator[None]:
    """Take hooks off modules that distribute them; what remains of them are casts of inputs and outputs."""
    kinds = ("_forward_pre_hooks", "_forward_hooks")
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    before = [(getattr(m, kind), OrderedDict(getattr(m, kind))) for m in modules for kind in kinds]
    try:
        for module in modules:
            casts = _casts(_policy_of(module))
            for kind, cast_tensors in zip(kinds, casts, strict=True):
                hooks = getattr(module, kind)
                for key, hook in list(hooks.items()):
                    if not _distributes(hook):
                        continue
                    if cast_tensors is None or not _origin(hook).startswith(_PYTORCH[0]):
                        del hooks[key]
                    else:
                        hooks[key] = cast_tensors
        yield
    finally:
        for hooks, kept in before:
            hooks.clear()
            hooks.update(kept)


def _origin(hook: Any) -> str:
    """Return the name of the module that a hook was written in."""
    hook = getattr(hook, "func", hook)  # a partial function
    return f"{getattr(hook, '__module__', '')}."


def _distributes(hook: Any) -> bool:
    """Whether a hook is one of PyTorch that exchanges or cuts tensors, and does nothing else to them.

    Raises:
        ModelError: If it is one of PyTorch that calls a function of somebody else.
    """
    if not _origin(hook).startswith(_PYTORCH):
        return False
    if _origin(hook) == "torch.distributed.tensor._api.":  # those of `distribute_module`
        called = [f for f in inspect.getclosurevars(hook).nonlocals.values() if callable(f)]
        for function in called:
            if not _origin(function).startswith(_PYTORCH):
                raise ModelError(
                    f"The model was distributed with the function {getattr(function, '__qualname__', function)!r}, and "
                    "nobody knows what it does to activations.",
                    "Use ColwiseParallel, RowwiseParallel and other styles of torch.distributed.tensor.parallel, or "
                    "compute curvature of the model before it is distributed.",
                )
    return True


def _casts(policy: Any) -> tuple[Callable[..., Any] | None, Callable[..., Any] | None]:
    """Return hooks that cast what goes into a module and what comes out, as a mixed precision policy says."""
    if policy is None:
        return None, None

    def to(dtype: torch.dtype) -> Callable[[Any], Any]:
        return lambda x: mapped(x, lambda t: t.to(dtype) if t.is_floating_point() else t)

    def inputs(module: nn.Module, args: Any, kwargs: Any) -> Any:  # noqa: ARG001
        return to(policy.param_dtype)(args), to(policy.param_dtype)(kwargs)

    def outputs(module: nn.Module, args: Any, output: Any) -> Any:  # noqa: ARG001
        return to(policy.output_dtype)(output)

    return (
        inputs if policy.cast_forward_inputs and policy.param_dtype else None,
        outputs if policy.output_dtype else None,
    )
