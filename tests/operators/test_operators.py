"""Curvature operators against kfs.basics, for every kind of model."""

from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor

from kfs.basics.emp_fishers import vec_empirical_fisher
from kfs.basics.ggns import vec_ggn
from kfs.basics.hessians import vec_hessian
from kfs.basics.jacobians import vec_jacobian
from kfs.factors import KFAC
from kfs.losses.draws import Draws
from kfs.operators import GGN, Fisher, Hessian, Jacobian
from kfs.problem.risk import EmpiricalRisk
from tests.operators.contract import check_contract, close
from tests.operators.problems import OPERATORS, PROBLEMS, Problem

all_problems = pytest.mark.parametrize("problem", PROBLEMS, ids=str)


def assemble(blocks: dict[tuple[str, str], Tensor], names: list[str]) -> Tensor:
    return torch.cat([torch.cat([blocks[row, column] for column in names], 1) for row in names])


@cache
def dense(kind: str, problem: Problem) -> Tensor:
    """Compute the matrix by definition, block by block; cached, because it takes longer than all other computations."""
    risk, model, X, y = problem.make()
    names = list(risk.params)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        prediction = model(X)
        value = problem.loss(prediction, y)
        p = {name: model.get_parameter(name) for name in names}
        if kind == "jacobian":
            return torch.cat([vec_jacobian(prediction, p[name]) for name in names], 1)
        blocks = {}
        for row, column in product(names, names):
            if kind == "hessian":
                blocks[row, column] = vec_hessian(value, p[row], p[column])
            elif kind == "ggn":
                blocks[row, column] = vec_ggn(value, prediction, p[row], p[column])
            else:
                blocks[row, column] = vec_empirical_fisher(model, problem.loss, X, y, (row, column))  # type: ignore[arg-type]
    return assemble(blocks, names)


ORACLE = {"hessian": "hessian", "ggn": "ggn", "type-2": "ggn", "empirical": "empirical"}


@all_problems
@pytest.mark.parametrize("kind", list(OPERATORS))
def test_curvature_is_the_definition(problem: Problem, kind: str) -> None:
    risk, *_ = problem.make()
    check_contract(OPERATORS[kind](risk), dense(ORACLE[kind], problem))


@all_problems
def test_jacobian_is_the_definition(problem: Problem) -> None:
    risk, *_ = problem.make()
    check_contract(Jacobian(risk), dense("jacobian", problem))


@all_problems
@pytest.mark.parametrize("kind", list(OPERATORS))
def test_batches_chunks_and_blocks(problem: Problem, kind: str) -> None:
    *_, y = problem.make()
    split, *_ = problem.make((1, len(y) - 3, 2))
    expected = dense(ORACLE[kind], problem)
    close(OPERATORS[kind](split, chunk_size=len(expected) // 2 + 1).to_dense(), expected)

    # Random columns distinguish two matrices as well as unit vectors do, and few of them suffice.
    V = torch.randn(len(expected), 2, dtype=torch.float64)
    for blocks in ("parameter", "layer"):
        operator = OPERATORS[kind](split, block_diagonal=blocks)
        mask = torch.zeros_like(expected)
        places = torch.arange(len(expected)).split(list(operator.domain.sizes.values()))
        layer = [name.rpartition(".")[0] if blocks == "layer" else name for name in operator.domain.shapes]
        for (i, one), (j, other) in product(enumerate(places), enumerate(places)):
            if layer[i] == layer[j]:
                mask[one[:, None], other] = 1
        assert 0 < mask.mean() < 1 or len(places) == 1
        if problem.name == "mlp-ce":
            check_contract(operator, mask * expected)
        else:
            close(operator @ V, (mask * expected) @ V)


def test_true_means_one_block_per_parameter() -> None:
    risk, *_ = PROBLEMS[0].make()
    short, long = GGN(risk, block_diagonal=True), GGN(risk, block_diagonal="parameter")
    assert short.blocks == long.blocks == [["0.weight"], ["0.bias"], ["2.weight"], ["2.bias"]]
    assert torch.equal(short.to_dense(), long.to_dense())


@pytest.mark.parametrize("problem", PROBLEMS[:3] + PROBLEMS[-1:], ids=str)
def test_monte_carlo_fisher_is_a_sum_over_its_draws(problem: Problem) -> None:
    whole, _, X, y = problem.make()
    split, *_ = problem.make((1, len(y) - 1))
    M, seed = 3, 11
    F = Fisher(split, "type-1", mc_samples=M, seed=seed)

    J = dense("jacobian", problem).reshape(len(X), -1, F.shape[1])
    with torch.no_grad(), whole.untouched():
        (batch,) = whole.batches()
        f = whole.predict(whole.params, batch)
        draws = torch.stack([whole.loss.sampled_gradient(f, y, Draws(seed, 0, m)) for m in range(M)])
    g = torch.einsum("mni,nid->mnd", draws.reshape(M, len(X), -1), J).reshape(-1, F.shape[1])
    check_contract(F, whole.reduction_factor / M * g.T @ g)
    close(F.diagonal(), F.to_dense().diagonal())
    other = Fisher(split, "type-1", mc_samples=M, seed=seed + 1)
    assert not torch.allclose(other.to_dense(), F.to_dense())


@pytest.mark.parametrize("problem", [PROBLEMS[0], PROBLEMS[1], PROBLEMS[3], PROBLEMS[-1]], ids=str)
@pytest.mark.parametrize("kind", ["ggn", "type-2", "empirical"])
def test_diagonals_are_exact(problem: Problem, kind: str) -> None:
    risk, *_ = problem.make((2, len(problem.make()[3]) - 2))
    expected = dense(ORACLE[kind], problem).diagonal()
    close(OPERATORS[kind](risk).diagonal(), expected)
    close(OPERATORS[kind](risk, chunk_size=2).diagonal(), expected)  # factors have more columns than that


def test_diagonals_in_half_precision_square_in_a_wider_one() -> None:
    model = torch.nn.Linear(1, 1, bias=False).half()
    X = torch.zeros(8, 1, dtype=torch.float16)
    X[3] = 256  # its square, 65536, exceeds float16; times 2 / 8 it fits again
    G = GGN(EmpiricalRisk(model, torch.nn.MSELoss(), (X, X)))
    assert G.diagonal().tolist() == [16384.0]


@all_problems
@pytest.mark.parametrize("kind", ["ggn", "type-2", "empirical"])
def test_reused_graphs_give_the_same_products(problem: Problem, kind: str) -> None:
    risk, model, *_ = problem.make((1, len(problem.make()[3]) - 1))
    kept, plain = OPERATORS[kind](risk, reuse=True, chunk_size=1), OPERATORS[kind](risk)
    V = torch.randn(kept.shape[1], 3, dtype=torch.float64)  # graphs are kept for the first column and then reused
    before = plain @ V
    close(kept @ V, before)
    close(kept @ V[:, 0], before[:, 0])
    name = next(iter(risk.params))
    block = kept.submatrix([name])
    size = block.shape[0]
    only = torch.zeros_like(V)
    only[:size] = V[:size]
    close(block @ V[:size], (plain @ only)[:size])
    with torch.no_grad():
        model.get_parameter(name).mul_(2)
    close(kept @ V, plain @ V)
    assert not torch.allclose(kept @ V, before)


@pytest.mark.parametrize("kind", ["hessian", "ggn", "sum", "kfac", "inverse"])
def test_blocks_have_the_order_in_which_they_are_named(kind: str) -> None:
    """A square block, one whose rows and columns have different orders, lists of tensors, and sets, without order."""
    risk, *_ = PROBLEMS[1].make()
    K = KFAC(risk)
    A = {"hessian": Hessian(risk), "ggn": GGN(risk), "sum": GGN(risk) + K, "kfac": K, "inverse": K.inverse(0.1)}[kind]
    names = list(A.domain.shapes)
    places = dict(zip(names, torch.arange(A.shape[0]).split(list(A.domain.sizes.values())), strict=True))
    matrix = A.to_dense()
    backward = names[::-1]
    index = torch.cat([places[name] for name in backward])
    block = A.submatrix(backward)
    close(block.to_dense(), matrix[index][:, index])
    close(A.submatrix(backward, names).to_dense(), matrix[index])
    close(A.submatrix(names, backward).T.to_dense(), matrix[:, index].T)
    close(A.submatrix(backward, slice(None)).to_dense(), matrix[index])
    close(A.submatrix(set(names)).to_dense(), matrix)
    v = torch.randn(A.shape[0], dtype=torch.float64)
    product = block @ [v[places[name]].view(A.domain.shapes[name]) for name in backward]
    assert isinstance(product, list)
    close(torch.cat([t.flatten() for t in product]), matrix[index] @ v)


def function_model(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return torch.tanh(x @ params["0.weight"].T + params["0.bias"]) @ params["2.weight"].T + params["2.bias"]


@pytest.mark.parametrize("kind", list(OPERATORS))
def test_functions_are_models_too(kind: str) -> None:
    problem = PROBLEMS[1]
    risk, model, X, y = problem.make()
    params = {name: p.detach() for name, p in model.named_parameters()}
    functional = EmpiricalRisk(function_model, problem.loss, (X, y), params=params)
    close(OPERATORS[kind](functional).to_dense(), OPERATORS[kind](risk).to_dense())


@pytest.mark.parametrize("kind", list(OPERATORS))
def test_float32(kind: str) -> None:
    problem = PROBLEMS[1]
    risk, model, X, y = problem.make()
    expected = OPERATORS[kind](risk).to_dense()
    single = EmpiricalRisk(model.float(), problem.loss, (X.float(), y))
    result = OPERATORS[kind](single).to_dense()
    assert result.dtype == torch.float32
    torch.testing.assert_close(
        result.double(), expected, rtol=1e-4, atol=1e-5
    )  # eps 1.2e-7 times some hundred operations


def test_sums_over_data_do_not_stall_in_half_precision() -> None:
    model = torch.nn.Linear(1, 1, bias=False).bfloat16()
    torch.nn.init.zeros_(model.weight)
    X = torch.ones(300, 1, dtype=torch.bfloat16)  # at most 256 ones can be summed up in bfloat16
    risk = EmpiricalRisk(model, torch.nn.MSELoss(), [(x, -x) for x in X.split(1)])
    v = torch.ones(1, dtype=torch.bfloat16)
    G = GGN(risk)
    results = [risk.gradient()["weight"], G @ v, G.diagonal(), Hessian(risk) @ v, Jacobian(risk).T @ X.flatten() / 150]
    for result in results:
        assert result.dtype == torch.bfloat16
        assert result.item() == pytest.approx(2, rel=0.01)  # the eps of bfloat16 is 0.008


def test_the_operators_are_related() -> None:
    problem = PROBLEMS[0]
    risk, *_ = problem.make()
    J = Jacobian(risk)
    G = (risk.reduction_factor * (J.T @ J)).to_dense()  # the square loss has the identity in between
    close(G, GGN(risk).to_dense())
    assert not torch.allclose(G, Hessian(risk).to_dense())
