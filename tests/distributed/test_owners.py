"""Owned blocks: the same results as with all blocks in every process, and a share of the memory."""

import gc
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import kfs
from kfs import files
from kfs.distributed import Ranks, plan
from kfs.distributed.collectives import joined, write_joined
from kfs.errors import DistributedError, ModelError
from kfs.factors.blocks import BlockDiagonal
from kfs.factors.kfac import KFAC
from kfs.operators import LinearOperator
from tests.distributed.pool import Pool
from tests.distributed.problems import bits, problem, risk_of_all, risk_of_own

CLOSE: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-13}
KINDS: list[type[KFAC | kfs.EKFAC]] = [KFAC, kfs.EKFAC]


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, **CLOSE)


# All public methods and properties of an operator, as functions of the operator and a vector; most results are
# tensors or operators.
METHODS: dict[str, Callable[[BlockDiagonal, Tensor], Any]] = {
    "T": lambda K, _: K.T,
    "about": lambda K, _: K.about,
    "called": lambda K, _: K.inverse(0.1).called("G").formula,
    "chunk_size": lambda K, _: K.chunk_size,
    "columns_at_once": lambda K, _: K.columns_at_once,
    "describe": lambda K, _: [row[:4] for row in K.inverse(0.1).describe().tables[0].rows],
    "det": lambda K, _: K.inverse(0.1).det(),
    "device": lambda K, _: K.device,
    "diagonal": lambda K, _: K.diagonal(),
    "dtype": lambda K, _: K.dtype,
    "each": lambda K, _: {name: structure.to_dense() for name, structure in K.each()},
    "eigenvalues": lambda K, _: K.eigenvalues(),
    "eigh": lambda K, v: (K.eigh()[0], K.eigh()[1] @ (K.eigh()[0] * (K.eigh()[1].T @ v))),
    "formula": lambda K, _: K.shift(0.2).formula,
    "frobenius_norm": lambda K, _: K.frobenius_norm(),
    "gathered": lambda K, _: K.gathered(),
    "is_elsewhere": lambda K, _: K.is_elsewhere,
    "inverse": lambda K, _: (K.inverse(0.1), K.inverse(kfs.Relative(0.1))),
    "layouts": lambda K, _: K.layouts,
    "logdet": lambda K, _: K.inverse(0.1).logdet(),
    "mean_eigenvalue": lambda K, _: K.mean_eigenvalue(),
    "multiply": lambda K, v: K.multiply(K.domain.unflatten(v.unsqueeze(0))),
    "multiply_transposed": lambda K, v: K.multiply_transposed(K.domain.unflatten(v.unsqueeze(0))),
    "nbytes": lambda K, _: K.inverse(0.1).nbytes,
    "of": lambda K, _: K.of,
    "power": lambda K, _: K.power(0.5, 0.1),
    "sample": lambda K, _: (K.sample(3, damping=0.1, seed=2), K.sample(2, damping=0.1, form="dict")),
    "shape": lambda K, _: K.shape,
    "shift": lambda K, _: (K.shift(0.2), K.shift(kfs.Relative(0.2))),
    "shown": lambda K, _: K.shown,
    "solve": lambda K, v: K.solve(v, 0.3),
    "squared_frobenius_norm": lambda K, _: K.squared_frobenius_norm(),
    "submatrix": lambda K, _: (K.submatrix(list(K.domain.shapes)[:2]), K.submatrix([0, 2, 3])),
    "symmetric": lambda K, _: (K.symmetric, (K @ K.inverse(0.1)).symmetric),
    "template": lambda K, _: K.template,
    "to": lambda K, _: K.inverse(0.1).to(dtype=torch.float32).to(dtype=torch.float64),
    "to_dense": lambda K, _: (K.to_dense(), K.to_dense("cvec")),
    "to_scipy": lambda K, v: torch.from_numpy(K.to_scipy() @ v.numpy()),
    "trace": lambda K, _: K.trace(),
}
# These depend on where blocks are, or draw them. Files and errors have tests of their own.
LOCAL = {"load", "own_stacks", "plot", "plot_spectrum", "ranks", "save", "stacks", "structures"}


def same(found: Any, expected: Any) -> None:
    """Compare results of a method: tensors and operators up to round-off, and everything else exactly."""
    if isinstance(found, LinearOperator):
        assert found.formula == expected.formula
        found, expected = found.to_dense(), expected.to_dense()
    if isinstance(found, tuple | dict | list):
        assert len(found) == len(expected)
        pairs = zip(found.items(), expected.items()) if isinstance(found, dict) else zip(found, expected)  # noqa: B905
        for one, other in pairs:
            same(one, other)
    elif isinstance(found, Tensor):
        close(found, expected)
    else:
        assert found == expected


def compare_numbers(kind: type[KFAC | kfs.EKFAC], name: str, settings: dict[str, Any]) -> str:
    """Compare all methods of an operator with those of an operator that has all blocks in every process."""
    risk = risk_of_own(name)
    elsewhere: dict[str, Any] = {"factor_device": "cpu"} if name == "convolution" else {}
    K = kind(risk, placement="owner", **elsewhere, **settings)
    one = kind(risk, **settings)
    assert list(K.blocks) == list(one.blocks)
    assert (K.num_data, K.count) == (one.num_data, one.count)
    assert repr(K).replace(", placement='owner'", "").replace(", factor_device='cpu'", "") == repr(one)
    v = torch.linspace(-1, 1, K.shape[0], dtype=torch.float64)
    assert METHODS.keys() | LOCAL == {method for method in dir(BlockDiagonal) if not method.startswith("_")}
    for method in METHODS.values():
        same(method(K, v), method(one, v))
    gradient = risk.gradient()
    found = [K @ v, K.T @ v, (K @ gradient)["out.weight" if name == "tokens" else next(iter(gradient))]]
    close(found[0], one @ v)
    operators = [(K, one), (K.inverse(0.1), one.inverse(0.1)), (K.shift(0.2), one.shift(0.2)), (2 * K, 2 * one)]
    for mine, other in operators:
        assert mine.formula == other.formula
        assert isinstance(mine, BlockDiagonal)
        assert isinstance(other, BlockDiagonal)
        assert mine.nbytes == other.nbytes
        close(mine @ v, other @ v)
        found += [mine @ v, mine.diagonal(), mine.eigenvalues()]
    for block in one.blocks.values():
        close(K.fetch(block.name).A, block.A)
        close(K.fetch(block.name).B, block.B)
    return bits(found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "size"), [("tokens", 4), ("experts", 3), ("convolution", 2), ("tokens", 1)])
def test_same_results(ranks: Pool, kind: type[KFAC | kfs.EKFAC], name: str, size: int) -> None:
    """Some ranks own no block, some have no data, and blocks of one parameter may have different owners."""
    assert len(set(ranks(size, compare_numbers, kind, name, {"fisher": "mc"}))) == 1


def compare_combinations() -> None:
    """Compare sums and products of operators, and methods that need Kronecker factors."""
    risk = risk_of_own("mlp")
    K, one = KFAC(risk, placement="owner"), KFAC(risk)
    F, other = KFAC(risk, "empirical", placement="owner"), KFAC(risk, "empirical")
    v = torch.linspace(-1, 1, K.shape[0], dtype=torch.float64)
    assert type(K + F) is type(one + other)
    mine, theirs = (cast("BlockDiagonal", total).inverse(0.1, "factored") for total in (K + F, one + other))
    close(mine @ v, theirs @ v)
    close((K @ F) @ v, one @ (other @ v))
    close((K @ F).T @ v, other @ (one @ v))
    close((K + one) @ v, 2 * (one @ v))  # without common owners
    apart = KFAC(risk, joint_bias=False, placement="owner")
    close((K + apart) @ v, one @ v + KFAC(risk, joint_bias=False) @ v)  # without common blocks
    close((K + kfs.EKFAC(risk, placement="owner").inverse(1.0)) @ v, one @ v + kfs.EKFAC(risk).inverse(1.0) @ v)
    dampings = {name: 0.1 * (1 + place) for place, name in enumerate(K.blocks)}
    for method in ("exact", "factored", "per-factor"):
        close(K.inverse(dampings, method) @ v, one.inverse(dampings, method) @ v)
    assert (K @ F).symmetric == (one @ other).symmetric
    assert K.submatrix("0.weight", "2.weight").shape == (20, 15)


def test_combinations(ranks: Pool) -> None:
    ranks(2, compare_combinations)


class Deep(nn.Module):
    """Has many blocks of a few sizes."""

    def __init__(self) -> None:
        super().__init__()
        # With the bias, rows of sums have no padding.
        sizes = [47, 63, 63, 63, 47, 47, 47, 47, 31, 31, 31, 63, 63, 47, 7]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def bytes_of(*things: Any) -> int:
    """Count the bytes of all tensors that are reachable from some objects, by storage."""
    seen: dict[int, object] = {}
    found: dict[int, int] = {}
    left = list(things)
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(
            one, type | ModuleType | FunctionType | partial | nn.Module | kfs.EmpiricalRisk
        ):  # not data
            continue
        seen[id(one)] = one
        if isinstance(one, Tensor):
            if one.device.type == "cpu":
                found[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        else:
            left += gc.get_referents(one)
    return sum(found.values())


def deep_risk(group: Any) -> kfs.EmpiricalRisk:
    torch.manual_seed(1)
    X, y = torch.randn(12, 47), torch.randint(7, (12,))
    return kfs.EmpiricalRisk(Deep(), nn.CrossEntropyLoss(), kfs.shard((X, y), group))


def held(kind: type[KFAC | kfs.EKFAC], placement: Any) -> tuple[int, int]:
    K = kind(deep_risk(dist.group.WORLD), fisher="empirical", placement=placement)
    inverse = K.inverse(0.1, "factored") if isinstance(K, KFAC) else K.inverse(0.1)
    owned = sum(block.sums.is_local for block in K.blocks.values())
    assert inverse.shape == K.shape
    return bytes_of(K, inverse), owned


@pytest.mark.parametrize("kind", KINDS)
def test_each_rank_holds_its_share(ranks: Pool, kind: type[KFAC | kfs.EKFAC]) -> None:
    whole = ranks(1, held, kind, "replicated")[0][0]
    shares = ranks(3, held, kind, "owner")
    assert sum(owned for _, owned in shares) == 14
    # Owners are chosen by the sizes of EKFAC. The inverse here is a factored one, which has no eigenvalues.
    assert max(nbytes for nbytes, _ in shares) <= (1.05 if kind is kfs.EKFAC else 1.1) / 3 * whole
    assert sum(nbytes for nbytes, _ in shares) == pytest.approx(whole, rel=0.01)  # no block is anywhere twice


def held_by_influence() -> tuple[int, int, int, bool]:
    """Return the bytes of this rank, what the plan says, and the bytes of one set of its eigenvalues."""
    risk = deep_risk(dist.group.WORLD)
    influence = kfs.Influence(kfs.EKFAC(risk, fisher="empirical", placement="owner"))
    influence.scores(deep_risk(None), risk)  # keeps no blocks of other ranks
    shapes = {name: block.layout.matrix_shape[1:] for name, block in influence.K.blocks.items()}  # type: ignore[attr-defined]
    planned = plan(shapes, dist.get_world_size(), eigen=True)
    owners = {block: rank for (block, _), rank in planned.owners.items()}
    values = sum(stack.structure.like.nbytes for stack in influence.inverse.own_stacks)
    own = planned.nbytes[dist.get_rank()]
    return bytes_of(influence), own, values, owners == influence.K.distribution.owners


def test_influence_holds_what_the_plan_says(ranks: Pool) -> None:
    """Besides factors, eigenvectors and eigenvalues: scaled eigenvalues, and those of the inverse."""
    for found, planned, values, same in ranks(3, held_by_influence):
        assert same
        assert found == pytest.approx(planned + 2 * values, rel=0.01)


def compare_passes(kind: type[KFAC | kfs.EKFAC], name: str, placement: Any, memory: int) -> tuple[str, int]:
    risk = risk_of_own(name)
    calls = [0]
    risk.model.register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))  # type: ignore[union-attr]
    settings: dict[str, Any] = {"fisher": "mc", "placement": placement, "audit": False}
    one = kind(risk, **settings)
    in_one_pass, calls[0] = calls[0], 0
    several = kind(risk, factor_memory=memory, **settings)
    assert (several.num_data, several.count) == (one.num_data, one.count)
    assert list(several.blocks) == list(one.blocks)
    assert bits([several.to_dense()]) == bits([one.to_dense()])
    return several.blocks[next(iter(several.blocks))].sharing, calls[0] // max(in_one_pass, 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("placement", ["replicated", "owner"])
@pytest.mark.parametrize("name", ["tokens", "experts"])
def test_passes_over_the_data(ranks: Pool, kind: type[KFAC | kfs.EKFAC], placement: str, name: str) -> None:
    """Results are the same to the last bit. On some ranks, only later batches use an expert, or none."""
    memory = {"tokens": (900, 1600), "experts": (600, 900)}[name][kind is kfs.EKFAC]
    passes = [calls for _, calls in ranks(2, compare_passes, kind, name, placement, memory)]
    assert max(passes) >= 2


def test_passes_of_one_process() -> None:
    risk = risk_of_all("experts")
    expected = KFAC(risk)
    found = KFAC(risk, factor_memory=600)
    assert torch.equal(found.to_dense(), expected.to_dense())
    with pytest.raises(ModelError, match=r"needs 4..*Allow more memory, or use a smaller max_dim"):
        KFAC(risk, factor_memory=300)


def save(kind: type[KFAC | kfs.EKFAC], folder: str) -> list[Tensor]:
    K = kind(risk_of_own("tokens"), placement="owner")
    K.save(f"{folder}/k")
    K.inverse(0.1).save(f"{folder}/inverse")
    with pytest.raises(kfs.errors.StorageError, match="cannot be written"):
        K.save(f"{folder}/missing/k")
    return [K.to_dense(), K.inverse(0.1).to_dense()]


def load(folder: str, kind: type[KFAC | kfs.EKFAC]) -> list[Tensor]:
    K = kfs.load(f"{folder}/k", group=dist.group.WORLD)
    inverse = kfs.load(f"{folder}/inverse", group=dist.group.WORLD)
    assert type(K) is kind
    assert K.ranks.size == inverse.ranks.size == dist.get_world_size()
    for one in (K, inverse):
        mine = sum(stack.structure.nbytes for stack in one.own_stacks)
        assert mine < one.nbytes or dist.get_world_size() == 1
    if kind is KFAC:
        assert isinstance(K, KFAC)
        K.update(risk_of_own("tokens"))
        assert K.num_data == 46
        K = kfs.load(f"{folder}/k", group=dist.group.WORLD)
    with pytest.raises(kfs.errors.StorageError, match="cannot be read"):
        kfs.load(f"{folder}/missing", group=dist.group.WORLD)
    return [K.to_dense(), inverse.to_dense()]


@pytest.mark.parametrize("kind", KINDS)
def test_files(ranks: Pool, kind: type[KFAC | kfs.EKFAC], tmp_path: Path) -> None:
    """There is one file, and any number of processes reads it."""
    expected = ranks(4, save, kind, str(tmp_path))[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inverse", "k"]
    alone = kfs.load(tmp_path / "k")
    assert type(alone) is kind
    close(alone.to_dense(), kind(risk_of_all("tokens")).to_dense())
    found = [[alone.to_dense(), kfs.load(tmp_path / "inverse").to_dense()]]
    for size in (1, 2, 3):
        found += ranks(size, load, str(tmp_path), kind)
    for K, inverse in found:
        assert torch.equal(K, expected[0])
        assert torch.equal(inverse, expected[1])


def more_data() -> None:
    model, loss, X, y = problem("mlp")

    def risk(some: slice) -> kfs.EmpiricalRisk:
        return kfs.EmpiricalRisk(model, loss, kfs.shard((X[some], y[some]), dist.group.WORLD))

    for kind in KINDS:
        K = kind(risk(slice(0, 10)), placement="owner")
        close(K.update(risk(slice(10, 23))).to_dense(), kind(risk(slice(0, 10))).update(risk(slice(10, 23))).to_dense())
    K = KFAC(risk(slice(0, 10)), placement="owner").merge(KFAC(risk(slice(10, 23)), placement="owner"))
    close(K.to_dense(), KFAC(risk(slice(0, 23))).to_dense())
    E, F = (kfs.EKFAC.from_kfac(K, risk(some)) for some in (slice(0, 10), slice(10, 23)))
    close(E.merge(F).to_dense(), kfs.EKFAC.from_kfac(K, risk(slice(0, 23))).to_dense())
    assert K.to(dtype=torch.float32).nbytes == KFAC(risk(slice(0, 10))).to(dtype=torch.float32).nbytes
    assert E.to(dtype=torch.float32).dtype == torch.float32
    alone = kfs.EmpiricalRisk(model, loss, (X, y))
    with pytest.raises(DistributedError, match="the risk has another process group"):
        kfs.EKFAC.from_kfac(K, alone)
    with pytest.raises(ModelError, match="different owners"):
        K.merge(KFAC(alone))
    # A wrong argument on one rank is an error on all ranks.
    first = dist.get_rank() == 0
    with pytest.raises(DistributedError, match="the risk has another process group"):
        K.update(alone if first else risk(slice(0, 10)))
    with pytest.raises(ModelError, match="different owners"):
        K.merge(KFAC(alone) if first else K)
    with pytest.raises(ModelError, match="A KFAC cannot be merged with an EKFAC"):
        E.merge(cast("Any", K) if first else F)


def test_more_data(ranks: Pool) -> None:
    ranks(3, more_data)


def change_a_copy() -> None:
    """Data added to copies of all blocks are not added to the blocks of their owners."""
    risk = risk_of_own("mlp")
    for kind in KINDS:
        K = kind(risk, placement="owner")
        before = K.to_dense()
        assert K.gathered().update(risk).num_data == 46
        assert torch.equal(K.to_dense(), before)


def test_copies_of_all_blocks(ranks: Pool) -> None:
    ranks(2, change_a_copy)


def new_blocks() -> None:
    """Add data of an unused expert after all owners were chosen."""
    model, loss, X, y = problem("experts")
    first, rest = (kfs.EmpiricalRisk(model, loss, kfs.shard((X[s], y[s]), dist.group.WORLD)) for s in PARTS)
    K = KFAC(first, placement="owner", uncovered="skip")
    assert len(K.blocks) == 2
    whole = KFAC(kfs.EmpiricalRisk(model, loss, (X, y)), uncovered="skip")
    with pytest.raises(ModelError, match="The blocks differ"):
        K.update(rest)
    assert len(whole.blocks) == 3


PARTS = slice(0, 10), slice(10, 23)


def test_new_blocks(ranks: Pool) -> None:
    ranks(2, new_blocks)


class Scaled(nn.Module):
    """Has a parameter that no rule covers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.power = nn.Parameter(torch.tensor([1.5]))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x.abs() ** self.power)
        return result


def exact_diagonals(kind: type[KFAC | kfs.EKFAC]) -> None:
    _, loss, X, y = problem("mlp")
    torch.manual_seed(2)
    risk = kfs.EmpiricalRisk(Scaled().double(), loss, kfs.shard((X, y), dist.group.WORLD))
    K = kind(risk, uncovered="diagonal", placement="owner")
    close(K.to_dense(), kind(risk, uncovered="diagonal").to_dense())
    assert sum(K.ranks.gather("owned", K.blocks["power"].sums.is_local)) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_exact_diagonals(ranks: Pool, kind: type[KFAC | kfs.EKFAC]) -> None:
    ranks(2, exact_diagonals, kind)


def write_at_another_rank(path: str) -> None:
    ranks = Ranks(dist.group.WORLD)
    mine = {"number": 7, "parts": [torch.full((2,), float(ranks.rank)), [ranks.rank]]}
    state = joined(ranks, mine, ["parts"], root=1)
    write_joined(ranks, path, {"kind": "test"}, state, root=1)
    dist.barrier()
    found = files.read(path)[1]
    assert (found["number"], found["parts"][1::2]) == (7, [[0], [1], [2]])
    assert [t.tolist() for t in found["parts"][::2]] == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]


def test_states_of_several_ranks(ranks: Pool, tmp_path: Path) -> None:
    ranks(3, write_at_another_rank, str(tmp_path / "state"))
