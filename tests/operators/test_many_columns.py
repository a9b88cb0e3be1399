"""Many columns at once: their chunks, and operations that run once for all columns of a chunk."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from kfs import EKFAC, GGN, KFAC, EmpiricalRisk, Fisher, Hessian
from kfs.errors import ModelError
from kfs.factors.blocks import block_diagonal
from kfs.factors.blocks.factor import Factor
from kfs.operators import (
    LinearOperator,
    diagonal,
    eigenvalues,
    spectral_density,
    squared_frobenius_norm,
    trace,
)
from kfs.operators.space import Columns, Space
from tests.operators.contract import check_contract, close


class Calls(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


class Chunks(LinearOperator):
    """The identity, which records the numbers of columns of its products."""

    symmetric = True

    def __init__(self, chunk_size: int) -> None:
        space = Space({"x": (3,)}, torch.float64, torch.device("cpu"))
        super().__init__(space, space)
        self.chunk_size = chunk_size
        self.sizes: list[int] = []

    def multiply(self, columns: Columns) -> Columns:
        self.sizes.append(len(columns["x"]))
        return columns

    multiply_transposed = multiply


def network(saves_memory: bool = False) -> EmpiricalRisk:
    """Return the risk of a network whose backward pass would run column by column in PyTorch."""

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.LayerNorm(5), nn.Linear(5, 3))

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = checkpoint(self.layers, x, use_reentrant=False) if saves_memory else self.layers(x)
            return result

    torch.manual_seed(0)
    X, y = torch.randn(6, 4, dtype=torch.float64), torch.randint(3, (6,))
    return EmpiricalRisk(Network().double(), nn.CrossEntropyLoss(), (X, y))


@pytest.mark.parametrize(("columns", "chunk_size", "sizes"), [(10, 6, [5, 5]), (17, 16, [9, 8]), (7, 3, [3, 3, 1])])
def test_chunks_are_about_equal(columns: int, chunk_size: int, sizes: list[int]) -> None:
    A = Chunks(chunk_size)
    V = torch.randn(3, columns, dtype=torch.float64)
    close(A @ V, V)
    assert A.sizes == sizes


@pytest.mark.parametrize("kind", ["ggn", "mc", "hessian"])
def test_backward_passes_run_for_all_columns_together(kind: str) -> None:
    """No operation runs once per column, as it does in PyTorch without a batching rule."""
    risk = network()
    A = {"ggn": GGN(risk), "mc": Fisher(risk, "mc"), "hessian": Hessian(risk)}[kind]
    A @ torch.zeros(A.shape[1], 2, dtype=torch.float64)  # counts the examples
    counts = []
    for num_columns in (4, 12):
        with Calls() as calls:
            A @ torch.randn(A.shape[1], num_columns, dtype=torch.float64)
        counts.append(calls.counts)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("kind", [GGN, Hessian])
def test_models_that_functions_cannot_differentiate(kind: Any) -> None:
    """A checkpoint does not work in `torch.func`, so columns are sent back through an ordinary graph."""
    plain, saving = kind(network()), kind(network(saves_memory=True))
    close(saving.to_dense(), plain.to_dense())
    close(plain.to_dense(), kind(network(), chunk_size=1).to_dense())


class Cube(torch.autograd.Function):
    """A function whose backward pass cannot be differentiated; `torch.func` would treat it as a constant."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004 (the signature is given)
        ctx.save_for_backward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        result: Tensor = 3 * g * x**2
        return result


def product_of_zeros(x: Tensor) -> Tensor:
    """Multiply the numbers of each row; PyTorch has no second derivative if several of them are zero."""
    return torch.ones_like(x).scatter_reduce(1, torch.zeros_like(x, dtype=torch.int64), x, "prod")


@pytest.mark.parametrize("operation", [Cube.apply, product_of_zeros], ids=["custom function", "product"])
@pytest.mark.parametrize("chunk_size", [1, 2])
def test_missing_second_derivatives_are_errors_for_all_columns(operation: Any, chunk_size: int) -> None:
    """`torch.func` silently returns wrong results for both: second derivatives with respect to `W` are not zero."""
    X = torch.ones(3, 2, dtype=torch.float64)
    risk = EmpiricalRisk(
        lambda params, x: operation(x * params["W"]), nn.MSELoss(), (X, X), params={"W": torch.zeros_like(X[0])}
    )
    with pytest.raises(ModelError, match=r"cannot differentiate an operation|cannot be differentiated"):
        Hessian(risk, chunk_size=chunk_size).to_dense()


def test_blocks_of_second_derivatives() -> None:
    """Rows and columns may be the same parameters, different ones, or overlap."""
    H = Hessian(network())
    dense = H.to_dense()
    names = list(H.domain.shapes)
    starts = [0, *torch.tensor([H.domain.shapes[name].numel() for name in names]).cumsum(0).tolist()]
    for rows, columns in ((slice(0, 2), slice(0, 2)), (slice(0, 2), slice(3, 5)), (slice(1, 4), slice(2, 6))):
        inside = dense[starts[rows.start] : starts[rows.stop], starts[columns.start] : starts[columns.stop]]
        close(H.submatrix(names[rows], names[columns]).to_dense(), inside)


def test_parameters_that_predictions_do_not_depend_on() -> None:
    """Their rows are zero for one column and for several."""
    model = nn.ModuleDict({"used": nn.Linear(2, 3), "unused": nn.Linear(2, 2)}).double()

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.parts["used"](x)
            return result

    data = torch.randn(5, 2, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    risk = EmpiricalRisk(Part(), nn.MSELoss(), data)
    for kind in (GGN, Hessian):
        several = kind(risk).to_dense()
        close(several, kind(risk, chunk_size=1).to_dense())
        assert several[9:].abs().max() == 0


def test_convolutions_on_a_cpu_have_smaller_chunks() -> None:
    data = torch.randn(2, 4, 3, 3), torch.randint(2, (2,))
    sizes = []
    for convolutions in ([], [nn.Conv2d(4, 2, 3)], [nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(4, 2, 1)]):
        last = nn.Linear(2 if convolutions else 36, 2)
        risk = EmpiricalRisk(nn.Sequential(*convolutions, nn.Flatten(), last), nn.CrossEntropyLoss(), data)
        sizes.append((GGN(risk).chunk_size, Hessian(risk).chunk_size, GGN(risk, reuse=True).chunk_size))
    assert sizes == [(16, 16, 16), (4, 4, 1), (1, 1, 1)]


@pytest.mark.parametrize("at_once", ["one", "all"])
def test_blocks_multiply_columns_one_by_one_and_together(at_once: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, columns of large blocks are multiplied in a loop."""
    monkeypatch.setattr(block_diagonal, "_LARGE", 1 if at_once == "one" else 10**9)
    risk = network()
    K, other = KFAC(risk), KFAC(risk, "empirical")
    total: Any = K + other
    operators: list[Any] = [K, EKFAC(risk), K.inverse(0.1), total, total.inverse(0.1), K @ other]
    for A in operators:
        check_contract(A, A.to_dense())


@pytest.mark.parametrize("width", [1, 5, 31, 32, 40])
@pytest.mark.parametrize("num_columns", [1, 2, 7])
def test_factors_multiply_thin_and_wide_matrices(width: int, num_columns: int) -> None:
    matrices = torch.randn(2, 6, 6, dtype=torch.float64)
    factor = Factor.dense(matrices, symmetric=False)
    M = torch.randn(2, num_columns, 6, width, dtype=torch.float64)
    for place in range(2):
        for column in range(num_columns):
            expected = matrices[place] @ M[place, column]
            close(factor.left(M)[place, column], expected)
            close(factor.right(M.transpose(2, 3))[place, column], expected.T)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_estimates_in_half_precision(dtype: torch.dtype) -> None:
    """Products are in half precision; computations with them are not, since decompositions do not support it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).to(dtype)
    X, y = torch.randn(8, 4).to(dtype), torch.randint(2, (8,))
    G = GGN(EmpiricalRisk(model, nn.CrossEntropyLoss(), (X, y)))
    dense = G.to_dense().double()
    largest = torch.linalg.eigvalsh(dense)[-1]
    for method in ("hutchinson", "hutch++", "xtrace"):
        estimate = trace(G, method=method, products=12)
        assert abs(estimate.value - dense.trace()) <= 4 * estimate.error + 0.05 * dense.trace()
    assert abs(trace(G).value - dense.trace()) < 0.01 * dense.trace()  # enough products for every column
    for products in (12, 60):
        found = diagonal(G, method="xdiag", products=products).value
        assert torch.dist(found.double(), dense.diagonal()) < 0.2 * dense.diagonal().norm()
    assert squared_frobenius_norm(G, products=12).value > 0
    assert abs(eigenvalues(G, 1, tolerance=1e-2)[0] - largest) < 0.05 * largest
    assert abs(spectral_density(G, num_vectors=3).nodes.max() - largest) < 0.05 * largest
