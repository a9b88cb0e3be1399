"""Captured passes of sharded models, run by PyTorch: parameters are unsharded layer by layer."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import kfs
from kfs.factors.accumulate import FactorSums
from kfs.factors.block import Block
from kfs.factors.capture import CapturedPass
from kfs.factors.compute import backpropagated_vectors
from kfs.factors.rules import new_trace
from kfs.factors.settings import Settings
from tests.distributed.pool import Pool

SETTINGS = Settings(fisher="type-2")


class Square(torch.autograd.Function):
    """A custom function that hides its operations."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        ctx.save_for_backward(w)
        result: Tensor = w**2
        return result

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (w,) = ctx.saved_tensors
        result: Tensor = 2 * w * g
        return result


class Deep(nn.Module):
    """Has equal layers, which reuse each other's memory, a view of a parameter, and an unsharded parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(5, 5) for _ in range(4)))
        self.out = nn.Linear(5, 3)
        self.mixed = nn.Parameter(torch.randn(5, 5))
        self.hidden = nn.Parameter(torch.rand(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        y: Tensor = self.out(x @ self.mixed.T * Square.apply(self.hidden))  # type: ignore[no-untyped-call]
        return y


def captured(model: nn.Module, x: Tensor, y: Tensor, passes: int) -> tuple[dict[str, Block], Any]:
    """Return factors of some passes that are captured as in the user's training."""
    loss = kfs.losses.describe(nn.CrossEntropyLoss())
    sums = FactorSums(SETTINGS)
    frozen = {"layers.1.weight", "layers.1.bias"}
    params = {name: p for name, p in model.named_parameters() if name not in frozen}
    trace = new_trace(params, model=model).renewed()
    for _ in range(passes):
        with CapturedPass(trace, [sums], len(x)) as one:
            f = model(one.mark(x))
        one.finish_forward(f)
        one.send_back(f, backpropagated_vectors(loss, f.detach(), y, SETTINGS, 0, 1))
    sums.complete(None)
    return {block.layout.name: Block(block, 1.0) for block in sums.blocks.values()}, one


def compare_passes(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, plain = Deep().double(), Deep().double()
    plain.load_state_dict(model.state_dict())
    x, y = torch.randn(6, 5, dtype=torch.float64), torch.randint(3, (6,))
    x = x + dist.get_rank()  # each process has other data
    expected, other = captured(plain, x, y, passes=3)
    for layer in model.layers:
        fully_shard(layer, **settings)
    fully_shard(model, **settings)
    found, last = captured(model, x, y, passes=3)
    assert list(found) == list(expected)
    assert len(found) == 5  # three of four layers, `out` and `mixed`
    for block, one in zip(found.values(), expected.values(), strict=True):
        torch.testing.assert_close((block.A, block.B), (one.A, one.B), rtol=1e-12, atol=1e-14)
    assert last.unexplained == other.unexplained
    assert {name for name, _ in last.unexplained} == {"hidden"}
    assert set(last.tracker.leaves()) == set(last.tracker.params)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("settings", [{}, {"reshard_after_forward": True}, {"reshard_after_forward": False}])
def test_passes_of_pytorch_are_captured(ranks: Pool, settings: dict[str, Any]) -> None:
    """Three passes, each of which sends several vectors back."""
    ranks(2, compare_passes, settings)


def compare_without_model() -> None:
    """A trace without the model finds no use."""
    model = nn.Linear(3, 2)
    fully_shard(model)
    trace = new_trace(dict(model.named_parameters()))
    x = torch.rand(4, 3)
    sums = FactorSums(SETTINGS)
    with CapturedPass(trace, [sums], len(x)) as one:
        model(one.mark(x))
    assert not sums.blocks


def test_traces_without_model(ranks: Pool) -> None:
    ranks(2, compare_without_model)
