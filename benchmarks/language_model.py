"""A language model of GPT-2 small's size with a separate head, on a GPU: time and memory of typical computations.

`python -m benchmarks.language_model` uses 12 layers of width 768, a vocabulary of 50,257 and sequences of 1,024 tokens:
163 million parameters. Batches of 8 sequences run under bf16 autocast, and factors wider than 8,192 are diagonal.
Options scale it down, and `python -m benchmarks.language_model cpu --layers 1 ...` runs it without a GPU, in float32.

Ratios are in units of eager forward+backward over the same data: three batches, unless stated otherwise. *Peak* and
*reserved* are the increases of memory in tensors, and of memory that the allocator reserves on the GPU; *result* is the
memory that remains. *First* includes work that is done once per model: the audit, and allocations. A marginal batch is
the cost of one more batch: the time for 20 minus the time for 12, over 8.
"""

import argparse
import gc
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.problems import GPT
from benchmarks.replayed_factors import cost, device_name, marginal_without_replay, replay_settings, seconds_of
from benchmarks.report import RESULTS, save
from kfs import EKFAC, GGN, KFAC, EmpiricalRisk, inspect
from kfs.factors.audit import forget_audits
from kfs.losses import TokenCrossEntropy

GIB = 2**30
COLUMNS = ("program", "seconds", "time / (forward+backward)", "peak, GiB", "reserved, GiB", "result, GiB")


class LanguageModel(GPT):
    """A GPT whose logits have their class axis last, as in Hugging Face's models."""

    def forward(self, x: Tensor) -> Tensor:
        """Predict the next token at every position."""
        return super().forward(x).transpose(1, 2)


@dataclass(frozen=True)
class MemoryRow:
    """One measured program.

    Attributes:
        problem: The model.
        program: The program.
        library: The library.
        seconds: Median time.
        ratio: The time in units of forward+backward over the same data.
        peak: The increase of allocated memory, in GiB; `None` if it is not measured.
        reserved: The increase of reserved memory, in GiB.
        result: The memory that remains: factors on the GPU, or a file.
    """

    problem: str
    program: str
    library: str
    seconds: float
    ratio: float
    peak: float | None = None
    reserved: float | None = None
    result: float | None = None

    def line(self) -> str:
        """Return a line of a Markdown table."""
        cells = ["" if number is None else f"{number:.2f}" for number in (self.peak, self.reserved, self.result)]
        return f"| {self.program} | {self.seconds:.3f} | {self.ratio:.2f} | {' | '.join(cells)} |"


@dataclass(frozen=True)
class Use:
    """The cost of a program: seconds, and GiB of memory if they are measured."""

    seconds: float
    peak: float | None = None
    reserved: float | None = None
    result: float | None = None


class Benchmark:
    """A model, its data, and its measurements.

    Args:
        size: Options of the command line.

    Attributes:
        name: The model's name in tables.
        model: The model.
        data: The batches.
    """

    def __init__(self, size: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.device = torch.device(size.device)
        self.max_dim: int = size.max_dim
        self.repeats: int = size.repeats
        self.counts = (size.few, size.many)
        self.model = LanguageModel(size.vocabulary, size.width, size.heads, size.layers, size.length)
        self.model = self.model.to(self.device).eval()
        shape = (size.batch, size.length)
        tokens = [torch.randint(size.vocabulary, shape, device=self.device) for _ in range(size.batches + 1)]
        self.data = list(pairwise(tokens))
        millions = sum(p.numel() for p in self.model.parameters()) / 1e6
        self.name = f"GPT, {millions:.0f}M parameters"

    def batches(self, count: int) -> list[tuple[Tensor, Tensor]]:
        """Return a given number of batches, repeating the existing ones."""
        return (self.data * count)[:count]

    def autocast(self) -> torch.autocast:
        """Return a context for bf16 on a GPU; few CPUs support it."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def forward_backward(self, count: int, classes_second: bool = False) -> None:
        """Compute a plain gradient, with logits as PyTorch's loss prefers them, or with their class axis second."""
        for X, y in self.batches(count):
            with self.autocast():
                f = self.model(X)
                loss = cross_entropy(f.mT, y) if classes_second else cross_entropy(f.flatten(0, 1), y.flatten())
            loss.backward()
        self.model.zero_grad()

    def factors(self, count: int, kind: Any = KFAC, replay: bool = True) -> Any:
        """Compute KFAC or EKFAC from a number of batches."""
        settings: dict[str, Any] = {"fisher": "mc", "max_dim": self.max_dim}
        settings |= replay_settings(self.device, replay)
        with self.autocast(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*max_dim")  # the file is the result
            return kind(self.risk(count), **settings)

    def risk(self, count: int) -> EmpiricalRisk:
        """Return the risk of a number of batches."""
        return EmpiricalRisk(self.model, TokenCrossEntropy(), self.batches(count))

    def first(self) -> Any:
        """Compute KFAC as if the model were new."""
        forget_audits()
        return self.factors(len(self.data))

    def product(self, v: Tensor) -> Any:
        """Multiply the GGN of one batch with a vector."""
        with self.autocast():
            return GGN(self.risk(1)) @ v

    def inspection(self) -> Any:
        """Inspect the model, as if it were new."""
        forget_audits()
        return inspect(self.model, self.data[0][0], max_dim=self.max_dim)

    def saved(self) -> Use:
        """Write factors to a file."""
        K = self.factors(1)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "k.safetensors"
            seconds = seconds_of(partial(K.save, file))
            return Use(seconds, result=file.stat().st_size / GIB)

    def marginal(self, kind: Any = KFAC) -> Use:
        """Measure one more batch."""
        return Use(cost(partial(self.factors, kind=kind), self.counts, self.repeats).marginal)

    def marginal_eager(self) -> Use:
        """Measure one more batch without replay."""
        program = partial(self.factors, replay=False)
        return Use(marginal_without_replay(program, self.counts, self.repeats))

    def watched(self, program: Callable[[], Any], once: bool = False) -> Use:
        """Run a program for its memory, and then for its time, unless the time of the first run is requested."""
        memory = PeakMemory(self.device)
        result: list[Any] = []
        first = seconds_of(lambda: result.append(program()))
        found = memory.since(result)
        result.clear()
        seconds = first if once else statistics.median(seconds_of(program) for _ in range(self.repeats))
        return Use(seconds, *found)

    def programs(self) -> dict[str, tuple[Callable[[], Use], int]]:
        """Return programs by name, each with its number of batches for the ratio."""
        count = len(self.data)
        v = torch.randn(sum(p.numel() for p in self.model.parameters()), device=self.device)
        programs: dict[str, tuple[Callable[[], Use], int]] = {
            "KFAC mc, first": (partial(self.watched, self.first, once=True), count),
            "KFAC mc": (partial(self.watched, partial(self.factors, count)), count),
            "KFAC mc, marginal batch": (self.marginal, 1),
            "EKFAC mc": (partial(self.watched, partial(self.factors, count, EKFAC)), count),
            "EKFAC mc, marginal batch": (partial(self.marginal, EKFAC), 1),
            "GGN product, one batch": (partial(self.watched, partial(self.product, v)), 1),
            "inspect, one batch": (partial(self.watched, self.inspection), 1),
            "save": (self.saved, count),
        }
        if "replay" in replay_settings(self.device):
            programs["KFAC mc, marginal batch, no replay"] = (self.marginal_eager, 1)
        return programs

    def rows(self) -> Iterator[MemoryRow]:
        """Measure all programs; a program that fails is reported, and the others run."""
        count = len(self.data)
        self.forward_backward(1)
        plain = self.watched(partial(self.forward_backward, count))
        yield MemoryRow(self.name, "forward+backward", "torch", plain.seconds, 1, plain.peak, plain.reserved)
        other = self.watched(partial(self.forward_backward, count, classes_second=True))
        name, ratio = "forward+backward, classes second", other.seconds / plain.seconds
        yield MemoryRow(self.name, name, "torch", other.seconds, ratio, other.peak, other.reserved)
        for program, (measure, batches) in self.programs().items():
            try:
                use = measure()
            except torch.OutOfMemoryError:
                print(f"| {program} | out of memory | | | | |", flush=True)
                continue
            except Exception as error:  # noqa: BLE001 (the other programs must run if one fails)
                print(f"| {program} | {type(error).__name__}: {error!s:.300} | | | | |", flush=True)
                continue
            unit = plain.seconds * batches / count
            ratio = use.seconds / unit
            yield MemoryRow(self.name, program, "kfs", use.seconds, ratio, use.peak, use.reserved, use.result)


class PeakMemory:
    """Measures memory on a GPU from its creation on; without a GPU, nothing is measured."""

    def __init__(self, device: torch.device) -> None:
        """Free unused memory, and start to measure."""
        self.measured = device.type == "cuda"
        if self.measured:
            gc.collect()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self.allocated = torch.cuda.memory_allocated()
            self.reserved = torch.cuda.memory_reserved()

    def since(self, result: object) -> tuple[float | None, float | None, float | None]:
        """Return peaks of allocated and reserved memory, and the memory of the result, all in GiB."""
        if not self.measured:
            return None, None, None
        gc.collect()  # the remaining memory is the result
        peak = torch.cuda.max_memory_allocated() - self.allocated
        reserved = torch.cuda.max_memory_reserved() - self.reserved
        remains = torch.cuda.memory_allocated() - self.allocated if result else 0
        return peak / GIB, reserved / GIB, remains / GIB


def options(words: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.language_model")
    parser.add_argument("device", nargs="?", default="cuda")
    numbers = {
        "layers": (12, "transformer blocks"),
        "width": (768, "width of the model"),
        "heads": (12, "attention heads"),
        "vocabulary": (50_257, "tokens, and classes of the head"),
        "batch": (8, "sequences in a batch"),
        "length": (1024, "tokens in a sequence"),
        "batches": (3, "batches"),
        "few": (12, "batches of the shorter computation for marginal costs"),
        "many": (20, "batches of the longer one"),
        "max-dim": (8192, "widest dense factor"),
        "repeats": (3, "how often to time everything"),
    }
    for name, (default, meaning) in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{meaning} (default: {default})")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None, results: Path = RESULTS) -> None:
    """Measure, print a table, and write JSON."""
    given = options(words)
    benchmark = Benchmark(given)
    print(f"{benchmark.name}, on {device_name(benchmark.device)}\n")
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
    rows = []
    for row in benchmark.rows():
        print(row.line(), flush=True)  # a run may be stopped
        rows.append(row)
    settings = vars(given) | {"device": device_name(benchmark.device)}
    print(f"Written: {save(rows, 'language_model', settings, results)}")


if __name__ == "__main__":
    main()
