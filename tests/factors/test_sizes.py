"""Sizes: factors that do not fit into memory are refused before they are allocated; large models are not run."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from kfs import EKFAC, KFAC, EmpiricalRisk, inspect
from kfs.errors import KfsWarning, ModelError
from kfs.factors import inspection
from kfs.factors.accumulate import factor_sums
from kfs.optim import KFAC as Optimizer  # noqa: N811 (both are called KFAC)
from kfs.runtime import memory

CPU, META = torch.device("cpu"), torch.device("meta")
CLASSES = 300
HEAD = 4 * (CLASSES**2 + 9**2)  # bytes of the dense factors of a head with eight features


class Largest(TorchDispatchMode):
    """Records the largest number of bytes that an operation returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not result.is_meta:
            self.nbytes = max(self.nbytes, result.untyped_storage().nbytes())
        return result


@contextmanager
def memory_of(nbytes: int) -> Iterator[None]:
    """Pretend that the machine has this much memory, in which small factors need a check, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "total_memory", lambda device: nbytes if device.type in {"cpu", "meta"} else None)
        patch.setattr(factor_sums, "_MANY", 0)
        yield


def problem() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    return model, torch.randn(6, 5), torch.randint(CLASSES, (6,))


MESSAGE = (
    r"The dense factors of block '2' take 352 KiB, more than half of the memory of cpu \(350 KiB\). Nothing was "
    r"allocated. Pass max_dim=150, so that wider factors keep their diagonal only"
)


@pytest.mark.parametrize("method", [KFAC, EKFAC])
def test_factors_that_do_not_fit_are_refused_before_they_are_allocated(method: Any) -> None:
    model, X, y = problem()
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), (X, y))
    before = [p.detach().clone() for p in model.parameters()]
    state = torch.get_rng_state()
    with memory_of(350 * 1024), Largest() as largest, pytest.raises(ModelError, match=MESSAGE):
        method(risk, fisher="mc")
    assert largest.nbytes < HEAD // 4
    assert all(p.grad is None and torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    # The way out works, and so do other parameters.
    with memory_of(350 * 1024):
        with pytest.warns(KfsWarning, match=r"2\.B \(300\)"):
            K = method(risk, fisher="mc", max_dim=150)
        assert (K.factors if method is EKFAC else K).blocks["2"].B.shape == (CLASSES,)
        method(EmpiricalRisk(model, nn.CrossEntropyLoss(), (X, y), params=["0.weight", "0.bias"]), fisher="mc")


def test_the_share_is_one_half() -> None:
    model, X, y = problem()
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), (X, y))
    with memory_of(2 * HEAD):
        KFAC(risk, fisher="mc")
    with memory_of(2 * HEAD - 1), pytest.raises(ModelError, match="Nothing was allocated"):
        KFAC(risk, fisher="mc")
    # Half precision is added up in single precision, and double precision takes twice as much.
    with memory_of(2 * HEAD), pytest.raises(ModelError, match="Nothing was allocated"):
        KFAC(risk, fisher="mc", factor_dtype=torch.float64)
    # Without gradients, there is no dense factor of this size.
    with memory_of(2 * HEAD - 1):
        KFAC(risk, fisher="forward-only")


def test_the_optimizer_refuses_them_too() -> None:
    model, X, y = problem()
    optimizer = Optimizer(model, nn.CrossEntropyLoss())
    before = [p.detach().clone() for p in model.parameters()]
    with memory_of(350 * 1024), pytest.raises(ModelError, match=MESSAGE):
        model(X)
    assert all(p.grad is None and torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    optimizer.close()
    with memory_of(350 * 1024):
        optimizer = Optimizer(model, nn.CrossEntropyLoss(), max_dim=150)
        nn.functional.cross_entropy(model(X), y).backward()
        with pytest.warns(KfsWarning, match=r"2\.B \(300\)"):
            optimizer.step()
    optimizer.close()


@pytest.mark.parametrize("device", [CPU, META])
def test_inspect_says_what_does_not_fit(device: torch.device) -> None:
    model, X, _ = problem()
    model.to(device)
    with memory_of(350 * 1024), Largest() as largest:
        table = inspect(model, X.to(device))
        assert inspect(model, X.to(device), max_dim=150).notes == ()
    assert largest.nbytes < HEAD // 4
    (note,) = table.notes
    assert note.startswith("The dense factors of block '2' take 352 KiB, more than half of the memory of cpu (350 KiB)")
    assert note in str(table)
    assert inspect(model, X.to(device)).notes == ()


def test_memory_of_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Physical memory, or a limit of the control group."""
    whole = memory.total_memory.__wrapped__
    monkeypatch.setattr(memory, "_LIMITS", ())
    physical = whole(CPU)
    assert physical is not None
    assert physical > 2**28
    assert whole(META) == physical
    assert whole(torch.device("xpu")) is None
    (tmp_path / "none").write_text("max\n")
    (tmp_path / "limit").write_text("123456\n")
    monkeypatch.setattr(memory, "_LIMITS", (str(tmp_path / "missing"), str(tmp_path / "none")))
    assert whole(CPU) == physical
    monkeypatch.setattr(memory, "_LIMITS", (str(tmp_path / "limit"), str(tmp_path / "none")))
    assert whole(CPU) == 123456

    def unknown(name: str) -> int:
        raise ValueError(name)

    monkeypatch.setattr(os, "sysconf", unknown)
    assert whole(CPU) is None
    monkeypatch.setattr(memory, "total_memory", whole)
    assert memory.beyond_memory("a", 2**60, CPU) == ""


class Counting(nn.Module):
    """Counts calls with values, also those of copies; asks for a value if wanted."""

    calls: ClassVar[list[bool]] = []

    def __init__(self, asks: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.tied = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.tied.weight = self.layer.weight
        self.register_buffer("scale", torch.ones(3))
        self.asks = asks
        self.calls.clear()

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(not x.is_meta)
        if self.asks and x.sum().item() > 1e9:
            raise ValueError("large")
        result: Tensor = self.tied(self.layer(x) * self.scale)
        return result


def test_large_models_are_inspected_without_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "_LARGE", 10)
    X = torch.randn(4, 3)
    expected = inspect(Counting(), X, audit=True)
    assert expected.audit is not None
    for audit in (None, False):
        model = Counting()
        before = {name: t.clone() for name, t in model.state_dict().items()}
        found = inspect(model, X, audit=audit)
        assert model.calls == [False]
        assert [(r.parameter, r.block, r.A, r.B) for r in found.rows] == [
            (r.parameter, r.block, r.A, r.B) for r in expected.rows
        ]
        assert found.audit is None
        assert "Pass audit=True" in str(found)
        assert all(torch.equal(t, before[name]) and not t.is_meta for name, t in model.state_dict().items())
        assert model.tied.weight is model.layer.weight
        assert model.layer.weight.requires_grad


def test_large_models_that_need_values_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """So are models with hooks, and values of parameters that are not the model's."""
    X = torch.randn(4, 3)
    plain = inspect(Counting(), X, audit=False)
    monkeypatch.setattr(inspection, "_LARGE", 10)
    asking, hooked, other = Counting(asks=True), Counting(), Counting()
    seen: list[Any] = []
    hooked.register_forward_hook(lambda *_: seen.append(1))
    given = {name: p.detach().clone() for name, p in other.named_parameters()}
    for model, params in ((asking, None), (hooked, None), (other, given)):
        model.calls.clear()
        found = inspect(model, X, params, audit=False)
        assert any(model.calls)
        assert found.rows == plain.rows
        assert found.notes == ()
    assert seen
