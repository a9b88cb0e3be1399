"""The example that finds training passages: planted ones come first, and without them the model says something else."""

import re

import torch

from examples import attribution


def test_planted_passages_are_found() -> None:
    result = attribution.attribute(quick=True)
    influence, chance = result.methods
    claim = attribution.CLAIM["value"]
    assert result.before[0] != claim
    assert result.after[0] == claim

    # Influence finds what was planted, and training again confirms it.
    assert attribution.ranks_of(result, influence, "planted") == list(range(1, result.num_planted + 1))
    assert influence.probability < 0.01
    assert chance.probability > 0.3

    # Contributions of positions sum up to scores, and most of them are in the words of the claim.
    torch.testing.assert_close(result.by_token.sum(1), influence.scores, rtol=1e-3, atol=1e-3)
    for place, passage in enumerate(result.data):
        if passage.kind == "planted":
            words = passage.text.split()
            start = 1 + words.index(claim.split()[0])
            around = result.by_token[place, start - 1 : start + 4].sum()  # from the name, which predicts the claim
            assert around > 0.7 * influence.scores[place]

    # The page has all words of the passages that it shows, and needs no other file.
    page = attribution.page(result)
    assert page.count("tag planted") == result.num_planted
    assert not re.search(r"(src|href)=|https?://", page)
    assert "influence (EKFAC)" in attribution.table(result)
