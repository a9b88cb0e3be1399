"""The update rule: against PyTorch's AdamW, singular value decompositions, and exact natural gradients."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from kfs import GGN, EmpiricalRisk
from kfs.errors import KfsWarning
from kfs.losses import HalfSquaredError
from kfs.optim import KFAC, update_rule
from kfs.optim.update_rule import ParameterGroup, Tensors, adamw_step, apply_step, correction, limited, natural_step
from tests.optim.training import train, weights


def identity(u: Tensors) -> Tensors:
    """Return the argument."""
    return u


@given(momentum=st.floats(0, 0.99), steps=st.integers(1, 6))
def test_momentum_has_no_bias(momentum: float, steps: int) -> None:
    """A constant gradient is its own average, at every age."""
    p, g = [torch.zeros(2, dtype=torch.float64)], [torch.tensor([1.0, -2.0]).double()]
    m: Tensors = [torch.zeros(2).double()]
    for age in range(steps):
        share = ParameterGroup(p, g, m, momentum, lr=1.0, kept=1.0, correction=correction(momentum, age + 2))
        before = p[0].clone()
        natural_step([share], identity)
        torch.testing.assert_close(p[0], before - g[0])


def test_momentum_looks_ahead() -> None:
    """With no curvature, and at a large age, the rule is Nesterov's, as in `torch.optim.SGD`."""
    torch.manual_seed(0)
    target = torch.randn(3, dtype=torch.float64)
    mine, theirs = torch.zeros_like(target), torch.zeros_like(target).requires_grad_()
    beta, old = 0.5, 1_000  # beta^1000 is zero
    m: Tensors = [torch.zeros_like(target)]
    sgd = torch.optim.SGD([theirs], lr=0.1 * (1 - beta), momentum=beta, nesterov=True)
    for _ in range(5):
        share = ParameterGroup([mine], [mine - target], m, beta, lr=0.1, kept=1.0, correction=correction(beta, old))
        natural_step([share], identity)
        theirs.grad = theirs.detach() - target
        sgd.step()
        torch.testing.assert_close(mine, theirs.detach())


def test_nothing_changes_after_an_error() -> None:
    """If `precondition` raises an error, no state has changed."""

    def fails(_: Tensors) -> Tensors:
        raise ZeroDivisionError

    p, g, m = ([torch.randn(3)] for _ in range(3))
    before = [t[0].clone() for t in (p, g, m)]
    with pytest.raises(ZeroDivisionError):
        natural_step([ParameterGroup(p, g, m, 0.9, lr=1.0, kept=0.9, correction=1.0)], fails)
    assert all(torch.equal(t[0], b) for t, b in zip((p, g, m), before, strict=True))


def test_weight_decay_is_decoupled() -> None:
    """It is not affected by curvature or momentum."""
    p, g, m = [torch.ones(2)], [torch.zeros(2)], [torch.zeros(2)]
    natural_step([ParameterGroup(p, g, m, 0.9, lr=0.5, kept=0.95, correction=1.0)], identity)
    torch.testing.assert_close(p[0], torch.full((2,), 0.95))


def test_adamw_is_that_of_pytorch() -> None:
    """Several steps of both are equal."""
    p = torch.randn(4, dtype=torch.float64)
    q = p.clone().requires_grad_()
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    adamw = torch.optim.AdamW([q], lr=0.1, betas=(0.9, 0.95), weight_decay=0.2, eps=1e-150)
    for age in range(5):
        g = torch.randn(4, dtype=torch.float64)
        share = ParameterGroup([p], [g], [m], 0.9, lr=0.1, kept=0.98, correction=correction(0.9, age + 1))
        adamw_step(share, [v], 0.95, correction(0.95, age + 1))
        q.grad = g
        adamw.step()
        torch.testing.assert_close(p, q.detach())


def by_svd(D: Tensor, radius: float) -> Tensor:
    """Limit singular values one at a time, as documented."""
    U, sizes, V = torch.linalg.svd(D, full_matrices=False)
    longest = sum(size**4 for size in sizes.tolist()) ** 0.25
    shorter = sizes * min(1.0, 30 * radius / longest)
    new = [size / (1 + (size / radius) ** 2) ** 0.5 for size in shorter.tolist()]
    result: Tensor = U @ torch.tensor(new, dtype=D.dtype).diag() @ V
    return result


@given(rows=st.integers(1, 12), columns=st.integers(1, 12), scale=st.floats(1e-4, 1e4), inputs=st.floats(0.1, 10))
def test_limited_steps(rows: int, columns: int, scale: float, inputs: float) -> None:
    """Each singular value is limited separately, for any length of the step, unless there is no limit."""
    torch.manual_seed(rows * 100 + columns)
    D = scale * torch.randn(2, 1, rows, columns, dtype=torch.float64)
    trust = torch.tensor([0.5, torch.inf], dtype=torch.float64).reshape(2, 1, 1, 1)
    sizes = torch.full((2, 1, 1, 1), inputs, dtype=torch.float64)
    short = limited(D, trust, sizes, by_column=False)
    torch.testing.assert_close(short[1], D[1], rtol=1e-9, atol=1e-12 * scale)
    radius = 0.5 * max(1.0, rows / columns) ** 0.5 / inputs
    torch.testing.assert_close(short[0, 0], by_svd(D[0, 0], radius), rtol=1e-7, atol=1e-10 * radius)
    assert torch.linalg.matrix_norm(short[0, 0], 2) <= radius
    assert limited(D, torch.inf, sizes, by_column=False) is D


def test_one_long_direction_does_not_shorten_the_others() -> None:
    """Scaling the whole step by its spectral norm gives a different step, which the test rejects."""
    D = torch.diag(torch.tensor([25.0, 0.1, 0.01], dtype=torch.float64))
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    short = limited(D.reshape(1, 1, 3, 3), 1.0, one, by_column=False)[0, 0]
    expected = torch.tensor([1.0, 0.1, 0.01], dtype=torch.float64).diag()
    torch.testing.assert_close(short, expected, rtol=0.01, atol=1e-9)
    as_a_whole = D / torch.linalg.matrix_norm(D, 2)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(as_a_whole, expected, rtol=0.01, atol=1e-9)


@pytest.mark.parametrize("by_products", [False, True])
def test_limit_in_single_precision(by_products: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With singular values over five decades, the limit is accurate to 13 % by an inverse, and to 3 % by products."""
    if by_products:
        norm = torch.linalg.matrix_norm
        monkeypatch.setattr(
            update_rule, "_by_inverse", lambda G: update_rule._by_products(G, 1 + norm(G), torch.float32)
        )
    torch.manual_seed(0)
    D = torch.randn(40, 30) @ torch.diag(torch.logspace(-3, 2, 30))
    short = limited(D.reshape(1, 1, 40, 30), 1.0, torch.ones(1, 1, 1, 1), by_column=False)[0, 0]
    exact = by_svd(D.double(), (4 / 3) ** 0.5)
    error = 0.03 if by_products else 0.13
    assert (short - exact).norm() < error * exact.norm()
    sizes, sizes_exact = torch.linalg.svdvals(short), torch.linalg.svdvals(exact)
    assert ((sizes - sizes_exact).abs() < error * sizes_exact + 1e-5).all()
    no_step = limited(torch.zeros(1, 1, 4, 3), 1.0, torch.zeros(1, 1, 1, 1), by_column=False)
    assert torch.equal(no_step, torch.zeros(1, 1, 4, 3))


@pytest.mark.parametrize(("rows", "columns"), [(256, 300), (300, 256), (256, 256)])
def test_limit_of_sizes_that_lapack_is_slow_for(rows: int, columns: int) -> None:
    """Padding Gram matrices of such sizes does not change the limit, on either side."""
    torch.manual_seed(0)
    D = torch.randn(rows, columns) / 8
    short = limited(D.reshape(1, 1, rows, columns), 1.0, torch.ones(1, 1, 1, 1), by_column=False)[0, 0]
    exact = by_svd(D.double(), max(1.0, rows / columns) ** 0.5)
    # The error of one inverse and a linear term.
    assert (short - exact).norm() < 0.13 * exact.norm()
    assert (D - exact).norm() > 0.2 * exact.norm()


def test_limited_columns() -> None:
    """The steps of embeddings are limited per token: a large step for one token does not shorten others."""
    D = torch.full((1, 1, 4, 3), 1e-3)
    D[..., 0] = 1000.0
    unit_vectors = torch.full((1, 1, 1, 1), 3**-0.5)
    short = limited(D, torch.ones(1, 1, 1, 1), unit_vectors, by_column=True)
    D[..., 0] = 1.0
    torch.testing.assert_close(short, D)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_embeddings_and_tables_change_by_their_limit(sharing: Any) -> None:
    """Without damping, steps are long. Each row of both parameters changes by its limit."""

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(5, 4), nn.Parameter(torch.randn(3, 4))
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Any:
            return self.head((self.tokens(x) + self.places).mean(1))

    torch.manual_seed(0)
    model, x = Tokens().double(), torch.randint(5, (20, 3))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = KFAC(model, nn.CrossEntropyLoss(), sharing=sharing, damping=1e-9, fisher="type-2", noise=None)
    train(model, optimizer, [(x, x[:, 0] % 2)], nn.CrossEntropyLoss())
    for name in ("tokens.weight", "places"):
        changes = (model.get_parameter(name).detach() - before[name]).square().mean(1).sqrt()
        torch.testing.assert_close(changes, torch.full_like(changes, 0.03), rtol=0.05, atol=0)


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_wide_layers_change_outputs_no_more_than_others(scale: float) -> None:
    """A layer whose factor is diagonal because it is wide has no unit vectors as inputs. Its limit uses their size."""
    torch.manual_seed(0)
    X, y = scale * torch.randn(60, 40, dtype=torch.float64), torch.randint(2, (60,))
    model = nn.Sequential(nn.Linear(40, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    before = model[0](X).detach()
    optimizer = KFAC(model, nn.CrossEntropyLoss(), fisher="type-2", damping=1e-6, max_dim=20)
    with pytest.warns(KfsWarning, match="max_dim"):
        train(model, optimizer, [(X, y)], nn.CrossEntropyLoss())
    change = (model[0](X).detach() - before).square().mean().sqrt()
    # Each column has a limit, so columns of one sign may add up to more than one limit, but not to several.
    assert change < 2 * 0.03


def deep_linear() -> nn.Sequential:
    """Return a deep linear network with biases."""
    return nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3), nn.Linear(3, 2)).double()


def layer_gradient(model: nn.Module, loss: nn.Module, X: Tensor, y: Tensor, layer: nn.Module) -> Tensor:
    """Return the gradient of a layer."""
    gradients = torch.autograd.grad(loss(model(X), y), list(layer.parameters()))
    return torch.cat([g.flatten() for g in gradients])


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("fisher", ["type-2", "empirical"])
def test_one_step_minimises_over_a_layer(place: int, reduction: str, fisher: str) -> None:
    """In a deep linear network, KFAC's block is exact: one undamped step minimizes the square loss over a layer.

    The block of the empirical Fisher is not exact, and must fail.
    """
    X, y = torch.randn(20, 5, dtype=torch.float64), torch.randn(20, 2, dtype=torch.float64)
    model, loss = deep_linear(), nn.MSELoss(reduction=reduction)
    layer = model[place]
    plain = {"lr": 1.0, "damping": 0.0, "momentum": 0.0, "trust": None, "noise": None, "damping_method": "exact"}
    optimizer = KFAC(model, loss, layer.parameters(), fisher=fisher, **plain)  # type: ignore[arg-type]
    before = layer_gradient(model, loss, X, y, layer).norm()
    loss(model(X), y).backward()
    optimizer.step()
    after = layer_gradient(model, loss, X, y, layer).norm()
    assert (after < 1e-9 * before) == (fisher == "type-2")


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(reduction="sum"), nn.MSELoss()])
def test_exact_natural_gradient_for_one_datum(loss: nn.Module) -> None:
    """With one example, every block is exact, and the step is that of the dense, damped GGN of each layer."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    X = torch.randn(1, 4, dtype=torch.float64)
    y = torch.tensor([1]) if isinstance(loss, nn.CrossEntropyLoss) else torch.randn(1, 3, dtype=torch.float64)
    mean = nn.CrossEntropyLoss() if isinstance(loss, nn.CrossEntropyLoss) else HalfSquaredError()
    risk = EmpiricalRisk(model, mean, (X, y))
    expected = {}
    for layer in (["0.weight", "0.bias"], ["2.weight", "2.bias"]):
        block = GGN(risk).submatrix(layer).to_dense()
        g = torch.cat([risk.gradient()[name].flatten() for name in layer])
        step = torch.linalg.solve(block + 0.1 * torch.eye(len(g), dtype=torch.float64), g)
        sizes = [risk.params[name].numel() for name in layer]
        for name, part in zip(layer, step.split(sizes), strict=True):
            expected[name] = risk.params[name].detach() - 0.3 * part.view_as(risk.params[name])
    optimizer = KFAC(
        model,
        loss,
        lr=0.3,
        damping=0.1,
        damping_unit="absolute",
        damping_method="exact",
        momentum=0.0,
        trust=None,
        noise=None,
        fisher="type-2",
    )
    loss(model(X), y).backward()
    optimizer.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), expected[name])


class Shared(nn.Module):
    """A layer whose outputs are averaged over positions, in several ways; `"none"` has one position."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        # Both layers have the same draws.
        self.layer = nn.Conv2d(3, 4, 1) if way == "pixels" else nn.Linear(3, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.averaged(x).tanh())

    def averaged(self, x: Tensor) -> Any:
        if self.way == "axis":
            return self.layer(x.unsqueeze(1).expand(-1, 6, -1)).mean(1)
        if self.way == "pixels":
            return self.layer(x[:, :, None, None].expand(-1, -1, 2, 3)).mean((2, 3))
        if self.way == "calls":
            return sum(self.layer(x) for _ in range(6)) / 6
        if self.way == "any order":
            owners = torch.arange(6 * len(x)).mul(5).remainder(len(x))
            return x.new_zeros(len(x), 4).index_add(0, owners, self.layer(x[owners])) / 6
        return self.layer(x)


@pytest.mark.parametrize("options", [{}, {"eigen": True}, {"fisher": "forward-only"}, {"fisher": "empirical"}])
@pytest.mark.parametrize("way", ["axis", "pixels", "calls", "any order"])
def test_equal_positions_are_one_with_reduce(way: str, options: dict[str, Any]) -> None:
    """Six equal positions whose outputs are averaged have the curvature of one position, and therefore the same steps.

    The factor's inputs are sums over positions, six times as large. The trust region uses the inputs themselves.
    """
    torch.manual_seed(1)
    X, y = torch.randn(7, 3, dtype=torch.float64), torch.randint(2, (7,))
    expected, found = Shared("none").double(), Shared(way).double()
    for model in (expected, found):
        optimizer = KFAC(model, nn.CrossEntropyLoss(), sharing="reduce", **{"fisher": "type-2", **options})
        train(model, optimizer, [(X, y)] * 3, nn.CrossEntropyLoss())
        assert not optimizer.uncovered
    assert (weights(expected) - weights(Shared("none").double())).norm() > 0.01
    torch.testing.assert_close(weights(found), weights(expected), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("taken", [True, False])
def test_parameters_that_are_parts_of_larger_tensors(taken: bool) -> None:
    """Nothing outside the parameters changes if a device decides about the step; transposed parameters have no gaps."""
    memory = torch.zeros(3, 4, 6)
    params = [memory[0, :, :3], memory[1].T, memory[2, :, 1::2]]
    steps = [torch.randn(p.shape) for p in params]
    apply_step(params, steps, 0.5, 1.0, torch.tensor(taken))
    for p, step in zip(params, steps, strict=True):
        torch.testing.assert_close(p, -0.5 * step if taken else torch.zeros_like(p))
    others = [memory[0, :, 3:], memory[2, :, ::2]]
    assert not any(t.any() for t in others)
