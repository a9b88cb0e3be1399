"""Replayed passes agree with eager passes: with a stand-in for CUDA graphs, and with CUDA graphs on a GPU.

The stand-in runs the pass again on the inputs that a graph would read, and reverts all other changes: those of sums
during recording, and those of numbers on the host during replay.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfs.factors import EKFAC, KFAC, exact_blocks
from kfs.factors.accumulate.statistic import Statistic
from kfs.losses import TokenCrossEntropy
from kfs.problem.data import Batch
from kfs.problem.risk import EmpiricalRisk
from kfs.runtime import cuda_graphs
from kfs.runtime.cuda_graphs import Replayer, shape_of
from tests.factors.test_no_waiting import NoWaiting
from tests.factors.test_padded_rows import Transformer, padded, sequences
from tests.operators.contract import close

FISHERS: tuple[Any, ...] = ("type-2", "ggn", "mc", "empirical", "forward-only")


def tensors_of(sums: Statistic) -> list[Tensor]:
    """Return all tensors that passes change."""
    return [total.tensor for total in sums.tensors().values()]


class StandIn:
    """A stand-in for a CUDA graph and its recorder."""

    sums: Statistic  # the sums that the passes change

    def __init__(self, waits: str = "", error: Exception | None = None) -> None:
        self.waits = waits
        self.error = error
        self.recorded = 0
        self.replayed = 0
        self.freed = 0

    def notices_waits(self, run: Callable[[], None]) -> str:
        run()
        return self.waits

    def record(self, run: Callable[[], None]) -> "StandIn":
        self.recorded += 1
        tensors = tensors_of(self.sums)
        before = [t.clone() for t in tensors]
        run()
        for t, values in zip(tensors, before, strict=True):
            t.copy_(values)
        if self.error is not None:
            raise self.error
        self.run = run
        return self

    def replay(self) -> None:
        self.replayed += 1
        before = self.sums.counts()
        self.run()
        self.sums.add_counts({key: before[key] - value for key, value in self.sums.counts().items()})

    def reset(self) -> None:
        self.freed += 1


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> list[StandIn]:
    """Record all passes by stand-ins; the last stand-ins are at the end of the list."""
    made: list[StandIn] = []

    def recorder_for(*_: Any) -> Callable[[], StandIn]:
        made.append(StandIn())
        return lambda one=made[-1]: one  # type: ignore[misc]

    run_batch = Replayer.run_batch

    def run_with_sums(one: Replayer, batch: Batch, run: Any, guard: Any, *, host: Any) -> None:
        if one.is_enabled:
            made[-1].sums = host
        run_batch(one, batch, run, guard, host=host)

    monkeypatch.setattr(cuda_graphs, "recorder_for", recorder_for)
    monkeypatch.setattr(Replayer, "run_batch", run_with_sums)
    monkeypatch.setattr("kfs.runtime.sync.is_asynchronous", lambda _: True)  # the host does not know all counts
    return made


class Net(nn.Module):
    """Tokens with padding, positions, a convolution, a normalization and linear maps."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(7, 4, padding_idx=0), nn.Parameter(torch.randn(6, 4))
        self.conv, self.norm = nn.Conv1d(4, 4, 3, padding=1), nn.LayerNorm(4)
        self.head = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv((self.tokens(x) + self.positions).transpose(1, 2)).transpose(1, 2)
        result: Tensor = self.head(self.norm(h)).mean(1)
        return result


def make_risk(batches: int = 8, size: int = 4, last: int = 3, device: str = "cpu") -> EmpiricalRisk:
    """Return a risk with some batches, the last of which is smaller."""
    torch.manual_seed(0)
    model = Net().double().eval().to(device)
    sizes = [size] * batches + ([last] if last else [])
    data = [(torch.randint(7, (n, 6), device=device), torch.randint(3, (n,), device=device)) for n in sizes]
    return EmpiricalRisk(model, nn.CrossEntropyLoss(), data)


def padded_risk(device: str, packed: bool = False) -> EmpiricalRisk:
    """Return a risk of padded sequences in eight batches; if packed, no mask shows the documents."""
    model = Transformer(causal=True).to(device)
    data = []
    for seed in range(8):
        lengths = [int(n) for n in torch.randint(2, 7, (4,), generator=torch.Generator().manual_seed(seed))]
        batch = padded(sequences(lengths, seed, prompt=1), 2, 8 - max(lengths))
        if packed:
            batch["documents"] = torch.arange(10).expand(4, -1) // (3 + seed % 3)
        data.append({name: t.to(device) for name, t in batch.items()})
    return EmpiricalRisk(model, TokenCrossEntropy(shift=True), data)


def same_factors(K: KFAC, L: KFAC, rtol: float = 1e-12) -> None:
    """Compare all factors and counts."""
    assert list(K.blocks) == list(L.blocks)
    assert (K.num_data, K.count) == (L.num_data, L.count)
    for name, block in K.blocks.items():
        assert block.sums.terms == L.blocks[name].sums.terms
        for mine, theirs in zip(block.sums.sums, L.blocks[name].sums.sums, strict=True):
            scale = float(theirs.total.abs().max())
            torch.testing.assert_close(mine.total, theirs.total, rtol=rtol, atol=rtol * scale)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("fisher", FISHERS)
def test_factors(stand_ins: list[StandIn], monkeypatch: pytest.MonkeyPatch, fisher: Any, sharing: Any) -> None:
    risk = make_risk()
    K = KFAC(risk, fisher, sharing)
    # Two batches run, six are replayed; the last one has another shape.
    assert [(one.recorded, one.replayed, one.freed) for one in stand_ins] == [(1, 6, 1)]
    monkeypatch.undo()
    same_factors(K, KFAC(risk, fisher, sharing))


@pytest.mark.parametrize("fisher", ["mc", "type-2"])
def test_second_passes(stand_ins: list[StandIn], monkeypatch: pytest.MonkeyPatch, fisher: Any) -> None:
    risk = make_risk()
    E, C = EKFAC(risk, fisher), exact_blocks(risk, fisher=fisher)
    assert [one.replayed for one in stand_ins] == [6] * 4
    assert len(stand_ins) == 4
    monkeypatch.undo()
    close(E.to_dense(), EKFAC(risk, fisher).to_dense())
    close(C.to_dense(), exact_blocks(risk, fisher=fisher).to_dense())


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("packed", [False, True])
def test_rows_that_count(stand_ins: list[StandIn], monkeypatch: pytest.MonkeyPatch, packed: bool, sharing: Any) -> None:
    """Masks are inputs of a recording, and so are the vectors that measure which rows count."""
    risk = padded_risk("cpu", packed)
    K = KFAC(risk, "empirical", sharing)
    assert [(one.recorded, one.replayed) for one in stand_ins] == [(1, 6)]
    assert ("measured in every batch" in str(K.audit)) == packed
    monkeypatch.undo()
    same_factors(K, KFAC(risk, "empirical", sharing))


@pytest.mark.parametrize("ignored", [0, 5])
def test_ignored_targets(stand_ins: list[StandIn], monkeypatch: pytest.MonkeyPatch, ignored: int) -> None:
    """All targets are assumed to count, unless the first batch ignores some; if a later one does, all is done again."""
    risk = make_risk()
    batches = [batch[:2] for batch in risk.batches()]
    batches[ignored][1][1] = -100
    risk = EmpiricalRisk(risk.model, nn.CrossEntropyLoss(), batches)
    K = KFAC(risk, "empirical")
    assert [one.replayed for one in stand_ins] == ([6] if ignored == 0 else [6, 6])
    monkeypatch.undo()
    same_factors(K, KFAC(risk, "empirical"))
    assert K.blocks["head.2"].sums.terms == 34 * 6  # one example of 35 has an ignored target


def test_draws_advance(stand_ins: list[StandIn]) -> None:
    """All batches are equal, so a graph that repeats its draws would make all sums multiples of one batch's."""
    risk = make_risk(1, last=0)
    repeated = EmpiricalRisk(risk.model, nn.CrossEntropyLoss(), [next(iter(risk.batches()))[:2]] * 8)
    K = KFAC(repeated, "mc")
    parts = [KFAC(risk, "mc", first_datum=4 * n) for n in range(8)]
    whole = parts[0]
    for part in parts[1:]:
        whole.merge(part)
    same_factors(K, whole)
    assert stand_ins[0].replayed == 6
    assert not torch.allclose(K.blocks["head.2"].B, parts[-1].blocks["head.2"].B)


class TestWhatIsRecorded:
    """Passes that are recorded, and the fallback if recording fails."""

    def test_not_worth_it(self, stand_ins: list[StandIn]) -> None:
        KFAC(make_risk(4, last=0))
        assert stand_ins[0].recorded == 0

    def test_unknown_number_of_batches(self, stand_ins: list[StandIn]) -> None:
        class Loader:
            def __iter__(self) -> Iterator[Any]:
                return (batch[:2] for batch in batches)

        risk = make_risk(4, last=0)
        batches = list(risk.batches())
        KFAC(EmpiricalRisk(risk.model, nn.CrossEntropyLoss(), Loader()))
        assert stand_ins[0].replayed == 2

    def test_few_graphs(self, stand_ins: list[StandIn]) -> None:
        risk = make_risk(1)
        data = [(torch.randint(7, (n, 6)), torch.randint(3, (n,))) for n in range(2, 8)] * 4
        KFAC(EmpiricalRisk(risk.model, nn.CrossEntropyLoss(), data))
        assert stand_ins[0].recorded == 4
        assert stand_ins[0].freed == 4

    @pytest.mark.parametrize("enabled", [True, False])
    def test_on_a_cpu(self, enabled: bool) -> None:
        assert not Replayer("Passes", logging.getLogger(), torch.device("cpu"), enabled).is_enabled

    def test_switched_off(self, stand_ins: list[StandIn]) -> None:
        KFAC(make_risk(), replay=False)
        assert not stand_ins

    def test_inputs_that_cannot_be_copied(self, stand_ins: list[StandIn]) -> None:
        class Tokens(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = Net()

            def forward(self, x: Tensor, extra: object) -> Tensor:
                result: Tensor = self.net(x)
                return result

        data = [((torch.randint(7, (4, 6)), object()), torch.randint(3, (4,)))] * 8
        KFAC(EmpiricalRisk(Tokens().eval(), nn.CrossEntropyLoss(), data))
        assert stand_ins[0].recorded == 0

    @pytest.mark.parametrize("nested", [{"x": torch.ones(2), "n": 3}, [torch.ones(2), (None, "a")]])
    def test_shapes(self, nested: Any) -> None:
        y = next(iter(make_risk(1).batches())).y
        assert shape_of((nested, y)) == shape_of((nested, y))
        assert shape_of((torch.ones(2).to_sparse(), y)) is None

    def test_waits_unless_recorded(self, stand_ins: list[StandIn], monkeypatch: pytest.MonkeyPatch) -> None:
        """Models may check whether they are recorded, and avoid synchronizing then."""
        made = StandIn.__init__
        monkeypatch.setattr(StandIn, "__init__", lambda self: made(self, "called a synchronizing operation"))
        KFAC(make_risk(), "mc")
        assert stand_ins[0].replayed > 0

    def test_second_try(self, stand_ins: list[StandIn], monkeypatch: pytest.MonkeyPatch) -> None:
        """The model takes another branch while it is recorded, which may need an initialization first."""
        made, record = StandIn.__init__, StandIn.record

        def fails_once(self: StandIn, run: Callable[[], None]) -> StandIn:
            graph = record(self, run)
            if self.recorded == 1:
                raise RuntimeError
            return graph

        monkeypatch.setattr(StandIn, "__init__", lambda self: made(self, "called a synchronizing operation"))
        monkeypatch.setattr(StandIn, "record", fails_once)
        K = KFAC(make_risk(), "mc")
        assert stand_ins[0].recorded == 2
        assert stand_ins[0].replayed > 0
        torch.testing.assert_close(K.to_dense(), KFAC(make_risk(), "mc", replay=False).to_dense())

    @pytest.mark.parametrize(
        ("problem", "text"),
        [
            ({"waits": "called a synchronizing operation", "error": RuntimeError()}, "waits for the GPU"),
            ({"error": RuntimeError("no capture\nof streams")}, "no capture."),
            ({"error": torch.OutOfMemoryError("large")}, "not enough memory"),
        ],
    )
    @pytest.mark.parametrize("sharing", ["expand", "reduce"])
    def test_runs_as_it_is(
        self,
        stand_ins: list[StandIn],
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        problem: dict[str, Any],
        text: str,
        sharing: Any,
    ) -> None:
        made = StandIn.__init__
        monkeypatch.setattr(StandIn, "__init__", lambda self: made(self, **problem))
        risk = make_risk()
        with caplog.at_level(logging.INFO, "kfs.factors"):
            K = KFAC(risk, "mc", sharing)
        assert stand_ins[0].replayed == 0
        messages = [record.getMessage() for record in caplog.records if "replayed" in record.getMessage()]
        assert len(messages) == 1
        assert text in messages[0]
        monkeypatch.undo()
        same_factors(K, KFAC(risk, "mc", sharing))

    def test_parameters_used_in_another_way(self, stand_ins: list[StandIn]) -> None:
        """A use that is first seen during recording would have sums in the memory of the graph."""

        class Odd(Net):
            calls = 0

            def forward(self, x: Tensor) -> Tensor:
                result = super().forward(x)
                Odd.calls += 1
                if Odd.calls == 3:
                    result = self.head[2](torch.tanh(result.new_ones(len(x), 1, 5) * result.mean(1).reshape(-1, 1, 1)))
                    result = result.squeeze(1)
                return result

        risk = EmpiricalRisk(Odd().eval(), nn.CrossEntropyLoss(), [tuple(b[:2]) for b in make_risk().batches()])
        KFAC(risk, audit=False)
        assert (stand_ins[0].recorded, stand_ins[0].replayed) == (1, 0)
        assert stand_ins[0].freed == 1


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("fisher", FISHERS)
@pytest.mark.parametrize("ekfac", [False, True])
def test_no_waiting(monkeypatch: pytest.MonkeyPatch, fisher: Any, sharing: Any, ekfac: bool) -> None:
    """Between the first batch and the end, no operation synchronizes; a CPU is treated as an accelerator."""
    if ekfac and fisher == "forward-only":
        return
    risk = make_risk(last=0)
    expected = (EKFAC if ekfac else KFAC)(risk, fisher, sharing)
    monkeypatch.setattr("kfs.runtime.sync.is_asynchronous", lambda _: True)
    mode, seen = NoWaiting(), []

    def run_batch(_: Replayer, batch: Any, run: Callable[[Any], None], *__: Any, **___: Any) -> None:
        with mode if batch.first else nullcontext():  # plans of the first batch write to the host
            run(batch)
        seen.append(batch.first)

    monkeypatch.setattr(cuda_graphs, "recorder_for", lambda *_: StandIn)
    monkeypatch.setattr(Replayer, "run_batch", run_batch)
    found = (EKFAC if ekfac else KFAC)(risk, fisher, sharing)
    torch.testing.assert_close(found.trace(), expected.trace())
    assert len(seen) > 1
