"""Training on ranks, each with a part of every batch, and the same training in one process."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from kfs.distributed import checksum
from kfs.optim import KFAC
from kfs.optim.fsdp import local_part
from kfs.problem.whole_parameters import model_to_run, whole
from kfs.runtime import cuda_graphs, sync
from tests.distributed.problems import Experts
from tests.factors.tape import Tapes

STEPS = 20
BATCH = 24


class Net(nn.Module):
    """Has linear layers, a normalization, and a parameter that KFAC does not cover."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.turn = nn.Parameter(torch.ones(3, 3))
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(torch.tanh(self.norm(self.first(x)))) @ torch.linalg.matrix_exp(self.turn - self.turn.T)
        return y


class Tied(nn.Module):
    """Has an embedding whose transpose computes logits: a block with two roles."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.hidden = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.argmax(1, keepdim=True)
        y: Tensor = functional.linear(torch.tanh(self.hidden(self.embedding(tokens))), self.embedding.weight)
        return y.squeeze(1)


class Convolutions(nn.Module):
    """Has convolutions, with shapes that cannot be divided evenly among two and three processes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 5, 2, padding=1)
        self.second = nn.Conv2d(5, 4, 2, stride=2, groups=1, bias=False)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(x.unflatten(1, (1, 2, 3))))))
        y: Tensor = self.out(hidden.flatten(1))
        return y


class Transformer(nn.Module):
    """Reads six numbers as a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(1, 5)
        self.layer = nn.TransformerEncoderLayer(5, 1, 7, dropout=0.0, batch_first=True)
        self.out = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.layer(self.embedding(x.unsqueeze(-1))).mean(1))
        return y


class Reused(nn.Module):
    """Has a layer that is called twice and checkpointed, one that is never called, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.first.weight.requires_grad_(False)
        self.block = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))
        self.unused = nn.Linear(3, 3)
        self.out = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        for _ in range(2):
            hidden = hidden + checkpoint(self.block, hidden, use_reentrant=False)
        y: Tensor = self.out(hidden)
        return y


NETS: dict[str, Callable[[], nn.Module]] = {
    "net": Net,
    "experts": partial(Experts, 6),
    "tied": Tied,
    "two layers": lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)),
    "mlp": lambda: nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)),
    "cnn": Convolutions,
    "reused": Reused,
    "transformer": Transformer,
}


class Run(NamedTuple):
    """The result of a training."""

    params: Tensor
    bits: int
    events: Any
    uncovered: dict[str, str]
    numbers: int  # stored by this process as averages of gradients


@contextmanager
def accelerators() -> Iterator[None]:
    """Treat the CPU of this process as an accelerator whose graphs are tapes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_graphs, "recorder_for", lambda *_: Tapes)
        patch.setattr("kfs.runtime.sync.is_asynchronous", lambda _: True)
        sync._constants.clear()
        yield
    sync._constants.clear()


def model_of(name: str) -> nn.Module:
    """Return a model, the same in every process."""
    torch.manual_seed(2)
    return NETS[name]().double()


def batches(steps: int = STEPS, size: int = BATCH) -> Iterator[tuple[Tensor, Tensor]]:
    """Return batches, the same in every process."""
    g = torch.Generator().manual_seed(3)
    for _ in range(steps):
        x = torch.randn(size, 6, dtype=torch.float64, generator=g)
        yield x, x[:, :3].argmax(1)


def average_gradients(model: nn.Module) -> None:
    """Average gradients over all processes, as training loops without DDP do."""
    for p in model.parameters():
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        dist.all_reduce(grad)
        p.grad = grad.div_(dist.get_world_size())


def take_step(optimizer: KFAC, closure: Callable[[], Any] | None = None) -> None:
    """Take a step; one parameter is not covered."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "KFAC does not cover")
        optimizer.step(closure)


def result(model: nn.Module, optimizer: KFAC) -> Run:
    """Describe a training."""
    params = torch.cat([whole(p.detach()).reshape(-1) for p in model_to_run(model).parameters()])
    averages = [one[name] for one in optimizer.state.values() for name in ("average", "exp_avg") if name in one]
    numbers = sum(local_part(t).numel() for t in averages)
    return Run(params, checksum(params), optimizer.events, optimizer.uncovered, numbers)


class Plan(NamedTuple):
    """How batches are split over passes and ranks."""

    parts: tuple[int, ...]  # examples of each rank in a pass
    passes: int = 1  # number of passes over which gradients are accumulated
    ddp: bool = True
    net: str = "net"
    reduction: str = "mean"
    early: bool = False  # whether the optimizer is created before the DDP model
    outlier: int | None = None  # step in which the first example is far too large
    sort: bool = False  # whether the first rank gets only examples with large first features in the first step

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Return batches of all ranks, the same in every process."""
        for step, (x, y) in enumerate(batches(size=sum(self.parts) * self.passes)):
            order = x[:, 0].argsort(descending=True) if self.sort and step == 0 else torch.arange(len(x))
            x[0] *= 1e4 if step == self.outlier else 1.0
            yield x[order], y[order]


def chunks(x: Tensor, plan: Plan) -> list[list[Tensor]]:
    """Split a batch into passes, and these into the data of each rank."""
    return [list(one.split(plan.parts)) for one in x.split(sum(plan.parts))]


def on_ranks(plan: Plan, **settings: Any) -> Run:
    """Train on ranks."""
    module = model_of(plan.net)
    loss = nn.CrossEntropyLoss(reduction=plan.reduction)
    group = None if plan.ddp else dist.group.WORLD
    early = [KFAC(module, loss, **settings)] if plan.early else []
    model: Any = DistributedDataParallel(module) if plan.ddp else module
    (optimizer,) = early or [KFAC(model, loss, group=group, **settings)]
    rank = dist.get_rank()
    weight = 1 / plan.passes if plan.reduction == "mean" else 1.0
    for x, y in plan.batches():

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            total = torch.zeros((), dtype=torch.float64)
            pairs = zip(chunks(x, plan), chunks(y, plan), strict=True)
            for number, (xs, ys) in enumerate(pairs):
                last = number == plan.passes - 1
                within: AbstractContextManager[Any] = model.no_sync() if plan.ddp and not last else nullcontext()
                with within:
                    value = loss(model(xs[rank]), ys[rank]) * weight
                    value.backward()
                total += value.detach()
            if not plan.ddp:
                average_gradients(module)
            return total

        if plan.early:  # The first pass shows which processes train together.
            closure()
        take_step(optimizer, None if plan.early else closure)
    return result(module, optimizer)


def in_one_process(plan: Plan, **settings: Any) -> Run:
    """Train with the same gradients in one process: a mean of means, if ranks have different numbers of examples."""
    model = model_of(plan.net)
    loss = nn.CrossEntropyLoss(reduction=plan.reduction)
    optimizer = KFAC(model, loss, **settings)
    equal = len(set(plan.parts)) == 1
    for x, y in plan.batches():

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            if plan.reduction == "sum" or (equal and plan.passes == 1):
                total: Tensor = loss(model(x), y)
                total.backward()
                return total.detach()
            xs = [one for some in chunks(x, plan) for one in some]
            ys = [one for some in chunks(y, plan) for one in some]
            total = torch.zeros((), dtype=torch.float64)
            for a, b in zip(xs, ys, strict=True):
                value = loss(model(a), b) / len(xs)
                value.backward()
                total += value.detach()
            return total

        take_step(optimizer, closure)
    return result(model, optimizer)
