"""The page of benchmarks as Markdown, from the files that `make bench` writes."""

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from docs.modules import ROOT, cell
from docs.results_summary import PARTS, heading, part_of, summary

RESULTS = ROOT / "benchmarks" / "results"
# Bars of more programs, or of more problems, would not be legible: these become tables.
MOST_PROBLEMS, MOST_PROGRAMS = 4, 10
OPTIMIZERS = {
    "adamw": "AdamW",
    "muon": "Muon",
    "soap": "SOAP",
    "prodigy": "Prodigy",
    "kfs-fixed": "kfs, noise=None",
}
MISSING = "There are no numbers yet. Run `make bench`, then `make docs`."
Cells = Sequence[str | float | None]


def files(results: Path = RESULTS) -> list[Path]:
    """Return all files of results, except for those of quick runs."""
    return [file for file in sorted(results.glob("*.json")) if not file.stem.endswith("_quick")]


def markdown(results: Path = RESULTS) -> str:
    """Return the main ratios and a section for each part of the page, or a sentence that says how to measure them."""
    contents = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files(results)}
    found = {name: content for name, content in contents.items() if content.get("rows")}
    parts: dict[str, dict[str, Any]] = {part: {} for part in PARTS}
    for name, content in found.items():
        parts.setdefault(part_of(name), {})[name] = content
    sections = [_part(part, inside) for part, inside in parts.items() if inside]
    return "\n\n".join(filter(None, [summary(results), *sections])) or MISSING


def _part(part: str, contents: dict[str, Any]) -> str:
    """Return a section with the results of its files; each has a heading if there are several."""
    title = f"## {PARTS.get(part, heading(part))}"
    if part == "train_defaults":
        return f"{title}\n\n{_default_settings(contents)}"
    bodies = [
        ([f"### {heading(name)}"] if len(contents) > 1 else [])
        + [_section(name, content["rows"], content.get("environment", {}))]
        for name, content in contents.items()
    ]
    return "\n\n".join([title, *(text for body in bodies for text in body)])


def _provenance(environment: dict[str, Any]) -> str:
    """Return the origin of a result: command and date first, then machine, versions and settings."""
    said = dict(environment)
    command = said.pop("command", None)
    date = said.pop("date", None)
    note = said.pop("note", None)
    first = [f"`{command}`" if command else "", cell(str(date)) if date else ""]
    line = ", ".join([*filter(None, first), *(cell(f"{key} {value}") for key, value in said.items())])
    return f"{line}. Note: {cell(str(note))}." if note else line


def _section(name: str, rows: list[dict[str, Any]], environment: dict[str, Any]) -> str:
    """Return one benchmark: its origin, and a picture or a table."""
    # By a field that only these rows have; the benchmark of influence functions has its own units.
    kinds = {
        "runs": _trainings,
        "errors": _equations,
        "dimension": _derivatives,
        "quarter": _long_runs,
        "history": _histories,
        "dampings": _prunings,
        "task": _tasks,
        "nll": _predictions,
        "keep": _compressed,
        "accuracies": _merges,
        "values": _scores,
        "quantity": _brute_force,
        "rate": _rates,
        "method": _times,
        "host": _large_models,
        "program": _programs,
        "products": _errors,
        "scheme": _traffic,
        "placement": _placements,
    }
    kind = next((kind for key, kind in kinds.items() if key in rows[0]), _steps)
    about = f":::{{div}} about\n{_provenance(environment)}\n:::"
    picture = f"![{_what_is_drawn(name, rows)}](figures/{picture_name(name)})"
    return f"{about}\n\n{picture if drawable(rows) else kind(rows)}"


def _what_is_drawn(name: str, rows: list[dict[str, Any]]) -> str:
    if "history" in rows[0]:
        return f"{heading(name)}: loss over seconds of training, one line for each optimizer"
    return f"{heading(name)}: times of programs as bars, in units of a forward and backward pass"


def drawable(rows: list[dict[str, Any]]) -> bool:
    """Whether rows are shown as a picture: bars of few programs, or losses over time. Others become tables."""
    if "history" in rows[0]:
        return "schedule" not in rows[0]
    if not {"problem", "program", "library", "ratio", "flop_ratio"} <= rows[0].keys():
        return False
    programs = {(row["problem"], row["program"]) for row in rows}
    inside = [len([1 for problem, _ in programs if problem == other]) for other in {row["problem"] for row in rows}]
    return len(inside) <= MOST_PROBLEMS and max(inside) <= MOST_PROGRAMS


def drawn(results: Path = RESULTS) -> list[str]:
    """Return the names of benchmarks that have a picture."""
    contents = {file.stem: json.loads(file.read_text(encoding="utf-8")).get("rows") for file in files(results)}
    return [name for name, rows in contents.items() if rows and drawable(rows)]


def picture_name(name: str) -> str:
    """Return the name of the picture of a benchmark."""
    return f"benchmark_{name}.svg"


def draw(name: str, folder: Path, results: Path = RESULTS) -> None:
    """Draw the picture of a benchmark."""
    from benchmarks.report import Row  # noqa: PLC0415 (imports PyTorch)
    from benchmarks.report import draw as draw_rows  # noqa: PLC0415

    rows = json.loads((results / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    if "history" in rows[0]:
        draw_histories(rows, folder / picture_name(name))
    else:
        draw_rows([Row(**row) for row in rows], "", folder / picture_name(name))


def draw_histories(rows: list[dict[str, Any]], file: Path) -> None:
    """Draw the loss of each optimizer over seconds, for the learning rate with the lowest final loss."""
    from matplotlib.figure import Figure  # noqa: PLC0415 (optional)

    finished = [row for row in rows if row["end"] is not None and row["history"]]
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    for optimizer in dict.fromkeys(row["optimizer"] for row in finished):
        best = min((row for row in finished if row["optimizer"] == optimizer), key=lambda row: row["end"])
        _, seconds, losses = zip(*best["history"], strict=True)
        label = f"{OPTIMIZERS.get(optimizer, optimizer)}, learning rate {best['lr']:g}"
        axes.plot(seconds, losses, linewidth=1.4, label=label)
    low, high = axes.get_ylim()
    # Within a decade, a log axis would have only two numbers.
    if high > 10 * low:
        axes.set_yscale("log")
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("loss")
    axes.grid(which="both", linewidth=0.3)
    axes.legend(frameon=False, title="best learning rate of each")
    figure.savefig(file)


def _default_settings(contents: dict[str, Any]) -> str:
    """Return one table of all tasks: the loss at the end, by optimizer, and the origin of all results."""
    rows = [(heading(name), row) for name, content in contents.items() for row in content["rows"]]
    optimizers = list(dict.fromkeys(row["optimizer"] for _, row in rows))
    found = {(task, row["schedule"], row["optimizer"]): row for task, row in rows}
    lines: list[Cells] = []
    before = ""
    for task, schedule in dict.fromkeys((task, row["schedule"]) for task, row in rows):
        own = {name: found.get((task, schedule, name)) for name in optimizers}
        ends = ["" if row is None or row["end"] is None else f"{row['end']:.3g}" for row in own.values()]
        base, ours = own.get("adamw"), own.get("kfs")
        times = ours["seconds"] / base["seconds"] if base and ours else None
        lines.append(["" if task == before else task, schedule, *ends, times])
        before = task
    numbers = [*(OPTIMIZERS.get(name, name) for name in optimizers), "time, kfs / AdamW"]
    sources = "\n".join(f"- {heading(name)}: {_provenance(c.get('environment', {}))}" for name, c in contents.items())
    return (
        "The loss at the end, in the mean over seeds. AdamW, Muon, SOAP and `noise=None` have the best of several "
        "learning rates; Prodigy and kfs have their default settings. `benchmarks/default_settings.py` says which "
        "losses are those of held-out data.\n\n"
        f"{_table(['task', 'schedule'], numbers, lines)}\n\n"
        f":::{{dropdown}} Commands and machines\n{sources}\n:::"
    )


def _large_models(rows: list[dict[str, Any]]) -> str:
    """Return times and memory of programs with a model that fills a GPU; an error in place of a time is named."""
    lines: list[Cells] = []
    for row in rows:
        numbers = [row[name] for name in ("seconds", "ratio", "peak", "host")]
        lines.append(
            [
                row["program"] if not row["why"] else f"{row['program']}: {row['why'].partition(':')[0]}",
                row["library"],
                *numbers,
            ]
        )
    return _table(
        ["program", "library"], ["seconds", "/ (forward+backward)", "GiB on the GPU", "GiB of the host"], lines
    )


def _programs(rows: list[dict[str, Any]]) -> str:
    """Return a row per program and library; repeated names are left out."""
    wide = _programs_as_columns(rows)
    if wide is not None:
        return wide
    counted = any(row.get("flop_ratio") is not None for row in rows)
    ratios = {"ratio": "time ratio"} | ({"flop_ratio": "FLOP ratio"} if counted else {})
    lines: list[Cells] = []
    before = ("", "")
    for row in rows:
        problem, program = str(row["problem"]), str(row["program"])
        shown = "" if problem == before[0] else problem, "" if (problem, program) == before else program
        before = problem, program
        lines.append([*shown, str(row["library"]), *(row.get(key) for key in ratios)])
    return _table(["problem", "program", "library"], list(ratios.values()), lines)


def _programs_as_columns(rows: list[dict[str, Any]]) -> str | None:
    """Return a row per problem if there are many with the same few programs; `None` otherwise."""
    problems: dict[str, dict[str, float]] = {}
    for row in rows:
        problems.setdefault(row["problem"], {})[row["program"]] = row["ratio"]
    programs = next(iter(problems.values()))
    same = all(found.keys() == programs.keys() for found in problems.values())
    if not same or len(problems) <= MOST_PROBLEMS or len(rows) != len(problems) * len(programs):
        return None
    return _table(["time ratio"], list(programs), [[problem, *found.values()] for problem, found in problems.items()])


def _trainings(rows: list[dict[str, Any]]) -> str:
    """Return a row per optimizer: median cost to reach the loss; infinite for a run that does not reach it."""
    lines: list[Cells] = []
    for row in rows:
        lr = "" if row["lr"] is None else f"{row['lr']:g}"
        runs = [(run["steps"], run["seconds"]) if run["reached"] else (math.inf, math.inf) for run in row["runs"]]
        steps, seconds = (statistics.median(values) for values in zip(*runs, strict=True)) if runs else (None, None)
        reached = steps is not None and math.isfinite(steps)
        notes = [row["note"], "not reached" if runs and not reached else ""]
        shown = [f"{steps:g}" if reached else None, seconds if reached else None]
        lines.append([row["optimizer"], ", ".join(filter(None, notes)), lr, *shown])
    return _table(["optimizer", ""], ["learning rate", "steps", "seconds"], lines)


def _long_runs(rows: list[dict[str, Any]]) -> str:
    """Return a row per optimizer and learning rate: the loss after a quarter, a half and all of the steps."""
    lines: list[Cells] = []
    for row in rows:
        losses = [None if row[key] is None else f"{row[key]:.3g}" for key in ("quarter", "half", "end")]
        lines.append([row["optimizer"], f"{row['lr']:g}", *losses, row["seconds"]])
    return _table(["optimizer"], ["learning rate", "loss at a quarter", "at a half", "at the end", "seconds"], lines)


def _histories(rows: list[dict[str, Any]]) -> str:
    """Return a row per optimizer and learning rate of a run on a GPU, as `_long_runs` does."""
    losses = [[loss for _, _, loss in row["history"]] for row in rows]
    places = [{"quarter": known[len(known) // 4 - 1], "half": known[len(known) // 2 - 1]} for known in losses]
    return _long_runs([row | place for row, place in zip(rows, places, strict=True)])


def _steps(rows: list[dict[str, Any]]) -> str:
    """Return a row per optimizer and problem: the cost of a step."""
    problems = [row["problem"] for row in rows]
    shown = ["" if problem == before else problem for before, problem in zip(["", *problems], problems, strict=False)]
    lines = [[problem, row["optimizer"], row["ratio"]] for problem, row in zip(shown, rows, strict=True)]
    return _table(["problem", "optimizer"], ["step / step of SGD"], lines)


def _errors(rows: list[dict[str, Any]]) -> str:
    """Return a row per precision: relative errors, the median over layers, and the largest ones in brackets."""
    factors = {"A": "A", "B": "B", "A_alone": "A alone", "B_alone": "B alone"}
    dampings = list(rows[0]["steps"])
    lines: list[Cells] = []
    before = ""
    for row in rows:
        shown = "" if row["problem"] == before else str(row["problem"])
        before = row["problem"]
        steps = [_error(row["steps"][d]) or "refused" for d in dampings]
        lines.append([shown, str(row["products"]), *(_error(row[key]) for key in factors), *steps])
    return _table(["problem", "products"], [*factors.values(), *(f"step, damping {d}" for d in dampings)], lines)


def _traffic(rows: list[dict[str, Any]]) -> str:
    """Return a row per model and optimizer in several processes: time of a step, and bytes that are sent."""
    lines: list[Cells] = [
        [
            row["model"],
            row["optimizer"],
            str(row["ranks"]),
            1e3 * row["seconds"],
            *(row[key] / 1e6 if row["held"] else None for key in ("sent", "scheme", "held")),
        ]
        for row in rows
    ]
    numbers = ["ms / step", "MB sent / update", "MB, kfac-pytorch's scheme", "MB held"]
    return _table(["model", "optimizer", "processes"], numbers, lines)


def _placements(rows: list[dict[str, Any]]) -> str:
    """Return a row per number of processes and placement of factors: bytes that a process holds and sends."""
    keys = ("most_held", "all_held", "sent", "sent_by_kfac_pytorch")
    lines: list[Cells] = [
        [str(row["ranks"]), row["placement"], *(row[key] / 2**20 for key in keys), row["seconds"]] for row in rows
    ]
    numbers = ["MiB, most held", "held by all", "sent by one", "kfac-pytorch's scheme", "seconds"]
    return _table(["processes", "placement"], numbers, lines)


def _scores(rows: list[dict[str, Any]]) -> str:
    """Return a row per method of influence functions: the quality of its scores, averaged over seeds."""
    lines: list[Cells] = []
    for row in rows:
        mean = f"{statistics.mean(row['values']):.3f}" if row["values"] else "not installed"
        lines.append([row["study"], row["method"], row["library"], row["damping"], mean])
    return _table(["measure", "method", "library", "damping"], ["mean"], lines)


def _times(rows: list[dict[str, Any]]) -> str:
    """Return a row per program and method of influence functions: its time."""
    lines: list[Cells] = [
        [row["program"], row["method"], row["library"], row["seconds"], _small(row["ratio"])] for row in rows
    ]
    return _table(["program", "method", "library"], ["CPU seconds", "time / Kronfluence"], lines)


def _brute_force(rows: list[dict[str, Any]]) -> str:
    """Return a row per model and library: the difference of its scores from brute force."""
    lines: list[Cells] = [
        [row["model"], row["quantity"], row["library"], row["why"] if row["error"] is None else f"{row['error']:.1e}"]
        for row in rows
    ]
    return _table(["model", "quantity", "library"], ["error"], lines)


def _rates(rows: list[dict[str, Any]]) -> str:
    """Return a row per program and library: tokens of training data per second."""
    lines: list[Cells] = []
    for row in rows:
        rate = row["why"] if row["rate"] is None else f"{row['rate']:,.0f}"
        lines.append([row["program"], row["library"], rate, row["speedup"]])
    return _table(["program", "library"], ["tokens / second", "rate / Kronfluence"], lines)


def _small(ratio: float | None) -> str | None:
    """Return a ratio with three digits, since two decimals of small ones would be zero."""
    return None if ratio is None else f"{ratio:.3g}"


def _merges(rows: list[dict[str, Any]]) -> str:
    """Return a row per way to merge: mean accuracy over seeds, and cost."""
    lines: list[Cells] = []
    before = ""
    for row in rows:
        problem = f"{row['start']} start, {row['tasks']}"
        shown = "" if problem == before else problem
        before = problem
        lines.append(
            [shown, str(row["way"]), statistics.mean(row["accuracies"]), row["iterations"], row["seconds"]],
        )
    return _table(["problem", "way"], ["accuracy", "iterations", "seconds"], lines)


def _equations(rows: list[dict[str, Any]]) -> str:
    """Return a row per equation and method: the error after equal CPU time."""
    lines: list[Cells] = [
        [r["equation"], r["method"], r["seconds"], r["steps"], f"{r['error']:.1e}" if r["error"] else ""] for r in rows
    ]
    return _table(["equation", "method"], ["seconds", "steps", "error"], lines)


def _derivatives(rows: list[dict[str, Any]]) -> str:
    """Return a row per program and network: time and memory of Laplacians."""
    lines: list[Cells] = [
        [f"{r['dimension']} dimensions, width {r['width']}", r["program"], r["seconds"], r["ratio"], r["memory_ratio"]]
        for r in rows
    ]
    return _table(["network", "program"], ["seconds", "time / taylor", "memory / taylor"], lines)


def _compressed(rows: list[dict[str, Any]]) -> str:
    """Return a row per method and kept share."""
    names = {"accuracy": "accuracy in percent", "stored": "numbers stored", "flops": "FLOPs", "time": "time"}
    methods = [row["method"] for row in rows]
    shown = ["" if method == before else method for before, method in zip(["", *methods], methods, strict=False)]
    lines = [[name, row["keep"], *(row[key] for key in names)] for name, row in zip(shown, rows, strict=True)]
    return _table(["method"], ["keep", *names.values()], lines)


def _prunings(rows: list[dict[str, Any]]) -> str:
    """Return a row per task and method: mean accuracies over seeds by share, with standard errors."""
    shares = sorted({row["keep"] for row in rows}, reverse=True)
    lines: list[Cells] = []
    before = ""
    for task, method in dict.fromkeys((row["task"], row["method"]) for row in rows):
        own = {row["keep"]: row["accuracies"] for row in rows if (row["task"], row["method"]) == (task, method)}
        numbers = [_mean_and_error(own[share]) if share in own else None for share in shares]
        lines.append(["" if task == before else task, method or "whole network", *numbers])
        before = task
    return _table(["task", "method"], [f"accuracy, {share:g} kept" for share in shares], lines)


def _mean_and_error(values: list[float]) -> str:
    """Return the mean over seeds with its standard error."""
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values) / len(values) ** 0.5:.1f}"


def _tasks(rows: list[dict[str, Any]]) -> str:
    """Return a row per task and library: time, ratio to a peer's, and relative error; repeated tasks are left out."""
    lines: list[Cells] = []
    before = ""
    for row in rows:
        shown = "" if row["task"] == before else str(row["task"])
        before = row["task"]
        milliseconds = None if row["seconds"] is None else f"{1e3 * row['seconds']:.2f}"
        ratio = None if row["ratio"] is None else f"{row['ratio']:.3f}"
        error = None if row["error"] is None else f"{row['error']:.1e}"
        lines.append([shown, str(row["library"]), str(row["remark"]), milliseconds, ratio, error])
    return _table(["task", "library", ""], ["milliseconds", "ratio", "error"], lines)


def _predictions(rows: list[dict[str, Any]]) -> str:
    """Return a row per data set and way to predict: the likelihood of held-out targets."""
    lines: list[Cells] = [[row["data"], row["way"], f"{row['nll']:.3f}", row["prior"], row["noise"]] for row in rows]
    return _table(["data", ""], ["negative log-likelihood", "prior precision", "noise"], lines)


def _error(errors: dict[str, float] | None) -> str:
    return "" if errors is None else f"{errors['median']:.1e} ({errors['worst']:.1e})"


def _table(words: list[str], numbers: list[str], lines: Sequence[Cells]) -> str:
    """Return a table whose first columns are words and whose others are numbers."""
    rows = [[cell(title) for title in (*words, *numbers)], ["---"] * len(words) + ["---:"] * len(numbers)]
    for line in lines:
        shown = [cell(str(word)) for word in line[: len(words)]]
        rows.append(shown + [cell(_number(value)) for value in line[len(words) :]])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _number(value: str | float | None) -> str:
    return "" if value is None else value if isinstance(value, str) else f"{value:.2f}"
