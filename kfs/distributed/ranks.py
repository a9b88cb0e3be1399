"""The processes that share a computation, and how they agree before any tensor travels.

Every exchange starts with a small message from each rank: where it is in the program, or the error that it has met. So
an error of one rank is an error of all, with the same type and text, and not after a time-out. Ranks at different
places of a program notice that, too. A rank that is busy with its data hears of an error by the group's store, which it
asks once in a second. How tensors are added up and compared lives in `summing`, how data are split in `sharding`.
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
_SECONDS_TO_ASK = 1.0  # Whoever is busy asks the store for errors of others so often.
# Whoever was interrupted tries so long to tell others, who may be in an exchange of tensors, where nobody hears it.
_SECONDS_TO_TELL = 10.0
# By group: how many messages were exchanged. All of its processes have counted as many.
_exchanged: MutableMapping[dist.ProcessGroup, int] = WeakKeyDictionary()


class _Message(NamedTuple):
    """What every rank tells all others."""

    where: str  # the place in the program
    value: Any = None
    error: bytes | None = None  # a pickled exception


class _RemoteError(Exception):
    """Another rank has an error, and waits for this one to hear it."""


class Ranks:
    """The processes of a group, or this one alone.

    Args:
        group: A process group, a device mesh with one axis, or `None` for this process alone: then nothing is
            exchanged.

    Attributes:
        group: The process group; `None` for this process alone.
        rank: Index of this process in the group.
        size: Number of processes.

    Raises:
        DistributedError: If this process does not belong to the group, or the mesh has several axes.

    Example:
        >>> ranks = Ranks(None)
        >>> ranks.rank, ranks.size, ranks.gather("numbers of examples", 7)
        (0, 1, [7])
    """

    def __init__(self, group: Group | None = None) -> None:
        self.group = _process_group(group)
        self.rank = 0 if self.group is None else dist.get_rank(self.group)
        self.size = 1 if self.group is None else dist.get_world_size(self.group)
        self._contexts = 0  # how many contexts of `agreed` are open
        self._asked = 0.0  # when the store was asked last

    def __deepcopy__(self, memo: dict[int, Any]) -> "Ranks":
        """Return the same ones: processes are not copied."""
        return self

    def __reduce__(self) -> Any:
        """Refuse to be pickled: another program has other processes."""
        if self.group is None:
            return type(self), ()
        raise DistributedError(
            f"What {self.size} processes have computed together cannot be pickled: another program has others.",
            "Use save(path) of operators or state_dict() of optimizers, in all processes. "
            "What K.gathered() returns can be pickled.",
        )

    @property
    def are_several(self) -> bool:
        """Whether a group was given, even one with a single process."""
        return self.group is not None

    def gather(self, where: str, value: T) -> list[T]:
        """Return the values of all ranks, in the order of ranks.

        Args:
            where: What is exchanged, in words. It must be the same on all ranks.
            value: Anything that can be pickled, and is small.

        Raises:
            DistributedError: If another rank exchanges something else.
            Exception: The error that another rank has met instead of getting here.
        """
        if self.group is None:
            return [value]
        return cast("list[T]", [message.value for message in self._exchange(_Message(where, value))])

    def gather_tensors(self, where: str, tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Return some tensors of all ranks, by name; on the CPU, if there are several processes.

        Names, shapes and dtypes may differ between ranks. For sums, see `summing`.

        Args:
            where: What is exchanged, in words.
            tensors: Those of this rank. Others get copies.
        """
        if self.group is None:
            return [dict(tensors)]
        on_host = {name: t.detach().cpu() for name, t in tensors.items()}
        return self.gather(where, on_host)

    def device_for(self, device: torch.device) -> torch.device:
        """Return where tensors of a device must be to travel: there, if the group's backend can send them."""
        kinds = [part.partition(":")[0] for part in dist.get_backend_config(self.group).split(",")]
        if device.type in kinds:
            return device
        return torch.device(kinds[0], torch.accelerator.current_device_index())  # pragma: no cover (tested on a GPU)

    @contextmanager
    def agreed(self, where: str, is_short: bool = False) -> Iterator[None]:
        """Leave this context in the same way on all ranks: with the error of the first rank that has one, or without.

        Contexts may be nested, and values may be exchanged inside. Nothing may raise on one rank alone outside of them.
        Interrupts are told, too: one rank that is interrupted from the keyboard ends all of them.

        Args:
            where: What is done in here, in words.
            is_short: Whether all ranks exchange something right afterwards. Then only errors are told, and others hear
                them there.

        Raises:
            Exception: The error of the first rank that has one. A note says which rank that was.

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
        except (LostRankError, GeneratorExit):  # nobody can be told, or nothing has failed
            raise
        except _RemoteError:
            self._exchange(_Message(where))  # raises the other rank's error
            raise
        except BaseException as error:
            if getattr(error, "_kfs_agreed_in", None) is not self.group:  # otherwise all ranks know it
                self._tell(where, error)
            raise
        finally:
            self._contexts -= 1
        if not is_short:
            self._exchange(_Message(where))

    def listen(self) -> None:
        """Ask, at most once in a second, whether another rank has an error; then leave the context of `agreed`.

        Call it between batches: what follows may take long, and an error ends it. Outside of `agreed`, nothing happens.

        Example:
            >>> Ranks(None).listen()
        """
        if self.group is None or not self._contexts or time.monotonic() - self._asked < _SECONDS_TO_ASK:
            return
        self._asked = time.monotonic()
        try:
            is_told = self.group.get_group_store().check([self._key])
        except RuntimeError:  # The process that has the store has ended. The next exchange says so.
            return
        if is_told:
            raise _RemoteError

    @property
    def _key(self) -> str:
        """What the store has if a rank has an error instead of the next message."""
        return f"kfs error {_exchanged.get(cast('dist.ProcessGroup', self.group), 0)}"

    def _tell(self, where: str, error: BaseException) -> None:
        """Send an error to all ranks, and raise that of the first rank that has one.

        After an interrupt, from the keyboard for example, nobody waits long for others who may never come.
        """
        group = cast("dist.ProcessGroup", self.group)
        mine = _Message(where, error=_pickled(error))
        with suppress(RuntimeError):  # as in `listen`
            group.get_group_store().set(self._key, "")
        if isinstance(error, Exception):
            self._exchange(mine)
            return
        # Nothing but its end ends an exchange. So another thread waits for it, on the same device.
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
        """Refuse values that differ between ranks, on all of them.

        Args:
            where: What must be the same, as the start of a sentence: `"The settings"`.
            value: Anything small with a `repr` that shows what differs.
            way_out: What to do about it.

        Raises:
            DistributedError: If they differ.
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
        """Send a message to all ranks, and return theirs if none of them has an error."""
        messages: list[_Message] = [mine] * self.size
        group = cast("dist.ProcessGroup", self.group)
        with connected(mine.where):
            dist.all_gather_object(messages, mine, group=group)
            _exchanged[group] = _exchanged.get(group, 0) + 1
        failed = [(rank, message.error) for rank, message in enumerate(messages) if message.error is not None]
        if failed:
            rank, found = failed[0]
            raise self._marked(found, rank)
        places = {message.where: rank for rank, message in reversed(list(enumerate(messages)))}
        if len(places) > 1:
            listed = ", ".join(f"rank {rank} at {where!r}" for where, rank in sorted(places.items(), key=_rank_of))
            error = DistributedError(
                f"The processes are at different places of the program: {listed}.",
                "Call the same functions and methods with the same arguments, in the same order, in all processes of "
                "the group.",
            )
            # All ranks raise this here. They may be in different contexts, and some in none.
            vars(error)["_kfs_agreed_in"] = self.group
            raise error
        return messages

    def _marked(self, found: bytes, rank: int) -> BaseException:
        """Return the error of a rank, with a note, such that outer contexts know that all ranks have it."""
        # A new object also where it comes from: somebody may raise the old one again, and that must be told to others.
        error = cast("BaseException", pickle.loads(found))
        error.add_note(f"Rank {rank} of {self.size} has raised this.")
        vars(error)["_kfs_agreed_in"] = self.group
        return error


@contextmanager
def connected(where: str) -> Iterator[None]:
    """Exchange something in here, and say so if a process has ended. It holds nothing but calls of `torch.distributed`.

    An interrupt from the keyboard waits until the end: half of an exchange would leave others with the other half.

    Args:
        where: What is exchanged, in words.

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
            f"A process of the group has ended, or does not answer, at {where!r} ({first_line}).",
            "Look at what it has written last, and start all processes again.",
        ) from error


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let an interrupt from the keyboard wait until the end of this context. Other threads never get one."""
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


def _process_group(group: Group | None) -> dist.ProcessGroup | None:
    """Return the process group of what the user has given."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise DistributedError(
                f"The device mesh has {group.ndim} axes {group.mesh_dim_names or ''}.",
                "Choose the one along which data differ, such as mesh['data']. If they differ along all of them, as "
                "with replicas of sharded models, pass torch.distributed.group.WORLD.",
            )
        group = group.get_group()
    if group is None or isinstance(group, dist.ProcessGroup):
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
    """Return an error such that other processes can raise it: itself, or another one with its type in the text."""
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
    """Return a value for a message, shortened in the middle.

    Example:
        >>> shown(7)
        '7'
    """
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:150]} ... {text[-150:]}"
