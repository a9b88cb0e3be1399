"""Whole parameters of a model that `fully_shard` has sharded, of one layer at a time.

The model runs with plain tensors, as in `kfs.problem.whole_parameters`, which exist all the time, but have memory only
while their *layer* runs: a module that was passed to `fully_shard`, without those inside it. In the backward pass,
operations that need a parameter get a copy; those of the last layer are kept.

Processes may run different numbers of passes, or other layers (experts): whenever a process needs a layer, all of them
say which one they need, and gather each of these. A process that has no batch left takes part until all have finished.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import saved_tensors_hooks

from kfs.distributed import Ranks
from kfs.errors import ModelError

# A part of a parameter that autograd has saved: its layer, its place there, and size, strides and offset.
_Part = tuple[int, int, torch.Size, tuple[int, ...], int]


class Layers:
    """The layers of a model.

    Args:
        layers: The sharded parameters of each layer, with the dtypes that it computes in.
        ranks: The processes that share the model.
        gather: Returns the whole tensor of a sharded one; all processes call it together.

    Attributes:
        pairs: Each sharded parameter and its whole tensor, by the id of the sharded one.
    """

    def __init__(
        self,
        layers: Mapping[nn.Module, list[tuple[nn.Parameter, torch.dtype]]],
        ranks: Ranks,
        gather: Callable[[Tensor], Tensor],
    ) -> None:
        self._ranks = ranks
        self._gather = gather
        self._place = {module: place for place, module in enumerate(layers)}
        self._layers: list[list[tuple[nn.Parameter, nn.Parameter]]] = []
        self.pairs: dict[int, tuple[Tensor, Tensor]] = {}
        self._parts: dict[int, tuple[int, int]] = {}  # layer and place of a parameter, by its storage
        self._last: tuple[int, list[Tensor]] = -1, []  # whole tensors of one layer, for the backward pass
        for params in layers.values():
            found: list[tuple[nn.Parameter, nn.Parameter]] = []
            for p, dtype in params:
                whole = nn.Parameter(torch.empty(p.shape, dtype=dtype, device=p.device), requires_grad=p.requires_grad)
                whole.untyped_storage().resize_(0)
                self._parts[whole.untyped_storage()._cdata] = len(self._layers), len(found)
                self.pairs[id(p)] = p, whole
                found.append((p, whole))
            self._layers.append(found)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context in which the model runs: autograd saves where parameters are, in place of their values."""
        with saved_tensors_hooks(self._pack, self._unpack):
            yield

    def enter(self, module: nn.Module) -> None:
        """Give the parameters of a layer memory and values, before it runs."""
        if torch._C._current_graph_task_id() != -1:
            raise ModelError(
                "A module runs again in the backward pass, as in torch.utils.checkpoint, and its parameters are "
                "gathered layer by layer.",
                "Disable checkpointing of activations, or leave by_layer= out.",
            )
        place = self._place.get(module)
        if place is None:  # all of its parameters belong to modules inside it
            return
        for (_, whole), values in zip(self._layers[place], self._exchanged(place), strict=True):
            whole.untyped_storage().resize_(whole.numel() * whole.element_size())
            with torch.no_grad(), _unsafe_preserve_version_counter(whole):  # autograd has saved where it is, not values
                whole.copy_(values)
        self._last = -1, []

    def leave(self, module: nn.Module) -> None:
        """Free the parameters of a layer, after it has run."""
        for _, whole in self._layers[self._place[module]] if module in self._place else ():
            whole.untyped_storage().resize_(0)

    def finish(self) -> None:
        """Gather the layers that other processes need, until all of them have called this."""
        self._last = -1, []
        while any(place is not None for place in self._wanted(None)):
            pass

    def _exchanged(self, place: int) -> list[Tensor]:
        """Return the whole tensors of a layer."""
        if self._last[0] != place:
            self._last = -1, []
            self._wanted(place)
        return self._last[1]

    def _wanted(self, wanted: int | None) -> list[int | None]:
        """Gather the layers that processes need, and keep the one that this process needs; return what all need."""
        all_wanted = self._ranks.gather("parameters of a layer", wanted)
        for place in sorted({place for place in all_wanted if place is not None}):
            # Several vectors may be sent back together, by `vmap`.
            with torch.no_grad(), temporarily_clear_interpreter_stack():
                found = [self._gather(p.detach().to(whole.dtype)) for p, whole in self._layers[place]]
            if place == wanted:
                self._last = place, found
        return all_wanted

    def _pack(self, t: Tensor) -> Any:
        part = self._parts.get(t.untyped_storage()._cdata) if type(t) in {Tensor, nn.Parameter} else None
        return t if part is None else (*part, t.shape, t.stride(), t.storage_offset())

    def _unpack(self, saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        layer, place, size, strides, offset = cast("_Part", saved)
        return self._exchanged(layer)[place].contiguous().as_strided(size, strides, offset)
