"""Mixtures of experts: tokens are sent to some experts, whose weights are stacked in one parameter.

Oracles are the GGN, and the same mixture with separate layers for each expert.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from kfs import EKFAC, GGN, KFAC, EmpiricalRisk, inspect, load
from kfs.errors import ModelError
from kfs.factors import exact_blocks
from kfs.losses import TokenCrossEntropy
from tests.factors.models import Function
from tests.factors.test_composites import same_predictions
from tests.operators.contract import close

pytestmark = pytest.mark.usefixtures("grouped_in_double")

EXPERTS, WIDTH, HIDDEN = 3, 4, 8
STYLES = ("loop", "capacity", "grouped")


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


class Mixture(nn.Module):
    """Sends every token to the best `k` experts, each of which has two linear maps.

    Args:
        style: `"layers"` for experts that are modules; `"loop"`, `"capacity"` or `"grouped"` for stacked weights, which
        multiply the tokens of one expert after the other, or all at once.
        k: Number of experts per token.
    """

    def __init__(self, style: str, k: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.style, self.k = style, k
        self.router = normal(EXPERTS, WIDTH)
        up, down = normal(EXPERTS, HIDDEN, WIDTH) / 2, normal(EXPERTS, WIDTH, HIDDEN) / 2
        for name, W in (("up", up), ("down", down)):
            layers = [nn.Linear(W.shape[2], W.shape[1], bias=False).double() for _ in range(EXPERTS)]
            for e, layer in enumerate(layers):
                layer.weight.data.copy_(W[e])
            setattr(self, name, nn.ModuleList(layers) if style == "layers" else nn.Parameter(W))

    def forward(self, x: Tensor) -> Tensor:
        """Predict from `[N, positions, width]`, or `[N, width]`."""
        tokens = x.reshape(-1, WIDTH)
        scores, chosen = (tokens @ self.router.T).softmax(1).topk(self.k)
        # Pairs of a token and an expert, sorted by expert; those of one expert are in the order of tokens.
        order = chosen.flatten().argsort(stable=True)
        token, expert = order // self.k, chosen.flatten()[order]
        outputs = self.experts(tokens[token], expert) * scores.flatten()[order].unsqueeze(1)
        return torch.zeros_like(tokens).index_add(0, token, outputs).reshape(x.shape)

    def experts(self, x: Tensor, expert: Tensor) -> Tensor:
        """Apply each expert to its tokens."""
        up: Any = self.up
        down: Any = self.down
        counts = expert.bincount(minlength=EXPERTS)
        if self.style == "grouped":
            ends = counts.cumsum(0).int()
            hidden = torch._grouped_mm(x, up.mT, offs=ends).tanh()
            return torch._grouped_mm(hidden, down.mT, offs=ends)
        if self.style == "capacity":
            slot = torch.arange(len(x)) - (counts.cumsum(0) - counts)[expert]
            slots = x.new_zeros(EXPERTS, len(x), WIDTH).index_put((expert, slot), x)
            return torch.bmm(torch.bmm(slots, up.mT).tanh(), down.mT)[expert, slot]
        outputs = []
        for e, mine in enumerate(x.split(counts.tolist())):
            if self.style == "layers":
                outputs.append(down[e](up[e](mine).tanh()))
            else:
                outputs.append(F.linear(F.linear(mine, up[e]).tanh(), down[e]))
        return torch.cat(outputs)


def risk_of(model: nn.Module, X: Tensor) -> EmpiricalRisk:
    generator = torch.Generator().manual_seed(2)
    y = torch.randn(X.shape, generator=generator, dtype=torch.float64)
    return EmpiricalRisk(model, nn.MSELoss(), [(X[:4], y[:4]), (X[4:], y[4:])])


def sent_to(experts: list[int], num_data: int) -> Tensor:
    """Return examples of one token each that are sent to given experts, in order."""
    router = Mixture("loop").router
    tokens = torch.randn(1000, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    chosen = (tokens @ router.T).argmax(1)
    places = [int((chosen == experts[n % len(experts)]).nonzero()[n]) for n in range(num_data)]
    return tokens[places]


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("style", STYLES)
def test_factors_are_those_of_layers(style: str, k: int) -> None:
    X = torch.randn(6, 5, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    model, layers = Mixture(style, k), Mixture("layers", k)
    if style != "grouped":  # which PyTorch has in float32 only
        same_predictions(EmpiricalRisk(model, nn.MSELoss(), (X, X)))
        close(model(X), layers(X))
    K, L = KFAC(risk_of(model, X)), KFAC(risk_of(layers, X))
    assert list(K.blocks) == [f"{name}[{e}]" for name in ("up", "down") for e in range(EXPERTS)]
    for block, layer in zip(K.blocks.values(), L.blocks.values(), strict=True):
        close(block.A, layer.A)
        close(block.B, layer.B)  # free slots of experts with a capacity do not count


@pytest.mark.parametrize("style", STYLES)
def test_experts_without_tokens(style: str) -> None:
    """A batch may use only some of the experts, and so may all data. Unused experts have no curvature."""
    X = torch.cat([sent_to([0], 4), sent_to([1, 0], 4)])
    risk, layers = risk_of(Mixture(style), X), risk_of(Mixture("layers"), X)
    K, L = KFAC(risk), KFAC(layers)
    close(K.trace(), L.trace())
    for name in ("up", "down"):
        block = K.blocks[f"{name}[2]"]
        assert not block.A.any()
        assert not block.B.any()
    for method in ("exact", "factored", "per-factor"):
        inverse = K.inverse(0.1, method)
        assert inverse.to_dense().isfinite().all()
    v = normal(K.shape[0])
    close((K @ (K.inverse(0.1) @ v)) + 0.1 * (K.inverse(0.1) @ v), v)


@pytest.mark.parametrize("style", ["loop", "grouped"])
def test_eigenvalues_of_experts_without_tokens(style: str) -> None:
    """An expert gets tokens of all examples in a batch, or of none."""
    X = torch.cat([sent_to([0], 4), sent_to([1], 4)])
    exact = GGN(risk_of(Mixture("loop"), X)).to_dense()
    for sharing in ("expand", "reduce"):
        close(EKFAC(risk_of(Mixture(style), X), sharing=sharing).trace(), exact.trace())
    close(EKFAC(risk_of(Mixture(style), X), batch_axis=1).trace(), exact.trace())
    close(exact_blocks(risk_of(Mixture(style), X)).diagonal(), exact.diagonal())


class Skips(Mixture):
    """Skips experts without tokens."""

    def experts(self, x: Tensor, expert: Tensor) -> Tensor:
        up: Any = self.up
        down: Any = self.down
        used = expert.unique().tolist()
        return torch.cat([F.linear(F.linear(x[expert == e], up[e]).tanh(), down[e]) for e in used])


def test_experts_that_are_not_used(tmp_path: Path) -> None:
    """Unused experts have no block; files, inverses and products work without them."""
    X = torch.cat([sent_to([0], 4), sent_to([2], 4)])
    risk = risk_of(Skips("loop"), X)
    K = KFAC(risk)
    assert list(K.blocks) == ["up[0]", "up[2]", "down[0]", "down[2]"]
    L = KFAC(risk_of(Mixture("layers"), X))
    close(K.to_dense(), L.to_dense())
    size = HIDDEN * WIDTH
    unused = slice(size, 2 * size)
    assert not K.to_dense()[unused].any()
    close(K.inverse(0.5).to_dense()[unused, unused], 2 * torch.eye(size, dtype=torch.float64))
    K.save(tmp_path / "k")
    close(load(tmp_path / "k").to_dense(), K.to_dense())
    close(EKFAC(risk).to_dense()[unused], torch.zeros(size, K.shape[0], dtype=torch.float64))


def test_more_data_may_use_other_experts() -> None:
    """Blocks equal those of all data at once."""
    some, others, rest = sent_to([0, 2], 7), sent_to([1], 5), sent_to([2, 1], 6)
    K = KFAC(risk_of(Skips("loop"), some))
    second = KFAC(risk_of(Skips("loop"), others))
    before = second.to_dense()
    K.merge(second).update(risk_of(Skips("loop"), rest))
    together = KFAC(risk_of(Skips("loop"), torch.cat([some, others, rest])))
    assert list(K.blocks) == list(together.blocks)
    for block, expected in zip(K.blocks.values(), together.blocks.values(), strict=True):
        close(block.A, expected.A)
    close(second.to_dense(), before)  # it shares no tensor that was changed
    model = Function(lambda m, x: x @ m.up[0].T, up=normal(EXPERTS, HIDDEN, WIDTH))
    with pytest.raises(ModelError, match="The blocks differ"):  # some parameters are missing
        K.update(EmpiricalRisk(model, nn.MSELoss(), (some, normal(7, HIDDEN))))


class SkipsLayers(Mixture):
    """Does not call experts without tokens, which are modules."""

    def experts(self, x: Tensor, expert: Tensor) -> Tensor:
        up: Any = self.up
        down: Any = self.down
        return torch.cat([down[e](up[e](x[expert == e]).tanh()) for e in expert.unique().tolist()])


def test_more_data_may_use_other_layers() -> None:
    """Experts may be modules. Parts of the data may use different experts; the result is that of all data at once."""
    some, others = sent_to([0, 2], 7), sent_to([1, 2], 5)
    K, second = KFAC(risk_of(SkipsLayers("layers"), some)), KFAC(risk_of(SkipsLayers("layers"), others))
    assert set(K.blocks) != set(second.blocks)
    together = KFAC(risk_of(SkipsLayers("layers"), torch.cat([some, others])))
    for both in (
        KFAC(risk_of(SkipsLayers("layers"), some)).merge(second),
        K.update(risk_of(SkipsLayers("layers"), others)),
    ):
        assert list(both.blocks) == list(together.blocks)
        close(both.to_dense(), together.to_dense())


def test_every_expert_has_a_row_in_the_table() -> None:
    table = inspect(Mixture("grouped"), sent_to([0, 1, 2], 6))
    assert [row.block for row in table.rows] == [f"{name}[{e}]" for name in ("up", "down") for e in range(EXPERTS)]
    assert [(row.parameter, row.A, row.B) for row in table.rows[:2]] == [("up", "dense 4x4", "dense 8x8")] * 2
    assert table.rows[0].shape == (EXPERTS, HIDDEN, WIDTH)


def test_weights_that_are_gathered_for_every_datum() -> None:
    """Such a product has no rule. The error names the operation, and the diagonal is exact."""
    model = Function(lambda m, x: (x.unsqueeze(1) @ m.W[(x[:, 0] > 0).long()]).squeeze(1).tanh(), W=normal(2, 4, 3))
    X = normal(6, 4)
    assert "__getitem__" in inspect(model, X).uncovered["W"]
    risk = EmpiricalRisk(model, nn.MSELoss(), (X, normal(6, 3)))
    with pytest.raises(ModelError, match="__getitem__"):
        KFAC(risk)
    close(KFAC(risk, uncovered="diagonal").diagonal(), GGN(risk).diagonal())


@pytest.mark.parametrize("some", [lambda W: W[[2, 0]], lambda W: W.tanh()], ids=["constant indices", "function"])
def test_what_is_computed_from_stacked_weights(some: Any) -> None:
    model = Function(
        lambda m, x: torch.bmm(x.unsqueeze(0).expand(len(some(m.W)), -1, -1), some(m.W)).sum(0), W=normal(3, 4, 2)
    )
    assert "bmm before it meets the batch" in inspect(model, normal(5, 4)).uncovered["W"]


def test_whole_and_by_experts() -> None:
    """A block of all experts cannot be combined with a block for each expert."""
    model = Function(
        lambda m, x: torch.einsum("nd,edf->nef", x, m.W).sum(1) + torch.einsum("nd,df->nf", x, m.W[1]),
        W=normal(3, 4, 2),
    )
    assert "does not fit together" in inspect(model, normal(5, 4)).uncovered["W"]


def test_contracted_at_once_is_one_block() -> None:
    """If the data have no axis of experts, all experts have the same input and share a factor."""
    model = Function(lambda m, x: torch.einsum("nd,edf->nef", x, m.W).tanh().sum(1), W=normal(3, 4, 2))
    risk = EmpiricalRisk(model, nn.MSELoss(), (normal(1, 4), normal(1, 2)))
    K = KFAC(risk)
    assert list(K.blocks) == ["W"]
    assert K.blocks["W"].B.shape == (6, 6)
    close(K.to_dense(), GGN(risk).to_dense())


@pytest.mark.parametrize("first", ["embedding", "matmul"])
def test_tied_experts(first: str) -> None:
    """An expert that decodes with the transpose of its own weight has one block with both roles."""

    def stacked(m: Any, x: Tensor) -> Tensor:
        return layers([m.W[0], m.W[1]], x)

    def layers(W: Any, x: Tensor) -> Tensor:
        tokens = x[:, 0].long()
        if first == "embedding":
            return sum((F.embedding(tokens, w).tanh() @ w.T for w in W), torch.zeros(()))
        return sum(((x @ w).tanh() @ w.T for w in W), torch.zeros(()))

    W = normal(2, 5, 3)
    data = (torch.arange(5.0).double().unsqueeze(1).expand(-1, 5).contiguous(), normal(5, 5))
    K = KFAC(EmpiricalRisk(Function(stacked, W=W), nn.MSELoss(), data))
    apart = Function(lambda m, x: layers([m.V, m.W], x), V=W[0], W=W[1])
    L = KFAC(EmpiricalRisk(apart, nn.MSELoss(), data))
    assert list(K.blocks) == ["W[0]", "W[1]"]
    for block, expected in zip(K.blocks.values(), L.blocks.values(), strict=True):
        assert len(block.sums.roles) == 2
        close(block.A, expected.A)
        close(block.B, expected.B)


def test_vectors_of_a_stack() -> None:
    """Scales and shifts of several normalizations, or of several layers, may be rows of one parameter."""

    def compute(m: Any, x: Tensor) -> Tensor:
        for e in range(2):
            x = F.layer_norm(F.linear(x, m.W, m.b[e]).tanh(), (4,), m.s[e], m.t[e])
        return x

    params = {"s": normal(2, 4), "t": normal(2, 4), "b": normal(2, 4)}
    model = Function(compute, **params, W=normal(4, 4))
    risk = EmpiricalRisk(model, nn.MSELoss(), (normal(1, 4), normal(1, 4)), params=["s", "t", "b"])
    K, exact = KFAC(risk), GGN(risk)
    assert list(K.blocks) == [f"{name}[{e}]" for name in "stb" for e in range(2)]
    for name in params:
        blocks = torch.block_diag(torch.ones(4, 4), torch.ones(4, 4)).bool()
        close(K.submatrix(name).to_dense(), torch.where(blocks, exact.submatrix(name).to_dense(), 0.0))


@pytest.mark.parametrize("alpha", [1.0, 2.0])
@pytest.mark.parametrize("beta", [0.0, 1.0, 0.5])
def test_scaled_baddbmm(alpha: float, beta: float) -> None:
    """Scales enter predictions and curvature; the bias has a block of its own, unless it joins the weights' block."""

    def compute(m: Any, x: Tensor) -> Tensor:
        z = torch.baddbmm(m.b.unsqueeze(1), x.expand(2, -1, -1), m.W, alpha=alpha, beta=beta)
        return z.tanh().transpose(0, 1).flatten(1)

    model = Function(compute, W=normal(2, 4, 3), b=normal(2, 3))
    risk = EmpiricalRisk(model, nn.MSELoss(), (normal(3, 4), normal(3, 6)))
    same_predictions(risk)
    names = ["W", "b"] if beta else ["W"]
    risk = EmpiricalRisk(model, nn.MSELoss(), (normal(3, 4), normal(3, 6)), params=names)
    K = EKFAC(risk)
    joint = alpha == beta == 1
    assert list(K.blocks) == (["W[0]", "W[1]"] if joint or not beta else ["W[0]", "W[1]", "b"])
    assert all((block.layout.bias is not None) == joint for block in K.blocks.values())
    close(K.trace(), GGN(risk).to_dense().trace())


@pytest.mark.parametrize("shape", [(2, 1, 3), (2, 1), (1, 3)], ids=str)
@pytest.mark.parametrize("names", [["W"], ["c"], ["W", "c"]], ids=str)
def test_baddbmm_with_another_input(names: list[str], shape: tuple[int, ...]) -> None:
    """An input that is not a bias of each expert, `[E, out]`, is added; an input that is not a parameter is ignored."""

    def compute(m: Any, x: Tensor) -> Tensor:
        c = m.c if m.c.ndim == 3 else m.c.unsqueeze(1)
        return torch.baddbmm(c, x.expand(2, -1, -1), m.W).tanh().transpose(0, 1).flatten(1)

    model = Function(compute, W=normal(2, 4, 3), c=normal(*shape))
    risk = EmpiricalRisk(model, nn.MSELoss(), (normal(3, 4), normal(3, 6)), params=names)
    same_predictions(risk)
    K = EKFAC(risk)
    assert list(K.blocks) == [block for block in ("W[0]", "W[1]", "c") if block[0] in names]
    close(K.trace(), GGN(risk).to_dense().trace())


@pytest.mark.parametrize("shape", [(4, 3), (1, 4, 3)], ids=["expanded", "one expert"])
@pytest.mark.parametrize("product", ["bmm", "einsum"])
def test_one_matrix_for_all(product: str, shape: tuple[int, ...]) -> None:
    """Multiplying every example with the same matrix is one use, with the batch axis of the data."""

    def compute(m: Any, x: Tensor) -> Tensor:
        W = m.W.expand(len(x), -1, -1)
        z = torch.bmm(x, W) if product == "bmm" else torch.einsum("nsi,nio->nso", x, W)
        return z.tanh().sum(1)

    model = Function(compute, W=normal(*shape))
    risk = EmpiricalRisk(model, nn.MSELoss(), (normal(5, 2, 4), normal(5, 3)))
    same_predictions(risk)
    K, exact = EKFAC(risk, sharing="reduce"), GGN(risk)
    assert list(K.blocks) == ["W"]
    close(K.trace(), exact.to_dense().trace())


def test_experts_with_several_output_axes() -> None:
    """An expert that maps to heads: `[E, in, heads, out]`."""
    model = Function(lambda m, x: torch.einsum("ned,edhk->nehk", x, m.W).tanh().sum(1).flatten(1), W=normal(2, 4, 3, 2))
    risk = EmpiricalRisk(model, nn.MSELoss(), (normal(1, 2, 4), normal(1, 6)))
    K = KFAC(risk)
    assert list(K.blocks) == ["W[0]", "W[1]"]
    assert K.blocks["W[0]"].B.shape == (6, 6)
    blocks = torch.block_diag(torch.ones(24, 24), torch.ones(24, 24)).bool()
    close(K.to_dense(), torch.where(blocks, GGN(risk).to_dense(), 0.0))


def test_mixtral() -> None:
    """All parameters are covered, and both implementations of Hugging Face have the same factors."""
    t: Any = pytest.importorskip("transformers")
    config: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "vocab_size": 11}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 3, "num_experts_per_tok": 2}
    ids = torch.randint(1, 11, (5, 6))
    found = []
    for implementation in ("eager", "grouped_mm"):
        torch.manual_seed(0)
        model = t.MixtralForCausalLM(t.MixtralConfig(**config, experts_implementation=implementation)).double().eval()
        table = inspect(model, {"input_ids": ids})
        assert not table.uncovered
        weight = "model.layers.0.mlp.experts.gate_up_proj"
        assert [row.block for row in table.rows if row.parameter == weight] == [f"{weight}[{e}]" for e in range(3)]
        risk = EmpiricalRisk(model, TokenCrossEntropy(shift=True), [({"input_ids": ids}, ids)])
        found.append(KFAC(risk, "empirical"))
        assert found[-1].domain.size == sum(p.numel() for p in model.parameters())
    for block, other in zip(*(K.blocks.values() for K in found), strict=True):
        close(block.A, other.A)
        close(block.B, other.B)
