"""Rare uses of a parameter: covered ones agree with a plain model, the others are reported."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from kfs import load, per_datum
from kfs.errors import ModelError
from kfs.factors import EKFAC, KFAC, inspect
from kfs.operators import GGN
from kfs.problem.risk import EmpiricalRisk
from tests.factors.models import Function, between
from tests.factors.test_traps import normal, same
from tests.operators.contract import close


def factors(function: Callable[..., Tensor], X: Tensor, y: Tensor, sharing: Any = "expand", **params: Tensor) -> KFAC:
    model = Function(function, **params).double()
    return KFAC(EmpiricalRisk(model, nn.MSELoss(), (X, y)), sharing=sharing)


NOT_COVERED: dict[str, tuple[Callable[..., Tensor], dict[str, Tensor]]] = {
    "weights of each example": (
        lambda m, x: (m.W[(x[:, 0] > 0).long()] @ x.unsqueeze(2))[..., 0],
        {"W": normal(2, 4, 4)},
    ),
    "two parameters": (lambda m, x: x @ (m.W @ m.V), {"W": normal(4, 2), "V": normal(2, 4)}),
    "einsum of two parameters": (
        lambda m, x: x @ torch.einsum("ij,jk->ik", m.W, m.V),
        {"W": normal(4, 2), "V": normal(2, 4)},
    ),
    "einsum with a constant": (
        lambda m, x: x @ torch.einsum("ij,jk->ik", torch.eye(4).to(x), m.W),
        {"W": normal(4, 4)},
    ),
    "einsum with a column view": (
        lambda m, x: torch.einsum("ni,io->no", x, m.W[:, ::2]),
        {"W": normal(4, 8)},
    ),
    "column view": (lambda m, x: F.linear(x, m.W[:, ::2]), {"W": normal(4, 8)}),
    "odd bias": (lambda m, x: F.linear(x, m.W, m.b[::2]), {"W": normal(4, 4), "b": normal(8)}),
    "bias of another rank": (
        lambda m, x: F.linear(x, torch.ones(4, 4, dtype=x.dtype), m.b[0, 1]),
        {"b": normal(2, 2, 4)},
    ),
    "copied part": (lambda m, x: x @ m.W[:2].clone().repeat(2, 1), {"W": normal(4, 4)}),
    "copied columns": (lambda m, x: x @ m.W[:, ::2].contiguous(), {"W": normal(4, 8)}),
    "strided parameter": (lambda m, x: x * m.W, {"W": torch.randn(1, 8)[:, ::2]}),
    "two results": (lambda m, x: x @ torch.linalg.eigh(m.W + m.W.T)[1], {"W": normal(4, 4)}),
    "columns of a scale": (
        lambda m, x: F.layer_norm(x.reshape(-1, 2, 2), (2, 2), m.s[:, ::2]).flatten(1),
        {"s": normal(2, 4)},
    ),
    "learned queries": (
        lambda m, x: F.scaled_dot_product_attention(m.q.tanh(), x.unsqueeze(1), x.unsqueeze(1)).squeeze(1),
        {"q": normal(1, 1, 4)},
    ),
}


@pytest.mark.parametrize("name", NOT_COVERED)
def test_not_covered(name: str) -> None:
    function, params = NOT_COVERED[name]
    model = between(Function(function, **params)).double()
    if name == "strided parameter":
        model[2].W = nn.Parameter(torch.randn(1, 8).double()[:, ::2])  # type: ignore[index]
    table = inspect(model, normal(3, 3))
    assert table.uncovered, str(table)
    reasons = ("no rule", "does not take", "no operation")
    assert all(any(reason in why for reason in reasons) for why in table.uncovered.values())


class Double(torch.autograd.Function):
    """A product that no mode sees."""

    @staticmethod
    def forward(ctx, x, W):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, W)
        return x @ W

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        x, W = ctx.saved_tensors
        return g @ W.T, x.T @ g


HIDDEN: dict[str, tuple[Callable[..., Tensor], str]] = {
    "in place": (lambda m, x: (F.linear(x, m.W) + 0).addmm_(x.tanh(), m.W), "addmm_"),
    "result ignored": (lambda m, x: _write(F.linear(x, m.W) + 0, m.W), "__setitem__"),
    "custom function": (lambda m, x: F.linear(x, m.W) + Double.apply(x, m.W), "Double"),  # type: ignore[no-untyped-call]
    "torch.func": (lambda m, x: F.linear(x, m.W) + torch.vmap(lambda v: m.W @ v)(x), "inside of torch.func"),
    "norm of a parameter": (lambda m, x: x @ F.layer_norm(m.W, (4,), m.W[0]), "matmul"),
}


def _write(h: Tensor, W: Tensor) -> Tensor:
    h[:, 0] = W[0, 0]
    return h


@pytest.mark.parametrize("name", HIDDEN)
def test_uses_that_are_easily_missed_are_reported(name: str) -> None:
    """Beside a use that has a rule, they would silently make the factors wrong."""
    function, operation = HIDDEN[name]
    uncovered = inspect(between(Function(function, W=normal(4, 4))).double(), normal(3, 3)).uncovered
    assert list(uncovered) == ["2.W"]
    assert operation in uncovered["2.W"]


def test_operations_in_place_run_once() -> None:
    p = normal(3)
    model = nn.Sequential(
        Function(lambda m, x: (x + 0).lerp_(m.p.expand(len(x), -1), 0.5), p=p), nn.Linear(3, 2)
    ).double()
    X, y = normal(4, 3), normal(4, 2)
    K = KFAC(EmpiricalRisk(model, nn.MSELoss(), (X, y)), uncovered="skip")
    expected = (X + p) / 2
    close(K.blocks["1"].A[:-1, :-1], K.blocks["1"].reduction_factor * expected.T @ expected)


def test_models_that_differentiate_themselves_are_refused() -> None:
    def force(m: Any, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(F.linear(x, m.W).tanh().sum(), x, create_graph=True)[0]

    risk = EmpiricalRisk(Function(force, W=normal(4, 4)), nn.MSELoss(), (normal(3, 4), normal(3, 4)))
    with pytest.raises(ModelError, match="differentiates its own predictions"):
        KFAC(risk)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_tied_autoencoders(sharing: Any) -> None:
    """Both uses of the weight are in its block, on opposite sides; biases have separate blocks."""
    torch.manual_seed(0)
    X, y = normal(4, 3), normal(4, 3)
    params = {"W": normal(5, 3), "b": normal(5), "c": normal(3)}
    model = Function(lambda m, x: F.linear(F.linear(x, m.W, m.b).tanh(), m.W.T, m.c), **params)
    untied = Function(lambda m, x: F.linear(F.linear(x, m.W, m.b).tanh(), m.V, m.c), **params, V=params["W"].T.clone())
    risk = EmpiricalRisk(model, nn.MSELoss(), (X, y))
    K = KFAC(risk, sharing=sharing)
    alone = KFAC(EmpiricalRisk(untied, nn.MSELoss(), (X, y)), sharing=sharing, joint_bias=False)
    assert list(K.blocks) == ["W", "b", "c"]
    for side, name in (("A", "W"), ("B", "V")):
        role, other = K.blocks["W"].sums.roles[side], alone.blocks[name].sums.roles["A"]  # type: ignore[index]
        close(role.input.total, other.input.total)
        close(role.gradient.total, other.gradient.total)
    for name in ("b", "c"):
        close(K.submatrix([name]).to_dense(), alone.submatrix([name]).to_dense())
    assert (K.eigenvalues() > -1e-12 * K.trace()).all()
    one = EmpiricalRisk(model, nn.MSELoss(), (X[:1], y[:1]))
    close(KFAC(one, sharing=sharing).submatrix(["b", "c"]).to_dense(), _blocks(GGN(one), ["b", "c"]))
    close(EKFAC(risk, sharing=sharing).trace(), GGN(risk).to_dense().trace())
    same(K, KFAC(risk, sharing=sharing, joint_bias=False))
    with pytest.raises(ModelError, match=r"does not fit.*joint_bias=False"):
        KFAC(risk, sharing=sharing, audit=False)
    forward = KFAC(risk, "forward-only", sharing=sharing)
    B = forward.blocks["W"].B
    close(B if B.ndim == 2 else B.diag(), torch.eye(5, dtype=torch.float64))


def _blocks(G: GGN, names: list[str]) -> Tensor:
    blocks: Tensor = torch.block_diag(*(G.submatrix([name]).to_dense() for name in names))
    return blocks


def test_dropout_of_recurrent_networks() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(3, 2, num_layers=2, dropout=0.5, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.rnn(x)[0][:, -1]
            return result

    with pytest.raises(ModelError, match="predictions are random"):
        KFAC(EmpiricalRisk(Noisy().double(), nn.MSELoss(), (normal(4, 5, 3), normal(4, 2))))


def test_several_inputs() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(3, 2), nn.Linear(4, 2)

        def forward(self, x: Tensor, z: Tensor, scale: float) -> Tensor:
            result: Tensor = self.one(x) + scale * self.other(z).tanh()
            return result

    torch.manual_seed(0)
    model, X, Z, y = Two().double(), normal(1, 3), normal(1, 4), normal(1, 2)
    risk = EmpiricalRisk(model, nn.MSELoss(), [((X, Z, 2.0), y)])
    K, G = KFAC(risk), GGN(risk)
    for block in K.blocks.values():
        names = block.layout.params
        close(K.submatrix(names).to_dense(), G.submatrix(names).to_dense())


def test_other_ways_to_call() -> None:
    torch.manual_seed(0)
    X, y, W, b = normal(3, 4), normal(3, 4), normal(4, 4), normal(4)
    plain = factors(lambda m, x: torch.addmm(m.b, x, m.W), X, y, W=W, b=b)
    same(factors(lambda m, x: torch.addmm(m.b, mat1=x, mat2=m.W), X, y, W=W, b=b), plain)
    product = factors(lambda m, x: x @ m.W, X, y, W=W)
    for function in (
        lambda m, x: torch.matmul(x, other=m.W),
        lambda m, x: torch.mm(x, mat2=m.W),
    ):
        same(factors(function, X, y, W=W), product)
    same(factors(lambda m, x: torch.add(x, other=m.b), X, y, b=b), factors(lambda m, x: x + m.b, X, y, b=b))
    norm = factors(lambda m, x: torch.layer_norm(x, (4,), m.b, None, 1e-5, False), X, y, b=b)
    same(norm, factors(lambda m, x: F.layer_norm(x, (4,), m.b), X, y, b=b))
    for wrong in (
        lambda m, x: F.linear(x, m.W, m.s),
        lambda m, x: torch.addmm(m.M, x, m.W) + 0 * m.s,
        lambda m, x: F.linear(x, x.detach().T @ x.detach(), m.s) @ m.W,
    ):
        model = Function(wrong, W=W, s=normal(1), M=normal(3, 4)).double()
        assert inspect(model, X, audit=False).uncovered  # the last one mixes data, too


def test_parts_that_do_not_matter_are_no_obstacle() -> None:
    """Norms that are logged, and unused copies, do not change coverage."""

    def f(m: Any, x: Tensor) -> Tensor:
        m.seen = float(m.W.norm().detach()) + m.W.tanh().sum().item()
        assert m.W.shape == (4, 4)
        zeros = torch.zeros_like(x)
        zeros[:, :2] = x[:, :2]  # data are written into a constant
        return F.linear(zeros, m.W)

    X, y = normal(3, 4), normal(3, 4)
    W = normal(4, 4)
    plain = factors(lambda m, x: F.linear(torch.cat([x[:, :2], 0 * x[:, 2:]], 1), m.W), X, y, W=W)
    same(factors(f, X, y, W=W), plain)
    unused = Function(lambda m, x: F.linear(x, m.W), W=W)
    unused.empty = nn.Parameter(torch.zeros(0))
    assert not inspect(unused.double(), X).uncovered


@pytest.mark.parametrize("audit", [True, False])
def test_parameters_that_are_not_used(audit: bool, tmp_path: Path) -> None:
    """They are reported without an error: predictions do not depend on them, so their curvature is zero."""
    torch.manual_seed(0)
    X, y = normal(1, 4), normal(1, 3)
    function: Any = lambda m, x: (m.mask.norm(), m.second @ x.mT, F.linear(x, m.W))[2]  # noqa: E731
    model = Function(function, mask=normal(1, 4), W=normal(3, 4), second=normal(2, 4), scale=torch.randn([]))
    risk = EmpiricalRisk(model.double(), nn.MSELoss(), (X, y))
    K = KFAC(risk, audit=audit)
    assert list(K.blocks) == ["W", "second"]
    close(K.to_dense(), GGN(risk).to_dense())
    close(EKFAC(risk, audit=audit).to_dense(), GGN(risk).to_dense())
    v = torch.randn(K.shape[0], dtype=torch.float64)
    close(K.inverse(0.5) @ v, torch.linalg.solve(GGN(risk).to_dense() + 0.5 * torch.eye(len(v)).double(), v))
    K.save(tmp_path / "k")
    close(load(tmp_path / "k").to_dense(), K.to_dense())
    assert list(KFAC(risk, audit=audit, uncovered="skip").domain.shapes) == ["W", "second"]
    assert not any(batch.tensors()["mask"].any() for batch in per_datum(risk))
    table = inspect(model, X, audit=audit)
    assert not table.uncovered
    assert {row.parameter for row in table.rows if row.operations == ("none",)} == {"mask", "scale"}
    if audit:
        assert K.audit is not None
        assert K.audit.unused == ("mask", "second", "scale")  # the second is used, but predictions do not depend on it
        assert "mask: not used" in str(K.audit)
    with pytest.raises(ModelError, match="'scale'"):
        KFAC(EmpiricalRisk(model, nn.MSELoss(), (X, y), params=["mask", "scale"]), audit=audit)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_biases_alone(sharing: Any) -> None:
    """If the weight is excluded, the bias has the same factor as in the joint block."""
    torch.manual_seed(0)
    layers = {
        "linear": (nn.Linear(3, 4), normal(5, 6, 3)),
        "conv": (nn.Conv1d(3, 4, 3, groups=1), normal(5, 3, 6)),
        "groups": (nn.Conv1d(4, 6, 3, groups=2), normal(5, 4, 6)),
        "transposed": (nn.ConvTranspose1d(4, 6, 3, groups=2), normal(5, 4, 6)),
    }
    for name, (layer, X) in layers.items():
        model = nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.LazyLinear(2)).double()
        model(X)
        y = torch.randint(2, (5,))
        whole = KFAC(EmpiricalRisk(model, nn.CrossEntropyLoss(), (X, y)), sharing=sharing, joint_bias=False)
        alone = KFAC(EmpiricalRisk(model, nn.CrossEntropyLoss(), (X, y), params=["0.bias"]), sharing=sharing)
        close(alone.blocks["0.bias"].B, whole.blocks["0.bias"].B)
        close(alone.blocks["0.bias"].A, whole.blocks["0.bias"].A)
        assert alone.blocks["0.bias"].operations == {"bias"}, name


def test_images_that_are_not_batched() -> None:
    class Single(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([self.layer(image) for image in x]).flatten(1)

    for layer in (nn.Conv1d(2, 2, 1), nn.ConvTranspose1d(2, 2, 1)):
        uncovered = inspect(Single(layer).double(), normal(3, 2, 4)).uncovered
        assert set(uncovered) == {"layer.weight", "layer.bias"}
    for function in (F.conv1d, F.conv_transpose1d):
        model = Function(
            lambda m, x, function=function: function(x.unsqueeze(2), m.W[:4]).squeeze(2), W=normal(8, 4, 1)
        )
        assert list(inspect(model.double(), normal(3, 4)).uncovered) == ["W"]


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_normalizations_over_several_axes_and_instances(sharing: Any) -> None:
    """Their scales agree with separate multiplications, and unused ones are left out."""
    torch.manual_seed(0)
    X, y = normal(3, 2, 4), normal(3, 2, 4)
    s, b = normal(2, 4), normal(2, 4)
    fused = factors(lambda m, x: F.layer_norm(x, (2, 4), m.s, m.b).tanh(), X, y, sharing, s=s, b=b)
    apart = factors(lambda m, x: (F.layer_norm(x, (2, 4)) * m.s + m.b).tanh(), X, y, sharing, s=s, b=b)
    same(fused, apart)
    assert fused.blocks["s"].A.shape == (2,)
    assert fused.blocks["s"].B.shape == (4, 4)
    c, d = normal(2), normal(2)
    fused = factors(lambda m, x: F.instance_norm(x, None, None, m.c, m.d).tanh(), X, y, sharing, c=c, d=d)
    apart = factors(lambda m, x: (F.instance_norm(x) * m.c[:, None] + m.d[:, None]).tanh(), X, y, sharing, c=c, d=d)
    same(fused, apart)
    half = nn.Sequential(nn.LayerNorm(4), nn.Flatten()).double()
    half.get_parameter("0.bias").requires_grad_(False)
    assert list(KFAC(EmpiricalRisk(half, nn.MSELoss(), (X, y.flatten(1)))).blocks) == ["0.weight"]


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_parts_of_rows(sharing: Any) -> None:
    """Entries of a row that are not used have no curvature."""
    torch.manual_seed(0)
    P, X, y = normal(3, 4), normal(5, 2), normal(5, 2)
    K = factors(lambda m, x: (x * m.P[1, 1:3]).tanh(), X, y, sharing, P=P)
    dense = K.to_dense().reshape(3, 4, 3, 4)
    assert dense[:, 0].abs().max() == dense[:, 3].abs().max() == 0
    vector = factors(lambda m, x: (x * m.v).tanh(), X, y, sharing, v=P[1, 1:3].clone())
    close(dense[1, 1:3, 1, 1:3], vector.to_dense())
    swapped = factors(
        lambda m, x: (x[:, None] * m.P.T[1:3]).sum((1, 2)).tanh()[:, None] * x,
        X.repeat(1, 2)[:, :3],
        normal(5, 3),
        sharing,
        P=P,
    )
    assert swapped.blocks["P"].B[0].abs().max() == 0 < swapped.blocks["P"].B[1, 2].abs()


def test_learned_queries_states_and_sparse_matrices() -> None:
    """A parameter expanded over the batch, in attention; a copied table that has a batch axis; a graph."""
    torch.manual_seed(0)
    X, y, q, W = normal(3, 4), normal(3, 4), normal(1, 1, 4), normal(5, 4)

    def attend(query: Tensor, x: Tensor) -> Tensor:
        keys = torch.stack([x, x.tanh()], 1)
        return F.scaled_dot_product_attention(query, keys, keys).squeeze(1)

    expanded = factors(lambda m, x: attend(m.q.expand(len(x), 1, 4), x), X, y, q=q)
    added = factors(lambda m, x: attend(m.q + 0 * x.unsqueeze(1), x), X, y, q=q)
    same(expanded, added)

    copied = factors(lambda m, x: (x + F.embedding(torch.ones(len(x)).long(), m.W).clone()).tanh(), X, y, W=W)
    plain = factors(lambda m, x: (x + F.embedding((0 * x[:, 0]).long() + 1, m.W)).tanh(), X, y, W=W)
    same(copied, plain)

    graph = torch.eye(3, dtype=torch.float64).to_sparse()
    sparse = factors(lambda m, x: torch.sparse.mm(graph, x @ m.V).tanh(), X, y, V=normal(4, 4))
    assert list(sparse.blocks) == ["V"]


def test_splits_that_differ() -> None:
    """One weight used as two different matrices has no single pair of factors."""
    twice = Function(
        lambda m, x: (
            torch.einsum("ni,iab->nab", x[:, :2], m.W)[:, 0] + torch.einsum("nia,iab->nb", x.reshape(-1, 2, 2), m.W)
        ),
        W=normal(2, 2, 2),
    )
    uncovered = inspect(twice.double(), normal(3, 4)).uncovered
    assert uncovered == {"W": "its use by 'einsum' does not fit together with its other uses"}


def test_precision_of_parameters_that_are_cast() -> None:
    torch.manual_seed(0)
    W, X, y = normal(4, 4), normal(3, 4), normal(3, 4)
    cast = factors(lambda m, x: F.linear(x.float(), m.W.float()).double(), X, y, W=W)
    plain = factors(lambda m, x: F.linear(x, m.W.to(x.dtype)), X, y, W=W)
    torch.testing.assert_close(cast.blocks["W"].A.double(), plain.blocks["W"].A, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(cast.blocks["W"].B.double(), plain.blocks["W"].B, rtol=1e-5, atol=1e-6)


def test_scaled_products_and_one_vector() -> None:
    """`x @ W` from the other side; and a prediction from one vector for the only example."""
    torch.manual_seed(0)
    W, X, y = normal(4, 4), normal(3, 4), normal(3, 4)
    left = factors(lambda m, x: m.W.__rmatmul__(x), X, y, W=W)
    same(left, factors(lambda m, x: x @ m.W, X, y, W=W))
    single = EmpiricalRisk(Function(lambda m, x: F.linear(x[0], m.W).unsqueeze(0), W=W), nn.MSELoss(), (X[:1], y[:1]))
    close(KFAC(single).to_dense(), GGN(single).to_dense())
