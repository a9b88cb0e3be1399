"""Entries of parameters that an operation uses: rows, neighbors in memory, shared biases, repeated tensors.

For one example and one position, KFAC's blocks equal those of the exact curvature, so a misplaced entry would be
noticed.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from kfs import GGN, KFAC, EmpiricalRisk, load
from tests.factors.models import Function
from tests.operators.contract import close
from tests.optim.training import one_step

SHARING = ("expand", "reduce")


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def one_datum(model: nn.Module, inputs: int, outputs: int) -> EmpiricalRisk:
    return EmpiricalRisk(model, nn.MSELoss(), (normal(1, inputs), normal(1, outputs)))


@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)], ids=str)
def test_rows_in_any_order(order: tuple[int, ...], sharing: Any) -> None:
    """Adjacent parts of a matrix do not overlap, in any order of use."""
    parts = [slice(0, 2), slice(2, 3), slice(3, 5)]

    def forward(m: Any, x: Tensor) -> Tensor:
        outputs = {place: F.linear(x, m.W[parts[place]]) for place in order}
        return torch.cat([outputs[place] for place in range(3)], 1).tanh()

    risk = one_datum(Function(forward, W=normal(5, 3)), 3, 5)
    K = KFAC(risk, sharing=sharing)
    assert list(K.blocks) == ["W[0:2]", "W[2:3]", "W[3:5]"]
    owner = torch.tensor([0, 0, 1, 2, 2]).repeat_interleave(3)
    exact = GGN(risk).to_dense()
    close(K.to_dense(), torch.where(owner.unsqueeze(0) == owner.unsqueeze(1), exact, 0.0))


def test_rows_that_overlap_are_not_covered() -> None:
    risk = one_datum(Function(lambda m, x: F.linear(x, m.W[:3]) + F.linear(x, m.W[2:]), W=normal(5, 3)), 3, 3)
    K = KFAC(risk, uncovered="diagonal")
    close(K.to_dense(), GGN(risk).to_dense().diagonal().diag())


@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("swapped", [False, True])
def test_parameters_that_are_neighbours_in_memory(sharing: Any, swapped: bool) -> None:
    """This is the case in a model that was flattened into one buffer."""
    buffer = normal(20)
    params = {"W": buffer[:8].view(2, 4), "V": buffer[8:14].view(3, 2), "b": buffer[14:17], "s": buffer[17:]}
    params = dict(reversed(params.items())) if swapped else params
    model = Function(lambda m, x: (F.linear(F.linear(x, m.W).tanh(), m.V, m.b).tanh() * m.s).tanh(), **params)
    assert len({p.untyped_storage().data_ptr() for p in model.parameters()}) == 1
    risk = one_datum(model, 4, 3)
    K = KFAC(risk, sharing=sharing)
    assert [block.layout.params for block in K.blocks.values()] == (
        [("s",), ("V", "b"), ("W",)] if swapped else [("W",), ("V", "b"), ("s",)]
    )
    for block in K.blocks.values():
        params_of = block.layout.params
        close(K.submatrix(params_of).to_dense(), GGN(risk).submatrix(params_of).to_dense())


def test_a_bias_of_two_weights() -> None:
    """The bias has no single block, and neither has the weight that it joined first; the second weight is as usual."""
    model = Function(
        lambda m, x: F.linear(F.linear(x, m.W, m.b).tanh(), m.V, m.b), W=normal(4, 4), V=normal(4, 4), b=normal(4)
    )
    risk = one_datum(model, 4, 4)
    assert list(KFAC(risk, uncovered="skip").blocks) == ["V"]
    K, exact = KFAC(risk, uncovered="diagonal"), GGN(risk)
    close(K.submatrix("V").to_dense(), exact.submatrix("V").to_dense())
    for name in ("W", "b"):
        close(K.submatrix(name).to_dense(), exact.submatrix(name).to_dense().diagonal().diag())


@pytest.mark.parametrize("num_data", [1, 3])
def test_rows_that_are_repeated(num_data: int) -> None:
    """A parameter with several rows, repeated once per example, has no batch axis before it is repeated."""

    def forward(m: Any, x: Tensor) -> Tensor:
        rows = m.t.repeat(len(x), 1).unflatten(0, (len(x), 2))  # [N, 2, 4]
        result: Tensor = (rows * x.unsqueeze(1)).sum(1).tanh()
        return result

    model = Function(forward, t=normal(2, 4))
    risk = EmpiricalRisk(model, nn.MSELoss(), (normal(num_data, 4), normal(num_data, 4)))
    K = KFAC(risk, uncovered="diagonal")
    close(K.diagonal(), GGN(risk).diagonal())


@pytest.mark.parametrize("place", [0, 2, 4])
def test_a_single_number(place: int) -> None:
    """A view of a single number belongs to its parameter, even if it is the last one in memory."""
    model = Function(
        lambda m, x: (F.linear(x, m.W) * m.scales[place : place + 1]).tanh(), W=normal(2, 3), scales=normal(5)
    )
    risk = one_datum(model, 3, 2)
    K = KFAC(risk, sharing="reduce")
    exact = GGN(risk, block_diagonal=True).to_dense()
    assert exact.diagonal()[6 + place] > 0
    close(K.to_dense(), exact)


@pytest.mark.parametrize("equation", ["nj,ij->ni", "nj,ij->in"])
@pytest.mark.parametrize("size", [3, 4])
def test_einsum_with_a_transposed_weight(equation: str, size: int) -> None:
    """Inputs belong to rows of the parameter, and outputs to its columns; in square matrices, only values show this."""

    def forward(m: Any, x: Tensor) -> Tensor:
        out = torch.einsum(equation, x, m.W.T)
        return (out if equation.endswith("ni") else out.T).tanh()

    risk = one_datum(Function(forward, W=normal(size, 3)), size, 3)
    K = KFAC(risk)
    assert "einsum" in K.blocks["W"].sums.operations
    close(K.to_dense(), GGN(risk).to_dense())


@pytest.mark.parametrize("beta", [1.0, 0.5])
@pytest.mark.parametrize("alpha", [1.0, 2.0])
def test_scaled_addmm(alpha: float, beta: float) -> None:
    """Scales of the product and of the added term enter predictions and curvature."""
    model = Function(lambda m, x: torch.addmm(m.b, x, m.W, alpha=alpha, beta=beta).tanh(), W=normal(4, 3), b=normal(3))
    risk = one_datum(model, 4, 3)
    close(KFAC(risk, uncovered="diagonal").diagonal(), GGN(risk).diagonal())


def test_steps_of_some_rows() -> None:
    """An optimizer does not move unused rows, and moves others as if they were the whole parameter."""
    X, y, W = normal(12, 3), normal(12, 2), normal(5, 3)
    settings: dict[str, Any] = {"fisher": "type-2", "lr": 0.5, "factors_every": 1}
    part = Function(lambda m, x: F.linear(x, m.W[1:3]), W=W.clone())
    whole = Function(lambda m, x: F.linear(x, m.W), W=W[1:3].clone())
    moved = one_step(part, nn.MSELoss(), X, y, **settings).reshape(5, 3)
    expected = one_step(whole, nn.MSELoss(), X, y, **settings).reshape(2, 3)
    assert not torch.allclose(expected, W[1:3])
    close(moved, torch.cat([W[:1], expected, W[3:]]))


def test_rows_of_a_bias_that_are_not_used_have_no_curvature(tmp_path: Path) -> None:
    model = Function(lambda m, x: F.linear(x, m.W[2:], m.b[2:]), W=normal(5, 3), b=normal(5))
    risk = one_datum(model, 3, 3)
    K = KFAC(risk)
    close(K.to_dense(), GGN(risk).to_dense())
    v = normal(K.shape[0])
    for _ in range(3):
        torch.full((5,), torch.nan, dtype=torch.float64)  # memory that the next tensor of this size may reuse
        close(K @ v, GGN(risk) @ v)
    K.save(tmp_path / "k")
    close(load(tmp_path / "k").to_dense(), K.to_dense())
