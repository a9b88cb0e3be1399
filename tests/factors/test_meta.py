"""The `meta` device: a model without memory gives the same table as with memory; other computations are refused."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfs import KFAC, EmpiricalRisk, inspect
from kfs.conformance.cases import EXACT
from kfs.errors import DataError, ModelError
from kfs.problem.data import to_device
from tests.factors.models import ONE_POSITION, Function, PackedAttention, between
from tests.factors.test_chunks import MODELS as CHUNKS
from tests.factors.test_definition import CONVOLUTIONS
from tests.language_models import bert, gpt2, llama
from tests.operators.problems import PROBLEMS

pytestmark = [  # PyTorch's own
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel"),
]

META = torch.device("meta")


class Outputs(nn.Module):
    """The outputs of a recurrent network, of all layers and directions."""

    def __init__(self, kind: Any, **settings: Any) -> None:
        super().__init__()
        self.net = kind(4, 3, batch_first=True, **settings)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)[0]  # type: ignore[no-any-return]


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def without_rule() -> nn.Module:
    return between(Function(lambda m, x: x @ m.W.tanh(), W=torch.randn(4, 4)))


def collect() -> dict[str, tuple[Callable[[], nn.Module], Any]]:
    """Return the models of all collections in the tests, and some more, with samples."""
    tokens, sequences = torch.randint(5, (3, 4)), torch.randn(3, 5, 4)
    text = {"input_ids": tokens, "use_cache": False}
    mask = {"attention_mask": torch.ones(3, 4, dtype=torch.int64)}
    found: dict[str, tuple[Callable[[], nn.Module], Any]] = {
        "RNN": (partial(Outputs, nn.RNN, nonlinearity="relu"), sequences),
        "LSTM, two ways": (partial(Outputs, nn.LSTM, num_layers=2, bidirectional=True), sequences),
        "LSTM, projected": (partial(Outputs, nn.LSTM, proj_size=2), sequences),
        "GRU, without bias": (partial(Outputs, nn.GRU, bias=False), sequences),
        "encoder": (encoder, sequences),
        "attention": (PackedAttention, torch.randn(3, 4)),
        "without rule": (without_rule, torch.randn(3, 3)),
        "GPT-2": (gpt2, text),
        "Llama": (llama, text),
        "Llama with a mask": (llama, {**text, **mask}),
        "BERT with a mask": (bert, {"input_ids": tokens, **mask}),
    }
    for case in ONE_POSITION:
        sample = torch.randint(5, (3, 1)) if case.tokens else torch.randn(3, 3)
        found[f"one position: {case.name}"] = (case.make, sample)
    for problem in PROBLEMS:
        found[f"problem: {problem.name}"] = (problem.make_model, problem.make_data()[0])
    for name, (make, width) in CHUNKS.items():
        found[f"chunks: {name}"] = (make, tokens if width is None else torch.randn(3, width))
    for name, (make, size) in CONVOLUTIONS.items():
        found[f"convolution: {name}"] = (make, torch.randn(3, *size))
    for exact in EXACT:
        if exact.name.startswith("ragged"):
            continue  # the number of rows depends on values
        found[f"conformance: {exact.name}"] = (exact.model, exact.inputs(3))
    return found


CASES = collect()


@pytest.mark.parametrize("name", CASES)
def test_the_table_is_the_same(name: str) -> None:
    make, sample = CASES[name]
    with META:
        without_memory = make().eval()
    model = make().eval()
    assert all(t.is_meta for t in (*without_memory.parameters(), *without_memory.buffers()))
    if isinstance(sample, Tensor) and sample.is_floating_point():
        sample = sample.to(next(model.parameters()).dtype)
    all_settings: list[dict[str, Any]] = [{}, {"sharing": "reduce", "joint_bias": False}, {"max_dim": 4}]
    for settings in all_settings:
        real = inspect(model, sample, audit=False, **settings)
        table = inspect(without_memory, to_device(sample, META), **settings)
        assert table == real
        assert table.rows
        # A sample with values is moved to the device of the model.
        assert inspect(without_memory, sample, **settings) == real


def test_functions_and_large_models() -> None:
    def function(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, params["W"]).tanh() + params["b"]

    params = {"W": torch.randn(2, 4), "b": torch.randn(2)}
    real = inspect(function, torch.randn(3, 4), params, audit=False)
    assert inspect(function, torch.empty(3, 4, device=META), {n: p.to(META) for n, p in params.items()}) == real
    with META:
        large = nn.Sequential(nn.Linear(10**6, 10**6), nn.Linear(10**6, 3))  # 8 TB in double precision
    table = inspect(large, torch.empty(2, 10**6, device=META))
    assert table.nbytes == 4 * ((10**6 + 1) ** 2 * 2 + 10**12 + 9)


class Asks(nn.Module):
    """Reads values in one of several ways."""

    def __init__(self, ask: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.ask = nn.Linear(3, 2), ask

    def forward(self, x: Tensor) -> Tensor:
        if self.ask(x):
            raise ValueError("special")
        result: Tensor = self.layer(x)
        return result


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: not x.isfinite().all(),
        lambda x: x.isnan().any(),
        lambda x: torch.any(x > 100).item(),
        lambda x: not torch.all(x < 100),
        lambda x: not (x.isfinite().sum() == x.numel()),  # noqa: SIM201 (as models ask)
        lambda x: x.numel() == 0,
    ],
)
def test_questions_are_answered_as_for_ordinary_data(ask: Callable[[Tensor], Any]) -> None:
    with META:
        model = Asks(ask)
    sample = torch.randn(4, 3)
    assert inspect(model, sample) == inspect(Asks(ask), sample, audit=False)


@pytest.mark.parametrize("ask", [lambda x: x.sum().item(), lambda x: x.tolist(), lambda x: bool(x[0, 0] > 0)])
def test_other_questions_have_no_answer(ask: Callable[[Tensor], Any]) -> None:
    with META:
        model = Asks(ask)
    with pytest.raises(
        ModelError, match=r"needs values in its forward pass.*meta device.*Inspect it on another device"
    ):
        inspect(model, torch.randn(4, 3))


def test_errors_of_the_model_are_its_own() -> None:
    def fails(x: Tensor) -> None:
        raise RuntimeError(f"no sense in {list(x.shape)}")

    with META:
        model = Asks(fails)
        batch_norm = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    with pytest.raises(RuntimeError, match="no sense in"):
        inspect(model, torch.randn(4, 3))
    with pytest.raises(ModelError, match="training mode"):
        inspect(batch_norm, torch.randn(4, 3))


def test_nothing_else_is_computed_without_values() -> None:
    X, y = torch.randn(4, 3), torch.randint(2, (4,))
    with META:
        model = nn.Linear(3, 2)
    for data in ((X, y), (X.to(META), y.to(META))):
        with pytest.raises(ModelError, match=r"on the meta device.*kfs\.inspect\(model, sample\)"):
            EmpiricalRisk(model, nn.CrossEntropyLoss(), data)
    risk = EmpiricalRisk(nn.Linear(3, 2), nn.CrossEntropyLoss(), (X, y))
    risk.params = dict(model.named_parameters())  # as if they had been moved there
    for call in (risk.value, risk.gradient, lambda: KFAC(risk)):
        with pytest.raises(ModelError, match="on the meta device"):
            call()


def test_data_without_values_are_refused() -> None:
    X, y = torch.randn(4, 3), torch.randint(2, (4,))
    for data in ((X.to(META), y), (X, y.to(META))):
        risk = EmpiricalRisk(nn.Linear(3, 2), nn.CrossEntropyLoss(), data)
        for call in (risk.value, risk.gradient, lambda risk=risk: KFAC(risk)):
            with pytest.raises(DataError, match=r"A batch is on the meta device.*model is on cpu"):
                call()
    with pytest.raises(DataError, match="A batch is on the meta device"):
        inspect(nn.Linear(3, 2), X.to(META))


def test_inputs_that_cannot_be_moved_say_so_themselves() -> None:
    class Here:
        def to(self, device: torch.device) -> None:
            raise NotImplementedError(f"not to {device}")

    risk = EmpiricalRisk(nn.Linear(3, 2), nn.MSELoss(), [((torch.randn(4, 3), Here()), torch.randn(4, 2))])
    with pytest.raises(NotImplementedError, match="not to cpu"):
        risk.value()
