"""What a recorded computation reads: memory that somebody has to hold as long as it may be replayed."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Reads(TorchDispatchMode):
    """Holds all memory that operations in this context read or change, and that none of them has made.

    Constants that are kept for further use, copies of settings, and what a model has computed for a length of its
    sequences may all be replaced by others while a graph still reads them.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: set[int] = set()
        self._held: dict[int, Any] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # PyTorch asks. Otherwise it wraps what is below, and imports its compiler for that, which takes two seconds.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for t in tree_iter((args, kwargs)):
            if isinstance(t, Tensor) and t.layout is torch.strided:
                storage = t.untyped_storage()
                if storage._cdata not in self._made:
                    self._held[storage._cdata] = storage
        result = func(*args, **kwargs)
        for t in tree_iter(result):
            if isinstance(t, Tensor) and t.layout is torch.strided:
                place = t.untyped_storage()._cdata
                if place not in self._held:  # otherwise it is a view
                    self._made.add(place)
        return result
