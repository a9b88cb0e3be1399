"""Influence: operators, dampings, quantities, parts, normalization, ranking, and refused input."""

import sys
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kfs
from kfs.errors import DataError, KfsWarning, LossError, ModelError, SolverError
from kfs.factors import exact_blocks, exact_diagonal
from kfs.influence import Influence, Ranked, Top
from kfs.influence.ways import Chosen, Sizes, choose, multiplications, self_products
from tests.factors.one_by_one import close
from tests.factors.test_gradient_streams import Tied, data, mlp, of_tokens, risk_of, uncovered_model

Q = 3


def flat(risk: kfs.EmpiricalRisk, of: Any = "loss") -> Tensor:
    """Compute the flat gradient of each example by a risk of this example alone."""
    rows = []
    model: Any = risk.model
    for batch in risk.batches():
        for n in range(len(batch.y)):
            x, y = batch.x[n : n + 1], batch.y[n : n + 1]
            f = model(x)
            if of == "margin":
                p = f.softmax(1)[0, y]
                value = (p / (1 - p)).log().sum()
            else:
                value = of(f[0], y[0]) if callable(of) else nn.functional.cross_entropy(f, y, reduction="sum")
            grads = torch.autograd.grad(value, list(risk.params.values()), materialize_grads=True, allow_unused=True)
            rows.append(torch.cat([g.flatten() for g in grads]))
    return torch.stack(rows)


def queries_of(model: Any) -> kfs.EmpiricalRisk:
    X, y = data()
    return kfs.EmpiricalRisk(model, nn.CrossEntropyLoss(), ((0.5 * X + 1)[:Q], (y[:Q] + 1) % 3))


def both() -> tuple[kfs.EmpiricalRisk, kfs.EmpiricalRisk]:
    model = mlp()
    return queries_of(model), risk_of(model)


def means(K: Any, risk: kfs.EmpiricalRisk) -> Tensor:
    """For each entry of a flat vector, return the mean eigenvalue of its block."""
    dense = K.to_dense()
    result = torch.zeros(len(dense), dtype=dense.dtype)
    start = 0
    for layer in (risk.model[0], risk.model[2]):  # type: ignore[index]
        size = layer.weight.numel() + layer.bias.numel()
        result[start : start + size] = dense[start : start + size, start : start + size].trace() / size
        start += size
    return result


OPERATORS: dict[str, Any] = {
    "KFAC": kfs.KFAC,
    "EKFAC": kfs.EKFAC,
    "reduce": lambda risk: kfs.KFAC(risk, sharing="reduce"),
    "mc": lambda risk: kfs.EKFAC(risk, "mc", mc_samples=2),
    "blocks": exact_blocks,
    "diagonal": exact_diagonal,
    "scaled": lambda risk: 2.0 * kfs.KFAC(risk),
    "trace scaled": kfs.factors.trace_scaled,
}


def refitted(X: Tensor, y: Tensor, weights: Tensor, penalty: float) -> Tensor:
    """Minimize the weighted mean of squared errors plus half the penalty times the squared norm: `[W b]`."""
    ones = torch.cat([X, torch.ones(len(X), 1).double()], 1)
    H = 2 / len(X) * (ones.T * weights) @ ones + penalty * torch.eye(ones.shape[1]).double()
    solution: Tensor = torch.linalg.solve(H, 2 / len(X) * (ones.T * weights) @ y)
    return solution.T


def test_weight_decay_is_that_of_training() -> None:
    """For linear regression, whose KFAC is exact, scores must equal the change of predictions of a refitted model.

    The oracle refits the model with other weights of each example. Other multiples of the penalty are rejected.
    """
    torch.manual_seed(0)
    penalty = 0.3
    X, y = torch.randn(7, 3).double(), torch.randn(7, 1).double()
    model = nn.Linear(3, 1).double()
    best = refitted(X, y, torch.ones(7).double(), penalty)
    with torch.no_grad():
        model.weight.copy_(best[:, :3])
        model.bias.copy_(best[:, 3])
    # An optimizer with this weight decay converges to this point.
    sgd = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=penalty)
    nn.functional.mse_loss(model(X), y).backward()
    before = [p.detach().clone() for p in model.parameters()]
    sgd.step()
    for p, kept in zip(model.parameters(), before, strict=True):
        close(p.detach(), kept)
    train = kfs.EmpiricalRisk(model, nn.MSELoss(), (X, y))
    queries = kfs.EmpiricalRisk(model, nn.MSELoss(), (X[:2] + 1, y[:2]))
    changes = []
    for n in range(7):
        weights = torch.stack([torch.ones(7).double()] * 2)
        weights[:, n] += torch.tensor([1e-4, -1e-4]).double()
        up, down = (refitted(X, y, w, penalty) for w in weights)
        changes.append((X[:2] + 1) @ (up - down)[0, :3] + (up - down)[0, 3])
    expected = torch.stack(changes, 1) / 2e-4

    def change(**chosen: Any) -> Tensor:
        scores = Influence(kfs.KFAC(train), **chosen).scores(queries, train, of=lambda f, _: f[0])
        return -train.reduction_factor * scores

    torch.testing.assert_close(change(weight_decay=penalty), expected, rtol=1e-6, atol=1e-8)  # of finite differences
    close(change(weight_decay=penalty), change(damping=penalty))
    for wrong in (penalty / 2, 2 * penalty, 7 * penalty, penalty / 7):
        assert (change(weight_decay=wrong) - expected).norm() > 0.05 * expected.norm()
    with pytest.raises(ModelError, match=r"damping=0.1 and weight_decay=0.3.*Pass one of them"):
        change(damping=0.1, weight_decay=penalty)
    for wrong in (0.0, -1.0, True, "0.1", float("nan")):  # type: ignore[assignment]
        with pytest.raises(ModelError, match=r"weight_decay is .*the positive number that the optimizer was given"):
            change(weight_decay=wrong)


@pytest.mark.parametrize("kind", OPERATORS)
@pytest.mark.parametrize("damping", [0.3, kfs.Relative(0.1), {"0": 0.2, "2": kfs.Relative(0.5)}], ids=str)
def test_operators_and_dampings(kind: str, damping: Any) -> None:
    """The oracle inverts the dense matrix, damped by its own code."""
    queries, train = both()
    K = OPERATORS[kind](train)
    mean = means(K, train)
    if isinstance(damping, dict):
        first = 4 * 4
        added = torch.cat([torch.full((first,), 0.2, dtype=mean.dtype), 0.5 * mean[first:]])
    else:
        added = 0.1 * mean if isinstance(damping, kfs.Relative) else torch.full_like(mean, damping)
    inverse = torch.linalg.inv(K.to_dense() + torch.diag(added))
    influence = Influence(K, damping)
    expected = flat(queries) @ inverse @ flat(train).T
    close(influence.scores(queries, train), expected)
    close(influence.self_scores(train), (flat(train) @ inverse @ flat(train).T).diagonal())
    # Wrong variants: other damping, the square root of the inverse, gradients of the mean.
    wrong = (K.inverse(0.4), K.power(-0.5, 0.3), (1 / len(data()[1])) * K.inverse(0.3))
    for other in wrong:
        assert not torch.allclose(flat(queries) @ other.to_dense() @ flat(train).T, expected, rtol=1e-3)


@pytest.mark.parametrize("method", ["factored", "exact"])
def test_sums_of_operators(method: Any) -> None:
    """Inverses of sums use a common basis, or conjugate gradients."""
    queries, train = both()
    K = kfs.KFAC(train) + kfs.KFAC(train, "empirical")
    influence = Influence(K, 0.1, method)  # type: ignore[arg-type]
    scores = influence.scores(queries, train)
    expected = flat(queries) @ influence.inverse.to_dense() @ flat(train).T
    torch.testing.assert_close(scores, expected, rtol=1e-6, atol=1e-6)  # iterations stop there
    own = (flat(train) @ influence.inverse.to_dense() @ flat(train).T).diagonal()
    torch.testing.assert_close(influence.self_scores(train), own, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("make", [kfs.KFAC, kfs.EKFAC])
def test_embeddings(tied: bool, make: Any) -> None:
    train = of_tokens(Tied(tied))
    influence = Influence(make(train), 0.2)
    expected = flat(train) @ influence.inverse.to_dense() @ flat(train).T
    close(influence.scores(train, train), expected)
    close(influence.self_scores(train), expected.diagonal())


def test_uncovered_parameters() -> None:
    """Their exact diagonal is damped and inverted; if they are skipped, they do not count."""
    risk = risk_of(uncovered_model())
    influence = Influence(kfs.EKFAC(risk, uncovered="diagonal"), 0.1)
    close(influence.scores(risk, risk), flat(risk) @ influence.inverse.to_dense() @ flat(risk).T)
    skipped = Influence(kfs.KFAC(risk, uncovered="skip"), 0.1)
    G = flat(risk)[:, :12]  # without the last parameter
    close(skipped.scores(risk, risk), G @ skipped.inverse.to_dense() @ G.T)


def test_quantities() -> None:
    queries, train = both()
    influence = Influence(kfs.EKFAC(train), 0.1)
    inverse = influence.inverse.to_dense()
    close(influence.scores(queries, train, of="margin"), flat(queries, "margin") @ inverse @ flat(train).T)
    square = lambda f, y: f.square().sum() * (1 + y)  # noqa: E731
    expected = flat(queries) @ inverse @ flat(train, square).T
    close(influence.scores(queries, train, of_train=square), expected)
    own = (flat(train, "margin") @ inverse @ flat(train, "margin").T).diagonal()
    close(influence.self_scores(train, of="margin"), own)


def test_removal() -> None:
    """Without an example, a query's loss rises by about the score times the reduction factor, for a quadratic loss."""
    torch.manual_seed(0)
    X, Y = torch.randn(40, 3, dtype=torch.float64), torch.randn(40, 2, dtype=torch.float64)
    model = nn.Linear(3, 2).double()
    ones = torch.cat([X, torch.ones(40, 1, dtype=torch.float64)], 1)

    def fit(keep: Tensor) -> None:
        solution = torch.linalg.lstsq(ones[keep], Y[keep]).solution.T
        model.weight.data, model.bias.data = solution[:, :3].clone(), solution[:, 3].clone()

    fit(torch.ones(40, dtype=torch.bool))
    train = kfs.EmpiricalRisk(model, nn.MSELoss(), (X, Y))
    queries = kfs.EmpiricalRisk(model, kfs.losses.HalfSquaredError(), (X[:5] + 1, Y[:5]))
    # For least squares and one layer, KFAC is the exact Hessian.
    scores = Influence(kfs.KFAC(train), 0.0).scores(queries, train)
    before = 0.5 * (model(X[:5] + 1) - Y[:5]).square().sum(1).detach()
    keep = torch.ones(40, dtype=torch.bool)
    keep[7] = False
    fit(keep)
    change = 0.5 * (model(X[:5] + 1) - Y[:5]).square().sum(1).detach() - before
    # The other examples lose one of forty, and steps are not small.
    torch.testing.assert_close(change, train.reduction_factor * scores[:, 7], rtol=0.3, atol=0.02)
    assert torch.equal(change.sign(), scores[:, 7].sign())


def test_parts() -> None:
    queries, train = both()
    influence = Influence(kfs.EKFAC(train, joint_bias=False), 0.1)
    total = influence.scores(queries, train)
    blocks = influence.scores(queries, train, by="block")
    layers = influence.scores(queries, train, by="layer")
    assert list(blocks) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert list(layers) == ["0", "2"]
    close(layers["0"], blocks["0.weight"] + blocks["0.bias"])
    close(layers["0"] + layers["2"], total)
    single = nn.Linear(3, 3).double()
    assert list(Influence(kfs.KFAC(risk_of(single))).scores(risk_of(single), risk_of(single), by="layer")) == ["weight"]


@pytest.mark.parametrize("normalize", ["cosine", "self"])
def test_normalization(normalize: Any) -> None:
    queries, train = both()
    influence = Influence(kfs.EKFAC(train), 0.1)
    scores = influence.scores(queries, train)
    expected = scores / influence.self_scores(train).sqrt()
    if normalize == "cosine":
        expected = expected / influence.self_scores(queries).sqrt().unsqueeze(1)
        assert float(expected.abs().max()) <= 1
        close(influence.scores(train, train, normalize="cosine").diagonal(), torch.ones(6, dtype=torch.float64))
    for memory in (1, 2**32):
        close(influence.scores(queries, train, normalize=normalize, memory=memory), expected)
    blocks = influence.scores(queries, train, normalize=normalize, by="block")
    close(sum(blocks.values(), torch.zeros(())), expected)
    top = influence.top(queries, train, 2, normalize=normalize)
    close(top.harmful.values, expected.sort(1).values[:, :2])
    # An example without a gradient has no influence, and no angle.
    nothing = influence.scores(queries, train, of=lambda f, _: 0 * f.sum(), normalize=normalize)
    assert not nothing.any()


@pytest.mark.parametrize(("of", "of_train"), [("loss", "loss"), ("margin", "loss"), ("loss", "margin")])
@pytest.mark.parametrize("memory", [1, 2**32])
def test_top(of: Any, of_train: Any, memory: int) -> None:
    """A larger margin is better, so helpful examples have negative scores for it."""
    queries, train = both()
    influence = Influence(kfs.EKFAC(train), 0.1)
    scores = influence.scores(queries, train, of=of, of_train=of_train)
    top = influence.top(queries, train, 4, of=of, of_train=of_train, memory=memory)
    best = scores.argsort(1, descending=of == of_train)
    assert torch.equal(top.helpful.indices, best[:, :4])
    assert torch.equal(top.harmful.indices, best.flip(1)[:, :4])
    close(top.helpful.values, scores.gather(1, best[:, :4]))
    close(top.harmful.values, scores.gather(1, best.flip(1)[:, :4]))
    lines = str(top).splitlines()
    assert lines[0] == "The 4 most helpful and 4 most harmful examples of each of 3 queries"
    assert lines[3].startswith(f"0      {int(best[0, 0])} (")
    assert "<table>" in top._repr_html_()
    wide = influence.top(train, train, 6)
    assert ", ..." in str(wide)


def test_refusals() -> None:
    queries, train = both()
    influence = Influence(kfs.KFAC(train), 0.1)
    with pytest.raises(ModelError, match="Influence takes an operator with blocks, but this is a GGN"):
        Influence(kfs.GGN(train))  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="not symmetric"):
        Influence(kfs.KFAC(train) @ kfs.KFAC(train, "empirical"))  # type: ignore[arg-type]
    few = kfs.EmpiricalRisk(train.model, nn.CrossEntropyLoss(), data(2))
    for K in (kfs.KFAC(few), kfs.EKFAC(few)):
        with pytest.raises(SolverError, match=r"A factor of block '0' .*singular"):
            Influence(K, {"0": kfs.Relative(0.0), "2": 0.1})
        with pytest.raises(SolverError, match=r"A factor of block '0' .*singular"):
            Influence(K, 0.0)
    with pytest.raises(SolverError, match="A block is singular: 1 of 1 factors"):
        Influence(Jittered(regression()), 0.0)
    with pytest.raises(ModelError, match="method is 'exakt'"):
        Influence(kfs.KFAC(train), 0.1, "exakt")  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"by is 'blok'. Did you mean 'block'"):
        influence.scores(queries, train, by="blok")  # type: ignore[call-overload]
    with pytest.raises(ModelError, match=r"normalize is 'cos'. .*'cosine'"):
        influence.scores(queries, train, normalize="cos")  # type: ignore[call-overload]
    with pytest.raises(LossError, match=r"no quantity 'marginn'. Did you mean 'margin'"):
        influence.scores(queries, train, of="marginn")  # type: ignore[call-overload]
    with pytest.raises(LossError, match="no quantity 1"):
        influence.self_scores(train, of=1)  # type: ignore[arg-type]
    for wrong in (-1, 1.5, True):
        with pytest.raises(ModelError, match=f"memory is {wrong}"):
            influence.scores(queries, train, memory=wrong)  # type: ignore[arg-type]
    for wrong in (0, 7, 1.0, True):
        with pytest.raises(DataError, match=f"k is {wrong}, and there are 6 training examples"):
            influence.top(queries, train, wrong)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="queries is a tuple"):
        influence.scores(data(), train)  # type: ignore[call-overload]
    wider = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    with pytest.raises(ModelError, match=r"other shapes: '0.weight' has shape \[5, 3\] in queries, and \["):
        influence.scores(risk_of(wider), train)
    with pytest.raises(ModelError, match=r"The curvature has the parameters '2.weight', '2.bias', which train lacks"):
        influence.self_scores(risk_of(train.model, params=["0.weight", "0.bias"]))
    part = Influence(kfs.KFAC(risk_of(train.model, params=["0.weight"])), 0.1)
    with pytest.raises(
        ModelError, match=r"train has the parameters '0.bias', '2.weight', '2.bias', which the curvature lacks"
    ):
        part.self_scores(train)
    other = mlp()
    with torch.no_grad():
        other.get_parameter("2.bias")[0] += 1
    with pytest.raises(ModelError, match=r"buffer '2.bias' has another value"):
        influence.scores(queries_of(other), train)
    close(influence.scores(queries_of(mlp()), train), influence.scores(queries, train))  # a copy
    with pytest.raises(DataError, match=r"no data|empty|holds no"):
        influence.self_scores(kfs.EmpiricalRisk(train.model, nn.CrossEntropyLoss(), []))


def regression() -> kfs.EmpiricalRisk:
    """A problem without singular factors."""
    X, _ = data(12)
    return kfs.EmpiricalRisk(nn.Linear(3, 2).double(), nn.MSELoss(), (X, X[:, :2] ** 2))


@pytest.mark.parametrize("make", [kfs.KFAC, kfs.EKFAC])
def test_without_damping(make: Any) -> None:
    risk = regression()
    K = make(risk)
    (batch,) = kfs.per_datum(risk)
    G = torch.cat([t.flatten(1) for t in batch.tensors().values()], 1)
    torch.testing.assert_close(Influence(K, 0.0).scores(risk, risk), G @ torch.linalg.inv(K.to_dense()) @ G.T)


class Jittered(kfs.KFAC):
    """Issues the warning about jitter of a factor, although no factor is singular."""

    def inverse(self, *_: Any) -> Any:
        warnings.warn("1 of 1 factors are singular.", KfsWarning, stacklevel=2)


def test_scores_that_are_not_finite() -> None:
    """Gradients are finite, but their products overflow."""
    model = nn.Linear(3, 3)
    X, y = data()
    risk = kfs.EmpiricalRisk(model, nn.CrossEntropyLoss(), (X.float(), y))
    influence = Influence(kfs.KFAC(risk), 1e-3)
    huge: dict[str, Any] = dict.fromkeys(("of", "of_train"), lambda f, _: 1e30 * f.sum())
    for compute in (influence.scores, influence.top):
        with pytest.raises(DataError, match="The score of query 0 and training example 0 is not finite"):
            compute(risk, risk, **huge) if compute == influence.scores else influence.top(risk, risk, 1, **huge)


def test_description() -> None:
    train = risk_of()
    influence = Influence(kfs.EKFAC(train))
    title = "Influence of Sequential with CrossEntropyLoss (mean): 2 blocks, float64 on cpu"
    assert repr(influence).splitlines() == [title, "  EKFAC.inverse(Relative(0.1))"]
    assert title in influence._repr_html_()
    far = torch.empty(2, 3, device="meta")  # numbers of other devices are not read
    assert "query" not in str(Top(Ranked(far, far), Ranked(far, far)))


def test_progress(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one line for the whole computation, if one risk requests progress and none disables it."""
    model = mlp()
    influence = Influence(kfs.KFAC(risk_of(model)), 0.1)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for of_queries, of_train in ((True, None), (None, True), (True, False), (None, None)):
        influence.scores(risk_of(model, progress=of_queries), risk_of(model, progress=of_train))
        shown = "influence" in capsys.readouterr().err
        assert shown == (True in {of_queries, of_train} and False not in {of_queries, of_train})


def test_ways() -> None:
    """The cheapest way is used: rows for Kronecker products, matrices for few queries or many rows."""
    sizes = Sizes(queries=2, train=3, rows=1, columns=5, matrix_rows=7)
    assert multiplications("rows", sizes) == 2 * 3 * 12 + 2 * (25 + 49)
    assert multiplications("matrices", sizes) == 2 * 3 * 35 + 5 * 35 + 2 * 2 * 35 * 12
    assert multiplications("rotated", sizes) == 2 * 3 * 35 + 5 * 35 + 5 * (25 + 49)
    many = Sizes(queries=2, train=3, rows=100, columns=5, matrix_rows=7)
    assert multiplications("rotated", many) == 2 * 3 * 35 + 5 * 100 * 35 + 5 * 35 * 12

    risk = risk_of(size=6)
    (batch,) = kfs.per_datum(risk)
    block = batch.blocks["0"]
    found = {}
    cases: tuple[tuple[str, Any, Any], ...] = (
        ("KFAC", kfs.KFAC(risk), "factored"),
        ("EKFAC", kfs.EKFAC(risk), "exact"),
    )
    for name, K, method in cases:
        inverse = K.inverse(0.1, method)
        stack = next(stack for stack in inverse.stacks if "0" in stack.names)
        place = stack.names.index("0")
        structure = stack.structure[place : place + 1]
        for queries, train in ((6, 6), (6, 10**6), (10**6, 6)):
            found[name, queries, train] = choose(structure, block, queries, train).way
        for way in ("rows", "matrices") if name == "KFAC" else ("matrices", "rotated"):
            one = Chosen(way)
            expected = block.dense().flatten(1) @ structure.to_dense()[0] @ block.dense().flatten(1).T
            queried = one.of_queries(block, structure)
            close(queried.inner(one.of_train(block, structure)), expected)
            close(queried.inner(one.of_train(block.formed(), structure)), expected)
            shares = queried.inner_by_row(one.of_train(block, structure, keep_rows=True))
            close(torch.stack(shares).sum((0, 3)), expected)
            assert one.bytes_of(block) == 8 * (7 if way == "rows" else 16)
            close(self_products(block, structure), expected.diagonal())
            close(self_products(block.formed(), structure), expected.diagonal())
    assert found == {
        ("KFAC", 6, 6): "rows",
        ("KFAC", 6, 10**6): "rows",
        ("KFAC", 10**6, 6): "rows",
        ("EKFAC", 6, 6): "rotated",
        ("EKFAC", 6, 10**6): "matrices",
        ("EKFAC", 10**6, 6): "rotated",
    }


@pytest.mark.parametrize(("make", "method"), [(kfs.EKFAC, "exact"), (kfs.KFAC, "factored")])
def test_autocast(make: Any, method: Any) -> None:
    """Passes run in half precision if the caller enables it, but products of gradients do not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Conv1d(2, 3, 2), nn.Flatten(), nn.Linear(21, 3))
    X, y = torch.randn(7, 2, 5), torch.randint(3, (7,))
    risk = kfs.EmpiricalRisk(model, nn.CrossEntropyLoss(), [(X[:3], y[:3]), (X[3:], y[3:])])
    with torch.autocast("cpu", torch.bfloat16):
        influence = kfs.Influence(make(risk), 0.1, method)
        batches = list(kfs.per_datum(risk, blocks=influence.K))
        scores = influence.scores(risk, risk)
        own = influence.self_scores(risk)
    G = torch.cat([torch.cat([g.flatten(1) for g in batch.tensors().values()], 1) for batch in batches]).double()
    expected = G @ influence.inverse.to_dense().double() @ G.T
    assert scores.dtype == torch.float32
    # Far above round-off of float32 products, 1e-7, and far below that of bfloat16, 4e-3.
    assert (scores - expected).norm() < 1e-4 * expected.norm()
    assert (own - expected.diagonal()).norm() < 1e-4 * expected.norm()
