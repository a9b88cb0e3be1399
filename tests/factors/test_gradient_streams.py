"""Results and side effects of `per_datum`: scaling, quantities, uncovered parameters, products, errors."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kfs
from kfs.errors import KfsError, LossError, ModelError, ShapeError
from kfs.factors import BlockGradients, GradientBatch, exact_blocks
from kfs.factors.accumulate import KeptGradients, PlainVectors, RowProducts, UnitVectors
from kfs.factors.blocks import Eigenbasis
from kfs.factors.layout import Layout
from kfs.factors.per_example import joined_gradients
from tests.factors.models import Function
from tests.factors.one_by_one import close


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def data(num_data: int = 6) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(num_data, 3, dtype=torch.float64), torch.randint(3, (num_data,))


def batches(X: Tensor, y: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(X.split(size), y.split(size), strict=True))


def risk_of(model: Any = None, size: int = 4, loss: Any = None, **settings: Any) -> kfs.EmpiricalRisk:
    return kfs.EmpiricalRisk(model or mlp(), loss or nn.CrossEntropyLoss(), batches(*data(), size), **settings)


def all_of(stream: Iterator[GradientBatch]) -> dict[str, Tensor]:
    parts = [batch.tensors() for batch in stream]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_scale(reduction: str) -> None:
    """Gradients are those of unscaled terms: their sum times the reduction factor is the risk's gradient."""
    risk = risk_of(loss=nn.CrossEntropyLoss(reduction=reduction))
    found = all_of(kfs.per_datum(risk))
    for name, g in risk.gradient().items():
        close(risk.reduction_factor * found[name].sum(0), g)
        assert reduction == "sum" or not torch.allclose(found[name].sum(0), g)
    places = [(batch.start, batch.stop, len(batch)) for batch in kfs.per_datum(risk)]
    assert places == [(0, 4, 4), (4, 6, 2)]


def test_quantities() -> None:
    """For another quantity, the gradient equals the one that vmap computes."""
    model, (X, y) = mlp(), data()
    params = {name: p.detach() for name, p in model.named_parameters()}

    def margin(params: Any, x: Tensor, label: Tensor) -> Tensor:
        p = torch.func.functional_call(model, params, (x,)).softmax(-1).gather(-1, label[None])
        value: Tensor = (p / (1 - p)).log().sum()
        return value

    expected = torch.func.vmap(torch.func.grad(margin), (None, 0, 0))(params, X, y)
    found = all_of(kfs.per_datum(risk_of(model), "margin"))
    square = all_of(kfs.per_datum(risk_of(model), lambda f, y: f.softmax(0)[y].log() - (1 - f.softmax(0)[y]).log()))
    for name in expected:
        close(found[name], expected[name])
        close(square[name], expected[name])
    with pytest.raises(LossError, match=r"There is no quantity 'lost'. Did you mean 'loss'"):
        kfs.per_datum(risk_of(), "lost")  # type: ignore[arg-type]


def test_state_is_untouched_between_batches() -> None:
    """Between batches, the caller has its own modes, flags and random numbers, also after stopping in the middle."""
    model = mlp()
    model[0].weight.requires_grad_(False)
    risk = risk_of(model, size=2, params=["0.weight", "2.weight"])
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    drawn = []
    stream = kfs.per_datum(risk)
    with torch.no_grad():
        for place, batch in enumerate(stream):
            assert not torch.is_grad_enabled()
            assert not model[0].weight.requires_grad
            assert model[0].weight.grad is None
            assert not batch.blocks["0.weight"].dense().requires_grad
            drawn.append(torch.rand(1))
            if place == 1:
                stream.close()  # type: ignore[attr-defined]
                break
    drawn.append(torch.rand(1))
    assert torch.equal(torch.cat(drawn), expected)
    assert torch.is_grad_enabled()
    assert risk.params["0.weight"] is model[0].weight


def test_a_function_with_parameters() -> None:
    """Parameters that do not belong to a module are replaced by leaves in every pass."""
    params = {"W": torch.randn(3, 3, dtype=torch.float64), "b": torch.randn(3, dtype=torch.float64)}
    risk = kfs.EmpiricalRisk(
        lambda p, x: x @ p["W"].T + p["b"], nn.CrossEntropyLoss(), batches(*data(), 2), params=params
    )
    for step in range(3):
        params["b"].requires_grad_(step == 1)
        found = all_of(kfs.per_datum(risk))
        for name, g in risk.gradient().items():
            close(risk.reduction_factor * found[name].sum(0), g)
        if step == 0:
            params["W"].data = 2 * params["W"].data  # other memory


def with_cosine(m: Any, x: Tensor) -> Tensor:
    """One parameter is used by an operation without a rule, another one shares its block."""
    inverse: Tensor = torch.linalg.inv(m.V + 3 * torch.eye(3, dtype=x.dtype))
    return nn.functional.linear(x, m.W, m.b).tanh() @ inverse


def uncovered_model() -> nn.Module:
    torch.manual_seed(0)
    return Function(with_cosine, W=torch.randn(3, 3), b=torch.randn(3), V=torch.randn(3, 3)).double()


def test_uncovered_parameters() -> None:
    risk = risk_of(uncovered_model())
    with pytest.raises(ModelError, match=r"KFAC does not cover all parameters .'V'"):
        list(kfs.per_datum(risk))
    (first, *_) = kfs.per_datum(risk, uncovered="skip")
    assert "V" not in first.blocks
    assert not first.tensors()["V"].any()
    found = all_of(kfs.per_datum(risk, uncovered="autograd"))
    for name, g in risk.gradient().items():
        close(risk.reduction_factor * found[name].sum(0), g)
    with pytest.raises(ModelError, match=r"uncovered is 'autogrd'. Did you mean 'autograd'"):
        kfs.per_datum(risk, uncovered="autogrd")  # type: ignore[arg-type]


def test_uncovered_parameters_of_an_operator() -> None:
    """An operator that has the exact diagonal of a parameter gets its gradients, and one that skips it does not."""
    risk = risk_of(uncovered_model())
    found = all_of(kfs.per_datum(risk, blocks=kfs.KFAC(risk, uncovered="diagonal")))
    for name, g in risk.gradient().items():
        close(risk.reduction_factor * found[name].sum(0), g)
    (first, *_) = kfs.per_datum(risk, blocks=kfs.KFAC(risk, uncovered="skip"))
    assert list(first.blocks) == ["W"]
    some = kfs.KFAC(risk_of(params=["0.weight", "0.bias"]))
    (first, *_) = kfs.per_datum(risk_of(), blocks=some)
    assert list(first.blocks) == ["0"]
    other = Function(lambda m, x: torch.cat([x @ m.W[:2].T, x[:, :1]], 1), W=torch.randn(3, 3)).double()
    K = kfs.KFAC(risk_of(Function(lambda m, x: x @ m.W.T, W=torch.randn(3, 3)).double()))
    with pytest.raises(ModelError, match=r"The parameters \['W'\] are used in another way"):
        list(kfs.per_datum(risk_of(other), blocks=K))


def test_uncovered_with_its_bias() -> None:
    """If a weight is used in two ways, its bias is not covered either."""

    def twice(m: Any, x: Tensor) -> Tensor:
        inverse: Tensor = torch.linalg.inv(m.W)
        return nn.functional.linear(x, m.W, m.b) + (x @ inverse).tanh()

    torch.manual_seed(0)
    risk = risk_of(Function(twice, W=torch.randn(3, 3), b=torch.randn(3)).double())
    (first, *_) = kfs.per_datum(risk, uncovered="autograd")
    assert set(first.blocks) == {"W", "b"}
    found = all_of(kfs.per_datum(risk, uncovered="autograd"))
    for name, g in risk.gradient().items():
        close(risk.reduction_factor * found[name].sum(0), g)


def test_a_parameter_that_is_never_used() -> None:
    model = Function(lambda m, x: x @ m.W.T, W=torch.randn(3, 3), V=torch.randn(3)).double()
    assert not any(batch.tensors()["V"].any() for batch in kfs.per_datum(risk_of(model)))
    assert len(list(kfs.per_datum(risk_of(model), uncovered="skip"))) == 2


class Routed(nn.Module):
    """Sends each example to one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.a(x) if float(x[0, 0]) > 0 else self.b(x)
        return result


def test_blocks_that_a_batch_does_not_use() -> None:
    """Their gradients are zero for every kind of request."""
    X, y = data(4)
    X[:, 0] = torch.tensor([1.0, 1.0, -1.0, -1.0])
    risk = kfs.EmpiricalRisk(Routed(), nn.CrossEntropyLoss(), batches(X, y, 2))
    one, other = kfs.per_datum(risk, blocks=kfs.KFAC(risk))
    unused = one.blocks["b"]
    assert not unused.dense().any()
    assert not unused.squared_norms().any()
    assert not unused.inner(other.blocks["b"]).any()
    assert "not used" in repr(unused)
    close(joined_gradients([unused, other.blocks["b"]]).dense(), torch.cat([unused.dense(), other.blocks["b"].dense()]))
    first, second = kfs.per_datum(risk)
    assert first.blocks.keys() != second.blocks.keys()
    assert first.inner(second).shape == (2, 2)


def sum_of_two(risk: kfs.EmpiricalRisk) -> Any:
    return kfs.KFAC(risk) + kfs.KFAC(risk, "empirical")


OPERATORS: dict[str, Any] = {
    "KFAC": kfs.KFAC,
    "EKFAC": kfs.EKFAC,
    "inverse": lambda risk: kfs.KFAC(risk).inverse(kfs.Relative(0.1)),
    "factored": lambda risk: kfs.KFAC(risk).inverse(0.1, "factored"),
    "diagonal factors": lambda risk: kfs.KFAC(risk, max_dim=1),
    "forward-only": lambda risk: kfs.KFAC(risk, fisher="forward-only"),
    "dense": exact_blocks,
    "sum": sum_of_two,
    "inverse of a sum": lambda risk: sum_of_two(risk).inverse(0.1, "factored"),
    "diagonal": kfs.factors.exact_diagonal,
}


class Tied(nn.Module):
    """An embedding whose transpose optionally computes the logits."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(5, 3).double()
        self.head = nn.Linear(3, 5, bias=False).double()
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.table(tokens).sum(1).tanh())
        return logits


MODELS: dict[str, Any] = {
    "mlp": lambda: risk_of(size=6),
    "embedding": lambda: of_tokens(Tied(tied=False)),
    "tied": lambda: of_tokens(Tied(tied=True)),
    "decoder first": lambda: of_tokens(Function(decoder_first, W=torch.randn(5, 3)).double()),
}


def of_tokens(model: nn.Module) -> kfs.EmpiricalRisk:
    torch.manual_seed(2)
    return kfs.EmpiricalRisk(model, nn.CrossEntropyLoss(), (torch.randint(5, (6, 4)), torch.randint(5, (6,))))


def decoder_first(m: Any, tokens: Tensor) -> Tensor:
    """Multiply with a table before its rows are looked up: unit vectors are on the side of gradients."""
    constant = torch.ones(len(tokens), 3, dtype=torch.float64) * tokens[:, :1]
    return nn.functional.linear(constant, m.W) + nn.functional.embedding(tokens, m.W).sum(1) @ torch.ones(3, 5).double()


@pytest.mark.filterwarnings("ignore:Factors wider than")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", OPERATORS)
def test_products_with_structures(model: str, kind: str) -> None:
    """Products with blocks of any structure equal those with the dense matrix, and can be multiplied again."""
    risk = MODELS[model]()
    K = OPERATORS[kind](risk)
    (batch,) = kfs.per_datum(risk, blocks=K)
    expected = K @ batch.tensors()
    for stack in K.stacks:
        for layout, part in stack.slices():
            G = batch.blocks[layout.name]
            once = G.multiplied(stack.structure[part])
            for name, t in once.tensors().items():
                close(t, expected[name].reshape(t.shape))
            twice = once.multiplied(stack.structure[part])
            assert isinstance(twice, BlockGradients)
            close(once.inner(G), once.dense().flatten(1) @ G.dense().flatten(1).T)
            close(twice.inner_within(G), (twice.dense() * G.dense()).flatten(1).sum(1))
            close(G.some(slice(1, 4)).dense(), G.dense()[1:4])
            close(once.some(slice(4, 6)).dense(), once.dense()[4:])
            both = joined_gradients([once.some(slice(0, 2)), once.some(slice(2, 6))])
            close(both.dense(), once.dense())
            assert both.nbytes >= 0


def test_unit_vectors_on_the_side_of_gradients() -> None:
    """If all unit vectors are present, and the block is diagonal on that side, rows stay rows."""
    torch.manual_seed(0)
    x = PlainVectors(torch.randn(1, 2, 3, 4, dtype=torch.float64))
    rows = RowProducts(x, UnitVectors(torch.randint(5, (2, 3)), 5, torch.float64))
    G = BlockGradients(Layout("W", (5, 4), (0, 5), (0, 1), 1), 2, torch.float64, torch.device("cpu"), (rows,))
    block = Eigenbasis.of_diagonal(torch.rand(1, 5, 4, dtype=torch.float64))
    product = G.multiplied(block)
    assert product.whole is None
    close(product.dense(), block.values * G.dense())


def test_nothing_is_resumed() -> None:
    """Gradients are not sums over data, which a checkpoint could store."""
    sums = KeptGradients()
    assert not sums.tensors()
    assert not sums.counts()


def test_rotation() -> None:
    risk = risk_of(size=6)
    E = kfs.EKFAC(risk)
    (batch,) = kfs.per_datum(risk, blocks=E)
    for stack in E.stacks:
        for layout, part in stack.slices():
            G, basis = batch.blocks[layout.name], stack.structure[part]
            Q_A, Q_B = basis.Q_A.values, basis.Q_B.values  # type: ignore[attr-defined]
            expected = Q_B.transpose(1, 2) @ G.dense() @ Q_A
            close(G.rotated(basis).dense(), expected)  # type: ignore[arg-type]
            close(G.formed().rotated(basis).dense(), expected)  # type: ignore[arg-type]


def test_other_blocks() -> None:
    (batch,) = kfs.per_datum(risk_of(size=6))
    with pytest.raises(ShapeError, match="block '0' have no inner product with those of '2'"):
        batch.blocks["0"].inner(batch.blocks["2"])
    (other,) = kfs.per_datum(risk_of(nn.Linear(3, 3).double(), size=6))
    with pytest.raises(ShapeError, match="have no inner product with gradients with respect to 'weight', 'bias'"):
        batch.inner(other)
    with pytest.raises(KfsError, match="There is no block '1'"):
        batch.blocks["1"]
    close(batch.some(slice(2, 4)).squared_norms(), batch.squared_norms()[2:4])
    assert repr(batch.some(slice(2, 4))).startswith("Gradients of examples 2 to 3: 2 blocks, float64 on cpu")
    assert repr(batch.blocks["0"]).splitlines() == [
        "Gradients of 6 examples, block '0': 4 x 4, float64 on cpu",
        "  rows of 1 use",
    ]
    assert "matrices" in repr(batch.blocks["0"].formed())
