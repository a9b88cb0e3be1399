"""Influence on real data: digits, some of which are mislabelled on purpose, and their scores."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kfs.factors import EKFAC
from kfs.influence import Influence
from kfs.problem.risk import EmpiricalRisk
from kfs.tour.attribution import Attribution, fragment
from kfs.tour.digits import load, trained

_SHARE = 0.05  # of labels that are wrong
_QUERIES = 4
_TOP = 6


@dataclass(frozen=True)
class Mislabelled:
    """Results on digits with wrong labels.

    Attributes:
        found: Helpful and harmful data of some digits, and all self-scores.
        labels: The correct labels of training data.
        flipped: Whether the label of a training example was changed.
        predicted: Predicted labels of the queries.
        auroc: The probability that a mislabelled digit has a larger self-score than another digit.
        accuracy: Share of correct predictions on held-out data.
    """

    found: Attribution
    labels: Tensor
    flipped: Tensor
    predicted: Tensor
    auroc: float
    accuracy: float


def examine(quick: bool = False) -> Mislabelled:
    """Change labels, train a net, and find the training data behind its predictions.

    Args:
        quick: Whether to use fewer data and steps.
    """
    X, y = load()
    half = 300 if quick else len(X) // 2
    generator = torch.Generator().manual_seed(0)
    flipped = torch.rand(half, generator=generator) < _SHARE
    shift = torch.randint(1, 10, (half,), generator=generator)
    labels = torch.where(flipped, (y[:half] + shift) % 10, y[:half])
    model = trained(X[:half], labels, 30 if quick else 100)
    rest = model(X[half:]).argmax(1)
    right = rest == y[half:]
    # Queries: some digits with wrong predictions, and some with correct ones.
    wrong = (~right).nonzero().flatten()[: _QUERIES // 2]
    others = right.nonzero().flatten()[: _QUERIES - len(wrong)]
    chosen = half + torch.cat([wrong, others])
    loss = nn.CrossEntropyLoss()
    train = EmpiricalRisk(model, loss, (X[:half], labels), progress=False)  # the tour shows its own
    queries = EmpiricalRisk(model, loss, (X[chosen], y[chosen]), progress=False)
    influence = Influence(EKFAC(train))
    own = influence.self_scores(train)
    # Without this, the same few unusual data come first for most queries.
    top = influence.top(queries, train, _TOP, normalize="self")
    return Mislabelled(
        Attribution("Digits", queries, train, top, own, (8, 8)),
        y[:half],
        flipped,
        rest[chosen - half],
        area_under_curve(own, flipped),
        float(right.double().mean()),
    )


def area_under_curve(scores: Tensor, positive: Tensor) -> float:
    """Return the probability that the score of a positive is larger than that of a negative; ties count half.

    Example:
        >>> area_under_curve(torch.tensor([3.0, 1.0, 2.0]), torch.tensor([True, False, False]))
        1.0
    """
    differences = scores[positive].unsqueeze(1) - scores[~positive]
    return float((differences > 0).double().mean() + 0.5 * (differences == 0).double().mean())


def section(result: Mislabelled) -> str:
    """Return HTML: digits with the training images that help and harm most, and mislabelled images by self-scores."""
    found = result.found
    notes = {int(index): f"is a {int(result.labels[index])}" for index in result.flipped.nonzero().flatten()}
    of_queries = {place: f"taken for a {int(label)}" for place, label in enumerate(result.predicted)}
    count = len(found.suspects)
    caught = sum(bool(result.flipped[index]) for index in found.suspects)
    return (
        f"<p>A net of the same kind, trained on digits of which {int(result.flipped.sum())} of {len(result.flipped)} "
        f"have a wrong label on purpose; it gets {result.accuracy:.1%} of other digits right. For some of those, "
        "<code>kfs.Influence(kfs.EKFAC(train)).top(queries, train)</code> says which training images help and harm "
        "most: without an image that helps, the loss of the query is predicted to be higher. Below each image are its "
        "index, its label and its score, divided by the root of its score with itself.</p>"
        f"{fragment(found, notes, of_queries)}"
        f"<p>Data whose label nothing else explains have a large score with themselves. {caught} of these {count} are "
        "mislabelled. A mislabelled digit has a larger score with itself than another one with a probability of "
        f"{result.auroc:.3f} (the area under the ROC curve).</p>"
    )
