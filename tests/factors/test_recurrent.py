"""Recurrent networks: results equal those of a loop over times in which every product is captured on its own."""

import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from kfs import optim
from kfs.errors import ModelError
from kfs.factors import EKFAC, KFAC, exact_blocks
from kfs.factors import rules as all_rules
from kfs.factors.accumulate import FactorSums
from kfs.factors.audit import forget_audits
from kfs.factors.capture import forward
from kfs.factors.rules import new_trace, recurrent
from kfs.factors.rules.recurrent import SendBack
from kfs.factors.settings import Settings
from kfs.problem.risk import EmpiricalRisk
from tests.factors.written_out import (
    ARRANGEMENTS,
    CASES,
    INPUTS,
    MODULES,
    OPERATIONS,
    PROJECTION,
    STATES,
    TIMES,
    N,
    make,
    risk_of,
    written_out,
)
from tests.operators.contract import close

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Return a function that runs another one, with recurrent networks replaced by explicit loops."""

    def run(program: Callable[[], Any]) -> Any:
        with monkeypatch.context() as patched:
            for kind, operation in OPERATIONS.items():
                patched.setitem(all_rules.RULES, operation, written_out(kind))
            forget_audits()
            try:
                return program()
            finally:
                forget_audits()

    forget_audits()
    yield run
    forget_audits()


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize(("kind", "arrangement"), CASES)
def test_factors(kind: str, arrangement: str, sharing: Any, loop: Any) -> None:
    risk = risk_of(make(kind, **ARRANGEMENTS[arrangement]))
    for fisher in ("type-2", "mc", "empirical", "forward-only"):
        K, L = KFAC(risk, fisher, sharing), loop(lambda fisher=fisher: KFAC(risk, fisher, sharing))
        close(K.to_dense(), L.to_dense())


@pytest.mark.parametrize("kind", MODULES)
def test_other_structures(kind: str, loop: Any) -> None:
    """Eigenvalues and exact blocks are computed from each example's gradients, summed over times."""
    risk = risk_of(make(kind, learned=True, **ARRANGEMENTS["two layers, two directions"]))
    close(EKFAC(risk).to_dense(), loop(lambda: EKFAC(risk)).to_dense())
    close(exact_blocks(risk).to_dense(), loop(lambda: exact_blocks(risk)).to_dense())


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize(
    "names", [["rnn.weight_hh_l0"], ["rnn.weight_ih_l1", "head.weight"], ["rnn.bias_hh_l1"]], ids=str
)
def test_some_parameters(kind: str, names: list[str], loop: Any) -> None:
    """Other parameters are constant: they are not tracked, or need no gradient."""
    model = make(kind, num_layers=2)
    data = [batch[:2] for batch in risk_of(model).batches()]
    for frozen in (False, True):
        model.requires_grad_(not frozen)
        risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), data, params=names)
        K, L = KFAC(risk, sharing="reduce"), loop(lambda risk=risk: KFAC(risk, sharing="reduce"))
        close(K.to_dense(), L.to_dense())


def test_checkpoints_are_refused() -> None:
    """The rerun of a layer in a checkpoint is not captured, so it does not consist of the same operations."""

    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.GRU(INPUTS, STATES, batch_first=True), nn.Linear(STATES, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(self.inner, x, use_reentrant=False)[0]
            result: Tensor = checkpoint(self.head, out[:, -1], use_reentrant=False)
            return result

    model = Recomputed().double()
    with pytest.raises(ModelError, match=r"inside of an activation checkpoint.* outside of the checkpoint"):
        KFAC(risk_of(model))
    model.inner.requires_grad_(requires_grad=False)
    assert list(KFAC(risk_of(model)).blocks) == ["head"]


def test_projections(loop: Any) -> None:
    risk = risk_of(make("LSTM", learned=True, **PROJECTION))
    sharings: tuple[Any, ...] = ("expand", "reduce")
    for sharing in sharings:
        L = loop(lambda sharing=sharing: KFAC(risk, "empirical", sharing))
        close(KFAC(risk, "empirical", sharing).to_dense(), L.to_dense())
    close(EKFAC(risk).to_dense(), loop(lambda: EKFAC(risk)).to_dense())


@pytest.mark.parametrize("kind", MODULES)
def test_columns_together(kind: str) -> None:
    """Several vectors are sent back at once, by `vmap`."""
    settings = PROJECTION if kind == "LSTM" else {}
    risk = risk_of(make(kind, learned=True, **settings))
    close(KFAC(risk, columns_at_once=2).to_dense(), KFAC(risk, columns_at_once=1).to_dense())


def watched(model: nn.Module, x: Tensor) -> Tensor:
    """Evaluate a model while all its parameters are tracked."""
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), (x, torch.zeros(len(x), dtype=torch.int64)))
    (batch,) = risk.batches()
    with torch.enable_grad():
        f, _ = forward(risk, batch._replace(x=x), new_trace(risk.params), [FactorSums(Settings(), dry=True)])
    return f


@pytest.mark.parametrize(("kind", "arrangement"), [*CASES, ("LSTM", "projection")])
def test_predictions_and_gradients(kind: str, arrangement: str) -> None:
    """Gradients of all parameters, first states and inputs, taken twice: the graph outlives a first backward pass."""
    model = make(kind, learned=True, **(ARRANGEMENTS | {"projection": PROJECTION})[arrangement])
    x = torch.randn(N, TIMES, INPUTS, dtype=torch.float64, requires_grad=True)
    wanted = (x, *model.parameters())
    f = watched(model, x)
    expected = model(x)
    close(f, expected)
    for _ in range(2):
        v = torch.randn_like(f)
        found = torch.autograd.grad(f, wanted, v, retain_graph=True)
        exact = torch.autograd.grad(expected, wanted, v, retain_graph=True)
        for one, other in zip(found, exact, strict=True):
            close(one, other)


@pytest.mark.parametrize("kind", MODULES)
def test_only_some_outputs_matter(kind: str) -> None:
    """Some outputs, or the last states, receive no gradient."""
    rnn = MODULES[kind](INPUTS, STATES).double()

    class Last(nn.Module):
        def __init__(self, of_outputs: bool) -> None:
            super().__init__()
            self.rnn, self.of_outputs = rnn, of_outputs

        def forward(self, x: Tensor) -> Tensor:
            out, last = self.rnn(x.transpose(0, 1))
            states = last[1] if isinstance(last, tuple) else last
            chosen: Tensor = out[1] if self.of_outputs else states[0]
            return chosen

    x = torch.randn(N, TIMES, INPUTS, dtype=torch.float64)
    for of_outputs in (False, True):
        model = Last(of_outputs)
        found = torch.autograd.grad(watched(model, x).square().sum(), list(model.parameters()))
        exact = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
        for one, other in zip(found, exact, strict=True):
            close(one, other)


def test_every_weight_is_used_once(loop: Any) -> None:
    """There are three weights for each of two layers and directions, and two heads."""
    risk = risk_of(make("LSTM", **PROJECTION))
    uses = [use.parameter for use in KFAC(risk, "empirical").audit.uses]  # type: ignore[union-attr]
    assert len(uses) == len(set(uses)) == 4 * 3 + 2
    assert len(loop(lambda: KFAC(risk, "empirical")).audit.uses) == 4 * 3 * TIMES + 2


@pytest.mark.parametrize("kind", MODULES)
def test_gradients_that_are_not_sent_back_in_time_are_noticed(
    kind: str, loop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong variant: the gradient of a state is not sent back to the state before."""
    model = make(kind)
    nn.init.ones_(model.rnn.get_parameter("bias_ih_l0"))  # states of ReLUs are positive
    risk = risk_of(model)
    right = loop(lambda: KFAC(risk, "empirical", audit=False)).to_dense()
    of_kind = {"LSTM": recurrent.LSTM, "GRU": recurrent.GRU, "tanh": recurrent.Tanh, "relu": recurrent.ReLU}[kind]
    send_back = of_kind.send_back

    def without_weight(tensors: Any, g: Tensor, g_cell: Tensor, W: Tensor, W_r: Tensor | None) -> Any:
        return send_back(tensors, g, g_cell, torch.zeros_like(W), W_r)

    close(KFAC(risk, "empirical").to_dense(), right)
    monkeypatch.setattr(of_kind, "send_back", without_weight)
    wrong = KFAC(risk, "empirical").to_dense()
    with pytest.raises(AssertionError, match="not close"):
        close(wrong, right)


@pytest.mark.parametrize("kind", MODULES)
def test_the_audit_notices_wrong_products(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong variant: the states after each time are used instead of those before it."""
    model = make(kind)
    nn.init.ones_(model.rnn.get_parameter("bias_ih_l0"))
    before = recurrent._Network._states_before

    def after(*args: Any) -> Tensor:
        return before(*args).roll(-1, 0)

    monkeypatch.setattr(recurrent._Network, "_states_before", after)
    forget_audits()
    with pytest.raises(ModelError, match="the rule for it is wrong"):
        KFAC(risk_of(model), "empirical")
    forget_audits()


@pytest.mark.parametrize("kind", MODULES)
def test_differentiating_twice_is_refused(kind: str) -> None:
    """Slopes have no graph, so a second derivative would be wrong, even if nothing else depends on parameters."""
    model = make(kind)
    x = torch.randn(N, TIMES, INPUTS, dtype=torch.float64, requires_grad=True)
    (g,) = torch.autograd.grad(watched(model, x).sum(), x, create_graph=True)
    with pytest.raises(ModelError, match="differentiated again"):
        g.square().sum().backward()


@pytest.mark.parametrize("kind", MODULES)
def test_training(kind: str, loop: Any) -> None:
    """Steps of the optimizer are the same as with written-out networks."""

    def trained() -> list[Tensor]:
        model = make(kind, learned=True)
        optimizer = optim.KFAC(model, nn.CrossEntropyLoss(), factors_every=2)
        torch.manual_seed(1)
        for _ in range(5):
            x, y = torch.randn(N, TIMES, INPUTS, dtype=torch.float64), torch.randint(2, (N,))
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        return list(model.parameters())

    for one, other in zip(trained(), loop(trained), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-7)  # inverses enlarge differences


def without_autocast() -> bool:
    """Whether PyTorch has no LSTM with autocast for this CPU: some CPUs lack instructions for bfloat16."""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            nn.LSTM(INPUTS, STATES)(torch.randn(1, 1, INPUTS))
    except RuntimeError:
        return True
    return False


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("how", ["float32", "bfloat16", "autocast"])
def test_precisions(kind: str, how: str) -> None:
    if how == "autocast" and kind == "LSTM" and without_autocast():
        pytest.skip("PyTorch has no LSTM with autocast for this CPU.")
    model = make(kind, **ARRANGEMENTS["two layers, two directions"])
    exact = KFAC(risk_of(model, 8), "empirical").to_dense()
    dtype, eps = (torch.float32, 1e-5) if how == "float32" else (torch.bfloat16, 0.1)
    stored = dtype if how == "bfloat16" else torch.float32
    model = model.to(stored)
    (x, y) = next(iter(risk_of(model, 8).batches()))[:2]
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), (x.to(stored), y))
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        K = KFAC(risk, "empirical").to_dense().double()
    assert (K - exact).norm() < eps * exact.norm()


def test_a_sequence_without_batch_axis() -> None:
    """PyTorch adds a batch axis."""

    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.GRU(INPUTS, STATES), nn.Linear(STATES, 2)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.head(self.rnn(x[0])[0][-1]).unsqueeze(0)
            return result

    torch.manual_seed(0)
    model = Single().double()
    close(watched(model, x := torch.randn(1, TIMES, INPUTS, dtype=torch.float64)), model(x))
    KFAC(risk_of(model, 1), "empirical", "reduce")


def test_nothing_is_left_behind_and_nobody_is_warned() -> None:
    model = nn.LSTM(INPUTS, STATES, proj_size=1, num_layers=2, batch_first=True)  # some libraries have no projections
    before = deepcopy(model.state_dict())
    attributes = dict(vars(model))
    first = torch.randn(2, N, 1), torch.randn(2, N, STATES)
    kept = deepcopy(first)

    def last(params: Any, x: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result: Tensor = torch.func.functional_call(model, params, (x, first))[0][:, -1]
        return result

    data = (torch.randn(N, TIMES, INPUTS), torch.randn(N, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        KFAC(EmpiricalRisk(last, nn.MSELoss(), data, params=dict(model.named_parameters())), "mc")
    assert vars(model) == attributes
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert all(map(torch.equal, first, kept))
    assert not any(hasattr(t, "_kfs_data") for t in (*first, *model.parameters()))
    deepcopy(model)


def test_compiled_models(loop: Any) -> None:
    """A compiled model runs without compilation while it is captured."""
    model = make("GRU")
    risk = EmpiricalRisk(
        torch.compile(model, backend="eager"), nn.CrossEntropyLoss(), next(iter(risk_of(model).batches()))[:2]
    )
    close(KFAC(risk, "empirical").to_dense(), loop(lambda: KFAC(risk_of(model), "empirical")).to_dense())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", MODULES)
def test_on_a_gpu(kind: str) -> None:
    """Factors equal those on a CPU, also from recorded passes, and there is no warning about the memory of weights."""
    model = make(kind, **(PROJECTION if kind == "LSTM" else ARRANGEMENTS["two layers, two directions"]))
    ((x, y, *_),) = risk_of(model, 12).batches()
    batches = list(zip(x.split(2), y.split(2), strict=True))
    there = deepcopy(model).cuda()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        K, L = (KFAC(EmpiricalRisk(one, nn.CrossEntropyLoss(), batches), columns_at_once=2) for one in (model, there))
    torch.testing.assert_close(L.to_dense().cpu(), K.to_dense(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", MODULES)
def test_outputs_may_be_changed_in_place(kind: str, batch_first: bool) -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = MODULES[kind](INPUTS, STATES, batch_first=batch_first)

        def forward(self, x: Tensor) -> Tensor:
            out, last = self.rnn(x if batch_first else x.transpose(0, 1))
            states = last[-1] if isinstance(last, tuple) else last
            changed: Tensor = out.mul_(3).sum(1 if batch_first else 0)
            result: Tensor = changed + states.exp_()[0]
            return result

    model = InPlace().double()
    x = torch.randn(N, TIMES, INPUTS, dtype=torch.float64)
    found = torch.autograd.grad(watched(model, x).square().sum(), list(model.parameters()))
    exact = torch.autograd.grad(written_out_of_place(model, x).square().sum(), list(model.parameters()))
    for one, other in zip(found, exact, strict=True):
        close(one, other)


def written_out_of_place(model: Any, x: Tensor) -> Tensor:
    """Compute the same as `InPlace`; PyTorch does not allow changing the outputs of all its operations in place."""
    first = model.rnn.batch_first
    out, last = model.rnn(x if first else x.transpose(0, 1))
    result: Tensor = (3 * out).sum(1 if first else 0) + (last[-1] if isinstance(last, tuple) else last).exp()[0]
    return result


def test_columns_with_one_gradient_at_cells() -> None:
    """Columns may differ only at states. The gradient of the last cells is then the same for all of them."""
    torch.manual_seed(0)
    p, q = torch.randn(2, 3, 2, 20, dtype=torch.float64)  # three times, two examples, four gates of five features
    before, cells, W = (torch.randn(*shape, dtype=torch.float64) for shape in ((3, 2, 5), (2, 2, 5), (20, 5)))
    tensors = recurrent.LSTM(p, q, before, cells[0]).tensors
    columns = torch.randn(6, 3, 2, 5, dtype=torch.float64)

    def send_back(g: Tensor) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = SendBack.apply(g, cells[1], torch.empty(0), recurrent.LSTM, W, None, *tensors)  # type: ignore[no-untyped-call]
        return found

    one_by_one = [send_back(g) for g in columns]
    for place, together in enumerate(torch.func.vmap(send_back)(columns)):
        close(together, torch.stack([found[place] for found in one_by_one]))
