"""Recordings of products notice changes, survive errors, and are freed with their operator."""

import copy
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfs import GGN, EmpiricalRisk, Fisher
from kfs.errors import DataError
from kfs.losses import TokenCrossEntropy
from kfs.runtime.cuda_graphs import has_hooks, surroundings
from tests.factors.tape import Tapes
from tests.operators.recorded import Net, columns_for, make_risk, recorded, recordings, same


class Tokens(Net):
    """Predicts at three positions; the last one has no target."""

    scales: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scales", torch.tensor([1.0, 2.0, 3.0]))
        self.factors = {"scale": 0.5}

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).unsqueeze(1) * self.scales.reshape(1, 3, 1) * self.factors.get("scale", 1.0)


def make_tokens() -> EmpiricalRisk:
    """Return a risk whose loss contains another loss, which has weights."""
    torch.manual_seed(0)
    X = torch.randn(14, 4, dtype=torch.float64)
    y = torch.randint(3, (14, 3))
    loss = TokenCrossEntropy(weight=torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64), reduction="sum")
    return EmpiricalRisk(Tokens().double().eval(), loss, list(zip(X.split(3), y.split(3), strict=True)))


def change_parameters(A: Any) -> None:
    with torch.no_grad():
        for p in A.risk.params.values():
            p.mul_(1.5)


def change_buffer(A: Any) -> None:
    A.risk.model.scales.mul_(2)


def replace_tensor(A: Any) -> None:
    A.risk.model.head.weight.data = 2 * A.risk.model.head.weight.data


def replace_parameter(A: Any) -> None:
    A.risk.params["head.weight"] = 2 * A.risk.params["head.weight"].detach()


def change_attribute(A: Any) -> None:
    A.risk.model.temperature = 0.5


def rename_key(A: Any) -> None:
    A.risk.model.factors = {"unused": 0.5}


def add_attribute(A: Any) -> None:
    head = A.risk.model.head  # the last module, so that all others keep their positions
    head.forward = lambda x: 2 * nn.functional.linear(x, head.weight, head.bias)


def replace_module(A: Any) -> None:
    A.risk.model.norm.forward = lambda x: x


def change_loss(A: Any) -> None:
    A.risk.loss.base.label_smoothing = 0.3


def change_weights(A: Any) -> None:
    A.risk.loss.base.weight.mul_(torch.tensor([2.0, 1.0, 1.0], dtype=torch.float64))


def change_seed(A: Any) -> None:
    A.seed = 7


# A change, and whether recordings read it in place.
CHANGES: dict[Callable[[Any], None], bool] = {
    change_parameters: True,
    change_buffer: True,
    replace_tensor: False,
    replace_parameter: False,
    change_attribute: False,
    rename_key: False,
    add_attribute: False,
    replace_module: False,
    change_loss: False,
    change_weights: False,
    change_seed: False,
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changes(change: Callable[[Any], None], tapes: list[Tapes]) -> None:
    A = Fisher(make_tokens(), "mc")
    V = recorded(A)
    before = A @ V
    assert recordings(tapes) == 2
    change(A)
    found = [A @ V for _ in range(5)]
    seed = A.seed
    B = Fisher(A.risk, "mc", seed=seed, replay=False)
    expected = B @ V
    assert not torch.allclose(before, expected)
    for one in found:
        same(one, expected)
    assert recordings(tapes) == (2 if CHANGES[change] else 4)


class TestSurroundings:
    """Modes, and global settings of PyTorch."""

    def test_training_mode(self, tapes: list[Tapes]) -> None:
        class Modes(Net):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x) * (2.0 if self.training else 1.0)

        risk = make_risk(Modes())
        assert isinstance(risk.model, nn.Module)
        A = GGN(risk)
        V = recorded(A)
        for training in (True, False):
            risk.model.train(training)
            same(A @ V, GGN(risk, replay=False) @ V)

    def test_autocast(self, tapes: list[Tapes]) -> None:
        risk = make_risk()
        assert isinstance(risk.model, nn.Module)
        batches = [(batch.x.float(), batch.y) for batch in risk.batches()]
        risk = EmpiricalRisk(risk.model.float(), nn.CrossEntropyLoss(), batches)
        A, B = GGN(risk), GGN(risk, replay=False)
        V = recorded(A)
        exact = A @ V
        with torch.autocast("cpu", torch.bfloat16):
            rounded, expected = A @ V, B @ V
        assert torch.equal(rounded, expected)
        assert not torch.equal(rounded, exact)
        assert recordings(tapes) == 2

    @pytest.mark.parametrize("switch", ["deterministic", "benchmark"])
    def test_settings(self, switch: str) -> None:
        device = torch.device("cpu")
        before = surroundings(device)
        with torch.backends.cudnn.flags(**{switch: not getattr(torch.backends.cudnn, switch)}):
            assert surroundings(device) != before
        assert surroundings(device) == before

    def test_default_dtype(self) -> None:
        device = torch.device("cpu")
        before = surroundings(device)
        torch.set_default_dtype(torch.float64)
        try:
            assert surroundings(device) != before
        finally:
            torch.set_default_dtype(torch.float32)
        assert surroundings(device) == before

    def test_dtype_of_autocast(self) -> None:
        device = torch.device("cpu")
        found = []
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype):
                found.append(surroundings(device))
        assert found[0] != found[1]

    @pytest.mark.parametrize(
        "register",
        [
            "register_forward_pre_hook",
            "register_forward_hook",
            "register_full_backward_pre_hook",
            "register_full_backward_hook",
        ],
    )
    def test_hooks(self, register: str, tapes: list[Tapes]) -> None:
        """A replay would not call them, so models with hooks are not recorded."""
        risk = make_risk()
        assert isinstance(risk.model, nn.Module)
        hook = getattr(risk.model.get_submodule("head"), register)(lambda *_: None)
        assert has_hooks(risk.model)
        recorded(GGN(risk))
        assert recordings(tapes) == 0
        hook.remove()
        assert not has_hooks(risk.model)
        recorded(GGN(risk))
        assert recordings(tapes) == 2


class TestErrors:
    """Errors are raised at the end of a product, name the example, and leave no state behind."""

    def test_nan(self, tapes: list[Tapes]) -> None:
        risk = make_risk()
        A = GGN(risk)
        V = recorded(A)
        assert recordings(tapes) == 2
        bias = risk.params["head.bias"]
        with torch.no_grad():
            bias[0] = torch.nan
        for _ in range(2):
            with pytest.raises(DataError, match="The prediction for example 0 is not finite"):
                A @ V
        assert risk.flags is None
        with torch.no_grad():
            bias[0] = 1.0
        for _ in range(5):
            same(A @ V, GGN(risk, replay=False) @ V)

    def test_nan_of_a_later_datum(self, tapes: list[Tapes]) -> None:
        class Limited(Net):
            most: Tensor

            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("most", torch.tensor(100.0))

            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x).masked_fill(x[:, :1] > self.most, torch.nan)

        risk = make_risk(Limited())
        A = GGN(risk)
        V = recorded(A)
        firsts = torch.cat([batch.x[:, 0] for batch in risk.batches()])
        assert isinstance(risk.model, Limited)
        risk.model.most.copy_(firsts.sort().values[-2])
        with pytest.raises(DataError, match=f"example {int(firsts.argmax())} is"):
            A @ V

    def test_a_loader_that_fails(self, tapes: list[Tapes]) -> None:
        batches = [(batch.x, batch.y) for batch in make_risk().batches()]
        fails = [False]

        class Loader:
            def __iter__(self) -> Iterator[Any]:
                yield from batches[:3]
                if fails[0]:
                    raise OSError("no disk")
                yield from batches[3:]

        risk = EmpiricalRisk(make_risk().model, nn.CrossEntropyLoss(), Loader())
        A = GGN(risk)
        V = recorded(A)
        fails[0] = True
        with pytest.raises(OSError, match="no disk"):
            A @ V
        fails[0] = False
        assert all(tape.freed for tape in tapes[0].made)
        for _ in range(5):
            same(A @ V, GGN(risk, replay=False) @ V)
        assert recordings(tapes) == 4


class TestLifetime:
    """Recordings are freed with their operator, and copies have none."""

    def test_deleted(self, tapes: list[Tapes]) -> None:
        """They are freed at once, without a garbage collection."""
        risk = make_risk()
        A = GGN(risk)
        recorded(A)
        alive = [weakref.ref(tape) for tape in tapes[0].made]
        tapes.clear()
        assert all(reference() is not None for reference in alive)
        del A
        assert not any(reference() for reference in alive)

    @pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
    def test_copies(self, copied: Callable[[Any], Any], tapes: list[Tapes]) -> None:
        A = GGN(make_risk())
        V = recorded(A)
        expected = A @ V
        B = copied(A)
        del A
        for _ in range(5):
            same(B @ V, expected)

    def test_other_operators_of_the_risk(self, tapes: list[Tapes]) -> None:
        """Both operators are used alternately."""
        risk = make_risk()
        A, B = GGN(risk), Fisher(risk, "empirical")
        V = columns_for(A)
        for _ in range(5):
            found = A @ V, B @ V
        same(found[0], GGN(risk, replay=False) @ V)
        same(found[1], Fisher(risk, "empirical", replay=False) @ V)
        assert len(tapes) == 2
