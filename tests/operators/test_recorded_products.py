"""Replayed products equal eager ones, on the CPU with tapes in place of CUDA graphs.

A tape repeats operations without Python. Memory that was freed, or that belongs to the tape, has no values.
"""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from kfs import GGN, EmpiricalRisk
from kfs.operators import curvature, recorded_products
from kfs.runtime import cuda_graphs, sync
from tests.factors.tape import Tapes
from tests.operators.recorded import OPERATORS, Net, columns_for, make_risk, messages, recorded, recordings, same


class TestSameProducts:
    """Replayed products equal eager products."""

    @pytest.mark.parametrize("number", [1, 3])
    @pytest.mark.parametrize("kind", OPERATORS)
    def test_all(self, kind: str, number: int, tapes: list[Tapes]) -> None:
        risk = make_risk()
        A, B = OPERATORS[kind](risk), OPERATORS[kind](risk, replay=False)
        found = []
        for seed in range(6):
            V = columns_for(A, number, seed)
            found.append((A @ V, B @ V))
        for mine, theirs in found:  # after all of them: no result is overwritten later
            same(mine, theirs)
        assert recordings(tapes) == 2  # the last batch is smaller
        assert tapes[0].noticed == ["", ""]

    @pytest.mark.parametrize("number", [1, 3])
    @pytest.mark.parametrize("kind", OPERATORS)
    def test_nothing_falls_back(self, kind: str, number: int, tapes: list[Tapes]) -> None:
        """Deferred checks work inside `vmap` and `jvp`: the model is called as often as without them."""
        A = OPERATORS[kind](make_risk(batches=1))
        V = columns_for(A, number)
        A @ columns_for(A, number + 1)  # the very first product compares derivatives
        calls = []
        for _ in range(3):  # the first one checks values at once, and the last one is a rehearsal
            Net.calls = 0
            A @ V
            calls.append(Net.calls)
        assert calls[0] == calls[1] == calls[2]
        assert tapes

    def test_constants_that_others_use(self, tapes: list[Tapes]) -> None:
        """Cached tensors do not belong to a transform of `torch.func`."""
        A = GGN(make_risk())
        recorded(A)
        assert all(t.untyped_storage().nbytes() for t in sync._constants.values())

    def test_half_precision(self, tapes: list[Tapes]) -> None:
        risk = make_risk()
        assert isinstance(risk.model, nn.Module)
        batches = [(batch.x.bfloat16(), batch.y) for batch in risk.batches()]
        half = EmpiricalRisk(risk.model.bfloat16(), nn.CrossEntropyLoss(), batches)
        A, B = GGN(half), GGN(half, replay=False)
        V = recorded(A)
        assert torch.equal(A @ V, B @ V)
        assert (A @ V).dtype == torch.bfloat16
        assert recordings(tapes) == 2

    @pytest.mark.parametrize("kind", ["mc", "ggn"])
    def test_in_pieces(self, kind: str, tapes: list[Tapes], monkeypatch: pytest.MonkeyPatch) -> None:
        """Draws for a part of a batch are those of its examples."""
        monkeypatch.setattr(curvature, "_NUMBERS_AT_ONCE", 10)
        risk = make_risk()
        A = OPERATORS[kind](risk)
        V = recorded(A)
        monkeypatch.undo()
        same(A @ V, OPERATORS[kind](risk) @ V)

    def test_blocks_and_dictionaries(self, tapes: list[Tapes]) -> None:
        risk = make_risk()
        A, B = GGN(risk), GGN(risk, replay=False)
        V = torch.ones(15, dtype=torch.float64)
        for _ in range(5):
            found = A.submatrix("norm.bias", "head.weight") @ V
        same(found, B.submatrix("norm.bias", "head.weight") @ V)
        assert recordings(tapes) == 2
        by_name = risk.gradient()
        for _ in range(5):
            product = A @ by_name
        for name, t in (B @ by_name).items():
            same(product[name], t)
        assert recordings(tapes) == 4

    def test_columns_that_require_gradients(self, tapes: list[Tapes]) -> None:
        risk = make_risk()
        A = GGN(risk)
        V = recorded(A)
        found = A.multiply({name: t.requires_grad_() for name, t in A.domain.read(V)[0].items()})
        same(A.codomain.flatten(found).T, GGN(risk, replay=False) @ V)

    def test_chunks_of_two_sizes(self, tapes: list[Tapes]) -> None:
        risk = make_risk()
        A = GGN(risk, chunk_size=2)
        V = columns_for(A, 3)
        for _ in range(5):
            found = A @ V
        same(found, GGN(risk, replay=False) @ V)
        assert recordings(tapes) == 4
        assert len(tapes) == 1  # they share their memory

    def test_many_kinds(self, tapes: list[Tapes]) -> None:
        """Only some of the recordings are kept."""
        risk = make_risk()
        A = GGN(risk)
        for number in range(1, 7):
            same(A @ recorded(A, number), GGN(risk, replay=False) @ columns_for(A, number))
        assert len(tapes) == 2
        assert all(tape.freed for tape in tapes[0].made)
        assert not any(tape.freed for tape in tapes[1].made)


class TestWhatIsRecorded:
    """Products that are recorded, and products that are not."""

    def test_a_single_product_leaves_nothing_behind(self, tapes: list[Tapes]) -> None:
        A = GGN(make_risk())
        A @ columns_for(A)
        assert not tapes

    @pytest.mark.parametrize("settings", [{"replay": False}, {"reuse": True}])
    def test_switched_off(self, settings: dict[str, Any], tapes: list[Tapes]) -> None:
        recorded(GGN(make_risk(), **settings))
        assert not tapes

    @pytest.mark.parametrize("device", ["cpu", "meta"])
    def test_other_devices(self, device: str) -> None:
        assert cuda_graphs.recorder_for(torch.device(device)) is None

    def test_hooks_run_with_every_pass(self, tapes: list[Tapes], caplog: pytest.LogCaptureFixture) -> None:
        risk = make_risk()
        A = GGN(risk)
        V = recorded(A)
        assert isinstance(risk.model, nn.Module)
        handle = risk.model.register_forward_hook(lambda *args: 2 * args[-1])
        with caplog.at_level(logging.INFO, "kfs.operators"):
            found = A @ V, A @ V
        same(found[1], GGN(risk, replay=False) @ V)
        assert messages(caplog) == ["Products are not replayed as CUDA graphs: the model has hooks."]
        handle.remove()
        same(A @ V, GGN(risk, replay=False) @ V)

    def test_functions(self, tapes: list[Tapes], caplog: pytest.LogCaptureFixture) -> None:
        """Variables that a function reads may change unnoticed, so its products are not recorded."""
        factor = [1.0]

        def model(params: Any, x: Tensor) -> Tensor:
            return factor[0] * torch.tanh(x @ params["W"])

        batches = [(batch.x, batch.y) for batch in make_risk().batches()]
        params = {"W": torch.randn(4, 3, dtype=torch.float64)}
        with caplog.at_level(logging.INFO, "kfs.operators"):
            A = GGN(EmpiricalRisk(model, nn.CrossEntropyLoss(), batches, params=params))
            B = GGN(make_risk(loss=lambda f, y: factor[0] * nn.functional.cross_entropy(f, y)))
            before = [one @ recorded(one) for one in (A, B)]
            factor[0] = 2.0
            after = [one @ columns_for(one) for one in (A, B)]
        assert not any(torch.allclose(one, other) for one, other in zip(before, after, strict=True))
        assert not tapes
        assert len(messages(caplog)) == 2
        assert "is a function" in messages(caplog)[0]

    def test_modes_that_watch(self, tapes: list[Tapes]) -> None:
        """PyTorch's counter of operations counts all of them."""
        A = GGN(make_risk())
        V = recorded(A)
        counts = []
        for _ in range(2):
            with FlopCounterMode(display=False) as counter:
                A @ V
            counts.append(counter.get_total_flops())
        assert counts[0] == counts[1] > 0

    def test_special_tensors(self, tapes: list[Tapes]) -> None:
        class Marked(Tensor):
            pass

        risk = make_risk()
        assert isinstance(risk.model, nn.Module)
        risk.model.register_buffer("mask", torch.ones(3).as_subclass(Marked))
        recorded(GGN(risk))
        assert not tapes

    def test_waits(self, tapes: list[Tapes], caplog: pytest.LogCaptureFixture) -> None:
        """The model branches on data; recording fails, and the log gives the reason."""

        class Branches(Net):
            def forward(self, x: Tensor) -> Tensor:
                f = super().forward(x)
                return f if x.sum() > 0 else 2 * f

        risk = make_risk(Branches())
        A = GGN(risk)
        with caplog.at_level(logging.INFO, "kfs.operators"):
            V = recorded(A)
            for _ in range(4):
                same(A @ V, GGN(risk, replay=False) @ V)
        assert recordings(tapes) == 0
        assert len(messages(caplog)) == 1
        assert "waits for the GPU" in messages(caplog)[0]

    def test_little_memory(
        self, tapes: list[Tapes], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """There is no room for the recording's tensors."""
        risk = make_risk()
        A = GGN(risk)

        def fails(*_: Any) -> None:
            raise torch.OutOfMemoryError("large")

        monkeypatch.setattr(recorded_products._Memory, "like", fails)
        with caplog.at_level(logging.INFO, "kfs.operators"):
            V = recorded(A)
            same(A @ V, GGN(risk, replay=False) @ V)
        assert recordings(tapes) == 0
        assert messages(caplog) == ["Products are not replayed as CUDA graphs: there is not enough memory."]

    def test_attributes_that_change_in_every_pass(self, tapes: list[Tapes], caplog: pytest.LogCaptureFixture) -> None:
        class Counts(Net):
            count = 0

            def forward(self, x: Tensor) -> Tensor:
                self.count += 1
                return super().forward(x)

        risk = make_risk(Counts())
        A = GGN(risk)
        with caplog.at_level(logging.INFO, "kfs.operators"):
            V = recorded(A)
            same(A @ V, GGN(risk, replay=False) @ V)
        assert not tapes
        assert len(messages(caplog)) == 1
        assert "attributes of the model change" in messages(caplog)[0]
