"""Parts of operators with blocks: submatrices that keep their structure, draws by name, matrices of blocks and back."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kfs import EKFAC, KFAC
from kfs.errors import ModelError, ShapeError
from kfs.factors import exact_blocks, exact_diagonal
from kfs.factors.blocks import BlockDiagonal, Dense, Eigenbasis, Kronecker, KroneckerSum, congruence
from kfs.problem.risk import EmpiricalRisk
from tests.factors import test_ekfac, test_experts
from tests.factors.test_kronecker import product_by_product
from tests.operators.contract import check_contract, close

SHARED = ["attention", "groups", "transposed", "positions", "tied", "few positions"]
EXPERTS = ["linear", "addmm", "baddbmm"]  # with matrices stacked in one parameter, and biases in another
NAMES = SHARED + EXPERTS


def risk_of(name: str) -> EmpiricalRisk:
    if name in EXPERTS:
        return test_experts.risk_of(test_experts.make(name), 8)
    return test_ekfac.risk_of(*test_ekfac.SHARED[name])


def places(K: BlockDiagonal, names: list[str]) -> Tensor:
    """Return the positions of some parameters in flat vectors."""
    index = K.domain.unflatten(torch.arange(K.shape[0]).unsqueeze(0))
    return torch.cat([t.flatten() for name, t in index.items() if name in names])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("make", [KFAC, EKFAC, exact_blocks, exact_diagonal])
def test_submatrices_keep_their_structure(make: Any, name: str) -> None:
    """Whole blocks, weights without biases, and biases without weights, against the dense matrix."""
    K = make(risk_of(name))
    dense = K.to_dense()
    params = list(K.domain.shapes)
    for names in (params[:1], params[-1:], params[1:], params[::2], [params[0], params[-1]]):
        part = K.submatrix(names)
        assert isinstance(part, BlockDiagonal)
        assert list(part.domain.shapes) == [p for p in params if p in names]
        index = places(K, names)
        expected = dense[index][:, index]
        close(part.to_dense(), expected)
        check_contract(part, expected)
        identity = torch.eye(len(index), dtype=torch.float64)
        close(part.inverse(0.1).to_dense(), torch.linalg.inv(expected + 0.1 * identity))
        shifted = part.shift(0.1)
        assert isinstance(shifted, BlockDiagonal)
        close(shifted.logdet(), (expected + 0.1 * identity).logdet())
        close(part.trace(), expected.trace())
        root = part.power(-0.5, 0.1).to_dense()
        noise = torch.linalg.solve(root, part.sample(3, damping=0.1, seed=1))
        close(root @ noise, part.sample(3, damping=0.1, seed=1))
        assert part.sample(3, damping=0.1).shape == (len(index), 3)


def test_which_structures_parts_have() -> None:
    risk = risk_of("groups")
    K, E, C = KFAC(risk), EKFAC(risk), exact_blocks(risk)
    joint = next(block for block in K.blocks.values() if block.layout.bias is not None)
    weight, bias = joint.layout.weight, joint.layout.bias
    assert bias is not None
    total = K + 2 * KFAC(risk, sharing="reduce", fisher="empirical")
    for operator, whole, part in (
        (K, Kronecker, Kronecker),
        (total, KroneckerSum, KroneckerSum),
        (E, Eigenbasis, Dense),
        (C, Dense, Dense),
    ):
        for names, kind in (([weight, bias], whole), ([weight], part), ([bias], part)):
            result: Any = operator.submatrix(names)
            assert [type(structure) for structure in result.structures.values()] == [kind]
            index = places(operator, names)  # type: ignore[arg-type]
            close(product_by_product(result), operator.to_dense()[index][:, index])
    # If rows and columns differ, or single entries are chosen, the structure is lost.
    assert not isinstance(K.submatrix([weight], [bias]), BlockDiagonal)
    close(K.submatrix([weight], [bias]).to_dense(), K.to_dense()[places(K, [weight])][:, places(K, [bias])])
    assert not isinstance(K.submatrix([0, 1]), BlockDiagonal)
    with pytest.raises(ModelError, match=r"no parameters \['w'\]"):
        K.submatrix(["w"])
    alike: Any = total.submatrix([*joint.layout.params])
    stacked: Any = total.submatrix(list(K.domain.shapes))
    assert torch.equal(stacked.submatrix(joint.layout.params).to_dense(), alike.to_dense())


def test_parts_of_large_blocks_without_structure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is an operator without structure, with the same products, not a large dense matrix."""
    E = EKFAC(risk_of("groups"))
    name = next(block.layout.weight for block in E.blocks.values() if block.layout.bias is not None)
    monkeypatch.setattr(congruence, "_LARGEST_DENSE", 1)
    part = E.submatrix([name])
    assert not isinstance(part, BlockDiagonal)
    index = places(E, [name])
    close(part.to_dense(), E.to_dense()[index][:, index])


def test_products_of_diagonals_have_noise_of_their_own() -> None:
    """The known round-off of each eigenvalue is cut out with the eigenvalues."""
    K = exact_diagonal(risk_of("groups")).power(0.5)
    name = next(layout.weight for stack in K.stacks for layout in stack.layouts if layout.bias is not None)
    part: Any = K.submatrix([name])
    index = places(K, [name])
    close(
        part.inverse(0.1).to_dense(),
        torch.linalg.inv(K.to_dense()[index][:, index] + 0.1 * torch.eye(len(index)).double()),
    )


def test_draws_by_name() -> None:
    K = KFAC(risk_of("attention"))
    flat = K.sample(4, damping=0.1, seed=3)
    by_name = K.sample(4, damping=0.1, seed=3, form="dict")
    assert {name: t.shape for name, t in by_name.items()} == {n: (4, *s) for n, s in K.domain.shapes.items()}
    assert torch.equal(torch.cat([t.flatten(1) for t in by_name.values()], 1).T, flat)
    with pytest.raises(ModelError, match=r"form is 'list'.*'dict'"):
        K.sample(form="list")  # type: ignore[call-overload]


@pytest.mark.parametrize("name", NAMES)
def test_matrices_of_blocks_and_back(name: str) -> None:
    """A product with the operator is `B M A`, block by block, and all blocks together give the vector again."""
    K = KFAC(risk_of(name))
    v = {n: torch.randn(s, dtype=torch.float64) for n, s in K.domain.shapes.items()}
    several = {n: torch.stack([t, 2 * t]) for n, t in v.items()}
    product = K @ v
    again = {n: torch.zeros_like(t) for n, t in v.items()}
    for block in K.blocks.values():
        M = block.matrix(v)
        groups, rows, columns = block.layout.matrix_shape
        assert M.shape == ((groups, rows, columns) if groups > 1 else (rows, columns))
        A, B = (torch.diag_embed(f) if f.ndim < 2 + (groups > 1) else f for f in (block.A, block.B))
        close(B @ M @ A, block.matrix(product))
        close(block.matrix(several), torch.stack([M, 2 * M]))
        back = block.tensors(M)
        assert set(back) == set(block.layout.params)
        for n, t in back.items():
            again[n] += t.reshape(again[n].shape)
        twice = block.tensors(torch.stack([M, 2 * M]))
        assert all(torch.equal(t, torch.stack([back[n], 2 * back[n]])) for n, t in twice.items())
        if all(v[n].shape == shape for n, shape in block.layout.param_shapes().items()):
            one = block.matrix({n: t[:1] for n, t in several.items()})
            assert one.shape == (1, *M.shape)  # an axis for several vectors is kept, even if its length is one
    for n, t in again.items():
        assert torch.equal(t, v[n])


def test_matrices_of_blocks_refuse_what_does_not_fit() -> None:
    K = KFAC(risk_of("groups"))
    block = next(block for block in K.blocks.values() if block.layout.bias is not None)
    v = {n: torch.randn(s, dtype=torch.float64) for n, s in K.domain.shapes.items()}
    weight, bias = block.layout.params
    with pytest.raises(ShapeError, match=rf"lack \['{bias}'\]"):
        block.matrix({weight: v[weight]})
    for wrong in (v[bias][:-1], torch.stack([v[bias]] * 3)):
        with pytest.raises(ShapeError, match="one more axis in front, of one length"):
            block.matrix(v | {bias: wrong})
    with pytest.raises(ShapeError, match="stacked"):
        block.tensors(block.matrix(v)[..., :-1])
