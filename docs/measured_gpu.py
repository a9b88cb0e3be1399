"""Tables of the pages about GPUs, each from a file of results: see `docs/measured.py`."""

from collections.abc import Callable
from pathlib import Path

from docs.measured_numbers import rows, table, value


def operators(results: Path, problem: str = "GPT") -> str:
    """Return products with operators, in units of a forward and backward pass: `operators GPT`."""
    found = {
        (row["program"], row["library"]): f"{row['ratio']:.2f}" for row in rows(results, "operators", problem=problem)
    }
    lines = []
    for name in ("GGN", "Hessian", "empirical Fisher"):
        for k in ("1", "10"):
            both = [(f"{name}, {k}", "kfs"), (f"{name}, replay=False, {k}", "kfs"), (f"{name}, {k}", "curvlinops")]
            lines.append([name, k, *(found.get(key, "") for key in both)])
    return table(["product with", "columns", "kfs", "without `replay`", "curvlinops"], lines)


COLUMNS = {
    "ratio": "one more batch",
    "graphed_ratio": "/ graphed forward+backward",
    "no_replay": "`replay=False`",
    "first": "first batch",
    "recording": "recording",
    "allocated": "peak memory",
}


def factors_cuda(results: Path, *fields: str) -> str:
    """Return costs of one more batch on a GPU, Monte Carlo Fisher: all columns, or `factors_cuda ratio no_replay`."""
    fields = fields or tuple(COLUMNS)
    lines = []
    for row in rows(results, "factors_cuda", library="kfs"):
        if row["program"].startswith("mc expand"):
            name = row["problem"] + (', `products="bf16"`' if "bf16 products" in row["program"] else "")
            lines.append([name, *("" if row[field] is None else f"{row[field]:.2f}" for field in fields)])
    return table(["model", *(COLUMNS[field] for field in fields)], lines)


def recurrent(results: Path) -> str:
    """Return costs of passes and steps of recurrent networks, in units of a step of SGD: smallest and largest."""
    titles = {
        "watched pass": "a pass that is watched",
        "KFAC, watched step": "a step with new factors",
        "KFAC, step": "a step with default settings",
    }
    lines = [
        [
            title,
            *(value(results, f"recurrent_{device}", "ratio", "1", f"program={program}") for device in ("cpu", "cuda")),
        ]
        for program, title in titles.items()
    ]
    return table(["", "one CPU thread", "GPU"], lines)


def factors_cuda_peers(results: Path) -> str:
    """Return costs of a batch on a GPU, by kfs and by other libraries if there are some."""
    found = rows(results, "factors_cuda")
    peers = list(
        dict.fromkeys(row["library"] for row in found if row["library"].partition(",")[0] not in {"torch", "kfs"})
    )
    lines = []
    for problem, program in dict.fromkeys((row["problem"], row["program"]) for row in found):
        here = {r["library"]: f"{r['ratio']:.2f}" for r in found if (r["problem"], r["program"]) == (problem, program)}
        if "kfs" in here and set(here) & set(peers):
            lines.append([f"{problem}, {program}", here["kfs"], *(here.get(peer, "") for peer in peers)])
    return table(["", "kfs", *peers], lines)


def precision(results: Path) -> str:
    """Return errors of factors and steps by precision of products: medians over layers, the largest in brackets."""
    found = rows(results, "precision")
    dampings = list(found[0]["steps"])

    def errors(both: dict[str, float] | None) -> str:
        return "refused" if both is None else f"{both['median']:.1e} ({both['worst']:.1e})"

    lines = [
        [r["problem"], f"`{r['products']}`", errors(r["A"]), errors(r["B"]), *(errors(r["steps"][d]) for d in dampings)]
        for r in found
    ]
    return table(["model", "`products=`", "A", "B", *(f"step, damping {d}" for d in dampings)], lines)


TABLES: dict[str, Callable[..., str]] = {
    made.__name__: made for made in (operators, factors_cuda, factors_cuda_peers, precision, recurrent)
}
