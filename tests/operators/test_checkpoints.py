"""Activation checkpointing, and operations that PyTorch cannot differentiate: right, or refused with a reason."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kfs.errors import ModelError
from kfs.operators import GGN, Fisher, Hessian, Jacobian
from kfs.problem.risk import EmpiricalRisk
from kfs.problem.torch_fixes import explained
from tests.operators.contract import close


class Checkpointed(nn.Module):
    """Two layers, the first of which may be recomputed in the backward pass; its embedding has a padding index."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.embedding, self.head, self.reentrant = nn.Embedding(4, 3, padding_idx=0), nn.Linear(3, 2), reentrant

    def inner(self, x: Tensor) -> Tensor:
        return torch.tanh(self.embedding(x)).sum(1)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.inner(x) if self.reentrant is None else checkpoint(self.inner, x, use_reentrant=self.reentrant)
        result: Tensor = self.head(inner)
        return result


def checkpointed(reentrant: bool | None, other_values: bool = False) -> EmpiricalRisk:
    torch.manual_seed(0)
    model = Checkpointed(reentrant).double()
    X, y = torch.randint(4, (5, 3)), torch.randn(5, 2, dtype=torch.float64)
    params = {name: p + 1 for name, p in model.named_parameters()} if other_values else None
    return EmpiricalRisk(model, nn.MSELoss(), (X, y), params=params)


@pytest.mark.parametrize("chunk_size", [1, 4])
@pytest.mark.parametrize("kind", [Hessian, GGN])
def test_activation_checkpointing_changes_nothing(kind: Any, chunk_size: int) -> None:
    plain, saving = checkpointed(None), checkpointed(False)
    close(saving.gradient()["embedding.weight"], plain.gradient()["embedding.weight"])
    close(kind(saving, chunk_size=chunk_size).to_dense(), kind(plain).to_dense())
    close(
        (Jacobian(saving, chunk_size=chunk_size).T @ torch.ones(10).double()),
        Jacobian(plain).T @ torch.ones(10).double(),
    )


def test_checkpoints_that_would_go_wrong_are_refused() -> None:
    for operation in (EmpiricalRisk.gradient, lambda risk: GGN(risk).to_dense(), lambda risk: Hessian(risk).to_dense()):
        with pytest.raises(ModelError, match=r"reentrant.*use_reentrant=False"):
            operation(checkpointed(True))
        with pytest.raises(ModelError, match=r"instead of the values given.*Switch it off"):
            operation(checkpointed(False, other_values=True))
    with pytest.raises(RuntimeError, match="something else"), checkpointed(None, other_values=True).untouched():
        raise RuntimeError("something else")
    close(
        checkpointed(None, other_values=True).gradient()["head.bias"], checkpointed(None, True).gradient()["head.bias"]
    )


def test_operations_without_second_derivative_are_explained() -> None:
    def model(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.cdist(x, params["centers"], p=1.5)

    data = (torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64))
    risk = EmpiricalRisk(model, nn.MSELoss(), data, params={"centers": torch.rand(2, 3, dtype=torch.float64)})
    for operator in (Hessian(risk), GGN(risk), Jacobian(risk)):
        with pytest.raises(ModelError, match=r"PyTorch cannot differentiate.*params="):
            operator @ torch.ones(operator.shape[1], dtype=torch.float64)
    with pytest.raises(RuntimeError, match="something else"), explained():
        raise RuntimeError("something else")


def test_second_derivatives_of_products_with_zeros_are_explained() -> None:
    def model(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.ones_like(x).scatter_reduce(1, torch.zeros_like(x, dtype=torch.int64), x * params["W"], "prod")

    X = torch.zeros(2, 2, dtype=torch.float64)
    risk = EmpiricalRisk(model, nn.MSELoss(), (X, X), params={"W": torch.ones(2, dtype=torch.float64)})
    with pytest.raises(ModelError, match=r"PyTorch cannot differentiate.*Double backward is unsupported"):
        Hessian(risk).to_dense()


class TwoLayers(nn.Module):
    """Two layers of equal shape that are recomputed together, so that they may be mixed up."""

    def __init__(self, saving: bool) -> None:
        super().__init__()
        self.a, self.b, self.saving = nn.Linear(3, 3), nn.Linear(3, 3), saving

    def inner(self, x: Tensor) -> Tensor:
        result: Tensor = self.b(torch.tanh(self.a(x)))
        return result

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if self.saving else self.inner(x)


def two_layers(saving: bool, num_data: int, frozen: bool = False, params: list[str] | None = None) -> EmpiricalRisk:
    torch.manual_seed(0)
    model = TwoLayers(saving).double()
    model.a.requires_grad_(not frozen)
    X, y = torch.randn(2, num_data, 3, dtype=torch.float64)
    return EmpiricalRisk(model, nn.MSELoss(), (X, y), params=params)


@pytest.mark.parametrize("num_data", [3, 5])
@pytest.mark.parametrize("chunk_size", [1, 4])
@pytest.mark.parametrize("kind", [Hessian, GGN, Fisher])
def test_blocks_of_checkpointed_models(kind: Any, chunk_size: int, num_data: int) -> None:
    plain, saving = (kind(two_layers(s, num_data), chunk_size=chunk_size) for s in (False, True))
    for rows, columns in (["b.weight", "b.weight"], ["a.weight", "a.weight"], ["a.bias", "b.weight"]):
        close(saving.submatrix(rows, columns).to_dense(), plain.submatrix(rows, columns).to_dense())
    for blocks in ("parameter", "layer"):
        plain, saving = (kind(two_layers(s, num_data), block_diagonal=blocks) for s in (False, True))
        close(saving.to_dense(), plain.to_dense())


def test_frozen_parameters_of_checkpointed_models_are_refused() -> None:
    saving = two_layers(True, 5, frozen=True, params=["a.weight", "b.weight"])
    assert saving.value() == two_layers(False, 5).value()
    J = Jacobian(saving)
    u = torch.ones(15, dtype=torch.float64)
    for call in (
        saving.gradient,
        GGN(saving).diagonal,
        GGN(saving).to_dense,
        Hessian(saving).to_dense,
        lambda: J.T @ u,
    ):
        with pytest.raises(ModelError, match=r"differentiable copies of frozen ones.*set requires_grad"):
            call()
    rest = {"frozen": True, "params": ["b.weight"]}
    close(GGN(two_layers(True, 5, **rest)).diagonal(), GGN(two_layers(False, 5, **rest)).diagonal())  # type: ignore[arg-type]


class Fickle(TwoLayers):
    """Computes a different function when it is recomputed."""

    calls = 0

    def inner(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().inner(x) if self.calls % 2 else self.a(x)


def test_checkpoints_that_change_are_explained() -> None:
    X, y = torch.randn(2, 5, 3, dtype=torch.float64)
    risk = EmpiricalRisk(Fickle(True).double(), nn.MSELoss(), (X, y))
    for call in (risk.gradient, GGN(risk).diagonal):
        with pytest.raises(ModelError, match=r"PyTorch cannot differentiate.*checkpoint"):
            call()
