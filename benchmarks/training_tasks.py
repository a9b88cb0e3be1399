"""Tasks of the training benchmark: an autoencoder and a CNN on digits, and a small GPT on generated sentences.

A task ends when the loss on fixed data reaches a target. The targets were chosen when only the baselines had been run,
such that a tuned Adam needs some hundred steps. Models have PyTorch's default initialization.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from random import Random

import torch
from torch import Tensor, nn

from benchmarks.problems import GPT
from kfs.losses import HalfSquaredError, TokenCrossEntropy
from kfs.tour.digits import load

Batch = tuple[Tensor, Tensor]
WIDTHS = (64, 256, 128, 64, 16, 64, 128, 256, 64)
CONTEXT = 64
CHARACTERS = 200_000


@dataclass(frozen=True)
class Task:
    """A model, data and a target for the loss.

    Attributes:
        name: Its name in tables.
        model: Makes the model, from the global random state.
        batches: Takes a seed and returns endless batches.
        check: The data on which the loss must reach the target.
        loss: Takes predictions and targets, and returns the mean loss.
        description: The loss as declared to KFAC.
        target: The loss to reach.
        steps: The limit of steps.
    """

    name: str
    model: Callable[[], nn.Module]
    batches: Callable[[int], Iterator[Batch]]
    check: list[Batch]
    loss: Callable[[Tensor, Tensor], Tensor]
    description: object
    target: float
    steps: int

    def checked_loss(self, model: nn.Module) -> float:
        """Return the mean loss on the evaluation data."""
        with torch.no_grad():
            sums = [float(self.loss(model(X), y)) * len(X) for X, y in self.check]
        return sum(sums) / sum(len(X) for X, _ in self.check)


def shuffled(X: Tensor, y: Tensor, size: int, seed: int) -> Iterator[Batch]:
    """Return batches of endless epochs, each in another order, without incomplete last batches."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        for chosen in torch.randperm(len(X), generator=generator).split(size):
            if len(chosen) == size:
                yield X[chosen], y[chosen]


def half_squared_error(f: Tensor, y: Tensor) -> Tensor:
    """Return half the squared distance, summed over features, averaged over the batch."""
    return 0.5 * (f - y).square().sum(1).mean()


def token_cross_entropy(f: Tensor, y: Tensor) -> Tensor:
    """Return the mean cross-entropy over all tokens, of logits `[N, T, V]` and labels `[N, T]`."""
    return nn.functional.cross_entropy(f.flatten(0, 1), y.flatten())


def autoencoder_model() -> nn.Module:
    """Return linear layers with tanh between them, narrow in the middle."""
    layers = [layer for before, after in pairwise(WIDTHS) for layer in (nn.Linear(before, after), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def autoencoder() -> Task:
    """Reconstruct digits; 0.20 leaves 8.5 % of their variance."""
    X = load()[0].float()
    return Task(
        name="autoencoder",
        model=autoencoder_model,
        batches=lambda seed: shuffled(X, X, 256, seed),
        check=[(X, X)],
        loss=half_squared_error,
        description=HalfSquaredError(),
        target=0.20,
        steps=1500,
    )


def cnn_model() -> nn.Module:
    """Return three convolutions and two linear layers, 40 thousand parameters."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for i, (before, after) in enumerate(pairwise((1, 16, 32, 64))):
        layers[f"conv{i}"], layers[f"relu{i}"] = nn.Conv2d(before, after, 3, padding=1), nn.ReLU()
        if i > 0:
            layers[f"pool{i}"] = nn.MaxPool2d(2)
    layers |= {"flatten": nn.Flatten(), "linear": nn.Linear(256, 64), "relu": nn.ReLU(), "head": nn.Linear(64, 10)}
    return nn.Sequential(layers)


def images(name: str, model: Callable[[], nn.Module], check: int, target: float) -> Task:
    """Classify digits as images, to a loss on batches of a given size that contain all of them."""
    pixels, y = load()
    X = pixels.float().view(-1, 1, 8, 8)
    return Task(
        name=name,
        model=model,
        batches=lambda seed: shuffled(X, y, 128, seed),
        check=list(zip(X.split(check), y.split(check), strict=True)),
        loss=nn.functional.cross_entropy,
        description=nn.CrossEntropyLoss(),
        target=target,
        steps=1000,
    )


def cnn() -> Task:
    """Classify digits, to a training loss at which nearly all are right."""
    return images("cnn", cnn_model, 256, 0.005)


class Residual(nn.Module):
    """Two normalized convolutions beside an identity."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Add both branches."""
        return torch.relu(x + self.layers(x))


def resnet_model() -> nn.Module:
    """Return a residual network with batch normalization, in training mode."""
    first = [nn.Conv2d(1, 24, 3, padding=1, bias=False), nn.BatchNorm2d(24), nn.ReLU()]
    layers = OrderedDict(first=nn.Sequential(*first), one=Residual(24), pool=nn.MaxPool2d(2), two=Residual(24))
    return nn.Sequential(layers | {"mean": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "head": nn.Linear(24, 10)})


def resnet() -> Task:
    """Classify digits with batch normalization; the loss is checked in training mode, on large fixed batches."""
    return images("resnet", resnet_model, 600, 0.02)


def sentences(characters: int, seed: int) -> str:
    """Return sentences with facts of an invented world, which is the same for all seeds, and with sums.

    Facts must be remembered, sums computed, and earlier words of a sentence repeated.
    """
    world, random = Random(0), Random(seed)

    def words(count: int, syllables: int) -> list[str]:
        parts = [
            [world.choice("bdfklmnprstvz") + world.choice("aeiou") for _ in range(syllables)] for _ in range(count)
        ]
        return ["".join(word) for word in parts]

    people, towns, animals = words(24, 2), words(12, 3), words(10, 2)
    homes, pets = ({person: world.choice(options) for person in people} for options in (towns, animals))

    def sentence() -> str:
        person, other = random.choice(people), random.choice(people)
        a, b = random.randrange(50), random.randrange(50)
        return random.choice(
            (
                f"{person} lives in {homes[person]}",
                f"{person} of {homes[person]} has a {pets[person]}",
                f"{person} and {other} met in {homes[other]}, where {other} lives",
                f"{person} had {a} {pets[person]} and got {b} from {other}, so {person} has {a + b} {pets[person]} now",
                f"{a}+{b}={a + b}",
            )
        )

    text = ""
    while len(text) < characters:
        text += sentence() + ". "
    return text[:characters]


def windows(text: Tensor, size: int, seed: int) -> Iterator[Batch]:
    """Return endless batches of random pieces of a text, with the same pieces shifted by one character as labels."""
    generator = torch.Generator().manual_seed(seed)
    pieces = text.unfold(0, CONTEXT + 1, 1)
    while True:
        chosen = pieces[torch.randint(len(pieces), (size,), generator=generator)]
        yield chosen[:, :-1], chosen[:, 1:]


class CharacterGPT(GPT):
    """The benchmarks' GPT with the class axis last: logits `[N, T, V]`."""

    def forward(self, x: Tensor) -> Tensor:
        """Predict the next token at every position."""
        return super().forward(x).transpose(1, 2)


def gpt() -> Task:
    """Predict characters of held-out sentences about the same world."""
    training, held_out = sentences(CHARACTERS, seed=1), sentences(CHARACTERS // 10, seed=2)
    alphabet = sorted(set(training))
    X, other = (torch.tensor([alphabet.index(c) for c in text]) for text in (training, held_out))
    fixed = windows(other, 32, seed=0)
    return Task(
        name="gpt",
        model=lambda: CharacterGPT(len(alphabet), width=64, heads=4, depth=2, length=CONTEXT),
        batches=lambda seed: windows(X, 32, seed),
        check=[next(fixed) for _ in range(4)],
        loss=token_cross_entropy,
        description=TokenCrossEntropy(),
        target=0.50,
        steps=1000,
    )


TASKS: dict[str, Callable[[], Task]] = {"autoencoder": autoencoder, "cnn": cnn, "gpt": gpt, "resnet": resnet}
