"""Gradients of cross-entropy, bit for bit: probabilities minus a one, for any number of positions at a time."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from kfs.losses import TokenCrossEntropy, cross_entropy, describe
from kfs.losses.draws import Draws

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
WEIGHT = torch.tensor([0.5, 1.0, 3.0, 0.0, 2.0])


def drawn(sigma: Tensor, u: float) -> int:
    """The class whose interval contains `u`, if intervals are as wide as probabilities: a loop over cumulative sums."""
    cumulative = [0.0]
    for p in sigma.double().tolist():
        cumulative.append(cumulative[-1] + p)
    return next(k for k, upper in enumerate(cumulative[1:]) if upper >= u * cumulative[-1])


def literally(sigma: Tensor, y: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    """Loop over positions: the root of the label's weight, times probabilities minus a one at `labels`.

    Args:
        sigma: `[N, C, S]`.
        y: `[N, S]`, the targets, whose weights are used.
        labels: `[N, S]`, the positions of the one.
        weight: `[C]`.
    """
    g = torch.zeros_like(sigma)
    for n in range(y.shape[0]):
        for s in range(y.shape[1]):
            if y[n, s] != -100:
                one = torch.zeros(sigma.shape[1], dtype=sigma.dtype)
                one[labels[n, s]] = 1
                g[n, :, s] = weight[y[n, s]].to(sigma.dtype).sqrt() * (sigma[n, :, s] - one)
    return g


def labels_for(sigma: Tensor, draws: Draws) -> Tensor:
    num_data, _, positions = sigma.shape
    u = draws.uniform(num_data, (positions,), CPU)
    rows = [[drawn(sigma[n, :, s], float(u[n, s])) for s in range(positions)] for n in range(num_data)]
    return torch.tensor(rows, dtype=torch.int64).reshape(num_data, positions)


def data(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    f = 3 * torch.randn(4, 5, 7, generator=generator, dtype=torch.float64)
    f[0, 2] = -torch.inf  # a class that is masked
    y = torch.randint(5, (4, 7), generator=generator)
    y.view(-1)[::4] = -100
    return f.to(dtype), y


@pytest.mark.parametrize("weight", [None, WEIGHT])
@pytest.mark.parametrize("bytes_at_a_time", [1, 8 * 5 * 3, 8 * 5 * 20, 2**26])
@pytest.mark.parametrize("dtype", DTYPES)
def test_draws_bit_for_bit(
    dtype: torch.dtype, bytes_at_a_time: int, weight: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cross_entropy, "_TEMPORARY_BYTES", bytes_at_a_time)
    draws = Draws(3, 10, 1)
    f, y = data(dtype)
    weights = torch.ones(5) if weight is None else weight
    loss = describe(nn.CrossEntropyLoss(weight))
    sigma = f.softmax(1)
    expected = literally(sigma, y, labels_for(sigma, draws), weights)
    actual = loss.sampled_gradient(f, y, draws)
    assert actual.dtype == dtype
    assert torch.equal(actual, expected)
    # More than one axis of positions, and none.
    one = loss.sampled_gradient(f[:, :, :6].reshape(4, 5, 2, 3), y[:, :6].reshape(4, 2, 3), draws)
    sigma = f[:, :, :6].softmax(1)
    assert torch.equal(one.flatten(2), literally(sigma, y[:, :6], labels_for(sigma, draws), weights))
    none = loss.sampled_gradient(f[:, :, 0], y[:, 0], draws)
    sigma = f[:, :, 0].softmax(1).unsqueeze(2)
    assert torch.equal(none.unsqueeze(2), literally(sigma, y[:, :1], labels_for(sigma, draws), weights))


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("bytes_at_a_time", [1, 8 * 5 * 3, 2**26])
@pytest.mark.parametrize("dtype", DTYPES)
def test_draws_for_tokens_bit_for_bit(
    dtype: torch.dtype, bytes_at_a_time: int, shift: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Classes are adjacent in memory, where the softmax of a row does not depend on the others."""
    monkeypatch.setattr(cross_entropy, "_TEMPORARY_BYTES", bytes_at_a_time)
    f, y = data(dtype)
    draws = Draws(3, 10, 1)
    logits = f.transpose(1, 2).contiguous()  # [N, S, C]
    rows = torch.stack([torch.stack([row.softmax(0) for row in datum]) for datum in logits])
    sigma, labels = rows.transpose(1, 2), y
    if shift:
        sigma, labels = sigma[:, :, :-1], y[:, 1:]
    ones = torch.ones(5)
    expected = torch.zeros_like(logits)
    expected[:, : sigma.shape[2]] = literally(sigma, labels, labels_for(sigma, draws), ones).transpose(1, 2)
    loss = TokenCrossEntropy(shift=shift)
    assert torch.equal(loss.sampled_gradient(logits, y, draws), expected)
    expected[:, : sigma.shape[2]] = literally(sigma, labels, labels, ones).transpose(1, 2)
    assert torch.equal(loss.gradient(logits, y), expected)
    if not shift:  # a view with the classes on PyTorch's axis
        plain = describe(nn.CrossEntropyLoss())
        assert torch.equal(plain.gradient(logits.transpose(1, 2), y), expected.transpose(1, 2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_bit_for_bit(dtype: torch.dtype) -> None:
    f, y = data(dtype)
    loss = describe(nn.CrossEntropyLoss())
    assert torch.equal(loss.gradient(f, y), literally(f.softmax(1), y, y, torch.ones(5)))


def test_not_a_number() -> None:
    """NaN stays NaN at its position, whether or not a class is drawn there, and does not affect other positions."""
    f, y = data(torch.float64)
    f[1, 3, 2] = torch.nan
    expected = torch.zeros_like(f, dtype=torch.bool)
    expected[1, :, 2] = True
    loss = describe(nn.CrossEntropyLoss())
    assert torch.equal(loss.sampled_gradient(f, y, Draws(0, 0, 0)).isnan(), expected)
    tokens = f.transpose(1, 2)
    last = TokenCrossEntropy(shift=True).sampled_gradient(tokens[:, :3], y[:, :3], Draws(0, 0, 0))
    assert last.isfinite().all()  # the last position has no target


def test_nothing_to_draw() -> None:
    draws = Draws(0, 0, 0)
    loss = describe(nn.CrossEntropyLoss())
    for shape in ((0, 3), (0, 3, 2), (2, 3, 0)):
        y = torch.zeros(shape[:1] + shape[2:], dtype=torch.int64)
        assert loss.sampled_gradient(torch.zeros(shape), y, draws).shape == shape
    alone = TokenCrossEntropy(shift=True).sampled_gradient(torch.ones(2, 1, 3), torch.zeros(2, 1).long(), draws)
    assert torch.equal(alone, torch.zeros(2, 1, 3))


def test_gradients_can_be_differentiated() -> None:
    for loss in (describe(nn.CrossEntropyLoss()), TokenCrossEntropy(shift=True)):
        f = torch.randn(2, 3, 3, dtype=torch.float64, requires_grad=True)
        v = torch.randn_like(f)
        y = torch.tensor([[0, 1, 2], [-100, 0, 1]])
        (derivative,) = torch.autograd.grad((loss.gradient(f, y) * v).sum(), f)
        torch.testing.assert_close(derivative, loss.hessian_product(f.detach(), y, v))


class Allocations(TorchDispatchMode):
    """Keeps all storages of some size that operations return, so that each one has its own address."""

    def __init__(self, size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.size = size
        self.storages: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.untyped_storage().nbytes() >= self.size:
            self.storages[result.untyped_storage().data_ptr()] = result.untyped_storage()
        return result


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_for_language_models(dtype: torch.dtype, shift: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is the only new tensor of the logits' size; products, which need probabilities, have two."""
    monkeypatch.setattr(cross_entropy, "_TEMPORARY_BYTES", 8 * 50 * 2)
    f = torch.randn(4, 10, 50).to(dtype)
    y = torch.randint(50, (4, 10))
    loss = TokenCrossEntropy(shift=shift)
    calls: list[tuple[Callable[[], Tensor], int]] = [
        (lambda: loss.gradient(f, y), 1),
        (lambda: loss.sampled_gradient(f, y, Draws(0, 0, 0)), 1),
        (lambda: loss.hessian_product(f, y, f), 2),
    ]
    for call, tensors in calls:
        with Allocations(f.numel() * f.element_size() // 2) as seen:
            result = call()
        new = {address for address in seen.storages if address != f.untyped_storage().data_ptr()}
        assert len(new) == tensors
        assert result.is_contiguous()


@pytest.mark.parametrize("block", [2, 3, 5, 8])
@pytest.mark.parametrize("classes", [9, 10, 40])
@pytest.mark.parametrize("temporary", [1, 2**20])
def test_two_steps(classes: int, block: int, temporary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing a block of classes and then a class of it gives the same labels as a cumulative sum over all classes."""
    generator = torch.Generator().manual_seed(classes)
    sigma = (3 * torch.randn(3, classes, 50, generator=generator, dtype=torch.float64)).softmax(1)
    sigma[0, classes // 2 :] = 0
    sigma[1, : classes // 2] = 0
    u = torch.rand(3, 1, 50, generator=generator, dtype=torch.float64)
    u[:, :, 0], u[:, :, 1] = 1e-300, 1 - 2**-53
    labels = [[drawn(sigma[n, :, s], float(u[n, 0, s])) for s in range(50)] for n in range(3)]
    monkeypatch.setattr(cross_entropy, "_MANY_CLASSES", 8)
    monkeypatch.setattr(cross_entropy, "_BLOCK", block)
    monkeypatch.setattr(cross_entropy, "_TEMPORARY_BYTES", temporary)
    found = cross_entropy.subtract_draws_(sigma.clone(), u)
    assert (found - sigma).argmin(1).tolist() == labels


def test_many_classes() -> None:
    """Draws among many classes have the right frequencies, for rounded probabilities, too."""
    f = torch.zeros(1, 5_001, 2_000, dtype=torch.bfloat16)
    f[:, 3_000] = 8.5  # as likely as the 5,000 others together, up to rounding by 2 %
    sigma = f.softmax(1)
    u = Draws(0, 0, 0).uniform(1, (1, 2_000), CPU)
    labels = (cross_entropy.subtract_draws_(sigma.clone(), u) - sigma).argmin(1)
    share, expected = (
        float((labels == 3_000).double().mean()),
        float(sigma[0, 3_000, 0] / sigma[0, :, 0].double().sum()),
    )
    assert abs(share - expected) < 4 * 0.5 / 2_000**0.5
    assert len(set(labels.flatten().tolist())) > 800


@pytest.mark.parametrize("dtype", DTYPES)
def test_classes_without_probability(dtype: torch.dtype) -> None:
    """The sum of a block is rounded. A draw at its end must still select a class with positive probability."""
    generator = torch.Generator().manual_seed(0)
    f = 3 * torch.randn(1, 32, cross_entropy._BLOCK, generator=generator)
    f[:, :, 200:] = -torch.inf  # the last classes of every block
    sigma = f.to(dtype).flatten(1).softmax(1)
    sums = sigma.unflatten(1, (32, -1)).sum(2, dtype=torch.promote_types(dtype, torch.float32)).double().cumsum(1)
    u = sums / sums[:, -1:]
    rows = sigma.unsqueeze(2).expand(1, -1, 32).contiguous()
    labels = (cross_entropy.subtract_draws_(rows.clone(), u.unsqueeze(1)) - rows).argmin(1)
    assert (sigma[0, labels[0]] > 0).all()
