"""Pictures of training from stored results: losses over steps for the README, and for the page about measurements.

It does not train. The results are those of `python -m benchmarks.train defaults`: kfs with default settings, and each
other optimizer at the best of its learning rates. Each file has the results of one command for all optimizers.

Run it: `python -m benchmarks.training_picture docs/assets`.
"""

import sys
from pathlib import Path
from typing import Final

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks import default_settings
from benchmarks.default_settings import Result
from benchmarks.report import RESULTS

# Tasks by the names of their files: title, label of the loss, and the lower limit of the axis.
TASKS: Final = {
    "gpt": ("byte-level GPT, 5M parameters", "held-out loss", None),
    "deep": ("tanh network, 20 layers, 5M", "training loss", 1e-6),
    "lstm": ("LSTM, 4M", "held-out loss", None),
    "full": ("fine-tuning of the GPT", "held-out loss", None),
}
DEFAULTS: Final = ("cuda_full", "cuda_gpt", "cuda_deep", "cpu_cnn", "cpu_tanh")
NAMES: Final = {
    "adamw": "AdamW, tuned",
    "muon": "Muon, tuned",
    "soap": "SOAP, tuned",
    "kfs": "kfs.optim.KFAC, default settings",
}


def runs(task: str, results: Path = RESULTS) -> dict[str, Result]:
    """Return the stored runs with a cosine schedule of the optimizers in the picture."""
    found = default_settings.known(results / f"train_defaults_cuda_{task}.json")
    by_name = {one.optimizer: one for one in found if one.schedule == "cosine"}
    return {name: by_name[name] for name in NAMES}


def draw(folder: Path, results: Path = RESULTS) -> Path:
    """Draw one panel for each task, and return the file."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 2).flat
    for panel, (task, (title, label, lowest)) in zip(panels, TASKS.items(), strict=True):
        for name, run in runs(task, results).items():
            points = [(step, loss) for step, _, loss in run.history if loss is not None]
            ours = name == "kfs"
            panel.plot(
                *zip(*points, strict=True), label=NAMES[name], linewidth=2.2 if ours else 1.3, zorder=3 if ours else 2
            )
        panel.set(title=title, xlabel="steps", ylabel=label)
        if lowest is not None:
            panel.set(yscale="log", ylim=(lowest, None))
        panel.grid(alpha=0.3)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    file = folder / "training.png"
    figure.savefig(file, dpi=80)
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
