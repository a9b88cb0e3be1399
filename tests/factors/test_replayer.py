"""When `Replayer` runs, rehearses, records and replays, and when it frees recordings.

Tapes stand in for CUDA graphs (see `tests.factors.tape`).
"""

import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfs.runtime import cuda_graphs
from kfs.runtime.cuda_graphs import Guard, Replayer, RunKey
from tests.factors.tape import Tapes

LOG = logging.getLogger("kfs.runtime")


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> list[Tapes]:
    """Treat the CPU as an accelerator whose graphs are tapes."""
    made: list[Tapes] = []

    def make() -> Tapes:
        made.append(Tapes())
        return made[-1]

    monkeypatch.setattr(cuda_graphs, "recorder_for", lambda *_: make)
    return made


class Sum:
    """Adds inputs, scaled, to a total, and counts rows on the host."""

    def __init__(self) -> None:
        self.total = torch.zeros(3)
        self.adders: dict[Any, Any] = {}
        self.rows = 0.0
        self.calls = 0

    def __call__(self, inputs: Tensor, numbers: Sequence[float | Tensor]) -> None:
        self.calls += 1
        self.rows += len(inputs)
        self.total.add_(inputs.sum(0) * numbers[0])

    def counts(self) -> dict[Any, float]:
        return {"rows": self.rows}

    def add_counts(self, more: Any) -> None:
        self.rows += more["rows"]

    def finish_batch(self) -> None:
        """Do nothing."""


def replayer(**limits: Any) -> Replayer:
    return Replayer("Sums", LOG, torch.device("cpu"), **limits)


def test_stages(tapes: list[Tapes]) -> None:
    """The first run is eager, the second is rehearsed, the third is recorded; all add the same."""
    one, add = replayer(), Sum()
    expected = torch.zeros(3)
    for step in range(1, 7):
        x = torch.full((2, 3), float(step))
        one.run(RunKey(), add, x, numbers=[0.5 * step], host=add)
        expected += x.sum(0) * 0.5 * step
        assert torch.equal(add.total, expected)
        assert add.rows == 2 * step
        assert len(tapes) == (step > 1)
        assert add.calls == min(step, 3)  # later runs execute no Python
    assert tapes[0].noticed == [""]
    assert len(tapes[0].made) == 1
    one.close()
    assert tapes[0].made[0].freed


@pytest.mark.parametrize("settings", [{"key": None}, {"guard": Guard(why="it must not")}])
def test_eager(settings: dict[str, Any], tapes: list[Tapes], caplog: pytest.LogCaptureFixture) -> None:
    one, add = replayer(), Sum()
    with caplog.at_level(logging.INFO):
        for _ in range(4):
            arguments: dict[str, Any] = {"key": RunKey(), "body": add, "inputs": torch.ones(2, 3), "numbers": [1.0]}
            one.run(**arguments | settings)
    assert add.calls == 4
    assert not tapes
    assert caplog.messages == ["Sums are not replayed as CUDA graphs: it must not."] * ("guard" in settings)


class TestGuards:
    """A recording is used only if its guard is unchanged."""

    def test_place(self, tapes: list[Tapes]) -> None:
        """Recordings of one kind are freed, and those of others are not."""
        one, add = replayer(), Sum()
        for kind in ("a", "b"):
            for _ in range(3):
                one.run(RunKey(kind), add, torch.ones(2, 3), Guard(place=1), [1.0])
        assert not one.is_recorded(RunKey("a"), Guard(place=2))
        assert one.is_recorded(RunKey("b"), Guard(place=1))
        assert [tape.freed for tape in tapes[0].made] == [True, False]
        for _ in range(3):
            one.run(RunKey("a"), add, torch.ones(2, 3), Guard(place=2), [1.0])
        assert len(tapes[1].made) == 1  # A memory pool whose graphs were freed is not reused.

    def test_attributes_that_change_often(self, tapes: list[Tapes], caplog: pytest.LogCaptureFixture) -> None:
        """Each change delays the next recording, unless the last one was used; the third change is logged."""
        one, add, model = replayer(), Sum(), nn.Linear(2, 2)
        seen: list[int] = []

        def runs(number: int) -> None:
            for _ in range(number):
                one.run(RunKey(), add, torch.ones(2, 3), Guard(model), [1.0])
            seen.append(sum(len(some.made) for some in tapes))

        with caplog.at_level(logging.INFO):
            for change in range(6):
                model.temperature = change  # type: ignore[assignment]
                runs(4)
        assert seen == [1, 2, 2, 2, 2, 2]
        why = "attributes of the model change between its passes (temperature)"
        assert caplog.messages == [f"Sums are not replayed as CUDA graphs: {why}."]
        runs(8)
        assert seen[-1] == 3
        model.temperature = 7  # type: ignore[assignment]
        runs(3)
        assert seen[-1] == 4

    @pytest.mark.parametrize(
        ("before", "after", "name"),
        [
            ({"a": 1}, {"a": 2}, "a"),
            ({"a": 1}, {"a": True}, "a"),
            ({"a": 1}, {"b": 1}, "a, b"),
            ({"a": (1, [2])}, {"a": (1, [3])}, "a"),
            ({"a": (1, 2)}, {"a": (1, 2, 3)}, "a"),
            ({"a": torch.ones(2)}, {"a": torch.ones(2)}, "a"),
            ({"a": [1, {"b": 2.0}]}, {"a": [1, {"b": 2.0}]}, ""),
            ({"a": "text", "b": torch.device("cpu")}, {"a": "te" + "xt", "b": torch.device("cpu")}, ""),
        ],
    )
    def test_difference(self, before: dict[str, Any], after: dict[str, Any], name: str) -> None:
        """Attributes of a module and settings are compared in the same way."""
        for inside in ("", "0."):
            model = nn.Sequential(nn.Linear(2, 2))
            module = model[0] if inside else model
            vars(module).update(before)
            guard = Guard(model)
            for key in before:
                delattr(module, key)
            vars(module).update(after)
            text = guard.difference(Guard(model))
            names = ", ".join(inside + part for part in name.split(", "))
            assert text == (f"attributes of the model change between its passes ({names})" if name else "")
        assert bool(Guard(None, before).difference(Guard(None, after))) == bool(name)


class TestLimits:
    """Limits on the number of recordings, and on remembered shapes and kinds."""

    def test_recordings(self, tapes: list[Tapes]) -> None:
        """Further shapes of a kind are not recorded. Recordings of other kinds are freed."""
        one, add = replayer(most=2), Sum()
        for kind in ("a", "b"):
            for rows in (1, 2, 3):
                for _ in range(4):
                    one.run(RunKey(kind, rows), add, torch.ones(rows, 3), numbers=[1.0])
            assert not one.has_room(kind)
            assert [one.is_recorded(RunKey(kind, rows)) for rows in (1, 2, 3)] == [True, True, False]
        assert not one.is_recorded(RunKey("a", 1))
        assert sum(not tape.freed for some in tapes for tape in some.made) == 2

    def test_what_is_remembered(self, tapes: list[Tapes]) -> None:
        """The most recent shapes and kinds are kept, and those with recordings."""
        one, add = replayer(), Sum()
        for _ in range(3):
            one.run(RunKey("recorded", "recorded"), add, torch.ones(2, 3), numbers=[1.0])
        for number in range(2 * cuda_graphs._MOST_KEYS):
            one.run(RunKey("recorded", number), add, torch.ones(2, 3), numbers=[1.0])
            one.run(RunKey(number), add, torch.ones(2, 3), numbers=[1.0])
        assert one.is_recorded(RunKey("recorded", "recorded"))
        assert len(one._kinds) == len(one._kinds["recorded"].shapes) == cuda_graphs._MOST_KEYS
        assert one.is_repeated(RunKey(number))
        assert not one.is_repeated(RunKey(0))

    def test_memory_of_runs(self, tapes: list[Tapes]) -> None:
        """It is limited to as many unrecorded shapes as may be recorded, and is kept while the guard is the same."""
        one = replayer(most=2)
        for shape in range(3):
            assert not one.is_repeated(RunKey(shape=shape), Guard())
            one.note(RunKey(shape=shape))
            one.keep(RunKey(shape=shape), [shape])
        assert [one.kept(RunKey(shape=shape)) for shape in range(3)] == [None, [1], [2]]
        assert one.is_repeated(RunKey(shape=2), Guard())
        assert not one.is_repeated(RunKey(shape=2), Guard(place=1))
        assert one.kept(RunKey(shape=2)) is None

    def test_out_of_memory(
        self, tapes: list[Tapes], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """All recordings are freed, and the kind is not recorded again, although the rehearsal synchronized."""
        one, add = replayer(), Sum()
        for _ in range(3):
            one.run(RunKey("a"), add, torch.ones(2, 3), numbers=[1.0])

        def waits(x: Tensor, numbers: Sequence[float | Tensor]) -> None:
            add(x, numbers)
            float(add.total[0])

        def record(*_: Any) -> None:
            raise torch.OutOfMemoryError("large")

        monkeypatch.setattr(Tapes, "record", record)
        with caplog.at_level(logging.DEBUG, "kfs.runtime"):
            for _ in range(5):
                one.run(RunKey("b"), waits, torch.ones(2, 3), numbers=[1.0])
        assert caplog.messages == ["Sums are not replayed as CUDA graphs: there is not enough memory."]
        assert all(tape.freed for tape in tapes[0].made)
        assert torch.equal(add.total, torch.full((3,), 16.0))
