"""Tables of pages about applications, each from a file of results: see `docs/measured.py`."""

import statistics
from collections.abc import Callable
from pathlib import Path

from docs.measured_numbers import Row, bold, content, rows, table, with_error

MERGED = {
    "start": "the start",
    "average": "average",
    "diagonal (Fisher merging)": "diagonal (Fisher merging)",
    "RegMean (forward-only)": "RegMean (forward-only)",
    "KFAC": "KFAC",
    "KFAC, factored damping": "KFAC, factored damping",
    "EKFAC": "EKFAC",
    "GGN": "GGN",
    "trained on both": "one model, trained on both",
    "own model (each on its task)": "each model on its own task",
}


SCORED = {
    ("dense GGN", "torch"): "dense GGN",
    ("KFAC type-2", "kfs"): "`KFAC(risk)`",
    ("EKFAC type-2", "kfs"): "`EKFAC(risk)`",
    ("EKFAC mc", "kfs"): '`EKFAC(risk, fisher="mc")`',
}
PREDICTED = {
    ("digits", "MAP"): "the net alone",
    ("digits", "prior by validation data"): "posterior, prior chosen by 200 further digits",
    ("digits", "prior by marginal likelihood"): "posterior, prior of the largest marginal likelihood",
    ("diabetes", "MAP"): "the net alone, with the noise of its training data",
    ("diabetes", "prior by marginal likelihood"): "posterior, prior of the largest marginal likelihood",
    ("diabetes", "prior and noise by marginal likelihood"): "posterior, prior and noise of the largest one",
}
DATA = {"digits": "digits, 200 for training", "diabetes": "diabetes, 300 for training"}


def pruning(results: Path) -> str:
    """Return accuracies of pruned networks by the share that is kept."""
    titles = {"magnitude": "magnitude", "SparseGPT": "SparseGPT", "prune, KFAC": "`prune`"}
    found = rows(results, "pruning")
    shares = [f"{share:g}" for share in sorted({row["keep"] for row in found if row["method"]}, reverse=True)]
    lines = []
    for task in dict.fromkeys(row["task"] for row in found):
        here = {
            (row["method"], f"{row['keep']:g}"): statistics.fmean(row["accuracies"])
            for row in found
            if row["task"] == task
        }
        for method, title in titles.items():
            cells = []
            for share in shares:
                best = max(round(here[other, share], 1) for other in titles)
                cells.append(bold(f"{here[method, share]:.1f}", round(here[method, share], 1) == best))
            lines.append([task, title, f"{here['', '1']:.1f}", *cells])
    return table(["task", "method", "whole", *shares], lines)


def compression(results: Path, cost_of: str = "0.3") -> str:
    """Return accuracies of compressed networks by the share that is kept, and the cost of one of them."""
    found = rows(results, "compression")
    shares = [f"{share:g}" for share in sorted({row["keep"] for row in found}, reverse=True)]
    lines = []
    for method in dict.fromkeys(row["method"] for row in found):
        here: dict[str, Row] = {f"{row['keep']:g}": row for row in found if row["method"] == method}
        costs = [f"{here[cost_of][field]:.2f}" for field in ("stored", "flops", "time")]
        lines.append([method, *(f"{here[share]['accuracy']:.1f}" for share in shares), *costs])
    return table(["method", *shares, "stored", "FLOPs", "time"], lines)


def merging(results: Path) -> str:
    """Return accuracies of merged models, and the cost of merging."""
    found = rows(results, "applications_merging")
    places = [("strong", "rotate"), ("strong", "halves"), ("weak", "rotate"), ("weak", "halves")]
    means = {(r["way"], (r["start"], r["tasks"])): statistics.fmean(r["accuracies"]) for r in found}
    no_bounds = [way for way in MERGED if way not in {"trained on both", "own model (each on its task)"}]
    best = {place: max(means[way, place] for way in no_bounds) for place in places}
    lines = []
    for way, title in MERGED.items():
        cost = next(r for r in found if (r["way"], r["start"], r["tasks"]) == (way, "strong", "rotate"))
        accuracies = [bold(f"{means[way, place]:.1f}", means[way, place] == best[place]) for place in places]
        costs = [("iterations", ".0f"), ("seconds", "#.2g"), ("merge_seconds", "#.2g")]
        lines.append([title, *accuracies, *("" if cost[key] is None else f"{cost[key]:{form}}" for key, form in costs)])
    head = ["", *(f"{start}, {tasks}" for start, tasks in places), "iterations", "CPU seconds", "of them merging"]
    return table(head, lines)


def pinn_training(results: Path) -> str:
    """Return errors of networks that were trained to solve equations, by equation and method."""
    found = rows(results, "applications_pinn")
    methods = list(dict.fromkeys(row["method"] for row in found))
    lines = []
    for equation in dict.fromkeys(row["equation"] for row in found):
        here = {row["method"]: row for row in found if row["equation"] == equation}
        best = min(row["error"] for row in here.values())
        seconds = f"{next(iter(here.values()))['seconds']:g}"
        cells = [bold(f"{here[m]['error']:.1e}", here[m]["error"] == best) for m in methods]
        lines.append([equation, seconds, *cells])
    return table(["equation", "seconds", *methods], lines)


def pinn_derivatives(results: Path) -> str:
    """Return time and memory of Laplacians relative to `taylor`, by dimension and width."""
    found = rows(results, "applications_pinn_derivatives")
    lines = []
    for width, d in dict.fromkeys((row["width"], row["dimension"]) for row in found):
        here = {row["program"]: row for row in found if (row["width"], row["dimension"]) == (width, d)}
        others = [here[name] for name in ("nested", "func")]
        cells = [f"{row['ratio']:.1f}" for row in others]
        cells += ["" if row["memory_ratio"] is None else f"{row['memory_ratio']:.1f}" for row in others]
        lines.append([str(width), str(d), f"{1e3 * here['taylor']['seconds']:.1f} ms", *cells])
    names = ("nested autograd", "`torch.func`")
    head = ["width", "dimensions", "`taylor`", *(f"time, {n}" for n in names), *(f"memory, {n}" for n in names)]
    return table(head, lines)


def influence_scores(results: Path) -> str:
    """Return linear datamodeling scores with the default damping, by method."""
    lines = [
        [titled, with_error(row["values"])]
        for row in rows(results, "influence_lds", damping="0.1 x mean eigenvalue")
        if (titled := SCORED.get((row["method"], row["library"])))
    ]
    return table(["scores", f"{content(results, 'influence_lds')['environment']['train']} digits"], lines)


def influence_damping(results: Path) -> str:
    """Return linear datamodeling scores with the default damping and with weight decay."""
    found = rows(results, "influence_damping")
    methods = ("exact blocks", "KFAC", "EKFAC")
    kinds = {"default": "0.1 x mean eigenvalue (default)", "weight decay": "weight decay"}
    lines, columns = [], list[list[float]]([[] for _ in range(len(methods) * len(kinds))])
    for study in dict.fromkeys(row["study"] for row in found):
        _, data, penalty = study.split(", ")
        here = [row for row in found if row["study"] == study]
        chosen = [
            next(row for row in here if (row["method"], row["damping"]) == (method, damping))
            for method in methods
            for damping in kinds.values()
        ]
        for column, row in zip(columns, chosen, strict=True):
            column.append(statistics.fmean(row["values"]))
        lines.append([data, penalty.removeprefix("penalty "), *(with_error(row["values"]) for row in chosen)])
    means = [statistics.fmean(column) for column in columns]
    marked = [bold(f"{mean:.3f}", mean == max(means[i - i % 2 : i - i % 2 + 2])) for i, mean in enumerate(means)]
    head = [f"{method}: {kind}" if kind == "default" else kind for method in methods for kind in kinds]
    return table(["data", "penalty", *head], [*lines, ["mean", "", *marked]])


def influence_gpu(results: Path) -> str:
    """Return times of scores of a language model on a GPU."""
    found = rows(results, "influence_gpu")
    titles = {
        "factors": "factors, eigenvectors and eigenvalues",
        "pairwise": "scores of all pairs",
        "self": "self-scores",
    }
    lines = []
    for program, title in titles.items():
        ours, theirs = (
            next(row for row in found if (row["program"], row["library"]) == (program, library))
            for library in ("kfs", "Kronfluence")
        )
        rate = f"{round(ours['rate'], -2):,.0f}"
        lines.append([title, f"{ours['seconds']:.1f}", rate, f"{theirs['seconds']:.1f}", f"{ours['speedup']:.1f}"])
    return table(["", "seconds", "tokens per second", "Kronfluence's seconds", "times as fast"], lines)


def predictions(results: Path) -> str:
    """Return negative log-likelihoods of held-out data."""
    found = rows(results, "applications_laplace_predictions")
    lines = []
    for row in found:
        best = row["nll"] == min(other["nll"] for other in found if other["data"] == row["data"])
        nll = bold(f"{row['nll']:.3f}", best)
        lines.append([DATA[row["data"]], PREDICTED[row["data"], row["way"]], f"{nll} ± {row['error']:.3f}"])
    return table(["data", "prediction", "negative log-likelihood"], lines)


def placements(results: Path, *ranks: str) -> str:
    """Return MiB that processes hold and send, by placement of factors: `placements 2 4`."""
    fields = ("most_held", "all_held", "sent", "sent_by_kfac_pytorch")
    lines = [
        [str(row["ranks"]), row["placement"], *(f"{row[field] / 2**20:.1f}" for field in fields)]
        for row in rows(results, "distributed_factors")
        if str(row["ranks"]) in ranks and row["placement"] in {"replicated", "owner"}
    ]
    return table(["ranks", "placement", "most held", "held by all", "sent by a rank", "kfac-pytorch"], lines)


def conformance(results: Path) -> str:
    """Return the numbers of topics that released libraries get right, by library."""
    from benchmarks.conformance import matrix  # noqa: PLC0415 (imports PyTorch)
    from kfs.conformance import Result  # noqa: PLC0415

    answers = content(results, "conformance")["results"]
    return matrix(
        {
            library: [Result(check, (), outcome, outcome=outcome) for check, outcome in found.items()]
            for library, found in answers.items()
        }
    )


def conformance_counts(results: Path) -> str:
    """Count the settings in which libraries are right, and silently wrong. The first one is kfs."""
    head, _, *lines = [[cell.strip() for cell in line.split("|")[2:-1]] for line in conformance(results).splitlines()]
    by_library = dict(zip(head, zip(*lines, strict=True), strict=True))
    counts = {name: (cells.count("yes"), cells.count("**wrong**")) for name, cells in by_library.items()}
    (ours, (right, wrong)), *others = counts.items()
    (first, (its_right, its_wrong)), *more = others
    said = [f"{first} is right in {its_right} and silently wrong in {its_wrong}"]
    said += [f"{name} in {fine} and {bad}" for name, (fine, bad) in more]
    whole = f" and silently wrong in {wrong}" if wrong else ""
    return f"{ours} is right in {right}{whole}. {', '.join(said)}."


def large_language_models(results: Path) -> str:
    """Return times of programs of kfs for two models that fill a GPU, without rows that have no time."""
    lines = []
    for shape in ("1B", "3B"):
        for row in rows(results, f"large_language_model_{shape}", library="kfs"):
            if row["seconds"] is not None:
                ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
                lines.append([shape, row["program"], f"{row['seconds']:.3g}", ratio])
    return table(["model", "program", "seconds", "/ (forward+backward)"], lines)


TABLES: dict[str, Callable[..., str]] = {
    made.__name__: made
    for made in (
        *(pruning, compression, merging, influence_scores, influence_damping, influence_gpu, predictions, placements),
        *(conformance, conformance_counts, pinn_training, pinn_derivatives, large_language_models),
    )
}
