"""The top of the page of benchmarks: headings in words, and the main ratios in one table.

Ratios are computed from the files of results; a ratio whose file is missing is left out. Sections are in
`docs/results.py`.
"""

import json
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

Rows = list[dict[str, Any]]

# Headings, by the beginning of a file's name; the longest one decides. A part without results is left out.
PARTS = {
    "factors": "Kronecker factors",
    "algebra": "Products, inverses and EKFAC",
    "operators": "Products with operators on a GPU",
    "overhead": "Overhead of small layers",
    "precision": "Precision of factors and steps",
    "recurrent": "Recurrent layers",
    "train_cost": "Cost of a training step",
    "train_defaults": "Training with default settings",
    "train_cuda": "Training on a GPU",
    "train": "Training to a loss",
    "long_runs": "Long training runs on a CPU",
    "distributed": "Several processes",
    "influence": "Influence functions",
    "large_language_model": "Language models that fill a GPU",
    "applications_laplace": "Laplace approximations",
    "applications_merging": "Merging",
    "applications_pinn": "Differential equations",
    "compression": "Compression",
    "pruning": "Pruning",
}
# Contents of files of one part, by the rest of their names.
FILES = {
    "factors": "CPU",
    "factors_cuda": "GPU",
    "train_cost": "CPU",
    "distributed": "Training",
    "distributed_factors": "Placement of factors",
    "influence_damping": "Quality of scores, by damping",
    "influence_errors": "Errors of scores against brute force",
    "influence_gpu": "Speed on a GPU",
    "influence_lds": "Quality of scores: linear datamodeling score",
    "influence_mislabelled": "Finding wrong labels",
    "influence_time": "Speed on a CPU",
    "large_language_model_1B": "Shape of Llama 3.2 1B",
    "large_language_model_3B": "Shape of Llama 3.2 3B",
    "applications_laplace": "Time and errors",
    "applications_laplace_predictions": "Quality of predictions",
    "applications_pinn": "Errors after equal time",
    "applications_pinn_derivatives": "Cost of Laplacians",
}
# Names of tasks and devices in the names of files.
WORDS = {
    "cancer": "breast cancer data",
    "classifier": "classifier of digits",
    "cnn": "CNN on digits",
    "cpu": "CPU",
    "cuda": "GPU",
    "deep": "deep tanh network on digits",
    "diabetes": "diabetes data",
    "full": "fine-tuned GPT",
    "gpt": "GPT",
    "large": "GPT with 86 million parameters",
    "lora": "GPT with adapters (LoRA)",
    "lstm": "LSTM",
    "tanh": "tanh network on digits",
    "wine": "wine data",
}


def part_of(name: str) -> str:
    """Return the beginning of a file's name that determines its part of the page; the whole name if there is none."""
    return max((start for start in PARTS if f"{name}_".startswith(f"{start}_")), key=len, default=name)


def heading(name: str) -> str:
    """Return the heading of a file of results, in words.

    Example:
        >>> heading("train_cuda_gpt"), heading("recurrent_cpu"), heading("influence_time")
        ('GPT', 'CPU', 'Speed on a CPU')
    """
    part = part_of(name)
    rest = name.removeprefix(part).strip("_")
    known = FILES.get(name) or ", ".join(WORDS.get(word, word) for word in rest.split("_") if word)
    words = known or PARTS.get(part) or name.replace("_", " ")
    return words[:1].upper() + words[1:]


class Ratio(NamedTuple):
    """A line of the summary.

    Attributes:
        what: Numerator and denominator, in words.
        value: The ratio, or the smallest and the largest one.
        where: The problems.
        name: The file of results, or the common beginning of several names.
    """

    what: str
    value: str
    where: str
    name: str


def summary(results: Path) -> str:
    """Return the main ratios as a table, in Markdown; empty if no file has them."""
    found = [ratio for make in RATIOS for ratio in make(results)]
    if not found:
        return ""
    lines = [
        "| what | ratio | where | numbers |",
        "|---|---:|---|---|",
        *(f"| {r.what} | {r.value} | {r.where} | {_title(r.name)} |" for r in found),
    ]
    return (
        "## The main ratios\n\nEach line divides what kfs takes by what the other side takes: below 1, kfs takes less. "
        "Two numbers are the smallest and the largest one of several problems.\n\n" + "\n".join(lines)
    )


def _title(name: str) -> str:
    """Return a link to the part of the page with the numbers."""
    part = PARTS.get(part_of(name), heading(name))
    return f"[{part}](#{part.lower().replace(',', '').replace(' ', '-')})"


def _rows(results: Path, name: str) -> Rows:
    file = results / f"{name}.json"
    return list(json.loads(file.read_text(encoding="utf-8")).get("rows") or []) if file.is_file() else []


def _range(values: Iterable[float]) -> str:
    """Return the smallest and the largest number, or one number if they are equal."""
    shown = [f"{value:.2f}" if value >= 0.1 else f"{value:.2g}" for value in sorted(values)]
    return shown[0] if shown[0] == shown[-1] else f"{shown[0]} to {shown[-1]}"


def _against(rows: Rows, program: str, peer: str, by: str = "problem") -> dict[str, float]:
    """Return time of kfs divided by that of a peer, for the same program, by problem."""
    times = {(row[by], row["library"].lower()): row["seconds"] for row in rows if row["program"] == program}
    both = [place for place, library in times if library == "kfs" and times.get((place, peer))]
    return {place: times[place, "kfs"] / times[place, peer] for place in both}


def _factors(results: Path) -> Iterable[Ratio]:
    rows = [row for row in _rows(results, "factors") if row["library"] == "kfs" and row["program"] == "mc expand"]
    if rows:
        where = ", ".join(row["problem"] for row in rows)
        what = "factors of KFAC / forward and backward pass"
        yield Ratio(what, _range(row["ratio"] for row in rows), f"{where}; one CPU thread", "factors")


def _algebra(results: Path) -> Iterable[Ratio]:
    for program in ("KFAC", "EKFAC", "exact inverse"):
        found = _against(_rows(results, "algebra"), program, "curvlinops")
        if found:
            where = f"{', '.join(found)}; one CPU thread"
            yield Ratio(f"{program} / curvlinops", _range(found.values()), where, "algebra")


def _steps(results: Path) -> Iterable[Ratio]:
    for name, device in (("train_cost", "one CPU thread"), ("train_cost_cuda", "GPU")):
        rows = [row for row in _rows(results, name) if row["optimizer"] == "kfs"]
        if rows:
            where = f"{', '.join(row['problem'] for row in rows)}; {device}"
            what = "step of `kfs.optim.KFAC` / step of SGD"
            yield Ratio(what, _range(row["ratio"] for row in rows), where, name)


def _trainings(results: Path) -> Iterable[Ratio]:
    """Compare default settings with AdamW at its best learning rate, on the same schedule."""
    times, lower, tasks = [], 0, set()
    for file in sorted(results.glob("train_defaults_*.json")):
        rows = {(row["schedule"], row["optimizer"]): row for row in _rows(results, file.stem)}
        for schedule in sorted({schedule for schedule, _ in rows}):
            ours, theirs = rows.get((schedule, "kfs")), rows.get((schedule, "adamw"))
            if ours and theirs:
                times.append(ours["seconds"] / theirs["seconds"])
                lower += ours["end"] < theirs["end"]
                tasks.add(file.stem)
    if times:
        where = f"median of {len(tasks)} tasks; kfs ends with the lower loss in {lower} of {len(times)} runs"
        what = "seconds of as many steps: `kfs.optim.KFAC` with default settings / AdamW at its best learning rate"
        yield Ratio(what, f"{statistics.median(times):.2f}", where, "train_defaults")


def _influence(results: Path) -> Iterable[Ratio]:
    for name, where in (
        ("influence_gpu", "GPT-2, one GPU"),
        ("influence_time", "small network on digits, one CPU thread"),
    ):
        rows = [row for row in _rows(results, name) if row["seconds"] and row.get("method", "EKFAC mc") == "EKFAC mc"]
        programs = [_against(rows, program, "kronfluence", by="program") for program in ("factors", "pairwise", "self")]
        found = [ratio for program in programs for ratio in program.values()]
        if found:
            yield Ratio("influence: factors, scores, self-scores / Kronfluence", _range(found), where, name)


def _traffic(results: Path) -> Iterable[Ratio]:
    rows = [row for row in _rows(results, "distributed") if row["sent"] and row["scheme"]]
    if rows:
        where = f"{'; '.join(row['model'] for row in rows)}; {rows[0]['ranks']} processes"
        what = "bytes sent by KFAC / the scheme of kfac-pytorch"
        yield Ratio(what, _range(row["sent"] / row["scheme"] for row in rows), where, "distributed")


def _laplace(results: Path) -> Iterable[Ratio]:
    rows = _rows(results, "applications_laplace")
    for start, what in (
        ("fit, kron", "Laplace, fit with KFAC"),
        ("covariance of outputs, 1000", "Laplace, covariance of outputs"),
    ):
        ours = [
            row["ratio"]
            for row in rows
            if row["task"].startswith(start) and row["library"] in {"kfs.laplace", "kfs.laplace.Backend"}
        ]
        if ours:
            yield Ratio(
                f"{what} / laplace-torch", _range(ours), "small networks, one CPU thread", "applications_laplace"
            )


RATIOS: tuple[Callable[[Path], Iterable[Ratio]], ...] = (
    _factors,
    _algebra,
    _steps,
    _trainings,
    _influence,
    _traffic,
    _laplace,
)
