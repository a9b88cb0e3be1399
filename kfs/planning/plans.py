"""What many processes will hold, compute and send, before any of them runs.

Owners are those that `kfs.distributed.placement` chooses. Bytes that are sent are those of one rank. A ring of `W`
ranks adds up `T` bytes for all of them by sending `2 (W - 1) / W * T` each, and half as many if each number is wanted
by one rank only.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf, isqrt
from typing import Any, Literal, NamedTuple

import torch

from kfs.describing import DescribedByTables, Description, Table, counted, readable_count, readable_size
from kfs.distributed.placement import DECOMPOSITION, Part, Placement, passes, place
from kfs.errors import ModelError
from kfs.planning.model_parts import source_of

Split = int | Literal["share"] | None
_SHOWN = 8  # ranks, if there are many
_OTHER = "sums to all ranks, as squares (kfac-pytorch)"


class Sent(NamedTuple):
    """Something that ranks send.

    Attributes:
        what: What it is.
        when: How often it is sent.
        nbytes: How many bytes one rank sends; the most that any of them does.
    """

    what: str
    when: str
    nbytes: float


@dataclass(frozen=True, repr=False)
class Plan(DescribedByTables):
    """What ranks will hold, compute and send; printing it shows it. See `plan`.

    Attributes:
        of: Model, or what else it is a plan for.
        placement: Owners of all parts.
        settings: What was asked for, in words.
        batch: Number of data (or tokens) in a batch of one rank.
        activation: Bytes of a number in inputs and gradients.
        whole: Owners of whole factors, if wide ones are split.
        same_input: Blocks whose inputs are those of another block.
        uncovered: Parameters that have no block.
        memory: Bytes that a rank has; `None` if it does not matter.
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
        """How many ranks there are."""
        return self.placement.ranks

    @property
    def owners(self) -> dict[tuple[str, str], int]:
        """The rank that owns a part, by block and side."""
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
        """Bytes of the sums for all factors. Every rank has them while it goes through its data, if in one pass."""
        return sum(part.summed for part in self.placement.parts if part.is_factor)

    @property
    def parameters(self) -> int:
        """Number of parameters that blocks cover."""
        counts: dict[str, int] = {}
        for part in (self.whole or self.placement).parts:
            if part.is_factor:
                counts[part.block] = counts.get(part.block, part.groups) * part.size
        return sum(counts.values())

    @property
    def subsets(self) -> list[list[str]] | None:
        """Blocks by pass over the data, such that a rank never needs more than `memory`; `None` if that is impossible.

        A rank has the sums of the blocks of one pass, and at most all that it holds in the end. Passes for eigenvalues
        come after those for factors; in them, a rank has eigenvectors and sums of eigenvalues.
        """
        memory = inf if self.memory is None else self.memory - max(self.nbytes)
        try:
            return [subset for needs in self._needs() for subset in passes(needs, memory)]
        except ModelError:
            return None

    def _needs(self) -> list[dict[str, int]]:
        """Return bytes that each block needs in its pass for factors, and in that for eigenvalues, if there is one."""
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
        """Below so many batches for each reduction, sending inputs and gradients takes fewer bytes than sending sums.

        The sum for a dense factor has `d (d + 1) / 2` numbers. In a batch, `n` vectors of `d` numbers are added to it.
        """
        return self._batches_for_sums(self.placement.parts)

    @property
    def traffic(self) -> tuple[Sent, ...]:
        """What ranks send."""
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

    def describe(self) -> Description:
        """Describe bytes and operations of ranks, what they send, and who owns what."""
        blocks = {part.block for part in self.placement.parts}
        title = f"{self.of} on {counted(self.ranks, 'rank')}: {counted(len(blocks), 'block')}, "
        title += f"{counted(self.parameters, 'parameter')}, {readable_size(self.summed)} of factors"
        tables = (self._totals(), self._sent(), self._ranks())
        return Description(title, self.settings, tables, tuple(self._notes()))

    def _totals(self) -> Table:
        """Show what all ranks hold and compute, and how well it is divided."""
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

    def _ranks(self) -> Table:
        """Show what ranks own; of many, the first ones."""
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
        """Return sentences about what follows."""
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
        if self.whole is not None:
            notes.append(self._about_split(self.whole))
        if self.uncovered:
            names = ", ".join(self.uncovered)
            notes.append(f"Not covered, and not in these numbers: {names}. kfs.inspect says why.")
        return notes

    def _about_vectors(self) -> str:
        """Say when it pays to send inputs and gradients."""
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
        """Say how many passes there are."""
        subsets = self.subsets
        if subsets is not None:
            return f"With {readable_size(memory)} for each rank: {counted(len(subsets), 'pass')} over the data."
        needed = max(need for needs in self._needs() for need in needs.values())
        return (
            f"{readable_size(memory)} for each rank are not enough: one holds {readable_size(max(self.nbytes))}, and "
            f"a pass for one block needs {readable_size(needed)} more. Use more ranks, or a smaller max_dim."
        )

    def _about_split(self, whole: Placement) -> str:
        """Say what splitting changes and buys."""
        names = {part.key for part in self.placement.parts}
        factors = [part for part in whole.parts if part.is_factor]
        gone = [part for part in factors if part.key not in names]
        before = [max(whole.total(lambda part: part.nbytes)), max(whole.total(lambda part: part.work))]
        after = [float(max(self.nbytes)), max(self.work)]
        return (
            f"Factors that are split into diagonal pieces: {len(gone):,} of {len(factors):,}. This changes the "
            "approximation: entries between pieces count as zero, and KFAC computes no such factors so far. It buys: "
            f"the most that a rank holds falls from {readable_size(before[0])} to {readable_size(after[0])}, and its "
            f"operations from {readable_count(before[1])} to {readable_count(after[1])}."
        )

    def _largest(self, quantity: Callable[[Part], float]) -> float:
        """Return the largest part. No rank can do with less than the one that owns it."""
        return max(map(quantity, self.placement.parts))

    def _vector_bytes(self, part: Part) -> float:
        """Return what a rank sends in place of sums, for one batch."""
        return self.batch * part.vectors * self.activation

    def _to_owners(self, quantity: Callable[[Part], float]) -> float:
        """Return the most that a rank sends if everything goes to its owner, and nothing to itself."""
        own = self.placement.total(quantity)
        return sum(own) - min(own)

    def _batches_for_sums(self, parts: Iterable[Part]) -> float:
        """Return how many batches of inputs and gradients take as many bytes as sums of dense factors."""
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
    """Say what each of many ranks will own, hold, compute and send, if blocks have owners.

    Args:
        model: A module, on any device, `meta` included; a dictionary of shapes `(d_B, d_A)` by the name of a block,
            in which a bias counts as a column; or the name of a language model that need not be here: `"7B"`,
            `"70B"` (Llama 2), `"405B"` (Llama 3.1) or `"8x7B"` (Mixtral).
        ranks: How many there are.
        sample: For a module: a batch of inputs, as in `kfs.inspect`.
        max_dim: As in `kfs.KFAC`. By default, the sides of named models that have the size of the vocabulary are
            diagonal, and no others.
        eigen: Whether owners keep eigenvectors and corrected eigenvalues (`kfs.EKFAC`), or inverses.
        memory: Bytes of a rank for all of this. The plan says how many passes over the data they allow.
        batch: Number of data in a batch of one rank; for named models, of tokens. By default 2,048, or those of the
            sample.
        activations: Precision of inputs and gradients. By default that of the module, or bfloat16.
        split: Split dense factors into diagonal pieces, of at most so many rows, or `"share"`: such that none has more
            bytes than the mean of ranks. It changes the approximation; the plan says what it buys.

    Returns:
        A table. Printing it shows bytes and operations of ranks, traffic, and owners.

    Raises:
        ModelError: If there is no such model, or an argument is out of range.
        DtypeError: If the model is something else.

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
    numbers = {"max_dim": max_dim, "memory": memory, "batch": batch, "split": None if split == "share" else split}
    for name, value in numbers.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            also = ", or 'share'" if name == "split" else ""
            raise ModelError(f"{name} is {value!r}.", f"Use an integer of at least 1{also}.")
    if activations is not None and not isinstance(activations, torch.dtype):
        raise ModelError(f"activations is {activations!r}.", "Use a type of PyTorch, such as torch.bfloat16.")
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
    """Return how many rows a piece may have, such that it has no more bytes than the mean of ranks."""
    return max(1, isqrt(int(mean * part.size**2 / part.nbytes)))


def _divided(name: str, of_ranks: list[float], largest: float, shown: Callable[[float], str]) -> tuple[str, ...]:
    """Return a row about something that is divided among ranks."""
    total = sum(of_ranks)
    mean = total / len(of_ranks)
    return name, shown(total), shown(mean), shown(max(of_ranks)), f"{max(of_ranks) / mean:.2f}", shown(largest)
