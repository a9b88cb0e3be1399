"""The Laplace approximation compared with laplace-torch: fits, covariances of outputs, priors and samples; predictions.

`python -m benchmarks.applications laplace [--quick]` needs laplace-torch (`benchmarks/peers.txt`) for the comparison,
and prints a message without it. Times are CPU times of one thread, medians. A fit includes the audit of a new model,
unless stated otherwise. *Error* is the relative distance to results of laplace-torch with its curvlinops backend; for
models on one example, where KFAC is exact, to the blocks of the GGN. JSON is written to benchmarks/results.
"""

import copy
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import kfs
from benchmarks import laplace_tasks
from benchmarks.laplace_tasks import Data, Predicted, mlp
from benchmarks.report import save

PRIOR = 30.0
SEEDS = 12  # for predictions, which differ more between seeds than between choices of the prior
REMARKS = {
    "log marginal likelihood": "with a pass over the data; theirs has kept the likelihood",
    "best prior": "to ten digits; theirs takes 100 steps of Adam",
}


@dataclass(frozen=True)
class LaplaceRow:
    """A measurement.

    Attributes:
        task: The computation.
        library: The library.
        seconds: Median time; `None` if it was not measured.
        ratio: The time over that of laplace-torch; `None` without it.
        error: Relative distance to the exact result, or to laplace-torch; `None` without a reference.
        remark: A remark.
    """

    task: str
    library: str
    seconds: float | None = None
    ratio: float | None = None
    error: float | None = None
    remark: str = ""


@dataclass(frozen=True)
class PredictionRow:
    """The quality of predictions, the mean over seeds.

    Attributes:
        data: The data set.
        way: How predictions are made.
        nll: Mean negative log-likelihood of held-out data.
        error: Its standard error over seeds, which choose data and networks; zero for a single one.
        prior: The prior precision, if there is one.
        noise: The standard deviation of targets, if there is one.
    """

    data: str
    way: str
    nll: float
    error: float
    prior: float | None
    noise: float | None


class Tokens(nn.Module):
    """An embedding, attention and a normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        h = self.embedding(x)
        h = h + self.attention(h, h, h, need_weights=False)[0]
        out: Tensor = self.last(self.norm(h).mean(1))
        return out


def cnn(**options: Any) -> nn.Sequential:
    """Return a small convolutional net for digits."""
    return nn.Sequential(
        *(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1, **options), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        nn.Linear(16, 10),
    )


def has_peer() -> bool:
    """Whether laplace-torch is installed."""
    return find_spec("laplace") is not None


def median_of(program: Callable[[], object], repeats: int) -> float:
    """Return the median CPU time of a call, after a warm-up."""
    program()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        program()
        times.append(time.process_time() - start)
    return statistics.median(times)


def distance(a: Tensor, b: Tensor) -> float:
    """Return the relative distance of two tensors."""
    return float((a - b).norm() / b.norm())


def fit(model: nn.Module, data: Data, likelihood: str, structure: str, backend: Any) -> Any:
    """Fit a posterior of laplace-torch, in batches of 100."""
    from laplace import Laplace  # noqa: PLC0415 (optional, and slow to import)

    fitted = Laplace(model, likelihood, "all", structure, backend=backend)
    fitted.fit(DataLoader(TensorDataset(*data), batch_size=100))
    return fitted


def dense(fitted: Any) -> Tensor:
    """Return the curvature of a posterior as a matrix."""
    matrix: Tensor = fitted.H_facs.to_matrix() if hasattr(fitted, "H_facs") else fitted.H
    return matrix


def backends() -> dict[str, Any]:
    """Return the backends that are compared."""
    from laplace.curvature import CurvlinopsGGN  # noqa: PLC0415

    return {"laplace-torch (curvlinops)": CurvlinopsGGN, "kfs.laplace.Backend": kfs.laplace.Backend}


def fits(quick: bool) -> list[LaplaceRow]:
    """Time fits of the same models with both backends."""
    repeats = 1 if quick else 9
    torch.manual_seed(0)
    images, labels = torch.randn(1000, 64).double(), torch.randint(10, (1000,))
    small = torch.randn(400, 10).double(), torch.randn(400, 1).double()
    models: list[tuple[str, nn.Module, Data, str]] = [
        ("MLP 64-64-64-10, 1000 examples", mlp(64, 64, 10, nn.ReLU).double(), (images, labels), "classification"),
        ("CNN, 1000 examples", cnn().double(), (images, labels), "classification"),
        ("MLP 10-50-50-1, 400 examples", mlp(10, 50, 1, nn.Tanh).double(), small, "regression"),
    ]
    rows: list[LaplaceRow] = []
    for name, model, data, likelihood in models[:1] if quick else models:
        for structure in ("kron", "diag"):
            rows += _timed_fits(f"fit, {structure}: {name}", model, data, likelihood, structure, repeats)
    return rows


def _timed_fits(
    task: str, model: nn.Module, data: Data, likelihood: str, structure: str, repeats: int
) -> list[LaplaceRow]:
    """Time one fit with both backends: of new copies of a model, which are audited, and of a known model."""

    def fits_of_copies(backend: Any) -> Callable[[], Any]:
        return lambda: fit(copy.deepcopy(model), data, likelihood, structure, backend)

    kron = structure == "kron"
    programs = {library: fits_of_copies(backend) for library, backend in backends().items()}
    if kron:
        again = "kfs.laplace.Backend, model seen before"
        programs[again] = lambda: fit(model, data, likelihood, structure, kfs.laplace.Backend)
    rows: list[LaplaceRow] = []
    theirs: tuple[float, Tensor] | None = None
    for library, program in programs.items():
        # Their diagonals take seconds, and one run is enough to show the factor between them.
        seconds = median_of(program, repeats if kron else 1)
        found = dense(program())
        theirs = (seconds, found) if theirs is None else theirs
        rows.append(LaplaceRow(task, library, seconds, seconds / theirs[0], distance(found, theirs[1])))
    return rows


def coverage() -> list[LaplaceRow]:
    """Compare Kronecker factors of one example with blocks of the GGN, which they should equal."""
    torch.manual_seed(0)
    image = torch.randn(1, 64).double(), torch.tensor([3])
    models: dict[str, tuple[nn.Module, Data]] = {
        "MLP": (mlp(64, 8, 10, nn.ReLU), image),
        "LayerNorm": (nn.Sequential(nn.Linear(64, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 10)), image),
        "embedding, attention": (Tokens(), (torch.arange(1).reshape(1, 1), torch.tensor([1]))),
        "circular padding": (_one_position(padding_mode="circular"), image),
        "groups of channels": (_one_position(groups=2), image),
    }
    rows = []
    for name, (model, data) in models.items():
        prepared = model.double().eval()
        risk = kfs.EmpiricalRisk(prepared, nn.CrossEntropyLoss(reduction="sum"), data)
        exact = _blocks(risk)
        for library, backend in backends().items():
            error, remark = None, ""
            try:
                error = distance(dense(fit(copy.deepcopy(prepared), data, "classification", "kron", backend)), exact)
            except Exception as problem:  # noqa: BLE001 (any error is reported)
                remark = f"{type(problem).__name__}: {str(problem)[:60]} ..."
            rows.append(LaplaceRow(f"one example: {name}", library, error=error, remark=remark))
        if name == "groups of channels":
            belief = kfs.laplace.posterior(kfs.KFAC(risk, joint_bias=False), risk, 1.0)
            identity = torch.eye(len(exact), dtype=exact.dtype)
            error = distance(belief.precision.to_dense(), exact + identity)
            rows.append(LaplaceRow(f"one example: {name}", "kfs.laplace.posterior", error=error))
    return rows


def _blocks(risk: kfs.EmpiricalRisk) -> Tensor:
    """Return the GGN without entries that couple parameters, or groups of channels of one parameter."""
    places = []
    for number, (name, p) in enumerate(risk.params.items()):
        module = risk.model.get_submodule(name.rpartition(".")[0]) if isinstance(risk.model, nn.Module) else None
        is_grouped = isinstance(module, nn.Conv2d) and p.ndim > 1
        groups = module.groups if isinstance(module, nn.Conv2d) and is_grouped else 1
        rows = torch.arange(len(p)) // (len(p) // groups)
        places.append(1000 * number + rows.repeat_interleave(p[0].numel()))
    place = torch.cat(places)
    return torch.where(place.unsqueeze(1) == place, kfs.GGN(risk).to_dense(), 0.0)


def _one_position(**options: Any) -> nn.Sequential:
    """Return a net whose second convolution has one position, so that KFAC is exact for one example."""
    second = nn.Conv2d(2, 4, 3, padding=1, **options)
    first = (nn.Unflatten(1, (1, 8, 8)), nn.Flatten(), nn.Linear(64, 2), nn.Unflatten(1, (2, 1, 1)))
    return nn.Sequential(*first, second, nn.Flatten(), nn.Linear(4, 10))


def posteriors(quick: bool) -> list[LaplaceRow]:
    """Time computations with a posterior: covariances of 1000 outputs, marginal likelihoods, priors and samples."""
    rows = []
    for dtype in (torch.float64,) if quick else (torch.float64, torch.float32):
        task = laplace_tasks.digits(0, quick)
        model = task.model.to(dtype)
        training = task.training[0].to(dtype), task.training[1]
        X = task.test[0].to(dtype)[: 50 if quick else 1000]
        risk = kfs.EmpiricalRisk(model, nn.CrossEntropyLoss(), training)
        K = kfs.KFAC(risk, joint_bias=False)
        ours: dict[str, Callable[[], Any]] = {
            f"covariance of outputs, {len(X)} digits": lambda: kfs.laplace.functional_variance(K, risk, X, PRIOR),  # noqa: B023
            "log marginal likelihood": lambda: kfs.laplace.log_marginal_likelihood(K, risk, PRIOR),  # noqa: B023
            "best prior": lambda: torch.tensor(kfs.laplace.tune_prior(K, risk)),  # noqa: B023
            "100 samples": lambda: K.sample(100, damping=PRIOR).T,  # noqa: B023
        }
        theirs = _theirs(model, training, X) if has_peer() else {}
        for name, program in ours.items():
            seconds = median_of(program, 1 if quick else 9)
            other = None
            error = None
            title = f"{name}, {str(dtype).removeprefix('torch.')}"
            if name in theirs:
                other = median_of(theirs[name], 1)
                if name != "100 samples":
                    error = distance(program().double().reshape(-1), theirs[name]().detach().double().reshape(-1))
                rows.append(LaplaceRow(title, "laplace-torch (curvlinops)", other, 1.0))
            ratio = None if other is None else seconds / other
            rows.append(LaplaceRow(title, "kfs.laplace", seconds, ratio, error, REMARKS.get(name, "")))
    return rows


def precision(quick: bool) -> list[LaplaceRow]:
    """Compare covariances of outputs in float32 with those of kfs in float64, for the same batches of 100."""
    tasks = {"digits": laplace_tasks.digits(0, quick), "diabetes": laplace_tasks.diabetes(0, quick)}
    rows = []
    for name, task in tasks.items():
        likelihood = "regression" if name == "diabetes" else "classification"
        X = task.test[0][:200]
        single = task.model.float()
        training = task.training[0].float(), task.training[1].to(torch.float32 if name == "diabetes" else torch.int64)
        fitted = fit(copy.deepcopy(single), training, likelihood, "kron", None)
        for prior in (PRIOR, 1.0, 0.01):
            exact = _covariance(copy.deepcopy(single).double(), training, X.float().double(), prior)
            fitted.prior_precision = prior
            found = {
                "laplace-torch (curvlinops)": fitted.functional_variance(fitted.backend.jacobians(X.float())[0]),
                "kfs.laplace": _covariance(single, training, X.float(), prior),
            }
            task_name = f"covariance of outputs, float32 against float64, prior {prior:g}: {name}"
            rows += [LaplaceRow(task_name, who, error=distance(t.detach().double(), exact)) for who, t in found.items()]
    return rows


def _covariance(model: nn.Module, training: Data, X: Tensor, prior: float) -> Tensor:
    """Return kfs's covariance of outputs, in the precision of the inputs."""
    inputs, targets = training
    is_regression = targets.is_floating_point()
    targets = targets.to(X.dtype) if is_regression else targets
    batches = list(zip(inputs.to(X.dtype).split(100), targets.split(100), strict=True))
    risk = kfs.EmpiricalRisk(model, nn.MSELoss() if is_regression else nn.CrossEntropyLoss(), batches)
    K = kfs.KFAC(risk, joint_bias=False)
    return kfs.laplace.functional_variance(K, risk, X, prior, noise=1.0 if is_regression else None)


def _theirs(model: nn.Module, training: Data, X: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Return the programs of laplace-torch, by the names of those of kfs."""
    fitted = fit(copy.deepcopy(model), training, "classification", "kron", None)
    fitted.prior_precision = PRIOR

    def covariance() -> Tensor:
        fitted.prior_precision = PRIOR
        parts = [fitted.functional_variance(fitted.backend.jacobians(some)[0]) for some in X.split(200)]
        return torch.cat(parts)

    def best() -> Tensor:
        fitted.optimize_prior_precision(pred_type="glm", method="marglik", prior_structure="scalar")
        prior: Tensor = fitted.prior_precision
        return prior

    def evidence() -> Tensor:
        value: Tensor = fitted.log_marginal_likelihood(torch.tensor(PRIOR))
        return value

    def samples() -> Tensor:
        drawn: Tensor = fitted.sample(100)
        return drawn

    return {
        f"covariance of outputs, {len(X)} digits": covariance,
        "log marginal likelihood": evidence,
        "best prior": best,
        "100 samples": samples,
    }


def predictions(quick: bool) -> list[PredictionRow]:
    """Compare predictions of trained nets and of their posteriors, over several seeds."""
    seeds = range(1 if quick else SEEDS)
    found: dict[str, list[dict[str, Predicted]]] = {
        "digits": [laplace_tasks.digits_nll(laplace_tasks.digits(seed, quick)) for seed in seeds],
        "diabetes": [laplace_tasks.diabetes_nll(laplace_tasks.diabetes(seed, quick)) for seed in seeds],
    }

    def mean(values: list[float | None]) -> float | None:
        numbers = [value for value in values if value is not None]
        return statistics.mean(numbers) if numbers else None

    rows = []
    for data, results in found.items():
        for way in results[0]:
            of_way = [result[way] for result in results]
            values = [one.nll for one in of_way]
            error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
            prior = mean([one.prior for one in of_way])
            noise = mean([one.noise for one in of_way])
            rows.append(PredictionRow(data, way, statistics.mean(values), error, prior, noise))
    return rows


def show(rows: list[LaplaceRow], predicted: list[PredictionRow]) -> None:
    """Print both tables as Markdown."""
    print("| task | library | milliseconds | ratio | error | |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        milliseconds = "" if row.seconds is None else f"{1e3 * row.seconds:.2f}"
        ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
        error = "" if row.error is None else f"{row.error:.1e}"
        print(f"| {row.task} | {row.library} | {milliseconds} | {ratio} | {error} | {row.remark} |")
    print()
    print("| data | | NLL of test data | prior precision | noise |")
    print("|---|---|---|---|---|")
    for one in predicted:
        prior, noise = ("" if value is None else f"{value:.3g}" for value in (one.prior, one.noise))
        print(f"| {one.data} | {one.way} | {one.nll:.3f} ± {one.error:.3f} | {prior} | {noise} |")


def main(quick: bool, results: Path) -> None:
    """Measure everything, print tables, and write JSON."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of other libraries
        rows = [*fits(quick), *coverage(), *precision(quick)] if has_peer() else []
        rows += posteriors(quick)
    if not has_peer():
        print("laplace-torch is not installed: there is nothing to compare with.")
    predicted = predictions(quick)
    show(rows, predicted)
    ending = "_quick" if quick else ""
    settings: dict[str, object] = {"prior precision": PRIOR}
    files = [
        save(rows, f"applications_laplace{ending}", settings, results),
        save(predicted, f"applications_laplace_predictions{ending}", {}, results),
    ]
    print(f"Written: {', '.join(map(str, files))}")
