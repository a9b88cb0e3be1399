"""A CUDA graph on the CPU: a tape of operations that runs again without Python code of the model or of this library.

Unlike a repeated call, a tape behaves like a graph with respect to state on the host: values that Python has decided
stay those of the recording, memory with another owner may be freed, and results of a pass belong to the tape, and are
overwritten.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from tests.factors.test_no_waiting import WAITING


class Foreign(NamedTuple):
    """A tensor whose memory has another owner, which may free it."""

    storage: StorageWeakRef
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def tensor(self) -> Tensor:
        """Return the tensor, or arbitrary numbers if its memory was freed."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            garbage = torch.empty(self.shape, dtype=self.dtype)
            return garbage.fill_(torch.nan if self.dtype.is_floating_point else 1)
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.shape, self.stride)


def waits(func: Any, args: Any) -> bool:
    """Whether an operation would synchronize."""
    name: str = func.overloadpacket.__name__.lstrip("_")
    indices = args[1] if name in {"index", "index_put", "index_put_", "index_put_impl_"} else []
    masks = [i for i in indices if i is not None and i.dtype == torch.bool]
    return name.startswith(tuple(one.lstrip("_") for one in WAITING)) or bool(masks)


def has_memory(t: Tensor) -> bool:
    """Whether a tensor has memory. PyTorch's symbolic zero derivatives, and tensors on `meta`, have none."""
    return not t._is_zerotensor() and not t.is_meta


class Watch(TorchDispatchMode):
    """Records operations that synchronize."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.noticed = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if waits(func, args):
            self.noticed = f"called a synchronizing operation, {func}"
        return func(*args, **(kwargs or {}))


class Tape(TorchDispatchMode):
    """Records operations, and runs them again."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.own: dict[int, Tensor] = {}  # by storage: memory of the tape
        self.steps: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}  # memory of others that changed, with its earlier contents
        self.freed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if waits(func, args):
            raise RuntimeError(f"{func} is not permitted while a graph is recorded")
        given = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
        known = {t.untyped_storage()._cdata for t in given}
        if func._schema.is_mutable:
            for t in (t for t in given if has_memory(t)):
                key = t.untyped_storage()._cdata
                if key not in self.own and key not in self.before:
                    whole = torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage())
                    self.before[key] = whole, whole.clone()
        held = tree_map(self.hold, (args, kwargs))
        result = func(*args, **kwargs)
        made = [t for t in tree_flatten(result)[0] if isinstance(t, Tensor)]
        new = [t for t in made if t.untyped_storage()._cdata not in known]
        new = [t for t in new if has_memory(t)]
        for t in new:
            self.own[t.untyped_storage()._cdata] = t
        if new or func._schema.is_mutable:
            self.steps.append((func, *held, made if new else []))
        return result

    def hold(self, t: Any) -> Any:
        """Return the placeholder of an argument."""
        if not isinstance(t, Tensor) or not has_memory(t) or t.untyped_storage()._cdata in self.own:
            return t
        storage = StorageWeakRef(t.untyped_storage())
        return Foreign(storage, tuple(t.shape), t.stride(), int(t.storage_offset()), t.dtype)

    def record(self, run: Callable[[], None]) -> None:
        """Record the operations of a function, without changing any tensor."""
        try:
            with self:
                run()
        finally:
            for whole, values in self.before.values():
                whole.copy_(values)
            self.before.clear()
        self.overwrite()

    @torch.no_grad()
    def replay(self) -> None:
        """Run all operations again."""
        assert not self.freed
        for func, args, kwargs, made in self.steps:
            results = tree_flatten(func(*_placed(args), **_placed(kwargs)))[0]
            if made:
                for mine, result in zip(made, [t for t in results if isinstance(t, Tensor)], strict=True):
                    mine.copy_(result)
        self.overwrite()

    @torch.no_grad()
    def overwrite(self) -> None:
        """Change all memory of the tape, as other graphs in the same pool would."""
        for t in self.own.values():
            whole = torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage())
            whole.fill_(255)  # NaN, or minus one

    def reset(self) -> None:
        """Forget the recording."""
        self.freed = True


def _placed(value: Any) -> Any:
    parts, structure = tree_flatten(value, is_leaf=lambda t: isinstance(t, Foreign))
    return tree_unflatten([t.tensor() if isinstance(t, Foreign) else t for t in parts], structure)


class Tapes:
    """Replaces the recorder of CUDA graphs."""

    def __init__(self) -> None:
        self.made: list[Tape] = []
        self.noticed: list[str] = []

    def notices_waits(self, run: Callable[[], None]) -> str:
        """Run a function, and return its first operation that synchronizes."""
        with Watch() as watch:
            run()
        noticed: str = watch.noticed
        self.noticed.append(noticed)
        return noticed

    def record(self, run: Callable[[], None]) -> "Tape":
        """Record a function."""
        tape = Tape()
        tape.record(run)
        self.made.append(tape)
        return tape
