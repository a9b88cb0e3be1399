"""Influence functions of a language model of GPT-2 small's size: tokens per second of factors, pairs and self-scores.

`python -m benchmarks.influence gpu` uses Hugging Face's GPT-2 with random weights (or a GPT of the same shape if
transformers is not installed), sequences of 512 random tokens, and bf16 autocast on a GPU. Options scale it down, and
`--device cpu --quick` runs it without a GPU, in float32. Kronfluence runs beside it, if it is installed. It supports
only linear layers, so both libraries get the 48 linear layers of the transformer blocks. (Hugging Face's `Conv1D` is
replaced by `Linear`, as in Kronfluence's own examples.)

- first batch: KFAC of one batch, which audits the model and warms up the GPU. Kronfluence does the same.
- factors: EKFAC with drawn labels, from the first pass to eigenvalues, for all training sequences.
- without decompositions: the same, without work that does not depend on the number of sequences. For kfs it is the time
  for all minus the time for half of them, times two. Kronfluence's passes are timed one by one.
- pairwise: scores of all pairs of queries and training sequences; tokens are those of training sequences.
- self: self-scores of training sequences.

"Kronfluence, low precision" computes more in bf16, as its `smart_low_precision_*` arguments select it. *Agreement* is
the cosine of a library's scores with those of kfs. Labels are drawn, so it is not quite 1. With `--fisher empirical`,
nothing is drawn.

No program starts after `--seconds` have passed. An error is printed as a row, and the other programs run.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.language_model import LanguageModel, PeakMemory
from benchmarks.replayed_factors import device_name
from benchmarks.report import RESULTS, save, synchronize
from kfs import EKFAC, KFAC, EmpiricalRisk, Influence, Relative
from kfs.losses import TokenCrossEntropy

COLUMNS = ("program", "library", "seconds", "tokens / second", "/ Kronfluence", "peak, GiB", "agreement")
Data = tuple[Tensor, Tensor]
QUICK = {"layers": 1, "width": 8, "heads": 2, "vocabulary": 20, "length": 6, "train": 4, "queries": 3, "batch": 2}
# Programs, and the methods that run them.
PROGRAMS = {"first batch": "first_batch", "factors": "factors", "pairwise": "pairwise", "self": "own"}


@dataclass(frozen=True)
class RateRow:
    """One measured program.

    Attributes:
        program: The program.
        library: The library.
        seconds: Its time; `None` if it was not run.
        rate: Tokens of training sequences per second.
        speedup: The ratio of this rate to Kronfluence's; `None` if that is not known.
        peak: The increase of allocated memory, in GiB; `None` if it is not measured.
        agreement: Cosine with the scores of kfs; `None` if there are none.
        why: The reason if it was not run.
    """

    program: str
    library: str
    seconds: float | None
    rate: float | None = None
    speedup: float | None = None
    peak: float | None = None
    agreement: float | None = None
    why: str = ""

    def line(self) -> str:
        """Return a line of a Markdown table."""
        if self.seconds is None:
            return f"| {self.program} | {self.library} | {self.why} | | | | |"
        rate = f"{self.rate:,.0f}"
        others = ["" if n is None else f"{n:.2f}" for n in (self.speedup, self.peak)]
        agreement = "" if self.agreement is None else f"{self.agreement:.4f}"
        cells = [self.program, self.library, f"{self.seconds:.2f}", rate, *others, agreement]
        return f"| {' | '.join(cells)} |"


class Logits(nn.Module):
    """A model of Hugging Face that returns only logits.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Predict the next token at every position."""
        result: Tensor = self.model(input_ids=x, use_cache=False).logits
        return result


def language_model(size: argparse.Namespace) -> tuple[nn.Module, str]:
    """Return a model in evaluation mode, and its name."""
    torch.manual_seed(0)
    if find_spec("transformers") is None:
        model: nn.Module = LanguageModel(size.vocabulary, size.width, size.heads, size.layers, size.length)
        name = "GPT"
    else:
        transformers = import_module("transformers")
        config = transformers.GPT2Config(
            vocab_size=size.vocabulary,
            n_positions=size.length,
            n_embd=size.width,
            n_layer=size.layers,
            n_head=size.heads,
            bos_token_id=0,
            eos_token_id=0,
        )
        model = Logits(with_linear_layers(transformers.GPT2LMHeadModel(config)))
        name = "Hugging Face's GPT-2"
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    return model.to(size.device).eval(), f"{name}, {millions:.1f}M parameters"


def with_linear_layers(model: nn.Module) -> nn.Module:
    """Replace linear layers with transposed weights by PyTorch's own, in place."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ == "Conv1D":
                weight: Tensor = child.get_parameter("weight")
                linear = nn.Linear(*weight.shape)
                with torch.no_grad():
                    linear.weight.copy_(weight.T)
                    linear.bias.copy_(child.get_parameter("bias"))
                setattr(parent, name, linear)
    return model


def tracked(model: nn.Module) -> list[str]:
    """Return the names of linear layers inside of transformer blocks."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not name.endswith("head")  # its factors are as wide as the vocabulary
    ]


@dataclass
class Benchmark:
    """A model, its data, and its measurements.

    Attributes:
        size: Options of the command line.
        model: The model.
        train: Training sequences.
        queries: Queries.
        deadline: The time after which no program starts.
        ours: The scores of kfs, once they are computed.
    """

    size: argparse.Namespace
    model: nn.Module
    train: Data
    queries: Data
    deadline: float
    ours: dict[str, Tensor] = field(default_factory=dict)

    def rows(self) -> Iterator[RateRow]:
        """Measure kfs, then Kronfluence in both precisions."""
        layers = tracked(self.model)
        for dtype in (torch.float32, torch.float64):  # otherwise, the first library waits until the solver is loaded
            torch.linalg.eigh(torch.eye(4 * self.size.width, dtype=dtype, device=self.size.device))
        yield from self._measured("kfs", Ours(self, layers))
        if find_spec("kronfluence") is None:
            yield RateRow("all", "Kronfluence", None, why="not installed")
            return
        module = import_module("benchmarks.influence_kronfluence")
        for library, low in (("Kronfluence", False), ("Kronfluence, low precision", True)):
            yield from self._measured(library, module.Language(self, layers, low))

    def _measured(self, library: str, programs: Any) -> Iterator[RateRow]:
        """Run all programs of a library."""
        failed = False
        for name, method in PROGRAMS.items():
            if failed or time.perf_counter() > self.deadline:
                yield RateRow(name, library, None, why="no factors" if failed else "no time left")
                continue
            tokens = (self.train[1][: self.size.batch] if name == "first batch" else self.train[1]).numel()
            memory = PeakMemory(torch.device(self.size.device))
            synchronize()
            start = time.perf_counter()
            try:
                result = getattr(programs, method)()
            except Exception as error:  # noqa: BLE001 (the other programs must run if one fails)
                failed = name == "factors"
                yield RateRow(name, library, None, why=f"{type(error).__name__}: {error!s:.300}".replace("\n", " "))
                continue
            synchronize()
            seconds = time.perf_counter() - start
            peak = memory.since(None)[0]
            agreement = None
            if isinstance(result, Tensor):
                mine = self.ours.setdefault(name, result.detach().float().cpu())
                agreement = float(torch.cosine_similarity(mine.flatten(), result.float().cpu().flatten(), dim=0))
            yield RateRow(name, library, seconds, tokens / seconds, None, peak, agreement)
            if name == "factors":
                marginal = programs.without_decompositions(seconds)
                yield RateRow("factors, without decompositions", library, marginal, tokens / marginal)


class Ours:
    """Measurements of `kfs.Influence`.

    Args:
        benchmark: Model and data.
        layers: The layers to consider.
    """

    def __init__(self, benchmark: Benchmark, layers: list[str]) -> None:
        self.size = benchmark.size
        self.model = benchmark.model
        self.params = [f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")]
        self.train = benchmark.train
        self.queries = benchmark.queries

    def first_batch(self) -> None:
        """Compute factors of one batch, with the audit, and without decompositions."""
        x, y = self.train
        with self._autocast():
            KFAC(self._risk((x[: self.size.batch], y[: self.size.batch])), self.size.fisher)

    def factors(self) -> None:
        """Compute factors and the inverse."""
        self.influence = self._influence(len(self.train[1]))

    def without_decompositions(self, seconds: float) -> float:
        """Return the time of the passes over all sequences, given the total time."""
        synchronize()
        start = time.perf_counter()
        self._influence(len(self.train[1]) // 2)
        synchronize()
        return 2 * (seconds - (time.perf_counter() - start))

    def pairwise(self) -> Tensor:
        """Compute scores of all pairs."""
        with self._autocast():
            return self.influence.scores(
                self._risk(self.queries), self._risk(self.train), memory=int(self.size.memory * 2**30)
            )

    def own(self) -> Tensor:
        """Compute self-scores."""
        with self._autocast():
            return self.influence.self_scores(self._risk(self.train))

    def _influence(self, sequences: int) -> Influence:
        x, y = self.train
        with self._autocast():
            return Influence(EKFAC(self._risk((x[:sequences], y[:sequences])), self.size.fisher), Relative(0.1))

    def _risk(self, data: Data) -> EmpiricalRisk:
        batches = list(zip(*(part.split(self.size.batch) for part in data), strict=True))
        return EmpiricalRisk(self.model, TokenCrossEntropy(), batches, params=self.params)

    def _autocast(self) -> torch.autocast:
        kind = torch.device(self.size.device).type
        return torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda")


def with_speedups(rows: Sequence[RateRow]) -> list[RateRow]:
    """Return rows with rates in units of Kronfluence's."""
    unit = {row.program: row.rate for row in rows if row.library == "Kronfluence" and row.rate}
    result = []
    for row in rows:
        theirs = unit.get(row.program)
        speedup = row.rate / theirs if row.rate is not None and theirs else None
        result.append(RateRow(**(vars(row) | {"speedup": speedup})))
    return result


def options(words: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.influence gpu")
    parser.add_argument("--device", default="cuda")
    numbers: dict[str, tuple[Callable[[str], float], float, str]] = {
        "layers": (int, 12, "transformer blocks"),
        "width": (int, 768, "width of the model"),
        "heads": (int, 12, "attention heads"),
        "vocabulary": (int, 50_257, "tokens, and classes of the head"),
        "length": (int, 512, "tokens in a sequence"),
        "train": (int, 256, "training sequences"),
        "queries": (int, 32, "queries"),
        "batch": (int, 8, "sequences in a batch"),
        "memory": (float, 32, "GiB for gradients of queries"),
        "seconds": (float, 420, "no program begins later than this"),
    }
    for name, (kind, default, meaning) in numbers.items():
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"{meaning} (default: {default})")
    parser.add_argument("--fisher", default="mc", choices=["mc", "empirical"], help="which labels (default: mc)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    given = parser.parse_args(words)
    if given.quick:
        vars(given).update(QUICK)
    return given


def main(words: Sequence[str] | None = None, results: Path = RESULTS) -> None:
    """Measure, print a table, and write JSON."""
    size = options(words)
    deadline = time.perf_counter() + size.seconds
    model, title = language_model(size)
    data = []
    for count in (size.train, size.queries):
        tokens = torch.randint(size.vocabulary, (count, size.length + 1), device=size.device)
        data.append((tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
    benchmark = Benchmark(size, model, data[0], data[1], deadline)
    where = device_name(torch.device(size.device))
    print(f"{title}, {size.train} sequences of {size.length} tokens, {size.queries} queries, on {where}\n")
    header = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|"
    print(header)
    rows = []
    for row in benchmark.rows():
        print(row.line(), flush=True)  # a run may be stopped
        rows.append(row)
    rows = with_speedups(rows)
    print(f"\nWith ratios:\n\n{header}")
    for row in rows:
        print(row.line())
    settings = vars(size) | {"device": where, "model": title}
    name = "influence_gpu_quick" if size.quick else "influence_gpu"
    print(f"Written: {save(rows, name, settings, results)}")
