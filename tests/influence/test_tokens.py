"""Scores by token: the share of each position, against a model with a copy of its parameters for every position."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kfs
from kfs.errors import DataError
from kfs.influence import Influence
from kfs.losses import TokenCrossEntropy
from tests.factors.models import Function
from tests.factors.one_by_one import close
from tests.language_models import bert, gpt2_without_dropout, llama

T = 4  # positions
D = 3  # features
C = 5  # classes


class Tagger(nn.Module):
    """Tags every position. Layers are called once for all positions, or in a loop with given parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(D, D)
        self.norm = nn.LayerNorm(D)
        self.scale = nn.Parameter(torch.randn(D))
        self.last = nn.Linear(D, C, bias=False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.with_params(dict(self.named_parameters()), x)

    def with_params(self, p: dict[str, Tensor], x: Tensor) -> Tensor:
        """Evaluate at any number of positions, each with its own parameters."""
        h = nn.functional.linear(x, p["first.weight"], p["first.bias"]).tanh()
        h = nn.functional.layer_norm(h, (D,), p["norm.weight"], p["norm.bias"]) * p["scale"]
        logits: Tensor = nn.functional.linear(h, p["last.weight"])
        return logits


def sequences(num_data: int, length: int = T) -> tuple[Tensor, Tensor]:
    torch.manual_seed(num_data)
    return torch.randn(num_data, length, D, dtype=torch.float64), torch.randint(C, (num_data, length))


def shares(model: Tagger, X: Tensor, y: Tensor) -> Tensor:
    """Differentiate with respect to copies of all parameters, one per position: `[num_data, positions, size]`."""
    rows = []
    for x, labels in zip(X, y, strict=True):
        copies = [
            {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()} for _ in range(len(x))
        ]
        logits = torch.stack([model.with_params(copy, x[t]) for t, copy in enumerate(copies)])
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
        grads = torch.autograd.grad(loss, [p for copy in copies for p in copy.values()])
        per_copy = len(copies[0])
        rows.append(
            torch.stack(
                [torch.cat([g.flatten() for g in grads[t * per_copy : (t + 1) * per_copy]]) for t in range(len(x))]
            )
        )
    return torch.stack(rows)


@pytest.mark.parametrize("make", [kfs.KFAC, kfs.EKFAC])
@pytest.mark.parametrize("damping", [0.1, kfs.Relative(0.1)], ids=str)
def test_shares(make: Any, damping: Any) -> None:
    model = Tagger()
    batches = [sequences(3), sequences(2)]
    train = kfs.EmpiricalRisk(model, TokenCrossEntropy(), batches)
    queries = kfs.EmpiricalRisk(model, TokenCrossEntropy(), sequences(4, length=6))
    influence = Influence(make(train), damping)
    inverse = influence.inverse.to_dense()
    G = torch.cat([shares(model, *batch) for batch in batches])
    of_queries = shares(model, *sequences(4, length=6)).sum(1)
    expected = torch.einsum("qi,ij,ntj->qnt", of_queries, inverse, G)
    for memory in (1, 2**32):
        close(influence.scores(queries, train, by="token", memory=memory), expected)
    close(influence.scores(queries, train), expected.sum(2))
    own = influence.self_scores(train).sqrt()
    close(influence.scores(queries, train, by="token", normalize="self"), expected / own.reshape(1, -1, 1))
    assert not torch.allclose(expected, expected.flip(2))  # another order of positions


def test_lengths_that_differ() -> None:
    """Positions after the last one of a shorter example have no share."""
    model = Tagger()
    batches = [sequences(2, length=3), sequences(3, length=5)]
    train = kfs.EmpiricalRisk(model, TokenCrossEntropy(), batches)
    influence = Influence(kfs.EKFAC(train), 0.1)
    scores = influence.scores(train, train, by="token")
    assert scores.shape == (5, 5, 5)
    assert not scores[:, :2, 3:].any()
    close(scores.sum(2), influence.scores(train, train))


@pytest.mark.parametrize(("make", "shift"), [(gpt2_without_dropout, True), (llama, True), (bert, False)])
def test_language_models(make: Any, shift: bool) -> None:
    torch.manual_seed(0)
    model = make().double().eval()
    ids = torch.randint(11, (4, 5))
    risk = kfs.EmpiricalRisk(model, TokenCrossEntropy(shift=shift), ({"input_ids": ids}, ids))
    influence = Influence(kfs.KFAC(risk, "empirical"), 0.1)
    scores = influence.scores(risk, risk, by="token")
    assert scores.shape == (4, 4, 5)
    close(scores.sum(2), influence.scores(risk, risk))


def refused(model: nn.Module, *shape: int, **settings: Any) -> str:
    """Return the reason why a model has no tokens."""
    X = torch.randn(3, *shape, dtype=torch.float64)
    risk = kfs.EmpiricalRisk(model.double(), nn.CrossEntropyLoss(), (X, torch.tensor([0, 1, 1])))
    influence = Influence(kfs.KFAC(risk, **settings), 0.1)
    with pytest.raises(DataError) as error:
        influence.scores(risk, risk, by="token")
    return str(error.value)


def test_models_without_tokens() -> None:
    assert "The examples have one position each" in refused(nn.Linear(D, C), D)

    class Pooled(nn.Module):
        """Averages over positions before its last layer."""

        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(D, D)
            self.b = nn.Linear(D, D)
            self.c = nn.Linear(D, C)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.c(self.b(self.a(x).tanh()).tanh().mean(1))
            return logits

    assert "Block 'c' has 1 rows for each example" in refused(Pooled(), T, D)

    class Twice(Pooled):
        """Has every position twice in its last layer. Two of three layers show the number of positions."""

        def forward(self, x: Tensor) -> Tensor:
            h = self.b(self.a(x).tanh()).tanh()
            logits: Tensor = self.c(torch.cat([h, h.square()], 1)).mean(1)
            return logits

    assert f"Block 'c' has {2 * T} rows for each example" in refused(Twice(), T, D)
    assert "no rows, because no rule covers it" in refused(
        Function(
            lambda m, x: (x @ m.W @ torch.linalg.inv(m.V + 3 * torch.eye(D))).mean(1),
            W=torch.randn(D, D),
            V=torch.eye(D),
        ),
        T,
        D,
        uncovered="diagonal",
    )
