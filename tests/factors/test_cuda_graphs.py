"""Passes that are replayed as CUDA graphs agree with eager passes, and leave no state behind."""

import copy
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfs.errors import DataError, KfsError
from kfs.factors import EKFAC, KFAC, exact_blocks
from kfs.factors.blocks.decompositions import eigh, inverse
from kfs.losses.draws import Draws
from kfs.problem.data import to_device
from kfs.problem.risk import EmpiricalRisk
from kfs.runtime.cuda_graphs import Recorded
from tests.factors.arrangements import ARRANGEMENTS, Problem
from tests.factors.problems import KNOWN
from tests.factors.test_replay import FISHERS, Net, make_risk, same_factors

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CUDA = torch.device("cuda")
# They need not be collected on machines that cannot run them.
PROBLEMS = [*KNOWN, *ARRANGEMENTS] if torch.cuda.is_available() else []
# These may run eagerly. Data decide which operations run, or how rows are ordered, so that every batch is measured; or
# the model copies constants from the host; or it multiplies along an axis, and the backward pass asks the device.
RUN_AS_THEY_ARE = (
    *("experts, masks", "experts, topk", "graphs", "backwards", "in halves", "negatives", "one by one", "sorted"),
    *("views of an example together", "recurrent: no bias", "recurrent: two directions"),
    *("derived: constant", "derived: matrix times", "derived: norm of", "derived: scaled", "class-token"),
    *("conformance: folded", "conformance: ragged", "conformance: rows of mixed", "prelu-one-slope"),
)


@pytest.mark.parametrize("kind", ["mc expand", "type-2 reduce", "empirical expand", "ekfac"])
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_all_models(problem: Problem, kind: str, replayed: list[int]) -> None:
    if "grouped" in problem.name:
        pytest.skip("torch._grouped_mm has no float64 on a GPU")
    one = problem.instance(18)
    model = copy.deepcopy(one.model).cuda()
    batches = [
        (to_device(one.join(one.xs[n : n + 3]), CUDA), torch.cat(one.ys[n : n + 3]).cuda()) for n in range(0, 18, 3)
    ]
    risk = EmpiricalRisk(model, one.loss, batches)

    def compute(**settings: Any) -> Any:
        if kind == "ekfac":
            return EKFAC(risk, "mc", uncovered="skip", **settings)
        fisher, sharing = kind.split()
        return KFAC(risk, fisher, sharing, uncovered="skip", **settings)  # type: ignore[arg-type]

    try:
        expected = compute(replay=False)
    except (KfsError, RuntimeError) as error:  # some have constants that do not move with the model
        pytest.skip(str(error))
    found = compute()
    assert replayed or problem.name.startswith(RUN_AS_THEY_ARE)
    if kind == "ekfac":  # eigenvectors are unique only up to signs, and not at all where eigenvalues are equal
        for mine, theirs in zip(found.stacks, expected.stacks, strict=True):
            torch.testing.assert_close(mine.structure.values.sum(), theirs.structure.values.sum())
    else:
        same_factors(found, expected, 1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_autocast(dtype: torch.dtype, sharing: Any, replayed: list[int]) -> None:
    """The last batch is smaller, and runs after replays, with the casts that `autocast` has cached."""
    risk = make_risk(device="cuda")
    model = copy.deepcopy(risk.model).float()  # type: ignore[union-attr]
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), [batch[:2] for batch in risk.batches()])
    with torch.autocast("cuda", dtype):
        K, L = KFAC(risk, "mc", sharing), KFAC(risk, "mc", sharing, replay=False)
    assert len(replayed) == 6
    same_factors(K, L, 1e-3)


def test_second_passes(replayed: list[int]) -> None:
    risk = make_risk(device="cuda")
    C, D = exact_blocks(risk, fisher="mc"), exact_blocks(risk, fisher="mc", replay=False)
    assert len(replayed) == 12
    torch.testing.assert_close(C.to_dense(), D.to_dense(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("fisher", FISHERS)
def test_nothing_waits(fisher: Any, sharing: Any, replay: bool) -> None:
    risk = make_risk(device="cuda")
    KFAC(risk, fisher, sharing)  # the audit synchronizes
    torch.cuda.set_sync_debug_mode("error")
    try:
        KFAC(risk, fisher, sharing, replay=replay)
        if fisher != "forward-only":
            EKFAC(risk, fisher, sharing, replay=replay)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (70_000,)])
@pytest.mark.parametrize("first", [0, 17, 2**33])
def test_draws(first: int, shape: tuple[int, ...]) -> None:
    here = Draws(3, first, 1)
    for there in (here, Draws(3, torch.tensor(first, device=CUDA), 1)):
        assert torch.equal(there.uniform(5, shape, CUDA).cpu(), here.uniform(5, shape, torch.device("cpu")))
        normal = there.normal(5, shape, CUDA).cpu()
        torch.testing.assert_close(normal, here.normal(5, shape, torch.device("cpu")), rtol=1e-14, atol=1e-14)


class Branches(Net):
    """Branches on values of its input."""

    def forward(self, x: Tensor) -> Tensor:
        f = super().forward(x)
        return 2 * f if float(x.sum()) > 0 else f


class Fails(Net):
    """Fails once, in a pass that is being recorded."""

    error: BaseException = ValueError("no")

    def forward(self, x: Tensor) -> Tensor:
        f = super().forward(x)
        if torch.cuda.is_current_stream_capturing():
            raise self.error
        return f


class Waits(Net):
    """Synchronizes, but only in passes that are being recorded."""

    def forward(self, x: Tensor) -> Tensor:
        f = super().forward(x)
        return f + float(f.sum()) if torch.cuda.is_current_stream_capturing() else f


class Draws3(Net):
    """Draws random numbers and does not use them."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0 * torch.rand(1, device=x.device)


@pytest.mark.parametrize(
    ("kind", "settings", "text"),
    [
        (Branches, {}, "waits for the GPU"),
        (Fails, {}, "no."),
        (Waits, {}, "capturing"),
        (Net, {"memory": 1}, "memory=1"),
        (Draws3, {}, None),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_not_recorded(kind: Any, settings: Any, text: str | None, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = kind().double().eval().cuda()
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), [batch[:2] for batch in make_risk(device="cuda").batches()])
    states = torch.get_rng_state(), torch.cuda.get_rng_state()
    with caplog.at_level(logging.INFO, "kfs.factors"):
        K = KFAC(risk, "mc", **settings)
    messages = [record.getMessage() for record in caplog.records if "replayed" in record.getMessage()]
    assert len(messages) == (text is not None)
    assert text is None or text in messages[0]
    assert torch.equal(states[0], torch.get_rng_state())
    assert torch.equal(states[1], torch.cuda.get_rng_state())
    assert not torch.cuda.is_current_stream_capturing()
    torch.rand(3, device=CUDA)
    torch.cuda.set_rng_state(states[1])
    same_factors(K, KFAC(risk, "mc", replay=False, **{k: v for k, v in settings.items() if k != "memory"}), 1e-9)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("large"), KeyboardInterrupt()])
def test_what_ends_a_recording(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fails, "error", error)
    torch.manual_seed(0)
    model = Fails().double().eval().cuda()
    risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), [batch[:2] for batch in make_risk(device="cuda").batches()])
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            KFAC(risk, "mc")
    else:
        KFAC(risk, "mc")
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.is_grad_enabled()
    torch.rand(3, device=CUDA)
    KFAC(risk, "mc", replay=False)


class TestFlags:
    """Errors are raised at the end, and name the example."""

    def test_nan(self) -> None:
        risk = make_risk(device="cuda")
        batches = [batch[:2] for batch in risk.batches()]

        def model(params: Any, x: Tensor) -> Tensor:
            h = params["W"][x].sum(1)
            return torch.where((x[:, :1] == 100), torch.nan, h)

        params = {"W": torch.randn(101, 3, device=CUDA, dtype=torch.float64)}
        batches[5][0][2, 0] = 100
        bad = EmpiricalRisk(model, nn.CrossEntropyLoss(), batches, params=params)
        with pytest.raises(DataError, match="The prediction for example 22 is not finite"):
            KFAC(bad, "mc", audit=False)

    def test_label(self) -> None:
        risk = make_risk(device="cuda")
        batches = [batch[:2] for batch in risk.batches()]
        batches[5][1][1] = 17
        bad = EmpiricalRisk(risk.model, nn.CrossEntropyLoss(), batches)
        with pytest.raises(DataError, match="to 17, but there are 3 classes"):
            KFAC(bad, "empirical")

    def test_ignored_labels(self) -> None:
        risk = make_risk(device="cuda")
        batches = [batch[:2] for batch in risk.batches()]
        batches[5][1][1:] = -100
        there = EmpiricalRisk(risk.model, nn.CrossEntropyLoss(), batches)
        K = KFAC(there, "mc")
        assert K.count == there.reduction_factor**-1 == 8 * 4 + 3 - 3


def test_pinned_buffer(replayed: list[int]) -> None:
    """A loader uses the same pinned memory for all batches."""
    risk = make_risk(device="cuda")
    batches = [(x.cpu(), y.cpu()) for x, y in (batch[:2] for batch in risk.batches())][:-1]

    class Loader:
        def __iter__(self) -> Iterator[Any]:
            x, y = (torch.empty_like(t).pin_memory() for t in batches[0])
            for one in batches:
                x.copy_(one[0])
                y.copy_(one[1])
                yield x, y

    K, L = (KFAC(EmpiricalRisk(risk.model, nn.CrossEntropyLoss(), data), "mc") for data in (Loader(), batches))
    assert len(replayed) == 12
    same_factors(K, L, 1e-9)


@pytest.mark.parametrize("size", [5, 300, 700])
def test_algebra(size: int) -> None:
    X = torch.randn(3, 2 * size, size, dtype=torch.float64)
    A = X.mT @ X / size
    there = A.float().cuda()
    values, Q = eigh(there)
    torch.testing.assert_close(values.cpu().double(), torch.linalg.eigvalsh(A), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close((Q * values.unsqueeze(1)) @ Q.mT, there, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(inverse(there).cpu().double(), torch.linalg.inv(A), rtol=1e-2, atol=1e-3)


def test_what_the_backward_pass_reads_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward pass runs in another thread; its reads have to be noted, too."""
    seen: list[Any] = []
    replay = Recorded.replay

    def note(recorded: Recorded, inputs: Any, numbers: Any, sums: Any) -> None:
        held = recorded.reads._held
        seen.extend(
            role.gradient.total.untyped_storage()._cdata in held
            for block in sums.blocks.values()
            for role in block.roles.values()
        )
        replay(recorded, inputs, numbers, sums)

    monkeypatch.setattr(Recorded, "replay", note)
    KFAC(make_risk(device="cuda"), "empirical")
    assert seen
    assert all(seen)
