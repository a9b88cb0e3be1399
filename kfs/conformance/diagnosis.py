"""Diagnosis: from a wrong block to the bug that probably made it.

Every guess is a question with a number as an answer: is the block that one would get from this bug the one that we see?
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kfs.conformance.tolerances import SINGLE


@dataclass(frozen=True)
class Facts:
    """What is known about a setting.

    Attributes:
        counts: Numbers by which a scale may be wrong, by what they count: `"N"` data, `"S"` positions, `"C"` outputs of
            a square loss, `"L"` labels of a datum.
        suspects: Wrong blocks by the bug that makes them.
        tolerance: From which relative error on two blocks are different.
    """

    counts: Mapping[str, float]
    suspects: Mapping[str, Tensor] = field(default_factory=dict)
    tolerance: float = SINGLE


_MEANING = {
    "N": "the number of data. An averaged loss was differentiated and the mean not undone, or a mean over data is "
    "missing or taken twice",
    "N^2": "the number of data, squared. Both factors were averaged, or none was",
    "S": "the number of shared positions. A mean over positions is missing or taken twice",
    "S^2": "the number of shared positions, squared. `reduce` divides gradients by it once too often, or not at all",
    "N S": "the number of data times the number of shared positions. A sum over all of them was taken for a mean, or "
    "the other way round",
    "C": "the number of outputs. `MSELoss` with mean divides by all entries, not by the number of data",
    "L": "the number of labels of a datum. A mean divides by all labels, not by the number of data",
    "N C": "the number of data times the number of outputs, by which the mean divides. The reduction was ignored",
    "2": "two. The Hessian of the square loss is two times the identity",
}


def diagnose(actual: Tensor, expected: Tensor, facts: Facts) -> str:
    """Say what is wrong with a block, as precisely as possible.

    Args:
        actual: What came.
        expected: What it should be.
        facts: What is known about the setting.

    Returns:
        A sentence or two, for the author of the implementation.
    """
    if not actual.isfinite().all():
        return "It has NaN or infinity in it."
    if not actual.any():
        return "It is zero: the layer's inputs or gradients were never seen."
    guesses = (*_suspects(actual, facts, scaled=False), *_scale(actual, expected, facts))
    guesses = guesses or (*_suspects(actual, facts, scaled=True), *_places(actual, expected, facts))
    return next(iter(guesses), "It is not a known mistake; compare factors one by one.")


def _suspects(actual: Tensor, facts: Facts, scaled: bool) -> Iterator[str]:
    """Find bugs that give this block, perhaps besides a wrong scale."""
    for bug, suspect in facts.suspects.items():
        factor = _best_scale(actual, suspect) if scaled else 1.0
        if factor and _same(actual, factor * suspect, facts):
            yield f"{bug} Besides, the scale is wrong by {factor:.4g}." if scaled else bug


def _scale(actual: Tensor, expected: Tensor, facts: Facts) -> Iterator[str]:
    """Find out whether only the scale is wrong."""
    scale = _best_scale(actual, expected)
    if scale and _same(actual, scale * expected, facts):
        yield _wrong_scale(scale, facts)


def _places(actual: Tensor, expected: Tensor, facts: Facts) -> Iterator[str]:
    """Find out whether entries are in wrong places."""
    if _same(actual.diagonal(), expected.diagonal(), facts):
        yield "Its diagonal is right, but not the rest: entries are dropped, or have wrong signs or places."
    one, other = (torch.linalg.eigvalsh((t + t.T) / 2) for t in (actual, expected))
    if _same(one, other, facts):
        yield "It has the right eigenvalues, but entries are elsewhere: another flattening or order of inputs."


def _best_scale(actual: Tensor, other: Tensor) -> float:
    return float((actual * other).sum() / other.square().sum()) if other.any() else 0.0


def _wrong_scale(scale: float, facts: Facts) -> str:
    """Name the number that a scale is too large or too small by."""
    for name, value in _products(facts.counts):
        for factor, words in ((value, "too large"), (1 / value, "too small")):
            if value != 1 and abs(scale / factor - 1) < facts.tolerance:
                return f"It is {words} by {name} = {value:g}: {_MEANING[name]}."
    return f"It is right up to a scale of {scale:.6g}."


def _products(counts: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """Return the numbers that a scale may be wrong by, the simplest ones first."""
    N, S = (counts.get(name, 1.0) for name in ("N", "S"))
    yield from {"N": N, "S": S}.items()
    if "C" in counts:  # what is said about outputs, and about two, is about the square loss
        yield from {"C": counts["C"], "2": 2.0, "N C": N * counts["C"]}.items()
    yield from {"L": counts.get("L", 1.0), "N S": N * S, "N^2": N**2, "S^2": S**2}.items()


def _same(one: Tensor, other: Tensor, facts: Facts) -> bool:
    return one.shape == other.shape and bool((one - other).norm() <= facts.tolerance * other.norm())
