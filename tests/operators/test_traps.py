"""Operations, models, data and vectors that often cause errors: fallbacks, refusals, and no overwritten input."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.utils.data import DataLoader, TensorDataset

from kfs import losses as kfs_losses
from kfs.errors import DataError, DtypeError, FlatteningError, LossError, ModelError, ShapeError
from kfs.operators import GGN, Fisher, Hessian, Identity, Jacobian, LinearOperator, derivatives
from kfs.operators.space import Space
from kfs.problem.risk import EmpiricalRisk
from tests.operators.contract import close
from tests.operators.problems import OPERATORS, PROBLEMS


class NoForwardMode(torch.autograd.Function):
    """A cube with a differentiable backward pass, and without forward mode."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        return 3 * ctx.saved_tensors[0] ** 2 * g


class Cube(nn.Module):
    def __init__(self, own: bool) -> None:
        super().__init__()
        self.own = own

    def forward(self, x: Tensor) -> Tensor:
        return NoForwardMode.apply(x) if self.own else x**3  # type: ignore[no-untyped-call]


def test_operations_without_forward_mode_fall_back() -> None:
    X, y = torch.randn(4, 3, dtype=torch.float64), torch.randint(3, (4,))
    results: list[list[LinearOperator]] = []
    for own in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), Cube(own), nn.Linear(3, 3)).double()
        risk = EmpiricalRisk(model, nn.CrossEntropyLoss(), (X, y))
        results.append([GGN(risk), Jacobian(risk), GGN(risk, chunk_size=1)])
    for ours, plain in zip(*results, strict=True):
        close(ours.to_dense(), plain.to_dense())


class Detached(torch.autograd.Function):
    """A multiple of the square whose backward pass is not differentiable; without gradient if the multiple is zero."""

    @staticmethod
    def forward(ctx, x, factor):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        ctx.factor = factor
        return factor * x**2

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        return 2 * ctx.factor * ctx.saved_tensors[0].detach() * g.detach(), None


def test_backward_passes_that_leave_the_graph_are_refused() -> None:
    X, W = torch.randn(4, 3, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64)
    for factor in (1.0, 0.0):

        def model(params: dict[str, Tensor], x: Tensor, factor: float = factor) -> Tensor:
            return Detached.apply(x @ params["W"], factor)  # type: ignore[no-untyped-call, no-any-return]

        risk = EmpiricalRisk(model, nn.MSELoss(), (X, X[:, :2]), params={"W": W})
        for operator in (Jacobian(risk), Jacobian(risk, chunk_size=1), GGN(risk), GGN(risk, reuse=True, chunk_size=1)):
            if factor == 0:
                assert operator.to_dense().abs().max() == 0
                continue
            with pytest.raises(ModelError, match=r"respect to 'W' cannot be differentiated.*forward mode"):
                operator.to_dense()


class InnerGradient(nn.Module):
    """Predicts a derivative of a network, as in physics-informed learning; `vmap` does not know `requires_grad_`."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(self.net(x).sum(), x, create_graph=True)[0]


def test_models_that_differentiate_fall_back_to_single_columns() -> None:
    X, y = torch.randn(5, 2, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    risk = EmpiricalRisk(InnerGradient().double(), nn.MSELoss(), (X, y))
    close(Jacobian(risk).to_dense(), Jacobian(risk).T.to_dense().T)
    close(GGN(risk).to_dense(), GGN(risk, chunk_size=1).to_dense())


@pytest.mark.parametrize("setting", [{"scale_grad_by_freq": True}, {"max_norm": 0.1}])
def test_embeddings_that_change_gradient_or_weight_are_refused(setting: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Embedding(3, 2, **setting), nn.Flatten()).double()
    before = model.get_parameter("0.weight").clone()
    risk = EmpiricalRisk(model, nn.MSELoss(), (torch.randint(3, (4, 2)), torch.randn(4, 4, dtype=torch.float64)))
    for call in (risk.value, risk.gradient, GGN(risk).to_dense, Hessian(risk).to_dense):
        with pytest.raises(ModelError, match="scale_grad_by_freq or max_norm"):
            call()
    assert torch.equal(model.get_parameter("0.weight"), before)


def test_weight_normalization_has_a_symmetric_hessian() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)).double()
    X, y = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    risk = EmpiricalRisk(nn.Sequential(layer, nn.Tanh()), nn.MSELoss(), (X, y))
    names = list(risk.params)
    sizes = [p.numel() for p in risk.params.values()]
    shapes = [p.shape for p in risk.params.values()]

    def spelled_out(theta: Tensor) -> Tensor:
        p = {n.rpartition(".")[2]: t.reshape(s) for n, t, s in zip(names, theta.split(sizes), shapes, strict=True)}
        v = p["original1"]
        W = p["original0"] * v / v.norm(dim=1, keepdim=True)
        return nn.functional.mse_loss(torch.tanh(X @ W.T + p["bias"]), y)

    theta = torch.cat([p.detach().flatten() for p in risk.params.values()])
    close(Hessian(risk).to_dense(), torch.func.hessian(spelled_out)(theta))


def test_reused_graphs_notice_every_change() -> None:
    risk, model, X, y = PROBLEMS[3].make()  # some of the parameters
    first, second = X[:2].clone(), X[2:].clone()
    batches = [(X[:0], y[:0]), (first, y[:2]), (second, y[2:])]
    risk = EmpiricalRisk(model, PROBLEMS[3].loss, batches, params=PROBLEMS[3].params)
    kept, v = GGN(risk, reuse=True), torch.randn(16, dtype=torch.float64)
    results = [kept @ v]
    close(results[0], GGN(risk) @ v)
    with torch.no_grad():
        model.get_parameter("0.weight").mul_(2)  # not among the parameters that are considered
    results.append(kept @ v)
    close(results[1], GGN(risk) @ v)
    model.get_parameter("2.weight").data.mul_(3)  # autograd does not see this change
    results.append(kept @ v)
    close(results[2], GGN(risk) @ v)
    second.mul_(2)
    results.append(kept @ v)
    close(results[3], GGN(risk) @ v)
    assert all((a - b).abs().max() > 1e-6 for a, b in pairwise(results))
    first.mul_(2)
    with pytest.raises(DataError, match="first batch has different values"):
        kept @ v


def test_shuffling_loaders_are_repeatable_and_leave_the_random_state_alone() -> None:
    _, model, X, y = PROBLEMS[1].make()
    loader = DataLoader(TensorDataset(X, y), batch_size=2, shuffle=True)
    state = torch.get_rng_state()
    risk = EmpiricalRisk(model, PROBLEMS[1].loss, loader)
    assert risk.num_data == 5
    assert torch.equal(torch.get_rng_state(), state)
    J = Jacobian(risk)
    forward = J.to_dense()
    torch.rand(3)
    close(J.T.to_dense().T, forward)
    F = Fisher(risk, "type-1")
    first = F.to_dense()
    torch.rand(3)
    close(F.to_dense(), first)


def test_group_norm_and_several_columns() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.GroupNorm(2, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    X, y = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    risk = EmpiricalRisk(model, nn.MSELoss(), (X, y))
    close(Hessian(risk).to_dense(), Hessian(risk, chunk_size=1).to_dense())


def test_ragged_predictions_are_refused() -> None:
    model = nn.Linear(2, 2).double()
    batches = [(torch.ones(2, n, 2).double(), torch.ones(2, n, 2).double()) for n in (3, 4)]
    J = Jacobian(EmpiricalRisk(model, nn.MSELoss(), batches))
    with pytest.raises(ShapeError, match="Pad the data"):
        J @ torch.ones(6, dtype=torch.float64)
    with pytest.raises(ShapeError, match="Pad the data"):
        J.T @ torch.ones(24, dtype=torch.float64)


def refuse_vmap(*_: Any, **__: Any) -> Any:
    raise RuntimeError("vmap: we do not yet support aten::something")


@pytest.mark.parametrize("kind", list(OPERATORS))
def test_operations_that_vmap_does_not_support_fall_back(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    risk, *_ = PROBLEMS[1].make()
    expected = OPERATORS[kind](risk).to_dense()
    original = torch.autograd.grad

    def grad(*args: Any, is_grads_batched: bool = False, **kwargs: Any) -> Any:
        return refuse_vmap() if is_grads_batched else original(*args, **kwargs)

    monkeypatch.setattr(derivatives, "vmap", refuse_vmap)
    monkeypatch.setattr(torch.autograd, "grad", grad)
    close(OPERATORS[kind](risk).to_dense(), expected)


def test_other_errors_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    risk, *_ = PROBLEMS[1].make()

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(derivatives, "vmap", fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        GGN(risk).to_dense()
    monkeypatch.setattr(torch.autograd, "grad", fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        Jacobian(risk).T @ torch.ones(15, 2, dtype=torch.float64)


def test_bad_settings_are_refused() -> None:
    risk, *_ = PROBLEMS[0].make()
    for wrong in (0, 2.5):
        with pytest.raises(ModelError, match="at least one column"):
            GGN(risk, chunk_size=wrong)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="block_diagonal is 'block'"):
        Hessian(risk, block_diagonal="block")  # type: ignore[arg-type]
    with pytest.raises(LossError, match="kind is 'monte carlo'"):
        Fisher(risk, "monte carlo")  # type: ignore[arg-type]
    wrong_settings: list[dict[str, Any]] = [{"mc_samples": 0}, {"mc_samples": 1.5}, {"seed": -1}, {"seed": 0.5}]
    for settings in wrong_settings:
        with pytest.raises(LossError, match="at least one sample"):
            Fisher(risk, "type-1", **settings)


def test_bad_vectors_are_refused() -> None:
    risk, *_ = PROBLEMS[0].make()
    H = Hessian(risk)
    v = {name: torch.ones_like(p) for name, p in risk.params.items()}
    with pytest.raises(ShapeError, match=r"shape \[3\], but the operator acts on 31 numbers"):
        H @ torch.ones(3, dtype=torch.float64)
    with pytest.raises(ShapeError, match="acts on 31 numbers"):
        H @ torch.ones(31, 1, 1, dtype=torch.float64)
    with pytest.raises(DtypeError, match=r"vector is torch\.float32 on cpu, but the operator is torch\.float64"):
        H @ torch.ones(31)
    with pytest.raises(DtypeError, match="A list cannot be multiplied"):
        H @ [1.0]  # type: ignore[list-item]
    with pytest.raises(DtypeError, match="A ndarray cannot be multiplied"):
        torch.ones(31).numpy() @ H
    with pytest.raises(ShapeError, match=r"lacks '0.weight', and has 'w' too many"):
        H @ {("w" if name == "0.weight" else name): t for name, t in v.items()}
    with pytest.raises(ShapeError, match=r"'0.bias' has shape \[1\], but the parameter has shape \[4\]"):
        H @ (v | {"0.bias": torch.ones(1, dtype=torch.float64)})
    mixed = {name: t.expand(2 if name == "0.bias" else 3, *t.shape) for name, t in v.items()}
    with pytest.raises(ShapeError, match="one more axis in front, of one length"):
        H @ mixed
    with pytest.raises(ShapeError, match=r"shapes \[\[4, 3\]\].*one tensor for each of"):
        H @ [v["0.weight"]]
    for index in (torch.tensor([31]), torch.tensor([0.5]), torch.ones(30) > 0, [-32], torch.tensor(3)):
        with pytest.raises(ShapeError, match=r"does not choose among 31 entries.*mask of 31 booleans"):
            H.submatrix(index)
    with pytest.raises(FlatteningError, match="flattening='cvec' or flattening='rvec'"):
        H.to_dense("vec")
    with pytest.raises(ModelError, match=r"no parameters \['w'\]"):
        H.submatrix(["w"])
    with pytest.raises(ModelError, match=r"no parameters \['w'\]"):
        H.submatrix({"w", "0.bias"})
    with pytest.raises(ModelError, match="No parameters are named"):
        H.submatrix([])
    assert H.submatrix("0.bias").shape == (4, 4)
    subset, *_ = PROBLEMS[3].make()
    with pytest.raises(ShapeError, match="risks with the same params"):
        H + Hessian(subset)
    with pytest.raises(ShapeError, match="risks with the same params"):
        H @ Hessian(subset)
    assert H.domain != 3
    assert hash(H.domain) == hash(Hessian(risk).domain)


def test_bad_operands_are_refused() -> None:
    risk, *_ = PROBLEMS[0].make()
    H: Any = Hessian(risk)
    single = Identity(Space(H.domain.shapes, torch.float32, H.device))
    with pytest.raises(DtypeError, match=r"torch\.float64 and torch\.float32 cannot be added.*one dtype"):
        H + single
    with pytest.raises(DtypeError, match="cannot be multiplied"):
        H @ single
    assert H.domain != single.domain
    for wrong in (H, "a", torch.ones(2)):
        for call in (H.shift, lambda factor: H * factor):
            with pytest.raises(DtypeError, match=r"scaled or shifted by a (Hessian|str|Tensor)\. Pass a number"):
                call(wrong)
    with pytest.raises(DtypeError, match="divided by zero"):
        H / 0
    for call in (lambda: H + 1, lambda: H - 1):
        with pytest.raises(DtypeError, match=r"A (int|float) cannot be added.*A\.shift\(number\)"):
            call()
    v = torch.ones(31, dtype=torch.float64)
    close((torch.tensor(2.0) * H) @ v, 2 * (H @ v))


class Constant(nn.Module):
    """A prediction that does not depend on one parameter, and has no curvature in another one."""

    def __init__(self) -> None:
        super().__init__()
        self.slope, self.unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.slope


def test_unused_parameters_and_vanishing_curvature() -> None:
    model = Constant().double()
    X, y = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    risk = EmpiricalRisk(model, nn.MSELoss(), (X, y))
    for operator in (Hessian(risk), GGN(risk), GGN(risk, chunk_size=1), Fisher(risk, "empirical")):
        dense = operator.to_dense()
        assert dense[3].abs().max() == dense[:, 3].abs().max() == 0
        assert dense[:3, :3].abs().max() > 0
    assert Jacobian(risk).to_dense()[:, 3].abs().max() == 0
    assert (Jacobian(risk).T @ torch.ones(12, dtype=torch.float64))[3] == 0
    assert GGN(risk).diagonal()[3] == 0
    linear = EmpiricalRisk(model, lambda f, y: (f * y).sum(), (X, y))
    for chunk_size in (1, 4):
        assert Hessian(linear, chunk_size=chunk_size).to_dense().abs().max() == 0
    column = torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    assert (Jacobian(risk) @ column).abs().max() == 0
    for operator in (GGN(risk), Hessian(risk), GGN(risk, block_diagonal=True), Hessian(risk, block_diagonal=True)):
        assert operator.submatrix(name for name in ["unused"]).to_dense().abs().max() == 0
    assert (GGN(risk).shift(1.0).submatrix(n for n in ["unused"]).to_dense() == 1).all()
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    assert not any(t.requires_grad for t in (GGN(risk).shift(1.0) @ parameters).values())
    alone = GGN(EmpiricalRisk(model, nn.MSELoss(), (X, y), params=["unused"]), reuse=True)
    assert (alone @ column[3:]).abs().max() == 0
    constant = EmpiricalRisk(lambda params, x: x, nn.MSELoss(), (X, y), params={"W": torch.ones(2).double()})  # noqa: ARG005
    for operator in (GGN(constant, reuse=True), GGN(constant), Hessian(constant), Fisher(constant, "empirical")):
        assert (operator @ torch.ones(2, dtype=torch.float64)).abs().max() == 0


def half_norm(f: Tensor, y: Tensor) -> Tensor:  # noqa: ARG001
    return 0.5 * (f**2).sum()


class Itself(nn.Module):
    """Predicts its parameter, so the Hessian of half the squared norm is the identity."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.p.expand(len(x), 3)


@pytest.mark.parametrize("kind", list(OPERATORS))
def test_vectors_are_not_overwritten(kind: str) -> None:
    X = torch.zeros(4, 1, dtype=torch.float64)
    loss = kfs_losses.Custom(half_norm, reduction="sum", likelihood=lambda f: Categorical(logits=f))
    risk = EmpiricalRisk(Itself().double(), loss, [(X, X)] * 3)
    for shape in ((3,), (3, 2)):
        v = torch.randn(shape, dtype=torch.float64)
        copy = v.clone()
        result = OPERATORS[kind](risk) @ v
        assert torch.equal(v, copy)
        if kind in {"hessian", "ggn"}:
            close(result, 12 * v)


def test_chunks_fit_into_memory() -> None:
    risk, *_ = PROBLEMS[0].make()
    sizes = [GGN(risk, memory=memory).chunk_size for memory in (1, 5_000, 10_000, 10**9)]
    assert sizes[0] == 1 < sizes[1] < sizes[2] < sizes[3] == 16
    assert [Fisher(risk, memory=10**9, chunk_size=3).chunk_size, Jacobian(risk, memory=1).chunk_size] == [3, 1]
    close(GGN(risk, memory=5_000).to_dense(), GGN(risk).to_dense())
    with pytest.raises(ModelError, match="memory is 0"):
        Hessian(risk, memory=0)


@pytest.mark.parametrize("sizes", [(1, 4), (4, 1), (1, 4, 2)])
def test_chunks_fit_into_memory_for_the_largest_batch(sizes: tuple[int, ...]) -> None:
    model, X = nn.Linear(3, 3).double(), torch.randn(sum(sizes), 3, dtype=torch.float64)
    batches = list(zip(X.split(sizes), X.split(sizes), strict=True))

    def chunk_sizes(*data: Any) -> list[int]:
        risk = EmpiricalRisk(model, nn.MSELoss(), list(data))
        return [GGN(risk, memory=memory).chunk_size for memory in range(100, 5000, 50)]

    assert chunk_sizes(*batches) == chunk_sizes(batches[sizes.index(4)]) != chunk_sizes(batches[sizes.index(1)])
