"""Row maps: all models, with data along all kinds of axes, against loops over single examples.

Two oracles. The trace of EKFAC, restricted to a parameter, is the sum of squared gradients of the single examples. And
other batches, or another order of examples, do not change the result.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kfs.basics.hessian_factorizations import hessian_factor
from kfs.basics.reduction_factors import reduction_factor
from kfs.errors import ModelError
from kfs.factors import EKFAC, KFAC
from kfs.factors.rows import measure
from kfs.runtime.nested import mapped
from tests.factors.arrangements import (
    ARRANGEMENTS,
    SUMS,
    Experts,
    Instance,
    N,
    Net,
    Problem,
    Sets,
    encoder,
    join_sets,
    normal,
    sequence,
    set_of,
    time_major,
)
from tests.factors.problems import KNOWN
from tests.operators.contract import close

SHARING: tuple[Any, ...] = ("expand", "reduce")

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")  # PyTorch's own


@pytest.fixture(autouse=True)
def _groups(request: pytest.FixtureRequest) -> None:
    """Let models with `torch._grouped_mm` run in float64. Others run without this slower mode."""
    if "grouped" in request.node.name:
        request.getfixturevalue("grouped_in_double")


@cache
def instance(problem: Problem, num_data: int = N) -> Instance:
    """Make a problem once."""
    return problem.instance(num_data)


def columns(one: Instance, f: Tensor, y: Tensor, fisher: str) -> Iterator[Tensor]:
    """Yield the vectors that are sent back for one example, for its prediction and target without batch axis."""
    if fisher == "type-2":
        factor = hessian_factor(one.loss, f.detach(), y)
        yield from factor.reshape(f.numel(), -1).T.reshape(-1, *f.shape)
        return
    total = type(one.loss)(reduction="sum")
    f, y = f.detach().unsqueeze(0).requires_grad_(), y.unsqueeze(0)
    (g,) = torch.autograd.grad(total(f, y), f)
    yield g.squeeze(0) / reduction_factor(total, y)


def squares(one: Instance, fisher: str) -> dict[str, float]:
    """Sum squared gradients of every parameter, with loops over examples and columns, by autograd."""
    params = {name: p for name, p in one.model.named_parameters() if p.requires_grad}
    totals = dict.fromkeys(params, 0.0)
    for n, y in enumerate(one.ys):
        f = one.predict(n)
        for v in columns(one, f, y.squeeze(0), fisher):
            gradients = torch.autograd.grad(f, list(params.values()), v, retain_graph=True, allow_unused=True)
            for name, g in zip(params, gradients, strict=True):
                totals[name] += 0.0 if g is None else float(g.square().sum())
    R = reduction_factor(one.loss, torch.cat(one.ys))
    return {name: R * total for name, total in totals.items()}


def traces(E: EKFAC) -> dict[str, float]:
    """Return the trace of each parameter's part."""
    return {name: float(d.sum()) for name, d in E.domain.unflatten(E.diagonal().unsqueeze(0)).items()}


def check_traces(one: Instance, fisher: Any, sharing: Any, *batches: Sequence[int], **settings: Any) -> EKFAC:
    """Compare traces with sums of squares. Biases have blocks of their own, so that each trace is exact."""
    E = EKFAC(one.risk(*batches), fisher, sharing, joint_bias=False, **settings)
    assert traces(E) == pytest.approx(squares(one, fisher), rel=1e-9, abs=1e-12)
    return E


def same_factors(K: KFAC, L: KFAC) -> None:
    assert K.blocks.keys() == L.blocks.keys()
    for name, block in K.blocks.items():
        close(L.blocks[name].A, block.A)
        close(L.blocks[name].B, block.B)


def check_batches(one: Instance, *splits: Sequence[Sequence[int]]) -> None:
    """Compare factors, and eigenvalues in one basis, of one batch with those of smaller batches."""
    whole = one.risk()
    for sharing in SHARING:
        K = KFAC(whole, "empirical", sharing)
        for split in splits:
            same_factors(K, KFAC(one.risk(*split), "empirical", sharing))
    E = EKFAC.from_kfac(K, whole)
    for split in splits:
        close(EKFAC.from_kfac(K, one.risk(*split)).diagonal(), E.diagonal())


def check_traces_and_batches(one: Instance, *split: Sequence[int]) -> None:
    """Do both with fewer passes: biases have separate blocks, and sharing is `"reduce"`, for which rows matter."""
    parts = one.risk(*split)
    E = check_traces(one, "type-2", "reduce")
    same_factors(E.factors, KFAC(parts, "type-2", "reduce", joint_bias=False))
    close(EKFAC.from_kfac(E.factors, parts).diagonal(), E.diagonal())


class TestKnownModels:
    """The models of all other tests."""

    @pytest.mark.parametrize("problem", KNOWN, ids=str)
    def test_one_by_one(self, problem: Problem) -> None:
        one = instance(problem)
        E = check_traces(one, "type-2", "reduce")
        same_factors(E.factors, KFAC(one.risk([2], [3, 0, 1]), "type-2", "reduce", joint_bias=False))

    @pytest.mark.parametrize("problem", [p for p in KNOWN if p.name.startswith("derived")], ids=str)
    def test_other_numbers_of_data(self, problem: Problem) -> None:
        """The audit of four examples is valid for two, even if a table has two rows."""
        check_batches(instance(problem), [[3, 0], [1, 2]])


def in_precision(one: Instance, dtype: torch.dtype) -> Instance:
    """Convert a model and its data."""

    def convert(t: Tensor) -> Tensor:
        return t.to(dtype) if t.is_floating_point() else t

    model = copy.deepcopy(one.model).to(dtype)
    return Instance(model, [mapped(x, convert) for x in one.xs], list(map(convert, one.ys)), one.join)


class TestPrecision:
    """Row maps are found in any precision; factors agree with float64, up to rounding errors of the passes."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize(
        "name",
        [
            "positions: index",
            "derived: exponential",
            "time-major, as long as the batch",
            "sequence first, as long as the batch",
            "experts, masks",
            "graphs, all of one size",
        ],
    )
    def test_precision(self, name: str, dtype: torch.dtype) -> None:
        (problem,) = [one for one in (*KNOWN, *ARRANGEMENTS) if one.name == name]
        low = in_precision(instance(problem, 9), dtype)
        high = in_precision(low, torch.float64)  # of the same rounded numbers
        for sharing in SHARING:
            K, L = (KFAC(each.risk(), "empirical", sharing) for each in (low, high))
            for one, other in zip(K.blocks.values(), L.blocks.values(), strict=True):
                for found, exact in ((one.A, other.A), (one.B, other.B)):
                    # Each of some ten consecutive operations loses 8 bits at worst; a row of a wrong example, or a sum
                    # over examples, changes much more.
                    assert float((found.double() - exact).norm()) < 0.05 * float(exact.norm()) + 1e-6, one.name

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_gradients_of_different_sizes(self, dtype: torch.dtype) -> None:
        """Rows with small gradients are found next to rows with large ones, also where data are routed."""

        class Scaled(Experts):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x[:, 1:]) * x[:, 0, :1].exp()

        problem = Problem("experts, scaled", lambda: Scaled("masks"), sequence(6))
        low = in_precision(problem.instance(16), dtype)
        high = in_precision(low, torch.float64)
        for sharing in SHARING:
            K, L = (KFAC(each.risk(), "empirical", sharing) for each in (low, high))
            assert float(K.trace()) == pytest.approx(float(L.trace()), rel=0.05)


# Models that are refused although they are well-defined: numbers of examples, and the reason.
IMAGES = "an image counts as a row, so that data along its spatial axis are refused"
Limits = Mapping[str, tuple[tuple[int, ...], str]]
LIMITS: Limits = {"spatial axis": ((2, N, 9), IMAGES)}


def arrangements(limits: Limits, *numbers: int) -> list[Any]:
    """Return all arrangements with these numbers of examples, for `parametrize`."""
    found = []
    for problem in ARRANGEMENTS:
        refused, why = limits.get(problem.name, ((), ""))
        for num_data in numbers:
            marks = [pytest.mark.xfail(reason=why, strict=True)] if num_data in refused else []
            found.append(pytest.param(problem, num_data, marks=marks, id=f"{problem}-{num_data}"))
    return found


class TestArrangements:
    """Data along all kinds of axes."""

    @pytest.mark.parametrize(("problem", "num_data"), arrangements(LIMITS, 1, 2, N, 9))
    def test_traces(self, problem: Problem, num_data: int) -> None:
        one = instance(problem, num_data)
        if num_data != N:
            check_traces(one, "type-2", "expand")
        if num_data in {2, N}:
            check_traces(one, "empirical", "reduce")

    @pytest.mark.parametrize(("problem", "num_data"), arrangements(LIMITS, N))
    def test_batches(self, problem: Problem, num_data: int) -> None:
        singles = [[0], [1], [2], [3]] if "as many nodes" not in problem.name else [[0], [1], [2, 3]]
        check_batches(instance(problem, num_data), singles, [[0, 1, 2], [3]])

    @pytest.mark.parametrize(("problem", "num_data"), arrangements(LIMITS, N))
    def test_order(self, problem: Problem, num_data: int) -> None:
        check_batches(instance(problem, num_data), [[2, 0, 3, 1]])

    @pytest.mark.parametrize(
        ("name", "num_data"),
        [("siamese", 65), ("sorted", 65), ("experts, masks", 65), ("graphs, all of one size", 65), ("sorted", 513)],
    )
    def test_many_data(self, name: str, num_data: int) -> None:
        """If every batch is measured, indices of examples have several digits."""
        (problem,) = [one for one in ARRANGEMENTS if one.name == name]
        check_traces(instance(problem, num_data), "empirical", "reduce")

    @pytest.mark.parametrize("how", SUMS)
    def test_regular_only_at_first(self, how: str) -> None:
        """All sets of the first batch have the same size. The next batch has equally many elements in other sets."""
        one = Problem(how, lambda: Sets(how), set_of([3, 3, 3, 3, 1, 5, 4, 2]), join_sets).instance(8)
        check_traces(one, "empirical", "expand", range(4), range(4, 8))
        together, alone = (
            KFAC(one.risk(*batches), "empirical", "reduce")
            for batches in ([range(4), range(4, 8)], [[n] for n in range(8)])
        )
        same_factors(together, alone)

    @pytest.mark.parametrize("length", [N, N + 1])
    def test_inputs_with_the_batch_axis_second(self, length: int) -> None:
        problem = Problem(
            "batch axis second",
            lambda: Net(lambda m, x: m.o(m.f(x).tanh().mean(0)), encoder()),
            lambda _: normal(length, 1, 3),
            lambda parts: torch.cat(list(parts), 1),
        )
        one = problem.instance(N)
        for sharing in SHARING:
            check_traces(one, "empirical", sharing, batch_axis=1)
            whole, parts = (KFAC(one.risk(*ns), sharing=sharing, batch_axis=1) for ns in ([], [[1], [3, 0, 2]]))
            same_factors(whole, parts)

    def test_checkpoints(self) -> None:
        """Parts of a model that run again in the backward pass, once for each vector that is sent back."""

        def saving(m: Any, x: Tensor) -> Tensor:
            return checkpoint(lambda x: time_major(m, x), x, use_reentrant=False)  # type: ignore[no-any-return]

        one = Problem("checkpoint", lambda: Net(saving, encoder()), sequence(N)).instance(N)
        check_traces_and_batches(one, [2], [3, 0, 1])

    def test_a_graph_without_nodes_alone(self) -> None:
        """Its prediction does not depend on any data, so the use of the head is missed, which is an error."""
        (problem,) = [one for one in ARRANGEMENTS if one.name == "graphs, as many nodes as data"]
        with pytest.raises(ModelError, match=r"'o\.(weight|bias)': .* not seen"):
            KFAC(instance(problem, N).risk([0], [1], [2], [3]))


@pytest.mark.parametrize("features", [3, 1009])
def test_few_directions_tell_rows_apart(features: int) -> None:
    """This includes rows that differ in one feature only."""
    measure._directions.cache_clear()  # tests without measuring may have filled it
    g = torch.randn(2, 1, features, dtype=torch.float64).repeat(1, 3, 1)
    g[1, 2, -1] += 1
    found = measure.project(g)
    same = torch.cdist(found, found) == 0
    assert same.tolist() == (torch.cdist(g.flatten(0, 1), g.flatten(0, 1)) == 0).tolist()
    assert found.shape[1] <= 4


@pytest.mark.parametrize("num_data", [1, 5, 8])
def test_digits_beyond_the_number_of_data(num_data: int) -> None:
    """A row whose gradients belong to a nonexistent example is treated as a row of several examples."""
    g = torch.randn(1, 3, dtype=torch.float64)
    for n in range(measure.BASE):
        (found,) = measure.measured([g, 2**n * g], [1], num_data, torch.float64)
        assert found.mixes == (n >= num_data)
        assert found.row_map.tolist() == [n if n < num_data else -1]
