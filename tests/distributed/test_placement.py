"""Placements: every part has an owner, loads are balanced, and predicted bytes equal those of KFAC's factors."""

from contextlib import nullcontext
from itertools import product
from math import ceil, inf
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import kfs
from kfs.distributed.assignment import LIMIT, Part, Placement, eigenvalues, place, subsets_of
from kfs.errors import ModelError
from kfs.factors.accumulate import parts_of
from kfs.factors.block import Block
from kfs.losses import TokenCrossEntropy
from kfs.optim.averages import Average
from kfs.planning import NAMED, source_of
from tests.language_models import gpt2_without_dropout


def most(placement: Placement) -> float:
    return max(placement.total(lambda part: part.nbytes))


@st.composite
def some_parts(draw: st.DrawFn) -> list[Part]:
    """Return blocks with two factors, some of them diagonal, and optionally with eigenvalues."""
    eigen = draw(st.booleans())
    sizes = draw(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40), st.booleans()), min_size=1, max_size=12))
    parts = []
    for number, (d_A, d_B, diagonal) in enumerate(sizes):
        name = f"block{number}"
        parts.append(Part(name, "A", d_A, diagonal=(diagonal,), eigen=eigen))
        parts.append(Part(name, "B", d_B, eigen=eigen))
        parts += [eigenvalues(name, d_A * d_B)] if eigen else []
    return parts


@given(some_parts(), st.integers(1, 9), st.randoms(use_true_random=False))
def test_every_part_has_one_owner_whatever_the_order(parts: list[Part], ranks: int, random: Random) -> None:
    placement = place(parts, ranks)
    assert sorted(placement.owners) == sorted(part.key for part in parts)
    assert set(placement.owners.values()) <= set(range(ranks))
    shuffled = random.sample(parts, len(parts))
    assert place(shuffled, ranks) == placement
    assert sum(placement.total(lambda part: part.work)) == sum(part.work for part in parts)
    # No algorithm can use less than the mean, or than the largest part; and one rank always has room for a part.
    mean = sum(part.nbytes for part in parts) / ranks
    largest = max(part.nbytes for part in parts)
    assert max(mean, largest) <= most(placement) * (1 + 1e-9)
    assert most(placement) <= max(LIMIT * mean, mean + largest) * (1 + 1e-9)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(1, 3))
def test_longest_first_is_near_the_best(sizes: list[int], ranks: int) -> None:
    """Graham's bound, if bytes and work are proportional; the best placement is found by brute force."""
    parts = [Part(str(number), "A", size, diagonal=(True,)) for number, size in enumerate(sizes)]
    best = min(
        max(sum(part.nbytes for part, rank in zip(parts, chosen, strict=True) if rank == r) for r in range(ranks))
        for chosen in product(range(ranks), repeat=len(parts))
    )
    without_limit = place(parts, ranks, limit=inf)
    assert most(without_limit) <= (4 / 3 - 1 / (3 * ranks)) * best * (1 + 1e-9)


def test_the_bound_rejects_another_order() -> None:
    """With the shortest first, 1 and 1 go to different ranks, and 2 is added to one of them."""
    parts = [Part(name, "A", size, diagonal=(True,)) for name, size in {"a": 1, "b": 1, "c": 2}.items()]
    shortest_first = Placement(2, tuple(parts), {("a", "A"): 0, ("b", "A"): 1, ("c", "A"): 0})
    best = most(place(parts, 2))
    assert best == 4 * 2 * 2  # two numbers of four bytes, with their inverses
    assert most(shortest_first) > (4 / 3 - 1 / 6) * best


def named_parts(name: str, eigen: bool) -> list[Part]:
    return source_of(name, None, None, eigen).parts


@pytest.mark.parametrize("eigen", [False, True])
def test_7b_on_up_to_64_ranks(eigen: bool) -> None:
    parts = named_parts("7B", eigen)
    mean = sum(part.nbytes for part in parts)
    assert all(most(place(parts, ranks)) <= 1.05 * mean / ranks for ranks in range(1, 65))
    # The limit is necessary: without it, bytes are balanced only for some numbers of ranks.
    assert any(place(parts, ranks, limit=inf).imbalance > 1.05 for ranks in range(1, 65))


@pytest.mark.parametrize("name", NAMED)
def test_many_ranks(name: str) -> None:
    """No rank needs more memory than one that owns the largest part, or 5 % above the mean, as for many experts."""
    parts = named_parts(name, eigen=False)
    largest = max(part.nbytes for part in parts)
    for ranks in (1024, 4096):
        placement = place(parts, ranks)
        mean = sum(p.nbytes for p in parts) / ranks
        if largest > 1.05 * mean:
            assert most(placement) == largest
            assert placement.divided
        else:
            assert most(placement) <= 1.05 * mean


def test_a_block_is_divided_only_if_it_must_be() -> None:
    parts = [Part("wide", "A", 40), Part("wide", "B", 40), Part("small", "A", 4), Part("small", "B", 4)]
    assert place(parts, 1).divided == []
    placement = place(parts, 2)
    assert placement.divided == ["wide"]
    assert placement.owners["small", "A"] == placement.owners["small", "B"]
    kept = place(parts, 2, limit=2.0)
    assert kept.divided == []
    assert kept.imbalance == pytest.approx(2 * 1600 / 1616)


def test_packing_tightly_if_balancing_fails() -> None:
    """By loads, 3 and 3 go to different ranks, and then 2 + 2 + 2 cannot be placed close to the mean."""
    parts = [Part(f"{number}", "A", size, diagonal=(True,)) for number, size in enumerate((3, 3, 2, 2, 2))]
    assert place(parts, 2, limit=inf).imbalance > 1.1
    assert place(parts, 2).imbalance == pytest.approx(1.0)


def test_the_limit_rises_if_it_cannot_be_kept() -> None:
    thirds = [Part(name, "A", 5) for name in "abc"]
    assert place(thirds, 2).imbalance == pytest.approx(4 / 3)


def risk_of(model: nn.Module, X: torch.Tensor, classes: int) -> kfs.EmpiricalRisk:
    return kfs.EmpiricalRisk(model, nn.CrossEntropyLoss(), (X, torch.arange(len(X)) % classes))


def convolutions() -> kfs.EmpiricalRisk:
    """Groups of channels, a bias, and a factor that exceeds `max_dim`."""
    layers = (nn.Conv2d(4, 6, 3, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 4, 3))
    return risk_of(nn.Sequential(*layers).double(), torch.randn(5, 4, 4, 4, dtype=torch.float64), 3)


def table_of_words() -> kfs.EmpiricalRisk:
    """An embedding, whose inputs have a diagonal factor, and a normalization."""
    model = nn.Sequential(nn.Embedding(7, 4), nn.LayerNorm(4), nn.Flatten(), nn.Linear(12, 3))
    return risk_of(model, torch.randint(7, (6, 3)), 3)


RISKS = {"convolutions": (convolutions(), 20), "table of words": (table_of_words(), None)}


@pytest.mark.parametrize(("risk", "max_dim"), RISKS.values(), ids=RISKS)
def test_bytes_are_those_of_kfac(risk: kfs.EmpiricalRisk, max_dim: int | None) -> None:
    with pytest.warns(UserWarning, match="max_dim") if max_dim else nullcontext():
        K = kfs.KFAC(risk, max_dim=max_dim)
        E = kfs.EKFAC(risk, max_dim=max_dim)
    parts = [part for block in K.blocks.values() for part in parts_of(block.sums, K.num_data)]
    assert sum(part.summed for part in parts) == sum(block.nbytes for block in K.blocks.values())
    # The inverse of a single number is a scale, which does not count.
    assert sum(part.computed for part in parts if part.size > 1) == K.inverse(0.1, method="factored").nbytes
    parts = [part for block in E.blocks.values() for part in parts_of(block.sums, E.num_data, eigen=True)]
    in_eigenbasis = sum(part.computed if part.is_factor else part.nbytes for part in parts)
    assert in_eigenbasis == E.nbytes


def test_a_weight_with_two_roles() -> None:
    """The embedding of GPT-2 also computes logits, and has two sums on each side."""
    model = gpt2_without_dropout(layers=1).eval()
    words = torch.randint(11, (3, 5))
    K = kfs.KFAC(kfs.EmpiricalRisk(model, TokenCrossEntropy(), (words, words)), "mc")
    block = K.blocks["transformer.wte.weight"]
    A, B = parts_of(block.sums, K.num_data)
    assert A.diagonal == (True, False)
    assert A.is_dense
    assert A.summed + B.summed == block.nbytes
    assert A.computed == 4 * 11 * 11
    assert B.vectors == 2 * 5 * 8  # gradients of embeddings, and inputs of logits, at five positions


def test_work_is_that_of_the_optimizer() -> None:
    """The optimizer's work also counts one operation per entry of a product, for scales."""
    for risk, _ in RISKS.values():
        for block in kfs.KFAC(risk).blocks.values():
            assert isinstance(block, Block)
            dense = sum(part.work for part in parts_of(block.sums) if part.is_dense)
            _, rows, columns = block.layout.matrix_shape
            assert dense == Average.zeros_like(block).cost - rows * columns


@given(st.integers(1, 12), st.integers(1, 3))
def test_one_triangle_is_sent(size: int, groups: int) -> None:
    assert Part("", "A", size, groups, itemsize=8).sent == 8 * groups * torch.triu_indices(size, size).shape[1]
    assert Part("", "A", size, groups, (True,), itemsize=8).sent == 8 * groups * size


@given(st.integers(1, 50), st.integers(1, 60))
def test_pieces_cover_a_factor(size: int, width: int) -> None:
    pieces = Part("fc", "A", size).pieces(width)
    sizes = [piece.size for piece in pieces]
    assert sum(sizes) == size
    assert max(sizes) <= width
    assert max(sizes) - min(sizes) <= 1
    assert len(pieces) == ceil(size / width)
    assert len({piece.key for piece in pieces}) == len(pieces)
    diagonal = Part("fc", "A", size, diagonal=(True,))
    assert diagonal.pieces(width) == [diagonal]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(9, 20))
def test_passes(sizes: list[int], memory: int) -> None:
    """First fit needs at most 11/9 of the smallest number of passes, plus 6/9 (Dosa, 2007)."""
    named = {str(number): size for number, size in enumerate(sizes)}
    subsets = subsets_of(named, memory)
    assert sorted(name for subset in subsets for name in subset) == sorted(named)
    assert all(sum(named[name] for name in subset) <= memory for subset in subsets)
    assert subsets_of(dict(reversed(named.items())), memory) == subsets
    fewest = min(
        len(set(chosen))
        for chosen in product(range(len(sizes)), repeat=len(sizes))
        if all(sum(s for s, c in zip(sizes, chosen, strict=True) if c == one) <= memory for one in set(chosen))
    )
    assert len(subsets) <= (11 * fewest + 6) / 9


def test_refused() -> None:
    part = Part("fc", "A", 3)
    for ranks in (0, -1, True, 2.0):
        with pytest.raises(ModelError, match=r"ranks is .* Use an integer of at least 1"):
            place([part], ranks)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"A part is given twice. Give each block a unique name"):
        place([part, part], 2)
    with pytest.raises(ModelError, match="There is no block to place"):
        place([], 2)
    with pytest.raises(ModelError, match=r"Block 'fc' needs 36 B, but only 35 B are available for a pass\. Allow more"):
        subsets_of({"fc": 36}, 35)
