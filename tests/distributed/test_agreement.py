"""Ranks agree on errors, on values, and on the current operation of the program."""

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import kfs
from kfs.distributed import Ranks, Same, check_same
from kfs.distributed.ranks import connected
from kfs.errors import DataError, DistributedError, LostRankError
from tests.distributed.pool import Pool

WORLDS = (1, 2, 4)


def values() -> list[int]:
    return Ranks(dist.group.WORLD).gather("squares", dist.get_rank() ** 2)


@pytest.mark.parametrize("size", WORLDS)
def test_values_come_in_the_order_of_ranks(ranks: Pool, size: int) -> None:
    assert ranks(size, values) == [[rank**2 for rank in range(size)]] * size


def failing(bad: list[int]) -> tuple[type, str, list[str], float]:
    everybody = Ranks(dist.group.WORLD)
    start = time.monotonic()
    error = DataError(f"Example {everybody.rank} is bad.", "Leave it out.") if everybody.rank in bad else None
    with pytest.raises(DataError) as caught, everybody.agreed("reading"):
        raise_it(error)
    return type(caught.value), str(caught.value), caught.value.__notes__, time.monotonic() - start


def raise_it(error: Exception | None) -> None:
    if error is not None:
        raise error


@pytest.mark.parametrize(("size", "bad"), [(1, [0]), (2, [1]), (4, [1, 3]), (3, [0, 1, 2])])
def test_an_error_of_one_rank_is_that_of_all(ranks: Pool, size: int, bad: list[int]) -> None:
    for kind, text, notes, seconds in ranks(size, failing, bad):
        assert kind is DataError
        assert text == f"Example {bad[0]} is bad. Leave it out."
        assert notes == [f"Rank {bad[0]} of {size} has raised this."]
        assert seconds < 5


class OddError(Exception):
    """An error that cannot be recreated from its arguments."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class OtherError(Exception):
    """An error that differs after unpickling."""

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return ValueError, ("lost",)


def odd(bad: int, other: bool) -> str:
    everybody = Ranks(dist.group.WORLD)
    error = OtherError("text") if other else OddError(1, 2)
    with pytest.raises(RuntimeError) as caught, everybody.agreed("reading"):
        raise_it(error if everybody.rank == bad else None)
    return str(caught.value)


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("other", [False, True])
def test_an_error_that_cannot_travel_is_described(ranks: Pool, bad: int, other: bool) -> None:
    assert ranks(2, odd, bad, other) == ["OtherError: text" if other else "OddError: 1 and 2"] * 2


def nested(inside: bool) -> list[str]:
    everybody = Ranks(dist.group.WORLD)
    error = DataError("Bad.", "Leave it out.") if everybody.rank == 1 else None
    texts = []
    for _ in range(2):  # the first error leaves no message behind
        with pytest.raises(DataError) as caught, everybody.agreed("outer"), everybody.agreed("middle"):
            steps(everybody, error, inside)
        texts.append(str(caught.value))
    return texts


def steps(everybody: Ranks, error: Exception | None, inside: bool) -> None:
    raise_it(None if inside else error)  # rank 1 never reaches this agreement of the others
    with everybody.agreed("inner"):
        raise_it(error)
    everybody.gather("a number", 1)


@pytest.mark.parametrize("inside", [False, True])
def test_errors_in_nested_contexts_are_exchanged_once(ranks: Pool, inside: bool) -> None:
    assert ranks(3, nested, inside) == [["Bad. Leave it out."] * 2] * 3


def elsewhere() -> str:
    everybody = Ranks(dist.group.WORLD)
    with pytest.raises(DistributedError) as caught:
        everybody.gather("first" if everybody.rank < 2 else "second", 0)
    return str(caught.value)


def test_ranks_at_different_places_notice(ranks: Pool) -> None:
    for text in ranks(3, elsewhere):
        assert "rank 0 at 'first', rank 2 at 'second'" in text


def different(value: int) -> str:
    everybody = Ranks(dist.group.WORLD)
    everybody.same("The numbers", 1, "Use one.")
    with pytest.raises(DistributedError) as caught:
        everybody.same("The numbers", value if everybody.rank == 1 else 1, "Use one.")
    return str(caught.value)


@pytest.mark.parametrize("value", [2, 10**400])
def test_values_that_must_be_the_same(ranks: Pool, value: int) -> None:
    for text in ranks(2, different, value):
        assert text.startswith("The numbers differ between processes: rank 0 has 1, and rank 1 has ")
        assert text.endswith(" Use one.")
        assert len(text) < 500


def facts(second: dict[str, object]) -> str:
    everybody = Ranks(dist.group.WORLD)
    first: dict[str, object] = {"seed": 0, "weight": torch.ones(2)}
    mine = second if everybody.rank == 1 else first
    found: list[str] = []

    def compare() -> None:  # Only the first thread receives interrupts.
        check_same(everybody, "numbers", {"Numbers": Same(first, "Use one.")})
        with pytest.raises(DistributedError) as caught:
            check_same(everybody, "numbers", {"Numbers": Same(mine, "Use one.")})
        found.append(str(caught.value))

    thread = threading.Thread(target=compare)
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize(
    ("second", "text"),
    [
        ({"seed": 1, "weight": torch.ones(2)}, "rank 0 has seed=0, and rank 1 has seed=1"),
        ({"weight": torch.ones(2)}, "rank 0 has seed=0, and rank 1 has nothing"),
        ({"seed": 0, "weight": torch.tensor([1.0, 2.0])}, "'weight' of rank 1 differs from rank 0"),
        ({"seed": 0, "weight": torch.ones(2).double()}, "'weight' of rank 1 differs from rank 0"),
        ({"weight": torch.ones(2), "seed": 0}, "their order is different"),
    ],
)
def test_facts_that_must_be_the_same(ranks: Pool, second: dict[str, object], text: str) -> None:
    assert ranks(2, facts, second) == [f"Numbers differ between processes: {text}. Use one."] * 2


def members() -> str:
    some = dist.new_group([1])
    mesh = init_device_mesh("cpu", (2,))
    assert Ranks(mesh).gather("ranks", dist.get_rank()) == [0, 1]
    with pytest.raises(DistributedError, match=r"2 axes .* mesh\['data'\]"):
        Ranks(init_device_mesh("cpu", (1, 2), mesh_dim_names=("model", "data")))
    if dist.get_rank() == 1:
        assert Ranks(some).gather("ranks", 1) == [1]
        return ""
    with pytest.raises(DistributedError) as caught:
        Ranks(some)
    return str(caught.value)


def test_groups_and_meshes(ranks: Pool) -> None:
    assert "does not belong to the group" in ranks(2, members)[0]


def test_this_process_alone() -> None:
    alone = Ranks(None)
    assert (alone.rank, alone.size, alone.are_several) == (0, 1, False)
    alone.same("The numbers", 1, "Use one.")
    with pytest.raises(DataError) as caught, alone.agreed("reading"):
        raise DataError("Bad.", "Leave it out.")
    assert not hasattr(caught.value, "__notes__")
    with pytest.raises(DistributedError, match="group is a str"):
        Ranks("world")  # type: ignore[arg-type]


def lost() -> None:
    if dist.get_rank() == 1:
        raise KeyError("this one")
    dist.all_reduce(torch.ones(1))


def test_the_pool_reports_who_has_failed_first(ranks: Pool) -> None:
    """The pool then runs the next function as usual."""
    for _ in range(2):
        with pytest.raises(KeyError, match="this one"):
            ranks(2, lost)
    assert ranks(2, values) == [[0, 1]] * 2


def interrupted() -> tuple[float, list[str]]:
    """Interrupt the last rank while it computes, and while tensors are exchanged."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background jobs with SIGINT ignored
    everybody = Ranks(dist.group.WORLD)
    start = time.monotonic()
    notes: list[str] = []
    for inside in (False, True):
        with pytest.raises(KeyboardInterrupt) as caught, everybody.agreed("outer"), everybody.agreed("inner"):
            compute(everybody, inside)
        notes += getattr(caught.value, "__notes__", [])
    assert everybody.gather("numbers", everybody.rank) == list(range(everybody.size))  # No file is left over.
    return time.monotonic() - start, notes


def compute(everybody: Ranks, inside: bool) -> None:
    is_last = everybody.rank == everybody.size - 1
    if is_last and not inside:
        raise KeyboardInterrupt
    if inside:
        with connected("sums"):  # The interrupt waits; otherwise, other ranks would wait in the middle of an exchange.
            if is_last:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.1)
            dist.all_reduce(torch.ones(1))
    everybody.gather("numbers", 1)


def test_interrupts_end_all_ranks(ranks: Pool) -> None:
    """A keyboard interrupt of one rank ends the others in the same way."""
    (first, notes), (second, own) = ranks(2, interrupted)
    assert notes == ["Rank 1 of 2 has raised this."] * 2
    assert not own
    assert max(first, second) < 5


def busy(seconds: float) -> tuple[float, str]:
    """Fail on the first rank, while others are busy with many batches."""
    first = dist.get_rank() == 0
    start = time.monotonic()
    X, y = torch.rand(4, 3), torch.rand(4, 2)

    class Slow:
        def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            for _ in range(100):
                time.sleep(0 if first else seconds / 100)
                yield X * (torch.nan if first else 1), y

    risk = kfs.EmpiricalRisk(torch.nn.Linear(3, 2), torch.nn.MSELoss(), Slow(), num_data=400, group=dist.group.WORLD)
    with pytest.raises(DataError, match="not finite") as caught:
        risk.value()
    with pytest.raises(DataError, match="not finite"):
        risk.gradient()
    return time.monotonic() - start, str(caught.value)


def test_busy_ranks_hear_of_errors(ranks: Pool) -> None:
    """They are told before they reach the end of their data."""
    (_, text), (seconds, other) = ranks(2, busy, 20.0)
    assert text == other
    assert seconds < 10


def silent() -> None:
    """Interrupt a rank that cannot tell the other one, which waits for tensors until a timeout."""
    everybody = Ranks(dist.group.WORLD)
    if everybody.rank == 1:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kfs.distributed.ranks._SECONDS_TO_TELL", 0.5)
            with pytest.raises(KeyboardInterrupt), everybody.agreed("reading"):
                raise KeyboardInterrupt
        os._exit(1)  # as an interrupted program ends
    with pytest.raises(LostRankError), connected("sums"):
        dist.all_reduce(torch.ones(10))


def test_an_interrupt_that_nobody_hears() -> None:
    """The interrupted rank ends, and then the others."""
    pool = Pool()
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="The process of rank 1 has ended"):
        pool(2, silent)
    assert time.monotonic() - start < 10
    pool.close()
