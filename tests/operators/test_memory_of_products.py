"""Products keep no graph of columns, no copies of all predictions, and no attention matrices in memory."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from kfs.operators import GGN, Fisher, curvature
from kfs.operators.derivatives import enabled_kernels
from kfs.problem.risk import EmpiricalRisk
from tests.operators.contract import close
from tests.operators.problems import PROBLEMS, Problem
from tests.operators.test_operators import dense


@pytest.mark.parametrize("at_once", [1, 20])
@pytest.mark.parametrize("kind", ["ggn", "empirical"])
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_predictions_are_multiplied_a_few_at_a_time(
    problem: Problem, kind: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results equal the definition for any limit of numbers at a time."""
    seen = _numbers_seen(monkeypatch)
    monkeypatch.setattr(curvature, "_NUMBERS_AT_ONCE", at_once)
    risk, *_ = problem.make()
    operator = GGN(risk, chunk_size=1) if kind == "ggn" else Fisher(risk, "empirical", chunk_size=1)
    v = torch.randn(operator.shape[1], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    close(operator @ v, dense(kind, problem) @ v)
    assert all(numbers <= at_once or num_data == 1 for numbers, num_data in seen)


def _numbers_seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Record how many numbers, and how many examples, are multiplied in prediction space at once."""
    seen: list[tuple[int, int]] = []
    for kind in (GGN, Fisher):

        def middle(self: Any, f: Tensor, batch: Any, u: Tensor, original: Any = kind.middle) -> Any:
            seen.append((u.numel(), len(f)))
            return original(self, f, batch, u)

        monkeypatch.setattr(kind, "middle", middle)
    return seen


@pytest.mark.parametrize("chunk_size", [1, 3])
def test_draws_do_not_depend_on_how_many_are_multiplied_at_once(
    chunk_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    risk, *_ = PROBLEMS[0].make()
    whole = Fisher(risk, "type-1", mc_samples=2, seed=3, chunk_size=chunk_size).to_dense()
    monkeypatch.setattr(curvature, "_NUMBERS_AT_ONCE", 1)
    close(Fisher(risk, "type-1", mc_samples=2, seed=3, chunk_size=chunk_size).to_dense(), whole)


class Attention(nn.Module):
    """Attention, optionally within a checkpoint, which records the kernels that are enabled."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.mix = nn.Linear(4, 12)
        self.head = nn.Linear(4, 3)
        self.runs: list[tuple[bool, list[SDPBackend]]] = []

    def inner(self, x: Tensor) -> Tensor:
        self.runs.append((self.mix(x).requires_grad, enabled_kernels()))
        q, k, v = self.mix(x).unsqueeze(1).chunk(3, dim=-1)
        return scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)

    def forward(self, x: Tensor) -> Tensor:
        inner = checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x)
        result: Tensor = self.head(inner).transpose(1, 2)
        return result


def attention(checkpointed: bool = False) -> tuple[Attention, EmpiricalRisk]:
    torch.manual_seed(0)
    model = Attention(checkpointed).double()
    data = (torch.randn(2, 5, 4, dtype=torch.float64), torch.randint(3, (2, 5)))
    return model, EmpiricalRisk(model, nn.CrossEntropyLoss(), data)


def test_a_column_is_pushed_forward_without_a_graph() -> None:
    model, risk = attention()
    matrix = GGN(risk).to_dense()
    v = torch.randn(len(matrix), dtype=torch.float64)
    allowed = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]
    with sdpa_kernel(allowed):
        operator = GGN(risk)
        operator @ v  # the first product compares derivatives
        model.runs.clear()
        close(operator @ v, matrix @ v)
        assert model.runs == [(False, [SDPBackend.MATH]), (True, allowed)]
    # The user's setting at the time of the product applies.
    model.runs.clear()
    with sdpa_kernel(SDPBackend.MATH):
        close(operator @ v, matrix @ v)
    assert model.runs == [(False, [SDPBackend.MATH]), (True, [SDPBackend.MATH])]
    # Faster kernels do not support several columns in the backward pass.
    model.runs.clear()
    columns = torch.stack([v, 2 * v], dim=1)
    close(operator @ columns, matrix @ columns)
    assert model.runs == [(False, [SDPBackend.MATH]), (True, [SDPBackend.MATH])]
    # Parameters that are not considered have no graph either.
    few = GGN(EmpiricalRisk(model, nn.CrossEntropyLoss(), [(b.x, b.y) for b in risk.batches()], params=["head.weight"]))
    expected = operator.submatrix("head.weight") @ v[:12]
    few @ v[:12]
    model.runs.clear()
    close(few @ v[:12], expected)
    assert [graph for graph, _ in model.runs] == [False, True]


@pytest.mark.parametrize("chunk_size", [1, 16])
@pytest.mark.parametrize("reuse", [False, True])
def test_checkpoints_run_again_with_the_same_kernels(chunk_size: int, reuse: bool) -> None:
    _, plain = attention()
    model, saving = attention(checkpointed=True)
    close(GGN(saving, chunk_size=chunk_size, reuse=reuse).to_dense(), GGN(plain, chunk_size=chunk_size).to_dense())
    assert model.runs
