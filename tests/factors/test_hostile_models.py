"""Models and data that reveal lucky guesses: results do not depend on batches or on lengths that happen to agree.

The oracle is a loop over examples, with one forward and one backward pass of plain autograd for each.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from kfs import GGN, KFAC, EmpiricalRisk, optim
from kfs.errors import KfsError
from kfs.factors.alternatives import exact_diagonal
from tests.operators.contract import close

LOSS = nn.CrossEntropyLoss(reduction="sum")


Take = Callable[[Any, slice], Any]


class Model(nn.Module):
    """A module from parts and a function of them and the inputs."""

    def __init__(self, function: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)
        self.double().eval()

    def forward(self, *x: Tensor) -> Tensor:
        return self.function(self, *x)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(normal(*shape))


def layers() -> dict[str, nn.Module]:
    return {"inner": nn.Linear(3, 4), "outer": nn.Linear(4, 3)}


def all_of(x: Any, part: slice) -> Any:
    return tuple(t[part] for t in x)


def first_of(x: Any, part: slice) -> Any:
    """Crop the first input; the second one is the same for all examples."""
    return x[0][part], x[1]


def batches(x: Any, y: Tensor, sizes: Sequence[int], take: Take) -> list[tuple[Any, Tensor]]:
    ends = [sum(sizes[: place + 1]) for place in range(len(sizes))]
    return [(take(x, slice(b - n, b)), y[b - n : b]) for b, n in zip(ends, sizes, strict=True)]


def check_diagonal(model: nn.Module, x: Any, sizes: Sequence[int], take: Take = all_of) -> None:
    """Compare the exact diagonal of the empirical Fisher with squared gradients of single examples."""
    y = torch.arange(sum(sizes)) % 3
    params = dict(model.named_parameters())
    expected = {name: torch.zeros_like(p) for name, p in params.items()}
    for n in range(len(y)):
        loss = LOSS(model(*take(x, slice(n, n + 1))), y[n : n + 1])
        for name, g in zip(params, torch.autograd.grad(loss, list(params.values())), strict=True):
            expected[name] += g.square()
    D = exact_diagonal(EmpiricalRisk(model, LOSS, batches(x, y, sizes, take)), fisher="empirical")
    for name, t in D.domain.unflatten(D.diagonal().unsqueeze(0)).items():
        close(t.squeeze(0), expected[name])


def check_factors(model: nn.Module, x: Any, splits: Sequence[Sequence[int]], sharing: Any, take: Take = all_of) -> None:
    """Compare factors for several ways of splitting the same data into batches."""
    y = torch.arange(sum(splits[0])) % 3
    results = [
        KFAC(EmpiricalRisk(model, LOSS, batches(x, y, sizes, take)), fisher="empirical", sharing=sharing)
        for sizes in splits
    ]
    for K in results[1:]:
        for name, block in results[0].blocks.items():
            close(K.blocks[name].A, block.A)
            close(K.blocks[name].B, block.B)


FIT = [
    *(("positions", length, sizes) for length in (4, 5, 12) for sizes in ((12,), (5, 4, 3), (3, 4, 5), (8, 4), (9, 3))),
    *(("positions", 6, sizes) for sizes in ((12,), (3, 4, 5), (8, 4))),
    *(("table", length, sizes) for length in (4, 5) for sizes in ((12,), (8, 4), (9, 3))),
    *(("table", 6, sizes) for sizes in ((3, 4, 5), (8, 4))),
]
DIVIDE = [
    *(("positions", 6, sizes) for sizes in ((5, 4, 3), (9, 3))),
    *(("table", length, sizes) for length in (4, 5) for sizes in ((5, 4, 3), (3, 4, 5))),
    *(("table", 6, sizes) for sizes in ((12,), (5, 4, 3), (9, 3))),
    ("table", 12, (12,)),
]


@pytest.mark.parametrize(("kind", "length", "sizes"), [*FIT, *DIVIDE])
def test_inputs_that_all_data_share(kind: str, length: int, sizes: tuple[int, ...]) -> None:
    """Whether an input has a batch axis does not depend on lengths that divide each other."""
    torch.manual_seed(0)
    table = nn.Embedding(length, 4) if kind == "positions" else nn.Linear(2, 4)
    shared = torch.arange(length) if kind == "positions" else normal(length, 2)
    model = Model(lambda m, x, t: m.outer((m.inner(x) + m.table(t)).tanh().mean(1)), table=table, **layers())
    check_diagonal(model, (normal(12, length, 3), shared), sizes, first_of)


def minus_mean(x: Tensor) -> Tensor:
    return x - x.mean(0)


def attention(x: Tensor) -> Tensor:
    return (x @ x.T).softmax(1) @ x


def cumulative(x: Tensor) -> Tensor:
    return x.cumsum(0)


def minus_first(x: Tensor) -> Tensor:
    return x - x[:1]


def minus_previous(x: Tensor) -> Tensor:
    return x - F.pad(x, (0, 0, 1, 0))[:-1]


@pytest.mark.parametrize("num_data", [2, 3, 4, 6, 9])
@pytest.mark.parametrize("detached", [False, True])
@pytest.mark.parametrize("mix", [minus_mean, attention, cumulative, minus_first, minus_previous])
def test_data_that_mix_before_the_first_parameter(mix: Any, detached: bool, num_data: int) -> None:
    """No parameter's output mixes: only predictions show it, possibly not those of the first examples."""
    torch.manual_seed(0)
    if detached:
        model = Model(lambda m, x: m.outer((h := m.inner(x).tanh()) + mix(h).detach()), **layers())
    else:
        model = Model(lambda m, x: m.outer(m.inner(mix(x)).tanh()), **layers())
    with pytest.raises(KfsError, match="depends on the rest of its batch"):
        KFAC(EmpiricalRisk(model, LOSS, (normal(num_data, 3), torch.arange(num_data) % 3)), fisher="empirical")


class Branches(nn.Module):
    """Sends each example to one of two layers; a layer without examples is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 4), nn.Linear(3, 4)])
        self.outer = nn.Linear(4, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 4)
        for layer, mine in zip(self.layers, (x[:, 0] > 0, x[:, 0] <= 0), strict=True):
            if mine.any():
                h = h.index_put((mine.nonzero()[:, 0],), layer(x[mine]))
        return self.outer(h.tanh())  # type: ignore[no-any-return]


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_layers_that_a_batch_does_not_use(sharing: Any) -> None:
    torch.manual_seed(0)
    x = normal(6, 3)
    x[:, 0] = torch.tensor([1, 1, 1, 1, -1, -1])
    check_factors(Branches(), (x,), [(6,), (4, 2), (1,) * 6], sharing)


def test_rows_that_fit_two_orders() -> None:
    """Sequences come first, and prediction n reads position n: batch-first order would fit these rows as well."""
    torch.manual_seed(0)
    model = Model(
        lambda m, x, last: m.outer(m.inner(x.transpose(0, 1)).tanh()[last, torch.arange(len(last))]), **layers()
    )
    x = (normal(4, 4, 3), torch.arange(4))
    check_factors(model, x, [(4,), (1,) * 4], "expand")
    with pytest.raises(KfsError, match="the order of the others does not say to which example they belong"):
        check_factors(model, x, [(4,)], "reduce")


def readout(m: Any, nodes: Tensor, owners: Tensor, graphs: Tensor) -> Tensor:
    h = (m.inner(nodes) + m.shift).tanh()
    h = m.middle(h).tanh()
    result: Tensor = m.outer(h.new_zeros(len(graphs), 4).index_add(0, owners, h))
    return result


def ragged(sizes: Sequence[int]) -> Take:
    """Return a function that joins graphs with these numbers of nodes."""
    nodes = [normal(n, 3) for n in sizes]

    def take(_: Any, part: slice) -> Any:
        owners = torch.arange(len(nodes[part])).repeat_interleave(torch.tensor(sizes[part]))
        return torch.cat(nodes[part]), owners, torch.zeros(len(nodes[part]), dtype=torch.float64)

    return take


@pytest.mark.parametrize("splits", [(5, 6), (6, 5), (11,), (3, 4, 4)])
def test_ragged_graphs(splits: tuple[int, ...]) -> None:
    """Five graphs have 15 nodes, six have 16: one number of nodes is a multiple of the number of graphs."""
    torch.manual_seed(0)
    take = ragged([2, 4, 3, 1, 5, 3, 4, 2, 1, 2, 4])
    model = Model(readout, shift=parameter(4), middle=nn.Linear(4, 4), **layers())
    check_diagonal(model, None, splits, take)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_factors_of_ragged_graphs(sharing: Any) -> None:
    torch.manual_seed(0)
    take = ragged([2, 4, 3, 1, 5, 3, 4, 2, 1, 2, 4])
    model = Model(readout, shift=parameter(4), middle=nn.Linear(4, 4), **layers())
    check_factors(model, None, [(11,), (1,) * 11], sharing, take)


def test_the_optimizer_takes_graphs() -> None:
    torch.manual_seed(0)
    model = Model(readout, shift=parameter(4), middle=nn.Linear(4, 4), **layers())
    optimizer = optim.KFAC(model, LOSS)
    LOSS(model(*ragged([2, 4, 3])(None, slice(None))), torch.arange(3)).backward()
    optimizer.step()
    assert not optimizer.uncovered


def queries(m: Any, x: Tensor) -> Tensor:
    result: Tensor = m.outer((m.layer(m.latents.expand(len(x), -1, -1)) @ x.transpose(1, 2)).flatten(1))
    return result


def frames(m: Any, x: Tensor) -> Tensor:
    folded = m.inner(x.flatten(0, 1))
    h = torch.cat([m.token.expand(len(folded), -1, -1), folded], 1).tanh().mean(1)
    result: Tensor = m.outer(h.unflatten(0, (len(x), -1)).mean(1))
    return result


def one_by_one(m: Any, x: Tensor) -> Tensor:
    return torch.stack([m.outer((m.inner(datum) + m.table).tanh().mean(0)) for datum in x])


def one_kernel(m: Any, x: Tensor) -> Tensor:
    """Treat examples as channels."""
    kernels = m.kernel.unsqueeze(1).expand(len(x), 1, 3)
    result: Tensor = m.outer(F.conv1d(x.unsqueeze(0), kernels, groups=len(x), padding=1)[0].tanh())
    return result


def with_vector(m: Any, x: Tensor) -> Tensor:
    result: Tensor = m.outer(F.bilinear(x, m.vector.expand_as(x), m.weight).tanh())
    return result


def chosen(m: Any, x: Tensor) -> Tensor:
    mine = x[:, 0] > 0
    h = x.new_zeros(len(x), 4).index_put((mine.nonzero()[:, 0],), (x[mine] @ m.weight + m.bias).tanh())
    result: Tensor = m.outer(h)
    return result


def legitimate(name: str) -> tuple[nn.Module, Tensor]:
    """Return a model that treats examples independently, and inputs."""
    if name in {"queries and a linear layer", "queries and a norm"}:
        layer = nn.Linear(3, 3) if "linear" in name else nn.LayerNorm(3)
        return Model(queries, latents=parameter(1, 2, 3), layer=layer, outer=nn.Linear(6, 3)), normal(5, 3, 3)
    if name == "a token for every frame":
        return Model(frames, token=parameter(1, 1, 4), **layers()), normal(5, 3, 2, 3)
    if name == "a loop over data":
        return Model(one_by_one, table=parameter(4, 4), **layers()), normal(5, 4, 3)
    if name == "a kernel for every example":
        return Model(one_kernel, kernel=parameter(1, 3), outer=nn.Linear(4, 3)), normal(5, 4)
    if name == "a bilinear map of a vector":
        return Model(with_vector, weight=parameter(4, 4, 4), vector=parameter(1, 4), outer=nn.Linear(4, 3)), normal(
            5, 4
        )
    x = normal(5, 3)
    x[:, 0] = -1
    x[: int(name.split(maxsplit=1)[0]), 0] = 1
    return Model(chosen, weight=parameter(3, 4), bias=parameter(4), outer=nn.Linear(4, 3)), x


@pytest.mark.parametrize(
    "name",
    [
        "queries and a linear layer",
        "queries and a norm",
        "a token for every frame",
        "a loop over data",
        "a kernel for every example",
        "a bilinear map of a vector",
        "2 rows are chosen",
        "1 rows are chosen",
    ],
)
def test_legitimate_models(name: str) -> None:
    torch.manual_seed(0)
    model, x = legitimate(name)
    check_diagonal(model, (x,), (len(x),))


def test_no_row_is_chosen() -> None:
    """A batch without any such row adds nothing, and is not an error."""
    torch.manual_seed(0)
    model, x = legitimate("3 rows are chosen")
    check_factors(model, (x,), [(5,), (3, 2)], "expand")


@pytest.mark.parametrize("length", [20, 100, 400])
def test_gradients_that_vanish(length: int) -> None:
    """Gradients of early inputs are so small that their squares are zero in single precision."""
    torch.manual_seed(0)
    model = nn.LSTM(4, 8, batch_first=True)

    def last(params: Any, x: Tensor) -> Tensor:
        result: Tensor = torch.func.functional_call(model, params, (x,))[0][:, -1]
        return result

    params = dict(model.named_parameters())
    risk = EmpiricalRisk(last, LOSS, (torch.randn(6, length, 4), torch.arange(6)), params=params)
    assert all(block.B.isfinite().all() for block in KFAC(risk, fisher="empirical").blocks.values())


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("audit", [True, False])
@pytest.mark.parametrize("multiply", [torch.mul, torch.matmul, lambda x, W: x * W.exp()])
def test_parameters_that_are_read_as_complex_numbers(sharing: Any, audit: bool, multiply: Any) -> None:
    """Real and imaginary parts are not entries of one number: no rule may treat the parameter as a vector of them."""
    square = multiply is torch.matmul

    def spectrum(m: Any, x: Tensor) -> Tensor:
        return m.out(torch.fft.irfft(multiply(torch.fft.rfft(x), torch.view_as_complex(m.W)), n=4).tanh())  # type: ignore[no-any-return]

    model = Model(spectrum, W=parameter(3, 3, 2) if square else parameter(3, 2), out=nn.Linear(4, 3))
    data = normal(5, 4), torch.arange(5) % 3
    risk = EmpiricalRisk(model, LOSS, data)
    with pytest.raises(KfsError, match=r"'W': it is used by \w+ as other numbers .view_as_complex., for which"):
        KFAC(risk, sharing=sharing, audit=audit)
    K = KFAC(risk, sharing=sharing, audit=audit, uncovered="diagonal")
    close(K.submatrix("W").to_dense().diagonal(), GGN(EmpiricalRisk(model, LOSS, data, params=["W"])).diagonal())
    others = ["out.weight", "out.bias"]
    close(
        K.submatrix(others).to_dense(),
        KFAC(EmpiricalRisk(model, LOSS, data, params=others), sharing=sharing).to_dense(),
    )
