"""Problems for influence functions: digits, small networks, and training many of them together.

Scores predict the effect of removing some of the data. To measure the effect, networks are trained without them: all at
once, with one stack of weights for each layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

Data = tuple[Tensor, Tensor]  # inputs and labels
CLASSES = 10
AT_A_TIME = 50  # networks in a stack; larger stacks do not fit into the cache


@dataclass(frozen=True)
class Recipe:
    """The training of networks: Adam with all data in every step, a cosine schedule, and an L2 penalty.

    Attributes:
        sizes: Widths of all layers, inputs and outputs included.
        steps: Number of steps.
        learning_rate: The initial learning rate.
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
    """Sizes of all studies.

    Attributes:
        train: Number of training examples for `lds`.
        queries: Number of queries for `lds`.
        width: Width of the hidden layer for `lds`.
        width: Of the hidden layer for `lds`.
        halves: Number of subsets.
        draws: Number of runs of methods that draw labels.
        steps: Number of training steps.
        mislabelled: Number of examples for `mislabelled`.
        memorizing: Number of training steps for it.
        timed: Numbers of training examples and queries for `time`.
        repeats: Number of timed repetitions.
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


# Tiny sizes for quick runs.
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
    """Return training digits, and other digits as queries, in an order that depends on the seed."""
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
    """Change the labels of some examples; return labels, and whether each is wrong."""
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
    """Return an untrained MLP in evaluation mode."""
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
    """Train networks on subsets, one per seed, and return mean margins of queries, `[subsets, queries]`.

    For a regression, these are predictions.

    Args:
        data: Training data.
        queries: Queries whose margins are returned.
        kept: Indices of examples, one row per subset.
        recipe: The training.
        seeds: Seeds of initializations. Margins are averaged over them, since data do not explain their differences.
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
    """Train networks on subsets, from the same initialization, and return stacks of weights and biases."""
    first = [p.detach() for p in network(recipe.sizes, seed).parameters()]
    # A bias has an axis for examples, so that it is added to all of them.
    rows = [p if p.ndim == 2 else p[None] for p in first]
    stacks = [p.expand(len(kept), *p.shape).clone().requires_grad_() for p in rows]
    X, y = data[0][kept], data[1][kept]
    optimizer = torch.optim.Adam(stacks, lr=recipe.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, recipe.steps)
    for _ in range(recipe.steps):
        optimizer.zero_grad()
        f = predictions(stacks, X)
        # Every network has its own parameters, so the sum of all mean losses trains each as if it were alone.
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
