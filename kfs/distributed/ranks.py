"""The processes that share a computation, and their agreement before tensors are sent.

Every exchange starts with a small message from each rank: its place in the program, or its error. An error of one rank
is therefore raised on all ranks, with the same type and text and without a time-out. Ranks at different places of the
program raise an error, too. A rank that is processing its data learns of an error through the group's store, which it
queries at most once per second. Sums and comparisons of tensors live in `kfs.distributed.collectives`, the split of
data in `kfs.problem.data_shards`.
"""

import pickle
import signal
import threading
import time
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from kfs.errors import DistributedError, LostRankError

Group = dist.ProcessGroup | DeviceMesh
T = TypeVar("T")
_SECONDS_TO_ASK = 1.0  # interval in which a busy rank queries the store for errors of other ranks
# Time-out after which an interrupted rank stops sending its error. Other ranks may be in a collective operation on
# tensors, where they do not receive it.
_SECONDS_TO_TELL = 10.0
# Number of exchanged messages by group. It is the same in all processes of the group.
_exchanged: MutableMapping[dist.ProcessGroup, int] = WeakKeyDictionary()


class _Message(NamedTuple):
    """A message that every rank sends to all ranks."""

    where: str  # place in the program
    value: Any = None
    error: bytes | None = None  # a pickled exception


class _RemoteError(Exception):
    """Another rank has an error and waits for this rank to receive it."""


class Ranks:
    """The processes of a group, or this process alone.

    Args:
        group: A process group, a device mesh with one axis, or `None` for this process alone, without communication.

    Attributes:
        group: The process group; `None` for this process alone.
        rank: Index of this process in the group.
        size: Number of processes.
        are_several: Whether a group was given, even a group with a single process.

    Raises:
        DistributedError: If this process does not belong to the group, or the mesh has several axes.

    Example:
        >>> ranks = Ranks(None)
        >>> ranks.rank, ranks.size, ranks.gather("numbers of examples", 7)
        (0, 1, [7])
    """

    def __init__(self, group: Group | None = None) -> None:
        self.group = None if group is None else _process_group(group)
        self.are_several = self.group is not None
        self.rank = 0 if self.group is None else dist.get_rank(self.group)
        self.size = 1 if self.group is None else dist.get_world_size(self.group)
        self._contexts = 0  # number of open contexts of `agreed`
        self._asked = 0.0  # time of the last query of the store

    def __deepcopy__(self, memo: dict[int, Any]) -> "Ranks":
        return self  # processes are not copied

    def __reduce__(self) -> Any:
        if self.group is None:
            return type(self), ()
        raise DistributedError(
            f"A result of {self.size} processes cannot be pickled, because the process group exists only in this "
            "program.",
            "Use save(path) of operators or state_dict() of optimizers, in all processes. "
            "The result of K.gathered() can be pickled.",
        )

    def gather(self, where: str, value: T) -> list[T]:
        """Gather the values of all ranks, in the order of ranks.

        Args:
            where: Description of the exchange. It must be the same on all ranks.
            value: A small object that can be pickled.

        Raises:
            DistributedError: If another rank is at a different exchange.
            Exception: The error of another rank that failed before this call.
        """
        if self.group is None:
            return [value]
        return cast("list[T]", [message.value for message in self._exchange(_Message(where, value))])

    def gather_tensors(self, where: str, tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Gather tensors by name from all ranks; with several processes, the results are on the CPU.

        Names, shapes and dtypes may differ between ranks. For sums, see `kfs.distributed.add_up`.

        Args:
            where: Description of the exchange.
            tensors: The tensors of this rank. All other ranks get copies.
        """
        if self.group is None:
            return [dict(tensors)]
        on_host = {name: t.detach().cpu() for name, t in tensors.items()}
        return self.gather(where, on_host)

    def device_for(self, device: torch.device) -> torch.device:
        """Return the device from which tensors of `device` are sent: `device` itself if the backend supports it."""
        kinds = [part.partition(":")[0] for part in dist.get_backend_config(self.group).split(",")]
        if device.type in kinds:
            return device
        return torch.device(kinds[0], torch.accelerator.current_device_index())  # pragma: no cover (tested on a GPU)

    @contextmanager
    def agreed(self, where: str, is_short: bool = False) -> Iterator[None]:
        """Context that ends in the same way on all ranks: without an error, or with the error of the first failed rank.

        Contexts may be nested, and ranks may exchange values inside. Code outside of these contexts must not fail on
        one rank only. A keyboard interrupt of one rank ends all ranks.

        Args:
            where: Description of the computation in this context.
            is_short: Whether all ranks exchange a message right after the context. Then the context itself ends
                without an exchange unless this rank failed, and the other ranks receive its error in that exchange.

        Raises:
            Exception: The error of the first failed rank, with a note that names the rank.

        Example:
            >>> with Ranks(None).agreed("nothing"):
            ...     pass
        """
        if self.group is None:
            yield
            return
        self._contexts += 1
        try:
            yield
        except (LostRankError, GeneratorExit):  # other ranks cannot be reached, or there is no error
            raise
        except _RemoteError:
            self._exchange(_Message(where))  # raises the other rank's error
            raise
        except BaseException as error:
            if getattr(error, "_kfs_agreed_in", None) is not self.group:  # otherwise all ranks have raised it already
                self._tell(where, error)
            raise
        finally:
            self._contexts -= 1
        if not is_short:
            self._exchange(_Message(where))

    def listen(self) -> None:
        """Query the store, at most once per second, for errors of other ranks, and leave `agreed` if there is one.

        Call it between batches, so that an error of another rank ends a long computation. It does nothing outside of
        `agreed`.

        Example:
            >>> Ranks(None).listen()
        """
        if self.group is None or not self._contexts or time.monotonic() - self._asked < _SECONDS_TO_ASK:
            return
        self._asked = time.monotonic()
        try:
            is_told = self.group.get_group_store().check([self._key])
        except RuntimeError:  # the process that hosts the store has ended; the next exchange raises an error
            return
        if is_told:
            raise _RemoteError

    @property
    def _key(self) -> str:
        """Key that a rank sets in the store if it has an error instead of the next message."""
        return f"kfs error {_exchanged.get(cast('dist.ProcessGroup', self.group), 0)}"

    def _tell(self, where: str, error: BaseException) -> None:
        """Send an error to all ranks, and raise the error of the first failed rank.

        After an interrupt, such as from the keyboard, this rank waits for a limited time and returns.
        """
        group = cast("dist.ProcessGroup", self.group)
        mine = _Message(where, error=_pickled(error))
        with suppress(RuntimeError):  # as in `listen`
            group.get_group_store().set(self._key, "")
        if isinstance(error, Exception):
            self._exchange(mine)
            return
        # A collective operation cannot be canceled, so another thread runs it, on the same device.
        device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None

        def exchange() -> None:
            if device is not None:  # pragma: no cover (tested on a GPU)
                torch.accelerator.set_device_index(device)
            with suppress(RuntimeError):
                dist.all_gather_object([None] * self.size, mine, group=group)

        thread = threading.Thread(target=exchange, daemon=True)
        thread.start()
        thread.join(_SECONDS_TO_TELL)
        _exchanged[group] = _exchanged.get(group, 0) + 1
        vars(error)["_kfs_agreed_in"] = group

    def same(self, where: str, value: object, way_out: str) -> None:
        """Raise an error on all ranks if a value differs between ranks.

        Args:
            where: Name of the value at the start of a sentence, such as `"The settings"`.
            value: A small value with a `repr` that shows differences.
            way_out: How to fix a difference.

        Raises:
            DistributedError: If values differ.
        """
        values = self.gather(where, value)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise DistributedError(
                    f"{where} differ between processes: rank 0 has {shown(values[0])}, and rank {rank} has "
                    f"{shown(other)}.",
                    way_out,
                )

    def _exchange(self, mine: _Message) -> list[_Message]:
        """Exchange messages with all ranks, and raise an error if a rank failed or is at a different place."""
        messages: list[_Message] = [mine] * self.size
        group = cast("dist.ProcessGroup", self.group)
        with connected(mine.where):
            dist.all_gather_object(messages, mine, group=group)
            _exchanged[group] = _exchanged.get(group, 0) + 1

        # Raise the error of the first failed rank.
        failed = [(rank, message.error) for rank, message in enumerate(messages) if message.error is not None]
        if failed:
            rank, found = failed[0]
            raise self._marked(found, rank)

        # All ranks must be at the same place of the program.
        places = {message.where: rank for rank, message in reversed(list(enumerate(messages)))}
        if len(places) > 1:
            listed = ", ".join(f"rank {rank} at {where!r}" for where, rank in sorted(places.items(), key=_rank_of))
            error = DistributedError(
                f"The processes are at different places of the program: {listed}.",
                "Call the same functions and methods with the same arguments, in the same order, in all processes of "
                "the group.",
            )
            # All ranks raise this error here. They may be in different contexts of `agreed`, or in none.
            vars(error)["_kfs_agreed_in"] = self.group
            raise error
        return messages

    def _marked(self, found: bytes, rank: int) -> BaseException:
        """Return the error of a rank with a note, marked so that outer contexts know that all ranks raise it."""
        # Unpickle a new object on the failed rank, too: if the user raises the original one again, it must be sent.
        error = cast("BaseException", pickle.loads(found))
        error.add_note(f"Rank {rank} of {self.size} has raised this.")
        vars(error)["_kfs_agreed_in"] = self.group
        return error


@contextmanager
def connected(where: str) -> Iterator[None]:
    """Context for calls of `torch.distributed` only: turns a lost connection into a `LostRankError`.

    A keyboard interrupt is deferred to the end of the context, since all ranks must complete a collective operation.

    Args:
        where: Description of the exchange.

    Raises:
        LostRankError: If the connection to another process is lost.

    Example:
        >>> with connected("nothing"):
        ...     pass
    """
    try:
        with _uninterrupted():
            yield
    except RuntimeError as error:
        first_line = str(error).partition("\n")[0]
        raise LostRankError(
            f"A process of the group has ended, or does not respond, at {where!r} ({first_line}).",
            "Check the last output of that process, and restart all processes.",
        ) from error


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Defer a keyboard interrupt to the end of this context. Only the main thread receives interrupts."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    waiting: list[Any] = []
    signal.signal(signal.SIGINT, lambda *given: waiting.append(given))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if waiting:
            handler(*waiting[0])


def _process_group(group: Group) -> dist.ProcessGroup:
    """Return the process group of a group or device mesh given by the user."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise DistributedError(
                f"The device mesh has {group.ndim} axes {group.mesh_dim_names or ''}.",
                "Choose the axis along which data differ, such as mesh['data']. If data differ along all axes, as with "
                "replicas of sharded models, pass torch.distributed.group.WORLD.",
            )
        group = group.get_group()
    if isinstance(group, dist.ProcessGroup):
        return group
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise DistributedError(
            "This process does not belong to the group.", "Call this in the processes of the group only."
        )
    raise DistributedError(
        f"group is a {type(group).__name__}.",
        "Pass torch.distributed.group.WORLD, another process group, a device mesh with one axis, or None.",
    )


def _pickled(error: BaseException) -> bytes:
    """Pickle an error. If it cannot be pickled, pickle a `RuntimeError` with its type and text instead."""
    try:
        data = pickle.dumps(error)
        copy = pickle.loads(data)
        if type(copy) is type(error) and str(copy) == str(error):
            return data
    except Exception:  # noqa: BLE001 (an error may contain anything, and its class may do anything)
        pass
    return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))


def _rank_of(item: tuple[str, int]) -> int:
    return item[1]


def shown(value: object) -> str:
    """Return the `repr` of a value for a message, shortened in the middle if it is long.

    Example:
        >>> shown(7)
        '7'
    """
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:150]} ... {text[-150:]}"
