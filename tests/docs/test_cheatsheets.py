"""Both cheatsheets are right: the code below each formula agrees with the definition, and wrong variants do not.

Below each formula in a table is its code. `FORMULAS` has, for each formula, the expected result by `kfs.basics`, and
edits of the code that must be noticed.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, MultivariateNormal, kl_divergence
from torch.func import functional_call, hessian, jacrev
from torch.nn.functional import linear

from kfs import KFAC, EmpiricalRisk
from kfs.basics.emp_fishers import vec_empirical_fisher
from kfs.basics.exact_fishers import vec_type1_fisher, vec_type2_fisher
from kfs.basics.flattening import cvec, rvec, unflatten_cvec, unflatten_rvec
from kfs.basics.ggns import vec_ggn
from kfs.basics.hessian_factorizations import hessian_factor
from kfs.basics.hessians import vec_hessian
from kfs.basics.jacobian_products import vjp
from kfs.basics.jacobians import vec_jacobian
from kfs.basics.jacobians_linear_layer import append_one
from kfs.basics.label_sampling import sample_label
from kfs.basics.mc_fishers import vec_mc_fisher
from kfs.basics.reduction_factors import criterion, reduction_factor
from kfs.conformance.exact import exact_empirical_fisher, exact_ggn
from kfs.kfac.backpropagated_vectors import backpropagated_vectors, send_back
from tests.definitions import report_of
from tests.docs.pages import DOCS

BASICS, LAYERS = "cheatsheet_basics", "cheatsheet_kfac"
LOSSES: dict[str, Any] = {"square loss": nn.MSELoss, "cross-entropy": nn.CrossEntropyLoss}
REDUCTIONS = ("mean", "sum")
Pairs = Iterator[tuple[Any, Any]]
# Runs code with some names; a page may explain only these.
Run = Callable[..., Any]


class Formula(NamedTuple):
    """The check of a formula.

    Attributes:
        pairs: Runs the code in all situations, and yields results beside results of a definition.
        wrong: Edits of the code that must be noticed.
    """

    pairs: Callable[[Run], Pairs]
    wrong: Sequence[tuple[str, str]]


class Cell(NamedTuple):
    """A formula on a page, identified by its row and column."""

    page: str
    row: str
    column: str
    formula: str
    code: str


class Row(NamedTuple):
    """A row of a table: its cells, and those of the table's head."""

    cells: list[str]
    head: list[str]


def rows(page: str) -> list[Row]:
    """Return the rows of all tables of a page."""
    found, head = [], None
    for line in (DOCS / f"{page}.md").read_text(encoding="utf-8").splitlines():
        if not line.startswith("|"):
            head = None
            continue
        cells = [cell.strip() for cell in line.strip("|").split(" | ")] if "---" not in line else []
        if head is None:
            head = cells
        elif cells:
            assert len(cells) == len(head), line
            found.append(Row(cells, head))
    return found


def name_of(text: str) -> str:
    """Return the words of a cell up to a colon or comma, without formulas."""
    words = re.split(r"[:,;]", re.sub(r"\$[^$]*\$", "", text))[0]
    return re.sub(r"\s+", " ", re.sub(r"[`\"*]", "", words)).strip()


@cache
def cells(page: str) -> list[Cell]:
    """Return all formulas of a page with code."""
    return [
        Cell(page, "" if "<br>" in row.cells[0] else name_of(row.cells[0]), name_of(column), formula, code)
        for row in rows(page)
        for cell, column in zip(row.cells, row.head, strict=True)
        for formula, code in re.findall(r"^(.*)<br>`([^`]+)`$", cell)
    ]


def code_of(page: str, row: str, column: str) -> str:
    (code,) = {cell.code for cell in cells(page) if cell.row == row and cell.column == column}
    return code


COMMON: dict[str, Any] = {
    name: getattr(torch, name) for name in ("cat", "diag", "exp", "kron", "log", "multinomial", "outer", "randn_like")
}


def runner(code: str) -> Run:
    def run(**names: Any) -> Any:
        with torch.no_grad():
            common = COMMON | {
                "pi": math.pi,
                "eye": lambda size: torch.eye(size, dtype=torch.float64),
                "ones": lambda size: torch.ones(size, dtype=torch.float64),
                "sqrt": lambda x: torch.as_tensor(x, dtype=torch.float64).sqrt(),
                "square": lambda v: torch.outer(v, v),
            }
            return eval(code, common | names)

    return run


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def log_likelihood(loss: str, f: Tensor, y: Tensor) -> Any:
    """Return log r, from another package than the criterion."""
    if loss == "square loss":
        return MultivariateNormal(f, torch.eye(len(f), dtype=f.dtype)).log_prob(y)
    return Categorical(logits=f).log_prob(y)


# ---- Loss and likelihood ----

F = random(3)
TARGETS = {"square loss": list(random(3, 3, seed=1)), "cross-entropy": list(torch.arange(3))}


def single(f: Tensor, y: Tensor) -> dict[str, Any]:
    """Return the names that code about one example may use."""
    f = f.detach()
    eye = torch.eye(len(f), dtype=torch.float64)
    return {"f": f, "y": y, "sigma": f.softmax(0), "onehot": lambda k: eye[k]}


def of_one(loss: str, expected: Callable[[Any, Tensor, Tensor], Tensor]) -> Callable[[Run], Pairs]:
    """Compare with a function of the criterion, a prediction that requires gradients, and a target."""

    def pairs(run: Run) -> Pairs:
        for y in TARGETS[loss]:
            f = F.clone().requires_grad_()
            yield run(**single(f, y)), expected(criterion(LOSSES[loss]()), f, y)

    return pairs


def distances(run: Run) -> Pairs:
    for seed in range(3):
        p, r = random(2, 4, seed=seed).softmax(1)
        yield run(p=p, r=r), kl_divergence(Categorical(p), Categorical(r))


def likelihoods(loss: str) -> Callable[[Run], Pairs]:
    def pairs(run: Run) -> Pairs:
        c, (one, *others) = criterion(LOSSES[loss]()), TARGETS[loss]
        for y in others:
            r_one, r = (run(**single(F, label)) for label in (one, y))
            yield r, log_likelihood(loss, F, y).exp()
            yield r_one.log() - r.log(), c(F, y) - c(F, one)

    return pairs


def draws(loss: str) -> Callable[[Run], Pairs]:
    def pairs(run: Run) -> Pairs:
        for seed in range(20):
            torch.manual_seed(seed)
            drawn = run(**single(F, TARGETS[loss][0]))
            yield drawn, sample_label(LOSSES[loss](), F, torch.Generator().manual_seed(seed))

    return pairs


def reduction_factors(loss: str, reduction: str) -> Callable[[Run], Pairs]:
    """With two positions: three numbers or one label at each position."""

    def pairs(run: Run) -> Pairs:
        f, N = random(5, 3, 2), 5
        y = random(5, 3, 2, seed=1) if loss == "square loss" else torch.tensor([[0, 1]] * 5)
        dim_f, dim_y = f[0].numel(), y[0].numel()
        yield run(N=N, dim_f=dim_f, dim_y=dim_y), reduction_factor(LOSSES[loss](reduction=reduction), y)

    return pairs


def gradient(c: Any, f: Tensor, y: Tensor) -> Tensor:
    value = c(f, y)
    return vjp(value, f, torch.ones_like(value))


def symmetric_factor(loss: str) -> Callable[[Run], Pairs]:
    def pairs(run: Run) -> Pairs:
        for y in TARGETS[loss]:
            f = F.clone().requires_grad_()
            S = run(**single(f, y))
            yield S @ S.T, vec_hessian(criterion(LOSSES[loss]())(f, y), f)
            yield S, hessian_factor(LOSSES[loss](), f, y)

    return pairs


# ---- Curvature matrices ----

M, SEED = 2, 3


class Problem:
    """A small network with three outputs, its loss, and the names that code about all data may use."""

    def __init__(self, loss: str, reduction: str, num_data: int = 4) -> None:
        self.name, self.loss = loss, LOSSES[loss](reduction=reduction)
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3)).double()
        self.X = random(num_data, 2, seed=2)
        self.y = 2 * random(num_data, 3, seed=3) if loss == "square loss" else torch.tensor([2, 0, 0, 1])[:num_data]
        self.params = list(self.model.parameters())
        self.R = reduction_factor(self.loss, self.y)
        generator = torch.Generator().manual_seed(SEED)
        with torch.no_grad():
            self.drawn = [[sample_label(self.loss, f_n, generator) for _ in range(M)] for f_n in self.model(self.X)]

    def prediction(self, theta: Tensor, n: int) -> Tensor:
        parts = theta.split([p.numel() for p in self.params])
        named = zip(self.model.named_parameters(), parts, strict=True)
        f: Tensor = functional_call(self.model, {name: t.reshape(p.shape) for (name, p), t in named}, self.X[n])
        return f

    @cache  # noqa: B019 (there are few)
    def names(self) -> dict[str, Any]:
        """Derivatives come from `torch.func` and the distributions of PyTorch."""
        theta = torch.cat([p.detach().flatten() for p in self.params])
        f = [self.prediction(theta, n) for n in range(len(self.X))]

        def c(n: int, y: Tensor) -> Callable[[Tensor], Tensor]:
            return lambda t: -log_likelihood(self.name, self.prediction(t, n), y)

        def c_f(y: Tensor) -> Callable[[Tensor], Tensor]:
            return lambda f_n: -log_likelihood(self.name, f_n, y)

        def expected(n: int, h: Callable[[Tensor], Tensor]) -> Tensor:
            if self.name == "cross-entropy":
                return sum((p * h(y) for y, p in enumerate_labels(f[n])), torch.zeros(()))
            # Exact for cubic polynomials of a normal variable: two points on each axis.
            points = math.sqrt(3) * torch.cat([torch.eye(3, dtype=torch.float64), -torch.eye(3, dtype=torch.float64)])
            return torch.stack([h(f[n] + point) for point in points]).mean(0)

        data = range(len(self.X))
        return {
            "R": self.R,
            "N": len(data),
            "M": M,
            "data": data,
            "y": self.y,
            "drawn": self.drawn,
            "c": lambda n, y: criterion(self.loss)(f[n], y),
            "J": lambda n: jacrev(lambda t: self.prediction(t, n))(theta),
            "grad": lambda n, y: jacrev(c(n, y))(theta),
            "hess": lambda n, y: hessian(c(n, y))(theta),
            "grad_f": lambda n, y: jacrev(c_f(y))(f[n]),
            "hess_f": lambda n, y: hessian(c_f(y))(f[n]),
            "E_x": lambda h: torch.stack([h(n) for n in data]).mean(0),
            "E_data": lambda n, h: h(self.y[n]),
            "E_model": expected,
        }

    def blocks(self, block: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        return torch.cat([torch.cat([block(p, q) for q in self.params], dim=1) for p in self.params]).detach()

    @cache  # noqa: B019 (there are few)
    def matrix(self, name: str) -> Tensor:
        """Return a matrix by its definition, for all parameters."""
        f = self.model(self.X)
        risk, problem = self.loss(f, self.y), (self.model, self.loss, self.X, self.y)
        blocks: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
            "Hessian": lambda p, q: vec_hessian(risk, p, q),
            "GGN": lambda p, q: vec_ggn(risk, f, p, q),
            "type-II Fisher": lambda p, q: vec_type2_fisher(*problem, (p, q)),
            "type-I Fisher": lambda p, q: vec_type1_fisher(*problem, (p, q)),
            "Monte Carlo Fisher": lambda p, q: vec_mc_fisher(*problem, (p, q), mc_samples=M, seed=SEED),
            "empirical Fisher": lambda p, q: vec_empirical_fisher(*problem, (p, q)),
        }
        return self.blocks(blocks[name])


def enumerate_labels(f: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(torch.arange(len(f)), f.softmax(0), strict=True)


@cache
def problem_of(loss: str, reduction: str, num_data: int = 4) -> Problem:
    return Problem(loss, reduction, num_data)


def problems() -> list[Problem]:
    return [problem_of(loss, reduction) for loss, reduction in product(LOSSES, REDUCTIONS)]


def risks(run: Run) -> Pairs:
    for problem in problems():
        yield run(**problem.names()), problem.loss(problem.model(problem.X), problem.y)


def matrix(name: str, divided: bool = False) -> Callable[[Run], Pairs]:
    def pairs(run: Run) -> Pairs:
        for problem in problems():
            scale = problem.R * len(problem.X) if divided else 1
            yield run(**problem.names()), problem.matrix(name) / scale

    return pairs


# ---- Flattening ----

LEFT, RIGHT, V = random(3, 3, seed=5), random(2, 2, seed=6), random(2, 3, seed=7)


def flattened(vec: Any, unflatten: Any, what: str) -> Callable[[Run], Pairs]:
    def pairs(run: Run) -> Pairs:
        W = random(2, 3, seed=8).requires_grad_()
        x, g = random(3, seed=9), random(2, seed=10)
        found: dict[str, Callable[[], tuple[Any, Any]]] = {
            "entries": lambda: (run(V=V), vec(V)),
            "inverse": lambda: (run(v=V.flatten(), n1=2, n2=3), unflatten(V.flatten(), (2, 3))),
            # The left factor has as many columns as cvec stacks; the right factor has as many rows as rvec stacks.
            "product": lambda: product_with(run, vec),
            "Jacobian": lambda: (run(x=x, d_out=2), vec_jacobian(W @ x, W, vec)),
            "gradient": lambda: (run(x=x, g=g), vec(vjp(W @ x, W, g))),
        }
        yield found[what]()

    def product_with(run: Run, vec: Any) -> tuple[Tensor, Tensor]:
        t = V if vec is cvec else V.T
        return run(A=LEFT, B=RIGHT, V=t, cvec=cvec, rvec=rvec), torch.kron(LEFT, RIGHT) @ vec(t)

    return pairs


BASIC_FORMULAS: dict[tuple[str, str], Formula] = {
    ("", "distance"): Formula(distances, [("sum(-p * r.log())", "sum(-r * r.log())"), ("-p * p", "-p * r")]),
    ("", "risk"): Formula(risks, [("R *", "1 / N *"), ("y[n]", "y[0]")]),
    ("Hessian", "as a sum over data"): Formula(matrix("Hessian"), [("R *", "1 / N *"), ("y[n]", "y[0]")]),
    ("GGN", "as a sum over data"): Formula(matrix("GGN"), [("R *", "1 / N *"), ("hess_f(n, y[n]) @", "")]),
    ("type-II Fisher", "as a sum over data"): Formula(
        matrix("type-II Fisher"), [("R *", "1 / N *"), ("E_model", "E_data")]
    ),
    ("type-I Fisher", "as a sum over data"): Formula(
        matrix("type-I Fisher"), [("R *", "1 / N *"), ("E_model", "E_data")]
    ),
    ("Monte Carlo Fisher", "as a sum over data"): Formula(
        matrix("Monte Carlo Fisher"), [("R / M", "R"), ("R", "1 / N"), ("drawn[n][m]", "y[n]")]
    ),
    ("empirical Fisher", "as a sum over data"): Formula(
        matrix("empirical Fisher"), [("R *", "1 / N *"), ("y[n]", "drawn[n][0]")]
    ),
    ("Hessian", "as an expectation"): Formula(matrix("Hessian", True), [("E_data", "E_model")]),
    ("GGN", "as an expectation"): Formula(matrix("GGN", True), [("E_x(", "N * E_x(")]),
    ("type-II Fisher", "as an expectation"): Formula(
        matrix("type-II Fisher", True),
        [("E_x(", "N * E_x("), ("E_model(n, lambda y: hess_f", "E_data(n, lambda y: hess_f(n, y) + hess_f")],
    ),
    ("type-I Fisher", "as an expectation"): Formula(matrix("type-I Fisher", True), [("E_model", "E_data")]),
    ("empirical Fisher", "as an expectation"): Formula(matrix("empirical Fisher", True), [("E_data", "E_model")]),
}
for _loss, _column, _edits in (
    (
        "square loss",
        "square loss",
        {
            "criterion": [("/ 2", "")],
            "sum": [("2", "1")],
            "mean": [("2 /", "1 /"), ("N * ", "")],
            "likelihood": [(" / 2", ""), ("len(f) / 2", "len(f)")],
            "drawn": [("f +", "")],
            "gradient": [("f - y", "y - f")],
            "Hessian": [("eye(len(f))", "2 * eye(len(f))")],
            "S": [("eye(len(f))", "2 * eye(len(f))")],
        },
    ),
    (
        "cross-entropy",
        "cross-entropy",
        {
            "criterion": [("-log", "log")],
            "sum": [("1", "2")],
            "mean": [("dim_y", "dim_f"), ("N * ", "")],
            "likelihood": [("sigma", "f.sigmoid()")],
            "drawn": [("sigma", "(1 - sigma)")],
            "gradient": [("-", "+"), ("sigma - onehot(y)", "onehot(y) - sigma")],
            "Hessian": [("-", "+"), ("outer(sigma, sigma)", "0")],
            "S": [("outer(sigma, sigma.sqrt())", "outer(sigma.sqrt(), sigma)"), ("-", "+")],
        },
    ),
):
    BASIC_FORMULAS |= {
        ("criterion", _column): Formula(of_one(_loss, lambda c, f, y: c(f, y)), _edits["criterion"]),
        ("reduction sum", _column): Formula(reduction_factors(_loss, "sum"), _edits["sum"]),
        ("reduction mean", _column): Formula(reduction_factors(_loss, "mean"), _edits["mean"]),
        ("likelihood", _column): Formula(likelihoods(_loss), _edits["likelihood"]),
        ("drawn label", _column): Formula(draws(_loss), _edits["drawn"]),
        ("gradient", _column): Formula(of_one(_loss, gradient), _edits["gradient"]),
        ("Hessian", _column): Formula(of_one(_loss, lambda c, f, y: vec_hessian(c(f, y), f)), _edits["Hessian"]),
        ("factor", _column): Formula(symmetric_factor(_loss), _edits["S"]),
    }
for _vec, _unflatten, _edits in (
    (
        cvec,
        unflatten_cvec,
        {
            "entries": [("V.T", "V")],
            "inverse": [("v.reshape(n2, n1).T", "v.reshape(n1, n2)")],
            "product": [("A.T", "A"), ("cvec(", "rvec(")],
            "Jacobian": [("x[None], eye(d_out)", "eye(d_out), x[None]")],
            "gradient": [("x, g", "g, x")],
        },
    ),
    (
        rvec,
        unflatten_rvec,
        {
            "entries": [("V", "V.T")],
            "inverse": [("v.reshape(n1, n2)", "v.reshape(n2, n1).T")],
            "product": [("B.T", "B"), ("rvec(", "cvec(")],
            "Jacobian": [("eye(d_out), x[None]", "x[None], eye(d_out)")],
            "gradient": [("g, x", "x, g")],
        },
    ),
):
    _column = f"{_vec.__name__} stacks {'columns' if _vec is cvec else 'rows'}"
    BASIC_FORMULAS |= {
        ("entries of", _column): Formula(flattened(_vec, _unflatten, "entries"), _edits["entries"]),
        ("inverse", _column): Formula(flattened(_vec, _unflatten, "inverse"), _edits["inverse"]),
        ("product", _column): Formula(flattened(_vec, _unflatten, "product"), _edits["product"]),
        ("Jacobian", _column): Formula(flattened(_vec, _unflatten, "Jacobian"), _edits["Jacobian"]),
        ("gradient", _column): Formula(flattened(_vec, _unflatten, "gradient"), _edits["gradient"]),
    }


# ---- KFAC: the scaffold, and backpropagated vectors ----

SIDES = {"A": "input-based", "B": "gradient-based"}  # columns of the page
VECS: dict[Any, str] = {cvec: "3. cvec", rvec: "rvec"}  # rows of the page
KINDS = {"GGN": 3, "type-I Fisher": M, "empirical Fisher": 1}  # number of vectors for three outputs


def vectors_of(problem: Problem, kind: str) -> list[list[Tensor]]:
    """Return the vectors of all examples, computed by the code of the page."""
    run, f = runner(code_of(LAYERS, kind, problem.name)), problem.model(problem.X)
    return [
        [run(**single(f[n], problem.y[n]), c=k, m=k, M=M, drawn=problem.drawn[n]) for k in range(KINDS[kind])]
        for n in range(len(f))
    ]


def block_of(problem: Problem, kind: str, vec: Any) -> Tensor:
    """Return the block of the first weight by its definition."""
    f, W = problem.model(problem.X), problem.params[0]
    data = (problem.model, problem.loss, problem.X, problem.y, W)
    return {
        "GGN": lambda: vec_ggn(problem.loss(f, problem.y), f, W, vec=vec),
        "type-I Fisher": lambda: vec_mc_fisher(*data, mc_samples=M, seed=SEED, vec=vec),
        "empirical Fisher": lambda: vec_empirical_fisher(*data, vec=vec),
    }[kind]().detach()


def scaffold(problem: Problem, kind: str, vec: Any) -> dict[str, Any]:
    """Return the names that the code of the scaffold may use."""
    layer, rest = problem.model[0], problem.model[1:]
    z = layer(problem.X)
    vectors = vectors_of(problem, kind)
    f = rest(z)
    V = torch.stack([torch.stack(of_example) for of_example in vectors], dim=1)
    with torch.enable_grad():
        return {
            "R": problem.R,
            "N": len(z),
            "data": range(len(z)),
            "columns": range(len(V)),
            "vectors": vectors,
            "x": problem.X,
            "g": send_back(V, f, [z])[0],
            "J": lambda n: differentiated(problem.model, problem.X[n], problem.params[0], vec),
            "J_z": lambda n: differentiated(rest, z[n].detach().requires_grad_(), None, vec),
        }


def differentiated(model: nn.Module, x: Tensor, param: Tensor | None, vec: Any) -> Tensor:
    with torch.enable_grad():
        return vec_jacobian(model(x), x if param is None else param, vec).detach()


def curvatures(vecs: Sequence[Any]) -> Callable[[Run], Pairs]:
    def pairs(run: Run) -> Pairs:
        for problem, kind, vec in product(problems(), KINDS, vecs):
            yield run(**scaffold(problem, kind, vec)), block_of(problem, kind, vec)

    return pairs


def gradients_at_output(run: Run) -> Pairs:
    for problem, kind in product(problems(), KINDS):
        names = scaffold(problem, kind, rvec)
        z = problem.model[0](problem.X).detach()
        for n, c in product(names["data"], names["columns"]):
            z_n = z[n].clone().requires_grad_()
            yield run(**names, n=n, c=c), vjp(problem.model[1:](z_n), z_n, names["vectors"][n][c])


def with_ones(run: Run) -> Pairs:
    for n, x_n in enumerate(X := random(4, 3)):
        yield run(x=X, n=n), append_one(x_n)


def one_example(vec: Any) -> Callable[[Run], Pairs]:
    """For one example, the page's factors give the block of every matrix."""

    def pairs(run: Run) -> Pairs:
        for loss, reduction, kind in product(LOSSES, REDUCTIONS, KINDS):
            names = scaffold(problem_of(loss, reduction, 1), kind, vec)
            factors = {side: runner(code_of(LAYERS, "none", column))(**names) for side, column in SIDES.items()}
            yield run(**factors), block_of(problem_of(loss, reduction, 1), kind, vec)

    return pairs


def type2(loss: str) -> Callable[[Run], Pairs]:
    def pairs(run: Run) -> Pairs:
        for y in TARGETS[loss]:
            f = F.clone().requires_grad_()
            columns = [run(**single(f, y), c=c) for c in range(3)]
            yield sum(torch.outer(v, v) for v in columns), vec_hessian(criterion(LOSSES[loss]())(f, y), f)
            yield torch.stack(columns, dim=1), hessian_factor(LOSSES[loss](), f, y)

    return pairs


def type1(loss: str) -> Callable[[Run], Pairs]:
    """Each vector is a gradient; together, they form the middle of the Monte Carlo Fisher."""

    def pairs(run: Run) -> Pairs:
        labels, c = TARGETS[loss], criterion(LOSSES[loss]())
        f = F.clone().requires_grad_()
        columns = [run(**single(f, labels[0]), drawn=labels, m=m, M=3) for m in range(3)]
        gradients = [gradient(c, f, label) for label in labels]
        for v, g in zip(columns, gradients, strict=True):
            yield math.sqrt(3) * v, g
        yield sum(torch.outer(v, v) for v in columns), torch.stack([torch.outer(g, g) for g in gradients]).mean(0)

    return pairs


# ---- KFAC: factors ----

POSITIONS = 2


class Layer(NamedTuple):
    """A layer of a linear net in which KFAC is exact: inputs, vectors at the output, and expected factors."""

    names: dict[str, Any]
    ggn: dict[Any, Tensor]
    block: Any


@cache
def layer_of(sharing: str, reduction: str) -> Layer:
    """Make a linear net with a bias, four examples and three outputs."""
    torch.manual_seed(4)
    first, last = nn.Linear(2, 4).double(), nn.Linear(4, 3).double()
    mean = nn.Sequential(nn.AvgPool2d((POSITIONS, 1)), nn.Flatten()) if sharing == "reduce" else nn.Identity()
    shape = (4,) if sharing == "none" else (4, POSITIONS)
    X, y = random(*shape, 2), random(*(shape if sharing == "expand" else (4,)), 3, seed=1)
    loss = nn.MSELoss(reduction=reduction)
    W = torch.cat([first.weight, first.bias.unsqueeze(1)], dim=1)
    z = linear(X, W[:, :-1], W[:, -1])
    f = last(mean(z))
    risk = EmpiricalRisk(nn.Sequential(first, mean, last), loss, (X, y))
    K = KFAC(risk, sharing="reduce" if sharing == "reduce" else "expand")
    (g,) = send_back(backpropagated_vectors(loss, f, y), f, [z])
    names = {
        "R": reduction_factor(loss, y),
        "N": 4,
        "S": POSITIONS,
        "data": range(4),
        "positions": range(POSITIONS),
        "x": torch.cat([X, torch.ones(*shape, 1, dtype=torch.float64)], dim=-1),
        "g": g,
        "columns": range(len(g)),
    }
    ggn = {vec: vec_ggn(loss(f, y), f, W, vec=vec).detach() for vec in (cvec, rvec)}
    return Layer(names, ggn, K.blocks["0"])


def factor(sharing: str, side: str) -> Callable[[Run], Pairs]:
    """Compare with the engine's factor; together with the page's other factor, it gives the GGN in both flattenings."""

    def pairs(run: Run) -> Pairs:
        for reduction in REDUCTIONS:
            layer = layer_of(sharing, reduction)
            here = run(**layer.names)
            yield here, getattr(layer.block, side)
            both = {other: runner(code_of(LAYERS, sharing, column))(**layer.names) for other, column in SIDES.items()}
            both[side] = here
            for vec, row in VECS.items():
                yield runner(code_of(LAYERS, row, "formula"))(**both), layer.ggn[vec]

    return pairs


LAYER_FORMULAS: dict[tuple[str, str], Formula] = {
    ("curvature of one layer", "formula"): Formula(
        curvatures([cvec, rvec]), [("R *", "1 / N *"), ("sum(square(v) for v in vectors[n]) @", "")]
    ),
    ("1. inputs", "formula"): Formula(with_ones, [("x[n], ones(1)", "ones(1), x[n]")]),
    ("2. gradients at the output", "formula"): Formula(gradients_at_output, [(".T", "")]),
    ("the same curvature", "formula"): Formula(
        curvatures([cvec]),
        [("R *", "1 / N *"), ("square(x[n]), square(g[c, n])", "square(g[c, n]), square(x[n])")],
    ),
    ("3. cvec", "formula"): Formula(one_example(cvec), [("A, B", "B, A")]),
    ("rvec", "formula"): Formula(one_example(rvec), [("B, A", "A, B")]),
    ("GGN", "square loss"): Formula(type2("square loss"), [("onehot(c)", "onehot(c) - 1 / 3")]),
    ("GGN", "cross-entropy"): Formula(
        type2("cross-entropy"),
        [("sqrt(sigma[c])", "sigma[c]"), ("onehot(c) - sigma", "sigma - onehot(c)"), ("- sigma", "- sqrt(sigma)")],
    ),
    ("type-I Fisher", "square loss"): Formula(
        type1("square loss"), [("/ sqrt(M)", ""), ("/ sqrt(M)", "/ M"), ("f - drawn[m]", "drawn[m] - f")]
    ),
    ("type-I Fisher", "cross-entropy"): Formula(
        type1("cross-entropy"),
        [("/ sqrt(M)", ""), ("/ sqrt(M)", "/ M"), ("sigma - onehot(drawn[m])", "onehot(drawn[m]) - sigma")],
    ),
    ("empirical Fisher", "square loss"): Formula(of_one("square loss", gradient), [("f - y", "y - f")]),
    ("empirical Fisher", "cross-entropy"): Formula(
        of_one("cross-entropy", gradient), [("sigma - onehot(y)", "onehot(y) - sigma")]
    ),
}
for _sharing, _edits_A, _edits_B in (
    ("none", [("R *", "1 / N *")], [("/ N", ""), ("/ N", "* R")]),
    ("expand", [("R *", "R / S *"), ("x[n, s]", "x[n, 0]")], [("(N * S)", "N"), ("g[c, n, s]", "g[0, n, s]")]),
    (
        "reduce",
        [("sum(0)", "mean(0)"), ("R *", "1 / N *")],
        [("S**2", "S"), ("square(g[c, n].sum(0))", "sum(square(g[c, n, s]) for s in positions)")],
    ),
):
    LAYER_FORMULAS |= {
        (_sharing, SIDES["A"]): Formula(factor(_sharing, "A"), _edits_A),
        (_sharing, SIDES["B"]): Formula(factor(_sharing, "B"), _edits_B),
    }
FORMULAS = {BASICS: BASIC_FORMULAS, LAYERS: LAYER_FORMULAS}
ALL = [cell for page in FORMULAS for cell in cells(page)]


def same(pairs: Pairs) -> bool:
    """Run everything, and compare up to round-off."""
    results = [(torch.as_tensor(here).detach().double(), torch.as_tensor(there).double()) for here, there in pairs]
    assert results
    return all(
        here.shape == there.shape and torch.allclose(here, there, rtol=1e-9, atol=1e-11) for here, there in results
    )


@pytest.mark.parametrize("cell", ALL, ids=lambda cell: f"{cell.row}, {cell.column}: {cell.code}")
def test_formula(cell: Cell) -> None:
    """The code gives the result of the definition; edited code does not."""
    formula = FORMULAS[cell.page][cell.row, cell.column]
    assert same(formula.pairs(runner(cell.code)))
    assert formula.wrong
    for part, wrong in formula.wrong:
        assert part in cell.code, part
        assert not same(formula.pairs(runner(cell.code.replace(part, wrong)))), wrong


def test_no_formula_is_forgotten() -> None:
    """Every formula in a table has code, except in labels, and all code is run once."""
    for page, formulas in FORMULAS.items():
        keys = [(cell.row, cell.column) for cell in cells(page)]
        assert sorted(keys) == sorted(formulas)
        assert sum(line.count("<br>`") for line in (DOCS / f"{page}.md").read_text().splitlines()) == len(keys)
        for row in rows(page):
            for cell, head in zip(row.cells[1:], row.head[1:], strict=True):
                stands_alone = row.head[0] == "setting" or head in {"how many"} or cell == SAID
                assert stands_alone or "<br>`" in cell, cell


SAID = "the mean over draws is $F^{\\mathrm{I}}$"


def test_sentences_about_matrices() -> None:
    """The page says in words that these matrices are equal, differ, or converge."""
    text = (DOCS / f"{BASICS}.md").read_text(encoding="utf-8")
    assert SAID in text
    assert r"$F^{\mathrm{II}} = F^{\mathrm{I}} = G$, $\mathrm{H}_\theta \mathcal{L} \neq G$, $E \neq G$" in text
    for problem in problems():
        G = problem.matrix("GGN")
        assert torch.allclose(problem.matrix("type-II Fisher"), G)
        assert torch.allclose(problem.matrix("type-I Fisher"), G)
        for other in ("Hessian", "empirical Fisher", "Monte Carlo Fisher"):
            assert not torch.allclose(problem.matrix(other), G, rtol=0.1)
        # The mean over draws is the expectation over one draw.
        mean = sum(expected_mc(problem, n) for n in range(len(problem.X)))
        assert torch.allclose(torch.as_tensor(mean), problem.matrix("type-I Fisher"))


def expected_mc(problem: Problem, n: int) -> Tensor:
    """Return the expectation of an example's term of the Monte Carlo Fisher, by the code of the page."""
    run, names = runner(code_of(BASICS, "Monte Carlo Fisher", "as a sum over data")), problem.names()
    mean: Tensor = names["E_model"](n, lambda y: run(**names | {"data": [n], "M": 1, "drawn": {n: [y]}}))
    return mean


@pytest.mark.parametrize(
    ("file", "count"), [("basics/label_sampling", 1), ("basics/exact_fishers", 3), ("kfac/backpropagated_vectors", 3)]
)
def test_definitions_verify_formulas_of_the_cheatsheets(file: str, count: int) -> None:
    """The definitions verify these formulas, so that the tour shows them, too."""
    claims = {check.claim for check in report_of(DOCS.parent / "kfs" / f"{file}.py").checks}
    assert sum(claim.startswith("cheatsheet: ") for claim in claims) == count


def test_residuals_of_the_square_loss_are_noise() -> None:
    """The page says that vectors of drawn labels do not depend on the prediction."""
    noise = []
    for seed in (1, 2):
        f = random(3, seed=seed)
        noise.append(f - sample_label(nn.MSELoss(), f, torch.Generator().manual_seed(0)))
    torch.testing.assert_close(*noise)


# ---- Where KFAC is exact ----

DRAWS = 3000  # the error of a gradient-based factor is about 1 / sqrt(DRAWS), times a few; 10 percent is far above it


class Setting(NamedTuple):
    model: nn.Module
    loss: Any
    X: Tensor
    y: Tensor
    sharing: Any


def settings(name: str) -> Iterator[Setting]:
    """Make the nets of a row: with and without bias, for both reductions."""
    for bias, reduction in product((True, False), REDUCTIONS):
        torch.manual_seed(0)
        first, middle, last = (nn.Linear(*size, bias) for size in ((2, 3), (3, 3), (3, 3)))
        square, X, y = nn.MSELoss(reduction=reduction), random(4, 2), random(4, 3, seed=1)
        positions = random(4, POSITIONS, 2, seed=2)
        if name == "one example":
            net = nn.Sequential(first, nn.Tanh(), middle, nn.ReLU(), last, nn.Sigmoid()).double()
            yield Setting(net, square, X[:1], y[:1], "expand")
            yield Setting(net, nn.CrossEntropyLoss(reduction=reduction), X[:1], torch.tensor([2]), "expand")
        elif name == "linear net":
            yield Setting(nn.Sequential(first, middle, last).double(), square, X, y, "expand")
        elif name == "the same with a prediction at every position":
            targets = random(4, POSITIONS, 3, seed=3)
            yield Setting(nn.Sequential(first, middle, last).double(), square, positions, targets, "expand")
        elif name == "the same with positions summed or averaged":
            for divisor in (1, None):  # a sum, an average
                pool = nn.AvgPool2d((POSITIONS, 1), divisor_override=divisor)
                net = nn.Sequential(first, pool, nn.Flatten(), middle, last).double()
                yield Setting(net, square, positions, y, "reduce")
        else:
            assert name == "otherwise"
            net = nn.Sequential(first, nn.Tanh(), middle, nn.Tanh(), last).double()
            yield Setting(net, square, 3 * X, y, "expand")


RELATIONS = {"=": True, r"\to": True, r"\neq": False, r"\not\to": False}
EXACT = [row for row in rows(LAYERS) if row.head[0] == "setting"]


@pytest.mark.parametrize("row", EXACT, ids=lambda row: name_of(row.cells[0]))
def test_where_it_is_exact(row: Row) -> None:
    """All blocks in both flattenings; for a negative claim, one of them."""
    assert row.head[1:] == ["type-II", "type-I, drawn", "empirical"]
    matrices: Any = ((r"G", "type-2", r"G"), (r"\tilde{F}", "mc", "G"), ("E", "empirical", "E"))
    for (of, fisher, target), cell in zip(matrices, row.cells[1:], strict=True):
        relation = re.fullmatch(rf"\$K\({re.escape(of)}\) (\S+) {target}\$", cell)
        assert relation is not None, cell
        tolerance = 0.1 if fisher == "mc" else 1e-10
        for model, loss, X, y, sharing in settings(name_of(row.cells[0])):
            many: Any = {"mc_samples": DRAWS, "columns_at_once": DRAWS} if fisher == "mc" else {}
            K, errors = KFAC(EmpiricalRisk(model, loss, (X, y)), fisher, sharing, **many), []
            for block, vec in product(K.blocks.values(), (cvec, rvec)):
                params = block.layout.params
                C = (exact_empirical_fisher if target == "E" else exact_ggn)(model, loss, X, y, params, vec)
                errors.append(float((K.submatrix(params).to_dense(vec) - C).norm() / C.norm()))
            assert (max(errors) < tolerance) == RELATIONS[relation[1]], (fisher, errors)


def test_settings_are_those_of_the_page() -> None:
    assert len(EXACT) == 5
    assert {cell for row in EXACT for cell in row.cells[1:]} == {
        r"$K(G) = G$",
        r"$K(\tilde{F}) \to G$",
        "$K(E) = E$",
        r"$K(E) \neq E$",
        r"$K(G) \neq G$",
        r"$K(\tilde{F}) \not\to G$",
    }
