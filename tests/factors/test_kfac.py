"""The object: added and merged data, moves, algebra, settings, coverage, refused input, and no state left behind."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kfs
from kfs.errors import DataError, KfsWarning, LossError, ModelError
from kfs.factors import KFAC, inspect
from kfs.operators import GGN, Fisher
from kfs.problem.risk import EmpiricalRisk
from tests.factors.models import Apply, Function
from tests.factors.test_traps import mlp, normal, same
from tests.operators.contract import check_contract, close


def data(num_data: int = 7) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return normal(num_data, 3), torch.randint(2, (num_data,))


def risk_of(model: nn.Module, X: Tensor, y: Tensor, **settings: Any) -> EmpiricalRisk:
    return EmpiricalRisk(model, nn.CrossEntropyLoss(), (X, y), **settings)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("fisher", ["type-2", "mc", "empirical", "forward-only"])
def test_data_can_be_added_and_merged(fisher: Any, sharing: Any) -> None:
    model, (X, y) = mlp(), data()
    whole = KFAC(risk_of(model, X, y), fisher, sharing)
    parts = [risk_of(model, X[:3], y[:3]), risk_of(model, X[3:], y[3:])]
    updated = KFAC(parts[0], fisher, sharing)
    assert updated.update(parts[1]) is updated
    same(updated, whole)
    assert updated.num_data == whole.num_data == 7
    merged = KFAC(parts[0], fisher, sharing).merge(KFAC(parts[1], fisher, sharing, first_datum=3))
    same(merged, whole)
    close(merged.to_dense(), whole.to_dense())


def test_what_does_not_fit_is_not_added() -> None:
    model, (X, y) = mlp(), data()
    K = KFAC(risk_of(model, X, y))
    before = K.to_dense()
    bad = X.clone()
    bad[0, 0] = torch.nan
    with pytest.raises(DataError, match="not finite"):
        K.update(risk_of(model, bad, y))
    with pytest.raises(ModelError, match="blocks differ"):
        K.update(risk_of(model, X, y, params=["0.weight"]))
    with pytest.raises(ModelError, match="settings differ"):
        K.merge(KFAC(risk_of(model, X, y), "mc"))
    close(K.to_dense(), before)


def test_operator_contract() -> None:
    model, (X, y) = mlp(), data()
    K = KFAC(risk_of(model, X, y))
    dense = torch.zeros(K.shape, dtype=torch.float64)
    start = 0
    for block in K.blocks.values():
        d_out, d_in = block.B.shape[0], block.A.shape[0]
        order = torch.arange(d_out * d_in).reshape(d_out, d_in)
        order = torch.cat([order[:, :-1].flatten(), order[:, -1]])  # (W b) by rows, to W by rows and then b
        stop = start + d_out * d_in
        dense[start:stop, start:stop] = torch.kron(block.B, block.A)[order][:, order]
        start = stop
    check_contract(K, dense)
    assert torch.linalg.eigvalsh(dense).min() > -1e-12


def test_groups_rows_and_permutations_act_on_the_right_entries() -> None:
    """With one example, blocks of all layouts equal the exact matrix, except for zeros between groups."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Unflatten(1, (4, 1)),
        nn.Conv1d(4, 6, 1, groups=2),
        nn.Tanh(),
        nn.ConvTranspose1d(6, 4, 1, groups=2),
        nn.Flatten(),
    ).double()
    risk = EmpiricalRisk(model, nn.MSELoss(), (normal(1, 4), normal(1, 4)))
    K, G = KFAC(risk).to_dense(), GGN(risk).to_dense()
    assert (K != 0).sum() < (G != 0).sum()
    close(torch.where(K == 0, 0.0, G), K)
    assert torch.linalg.matrix_rank(K) == 8  # four outputs of each layer


def test_moving() -> None:
    model, (X, y) = mlp(), data()
    K = KFAC(risk_of(model, X, y))
    before = K.to_dense()
    assert K.to(dtype=torch.float32) is K
    assert K.blocks["0"].A.dtype == K.dtype == torch.float32
    torch.testing.assert_close(K.to_dense(), before.float())
    K.to("cpu", torch.float64)
    assert (K @ torch.ones(K.shape[1], dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize("columns_at_once", [2, 3, 100])
def test_columns_sent_back_together(columns_at_once: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 5), nn.LayerNorm(5)
    ).double()
    X, y = normal(4, 1, 4, 4), torch.randint(5, (4,))
    for sharing in ("expand", "reduce"):
        for fisher in ("type-2", "mc"):
            settings: Any = {"fisher": fisher, "sharing": sharing, "mc_samples": 4}
            risk = risk_of(model.eval(), X, y)
            same(KFAC(risk, **settings, columns_at_once=columns_at_once), KFAC(risk, **settings))


class NoBatching(torch.autograd.Function):
    """A cube that `vmap` does not support."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        if torch._C._functorch.is_batchedtensor(g):
            raise RuntimeError("vmap: no rule")
        return 3 * ctx.saved_tensors[0] ** 2 * g


def _fail(_: Tensor) -> Tensor:
    raise RuntimeError("something else")


def test_operations_that_vmap_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(3, 4), Apply(NoBatching.apply), nn.Linear(4, 2)).double()
    X, y = data()
    alone = KFAC(risk_of(model, X, y), columns_at_once=1)
    monkeypatch.setattr("kfs.factors.compute.columns_at_once", lambda settings, _: settings.columns_at_once or 2)
    same(KFAC(risk_of(model, X, y)), alone)
    with pytest.raises(ModelError, match=r"vmap.*columns_at_once"):
        KFAC(risk_of(model, X, y), columns_at_once=2)
    with pytest.raises(RuntimeError, match="something else"):
        KFAC(risk_of(nn.Sequential(nn.Linear(3, 2), Apply(_fail)).double(), X, y))


def test_forward_only() -> None:
    model, (X, y) = mlp(), data()
    K, L = KFAC(risk_of(model, X, y), "forward-only"), KFAC(risk_of(model, X, y))
    for name, block in K.blocks.items():
        close(block.A, L.blocks[name].A)
        assert torch.equal(block.B, torch.ones(block.B.shape, dtype=torch.float64))
    v = normal(K.shape[1])
    W, b = v[:12].reshape(4, 3), v[12:16].reshape(4, 1)
    out = (torch.cat([W, b], 1) @ K.blocks["0"].A)[:, :3]
    close((K @ v)[:12], out.flatten())


def test_sharing_by_name() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), Apply(lambda f: f.mean(1))).double()
    risk = risk_of(model, normal(5, 3, 3), torch.randint(2, (5,)))
    by_parameter = KFAC(risk, sharing={"0.weight": "reduce"})
    assert {name: block.sharing for name, block in by_parameter.blocks.items()} == {"0": "reduce", "2": "expand"}
    mixed = KFAC(risk, sharing={"0": "reduce", "2.weight": "expand"})
    reduced, expanded = KFAC(risk, sharing="reduce"), KFAC(risk)
    close(mixed.blocks["0"].A, reduced.blocks["0"].A)
    close(mixed.blocks["2"].B, expanded.blocks["2"].B)
    with pytest.raises(ModelError, match=r"sharing has unknown names \['1'\]"):
        KFAC(risk, sharing={"1": "reduce"})


def test_wide_sides_become_diagonal_and_say_so() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1, groups=1),
        nn.Tanh(),
        nn.Conv2d(3, 6, 3, groups=3, stride=2),
        nn.Flatten(),
        nn.Linear(6, 2),
    ).double()
    risk = risk_of(model, normal(4, 2, 4, 4), torch.randint(2, (4,)))
    dense = KFAC(risk)
    with pytest.warns(KfsWarning, match=r"max_dim=7 keep their diagonal only: 0\.A \(19\), 2\.A \(10\)\."):
        K = KFAC(risk, max_dim=7)
    close(K.blocks["0"].A, dense.blocks["0"].A.diagonal())
    close(K.blocks["2"].A, dense.blocks["2"].A.diagonal(dim1=1, dim2=2))
    close(K.blocks["0"].B, dense.blocks["0"].B)
    close(K.to_dense().diagonal(), dense.to_dense().diagonal())
    with pytest.warns(KfsWarning):
        reduced = KFAC(risk, max_dim=7, sharing="reduce")
    close(reduced.blocks["0"].A, KFAC(risk, sharing="reduce").blocks["0"].A.diagonal())
    assert KFAC(risk, max_dim=1000).blocks["0"].A.ndim == 2


@pytest.mark.parametrize("fisher", ["type-2", "mc", "empirical"])
def test_what_is_not_covered(fisher: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Function(lambda m, x: x @ m.W.tanh(), W=normal(3, 4)), nn.Tanh(), nn.Linear(4, 2)).double()
    X, y = data(4)
    risk = risk_of(model, X, y)
    with pytest.raises(
        ModelError,
        match=r"'0\.W': it is used by matmul before it meets the batch.*params=.*'skip'.*'diagonal'",
    ):
        KFAC(risk, fisher)
    skipping = KFAC(risk, fisher, uncovered="skip")
    assert list(skipping.blocks) == ["2"]
    assert list(skipping.domain.shapes) == ["2.weight", "2.bias"]
    diagonal = KFAC(risk, fisher, uncovered="diagonal")
    kind: Any = {"mc": "type-1"}.get(fisher, fisher)
    exact = Fisher(risk, kind).submatrix("0.W").to_dense().diagonal().diag()
    close(diagonal.submatrix("0.W").to_dense(), exact)
    whole = KFAC(risk_of(model, X[:1], y[:1]), fisher, uncovered="diagonal")
    first = Fisher(risk_of(model, X[:1], y[:1]), kind).submatrix("0.W").to_dense().diagonal()
    close(whole.submatrix("0.W").to_dense().diagonal(), first)
    nothing = Function(lambda m, x: x @ m.W.tanh(), W=normal(3, 2)).double()
    with pytest.raises(ModelError, match="does not cover"):
        KFAC(risk_of(nothing, X, y), uncovered="skip")


def test_many_uncovered_parameters_are_not_all_listed() -> None:
    params = {f"W{i}": normal(3, 3) for i in range(7)}
    model = Function(lambda m, x: x @ sum(getattr(m, name).tanh() for name in params), **params)
    with pytest.raises(ModelError, match="and 2 more"):
        KFAC(EmpiricalRisk(model, nn.MSELoss(), (normal(2, 3), normal(2, 3))))


def test_uses_that_contradict_each_other() -> None:
    torch.manual_seed(0)
    X, y = normal(3, 4), normal(3, 4)
    shapes = {"W": normal(4, 4), "V": normal(4, 4), "b": normal(4)}
    models = {
        "one bias, two weights": Function(
            lambda m, x: nn.functional.linear(nn.functional.linear(x, m.W, m.b), m.V, m.b), **shapes
        ),
        "a bias that also scales": Function(lambda m, x: m.b * nn.functional.linear(x, m.W, m.b) @ m.V, **shapes),
        "all rows and some": Function(
            lambda m, x: (x @ m.W.T) + nn.functional.pad(x @ m.W[:2].T, (0, 2)) + x @ m.V + m.b, **shapes
        ),
        "unit vectors first": Function(lambda m, x: (x * m.W[0]) @ m.W + x @ m.V + m.b, **shapes),
    }
    for name, model in models.items():
        uncovered = inspect(model.double(), X).uncovered
        assert uncovered, name
        assert any("does not fit" in why for why in uncovered.values()), (name, uncovered)
        assert all("does not fit" in why or "shares a block" in why for why in uncovered.values()), (name, uncovered)
        with pytest.raises(ModelError, match="does not fit"):
            KFAC(EmpiricalRisk(model, nn.MSELoss(), (X, y)))
    separate = KFAC(EmpiricalRisk(models["one bias, two weights"], nn.MSELoss(), (X, y)), joint_bias=False)
    assert list(separate.blocks) == ["W", "V", "b"]


def test_unit_vectors_and_others_add_up() -> None:
    """A parameter that is multiplied and then added: its first row is an additional input, a unit vector."""
    torch.manual_seed(0)
    X, y = normal(3, 4), normal(3, 4)
    params = {"W": normal(4, 4)}

    def both(m: Any, x: Tensor) -> Any:
        return (x @ m.W).tanh() + m.W[0]

    def explicit(m: Any, x: Tensor) -> Any:
        unit = torch.eye(4, dtype=x.dtype)[:1] + 0 * x[:, :1]
        return (x @ m.W).tanh() + unit @ m.W

    for sharing in ("expand", "reduce"):
        K, L = (
            KFAC(EmpiricalRisk(Function(f, **params), nn.MSELoss(), (X, y)), sharing=sharing) for f in (both, explicit)
        )
        same(K, L)


def test_a_weight_with_and_without_bias() -> None:
    """In a use without bias, the last input is zero instead of one."""
    torch.manual_seed(0)
    params = {"W": normal(4, 4), "b": normal(4)}
    X, y = normal(3, 4), normal(3, 4)

    def f(m: Any, x: Tensor) -> Any:
        return nn.functional.linear(nn.functional.linear(x, m.W, m.b).tanh(), m.W)

    def g(m: Any, x: Tensor) -> Tensor:
        return nn.functional.linear(nn.functional.linear(x, m.W, m.b).tanh(), m.W, 0 * m.b.detach())

    for sharing in ("expand", "reduce"):
        K, L = (KFAC(EmpiricalRisk(Function(h, **params), nn.MSELoss(), (X, y)), sharing=sharing) for h in (f, g))
        same(K, L)
        assert K.blocks["W"].A.shape == (5, 5)
        count = 3 * K.blocks["W"].reduction_factor
        close(K.blocks["W"].A[-1, -1], torch.tensor(count, dtype=torch.float64))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"fisher": "type-3"}, "fisher is 'type-3'.*'mc', 'type-1'"),
        ({"sharing": "sum"}, "sharing is 'sum'.*'reduce'"),
        ({"sharing": {"0": "sum"}}, "sharing is 'sum'"),
        ({"uncovered": "ignore"}, "uncovered is 'ignore'"),
        ({"mc_samples": 0}, "mc_samples is 0"),
        ({"mc_samples": True}, "mc_samples is True"),
        ({"max_dim": 0}, "max_dim is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"columns_at_once": 1.5}, "columns_at_once is 1.5"),
        ({"first_datum": -3}, "first_datum is -3"),
    ],
)
def test_bad_settings(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        KFAC(risk_of(mlp(), *data()), **setting)


def test_bad_input() -> None:
    model, (X, y) = mlp(), data()
    with pytest.raises(DataError, match="empty"):
        KFAC(EmpiricalRisk(model, nn.CrossEntropyLoss(), []))
    huge = nn.Sequential(nn.Linear(3, 2), Apply(lambda x: x / x.abs().sum())).double()
    with torch.no_grad():
        huge.get_parameter("0.weight").fill_(0.0)
        huge.get_parameter("0.bias").fill_(0.0)
    with pytest.raises(DataError, match="not finite"):
        KFAC(risk_of(huge, X, y))
    norms = nn.Sequential(nn.Linear(3, 2), Apply(lambda x: x + 0 * x.norm(dim=1, keepdim=True).log())).double()
    nan = X.clone()
    nan[2] = 0
    with torch.no_grad():
        norms.get_parameter("0.bias").fill_(0.0)
    with pytest.raises(DataError, match="not finite"):
        KFAC(risk_of(norms, nan, y))
    sharp = nn.Sequential(nn.Linear(3, 2), Apply(lambda x: (x - x.detach()).abs().sqrt())).double()
    with pytest.raises(DataError, match=r"The gradients of block '0' are not finite"):
        KFAC(EmpiricalRisk(sharp, nn.MSELoss(), (X, normal(7, 2))), "empirical")
    big = nn.Linear(3, 2)
    large = 1e15 * torch.ones(4, 3)
    assert KFAC(EmpiricalRisk(big, nn.MSELoss(), (large, torch.zeros(4, 2)))).blocks["weight"].A.isfinite().all()
    with pytest.raises(ModelError, match="training mode"):
        KFAC(risk_of(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).double(), X, y))
    functional = Function(lambda m, x: nn.functional.batch_norm(x, None, None, m.s, training=True), s=normal(3))
    with pytest.raises(ModelError, match="training=True"):
        KFAC(EmpiricalRisk(functional, nn.MSELoss(), (X, normal(7, 3))))
    with pytest.raises(LossError):
        KFAC(EmpiricalRisk(nn.Linear(3, 2).double(), nn.HuberLoss(), (X, normal(7, 2))))
    assert KFAC(EmpiricalRisk(nn.Linear(3, 2).double(), nn.HuberLoss(), (X, normal(7, 2))), "ggn").num_data == 7


def test_nothing_is_left_behind() -> None:
    """This is also true after an exception in the middle of a backward pass, and after Ctrl-C."""
    model, (X, y) = mlp(), data()
    model.get_parameter("0.weight").grad = torch.ones(4, 3, dtype=torch.float64)
    model.get_parameter("2.weight").requires_grad_(False)
    buffer_model = nn.Sequential(model, nn.BatchNorm1d(2).double()).eval()
    state = {name: t.clone() for name, t in buffer_model.state_dict().items()}
    flags = {name: p.requires_grad for name, p in buffer_model.named_parameters()}
    attributes = {name: set(vars(p)) for name, p in buffer_model.named_parameters()}
    torch.manual_seed(5)
    rng = torch.get_rng_state()

    def interrupt(_: Tensor) -> None:
        raise KeyboardInterrupt

    for hook in (None, interrupt):
        handle = None
        if hook is not None:
            handle = model[2].register_full_backward_hook(lambda *_: interrupt(X))  # type: ignore[index]
        try:
            KFAC(risk_of(buffer_model, X, y))
        except KeyboardInterrupt:
            assert hook is not None
        if handle is not None:
            handle.remove()
        assert torch.equal(torch.get_rng_state(), rng)
        assert {name: p.requires_grad for name, p in buffer_model.named_parameters()} == flags
        assert {name: set(vars(p)) for name, p in buffer_model.named_parameters()} == attributes
        assert all(torch.equal(t, state[name]) for name, t in buffer_model.state_dict().items())
        assert not vars(X)
        assert not any(vars(b) for b in buffer_model.buffers())
        assert torch.equal(model.get_parameter("0.weight").grad, torch.ones(4, 3, dtype=torch.float64))  # type: ignore[arg-type]
        assert model.get_parameter("4.weight").grad is None
        assert not any(m._forward_hooks or m._backward_hooks for m in buffer_model.modules())
        assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("kind", [kfs.KFAC, kfs.EKFAC])
def test_a_name_stays_while_the_operator_changes(kind: type[kfs.KFAC | kfs.EKFAC]) -> None:
    risk = EmpiricalRisk(torch.nn.Linear(3, 2), torch.nn.MSELoss(), (torch.rand(9, 3), torch.rand(9, 2)))
    K = kind(risk).called("Q", "my network")
    for changed in (K.update(risk), K.to(dtype=torch.float64), copy.copy(K), copy.deepcopy(K)):
        assert (changed.formula, changed.of) == ("Q", "my network")


def test_a_name_is_saved(tmp_path: Path) -> None:
    risk = EmpiricalRisk(torch.nn.Linear(3, 2), torch.nn.MSELoss(), (torch.rand(9, 3), torch.rand(9, 2)))
    kfs.KFAC(risk).called("Q", "my network").save(tmp_path / "K")
    assert kfs.load(tmp_path / "K").of == "my network"


def test_a_shallow_copy_has_no_data() -> None:
    risk = EmpiricalRisk(torch.nn.Linear(3, 2), torch.nn.MSELoss(), (torch.rand(9, 3), torch.rand(9, 2)))
    K = kfs.KFAC(risk)
    assert copy.copy(K).risk_of is None
    assert K.risk_of is not None
    assert K.blocks is copy.copy(K).blocks
