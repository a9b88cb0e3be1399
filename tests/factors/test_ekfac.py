"""EKFAC: eigenvalues are the exact curvature along KFAC's eigenvectors, for every operation, Fisher and sharing."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from kfs.errors import DataError, ModelError
from kfs.factors import EKFAC, KFAC, load
from kfs.factors.accumulate.inputs import add_rotated_squares
from kfs.operators import GGN, Fisher, LinearOperator
from kfs.problem.risk import EmpiricalRisk
from tests.factors.definition import fresh_fisher
from tests.factors.models import ONE_POSITION, Case, Function
from tests.factors.test_kronecker import product_by_product
from tests.operators.contract import check_contract, close

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")  # PyTorch's own, about bilinear

N = 6


class Tokens(nn.Module):
    """Maps tokens `[N, 5]` to predictions `[N, 2]` with a module for `[N, 5, 4]` in between."""

    def __init__(self, inner: nn.Module, padding: int | None = None) -> None:
        super().__init__()
        self.table, self.inner, self.head = nn.Embedding(7, 4, padding_idx=padding), inner, nn.Linear(4, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.inner(self.table(tokens)))
        result: Tensor = self.head(x[:, -1] + x.mean(1))
        return result


class Tied(nn.Module):
    """Logits from the table that embeds tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix = nn.Embedding(7, 3), nn.Linear(3, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.mix(self.table(tokens)).mean(1))
        return F.linear(x, self.table.weight)[:, :2]


class Twice(nn.Module):
    """A layer that is called twice, the second time by hand and without its bias."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layer(x))
        result: Tensor = self.head(torch.tanh(F.linear(x, self.layer.weight)))
        return result


class Last(nn.Module):
    """The output of an attention or recurrent layer alone."""

    def __init__(self, layer: nn.Module, times: int) -> None:
        super().__init__()
        self.layer, self.times = layer, times

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(*[x] * self.times)[0]
        return result


def images(*layers: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, shape), *layers, nn.Tanh(), nn.Flatten(), nn.LazyLinear(2))


def positions(m: Any, x: Tensor) -> Tensor:
    """Add positions, scale, and use only one row of a table."""
    result: Tensor = (x + m.p) * m.s + m.table[1:2]
    return result


SHARED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "few positions": (lambda: Tokens(nn.Linear(4, 4)), "tokens"),
    "padding": (lambda: Tokens(nn.Linear(4, 4), padding=2), "tokens"),
    "many positions": (
        lambda: nn.Sequential(nn.Unflatten(1, (6, 2)), nn.Linear(2, 3), nn.Flatten(), nn.Linear(18, 2)),
        "12",
    ),
    "no bias": (lambda: nn.Sequential(nn.Unflatten(1, (2, 6)), nn.Linear(6, 3, bias=False), nn.Flatten()), "12, 6"),
    "norms": (lambda: Tokens(nn.Sequential(nn.LayerNorm(4), nn.RMSNorm(4))), "tokens"),
    "positions": (
        lambda: Tokens(Function(positions, p=torch.randn(5, 4), s=torch.rand(4), table=torch.rand(3, 4))),
        "tokens",
    ),
    "tied": (Tied, "tokens"),
    "called twice": (Twice, "4"),
    "attention": (lambda: Tokens(Last(nn.MultiheadAttention(4, 2, batch_first=True), 3)), "tokens"),
    "LSTM": (lambda: Tokens(Last(nn.LSTM(4, 4, batch_first=True), 1)), "tokens"),
    "convolution": (lambda: images(nn.Conv2d(2, 3, 3, padding=1), shape=(2, 2, 3)), "12"),
    "strided, dilated": (lambda: images(nn.Conv1d(1, 3, 3, stride=2, padding=1, dilation=2), shape=(1, 12)), "12"),
    "groups": (lambda: images(nn.Conv1d(2, 4, 2, groups=2), shape=(2, 6)), "12"),
    "transposed": (lambda: images(nn.ConvTranspose1d(2, 4, 2, stride=2, groups=2), shape=(2, 6)), "12"),
    "transposed in 2d": (
        lambda: images(nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1, output_padding=1), shape=(2, 2, 3)),
        "12",
    ),
    "several images": (
        lambda: nn.Sequential(
            nn.Unflatten(1, (2, 1, 6)),
            nn.Flatten(0, 1),
            nn.Conv1d(1, 2, 3),
            nn.Tanh(),
            nn.Unflatten(0, (-1, 2)),
            nn.Flatten(),
            nn.Linear(16, 2),
        ),
        "12",
    ),
}


def risk_of(make: Callable[[], nn.Module], kind: str, num_data: int = N) -> EmpiricalRisk:
    torch.manual_seed(0)
    model = make()
    size, _, outputs = kind.partition(", ")
    X = torch.randint(7, (num_data, 5)) if kind == "tokens" else torch.randn(num_data, int(size))
    model(X)  # lazy layers learn their size
    model.double()
    y = torch.randn(num_data, int(outputs or 2), dtype=torch.float64)
    return EmpiricalRisk(model, nn.MSELoss(), (X if kind == "tokens" else X.double(), y))


def check(risk: EmpiricalRisk, exact: LinearOperator, **settings: Any) -> None:
    """Compare eigenvalues with the curvature along eigenvectors, per block, and compare the error with that of KFAC."""
    K, E = KFAC(risk, **settings), EKFAC(risk, **settings)
    C = exact.to_dense()
    Q = K.eigh()[1].to_dense()
    close(E.to_dense(), Q @ torch.diag((Q.T @ C @ Q).diagonal()) @ Q.T)
    round_off = 1e-12 * C.norm()
    assert (E.to_dense() - C).norm() <= (K.to_dense() - C).norm() + round_off  # outside the blocks, both are zero
    close(E.trace(), C.trace())


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("name", SHARED)
def test_shared_positions(name: str, sharing: Any) -> None:
    risk = risk_of(*SHARED[name])
    check(risk, GGN(risk), sharing=sharing)
    if name != "no bias":  # one linear layer, where KFAC expand is exact
        assert not torch.allclose(EKFAC(risk, sharing=sharing).to_dense(), KFAC(risk, sharing=sharing).to_dense())


@pytest.mark.parametrize("name", ["few positions", "many positions", "convolution", "groups", "called twice", "tied"])
def test_every_fisher(name: str) -> None:
    risk = risk_of(*SHARED[name])
    check(risk, fresh_fisher(risk, 2, seed=1), fisher="mc", mc_samples=2, seed=1)
    check(risk, Fisher(risk, "empirical"), fisher="empirical", joint_bias=False)
    check(risk, GGN(risk), fisher="ggn", columns_at_once=2)


@pytest.mark.parametrize("case", ONE_POSITION, ids=str)
def test_one_position(case: Case) -> None:
    torch.manual_seed(0)
    model = case.make().double()
    X = torch.randint(5, (N, 1)) if case.tokens else torch.randn(N, 3, dtype=torch.float64)
    risk = EmpiricalRisk(model, nn.MSELoss(), (X, torch.randn(N, 2, dtype=torch.float64)))
    check(risk, GGN(risk))


def test_contract_and_inverse() -> None:
    risk = risk_of(*SHARED["convolution"])
    E = EKFAC(risk)
    dense = product_by_product(E)
    check_contract(E, dense)
    close(E.inverse(0.1).to_dense(), torch.linalg.inv(dense + 0.1 * torch.eye(len(dense), dtype=torch.float64)))
    close(E.eigenvalues(), torch.linalg.eigvalsh(dense))
    assert E.nbytes > 0


def test_it_does_not_depend_on_batches() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    X, y = torch.randn(7, 3, dtype=torch.float64), torch.randint(2, (7,))
    for fisher in ("type-2", "mc", "empirical"):
        one = EKFAC(EmpiricalRisk(model, nn.CrossEntropyLoss(), (X, y)), fisher)
        batches = [(X[:2], y[:2]), (X[2:], y[2:])]
        close(EKFAC(EmpiricalRisk(model, nn.CrossEntropyLoss(), batches), fisher).to_dense(), one.to_dense())


def test_data_can_be_added_for_fixed_eigenvectors() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    X, y = torch.randn(7, 3, dtype=torch.float64), torch.randint(2, (7,))

    def risk(part: slice) -> EmpiricalRisk:
        return EmpiricalRisk(model, nn.CrossEntropyLoss(), (X[part], y[part]))

    for fisher in ("type-2", "mc"):
        K = KFAC(risk(slice(0, 7)), fisher)
        whole = EKFAC.from_kfac(K, risk(slice(0, 7)))
        close(whole.to_dense(), EKFAC(risk(slice(0, 7)), fisher).to_dense())
        updated = EKFAC.from_kfac(K, risk(slice(0, 3))).update(risk(slice(3, 7)))
        close(updated.to_dense(), whole.to_dense())
        assert updated.num_data == 7
        later = KFAC.from_factors(replace(K._factors, settings=replace(K.settings, first_datum=3)))
        merged = EKFAC.from_kfac(K, risk(slice(0, 3))).merge(EKFAC.from_kfac(later, risk(slice(3, 7))))
        close(merged.to_dense(), whole.to_dense())
    E = EKFAC(risk(slice(0, 7)))
    before = E.to_dense()
    with pytest.raises(ModelError, match="The eigenvectors differ"):
        E.merge(EKFAC(risk(slice(0, 5))))
    with pytest.raises(ModelError, match="A KFAC cannot be merged with an EKFAC"):
        E.merge(KFAC(risk(slice(0, 5))))  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="The settings differ"):
        E.merge(EKFAC(risk(slice(0, 5)), "mc"))
    bad = X.clone()
    bad[0] = torch.inf
    with pytest.raises(DataError, match="not finite"):
        E.update(EmpiricalRisk(model, nn.CrossEntropyLoss(), (bad, y)))
    close(E.to_dense(), before)


def test_uncovered_parameters_have_their_exact_diagonal() -> None:
    torch.manual_seed(0)
    model = uncovered_model()
    X, y = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    for fisher, kind in (("type-2", "type-2"), ("mc", "type-1")):
        for reduction in ("mean", "sum"):
            whole, one, other = (
                EmpiricalRisk(model, nn.MSELoss(reduction=reduction), (X[part], y[part]))
                for part in (slice(0, 5), slice(0, 2), slice(2, 5))
            )
            E = EKFAC(whole, fisher, uncovered="diagonal")  # type: ignore[arg-type]
            assert E.blocks["0.W"].sharing == "exact"
            exact = torch.diag(Fisher(whole, kind).submatrix("0.W").to_dense().diagonal())  # type: ignore[arg-type]
            close(E.submatrix("0.W").to_dense(), exact)
            parts = EKFAC(one, fisher, uncovered="diagonal").update(other)  # type: ignore[arg-type]
            close(parts.submatrix("0.W").to_dense(), exact)
        skipping = EKFAC(whole, fisher, uncovered="skip")  # type: ignore[arg-type]
        assert list(skipping.blocks) == ["1"]


def uncovered_model() -> nn.Module:
    """Its first parameter is multiplied with itself."""
    torch.manual_seed(0)
    return nn.Sequential(Function(lambda m, x: x @ (m.W @ m.W), W=torch.rand(3, 3)), nn.Linear(3, 2)).double()


def test_rows_that_nothing_uses_and_layers_that_are_skipped() -> None:
    torch.manual_seed(0)
    data = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    rows = Function(lambda m, x: F.linear(x, m.W[1:4]), W=torch.rand(6, 3)).double()
    risk = EmpiricalRisk(rows, nn.MSELoss(), data)
    close(EKFAC(risk).to_dense(), GGN(risk).to_dense())
    twice = Function(lambda m, x: F.linear(x, m.W) @ (m.W @ m.W) + m.b, W=torch.rand(3, 3), b=torch.rand(3)).double()
    assert list(EKFAC(EmpiricalRisk(twice, nn.MSELoss(), data), uncovered="skip").blocks) == ["b"]


def test_gradients_that_overflow_are_refused() -> None:
    model = nn.Linear(2, 1)
    X = torch.full((3, 2), 1e15)
    K = KFAC(EmpiricalRisk(model, nn.MSELoss(), (torch.rand(3, 2), torch.rand(3, 1))))
    with pytest.raises(DataError, match="not finite"):
        EKFAC.from_kfac(K, EmpiricalRisk(model, nn.MSELoss(), (X**2, torch.rand(3, 1))))
    with pytest.raises(ModelError, match=r"EKFAC\.from_kfac got a int"):
        EKFAC.from_kfac(5, EmpiricalRisk(model, nn.MSELoss(), (X, X[:, :1])))  # type: ignore[arg-type]


def test_a_bias_that_was_not_used_adds_nothing() -> None:
    total = torch.zeros(1, 2, 4, dtype=torch.float64)
    gradients = torch.randn(5, 1, 2, 3, dtype=torch.float64)
    add_rotated_squares(total, gradients, None, None)
    close(total[0, :, :3], gradients.square().sum((0, 1)))
    assert (total[0, :, 3] == 0).all()


def small_risk(part: slice, model: nn.Module | None = None) -> EmpiricalRisk:
    torch.manual_seed(0)
    default = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    X, y = torch.randn(9, 3, dtype=torch.float64), torch.randint(2, (9,))
    return EmpiricalRisk(model or default, nn.CrossEntropyLoss(), (X[part], y[part]))


def test_factors_and_eigenvalues_have_counts_of_their_own(tmp_path: Path) -> None:
    first, second = small_risk(slice(0, 3)), small_risk(slice(3, 9))
    E = EKFAC(first).update(second)
    close(E.blocks["0"].A, KFAC(first).blocks["0"].A)
    E.save(tmp_path / "e")
    again = load(tmp_path / "e")
    assert isinstance(again, EKFAC)
    assert torch.equal(again.blocks["0"].A, E.blocks["0"].A)
    assert torch.equal(again.to_dense(), E.to_dense())
    pairs: list[Any] = [(KFAC(first), E), (E, KFAC(first))]
    for one, other in pairs:
        with pytest.raises(ModelError, match=r"cannot be merged|eigenvectors differ"):
            one.merge(other)


def test_factors_are_shared_but_not_their_owners() -> None:
    K = KFAC(small_risk(slice(0, 9)))
    before = K.blocks["0"].A.clone()
    E = EKFAC.from_kfac(K, small_risk(slice(0, 9)))
    E.to(dtype=torch.float32)
    assert K.blocks["0"].A.dtype == torch.float64
    K.update(small_risk(slice(0, 3)))
    torch.testing.assert_close(E.blocks["0"].A, before.float())


def test_other_models_are_refused() -> None:
    E = EKFAC(small_risk(slice(0, 9)))
    before = E.to_dense()
    for other in (nn.Sequential(nn.Linear(3, 2)), nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))):
        with pytest.raises(ModelError, match="The blocks differ"):
            E.update(small_risk(slice(0, 3), other.double()))
    close(E.to_dense(), before)


def test_data_must_use_all_blocks() -> None:
    """Otherwise, eigenvalues of unused blocks would silently be zero."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = (self.up if x.sum() > 0 else self.down)(x)
            return result

    model, X, y = Branches().double(), torch.rand(4, 3).double(), torch.randn(4, 2).double()
    both, up = ([(X, y), (-X, y)], [(X, y), (X, y)])
    K = KFAC(EmpiricalRisk(model, nn.MSELoss(), both))
    E = EKFAC.from_kfac(K, EmpiricalRisk(model, nn.MSELoss(), both))
    before = E.to_dense()
    with pytest.raises(ModelError, match=r"\['down'\] are not used"):
        EKFAC.from_kfac(K, EmpiricalRisk(model, nn.MSELoss(), up))
    with pytest.raises(ModelError, match=r"\['down'\] are not used"):
        E.update(EmpiricalRisk(model, nn.MSELoss(), up))
    close(E.to_dense(), before)


def test_what_a_model_keeps_can_be_differentiated_later() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2).double()
            self.fails = False

        def forward(self, x: Tensor) -> Tensor:
            self.kept = self.layer(2 * x)
            if self.fails:
                raise RuntimeError("stop")
            result: Tensor = self.layer(x)
            return result

    for make in (KFAC, EKFAC):
        model = Keeps()
        risk = EmpiricalRisk(model, nn.MSELoss(), (torch.randn(5, 3).double(), torch.randn(5, 2).double()))
        K = make(risk)
        before = K.blocks["layer"].B.clone()
        model.kept.square().sum().backward()
        assert torch.equal(K.blocks["layer"].B, before)
        model.fails = True
        with pytest.raises(RuntimeError, match="stop"):
            make(risk)
        model.kept.square().sum().backward()


def test_what_cannot_be_corrected_is_refused() -> None:
    risk = risk_of(*SHARED["convolution"])
    with pytest.raises(ModelError, match="forward-only"):
        EKFAC(risk, "forward-only")


@pytest.mark.filterwarnings("ignore:Factors wider than max_dim")
@pytest.mark.parametrize("joint_bias", [True, False])
def test_diagonal_factors(joint_bias: bool) -> None:
    """Without eigenvectors, eigenvalues are the diagonal of the exact curvature, including the bias."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    data = torch.randn(N, 3, dtype=torch.float64), torch.randn(N, 2, dtype=torch.float64)
    risk = EmpiricalRisk(model, nn.MSELoss(), data)
    E = EKFAC(risk, max_dim=1, joint_bias=joint_bias)
    close(E.to_dense(), GGN(risk).to_dense().diagonal().diag())
