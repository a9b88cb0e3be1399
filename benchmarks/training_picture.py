"""Pictures of training from stored results: losses over seconds for the README, and over steps with defaults.

It trains nothing. The results are those of `python -m benchmarks.train cuda` (the best run of each optimizer by its
final loss is drawn) and of `python -m benchmarks.train defaults`.

Run it: `python -m benchmarks.training_picture docs/assets`.
"""

import json
import sys
from pathlib import Path
from typing import Any, Final

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks import default_settings
from benchmarks.report import RESULTS

# Tasks by the names of their files: title, label of the loss, and the lowest loss that is shown.
TASKS: Final = {
    "gpt": ("byte-level GPT, 5M parameters", "held-out loss", None),
    "deep": ("tanh network, 20 layers, 5M", "training loss", 1e-6),
    "lstm": ("LSTM, 4M", "held-out loss", None),
    "large": ("GPT, 86M", "held-out loss", None),
}
DEFAULTS: Final = ("cuda_full", "cuda_gpt", "cuda_deep", "cpu_cnn", "cpu_tanh")
NAMES: Final = {"adamw": "AdamW", "muon": "Muon", "soap": "SOAP", "kfs": "kfs.optim.KFAC"}


def best(task: str, results: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Return the stored run with the lowest final loss of each optimizer; of equal ones, the faster to get there."""
    rows = json.loads((results / f"train_cuda_{task}.json").read_text(encoding="utf-8"))["rows"]
    return {
        name: min(
            (row for row in rows if row["optimizer"] == name),
            key=lambda row: (row["end"], sum(loss for _, _, loss in row["history"])),
        )
        for name in NAMES
    }


def draw(folder: Path, results: Path = RESULTS) -> Path:
    """Draw one panel for each task, and return the file."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 2).flat
    for panel, (task, (title, label, lowest)) in zip(panels, TASKS.items(), strict=True):
        for name, run in best(task, results).items():
            seconds, losses = [point[1] for point in run["history"]], [point[2] for point in run["history"]]
            ours = name == "kfs"
            panel.plot(seconds, losses, label=NAMES[name], linewidth=2.2 if ours else 1.3, zorder=3 if ours else 2)
        panel.set(title=title, xlabel="seconds", ylabel=label)
        if lowest is not None:
            panel.set(yscale="log", ylim=(lowest, None))
        panel.grid(alpha=0.3)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    file = folder / "training.png"
    figure.savefig(file, dpi=90)
    return file


def draw_defaults(folder: Path, results: Path = RESULTS) -> Path:
    """Draw one panel for each task with a constant learning rate, and return the file."""
    files = [results / f"train_defaults_{task}.json" for task in DEFAULTS]
    found = [one for file in files for one in default_settings.known(file) if one.schedule == "constant"]
    file = folder / "train_defaults.png"
    default_settings.draw(found, file)
    return file


if __name__ == "__main__":
    for picture in (draw, draw_defaults):
        print(picture(Path(sys.argv[1])))
