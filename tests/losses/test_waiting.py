"""On an accelerator, losses do not synchronize; in these tests, the CPU is treated as one.

A host synchronizes if it reads a number, or makes a tensor whose size depends on values.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from kfs.errors import DataError, LossError
from kfs.losses import Custom, Loss, TokenCrossEntropy, describe
from kfs.losses.draws import Draws
from kfs.losses.interface import placed, root
from kfs.losses.poisson import poisson_quantile
from kfs.runtime import sync
from tests.losses.cases import CASES, W3, Case, double_well, log_cosh
from tests.losses.test_losses import close

CPU = torch.device("cpu")
DRAWS = Draws(0, 0, 0)


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the CPU as a device that runs behind the host."""
    monkeypatch.setattr(sync, "is_asynchronous", lambda device: True)  # noqa: ARG005


@contextmanager
def seen_from_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Treat the CPU as a CPU again for tensors that were copied to it."""
    behind = {"behind": True}

    def cpu(t: Tensor) -> Tensor:
        behind["behind"] = False
        return t.clone()

    with monkeypatch.context() as patch:
        patch.setattr(sync, "is_asynchronous", lambda device: behind["behind"])  # noqa: ARG005
        patch.setattr(Tensor, "cpu", cpu)
        yield


class NoQuestions(TorchDispatchMode):
    """Raises an error in operations that would synchronize with an accelerator."""

    ASK = (
        torch.ops.aten._local_scalar_dense.default,
        torch.ops.aten.nonzero.default,
        torch.ops.aten.is_nonzero.default,
        torch.ops.aten.masked_select.default,
        torch.ops.aten.equal.default,
    )
    INDEX = (
        torch.ops.aten.index.Tensor,
        torch.ops.aten.index_put.default,
        torch.ops.aten.index_put_.default,
        torch.ops.aten._index_put_impl_.default,
    )

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masks = func in self.INDEX and any(i is not None and i.dtype in {torch.bool, torch.uint8} for i in args[1])
        if func in self.ASK or masks:
            raise AssertionError(f"{func} asks the device.")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "ask",
    [
        lambda t: t.sum().item(),
        lambda t: bool(t.any()),
        lambda t: t[t > 0],
        lambda t: t.nonzero(),
        lambda t: t.masked_select(t > 0),
        lambda t: t.clone().index_put_((t > 0,), t.sum()),
        lambda t: torch.equal(t, t),
    ],
)
def test_questions_are_noticed(ask: Callable[[Tensor], Any]) -> None:
    with NoQuestions(), pytest.raises(AssertionError, match="asks the device"):
        ask(torch.ones(3))


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_nothing_asks_the_device(case: Case) -> None:
    """The exceptions are due to the user's function: an eigensolver, and distributions."""
    loss, f, y = case.make()
    v = torch.randn(2, *f.shape, dtype=f.dtype)
    calls: list[Callable[[], Any]] = [
        lambda: loss.check(f, y),
        lambda: loss.wrong(f, y),
        lambda: loss.count(y),
        lambda: loss.examples(y),
        lambda: loss.criterion(f, y),
        lambda: loss.gradient(f, y),
        lambda: loss.hessian_product(f, y, v),
        lambda: loss.departure(f, v[0]),
        lambda: loss.stand_in(f, v[0]),
    ]
    if not isinstance(loss, Custom):
        calls += [
            lambda: loss.hessian_factor(f, y),
            lambda: loss.hessian_factor(f, y, 1, 2),
            lambda: loss.fisher_product(f, y, v),
            lambda: loss.fisher_factor(f, y),
            lambda: loss.fisher_factor(f, y, 1, 2),
            lambda: loss.sampled_gradient(f, y, DRAWS),
        ]
    for call in calls:
        # Some matrices do not exist, for any values.
        with NoQuestions(), suppress(LossError):
            call()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_are_the_same_on_an_accelerator(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    loss, f, y = case.make()

    def results() -> list[Tensor | None]:
        calls: list[Callable[[], Tensor | None]] = [
            lambda: loss.wrong(f, y),
            lambda: torch.as_tensor(loss.count(y), dtype=torch.float64),
            lambda: torch.as_tensor(loss.reduction_factor(loss.count(y)), dtype=torch.float64),
            lambda: loss(f, y),
            lambda: loss.gradient(f, y),
            lambda: loss.hessian_factor(f, y) if case.convex else None,
            lambda: loss.fisher_factor(f, y) if case.fisher in {"equal", "other"} else None,
            lambda: loss.sampled_gradient(f, y, DRAWS) if case.fisher != "none" else None,
        ]
        return [call() for call in calls]

    expected = results()
    with monkeypatch.context() as patch:
        patch.setattr(sync, "is_asynchronous", lambda device: True)  # noqa: ARG005
        actual = results()
    for one, other in zip(actual, expected, strict=True):
        if other is None:
            assert one is None
        else:
            assert one is not None
            close(one, other)


def bad_variances(*data: int) -> Tensor:
    f = torch.ones(4, 2, 3, dtype=torch.float64)
    f[list(data), 1, 1] = -1
    return f


WRONG: list[tuple[Any, Tensor, Tensor, list[bool], type[Exception], str]] = [
    (
        nn.CrossEntropyLoss(),
        torch.randn(5, 3).double(),
        torch.tensor([0, 3, -1, 2, -100]),
        [False, True, True, False, False],
        DataError,
        "Labels go from -1 to 3, but there are 3 classes",
    ),
    (
        nn.CrossEntropyLoss(W3, ignore_index=3, label_smoothing=0.1),
        torch.randn(3, 3, 2).double(),
        torch.tensor([[0, 3], [-100, 1], [2, 0]]),
        [False, True, False],
        DataError,
        "Labels go from -100 to 2, but there are 3 classes",
    ),
    (
        nn.CrossEntropyLoss(W3),
        torch.randn(3, 3, 2).double(),
        torch.tensor([[0, 3], [1, 1], [-100, 2**40]]),
        [True, False, True],
        DataError,
        f"Labels go from 0 to {2**40}, but there are 3 classes",
    ),
    (  # no position of a causal model predicts the first label
        TokenCrossEntropy(shift=True),
        torch.randn(3, 3, 4).double(),
        torch.tensor([[7, 0, 0], [0, 0, 7], [0, -100, 3]]),
        [False, True, False],
        DataError,
        "Labels go from 0 to 7, but there are 4 classes",
    ),
    (
        nn.GaussianNLLLoss(),
        bad_variances(1, 3),
        torch.zeros(4, 3).double(),
        [False, True, False, True],
        LossError,
        "negative variance",
    ),
]
wrong_data = pytest.mark.parametrize(("module", "f", "y", "which", "error", "message"), WRONG)


@wrong_data
def test_wrong_data_are_marked_and_refused(
    module: Any,
    f: Tensor,
    y: Tensor,
    which: list[bool],
    error: type[Exception],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Invalid targets raise an error at once on a CPU or by `check_now`; otherwise, a deferred check is recorded."""
    loss = describe(module)
    for refuse in (loss.check, loss.check_now, loss):
        with pytest.raises(error, match=message):
            refuse(f, y)
    for refuse in (lambda f, y: loss.check(f.cpu(), y.cpu()), loss.check_now, loss):
        with seen_from_cpu(monkeypatch):
            loss.check(f, y)
            with pytest.raises(error, match=message):
                refuse(f, y)
    for n, bad in enumerate(which):
        one = f[n : n + 1], y[n : n + 1]
        with NoQuestions():
            marked = loss.wrong(*one)
        assert marked is not None
        assert marked.tolist() == [bad]
        if bad:
            with pytest.raises(error):
                loss.check(*one)
        else:
            loss.check(*one)
    marked = loss.wrong(f, y)
    assert marked is not None
    assert marked.tolist() == which


@pytest.mark.usefixtures("accelerator")
@wrong_data
def test_wrong_data_make_no_wrong_index(
    module: Any, f: Tensor, y: Tensor, which: list[bool], error: type[Exception], message: str
) -> None:
    """The CPU raises an error where CUDA would abort. Results of valid examples do not change."""
    del error, message
    loss = describe(module)
    right = ~torch.tensor(which)
    v = torch.randn_like(f)
    close(loss.gradient(f, y)[right], loss.gradient(f[right], y[right]))
    close(loss.fisher_factor(f, y)[:, right], loss.fisher_factor(f[right], y[right]))
    for product in (loss.hessian_product, loss.fisher_product):
        close(product(f, y, v)[right], product(f[right], y[right], v[right]))
    if not isinstance(module, nn.GaussianNLLLoss):
        close(loss.hessian_factor(f, y)[:, right], loss.hessian_factor(f[right], y[right]))
    # Random numbers of an example depend on its index, so valid examples keep theirs.
    mended = torch.where(right.reshape(-1, *[1] * (y.ndim - 1)), y, 0)
    close(loss.sampled_gradient(f, y, DRAWS)[right], loss.sampled_gradient(f, mended, DRAWS)[right])
    assert torch.as_tensor(loss.count(y)).isfinite()


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize(
    ("loss", "dtype"),
    [
        (nn.CrossEntropyLoss(), torch.int64),
        (nn.CrossEntropyLoss(W3.float()), torch.float64),
        (TokenCrossEntropy(), torch.int64),
    ],
)
def test_counts_stay_on_the_device(loss: Any, dtype: torch.dtype) -> None:
    y = torch.tensor([[0, 2], [-100, 1]])
    described = describe(loss)
    with NoQuestions():
        count = described.count(y)
    assert isinstance(count, Tensor)
    assert count.dtype == dtype
    assert count.shape == ()
    expected = 4.5 if dtype == torch.float64 else 3
    assert float(count) == expected
    assert described.reduction_factor(count) == 1 / expected
    f = torch.randn(2, 3, 2, dtype=torch.bfloat16)
    f = f if isinstance(loss, nn.Module) else f.transpose(1, 2)
    assert described(f, y).dtype == torch.bfloat16
    summed = describe(nn.CrossEntropyLoss(reduction="sum"))
    with NoQuestions():
        assert summed.reduction_factor(count) == 1


def test_counts_are_numbers_on_a_cpu() -> None:
    y = torch.tensor([0, -100, 2])
    assert type(describe(nn.CrossEntropyLoss()).count(y)) is int
    assert type(describe(nn.CrossEntropyLoss(W3)).count(y)) is float


@pytest.mark.usefixtures("accelerator")
def test_curvatures_without_a_root_are_nan() -> None:
    assert root(torch.tensor([4.0, -1.0, 0.0])).isnan().tolist() == [False, True, False]
    f, y = torch.ones(2, 1), torch.tensor([[1.0], [-1.0]])
    assert describe(nn.PoissonNLLLoss(log_input=False)).hessian_factor(f, y).isnan().flatten().tolist() == [False, True]
    f = torch.tensor([[3.0, 3.0], [0.1, 3.0]], dtype=torch.float64)
    factor = Custom(double_well).hessian_factor(f, torch.ones_like(f))
    assert factor.isnan().flatten(2).any(2).any(0).tolist() == [False, True]
    assert Custom(double_well, negative="clip").hessian_factor(f, torch.ones_like(f)).isfinite().all()


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize(
    ("log_input", "bad"), [(False, -1.0), (False, torch.inf), (False, torch.nan), (True, 1e4), (True, torch.nan)]
)
def test_rates_without_counts_are_nan(log_input: bool, bad: float) -> None:
    f = torch.tensor([[0.5], [bad]], dtype=torch.float64)
    loss = describe(nn.PoissonNLLLoss(log_input=log_input))
    v = torch.ones_like(f)
    with NoQuestions():
        results = [
            loss.fisher_product(f, f, v),
            loss.fisher_factor(f, f)[0],
            loss.sampled_gradient(f, f, DRAWS),
        ]
    for name, result in zip(("product", "factor", "draw"), results, strict=True):
        assert result[0].isfinite().all(), name
        assert not result[1].isfinite().any(), name


def test_quantiles_do_not_depend_on_who_knows_how_large_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    rate = torch.tensor([0.0, 1e-8, 0.3, 1.0, 7.5, 120.0, 1e4, 1e7, 1e11, 2.0**40, 1e15], dtype=torch.float64)
    for u in (2.0**-53, 1e-6, 0.1, 0.5, 0.9, 1 - 1e-6, 1 - 2.0**-52):
        numbers = torch.full_like(rate, u)
        expected = torch.cat([poisson_quantile(*pair) for pair in zip(numbers.split(1), rate.split(1), strict=True)])
        assert torch.equal(poisson_quantile(numbers, rate), expected)
        with monkeypatch.context() as patch, NoQuestions():
            patch.setattr(sync, "is_asynchronous", lambda device: True)  # noqa: ARG005
            actual = poisson_quantile(numbers, rate)
        assert torch.equal(actual, expected)
    nothing = torch.zeros(0, dtype=torch.float64)
    assert poisson_quantile(nothing, nothing).shape == (0,)
    assert poisson_quantile(rate[:2], torch.full_like(rate[:2], torch.nan)).isnan().all()


def test_settings_are_copied_to_a_device_once() -> None:
    """They are copied again if they have changed."""
    device = torch.device("meta")
    setting = torch.ones(3)
    assert placed(setting, CPU) is setting
    copy = placed(setting, device)
    assert copy.device == device
    assert placed(setting, device) is copy
    setting += 1
    assert placed(setting, device) is not copy
    with torch.inference_mode():
        constant = torch.ones(3)
        assert placed(constant, device) is placed(constant, device)


def test_weights_follow_the_predictions() -> None:
    """Weights are moved to the device of the predictions before any computation."""
    f = torch.zeros(4, 3, dtype=torch.float64, device="meta")
    labels = torch.zeros(4, dtype=torch.int64, device="meta")
    losses: list[tuple[Loss, Tensor]] = [
        (describe(nn.CrossEntropyLoss(W3, label_smoothing=0.1)), labels),
        (describe(nn.CrossEntropyLoss(W3)), f),
        (describe(nn.BCEWithLogitsLoss(W3, pos_weight=W3)), f),
    ]
    for loss, y in losses:
        for result in (loss.criterion(f, y), loss.gradient(f, y), loss.hessian_product(f, y, f)):
            assert result.device.type == "meta"


def test_losses_without_values_to_refuse() -> None:
    f = torch.zeros(2, 3)
    for loss in (describe(nn.MSELoss()), describe(log_cosh), describe(nn.CrossEntropyLoss())):
        assert loss.wrong(f, f) is None
        loss.check_now(f, f)
