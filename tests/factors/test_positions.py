"""Positions, tokens that are tied to the head, and the choice of the batch axis."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfs.errors import DataError
from kfs.factors import KFAC
from kfs.losses import TokenCrossEntropy
from kfs.problem.risk import EmpiricalRisk
from tests.factors.models import Function
from tests.factors.test_traps import SHARING, normal, same
from tests.operators.contract import close


class Positions(nn.Module):
    """Learned positions: given as an index without or with batch axis, or as a parameter that is added."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.tokens, self.head = kind, nn.Embedding(7, 3), nn.Linear(3, 2)
        self.positions = nn.Embedding(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        n, t = x.shape
        index = torch.arange(t)
        if self.kind == "batch":
            added = self.positions(index.expand(n, t) + 0 * x)
        elif self.kind == "row":
            added = self.positions(index.unsqueeze(0))
        elif self.kind == "index":
            added = self.positions(index)
        elif self.kind == "scaled":
            added = self.positions(index).unsqueeze(0).clone()
        else:
            added = self.positions.weight[:t]
        result: Tensor = self.head((self.tokens(x) + added).tanh()).mean(1)
        return result


@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("num_data", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", ["row", "index", "scaled", "parameter"])
def test_positions_without_batch_axis(kind: str, num_data: int, sharing: Any) -> None:
    """Gradients are taken before they are summed over the batch, even if its size divides the length."""
    results = []
    torch.manual_seed(0)
    X, y = torch.randint(7, (num_data, 8)), torch.randint(2, (num_data,))
    for each in ("batch", kind):
        torch.manual_seed(1)
        model = Positions(each).double()
        results.append(KFAC(EmpiricalRisk(model, nn.CrossEntropyLoss(), (X, y)), sharing=sharing))
    same(results[0], results[1])


@pytest.mark.parametrize("sharing", SHARING)
def test_positions_that_are_transformed_before_they_meet_the_batch(sharing: Any) -> None:
    class Nonlinear(Positions):
        def forward(self, x: Tensor) -> Tensor:
            index = torch.arange(x.shape[1]) + (0 * x if self.kind == "batch" else 0)
            added = self.positions(index).tanh()
            result: Tensor = self.head((self.tokens(x) + added).tanh()).mean(1)
            return result

    results = []
    X, y = torch.randint(7, (4, 8)), torch.randint(2, (4,))
    for kind in ("batch", "index"):
        torch.manual_seed(0)
        risk = EmpiricalRisk(Nonlinear(kind).double(), nn.CrossEntropyLoss(), (X, y))
        results.append(KFAC(risk, sharing=sharing))
    same(results[0], results[1])


@pytest.mark.parametrize("sharing", SHARING)
def test_a_tied_embedding_has_both_roles(sharing: Any) -> None:
    """Both uses are in one block, and the block scales with gradients and inputs as the curvature does."""

    class Language(nn.Module):
        def __init__(self, tied: bool) -> None:
            super().__init__()
            self.tokens, self.mix, self.head = nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5, bias=False)
            self.head.weight = self.tokens.weight if tied else nn.Parameter(self.tokens.weight.detach().clone())

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.head(self.mix(self.tokens(x)).tanh())
            return result

    X = torch.randint(5, (4, 3))
    data = (X, X)
    Ks = []
    for tied in (True, False):
        torch.manual_seed(0)
        Ks.append(
            KFAC(EmpiricalRisk(Language(tied).double(), TokenCrossEntropy(reduction="sum"), data), sharing=sharing)
        )
    K, L = Ks
    block = K.blocks["tokens.weight"]
    assert block.operations == {"embedding", "linear"}
    assert set(block.sums.roles) == {"A", "B"}
    for side, name in (("A", "tokens.weight"), ("B", "head.weight")):
        role, alone = block.sums.roles[side], L.blocks[name].sums.roles["A"]  # type: ignore[index]
        close(role.input.total, alone.input.total)
        close(role.gradient.total, alone.gradient.total)
    assert block.A.shape == (5, 5)
    assert block.B.shape == (3, 3)
    before = torch.kron(block.B, block.A)
    for role in block.sums.roles.values():
        role.gradient.total *= 9.0
    close(torch.kron(block.B, block.A), 9.0 * before)
    K @ torch.ones(K.shape[0], dtype=torch.float64)  # products combine factors of equal sizes
    close(torch.kron(block.B, block.A), 9.0 * before)


def test_batch_axis() -> None:
    """If the batch axis matters, it is measured, split off, or an argument is required."""
    torch.manual_seed(0)
    layer = nn.Linear(3, 2).double()
    X, y = normal(4, 6, 3), normal(4, 2)
    forms = {
        "first": lambda x: layer(x).mean(1),
        "second": lambda x: layer(x.transpose(0, 1)).mean(0),
        "merged": lambda x: layer(x.flatten(0, 1)).unflatten(0, (len(x), -1)).mean(1),
    }
    results = []
    for form in forms.values():
        model = Function(lambda _, x, form=form: form(x))
        model.layer = layer
        results.append(KFAC(EmpiricalRisk(model, nn.MSELoss(), (X, y)), sharing="reduce"))
    same(results[0], results[1])
    same(results[0], results[2])

    ambiguous = Function(lambda m, x: m.layer(x.permute(1, 0, 2)).mean(0))
    ambiguous.layer = layer
    square = normal(6, 6, 3), normal(6, 2)
    right = KFAC(EmpiricalRisk(ambiguous, nn.MSELoss(), square), sharing="reduce", batch_axis=1)
    plain = Function(lambda m, x: m.layer(x).mean(1))
    plain.layer = layer
    same(right, KFAC(EmpiricalRisk(plain, nn.MSELoss(), square), sharing="reduce"))

    lost = Function(lambda m, x: m.layer(x.reshape(3, 8, 3)).reshape(4, 6, 2).mean(1))
    lost.layer = layer
    risk = EmpiricalRisk(lost, nn.MSELoss(), (X, y))
    same(KFAC(risk, sharing="reduce"), results[0])  # its axis is measured
    with pytest.raises(DataError, match=r"leading axes \[3, 8\].*batch of 4 examples.*batch_axis="):
        KFAC(risk, sharing="reduce", audit=False)
    KFAC(risk, audit=False)
