"""Problems for influence functions: digits, small networks, and training many of them together.

Scores predict what would happen without some of the data. To know what does happen, networks are trained without them:
all at once, with one stack of weights for each layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

Data = tuple[Tensor, Tensor]  # inputs and labels
CLASSES = 10
AT_A_TIME = 50  # networks in a stack; more of them do not stay in the cache


@dataclass(frozen=True)
class Recipe:
    """How networks are trained: Adam with all data in every step, a cosine schedule, and an L2 penalty.

    Attributes:
        sizes: Widths of all layers, inputs and outputs included.
        steps: Number of steps.
        learning_rate: The first step's.
        penalty: Half of this times the squared norm of all parameters is added to the mean loss, as `weight_decay` of
            an optimizer does.
        regression: Whether targets are numbers, `[n, 1]`, and the loss is the squared error.
    """

    sizes: tuple[int, ...]
    steps: int = 300
    learning_rate: float = 1e-2
    penalty: float = 1e-3
    regression: bool = False


@dataclass(frozen=True)
class Sizes:
    """How much is computed.

    Attributes:
        seeds: Seeds of data, halves and networks.
        train: Training data for `lds`.
        queries: Queries for `lds`.
        width: Of the hidden layer for `lds`.
        halves: Number of subsets.
        initializations: Networks for each subset.
        draws: How often methods run that draw labels.
        steps: Steps of training.
        mislabelled: Data for `mislabelled`.
        memorizing: Steps of training for it.
        timed: Training data and queries for `time`.
        repeats: How often everything is timed.
    """

    seeds: int = 3
    train: int = 500
    queries: int = 100
    width: int = 32
    halves: int = 100
    initializations: int = 3
    draws: int = 5
    steps: int = 300
    mislabelled: int = 1000
    memorizing: int = 600
    timed: tuple[int, int] = (1500, 297)
    repeats: int = 3


# Tiny sizes, to see that everything runs.
QUICK = Sizes(
    seeds=1,
    train=60,
    queries=7,
    width=4,
    halves=6,
    initializations=1,
    draws=2,
    steps=20,
    mislabelled=60,
    memorizing=40,
    timed=(40, 9),
    repeats=1,
)


def digits(seed: int, train: int, queries: int) -> tuple[Data, Data]:
    """Return digits to train with, and other digits as queries, in an order that depends on the seed."""
    from sklearn.datasets import load_digits  # noqa: PLC0415 (machines with a GPU may lack it, and do not need it)

    X, y = load_digits(return_X_y=True)
    order = torch.randperm(len(X), generator=torch.Generator().manual_seed(seed))
    inputs = torch.tensor(X / 16.0, dtype=torch.float32)[order]
    labels = torch.tensor(y)[order]
    return (inputs[:train], labels[:train]), (inputs[train : train + queries], labels[train : train + queries])


def subsets(count: int, num_data: int, seed: int) -> Tensor:
    """Draw halves of the data, `[count, num_data // 2]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(num_data, generator=generator)[: num_data // 2] for _ in range(count)])


def flipped(y: Tensor, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Give some data another label, and say which: labels, and whether each is wrong."""
    generator = torch.Generator().manual_seed(seed)
    wrong = torch.zeros(len(y), dtype=torch.bool)
    wrong[torch.randperm(len(y), generator=generator)[: round(share * len(y))]] = True
    other = (y + torch.randint(1, CLASSES, y.shape, generator=generator)) % CLASSES
    return torch.where(wrong, other, y), wrong


def margins(f: Tensor, y: Tensor) -> Tensor:
    """Return the label's logit minus the logarithm of the summed exponentials of all others, for logits `[..., C]`."""
    label = torch.arange(f.shape[-1], device=f.device) == y.unsqueeze(-1)  # vmap has no one_hot
    others = f.masked_fill(label, -torch.inf).logsumexp(-1)
    return f.masked_fill(~label, 0).sum(-1) - others


def network(sizes: Sequence[int], seed: int) -> nn.Sequential:
    """Return an MLP in evaluation mode, as it is before training."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).eval()


def trained(data: Data, recipe: Recipe, seed: int) -> nn.Sequential:
    """Return a network that was trained with all data."""
    model = network(recipe.sizes, seed)
    everything = torch.arange(len(data[1]))[None]
    stacks = train_together(data, everything, recipe, seed)
    with torch.no_grad():
        for parameter, stack in zip(model.parameters(), stacks, strict=True):
            parameter.copy_(stack[0].reshape(parameter.shape))
    return model


def retrained_margins(data: Data, queries: Data, kept: Tensor, recipe: Recipe, seeds: Sequence[int]) -> Tensor:
    """Train a network with each subset, once for each seed, and return mean margins of queries, `[subsets, queries]`.

    Of a regression, these are predictions.

    Args:
        data: What to train with.
        queries: Whose margins are wanted.
        kept: Indices of data, a row for each subset.
        recipe: How to train.
        seeds: Of first parameters. Margins are averaged over them, since the data do not explain how these differ.
    """
    found = []
    X, y = queries
    for some in kept.split(AT_A_TIME):
        total = torch.zeros(len(some), len(y))
        for seed in seeds:
            stacks = train_together(data, some, recipe, seed)
            with torch.no_grad():
                f = predictions(stacks, X.expand(len(some), *X.shape))
                total += f.squeeze(-1) if recipe.regression else margins(f, y.expand(len(some), -1))
        found.append(total / len(seeds))
    return torch.cat(found)


def train_together(data: Data, kept: Tensor, recipe: Recipe, seed: int) -> list[Tensor]:
    """Train a network with each subset, from the same first parameters, and return stacks of weights and biases."""
    first = [p.detach() for p in network(recipe.sizes, seed).parameters()]
    # A bias has an axis for data, so that it is added to all of them.
    rows = [p if p.ndim == 2 else p[None] for p in first]
    stacks = [p.expand(len(kept), *p.shape).clone().requires_grad_() for p in rows]
    X, y = data[0][kept], data[1][kept]
    optimizer = torch.optim.Adam(stacks, lr=recipe.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, recipe.steps)
    for _ in range(recipe.steps):
        optimizer.zero_grad()
        f = predictions(stacks, X)
        # Every network has its own parameters, so the sum of all their mean losses trains each as if it was alone.
        if recipe.regression:
            loss = mse_loss(f, y, reduction="sum") / y.shape[1]
        else:
            loss = cross_entropy(f.flatten(0, 1), y.flatten(), reduction="sum") / y.shape[1]
        penalty = torch.stack([stack.square().sum() for stack in stacks]).sum()
        (loss + 0.5 * recipe.penalty * penalty).backward()
        optimizer.step()
        schedule.step()
    return [stack.detach() for stack in stacks]


def predictions(stacks: Sequence[Tensor], x: Tensor) -> Tensor:
    """Return logits `[networks, data, classes]` for inputs `[networks, data, features]`."""
    for place in range(0, len(stacks), 2):
        x = torch.baddbmm(stacks[place + 1], x, stacks[place].mT)
        if place < len(stacks) - 2:
            x = x.relu()
    return x
