"""Descriptions of objects: short, as text and as HTML, without a pass over data or synchronization."""

from collections.abc import Callable, Iterator
from functools import partial
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kfs
from kfs.display.describe import (
    Described,
    Description,
    Table,
    matrix,
    number,
    readable_count,
    readable_size,
    vector,
)
from kfs.factors import exact_blocks, exact_diagonal
from kfs.operators import (
    Dense,
    Identity,
    Inverse,
    OuterProducts,
    diagonal,
    lsmr,
    neumann,
    solve,
    spectral_density,
    trace,
)
from kfs.operators.estimate import Density, Estimate


class Counted:
    """Batches that count their iterations."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.data = torch.randn(6, 3, dtype=torch.float64), torch.randint(2, (6,))
        self.passes = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.passes += 1
        yield self.data


def make(data: object | None = None) -> kfs.EmpiricalRisk:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    return kfs.EmpiricalRisk(model, nn.CrossEntropyLoss(), Counted() if data is None else data)


def optimizer(risk: kfs.EmpiricalRisk) -> kfs.optim.KFAC:
    assert isinstance(risk.model, nn.Module)
    return kfs.optim.KFAC(risk.model, nn.CrossEntropyLoss())


OF = "of Sequential with CrossEntropyLoss (mean)"
SIZE = "26 x 26, float64 on cpu"
# The first words of `repr`, and a function that makes the object.
OBJECTS: dict[str, tuple[str, Callable[[kfs.EmpiricalRisk], Any]]] = {
    "risk": (
        f"EmpiricalRisk {OF}\n  4 parameters, 26 numbers, float64 on cpu\n  batches, 6 examples",
        lambda risk: risk,
    ),
    "Hessian": (
        f"Hessian {OF}: {SIZE}, symmetric\n  batches, 6 examples\n  block_diagonal='layer', ",
        lambda risk: kfs.Hessian(risk, block_diagonal="layer"),
    ),
    "GGN": (f"GGN {OF}: {SIZE}, symmetric", kfs.GGN),
    "Fisher": (
        f"Fisher {OF}: {SIZE}, symmetric\n  batches, 6 examples\n  kind='empirical', ",
        lambda risk: kfs.Fisher(risk, "empirical"),
    ),
    "Jacobian": (f"Jacobian {OF}: 12 x 26, float64 on cpu\n", kfs.Jacobian),
    "transposed": (f"Jacobian.T: 26 x 12, float64 on cpu\n  Jacobian {OF}", lambda risk: kfs.Jacobian(risk).T),
    "sum": (f"GGN + 2 * Hessian: {SIZE}, symmetric\n  GGN {OF}", lambda risk: kfs.GGN(risk) + 2 * kfs.Hessian(risk)),
    "product": (f"(GGN + Hessian) @ GGN: {SIZE}\n", lambda risk: (kfs.GGN(risk) + kfs.Hessian(risk)) @ kfs.GGN(risk)),
    "block": ("GGN['0.bias'; '0.bias']: 4 x 4, ", lambda risk: kfs.GGN(risk).submatrix("0.bias")),
    "identity": (f"Identity: {SIZE}, symmetric", lambda risk: Identity(kfs.GGN(risk).domain)),
    "entries": (
        f"GGN[rows; columns]: 2 x 3, float64 on cpu\n  GGN {OF}",
        lambda risk: kfs.GGN(risk).submatrix([0, 4], slice(3)),
    ),
    "dense": ("Dense: 2 x 3, float64 on cpu", lambda _: Dense(torch.ones(2, 3, dtype=torch.float64))),
    "outer products": ("OuterProducts of 3 vectors: 2 x 2, ", lambda _: OuterProducts(torch.ones(2, 3))),
    "inverse by a solver": (
        f"Inverse(GGN + 1 * Identity): {SIZE}, symmetric\n  GGN {OF}: {SIZE}, symmetric\n  Identity: {SIZE}, symmetric"
        "\n  solver=solve, check=True, preconditioner=KFAC.inverse(1)\n  cost: one linear system for a product with ",
        lambda risk: Inverse(kfs.GGN(risk).shift(1), preconditioner=kfs.KFAC(risk).inverse(1)),
    ),
    "inverse by a function": (
        f"Inverse(Hessian): {SIZE}, symmetric\n  Hessian {OF}: {SIZE}, symmetric\n  solver=partial, check=False\n",
        lambda risk: Inverse(kfs.Hessian(risk), partial(neumann, scale=0.1), check=False),
    ),
    "KFAC": (
        f"KFAC {OF}: {SIZE}, symmetric\n  fisher='mc', sharing='reduce', seed=3\n  "
        "6 examples, 2 blocks, 488 B of factors",
        lambda risk: kfs.KFAC(risk, "mc", "reduce", seed=3),
    ),
    "EKFAC": (f"EKFAC {OF}: {SIZE}, symmetric\n  fisher='type-2'", kfs.EKFAC),
    "inverse": (f"KFAC.inverse(0.1) {OF}: {SIZE}, symmetric\n  2 blocks, ", lambda risk: kfs.KFAC(risk).inverse(0.1)),
    "inverse by block": (
        "KFAC.inverse(damping of each block, 'factored') of",
        lambda risk: kfs.KFAC(risk).inverse({"0": 0.1, "2": 1.0}, "factored"),
    ),
    "relative damping": ("Relative(0.1)", lambda _: kfs.Relative(0.1)),
    "inverse with relative damping": (
        f"KFAC.inverse(Relative(0.1)) {OF}: {SIZE}, symmetric\n  2 blocks, ",
        lambda risk: kfs.KFAC(risk).inverse(kfs.Relative(0.1)),
    ),
    "power": ("EKFAC.power(-0.5, 0.1) of", lambda risk: kfs.EKFAC(risk).power(-0.5, 0.1)),
    "scaled": ("2 * KFAC of", lambda risk: 2 * kfs.KFAC(risk)),
    "shifted": ("(2 * KFAC).shift(0.1) of", lambda risk: (2 * kfs.KFAC(risk)).shift(0.1)),
    "shifted by relative damping": (
        f"KFAC.shift(Relative(0.5)) {OF}",
        lambda risk: kfs.KFAC(risk).shift(kfs.Relative(0.5)),
    ),
    "part of blocks": (
        f"KFAC['0.bias'; '0.bias'] {OF}: 4 x 4, float64 on cpu, symmetric\n  1 block, ",
        lambda risk: kfs.KFAC(risk).submatrix("0.bias"),
    ),
    "sum of factors": (
        f"KFAC + KFAC {OF}: {SIZE}, symmetric\n  2 blocks, ",
        lambda risk: kfs.KFAC(risk) + kfs.KFAC(risk, "empirical"),
    ),
    "inverse of a sum": (
        f"(KFAC + KFAC).inverse(0.1) {OF}: {SIZE}, symmetric\n  2 blocks, ",
        lambda risk: (kfs.KFAC(risk) + kfs.KFAC(risk, "empirical")).inverse(0.1),  # type: ignore[attr-defined]
    ),
    "sum of blocks": (f"exact_blocks + exact_blocks {OF}", lambda risk: exact_blocks(risk) + exact_blocks(risk)),
    "product of blocks": (f"KFAC @ KFAC {OF}: {SIZE}\n", lambda risk: kfs.KFAC(risk) @ kfs.KFAC(risk)),
    "transposed product": (f"(KFAC @ KFAC).T {OF}", lambda risk: (kfs.KFAC(risk) @ kfs.KFAC(risk)).T),
    "other sum": (
        f"KFAC + GGN: {SIZE}, symmetric\n  KFAC {OF}: {SIZE}, symmetric\n  GGN {OF}",
        lambda risk: kfs.KFAC(risk) + kfs.GGN(risk),
    ),
    "diagonal operator": (f"exact_diagonal {OF}", exact_diagonal),
    "one block": (
        "Block '0' of 0.weight and 0.bias: 4 x 4, 256 B\n  operations: linear; sharing: expand\n  A: 4",
        lambda risk: kfs.KFAC(risk).blocks["0"],
    ),
    "solution": ("Solution: converged after ", lambda risk: solve(kfs.GGN(risk).shift(1), risk.gradient())),
    "early": (
        "Solution: not converged after 1 iteration, residual ",
        lambda risk: neumann(kfs.GGN(risk), risk.gradient(), scale=0.1, terms=1),
    ),
    "at once": (
        "Solution: converged after 0 iterations (tolerance 1e-06)\n  x: 26, ",
        lambda risk: solve(kfs.GGN(risk), torch.zeros(26, dtype=torch.float64)),
    ),
    "least squares": (
        "Solution: converged after ",
        lambda risk: lsmr(kfs.Jacobian(risk), torch.ones(12, dtype=torch.float64), damping=0.1),
    ),
    "list": (
        "Solution: converged after 0 iterations (tolerance 1e-06)\n  x: 4 tensors, 26 numbers, float64 on cpu",
        lambda risk: solve(kfs.GGN(risk), [torch.zeros_like(p) for p in risk.params.values()]),
    ),
    "estimate": ("Estimate: ", lambda risk: trace(kfs.GGN(risk), products=8)),
    "estimates": (
        "Estimate: 26, float64 on cpu, with an error for each number (8 products)",
        lambda risk: diagonal(kfs.GGN(risk), products=8),
    ),
    "density": (
        "Density: 8 point masses, float64 on cpu\n  eigenvalues from ",
        lambda risk: spectral_density(kfs.GGN(risk), num_vectors=2, num_steps=4),
    ),
    "logarithmic density": (
        "Density of log10 |eigenvalue|: 8 point masses, float64 on cpu\n  from -",
        lambda risk: spectral_density(kfs.GGN(risk), num_vectors=2, num_steps=4).log10(),
    ),
    "inspection": (
        "KFAC of Sequential: 2 blocks, 488 B of factors\nparameter",
        lambda risk: kfs.inspect(risk.model, torch.randn(4, 3, dtype=torch.float64)),
    ),
    "comparison": ("Errors against exact blocks, relative to them\nlayer", kfs.compare),
    "influence": (
        f"Influence {OF}: 2 blocks, float64 on cpu\n  KFAC.inverse(0.1)",
        lambda risk: kfs.Influence(kfs.KFAC(risk), 0.1),
    ),
    "gradients": (
        "Gradients of examples 0 to 5: 2 blocks, float64 on cpu",
        lambda risk: next(kfs.per_datum(risk)),
    ),
    "gradients of a block": (
        "Gradients of 6 examples, block '0': 4 x 4, float64 on cpu\n  rows of 1 use",
        lambda risk: next(kfs.per_datum(risk)).blocks["0"],
    ),
    "top": (
        "The 2 most helpful and 2 most harmful examples of each of 6 queries",
        lambda risk: kfs.Influence(kfs.KFAC(risk), 0.1).top(risk, risk, 2),
    ),
    "audit": ("audit of 4 parameters on ", lambda risk: kfs.KFAC(risk).audit),
    "optimizer": (
        "KFAC for Sequential (4 parameters, 26 numbers), CrossEntropyLoss\n  lr=",
        optimizer,
    ),
    "report": (
        "KFAC for Sequential (4 parameters, 26 numbers), CrossEntropyLoss\n  lr=",
        lambda risk: optimizer(risk).report(),
    ),
}


class Balanced(HTMLParser):
    """Checks that all tags are closed, and collects the text."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("name", OBJECTS)
def test_descriptions(name: str) -> None:
    """They begin with the kind of object, are short, and make no pass over the data."""
    expected, function = OBJECTS[name]
    data = Counted()
    risk = make(data)
    risk.count()
    thing = function(risk)
    before = data.passes
    text = repr(thing)
    assert text.startswith(expected)
    assert max(map(len, text.splitlines())) < 150
    assert str(thing).startswith(text)
    assert not text.endswith("\n")
    if isinstance(thing, Described):
        page = Balanced()
        page.feed(thing._repr_html_())
        assert not page.open
        assert text.splitlines()[0] in page.text
    assert data.passes == before


def test_operators_say_what_is_not_known_yet() -> None:
    data = Counted()
    assert "batches, not counted yet" in repr(kfs.GGN(make(data)))
    assert data.passes == 0
    assert "  1 batch, not counted yet" in repr(make(data.data))
    declared = kfs.EmpiricalRisk(make().model, nn.CrossEntropyLoss(), data, num_data=6)
    assert "  batches, 6 examples" in repr(kfs.GGN(declared))
    assert data.passes == 0
    f = kfs.EmpiricalRisk(lambda params, x: x @ params["W"], nn.MSELoss(), data.data, params={"W": torch.ones(3, 2)})
    assert repr(f).startswith("EmpiricalRisk of <lambda> with MSELoss (mean)\n  1 parameter, 6 numbers")


def test_tables_of_blocks() -> None:
    """`print` shows details that `repr` leaves out."""
    model = nn.Sequential(nn.Embedding(5, 4), nn.Unflatten(1, (4, 1)), nn.Conv1d(4, 4, 1, groups=2), nn.Flatten())
    risk = kfs.EmpiricalRisk(model, nn.MSELoss(), (torch.arange(5), torch.randn(5, 4)))
    text = str(kfs.KFAC(risk))
    assert "0.weight  4 x 5      diagonal 5  dense 4x4  embedding    84 B" in text
    assert "2         2 x 2 x 3  dense 3x3   dense 2x2  conv1d      104 B" in text
    assert "identity 4" in str(kfs.KFAC(risk, "forward-only"))
    inverse = str(kfs.KFAC(risk).inverse(1.0, "factored"))
    assert "Kronecker, A diagonal 5, B dense 4x4" in inverse
    assert "dense" in str(exact_blocks(risk))
    assert "  diagonal  " in str(exact_diagonal(risk))


def test_tables_of_sums() -> None:
    """Sums and their inverses list their terms, and the models that these belong to."""
    torch.manual_seed(0)
    X, y = torch.randn(2, 6, 3, dtype=torch.float64), torch.randn(2, 6, 2, dtype=torch.float64)
    model = make().model
    mean = kfs.EmpiricalRisk(model, nn.MSELoss(), (X[0], y[0]))
    total = kfs.EmpiricalRisk(model, nn.MSELoss(reduction="sum"), (X[1], y[1]))
    both = kfs.KFAC(mean) + kfs.KFAC(total, "empirical")
    title = repr(both).splitlines()[0]
    assert title.startswith("KFAC + KFAC of Sequential with MSELoss (mean) and Sequential with MSELoss (sum): 26 x 26")
    assert str(both).count("sum of 2 Kronecker products") == 2
    assert str(both.inverse(0.1, "factored")).count("diagonal in a common basis") == 2  # type: ignore[attr-defined]
    assert "inverse of a sum of 3 Kronecker products" in str(both.inverse(0.1))  # type: ignore[attr-defined]


def test_numbers_of_an_accelerator_are_not_read() -> None:
    """Tensors on `meta` have no values, so reading them would fail."""
    nothing = torch.empty((), device="meta")
    assert repr(Estimate(nothing, nothing, 8)).startswith("Estimate: scalar, float32 on meta")
    assert repr(Density(torch.empty(3, device="meta"), torch.empty(3, device="meta"))).count("\n") == 0
    assert number(nothing) == "(scalar, float32 on meta)"
    model = nn.Sequential(nn.Conv1d(4, 4, 1, groups=2), nn.Flatten(), nn.Linear(8, 2))
    risk = kfs.EmpiricalRisk(model, nn.MSELoss(), (torch.randn(5, 4, 2), torch.randn(5, 2)))
    E = kfs.EKFAC(risk)
    for thing in (E.factors.to("meta"), E.to("meta"), E.blocks["0"], E.blocks["2"]):
        assert "on meta" in str(thing)
    assert "A: 9 x 9, float32 on meta\n" in repr(E.blocks["2"])
    trained = kfs.optim.KFAC(model, nn.MSELoss())
    trained.param_groups[0]["lr"] = nothing
    assert "lr=(scalar, float32 on meta)" in repr(trained)


def test_large_factors_are_not_copied() -> None:
    risk = kfs.EmpiricalRisk(nn.Linear(1100, 1, bias=False), nn.MSELoss(), (torch.ones(2, 1100), torch.ones(2, 1)))
    lines = repr(kfs.KFAC(risk).blocks["weight"]).splitlines()
    assert lines[2:4] == ["  A: 1,100 x 1,100, float32 on cpu", "  B: 1 x 1, float32 on cpu"]


def test_what_a_file_says() -> None:
    """Files store descriptions of model and loss beside the factors."""
    K = kfs.KFAC(make())
    assert repr(kfs.KFAC._from_state(K._state(), K.domain)) == repr(K)
    E = kfs.EKFAC(make())
    assert repr(kfs.EKFAC._from_state(E._state(), E.domain)) == repr(E)


def test_matrices_are_shown_by_their_first_numbers() -> None:
    assert matrix("A", torch.ones(2)) == "A: 2, float32 on cpu\n   1.00e+00  1.00e+00"
    assert matrix("A", torch.zeros(5, 5)).splitlines()[1] == "   " + "  ".join(["0.00e+00"] * 5)
    large = matrix("A", torch.zeros(6, 6)).splitlines()
    assert large[1] == "   " + "  ".join(["0.00e+00"] * 4) + " ..."
    assert large[5] == "  ..."
    assert len(large) == 6
    assert matrix("A", torch.zeros(2, 2, 2)) == "A: 2 x 2 x 2, float32 on cpu"


def test_tables() -> None:
    rows = [("a", "1", ""), ("<b>", "20", ""), ("word " * 20, "3", "")]
    table = Table("title", ("name", "size", "empty"), rows, ("size",))
    lines = table.text().splitlines()
    assert lines[:5] == ["title", f"name{'':55}  size", f"{'-' * 59}  ----", f"a{'':58}     1", f"<b>{'':56}    20"]
    assert lines[5] == f"{('word ' * 12).strip()}     3"
    assert lines[6] == ("word " * 8).strip()
    assert "&lt;b&gt;" in table.html()
    assert "empty" not in table.html()
    nothing = Table("", ("name", "size"), [])
    assert nothing.text() == "name  size\n----  ----"
    assert "caption" not in nothing.html()


def test_words() -> None:
    assert Description("title", ("one\ntwo",), notes=("note",)).text() == "title\n  one\n  two\nnote"
    assert Described().describe() == Description("Described")
    assert [readable_size(n) for n in (3, 3 * 2**10, 3 * 2**20, 3 * 2**30)] == ["3 B", "3 KiB", "3 MiB", "3.0 GiB"]
    assert [readable_count(10.0**n) for n in (0, 3, 6, 9, 12)] == ["1", "1 k", "1 M", "1 G", "1 T"]
    assert vector({"a": torch.ones(2, 3)}) == "1 tensor, 6 numbers, float32 on cpu"
    assert [number(x) for x in (torch.tensor(0.5), True, None, 12345.6)] == ["0.5", "True", "None", "1.235e+04"]


def test_what_objects_consist_of_shows_itself_too() -> None:
    """Dictionaries of blocks have one line per block, and structures do not print their numbers."""
    torch.manual_seed(0)
    data = torch.randn(6, 3), torch.randint(2, (6,))
    K = kfs.KFAC(kfs.EmpiricalRisk(nn.Sequential(nn.Linear(3, 2)), nn.CrossEntropyLoss(), data))
    assert repr(K.blocks) == "1 block by name\n  '0': Block '0' of 0.weight and 0.bias: 2 x 4, 80 B"
    assert repr(K.domain) == "Space of '0.weight', '0.bias': 8 numbers, float32 on cpu"
    for A in (
        K,
        K.inverse(0.1),
        K + kfs.KFAC(kfs.EmpiricalRisk(nn.Sequential(nn.Linear(3, 2)), nn.CrossEntropyLoss(), data), "empirical"),
    ):
        text = repr(A.structures)  # type: ignore[attr-defined]
        assert len(text.splitlines()) == 2
        assert "(1 x 4 x 4, float32 on cpu)" in text
        assert "tensor(" not in text
