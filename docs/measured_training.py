"""Tables of pages about training and speed, each from files of results: see `docs/measured.py`."""

import math
import statistics
from collections.abc import Callable
from pathlib import Path

from docs.measured_numbers import bold, content, least, rows, short, table, with_error

OPTIMIZERS = {
    "sgd": "SGD",
    "adamw": "AdamW",
    "muon": "Muon",
    "soap": "SOAP",
    "prodigy": "Prodigy",
    "singd": "SINGD",
    "kfs-fixed": "kfs, best of three fixed `lr`",
    "kfs": "kfs",
}
TRAINED = {
    "autoencoder": "autoencoder on digits (8 layers, tanh)",
    "cnn": "CNN on digits",
    "gpt": "GPT on generated sentences, held out",
    "resnet": "residual network with BatchNorm",
}
FITTED = {
    "full": "full fine-tuning",
    "lora": "LoRA of rank 8",
    "gpt": "GPT from scratch",
    "lstm": "LSTM",
    "deep": "deep tanh network (training loss)",
    "cnn": "CNN on digits",
    "tanh": "deep autoencoder of digits",
    "wine": "wine",
    "cancer": "breast cancer",
    "diabetes": "diabetes",
}
RUNS = {
    "gpt": "byte-level GPT, 5M parameters",
    "deep": "tanh network, 20 layers, 5M",
    "lstm": "LSTM, 4M",
    "large": "GPT, 86M",
}
STEPS = {
    "byte GPT": "byte-level GPT, 6 layers of width 256, batch 64 x 128",
    "ViT float32": "ViT-B/16, batch 64, float32",
    "ViT TF32": "ViT-B/16, batch 64, TF32",
    "ViT bf16 autocast": "ViT-B/16, batch 64, bf16 autocast",
}


def train(results: Path, *tasks: str) -> str:
    """Return steps and seconds to a loss, medians over seeds: `train autoencoder cnn gpt resnet`."""
    names = [name for name in OPTIMIZERS if name not in {"prodigy", "kfs-fixed"}]
    lines = []
    for task in tasks:
        found = content(results, f"train_{task}")
        medians: dict[str, tuple[float, float]] = {}
        for row in found["rows"]:
            runs = [(run["steps"], run["seconds"]) if run["reached"] else (math.inf, math.inf) for run in row["runs"]]
            if runs:
                name = "adamw" if row["optimizer"] == "adam" else row["optimizer"]
                steps, seconds = (statistics.median(values) for values in zip(*runs, strict=True))
                medians[name] = steps, seconds
        fewest, fastest = (min(pair[place] for pair in medians.values()) for place in (0, 1))
        cells = []
        for name in names:
            steps, seconds = medians.get(name, (math.nan, math.nan))
            took = f"{bold(f'{steps:.0f}', steps == fewest)} / {bold(f'{seconds:.1f} s', seconds == fastest)}"
            cells.append("" if math.isnan(steps) else "not reached" if math.isinf(steps) else took)
        lines.append([TRAINED[task], f"{found['environment']['target']:g}", *cells])
    return table(["", "target", *(OPTIMIZERS[name] for name in names)], lines)


def defaults(results: Path, device: str, *tasks: str) -> str:
    """Return losses at half and at the end, means over seeds: `defaults cuda full lora gpt lstm deep`."""
    names = ("adamw", "muon", "soap", "prodigy", "kfs-fixed", "kfs")
    lines = []
    for task in tasks:
        found = rows(results, f"train_defaults_{device}_{task}")
        for schedule in dict.fromkeys(row["schedule"] for row in found):
            here = {row["optimizer"]: row for row in found if row["schedule"] == schedule}
            best = min(short(row["end"]) for row in here.values() if row["end"] == least(here.values(), "end"))
            cells = []
            for name in names:
                row = here.get(name)
                lr = f" ({row['lr']:g})" if row and name == "kfs-fixed" else ""
                end = short(row["end"]) if row else ""
                cells.append(f"{short(row['half'])}, {bold(end, end == best)}{lr}" if row else "")
            lines.append([f"{FITTED[task]}, {schedule}", *cells])
    return table(["", *(OPTIMIZERS[name] for name in names[:-1]), "kfs, default"], lines)


def costs(results: Path, name: str) -> str:
    """Return costs of a step in units of a step of SGD: `costs train_cost_cuda`."""
    found = rows(results, name)
    names = list(dict.fromkeys(row["optimizer"] for row in found if row["optimizer"] != "sgd"))
    lines = []
    for problem in dict.fromkeys(row["problem"] for row in found):
        here = {row["optimizer"]: row for row in found if row["problem"] == problem}
        ratios = [f"{here[name]['ratio']:.2f}" if name in here else "" for name in names]
        lines.append([STEPS.get(problem, problem), f"{1e3 * here['sgd']['seconds']:.3g} ms", *ratios])
    return table(
        ["", "SGD", *(OPTIMIZERS.get(name, name.replace("replay=False", "`replay=False`")) for name in names)], lines
    )


def long_runs(results: Path, *tasks: str) -> str:
    """Return losses at a quarter, at half and at the end of long runs: `long_runs lstm gpt tanh classifier`."""
    names = ("adamw", "muon", "soap", "kfs")
    lines = []
    for task in tasks:
        found = rows(results, f"long_runs_{task}")
        seeds = max(len(row.get("ends") or []) for row in found)
        found = [row for row in found if not seeds or len(row.get("ends") or []) == seeds]
        here = {
            name: min((r for r in found if r["optimizer"] == name), key=lambda row: float(row["end"])) for name in names
        }
        cells = []
        for row in here.values():
            mean, _, error = with_error(row["ends"] if seeds else [row["end"]]).partition(" ± ")
            best = row["end"] == least(here.values(), "end")
            cells.append(f"{row['quarter']:.2f}, {row['half']:.2f}, {bold(mean, best)}{f' ± {error}' if error else ''}")
        lines.append([f"`{task}`", *cells])
    return table(["", *(OPTIMIZERS[name] for name in names)], lines)


def whole_runs(results: Path, *tasks: str) -> str:
    """Return the best run of each optimizer on a GPU, to the end of a schedule: `whole_runs gpt deep lstm large`."""
    from benchmarks.gpu_training import GpuRun  # noqa: PLC0415 (imports PyTorch)

    head = ["at a quarter", "at half", "at the end", "seconds", "ms per step", "seconds to the best of the others"]
    lines = []
    for task in tasks:
        found = rows(results, f"train_cuda_{task}")
        names = [name for name in ("kfs", "muon", "soap", "adamw") if any(row["optimizer"] == name for row in found)]
        ended = [row for row in found if row["end"] is not None]
        runs = {
            name: min((r for r in ended if r["optimizer"] == name), key=lambda row: float(row["end"])) for name in names
        }
        target = least((run for name, run in runs.items() if name != "kfs"), "end")
        for name, run in runs.items():
            history = run["history"]
            losses = [history[len(history) // 4 - 1][2], history[len(history) // 2 - 1][2], run["end"]]
            step = 1e3 * run["seconds"] / history[-1][0]
            reached = GpuRun(**run).seconds_to(target)
            took = [run["seconds"], step, reached]
            times = ["not reached" if math.isinf(one) else f"{one:.1f}" for one in took]
            shown = [f"{run['lr']:g}", *map(short, losses), *times]
            lines.append([RUNS[task], OPTIMIZERS[name], *shown])
    return table(["task", "optimizer", "learning rate", *head], lines)


def overhead(results: Path) -> str:
    """Return costs of a batch of a deep, narrow network, in units of its forward and backward pass."""
    programs = {
        "KFAC mc": "KFAC, Monte Carlo",
        "KFAC empirical": "KFAC, empirical",
        "KFAC type-2": "KFAC, type-2, 16 classes",
        "EKFAC mc": "EKFAC, Monte Carlo",
    }
    found = rows(results, "overhead", problem="20 layers, width 16")
    lines = []
    for program, title in programs.items():
        ratios = {row["library"]: f"{row['ratio']:.1f}" for row in found if row["program"] == program}
        lines.append([title, ratios["kfs"], ratios.get("curvlinops", "")])
    return table(["", "kfs", "curvlinops"], lines)


TABLES: dict[str, Callable[..., str]] = {
    made.__name__: made for made in (train, defaults, costs, long_runs, whole_runs, overhead)
}
