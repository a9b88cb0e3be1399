"""Parameters that stack matrices, `[E, out, in]` or `[E, in, out]`: every matrix has a block of its own.

Oracles are the GGN, autograd, and models in which every expert is a layer of its own.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from kfs import EKFAC, GGN, KFAC, EmpiricalRisk
from kfs.errors import ModelError
from kfs.factors import exact_blocks
from kfs.factors.accumulate import FactorSums, Moment, PerDatumSums
from kfs.factors.capture import forward
from kfs.factors.compute import sweep
from kfs.factors.rules import new_trace
from kfs.factors.settings import Settings
from tests.factors.models import Function
from tests.factors.test_composites import same_predictions
from tests.operators.contract import close

pytestmark = pytest.mark.usefixtures("grouped_in_double")

EXPERTS, INPUTS, OUTPUTS = 3, 4, 2
SHARING = ("expand", "reduce")
Style = Callable[..., Tensor]


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


class Experts(nn.Module):
    """Applies all experts to every example, and mixes their outputs.

    Args:
        style: Takes this module and data `[N, in]`, and returns outputs `[N, E, out]`.
        names: The parameters that the style uses: weights `W`, their transposes `V`, one matrix `U` of all of them, or
        biases `b`.
    """

    def __init__(self, style: Style, names: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        W = normal(EXPERTS, OUTPUTS, INPUTS)
        params = {"W": W, "V": W.mT.contiguous(), "U": W.flatten(0, 1), "b": normal(EXPERTS, OUTPUTS)}
        for name in names:
            setattr(self, name, nn.Parameter(params[name].clone()))
        self.style = style
        self.mix = normal(EXPERTS, OUTPUTS, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("neo,eof->nf", self.style(self, x).tanh(), self.mix)

    def layers(self) -> "Layers":
        """Return the same network, with a linear layer for each expert."""
        params = {name: p.detach() for name, p in self.named_parameters()}
        W = params["V"].mT if "V" in params else params.get("W", params.get("U")).view(EXPERTS, OUTPUTS, INPUTS)  # type: ignore[union-attr]
        return Layers(W, params.get("b"), self.mix)


class Layers(nn.Module):
    """Experts that are linear layers."""

    def __init__(self, W: Tensor, b: Tensor | None, mix: Tensor) -> None:
        super().__init__()
        layers = [nn.Linear(INPUTS, OUTPUTS, b is not None, dtype=W.dtype) for _ in W]
        for e, layer in enumerate(layers):
            layer.weight.data.copy_(W[e])
            if b is not None:
                layer.bias.data.copy_(b[e])
        self.layers = nn.ModuleList(layers)
        self.mix = mix

    def forward(self, x: Tensor) -> Tensor:
        outputs = torch.stack([layer(x) for layer in self.layers], 1)
        return torch.einsum("neo,eof->nf", outputs.tanh(), self.mix)


def each(function: Callable[[Any, Tensor, int], Tensor]) -> Style:
    """Return a style that computes the experts in a loop."""
    return lambda m, x: torch.stack([function(m, x, e) for e in range(EXPERTS)], 1)


def same(x: Tensor) -> Tensor:
    """Return the same data for all experts, `[E, N, in]`."""
    return x.expand(EXPERTS, -1, -1)


def column(x: Tensor) -> Tensor:
    """Return each example as a matrix of one row, for all experts: `[N, 1, 1, in]`."""
    return x[:, None, None]


def grouped(m: Any, x: Tensor) -> Tensor:
    ends = len(x) * torch.arange(1, EXPERTS + 1, dtype=torch.int32)
    outputs = torch._grouped_mm(x.repeat(EXPERTS, 1), m.V, offs=ends)
    return outputs.reshape(EXPERTS, len(x), -1).transpose(0, 1)


# By name: the parameters that are used, and a style. All styles compute the same function.
STYLES: dict[str, tuple[str, Style]] = {
    "linear": ("Wb", each(lambda m, x, e: F.linear(x, m.W[e], m.b[e]))),
    "linear, no bias": ("W", each(lambda m, x, e: F.linear(x, m.W[e, :, :]))),
    "linear, transposed": ("V", each(lambda m, x, e: F.linear(x, m.V[e].T))),
    "matmul": ("V", each(lambda m, x, e: x @ m.V.select(0, e))),
    "matmul, transposed": ("W", each(lambda m, x, e: torch.matmul(x, m.W.unbind()[e].mT))),
    "matmul from the left": ("W", each(lambda m, x, e: (m.W[torch.tensor(e)] @ x.T).T)),
    "mm": ("V", each(lambda m, x, e: x.mm(m.V.chunk(EXPERTS)[e].squeeze(0)))),
    "addmm": ("Vb", each(lambda m, x, e: torch.addmm(m.b[e], x, m.V[e]))),
    "einsum": ("W", each(lambda m, x, e: torch.einsum("oi,ni->no", m.W[e], x))),
    "einsum, transposed": ("V", each(lambda m, x, e: torch.einsum("ni,oi->no", x, m.V[e].T))),
    "bmm": ("V", lambda m, x: torch.bmm(same(x), m.V).transpose(0, 1)),
    "bmm, transposed": ("W", lambda m, x: same(x).bmm(mat2=m.W.mT).transpose(0, 1)),
    "bmm from the left": ("W", lambda m, x: torch.bmm(m.W, same(x).mT).permute(2, 0, 1)),
    "bmm of one matrix": ("U", lambda m, x: torch.bmm(same(x), m.U.view(EXPERTS, -1, INPUTS).mT).transpose(0, 1)),
    "bmm of some experts": (
        "V",
        lambda m, x: torch.cat([same(x)[:1].bmm(m.V[:1]), same(x)[1:].bmm(m.V[1:])]).transpose(0, 1),
    ),
    "baddbmm": ("Vb", lambda m, x: torch.baddbmm(m.b[:, None], same(x), m.V).transpose(0, 1)),
    "matmul of stacks": ("V", lambda m, x: (same(x) @ m.V).transpose(0, 1)),
    "matmul, same input": ("V", lambda m, x: (x @ m.V).transpose(0, 1)),
    "matmul, broadcast": ("V", lambda m, x: (column(x) @ m.V).squeeze(2)),
    "matmul from the left, broadcast": ("W", lambda m, x: (m.W @ column(x).mT).squeeze(3)),
    "matmul, named": ("V", lambda m, x: torch.matmul(other=m.V, input=column(x)).squeeze(2)),
    "matmul, from the right": ("V", lambda m, x: Tensor.__rmatmul__(m.V, column(x)).squeeze(2)),
    "matmul, batch of one": ("V", lambda m, x: (column(x) @ m.V.unsqueeze(0)).squeeze(2)),
    "matmul, batch": ("V", lambda m, x: (column(x) @ m.V.expand(len(x), -1, -1, -1)).squeeze(2)),
    "matmul, axis between": ("V", lambda m, x: (x @ m.V.unsqueeze(1)).squeeze(1).transpose(0, 1)),
    "einsum of stacks": ("V", lambda m, x: torch.einsum("nei,eio->neo", column(x)[:, 0].expand(-1, EXPERTS, -1), m.V)),
    "einsum, experts first": ("W", lambda m, x: torch.einsum("eoi,eni->neo", [m.W, same(x)])),
    "grouped_mm": ("V", grouped),
    "grouped_mm of stacks": ("V", lambda m, x: torch._grouped_mm(same(x), m.V).transpose(0, 1)),
}
# PyTorch multiplies groups in float32 at most; in a pass, the rule replaces this operation.
IN_FLOAT64 = [name for name in STYLES if not name.startswith("grouped")]


def make(style: str) -> Experts:
    names, function = STYLES[style]
    return Experts(function, names)


def risk_of(model: nn.Module, num_data: int) -> EmpiricalRisk:
    generator = torch.Generator().manual_seed(1)
    X, y = (torch.randn(num_data, n, generator=generator, dtype=torch.float64) for n in (INPUTS, 3))
    return EmpiricalRisk(model, nn.MSELoss(), (X, y))


@pytest.mark.parametrize("style", IN_FLOAT64)
def test_predictions_are_the_same(style: str) -> None:
    model = make(style)
    same_predictions(risk_of(model, 5))
    X = normal(5, INPUTS)
    close(model(X), model.layers()(X))


@pytest.mark.parametrize("style", ["grouped_mm", "grouped_mm of stacks"])
def test_predictions_of_groups(style: str) -> None:
    """In float32, and with sizes that PyTorch's kernel accepts; rows without an expert are zero."""
    X, V = torch.randn(6, 8), torch.randn(EXPERTS, 8, 4)
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)

    def compute(m: Any, x: Tensor) -> Tensor:
        if style == "grouped_mm":
            return F.grouped_mm(x, m.V, offs=ends)
        return F.grouped_mm(x.expand(EXPERTS, -1, -1), m.V).transpose(0, 1)

    model = Function(compute, V=V)
    risk = EmpiricalRisk(model, nn.MSELoss(), (X, model(X).detach().nan_to_num()))
    (batch,) = risk.batches()
    with torch.enable_grad():
        f, _ = forward(risk, batch, new_trace(risk.params), [FactorSums(Settings())])
    rows = slice(0, 5 if style == "grouped_mm" else 6)
    torch.testing.assert_close(f[rows], model(X)[rows])
    assert f.shape == model(X).shape
    assert not f[rows.stop :].any()


@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("style", IN_FLOAT64)
def test_one_datum(style: str, sharing: Any) -> None:
    """KFAC is the exact curvature without the blocks between experts."""
    risk = risk_of(make(style), 1)
    K = KFAC(risk, sharing=sharing)
    owners = [torch.arange(EXPERTS).repeat_interleave(p.numel() // EXPERTS) for p in risk.params.values()]
    owner = torch.cat(owners)
    exact = GGN(risk).to_dense()
    close(K.to_dense(), torch.where(owner.unsqueeze(0) == owner.unsqueeze(1), exact, 0.0))


@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("style", STYLES)
def test_factors_are_those_of_layers(style: str, sharing: Any) -> None:
    model = make(style)
    K, L = (KFAC(risk_of(m, 5), sharing=sharing) for m in (model, model.layers()))
    for e, (block, layer) in enumerate(zip(K.blocks.values(), L.blocks.values(), strict=True)):
        weight = next(iter(risk_of(model, 1).params))
        assert block.name == (f"U[{2 * e}:{2 * e + 2}]" if weight == "U" else f"{weight}[{e}]")
        close(block.A, layer.A)
        close(block.B, layer.B)


@pytest.mark.parametrize("style", ["bmm from the left", "baddbmm", "einsum of stacks", "grouped_mm"])
def test_columns_together(style: str) -> None:
    close(KFAC(risk_of(make(style), 5), columns_at_once=3).to_dense(), KFAC(risk_of(make(style), 5)).to_dense())


@pytest.mark.parametrize("style", ["linear", "addmm", "baddbmm"])
def test_joint_and_separate_biases(style: str) -> None:
    model = make(style)
    joint, separate = KFAC(risk_of(model, 5)), KFAC(risk_of(model, 5), joint_bias=False)
    weight = STYLES[style][0][0]
    assert list(joint.blocks) == [f"{weight}[{e}]" for e in range(EXPERTS)]
    assert list(separate.blocks) == [f"{name}[{e}]" for name in (weight, "b") for e in range(EXPERTS)]
    for name in (weight, "b"):
        close(separate.submatrix(name).to_dense(), joint.submatrix(name).to_dense())
    for block in joint.blocks.values():
        params = {name: normal(1, *joint.domain.shapes[name]) for name in block.layout.params}
        flat = torch.cat([p.flatten() for p in params.values()])
        assert torch.equal(flat[block.layout.flat_index()], block.layout.matrix(params)[0])


@pytest.mark.parametrize("style", IN_FLOAT64)
def test_corrected_eigenvalues(style: str) -> None:
    risk = risk_of(make(style), 5)
    corrected, exact = EKFAC(risk), GGN(risk)
    close(corrected.trace(), exact.to_dense().trace())
    close(exact_blocks(risk).diagonal(), exact.diagonal())


class Gradients(Moment):
    """The sum of all per-example gradients."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.total = torch.zeros(shape, dtype=torch.float64)

    def add(self, gradients: Tensor) -> None:
        self.total += gradients.sum(0)


@pytest.mark.parametrize("style", IN_FLOAT64)
def test_inputs_and_gradients_make_up_the_gradient(style: str) -> None:
    """The sum of `g x^T` over all uses of an expert is autograd's gradient."""
    risk = risk_of(make(style), 5)
    layouts = {block.layout.key: block.layout for block in KFAC(risk).blocks.values()}
    found = {key: Gradients(layout.matrix_shape) for key, layout in layouts.items()}
    settings = Settings(fisher="empirical")
    sweep(risk, PerDatumSums(settings, layouts, found), settings, "gradients")
    gradient = {name: g.unsqueeze(0) for name, g in risk.gradient().items()}
    for key, layout in layouts.items():
        close(risk.reduction_factor * found[key].total, layout.matrix(gradient)[0])


@pytest.mark.parametrize("style", STYLES)
def test_autocast(style: str) -> None:
    """Results have the same precision and shape as outside of a pass."""
    names, function = STYLES[style]
    found = []

    def compute(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            z = function(m, x)
        found.append((z.dtype, z.shape))
        return z.flatten(1).float()

    width = {"W": (EXPERTS, 8, 4), "V": (EXPERTS, 4, 8), "U": (EXPERTS * 8, 4), "b": (EXPERTS, 8)}
    model = Function(compute, **{name: torch.randn(width[name]) for name in names})
    X = torch.randn(5, 4)
    risk = EmpiricalRisk(model, nn.MSELoss(), (X, torch.randn(5, EXPERTS * 8)))
    KFAC(risk)
    model(X)
    assert found[-2] == found[-1]


GROUPS = torch.tensor([6, 12, 18], dtype=torch.int32)
CHECKPOINTED: list[Callable[[Tensor, Tensor, Tensor], Tensor]] = [
    lambda x, W, _: (x.expand(EXPERTS, *x.shape) @ W.mT).tanh(),
    lambda x, W, _: torch.einsum("eni,eoi->eno", x.expand(EXPERTS, *x.shape), W).tanh(),
    lambda x, W, b: torch.baddbmm(b.unsqueeze(1), x.expand(EXPERTS, *x.shape), W.mT).tanh(),
    lambda x, W, _: torch._grouped_mm(x.repeat(EXPERTS, 1), W.mT, offs=GROUPS).tanh(),
]


@pytest.mark.parametrize("style", CHECKPOINTED)
def test_checkpoints_are_refused(style: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    """The second run of a checkpoint is not captured, so it would save other tensors than products one by one."""
    params = {"W": normal(EXPERTS, OUTPUTS, INPUTS), "b": normal(EXPERTS, OUTPUTS)}

    def forward(model: Any, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(style, x, model.W, model.b, use_reentrant=False)
        return result.reshape(EXPERTS, -1, OUTPUTS).sum(0)

    risk = EmpiricalRisk(Function(forward, **params), nn.MSELoss(), (normal(6, INPUTS), normal(6, OUTPUTS)))
    with pytest.raises(ModelError, match=r"experts.* inside of an activation checkpoint"):
        KFAC(risk)
