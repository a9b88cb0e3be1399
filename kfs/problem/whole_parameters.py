"""Temporarily replaces the sharded parameters of a model by whole parameters.

`fully_shard` (FSDP2) and `parallelize_module` (tensor parallelism) give each process a shard of each parameter (a
`DTensor`), and register hooks on modules that gather the shards while the model runs. Each pass is therefore a
collective operation of all processes. Derivatives other than plain gradients do not support it: `functional_call` with
other parameter values would silently use the model's own parameters.

This module gathers the parameters once before a computation. PyTorch's hooks that distribute the model are disabled in
the meantime; the hooks of users are not. Each process can then run as many passes as it has data, also in forward mode
and with `vmap`. Agreement between processes lives in `kfs.distributed`.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from kfs.distributed import Ranks
from kfs.errors import DistributedError, ModelError
from kfs.problem.data import fingerprint, repeatably, unpacked
from kfs.problem.data_shards import Unpack
from kfs.problem.layer_by_layer import Layers
from kfs.problem.parameters import Params, checked
from kfs.runtime.nested import mapped

# PyTorch 2.8 splits rows in the wrong order if two axes of a mesh shard the same dimension; 2.13 does not.
_DIVIDES_TWICE = "2.13"
M = TypeVar("M")
# Modules of PyTorch that define the hooks which distribute a model.
_PYTORCH = ("torch.distributed.fsdp.", "torch.distributed.tensor.")


def is_sharded(t: object) -> bool:
    """Return whether a tensor is a `DTensor`, which is sharded over processes.

    Example:
        >>> is_sharded(torch.ones(2))
        False
    """
    module = sys.modules.get("torch.distributed.tensor")  # slow to import; if it was not imported, no `DTensor` exists
    return module is not None and isinstance(t, module.DTensor)


def whole(t: Tensor) -> Tensor:
    """Return the full tensor of a tensor that may be sharded. If it is sharded, all processes must call this.

    Example:
        >>> whole(torch.ones(2))
        tensor([1., 1.])
    """
    return cast("Any", t).full_tensor() if is_sharded(t) else t


def sharded_like(t: Tensor, other: Tensor) -> Tensor:
    """Shard a tensor that all processes have in the same way as `other`, without communication.

    With PyTorch versions before 2.13, the result is gathered once to verify it.

    Raises:
        ModelError: If this version of PyTorch shards the tensor in the wrong order.

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
            f"PyTorch {torch.__version__} puts rows of tensors that are sharded along two axes of a mesh in the wrong "
            "order.",
            f"Use PyTorch {_DIVIDES_TWICE} or newer, or vectors of whole tensors.",
        )
    return result


def model_to_run(model: M) -> M:
    """Return the module that computes predictions, without `DistributedDataParallel` and with parameters resharded.

    `DistributedDataParallel` adds only communication, not predictions. `fully_shard` leaves whole parameters in the
    modules after some forward passes.

    Args:
        model: A module, or a function.

    Raises:
        ModelError: If the model contains a `FullyShardedDataParallel` module.
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
    """Raise an error if a model is sharded, no group is given, and the processes have different data.

    Without a group, a risk is defined on the data of one process, so each process would compute a different result.

    Args:
        model: A module, or a function.
        ranks: The group, if there is one.
        data: Batches. Only the first one is compared.
        unpack: Splits a batch.

    Raises:
        DistributedError: If the first batches differ.
    """
    if ranks.are_several or not isinstance(model, nn.Module):
        return
    mesh = _mesh_of([t for _, t, _ in _tensors(model)])
    if mesh is None:
        return
    first = next((fingerprint(*unpacked(unpack, batch)) for batch in repeatably(data)), None)
    if any(other != first for other in _gathered_over(mesh, "first batches", first)):
        raise DistributedError(
            f"The model is sharded over {mesh.size()} processes, which have different data, but the risk has no group.",
            "Pass group=torch.distributed.group.WORLD if each process has data of its own, or kfs.shard(data, group) "
            "if all processes have all data.",
        )


def refuse_sharded(model: nn.Module) -> None:
    """Raise an error if a model has sharded parameters. Call it before code that reads or replaces parameters.

    Raises:
        ModelError: If a parameter is sharded.

    Example:
        >>> refuse_sharded(nn.Linear(3, 2))
    """
    for name, p in model.named_parameters():
        if is_sharded(p):
            raise ModelError(
                f"Parameter {name!r} is sharded over processes.",
                "Load a plain module with whole parameters. torch.distributed.checkpoint.state_dict provides them: "
                "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)). Curvature of the sharded "
                "model can be used with it.",
            )


def _mesh_of(tensors: Iterable[Any]) -> Any:
    """Return the device mesh of the first tensor that is sharded over several processes; `None` if there is none."""
    return next((t.device_mesh for t in tensors if is_sharded(t) and t.device_mesh.size() > 1), None)


def _gathered_over(mesh: Any, where: str, value: Any) -> list[Any]:
    """Gather a value from all processes of a mesh."""
    values = [value]
    for axis in range(mesh.ndim):
        values = [one for some in Ranks(mesh.get_group(axis)).gather(where, values) for one in some]
    return values


class WholeParameters:
    """Replaces sharded parameters of a model by whole ones.

    Args:
        model: A module, or a function, which has no parameters of its own.
        ranks: Processes that agree before they gather.
        by_layer: Whether parameters are gathered while their layer runs; see `kfs.problem.layer_by_layer`.

    Attributes:
        by_layer: Whether parameters are gathered layer by layer.
        layers: The layers inside of `held`, if parameters are gathered layer by layer.
    """

    def __init__(self, model: Any, ranks: Ranks, by_layer: bool = False) -> None:
        self._model = model if isinstance(model, nn.Module) else nn.Module()
        self._ranks = ranks
        self.by_layer = by_layer
        self.layers: Layers | None = None
        self._held: dict[int, tuple[Tensor, Tensor]] | None = None  # sharded and whole tensor, by id of the sharded one

    @contextmanager
    def held(self, params: Params) -> Iterator[None]:
        """Gather all parameters and buffers, and keep them in this context. All processes must enter it.

        Args:
            params: Further tensors to gather.
        """
        if self._held is not None or not self.is_distributed(params):
            yield
            return
        _reshard(self._model)
        self._agree(params)
        if self.by_layer:
            self.layers = Layers(_layers_of(self._model), self._sharing(params), whole)
        known = {} if self.layers is None else dict(self.layers.pairs)
        self._held = _gathered(self._model, params.values(), known)
        try:
            yield
        finally:
            self._held = self.layers = None

    def is_distributed(self, params: Params) -> bool:
        """Return whether a module was passed to `fully_shard`, or a tensor is sharded, so that there is work to do."""
        if "torch.distributed.tensor" not in sys.modules:
            return False
        modules = list(self._model.modules())
        if any(map(_is_fsdp, modules)):  # it may have whole parameters now, after a forward pass
            return True
        own = [t for module in modules for t in (*module._parameters.values(), *module._buffers.values())]
        return any(map(is_sharded, [*params.values(), *own]))

    def of(self, t: Tensor) -> Tensor:
        """Return the whole tensor inside of `held`; outside, return the tensor unchanged."""
        return t if self._held is None else self._held.get(id(t), (t, t))[1]

    def has_values(self, t: Tensor) -> bool:
        """Whether `of` returns a tensor with values: those of layers have values only while the layer runs."""
        return self.layers is None or id(t) not in self.layers.pairs

    def _sharing(self, params: Params) -> Ranks:
        """Return the processes that gather layers: those of the risk, or, if it has none, those of the model."""
        mesh = _mesh_of([*(t for _, t, _ in _tensors(self._model)), *params.values()])
        if self._ranks.are_several or mesh is None:
            return self._ranks
        if mesh.ndim > 1:
            raise ModelError(
                "The model is sharded over a mesh with several axes, and the risk has no group to gather layers in.",
                "Pass group=, or leave by_layer= out.",
            )
        return Ranks(mesh.get_group())

    def _agree(self, params: Params) -> None:
        """Raise an error unless all processes are about to gather the same tensors, if there are any."""
        tensors = [*((name, t) for name, t, _ in _tensors(self._model)), *params.items()]
        sharded = [(name, list(t.shape)) for name, t in tensors if is_sharded(t)]
        if not sharded:
            return
        mesh = _mesh_of([t for _, t in tensors])
        if self._ranks.are_several or mesh is None:
            found = self._ranks.gather("gathering parameters", sharded)
        else:
            found = _gathered_over(mesh, "gathering parameters", sharded)
        if any(other != sharded for other in found):
            raise DistributedError(
                "Names or shapes of parameters differ between processes.", "Shard the same model in all processes."
            )

    @contextmanager
    def in_place(self, params: Params, first_order: bool = True) -> Iterator[Params]:
        """Give the model whole parameters in this context, and disable the hooks that distribute it.

        Args:
            params: Tensors by parameter name.
            first_order: Whether the model is run for plain gradients of its activations.

        Raises:
            ModelError: If all parameters are needed at once, and are gathered layer by layer.

        Yields:
            The same tensors as the model uses them: whole, and in the dtype that the model computes in.
        """
        with self.held(params):
            if not self._held:
                yield params
                return
            if self.layers is not None and not first_order:
                raise ModelError(
                    "This needs all parameters at once, and the risk gathers them layer by layer.",
                    "Use a risk without by_layer=; KFAC, EKFAC and scores of influence functions need one layer at a "
                    "time.",
                )
            running = nullcontext() if self.layers is None else self.layers.running()
            with _undistributed(self._model, self._held, self.layers), running:
                own = dict(self._model.named_parameters())
                found = {name: self.of(p) for name, p in params.items()}
                yield checked({name: p.to(own[name].dtype) if name in own else p for name, p in found.items()})
            if self.layers is not None and not self._ranks.are_several:
                self.layers.finish()  # all processes run the same batches, but only some of them may audit the model


def _layers_of(model: nn.Module) -> dict[nn.Module, list[tuple[nn.Parameter, torch.dtype]]]:
    """Return the sharded parameters of each module that was passed to `fully_shard`, without modules inside it."""
    layers: dict[nn.Module, list[tuple[nn.Parameter, torch.dtype]]] = {}
    seen: set[int] = set()

    def add(module: nn.Module, layer: nn.Module | None) -> None:
        layer = module if _is_fsdp(module) else layer
        for p in module._parameters.values():
            if p is not None and layer is not None and is_sharded(p) and id(p) not in seen:
                seen.add(id(p))
                layers.setdefault(layer, []).append((p, _policy_of(layer).param_dtype or p.dtype))
        for child in module.children():
            add(child, layer)

    add(model, None)
    return layers


def _gathered(
    model: nn.Module, others: Iterable[Tensor], known: dict[int, tuple[Tensor, Tensor]]
) -> dict[int, tuple[Tensor, Tensor]]:
    """Return pairs of each sharded tensor and its whole tensor, by the id of the sharded tensor; some are known."""
    found = known
    with torch.no_grad():
        for t, dtype in [*((t, dtype) for _, t, dtype in _tensors(model)), *((t, None) for t in others)]:
            if is_sharded(t) and id(t) not in found:
                all_of_it = whole(t.detach().to(dtype or t.dtype))
                if isinstance(t, nn.Parameter):
                    all_of_it = nn.Parameter(all_of_it, requires_grad=t.requires_grad)
                found[id(t)] = t, all_of_it.requires_grad_(t.requires_grad)
    return found


def _tensors(model: nn.Module) -> Iterator[tuple[str, Any, torch.dtype | None]]:
    """Yield all parameters and buffers: name in its module, tensor, and the dtype to compute with if it is another."""
    for module, policy in _with_policies(model, None):
        dtype = None if policy is None else policy.param_dtype
        yield from ((name, p, dtype) for name, p in module._parameters.items())
        yield from ((name, b, None) for name, b in module._buffers.items())


def _with_policies(module: nn.Module, policy: Any) -> Iterator[tuple[nn.Module, Any]]:
    """Yield all modules, each with the mixed-precision policy of `fully_shard` that applies to its parameters."""
    policy = _policy_of(module) or policy
    yield module, policy
    for child in module.children():
        yield from _with_policies(child, policy)


def _policy_of(module: nn.Module) -> Any:
    """Return the mixed-precision policy passed to `fully_shard`; `None` if it was not called with this module."""
    return cast("Any", module)._get_fsdp_state()._mp_policy if _is_fsdp(module) else None


def _is_fsdp(module: nn.Module) -> bool:
    """Return whether `fully_shard` was called with this module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def _reshard(model: nn.Module) -> None:
    """Restore the sharded parameters of modules that still have whole ones after a forward pass."""
    for module in model.modules():
        if _is_fsdp(module):
            cast("Any", module).reshard()


@contextmanager
def _undistributed(
    model: nn.Module, tensors: dict[int, tuple[Tensor, Tensor]], layers: Layers | None
) -> Iterator[None]:
    """Replace tensors of a model in this context, and its hooks that distribute it.

    Their casts remain, and hooks that give layers their parameters, if these are gathered layer by layer.
    """
    modules: list[Any] = list(model.modules())
    kinds = ("_parameters", "_buffers", "_forward_pre_hooks", "_forward_hooks")
    before = [(contents := getattr(module, kind), contents.copy()) for module in modules for kind in kinds]
    try:
        for module in modules:
            for owner in (module._parameters, module._buffers):  # tied tensors are in several places
                owner.update({name: tensors[id(t)][1] for name, t in owner.items() if id(t) in tensors})
            casts = _casts(_policy_of(module))
            if layers is not None and _is_fsdp(module):
                casts = _gathering(layers, *casts)
            for hooks, cast_tensors in zip((module._forward_pre_hooks, module._forward_hooks), casts, strict=True):
                for key, hook in list(hooks.items()):
                    if not _distributes(hook):
                        continue
                    if cast_tensors is None or not _origin(hook).startswith(_PYTORCH[0]):
                        del hooks[key]
                    else:
                        hooks[key] = cast_tensors
        yield
    finally:
        for contents, kept in before:
            contents.clear()
            contents.update(kept)


def _origin(hook: Any) -> str:
    """Return the name of the module that defines a hook, followed by a dot."""
    hook = getattr(hook, "func", hook)  # a partial function
    return f"{getattr(hook, '__module__', '')}."


def _distributes(hook: Any) -> bool:
    """Return whether a hook belongs to PyTorch and only communicates or slices tensors.

    Raises:
        ModelError: If it is a hook of PyTorch that calls a function defined elsewhere.
    """
    if not _origin(hook).startswith(_PYTORCH):
        return False
    if _origin(hook) == "torch.distributed.tensor._api.":  # hooks of `distribute_module`
        for function in inspect.getclosurevars(hook).nonlocals.values():
            if callable(function) and not _origin(function).startswith(_PYTORCH):
                raise ModelError(
                    f"The model was distributed with the function {getattr(function, '__qualname__', function)!r}, and "
                    "its effect on activations is unknown.",
                    "Use ColwiseParallel, RowwiseParallel and other styles of torch.distributed.tensor.parallel, or "
                    "compute curvature of the model before it is distributed.",
                )
    return True


def _gathering(
    layers: Layers, inputs: Callable[..., Any] | None, outputs: Callable[..., Any] | None
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return hooks that give a layer its parameters, and cast its inputs and outputs."""

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        layers.enter(module)
        return None if inputs is None else inputs(module, args, kwargs)

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        layers.leave(module)
        return None if outputs is None else outputs(module, args, output)

    return before, after


def _casts(policy: Any) -> tuple[Callable[..., Any] | None, Callable[..., Any] | None]:
    """Return hooks that cast inputs and outputs of a module according to a mixed-precision policy."""
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
