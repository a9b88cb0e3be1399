"""KFAC, EKFAC and influence functions of language models that fill a GPU: time, peak memory, and Kronfluence beside it.

`python -m benchmarks.large_language_model 3B` uses the shape of Llama 3.2 3B (28 layers, width 3,072, 8,192 inner),
random weights in bf16, and 512 training sequences and 32 queries of 512 random tokens. `1B` is the shape of Llama 3.2
1B, for which Kronfluence runs in the same process, if it is installed. `python -m benchmarks.large_language_model tiny
--device cpu` runs everything without a GPU. Curvature is that of all linear layers of the transformer blocks.

A command of at most ten minutes on an H200 runs one of these:

    python -m benchmarks.large_language_model 3B --only forward KFAC eigh EKFAC
    python -m benchmarks.large_language_model 3B --only forward EKFAC inverse scores --factor-train 64 --memory 96
    python -m benchmarks.large_language_model 1B
    python -m benchmarks.large_language_model 1B --layers 8    # if decompositions of Kronfluence take too long

Bytes of EKFAC in float32, in GiB: factors and eigenvectors have 30.1 each for `3B`, and 14.2 each for `1B`; eigenvalues
have 10.5 and 3.6. A query's gradient has as many as the eigenvalues, so queries need several passes over the training
data, as many as `--memory` says, or `--query-rank`. For `3B`, EKFAC is in host memory (`--factor-device none` keeps it
on the GPU): 92 GiB with scaled eigenvalues and those of the inverse. KFAC is always on the GPU.

- forward+backward: one batch, with gradients of all parameters. Its time is the unit of ratios.
- KFAC, first batches: `--few` batches, with the audit.
- KFAC, marginal batch: the time for `--many` batches minus the time for `--few`, over their difference.
- eigh: one float32 eigendecomposition of the widest factor.
- EKFAC: both passes over all training sequences (or `--factor-train` of them), and all decompositions.
- inverse: the damped inverse.
- scores, one eighth: all queries with the first eighth of the training sequences.
- scores: all queries with all training sequences.

*Peak* and *reserved* are the largest memory in tensors, and of the allocator, during a program, with model and factors.
*Host* is the largest memory of the process so far. No program starts after `--seconds` have passed. Every row is
written as soon as it is measured. An error, such as a lack of memory, is a row, too, and the other programs run.
"""

import argparse
import gc
import resource
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.influence_gpt import Data, Logits
from benchmarks.replayed_factors import device_name, seconds_of
from benchmarks.report import RESULTS, save
from kfs import EKFAC, KFAC, EmpiricalRisk, Influence, Relative
from kfs.losses import TokenCrossEntropy

GIB = 2**30
COLUMNS = ("program", "library", "seconds", "/ (forward+backward)", "peak", "reserved", "host", "agreement", "goal")
# Llama's sizes, and sizes of the data.
SHAPES: dict[str, dict[str, int]] = {
    "3B": {"layers": 28, "width": 3072, "inner": 8192, "heads": 24, "key_heads": 8, "vocabulary": 128_256},
    "1B": {"layers": 16, "width": 2048, "inner": 8192, "heads": 32, "key_heads": 8, "vocabulary": 128_256},
    "tiny": {"layers": 2, "width": 8, "inner": 12, "heads": 2, "key_heads": 1, "vocabulary": 20}
    | {"length": 6, "train": 8, "queries": 3, "batch": 2, "few": 1, "many": 2},
}


@dataclass(frozen=True)
class PartRow:
    """One measured program.

    Attributes:
        program: The program.
        library: The library.
        seconds: Its time; `None` if there is none.
        ratio: The time in units of forward+backward over the same data.
        peak: Largest memory in tensors on the GPU, in GiB; `None` if it is not measured.
        reserved: Largest memory of the allocator, in GiB.
        host: Largest memory of the process until its end, in GiB.
        agreement: Cosine with the scores of kfs; `None` if there are none.
        goal: The goal, and whether it is met; empty if there is none.
        why: The reason if there is no time.
    """

    program: str
    library: str
    seconds: float | None
    ratio: float | None = None
    peak: float | None = None
    reserved: float | None = None
    host: float | None = None
    agreement: float | None = None
    goal: str = ""
    why: str = ""

    def line(self) -> str:
        """Return a line of a Markdown table."""
        if self.seconds is None:
            return f"| {self.program} | {self.library} | {self.why} | | | | | | |"
        numbers = (self.ratio, self.peak, self.reserved, self.host)
        cells = [f"{self.seconds:.3f}", *("" if n is None else f"{n:.2f}" for n in numbers)]
        agreement = "" if self.agreement is None else f"{self.agreement:.4f}"
        return f"| {' | '.join([self.program, self.library, *cells, agreement, self.goal])} |"


def llama(size: argparse.Namespace) -> nn.Module:
    """Return a Llama with random weights, whose output are logits, in evaluation mode."""
    transformers = import_module("transformers")
    config = transformers.LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.key_heads,
        max_position_embeddings=size.length,
        tie_word_embeddings=True,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, size.dtype))
    try:
        torch.manual_seed(0)
        with torch.device(size.device):
            return Logits(transformers.LlamaForCausalLM(config)).eval()
    finally:
        torch.set_default_dtype(before)


def tracked(model: nn.Module) -> list[str]:
    """Return the names of the linear layers of transformer blocks."""
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return [name for name in layers if not name.endswith("lm_head")]


@dataclass
class Memory:
    """Largest amounts of memory during a program.

    Attributes:
        device: The model's device.
    """

    device: torch.device

    def __post_init__(self) -> None:
        """Free unused memory, and start to measure."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def found(self) -> dict[str, float | None]:
        """Return all amounts in GiB."""
        host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        if self.device.type != "cuda":
            return {"peak": None, "reserved": None, "host": host}
        peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        return {"peak": peak / GIB, "reserved": reserved / GIB, "host": host}


@dataclass
class Part:
    """A program.

    Attributes:
        name: Its name.
        run: The program; it returns scores, or the time if that is measured inside, or nothing.
        batches: Number of batches for the ratio; zero for none.
        needs: The program whose result it uses, if any.
        goal: The goal, as text, given the row.
    """

    name: str
    run: Callable[[], Tensor | float | None]
    batches: float = 0
    needs: str = ""
    goal: Callable[[PartRow], str] = lambda _: ""


class Benchmark:
    """A model, its data, and the programs of both libraries.

    Args:
        size: Options of the command line.
    """

    def __init__(self, size: argparse.Namespace) -> None:
        self.size = size
        self.device = torch.device(size.device)
        self.deadline = time.perf_counter() + size.seconds
        self.model = llama(size)
        self.layers = tracked(self.model)
        self.params = [f"{layer}.weight" for layer in self.layers]
        generator = torch.Generator().manual_seed(0)
        self.train, self.queries = (self._tokens(count, generator) for count in (size.train, size.queries))
        self.unit: float | None = None  # seconds of forward+backward of one batch
        self.scores: Tensor | None = None

    def _tokens(self, count: int, generator: torch.Generator) -> Data:
        tokens = torch.randint(self.size.vocabulary, (count, self.size.length + 1), generator=generator)
        return tokens[:, :-1].contiguous().to(self.device), tokens[:, 1:].contiguous().to(self.device)

    @property
    def name(self) -> str:
        """The model's name, with its number of parameters."""
        millions = sum(p.numel() for p in self.model.parameters()) / 1e6
        covered = sum(self.model.get_parameter(name).numel() for name in self.params) / 1e6
        return f"Llama {self.size.shape}, {millions:,.1f}M parameters, {covered:,.1f}M with curvature"

    def batches(self, data: Data) -> list[Data]:
        """Divide data into batches."""
        return list(zip(*(part.split(self.size.batch) for part in data), strict=True))

    def risk(self, data: Data, count: int | None = None) -> EmpiricalRisk:
        """Return the risk of data, or of their first batches, which are repeated if they do not suffice."""
        batches = self.batches(data)
        some = batches if count is None else (batches * count)[:count]
        return EmpiricalRisk(self.model, TokenCrossEntropy(), some, params=self.params, progress=False)

    # Programs of kfs.

    def forward_backward(self) -> float:
        """Measure one batch, as training computes it."""

        def run(count: int) -> None:
            for x, y in (self.batches(self.train) * count)[:count]:
                cross_entropy(self.model(x).flatten(0, -2), y.flatten()).backward()
                self.model.zero_grad()

        run(2)
        self.unit = seconds = seconds_of(partial(run, self.size.many)) / int(self.size.many)
        return seconds

    def kfac(self, count: int) -> KFAC:
        """Compute KFAC of some batches, without the decomposition."""
        return KFAC(self.risk(self.train, count), "mc")

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of factors that options choose."""
        chosen = {"factor_device": self.size.factor_device, "factor_memory": self.size.factor_memory}
        return {name: setting for name, setting in chosen.items() if setting is not None}

    def first_batches(self) -> None:
        """Compute KFAC of a few batches of a new model."""
        self.kfac(self.size.few)

    def marginal(self) -> float:
        """Measure one more batch."""
        few, many = (seconds_of(partial(self.kfac, count)) for count in (self.size.few, self.size.many))
        return (many - few) / int(self.size.many - self.size.few)

    def eigh(self) -> float:
        """Measure the decomposition of one factor."""
        x = torch.randn(self.size.inner, self.size.inner, device=self.device)
        torch.linalg.eigh(x[:64, :64] @ x[:64, :64].T)  # loads the library
        S = x @ x.T
        return seconds_of(lambda: torch.linalg.eigh(S))

    def ekfac(self) -> None:
        """Compute EKFAC of all training data."""
        self.E = EKFAC(self.risk(self.for_factors), "mc", **self.settings)

    @property
    def for_factors(self) -> Data:
        """The training data that EKFAC is computed from."""
        X, y = (part[: self.size.factor_train] for part in self.train)
        return X, y

    def inverse(self) -> None:
        """Compute the inverse."""
        self.influence = Influence(self.E, Relative(0.1))

    def pairwise(self, train: Data) -> Tensor:
        """Compute the scores of all queries."""
        size = self.size
        budget: dict[str, Any] = {"memory": int(size.memory * GIB), "query_rank": size.query_rank}
        self.scores = self.influence.scores(self.risk(self.queries), self.risk(train), **budget)
        return self.scores

    def ours(self) -> list[Part]:
        """Return the programs of kfs."""
        size = self.size
        all_batches = len(self.batches(self.train))
        eighth = max(size.train // 8, 1)
        some = self.train[0][:eighth], self.train[1][:eighth]
        return [
            Part("forward+backward", self.forward_backward, 1),
            Part("KFAC, first batches", self.first_batches, size.few),
            Part("KFAC, marginal batch", self.marginal, 1, goal=partial(at_most, ratio=1.5)),
            Part(f"eigh of {size.inner:,}", self.eigh),
            Part(
                "EKFAC", self.ekfac, len(self.batches(self.for_factors)), goal=partial(at_most, seconds=300, peak=100)
            ),
            Part("inverse", self.inverse, needs="EKFAC"),
            Part("scores, one eighth", partial(self.pairwise, some), len(self.batches(some)), "inverse"),
            Part("scores", partial(self.pairwise, self.train), all_batches, "inverse"),
        ]

    # Programs of Kronfluence.

    def theirs(self) -> list[Part]:
        """Return the programs of Kronfluence, with the same model and data."""
        kronfluence = import_module("kronfluence")
        shared = argparse.Namespace(device=self.size.device, batch=self.size.batch, fisher="mc")
        data = argparse.Namespace(model=self.model, size=shared, train=self.train, queries=self.queries)
        language = import_module("benchmarks.influence_kronfluence").Language(data, self.layers, low=False)
        analysis, of_factors = language.analysis, language.of_factors
        # As many queries for each pass over the training data as `--memory` allows.
        bytes_of_batch = 4 * self.size.batch * sum(self.model.get_parameter(name).numel() for name in self.params)
        of_scores = kronfluence.ScoreArguments(
            damping_factor=None,
            amp_dtype=language.of_scores.amp_dtype,
            query_gradient_accumulation_steps=max(1, int(self.size.memory * GIB) // bytes_of_batch),
            query_gradient_low_rank=self.size.query_rank,
        )
        count = len(self.batches(self.train))
        return [
            Part("covariances", partial(analysis.covariances, of_factors), count),
            Part("decompositions", partial(analysis.decompositions, of_factors), needs="covariances"),
            Part("eigenvalues", partial(analysis.eigenvalues, of_factors), count, "decompositions"),
            Part("scores", partial(analysis.pairwise, self.queries, of_scores), count, "eigenvalues"),
        ]

    # Measurements.

    def rows(self) -> Generator[PartRow]:
        """Measure all programs, one after the other."""
        ours = yield from self._measured("kfs", self.ours)
        for name in ("influence", "E"):  # the other library needs the memory
            vars(self).pop(name, None)
        if not self.size.kronfluence:
            return
        if find_spec("kronfluence") is None:
            yield PartRow("all", "Kronfluence", None, why="not installed")
            return
        theirs = yield from self._measured("Kronfluence", self.theirs)
        factors = ["covariances", "decompositions", "eigenvalues"]
        both = {
            "EKFAC": (["EKFAC"], factors),
            "EKFAC and scores": (["EKFAC", "inverse", "scores"], [*factors, "scores"]),
        }
        for name, (mine, others) in both.items():
            if set(mine) <= ours.keys() and set(others) <= theirs.keys():
                total = sum(theirs[part] for part in others)
                times = total / sum(ours[part] for part in mine)
                goal = f"kfs is {times:.2f} times as fast, at least 3: {'yes' if times >= 3 else 'no'}"
                yield PartRow(name, "Kronfluence", total, goal=goal)

    def _measured(self, library: str, programs: Callable[[], list[Part]]) -> Generator[PartRow, None, dict[str, float]]:
        """Measure the programs of a library; return the times of those that ended without an error."""
        found: dict[str, float] = {}
        try:
            parts = programs()
        except Exception as error:  # noqa: BLE001 (rows that are measured already must be kept)
            yield PartRow("all", library, None, why=explained(error))
            return found
        for part in parts:
            if self.size.only and not part.name.startswith(tuple(self.size.only)) and library == "kfs":
                continue
            row = self._row(part, library, found)
            if row.seconds is not None:
                found[part.name] = row.seconds
            yield row
        return found

    def _row(self, part: Part, library: str, found: dict[str, float]) -> PartRow:
        """Run a program."""
        if part.needs and part.needs not in found:
            return PartRow(part.name, library, None, why=f"no {part.needs}")
        if time.perf_counter() > self.deadline:
            return PartRow(part.name, library, None, why="no time left")
        memory = Memory(self.device)
        result: list[Any] = []
        try:
            seconds = seconds_of(lambda: result.append(part.run()))
        except Exception as error:  # noqa: BLE001 (the other programs must run if one fails)
            return PartRow(part.name, library, None, **memory.found(), why=explained(error))  # type: ignore[arg-type]
        agreement = None
        if isinstance(result[0], float):
            seconds = result[0]
        elif isinstance(result[0], Tensor) and self.scores is not None and self.scores.shape == result[0].shape:
            mine, other = (scores.flatten().float().cpu() for scores in (self.scores, result[0]))
            agreement = float(torch.cosine_similarity(mine, other, dim=0))
        ratio = seconds / (part.batches * self.unit) if part.batches and self.unit else None
        row = PartRow(part.name, library, seconds, ratio, **memory.found(), agreement=agreement)  # type: ignore[arg-type]
        return PartRow(**vars(row) | {"goal": part.goal(row)})


def at_most(row: PartRow, **limits: float) -> str:
    """Return goals with the values that they bound, and whether they are met; values that are not measured count."""
    texts = []
    for name, limit in limits.items():
        value = getattr(row, name)
        texts.append(f"{name} <= {limit:g}: {'unknown' if value is None else 'yes' if value <= limit else 'no'}")
    return ", ".join(texts)


def explained(error: Exception) -> str:
    """Return one line about an error."""
    return f"{type(error).__name__}: {error!s:.300}".replace("\n", " ").replace("|", "/")


def options(words: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.large_language_model")
    parser.add_argument("shape", choices=SHAPES, help="the model's shape")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", help="of the model (default: bfloat16)")
    numbers: dict[str, tuple[Any, Any, str]] = {
        "layers": (int, None, "transformer blocks (default: as the shape)"),
        "length": (int, 512, "tokens in a sequence"),
        "train": (int, 512, "training sequences"),
        "queries": (int, 32, "queries"),
        "batch": (int, 4, "sequences in a batch"),
        "few": (int, 8, "batches of the shorter computation for marginal costs"),
        "many": (int, 24, "batches of the longer one"),
        "factor-train": (int, None, "training sequences for EKFAC (default: all)"),
        "memory": (float, 32, "GiB for gradients of queries"),
        "query-rank": (int, None, "singular vectors of queries to keep (default: all)"),
        "factor-memory": (int, None, "bytes of sums for each pass (default: no limit)"),
        "seconds": (float, 480, "no program begins later than this"),
    }
    for name, (kind, default, meaning) in numbers.items():
        parser.add_argument(f"--{name}", type=kind, default=default, help=meaning)
    parser.add_argument("--factor-device", help="device of EKFAC, or none (default: cpu for 3B, else the model's)")
    parser.add_argument("--only", nargs="+", help="beginnings of the names of the programs of kfs to run")
    parser.add_argument("--kronfluence", action=argparse.BooleanOptionalAction, help="default: for all shapes but 3B")
    parser.add_argument("--results", type=Path, default=None, help="folder for the JSON file")
    given = parser.parse_args(words)
    defaults = vars(parser.parse_args([given.shape]))
    for name, value in SHAPES[given.shape].items():
        if getattr(given, name, None) == defaults.get(name):  # was not given
            setattr(given, name, value)
    if given.kronfluence is None:
        given.kronfluence = given.shape != "3B"
    if given.factor_device is None and given.shape == "3B":
        given.factor_device = "cpu"
    given.factor_device = None if given.factor_device == "none" else given.factor_device
    return given


def main(words: Sequence[str] | None = None, results: Path = RESULTS) -> None:
    """Measure, print a table, and write JSON after every row."""
    given = options(words)
    results = given.results or results
    benchmark = Benchmark(given)
    where = device_name(benchmark.device)
    print(f"{benchmark.name}, {given.train} sequences of {given.length} tokens, {given.queries} queries, on {where}\n")
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|", flush=True)
    settings = {name: value for name, value in vars(given).items() if name != "results"}
    settings |= {"device": where, "model": benchmark.name}
    rows: list[PartRow] = []
    for row in benchmark.rows():
        print(row.line(), flush=True)
        rows.append(row)
        file = save(rows, f"large_language_model_{given.shape}", settings, results)
    print(f"Written: {file}")


if __name__ == "__main__":
    main()
