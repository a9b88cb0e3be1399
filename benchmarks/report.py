"""Shared functions of all benchmarks: timing in turn, the environment, and table, JSON and plot from the same rows."""

import datetime
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import starmap
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.progress import track

from kfs import __version__

RESULTS = Path(__file__).parent / "results"
LIBRARIES = (
    *(
        "backpack-for-pytorch",
        "curvlinops-for-pytorch",
        "dattri",
        "kronfluence",
        "laplace-torch",
        "nngeometry",
        "singd",
    ),
    "transformers",
)


@dataclass(frozen=True)
class Row:
    """One measured program.

    Attributes:
        problem: The model and data.
        program: The program.
        library: Its library.
        seconds: Median time.
        ratio: The time in units of the problem's forward and backward pass.
        flop_ratio: FLOPs of the matrix products in the same units; `None` if they were not counted.
        memory_ratio: Peak memory in the same units, without results; `None` if it was not measured.
        audit_ratio: The additional time of the first batch, which is audited, in units of this program's time for one
            batch of eight examples; `None` without audit.
    """

    problem: str
    program: str
    library: str
    seconds: float
    ratio: float
    flop_ratio: float | None = None
    memory_ratio: float | None = None
    audit_ratio: float | None = None


def medians(programs: Mapping[Any, Callable[[], object]], repeats: int, task: str) -> dict[Any, float]:
    """Run all programs once to warm up, then `repeats` times in turn, and return the median times."""
    for program in programs.values():
        program()
    times: dict[Any, list[float]] = {key: [] for key in programs}
    hidden = not sys.stdout.isatty()  # it would leave empty lines in a file
    for _ in track(range(repeats), task, transient=True, disable=hidden):
        for key, program in programs.items():
            synchronize()
            start = time.perf_counter()
            program()
            synchronize()
            times[key].append(time.perf_counter() - start)
    return {key: statistics.median(values) for key, values in times.items()}


def option(arguments: list[str], name: str, default: int = 1) -> tuple[list[str], int]:
    """Return the arguments without an option and its number, and that number."""
    if name not in arguments:
        return arguments, default
    place = arguments.index(name)
    return [*arguments[:place], *arguments[place + 2 :]], int(arguments[place + 1])


@contextmanager
def processes(
    jobs: int, start: Callable[..., None] | None = None, given: tuple[Any, ...] = ()
) -> Generator[Callable[..., Iterable[Any]]]:
    """Yield a parallel `map`, in processes of one thread each; results keep the order.

    With one job, the calls run in this process. Otherwise `start(*given)` runs in each process first.
    """
    if jobs == 1:
        yield starmap
        return
    with ProcessPoolExecutor(jobs, get_context("spawn"), _one_thread, (start, given)) as pool:
        try:
            yield lambda function, arguments: pool.map(function, *zip(*arguments, strict=True))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _one_thread(start: Callable[..., None] | None, given: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    if start is not None:
        start(*given)


def synchronize() -> None:
    """Wait for the accelerator, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def environment() -> dict[str, object]:
    """Return everything that a result depends on besides the code."""
    return {
        "command": " ".join(["python", *sys.orig_argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "processor": processor(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_initialized() or "cuda" in sys.argv else "cpu",
        "kfs": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        **peers(),
    }


def peers() -> dict[str, str]:
    """Return the versions of installed libraries for comparison."""
    found = {}
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def processor() -> str:
    """Return the name of the processor, if the system reports it."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def finite(content: Any) -> Any:
    """Replace numbers that JSON cannot represent, NaN and infinities, by `None`."""
    if isinstance(content, dict):
        return {key: finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def save(rows: Iterable[Any], name: str, settings: dict[str, object], results: Path) -> Path:
    """Write JSON: the environment with settings, and rows, which are instances of dataclasses. Return the file."""
    results.mkdir(parents=True, exist_ok=True)
    known = {key: setting for key, setting in settings.items() if (key, setting) != ("device", "cuda")}  # has a name
    content = finite({"environment": environment() | known, "rows": [asdict(row) for row in rows]})
    file = results / f"{name}.json"
    file.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return file


def write(rows: list[Row], name: str, settings: dict[str, object], results: Path) -> None:
    """Print a Markdown table, and write JSON and plot."""
    file = save(rows, name, settings, results)
    draw(rows, name, results / f"{name}.png")
    ratios = "time / (forward+backward) | FLOPs / (forward+backward) | memory / (forward+backward)"
    print(f"| problem | program | library | milliseconds | {ratios} | audit / (8 examples) |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        others = ("" if r is None else f"{r:.2f}" for r in (row.flop_ratio, row.memory_ratio, row.audit_ratio))
        times = f"{1e3 * row.seconds:.2f} | {row.ratio:.2f} | {' | '.join(others)}"
        print(f"| {row.problem} | {row.program} | {row.library} | {times} |")
    print(f"Written: {file}, {results / name}.png")


def draw(rows: list[Row], title: str, file: Path) -> None:
    """Draw one panel per problem: ratios as bars, FLOP ratios as black lines across them."""
    problems = list(dict.fromkeys(row.problem for row in rows))
    libraries = list(dict.fromkeys(row.library for row in rows))
    figure = Figure(figsize=(7, 3.2 * len(problems)), layout="constrained")
    FigureCanvasAgg(figure)
    width = 0.8 / len(libraries)
    for axes, problem in zip(figure.subplots(len(problems), squeeze=False)[:, 0], problems, strict=True):
        inside = [row for row in rows if row.problem == problem]
        programs = list(dict.fromkeys(row.program for row in inside))
        for i, library in enumerate(libraries):
            chosen = [row for row in inside if row.library == library]
            places = [programs.index(row.program) + (i - (len(libraries) - 1) / 2) * width for row in chosen]
            if chosen:
                bars = axes.bar(places, [row.ratio for row in chosen], 0.9 * width, label=library, color=f"C{i}")
                # Small bars are readable only by their numbers.
                axes.bar_label(bars, [f"{row.ratio:.2f}" for row in chosen], fontsize=6.5)
            counted = [(place, row.flop_ratio) for place, row in zip(places, chosen, strict=True) if row.flop_ratio]
            for place, flops in counted:
                # One legend entry for all lines of a panel.
                label = None if "FLOPs" in axes.get_legend_handles_labels()[1] else "FLOPs"
                axes.hlines(flops, place - width / 2, place + width / 2, colors="black", label=label)
        crowded = sum(map(len, programs)) > 60  # number of characters that fit beside each other
        axes.set_xticks(
            range(len(programs)), programs, rotation=20 if crowded else 0, ha="right" if crowded else "center"
        )
        axes.set_ylabel("ratio to forward and\nbackward pass")
        axes.set_title(f"{title}: {problem}" if title else problem)
        axes.legend(frameon=False, title="bars: time")
    figure.savefig(file, dpi=150)
