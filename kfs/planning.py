"""Plans for many processes: what each rank would own, hold, compute and send, computed without running them.

`kfs.distributed.assignment` chooses the owners.

Bytes that are sent are those of one rank. A ring of `W` ranks adds up `T` bytes for all of them by sending
`2 (W - 1) / W * T` each, and half as many if each number is needed by one rank only.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf, isqrt
from typing import Any, Literal, NamedTuple

import torch
from torch.nn import Module

from kfs.display.describe import DescribedByTables, Description, Table, counted, readable_count, readable_size
from kfs.display.suggestions import guess
from kfs.distributed.assignment import DECOMPOSITION, Part, Placement, eigenvalues, longest_first, place, subsets_of
from kfs.errors import DtypeError, ModelError
from kfs.factors import inspect
from kfs.factors.accumulate import parts_of
from kfs.factors.settings import Settings
from kfs.runtime.memory import SHARE


@dataclass(frozen=True)
class BlockShape:
    """The shape of a block.

    Attributes:
        name: The block's name.
        rows: `d_B`.
        columns: `d_A`; a bias counts as a column.
        indices: Whether inputs are indices, as for an embedding, so that `A` is diagonal.
        positions: Number of vectors that each example (or token) adds.
        same_input: Whether the inputs, and so `A`, are the same as those of an earlier block.
        tied: Whether the parameter is used twice: its inputs are indices, and its transpose computes the logits.
    """

    name: str
    rows: int
    columns: int
    indices: bool = False
    positions: float = 1.0
    same_input: bool = False
    tied: bool = False


@dataclass(frozen=True)
class LanguageModel:
    """The sizes of a language model with the architecture of Llama.

    Attributes:
        title: Its full name.
        layers: Number of layers.
        hidden: Features of a token between layers.
        wide: Hidden features of an MLP or an expert.
        queries: Features of all queries, or of the outputs of all attention heads.
        keys: Features of all keys, or of all values.
        vocabulary: Number of tokens in the vocabulary.
        experts: Number of experts in a layer; zero if there are none.
        active: Number of experts that process each token.
        tied: Whether embedding and head are one matrix.
        biased: Whether queries, keys and values have biases, as in Qwen 2.5.
        head: Features of an attention head whose queries and keys are normalized, as in Qwen 3; zero if they are not.
        norms_around: Whether outputs of attention and MLP are normalized, too, as in Gemma.
    """

    title: str
    layers: int
    hidden: int
    wide: int
    queries: int
    keys: int
    vocabulary: int
    experts: int = 0
    active: int = 0
    tied: bool = False
    biased: bool = False
    head: int = 0
    norms_around: bool = False

    @property
    def max_dim(self) -> int:
        """The largest dimension of a factor, except for the vocabulary. The two parts of a gate form one matrix."""
        return max(self.hidden + self.biased, self.queries, self.wide * (2 if self.experts else 1))

    def blocks(self) -> Iterator[BlockShape]:
        """Yield the shapes of all blocks."""
        hidden = self.hidden
        yield BlockShape("model.embed_tokens.weight", hidden, self.vocabulary, indices=True, tied=self.tied)
        for number in range(self.layers):
            layer = f"model.layers.{number}"
            attention = f"{layer}.self_attn"
            joint, inputs = ("", hidden + 1) if self.biased else (".weight", hidden)
            yield BlockShape(f"{attention}.q_proj{joint}", self.queries, inputs)
            yield BlockShape(f"{attention}.k_proj{joint}", self.keys, inputs, same_input=True)
            yield BlockShape(f"{attention}.v_proj{joint}", self.keys, inputs, same_input=True)
            if self.head:
                yield _norm(f"{attention}.q_norm.weight", self.head, self.queries / self.head)
                yield _norm(f"{attention}.k_norm.weight", self.head, self.keys / self.head)
            yield BlockShape(f"{attention}.o_proj.weight", hidden, self.queries)
            yield from self._experts(f"{layer}.mlp") if self.experts else self._mlp(f"{layer}.mlp")
            yield _norm(f"{layer}.input_layernorm.weight", hidden)
            yield _norm(f"{layer}.post_attention_layernorm.weight", hidden)
            if self.norms_around:
                yield _norm(f"{layer}.pre_feedforward_layernorm.weight", hidden)
                yield _norm(f"{layer}.post_feedforward_layernorm.weight", hidden)
        yield _norm("model.norm.weight", hidden)
        if not self.tied:
            yield BlockShape("lm_head.weight", self.vocabulary, hidden)

    def _mlp(self, name: str) -> Iterator[BlockShape]:
        yield BlockShape(f"{name}.gate_proj.weight", self.wide, self.hidden)
        yield BlockShape(f"{name}.up_proj.weight", self.wide, self.hidden, same_input=True)
        yield BlockShape(f"{name}.down_proj.weight", self.hidden, self.wide)

    def _experts(self, name: str) -> Iterator[BlockShape]:
        yield BlockShape(f"{name}.gate.weight", self.experts, self.hidden)
        part = self.active / self.experts  # share of tokens for each expert, if experts are used equally
        for expert in range(self.experts):
            yield BlockShape(f"{name}.experts.gate_up_proj[{expert}]", 2 * self.wide, self.hidden, positions=part)
            yield BlockShape(f"{name}.experts.down_proj[{expert}]", self.hidden, self.wide, positions=part)


@dataclass(frozen=True)
class GPT2:
    """The sizes of a GPT-2.

    Attributes:
        title: Its full name.
        layers: Number of layers.
        hidden: Features of a token between layers.
        vocabulary: Number of tokens in the vocabulary.
        positions: Largest number of tokens of a sequence.
    """

    title: str
    layers: int
    hidden: int
    vocabulary: int = 50257
    positions: int = 1024

    @property
    def max_dim(self) -> int:
        """The largest dimension of a factor, except for the vocabulary."""
        return 4 * self.hidden + 1

    def blocks(self) -> Iterator[BlockShape]:
        """Yield the shapes of all blocks."""
        hidden = self.hidden
        yield BlockShape("transformer.wte.weight", hidden, self.vocabulary, indices=True, tied=True)
        yield BlockShape("transformer.wpe.weight", hidden, self.positions, indices=True)
        for number in range(self.layers):
            layer = f"transformer.h.{number}"
            yield from self._norm(f"{layer}.ln_1")
            yield BlockShape(f"{layer}.attn.c_attn", 3 * hidden, hidden + 1)
            yield BlockShape(f"{layer}.attn.c_proj", hidden, hidden + 1)
            yield from self._norm(f"{layer}.ln_2")
            yield BlockShape(f"{layer}.mlp.c_fc", 4 * hidden, hidden + 1)
            yield BlockShape(f"{layer}.mlp.c_proj", hidden, 4 * hidden + 1)
        yield from self._norm("transformer.ln_f")

    def _norm(self, name: str) -> Iterator[BlockShape]:
        """Yield the shapes of the blocks for scale and shift of a normalization."""
        yield _norm(f"{name}.weight", self.hidden)
        yield _norm(f"{name}.bias", self.hidden)


def _norm(name: str, size: int, positions: float = 1.0) -> BlockShape:
    """Return the shape of the block for the scale of a normalization, which has only a factor `B`."""
    return BlockShape(name, size, 1, positions=positions)


def _llama_3(size: str, layers: int, hidden: int, wide: int, keys: int, tied: bool = False) -> LanguageModel:
    return LanguageModel(f"Llama {size}", layers, hidden, wide, hidden, keys, 128256, tied=tied)


def _qwen_2(size: str, layers: int, hidden: int, wide: int, keys: int, tied: bool = False) -> LanguageModel:
    vocabulary = 151936 if tied else 152064
    return LanguageModel(f"Qwen 2.5 {size}", layers, hidden, wide, hidden, keys, vocabulary, tied=tied, biased=True)


def _qwen_3(size: str, layers: int, hidden: int, wide: int, queries: int, tied: bool = False) -> LanguageModel:
    return LanguageModel(f"Qwen 3 {size}", layers, hidden, wide, queries, 1024, 151936, tied=tied, head=128)


def _gemma_2(size: str, layers: int, hidden: int, wide: int, queries: int, keys: int) -> LanguageModel:
    return LanguageModel(f"Gemma 2 {size}", layers, hidden, wide, queries, keys, 256000, tied=True, norms_around=True)


# Sizes are those of published configurations.
_MODELS = (
    LanguageModel("Llama 2 7B", 32, 4096, 11008, 4096, 4096, 32000),
    LanguageModel("Llama 2 70B", 80, 8192, 28672, 8192, 1024, 32000),
    _llama_3("3.1 8B", 32, 4096, 14336, 1024),
    _llama_3("3.1 70B", 80, 8192, 28672, 1024),
    _llama_3("3.1 405B", 126, 16384, 53248, 1024),
    _llama_3("3.2 1B", 16, 2048, 8192, 512, tied=True),
    _llama_3("3.2 3B", 28, 3072, 8192, 1024, tied=True),
    _llama_3("3.3 70B", 80, 8192, 28672, 1024),
    LanguageModel("Mistral 7B", 32, 4096, 14336, 4096, 1024, 32768),
    LanguageModel("Mixtral 8x7B", 32, 4096, 14336, 4096, 1024, 32000, experts=8, active=2),
    LanguageModel("Mixtral 8x22B", 56, 6144, 16384, 6144, 1024, 32768, experts=8, active=2),
    _qwen_2("0.5B", 24, 896, 4864, 128, tied=True),
    _qwen_2("1.5B", 28, 1536, 8960, 256, tied=True),
    _qwen_2("3B", 36, 2048, 11008, 256, tied=True),
    _qwen_2("7B", 28, 3584, 18944, 512),
    _qwen_2("14B", 48, 5120, 13824, 1024),
    _qwen_2("32B", 64, 5120, 27648, 1024),
    _qwen_2("72B", 80, 8192, 29568, 1024),
    _qwen_3("0.6B", 28, 1024, 3072, 2048, tied=True),
    _qwen_3("1.7B", 28, 2048, 6144, 2048, tied=True),
    _qwen_3("4B", 36, 2560, 9728, 4096, tied=True),
    _qwen_3("8B", 36, 4096, 12288, 4096),
    _qwen_3("14B", 40, 5120, 17408, 5120),
    _qwen_3("32B", 64, 5120, 25600, 8192),
    LanguageModel("Qwen 3 30B A3B", 48, 2048, 768, 4096, 512, 151936, experts=128, active=8, head=128),
    _gemma_2("2B", 26, 2304, 9216, 2048, 1024),
    _gemma_2("9B", 42, 3584, 14336, 4096, 2048),
    _gemma_2("27B", 46, 4608, 36864, 4096, 2048),
    LanguageModel("Gemma 3 1B", 26, 1152, 6912, 1024, 256, 262144, tied=True, head=256, norms_around=True),
    GPT2("GPT-2", 12, 768),
    GPT2("GPT-2 medium", 24, 1024),
    GPT2("GPT-2 large", 36, 1280),
    GPT2("GPT-2 XL", 48, 1600),
)
# Sizes alone name these models.
_SHORT = {
    "1B": "Llama 3.2 1B",
    "3B": "Llama 3.2 3B",
    "7B": "Llama 2 7B",
    "8B": "Llama 3.1 8B",
    "70B": "Llama 2 70B",
    "405B": "Llama 3.1 405B",
    "8x7B": "Mixtral 8x7B",
    "8x22B": "Mixtral 8x22B",
}
NAMED: dict[str, LanguageModel | GPT2] = {model.title: model for model in _MODELS}
NAMED |= {short: NAMED[title] for short, title in _SHORT.items()}


def _plain(name: str) -> str:
    """Return a name without owner, case, separators and variant: `"qwen2.57b"` for `"Qwen/Qwen2.5-7B-Instruct"`."""
    name = name.rpartition("/")[2].lower()
    for word in ("instruct", "meta", "base", "-hf", "-it", "-pt", "-v0.1", "-v0.3"):
        name = name.replace(word, "")
    return name.replace("-", "").replace("_", "").replace(" ", "")


def named(name: str) -> LanguageModel | GPT2:
    """Return the sizes of a language model.

    Args:
        name: Its title, such as `"Qwen 2.5 7B"`, a name on the hub, such as `"Qwen/Qwen2.5-7B-Instruct"`, or a size for
            the best-known models, such as `"8B"`.

    Raises:
        ModelError: If the name is unknown.
    """
    plain = {_plain(known): model for known, model in NAMED.items()}
    if _plain(name) not in plain:
        similar = guess([name], NAMED)
        raise ModelError(
            f"There is no model {name!r}.",
            f"{similar + ' ' if similar else ''}Choose from {'; '.join(NAMED)}. For other models, pass a module on the "
            "meta device, and sample=.",
        )
    return plain[_plain(name)]


TOKENS = 2048  # default number of tokens in a batch of one rank


class Source(NamedTuple):
    """The input of a plan: the parts of a model, and the data that its ranks process.

    Attributes:
        name: Name of the model.
        parts: Parts of all blocks.
        max_dim: Factors wider than this are diagonal.
        batch: Number of examples (or tokens) in a batch of one rank.
        activations: Dtype of inputs and gradients.
        same_input: Blocks with the same inputs as another block.
        uncovered: Parameters without a block.
    """

    name: str
    parts: list[Part]
    max_dim: int | None
    batch: int = TOKENS
    activations: torch.dtype = torch.bfloat16
    same_input: frozenset[str] = frozenset()
    uncovered: tuple[str, ...] = ()


def source_of(model: Any, sample: Any, max_dim: int | None, eigen: bool) -> Source:
    """Return the parts of a module, a named model, or a dictionary of shapes; see `kfs.distributed.plan`."""
    if isinstance(model, Module):
        return _of_module(model, sample, max_dim, eigen)
    if isinstance(model, str):
        found = named(model)
        shapes = list(found.blocks())
        name = found.title
        max_dim = max_dim or found.max_dim
    elif isinstance(model, Mapping):
        shapes = [_shape(name, shape) for name, shape in model.items()]
        name = counted(len(shapes), "shape")
    else:
        raise DtypeError(f"The model is a {type(model).__name__}.", "Pass a module, a name, or a dictionary of shapes.")
    settings = Settings(max_dim=max_dim)
    parts = [part for shape in shapes for part in _parts(shape, settings, eigen)]
    return Source(name, parts, max_dim, same_input=frozenset(shape.name for shape in shapes if shape.same_input))


def _of_module(model: Module, sample: Any, max_dim: int | None, eigen: bool) -> Source:
    if sample is None:
        raise ModelError("Blocks of a module depend on how it uses its parameters.", "Pass a batch of inputs: sample=.")
    found = inspect(model, sample, max_dim=max_dim, audit=False)
    parts = [part for block in found.blocks for part in parts_of(block, found.num_data, eigen)]
    dtype = next(model.parameters()).dtype
    return Source(found.model, parts, max_dim, found.num_data, dtype, uncovered=tuple(found.uncovered))


def _shape(name: str, shape: Any) -> BlockShape:
    valid = isinstance(shape, tuple | list | torch.Size) and len(shape) == 2
    if not valid or not all(type(size) is int and size > 0 for size in shape):
        raise ModelError(f"The shape of {name!r} is {shape!r}.", "Use (d_B, d_A): outputs, then inputs and bias.")
    return BlockShape(name, *shape)


def _parts(shape: BlockShape, settings: Settings, eigen: bool) -> list[Part]:
    """Return the parts of a block, given its shape."""
    diagonal_A: tuple[bool, ...] = (shape.indices or settings.is_diagonal(shape.columns),)
    diagonal_B: tuple[bool, ...] = (settings.is_diagonal(shape.rows),)
    if shape.tied:  # each side has a sum for each of the two uses
        diagonal_A, diagonal_B = (*diagonal_A, settings.is_diagonal(shape.columns)), (*diagonal_B, *diagonal_B)
    A = Part(shape.name, "A", shape.columns, diagonal=diagonal_A, positions=shape.positions, eigen=eigen)
    B = Part(shape.name, "B", shape.rows, diagonal=diagonal_B, positions=shape.positions, eigen=eigen)
    return [A, B, eigenvalues(shape.name, shape.rows * shape.columns)] if eigen else [A, B]


Split = int | Literal["share"] | None
_SHOWN = 8  # number of ranks shown if there are many
_OTHER = "sums to all ranks, as squares (kfac-pytorch)"


class Sent(NamedTuple):
    """A kind of data that ranks send.

    Attributes:
        what: Description of the data.
        when: How often the data are sent.
        nbytes: Largest number of bytes that a rank sends.
    """

    what: str
    when: str
    nbytes: float


class Trained(NamedTuple):
    """Memory and work of `kfs.optim.KFAC` on each rank.

    Attributes:
        model: How the model is distributed.
        nbytes: Largest number of bytes of averages and inverses on a rank.
        path: Largest number of operations on a rank if all inverses are computed at the same time.
        busy: Number of ranks that compute inverses then.
    """

    model: str
    nbytes: float
    path: float
    busy: int


@dataclass(frozen=True, repr=False)
class Plan(DescribedByTables):
    """The data that ranks will hold, compute and send. Print it to show its tables. See `plan`.

    Attributes:
        of: Method and model of the plan.
        placement: Owner ranks of all parts.
        settings: Description of the requested settings.
        batch: Number of examples (or tokens) in a batch of one rank.
        activation: Bytes of a number in inputs and gradients.
        whole: Owner ranks of whole factors, if wide factors are split; otherwise `None`.
        same_input: Blocks with the same inputs as another block.
        uncovered: Parameters without a block.
        memory: Bytes that are available on a rank; `None` for no limit.
    """

    of: str
    placement: Placement
    settings: tuple[str, ...]
    batch: int
    activation: int
    whole: Placement | None = None
    same_input: frozenset[str] = frozenset()
    uncovered: tuple[str, ...] = ()
    memory: int | None = None

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.placement.ranks

    @property
    def owners(self) -> dict[tuple[str, str], int]:
        """Owner rank of each part, by block and side."""
        return dict(self.placement.owners)

    @property
    def nbytes(self) -> list[int]:
        """Bytes that each rank holds in the end: factors, and inverses or eigenvectors and eigenvalues."""
        return [int(total) for total in self.placement.total(lambda part: part.nbytes)]

    @property
    def work(self) -> list[float]:
        """Floating-point operations of the inverses of each rank."""
        return self.placement.total(lambda part: part.work)

    @property
    def summed(self) -> int:
        """Bytes of the sums for all factors. Every rank holds them during a pass over its data for all blocks."""
        return sum(part.summed for part in self.placement.parts if part.is_factor)

    @property
    def parameters(self) -> int:
        """Number of parameters covered by blocks."""
        counts: dict[str, int] = {}
        for part in (self.whole or self.placement).parts:
            if part.is_factor:
                counts[part.block] = counts.get(part.block, part.groups) * part.size
        return sum(counts.values())

    @property
    def subsets(self) -> list[list[str]] | None:
        """Blocks of each pass over the data, so that no rank needs more than `memory`; `None` if that is impossible.

        In a pass, a rank holds the sums of its blocks, and at most everything that it holds in the end. Passes for
        eigenvalues come after passes for factors; in these, a rank holds eigenvectors and sums of eigenvalues.
        """
        memory = inf if self.memory is None else self.memory - max(self.nbytes)
        try:
            return [subset for needs in self._needs() for subset in subsets_of(needs, memory)]
        except ModelError:
            return None

    def _needs(self) -> list[dict[str, int]]:
        """Return bytes of each block in its pass for factors and, for EKFAC, in its pass for eigenvalues."""
        of_sums: dict[str, int] = {}
        of_eigenvalues: dict[str, int] = {}
        for part in self.placement.parts:
            if part.is_factor:
                of_sums[part.block] = of_sums.get(part.block, 0) + part.summed
            if part.eigen:
                need = part.computed if part.is_factor else part.summed
                of_eigenvalues[part.block] = of_eigenvalues.get(part.block, 0) + need
        return [of_sums, of_eigenvalues] if of_eigenvalues else [of_sums]

    @property
    def batches_for_sums(self) -> float:
        """Number of batches per reduction at which sums take as many bytes as inputs and gradients.

        For fewer batches, sending inputs and gradients takes fewer bytes. The sum for a dense factor has
        `d (d + 1) / 2` numbers. Each batch adds `n` vectors of `d` numbers to it.
        """
        return self._batches_for_sums(self.placement.parts)

    @property
    def traffic(self) -> tuple[Sent, ...]:
        """The data that ranks send, with their numbers of bytes."""
        factors = [part for part in self.placement.parts if part.is_factor]
        whole = [part for part in (self.whole or self.placement).parts if part.is_factor]
        ring = (self.ranks - 1) / self.ranks
        found = [
            Sent("sums to owners, as triangles", "update", self._to_owners(lambda part: part.sent * part.is_factor)),
            Sent("sums to all ranks, as triangles (replicated)", "update", 2 * ring * sum(p.sent for p in factors)),
            Sent(_OTHER, "update", 2 * ring * sum(p.summed for p in whole)),
            Sent("inputs and gradients to owners", "batch", self._to_owners(self._vector_bytes)),
        ]
        if len(factors) < len(self.placement.parts):
            to_all = ring * sum(part.computed for part in factors)
            found.append(Sent("eigenvectors to all ranks", "update", to_all))
            to_owners = self._to_owners(lambda part: part.sent * (not part.is_factor))
            found.append(Sent("sums of eigenvalues to owners", "update", to_owners))
        itemsize = factors[0].itemsize
        found.append(Sent("steps of parameters to all ranks", "step", ring * itemsize * self.parameters))
        return tuple(found)

    @property
    def training(self) -> tuple[Trained, ...]:
        """Memory and work of `kfs.optim.KFAC`: with `DistributedDataParallel`, and with `fully_shard`.

        Sharded models keep averages and inverses at owners, but not eigenvectors. In steps with factors, all ranks also
        hold the sums of the step, `summed`.
        """
        work = self._by_block(self._operations)
        path, busy = self._most(longest_first(work, self.ranks), work)
        found = [Trained("DistributedDataParallel", sum(self.nbytes), path, busy)]
        if not any(part.eigen for part in self.placement.parts):
            # If a block is divided, the owner of the part with more work has all of it.
            parts = sorted(self.placement.parts, key=lambda part: part.work)
            owners = {part.block: self.placement.owners[part.key] for part in parts}
            path, busy = self._most(owners, work)
            nbytes, _ = self._most(owners, self._by_block(lambda part: part.nbytes))
            found.append(Trained("fully_shard", nbytes, path, busy))
        return tuple(found)

    def _by_block(self, quantity: Callable[[Part], float]) -> dict[str, float]:
        """Return the sum of a quantity over the parts of each block."""
        found: dict[str, float] = {}
        for part in self.placement.parts:
            found[part.block] = found.get(part.block, 0.0) + quantity(part)
        return found

    def _most(self, owners: Mapping[str, int], quantity: Mapping[str, float]) -> tuple[float, int]:
        """Return the largest sum of a quantity of blocks on a rank, and how many ranks have any."""
        totals = [0.0] * self.ranks
        for block, owner in owners.items():
            totals[owner] += quantity[block]
        return max(totals), self.ranks - totals.count(0.0)

    @staticmethod
    def _operations(part: Part) -> float:
        """Return the operations of an inverse, or of an eigendecomposition."""
        if not part.eigen:
            return part.work
        return DECOMPOSITION * part.work if part.is_factor else 0.0

    def describe(self) -> Description:
        """Describe bytes and operations of ranks, traffic, and owner ranks."""
        blocks = {part.block for part in self.placement.parts}
        title = f"{self.of} on {counted(self.ranks, 'rank')}: {counted(len(blocks), 'block')}, "
        title += f"{counted(self.parameters, 'parameter')}, {readable_size(self.summed)} of factors"
        tables = (self._totals(), self._sent(), self._trained(), self._ranks())
        return Description(title, self.settings, tables, tuple(self._notes()))

    def _totals(self) -> Table:
        """Return the table of bytes and operations of all ranks, with their balance."""
        held = [float(nbytes) for nbytes in self.nbytes]
        rows = [
            _divided("bytes held", held, self._largest(lambda part: part.nbytes), readable_size),
            _divided("operations of inverses", self.work, self._largest(lambda part: part.work), readable_count),
            _divided(
                "operations of eigendecompositions",
                [DECOMPOSITION * work for work in self.work],
                DECOMPOSITION * self._largest(lambda part: part.work),
                readable_count,
            ),
        ]
        columns = ("", "all", "mean of ranks", "most of a rank", "most / mean", "largest part")
        return Table("divided among owners", columns, rows, columns[1:])

    def _sent(self) -> Table:
        other = next(sent.nbytes for sent in self.traffic if sent.what == _OTHER)
        rows = []
        for sent in self.traffic:
            compared = f"{sent.nbytes / other:.0%}" if other and sent.when == "update" else ""
            rows.append((sent.what, sent.when, readable_size(sent.nbytes), compared))
        columns = ("sent by a rank", "every", "bytes", "of kfac-pytorch's")
        return Table("traffic", columns, rows, columns[2:])

    def _trained(self) -> Table:
        """Return the table of what the optimizer takes."""
        mean = sum(map(self._operations, self.placement.parts)) / self.ranks
        sums = readable_size(self.summed)
        rows = [
            (
                one.model,
                readable_size(one.nbytes),
                sums,
                readable_count(one.path),
                f"{one.path / mean:.2f}",
                f"{one.busy:,}",
            )
            for one in self.training
        ]
        columns = (
            "kfs.optim.KFAC with",
            "averages, inverses",
            "sums of a step",
            "operations",
            "most / mean",
            "ranks busy",
        )
        return Table("most of a rank in training", columns, rows, columns[1:])

    def _ranks(self) -> Table:
        """Return the table of parts owned by each rank; if there are many ranks, only the first ones are shown."""
        parts: list[list[Part]] = [[] for _ in range(self.ranks)]
        for part in self.placement.parts:
            parts[self.placement.owners[part.key]].append(part)
        rows = []
        for rank, (mine, nbytes, work) in enumerate(zip(parts, self.nbytes, self.work, strict=True)):
            blocks = list(dict.fromkeys(part.block for part in mine))
            names = ", ".join(blocks[:2]) + (f", ... ({len(blocks)})" if len(blocks) > 2 else "")
            rows.append((str(rank), str(len(mine)), readable_size(nbytes), readable_count(work), names))
        if len(rows) > _SHOWN + 1:
            rows = [*rows[:_SHOWN], ("...", "", "", "", f"{len(rows) - _SHOWN:,} more")]
        return Table(
            "owners", ("rank", "parts", "bytes", "operations", "blocks"), rows, ("parts", "bytes", "operations")
        )

    def _notes(self) -> list[str]:
        """Return the sentences below the tables."""
        notes = []
        idle = self.nbytes.count(0)
        if idle:
            notes.append(f"Ranks that own nothing: {idle:,} of {self.ranks:,}.")
        divided = self.placement.divided
        if divided:
            notes.append(
                f"Blocks with parts on several ranks: {len(divided):,}. Products with them need all of these ranks."
            )
        if self.ranks > 1 and self.batches_for_sums:
            notes.append(self._about_vectors())
        if self.memory is not None:
            notes.append(self._about_memory(self.memory))
            notes += self._about_large_blocks(self.memory)
        if self.whole is not None:
            notes.append(self._about_split(self.whole))
        if self.uncovered:
            names = ", ".join(self.uncovered)
            notes.append(f"Not covered, and not in these numbers: {names}. kfs.inspect says why.")
        return notes

    def _about_vectors(self) -> str:
        """Return a sentence on when sending inputs and gradients takes fewer bytes than sending sums."""
        text = "Sending inputs and gradients to owners takes fewer bytes than sending sums if there are fewer than "
        text += f"{self.batches_for_sums:.2g} batches of {self.batch:,} for each reduction"
        if self.same_input:
            parts = self.placement.parts
            once = [part for part in parts if part.side[0] != "A" or part.block not in self.same_input]
            triangles = sum(part.sent for part in once if part.is_factor)
            text += f" ({self._batches_for_sums(once):.2g} if inputs that layers share were sent and added up once, "
            text += f"which would leave {readable_size(triangles)} of triangles)"
        return text + "."

    def _about_memory(self, memory: int) -> str:
        """Return a sentence on the number of passes over the data that the memory allows."""
        subsets = self.subsets
        if subsets is not None:
            return f"With {readable_size(memory)} for each rank: {counted(len(subsets), 'pass')} over the data."
        needed = max(need for needs in self._needs() for need in needs.values())
        return (
            f"{readable_size(memory)} for each rank are not enough: one holds {readable_size(max(self.nbytes))}, and "
            f"a pass for one block needs {readable_size(needed)} more. Use more ranks, or a smaller max_dim."
        )

    def _about_large_blocks(self, memory: int) -> Iterator[str]:
        """Generate a sentence if there are blocks that `kfs.KFAC` refuses for their size."""
        sizes: dict[str, int] = {}
        for part in self.placement.parts:
            if part.is_factor and not all(part.diagonal):
                sizes[part.block] = sizes.get(part.block, 0) + part.summed
        large = {name: nbytes for name, nbytes in sizes.items() if nbytes > memory // SHARE}
        if large:
            name = max(large, key=lambda name: large[name])
            yield (
                f"Blocks whose dense factors take more than half of this, so that KFAC refuses them: {len(large):,}. "
                f"The largest, {name!r}, takes {readable_size(large[name])}. Use a smaller max_dim."
            )

    def _about_split(self, whole: Placement) -> str:
        """Return sentences on how splitting changes the approximation and what it saves."""
        names = {part.key for part in self.placement.parts}
        factors = [part for part in whole.parts if part.is_factor]
        gone = [part for part in factors if part.key not in names]
        before = [max(whole.total(lambda part: part.nbytes)), max(whole.total(lambda part: part.work))]
        after = [float(max(self.nbytes)), max(self.work)]
        return (
            f"Factors that are split into diagonal pieces: {len(gone):,} of {len(factors):,}. This changes the "
            "approximation: entries between pieces are zero. KFAC does not compute such factors yet. The largest "
            f"memory of a rank decreases from {readable_size(before[0])} to {readable_size(after[0])}, and the largest "
            f"number of operations from {readable_count(before[1])} to {readable_count(after[1])}."
        )

    def _largest(self, quantity: Callable[[Part], float]) -> float:
        """Return the quantity of the largest part, a lower bound on the maximum over ranks."""
        return max(map(quantity, self.placement.parts))

    def _vector_bytes(self, part: Part) -> float:
        """Return the bytes of inputs or gradients that a rank sends instead of sums, for one batch."""
        return self.batch * part.vectors * self.activation

    def _to_owners(self, quantity: Callable[[Part], float]) -> float:
        """Return the largest amount that a rank sends if each part goes to its owner rank, and own parts stay."""
        own = self.placement.total(quantity)
        return sum(own) - min(own)

    def _batches_for_sums(self, parts: Iterable[Part]) -> float:
        """Return the number of batches of inputs and gradients that take as many bytes as sums of dense factors."""
        dense = [part for part in parts if part.vectors]
        vectors = sum(self._vector_bytes(part) for part in dense)
        return sum(part.sent for part in dense) / vectors if dense else 0.0


def plan(
    model: Any,
    ranks: int,
    *,
    sample: Any = None,
    max_dim: int | None = None,
    eigen: bool = False,
    memory: int | None = None,
    batch: int | None = None,
    activations: torch.dtype | None = None,
    split: Split = None,
) -> Plan:
    """Plan what each rank would own, hold, compute and send, without running any of them.

    Args:
        model: A module on any device, including `meta`; a dictionary of shapes `(d_B, d_A)` by block name, in which a
            bias counts as a column; or the name of a language model, which need not be installed, such as
            `"Llama 3.1 8B"`, `"Qwen/Qwen3-8B"`, `"gemma-2-9b"` or `"gpt2-xl"`; an unknown name lists all of them.
            `"7B"` and `"70B"` are Llama 2, `"8B"` and `"405B"` Llama 3.1, `"1B"` and `"3B"` Llama 3.2, `"8x7B"` and
            `"8x22B"` Mixtral.
        ranks: Number of ranks.
        sample: For a module: a batch of inputs, as in `kfs.inspect`.
        max_dim: As in `kfs.KFAC`. By default, for named models, only the factors with the size of the vocabulary are
            diagonal.
        eigen: Whether owners keep eigenvectors and corrected eigenvalues (`kfs.EKFAC`) instead of inverses.
        memory: Bytes that are available on a rank. The plan shows how many passes over the data this requires.
        batch: Number of examples in a batch of one rank, or of tokens for named models. By default 2,048, or the number
            of examples of the sample.
        activations: Dtype of inputs and gradients. By default the dtype of the module, or bfloat16.
        split: Split dense factors into diagonal pieces of at most this many rows. With `"share"`, no piece has more
            bytes than the mean over ranks. This changes the approximation; the plan shows what it saves.

    Returns:
        A plan. Printing it shows bytes and operations of ranks, traffic, and owner ranks.

    Raises:
        ModelError: If the name of the model is unknown, or an argument is out of range.
        DtypeError: If the model has another type.

    Example:
        >>> plan({"fc1": (3, 5), "fc2": (2, 4)}, ranks=2).owners
        {('fc1', 'A'): 0, ('fc1', 'B'): 1, ('fc2', 'A'): 1, ('fc2', 'B'): 1}
        >>> llama = plan("7B", ranks=64)
        >>> llama.placement.imbalance < 1.05
        True
        >>> print(llama.describe().summary())
        KFAC of Llama 2 7B on 64 ranks: 291 blocks, 6,738,415,616 parameters, 69.5 GiB of factors
          max_dim=11008
    """
    # Validate the arguments.
    numbers = {"max_dim": max_dim, "memory": memory, "batch": batch, "split": None if split == "share" else split}
    for name, value in numbers.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            also = ", or 'share'" if name == "split" else ""
            raise ModelError(f"{name} is {value!r}.", f"Use an integer of at least 1{also}.")
    if activations is not None and not isinstance(activations, torch.dtype):
        raise ModelError(f"activations is {activations!r}.", "Use a dtype of PyTorch, such as torch.bfloat16.")

    # Assign the parts, and again in pieces if factors are split.
    source = source_of(model, sample, max_dim, eigen)
    placement = place(source.parts, ranks)
    whole = None
    if split is not None:
        whole = placement
        mean = sum(part.nbytes for part in whole.parts) / ranks
        widths = {part.key: _share(part, mean) if split == "share" else split for part in whole.parts}
        placement = place([piece for part in whole.parts for piece in part.pieces(widths[part.key])], ranks)

    dtype = activations or source.activations
    words = [] if source.max_dim is None else [f"max_dim={source.max_dim}"]
    words += [] if split is None else [f"split={split!r}"]
    return Plan(
        f"{'EKFAC' if eigen else 'KFAC'} of {source.name}",
        placement,
        (", ".join(words),) if words else (),
        batch or source.batch,
        dtype.itemsize,
        whole,
        source.same_input,
        source.uncovered,
        memory,
    )


def _share(part: Part, mean: float) -> int:
    """Return the largest number of rows of a piece whose bytes do not exceed the mean over ranks."""
    return max(1, isqrt(int(mean * part.size**2 / part.nbytes)))


def _divided(name: str, of_ranks: list[float], largest: float, shown: Callable[[float], str]) -> tuple[str, ...]:
    """Return a table row about a quantity that is divided among ranks."""
    total = sum(of_ranks)
    mean = total / len(of_ranks)
    return name, shown(total), shown(mean), shown(max(of_ranks)), f"{max(of_ranks) / mean:.2f}", shown(largest)
