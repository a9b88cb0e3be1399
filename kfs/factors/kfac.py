"""KFAC: the Kronecker-factored approximation of a curvature matrix, one block per parameter (with its bias).

It is the method of Martens & Grosse (2015), for any operation with parameters, and all curvature matrices of the paper.
The computation of factors lives in `kfs.factors.compute`, algebra with blocks in `kfs.factors.blocks`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, Unpack

import torch

from kfs.display.charts import Panel, draw_factors
from kfs.display.describe import Description, Table, counted, readable_size, times
from kfs.display.suggestions import ByName, suggest
from kfs.distributed import Ranks, Same, check_same
from kfs.distributed.collectives import fetched, joined
from kfs.errors import DistributedError, ModelError
from kfs.factors.accumulate.block_sums import BlockMap, BlockSums
from kfs.factors.audit import merge_audits
from kfs.factors.block import Block
from kfs.factors.blocks import chosen
from kfs.factors.blocks.block_diagonal import BlockDiagonal, kind_and_size
from kfs.factors.blocks.kronecker import Kronecker
from kfs.factors.blocks.stack import Stack, check_coverage, layouts_of_unused_rows, stacked, zero_blocks
from kfs.factors.checkpoint import Checkpoint
from kfs.factors.compute import LossScale, compute_sums, read_blocks, warn_of_wide
from kfs.factors.layout import Layout, Side
from kfs.factors.loading import loadable
from kfs.factors.settings import Advanced, Fisher, Settings, Sharing, Uncovered, check_names
from kfs.operators.space import Space
from kfs.problem.data import values_digest
from kfs.problem.risk import EmpiricalRisk, check_risk

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Always shown; other settings are shown if they differ from their default.
_ALWAYS = ("fisher", "sharing")


def describe_factors(about: str, blocks: Mapping[str, Block], settings: Settings, data: str) -> Description:
    """Describe an operator that has Kronecker factors, without reading their values.

    Args:
        about: The title.
        blocks: All blocks.
        settings: All settings.
        data: Description of the data, with the number of examples.
    """
    nbytes = readable_size(sum(block.nbytes for block in blocks.values()))
    counts = f"{data}, {counted(len(blocks), 'block')}, {nbytes} of factors"
    rows = []
    for block in blocks.values():
        layout = block.layout
        size = times(layout.matrix_shape if layout.groups > 1 else layout.matrix_shape[1:])
        operations = ", ".join(sorted(block.operations))
        sides = describe_side(block, "A"), describe_side(block, "B")
        rows.append((block.name, size, *sides, operations, readable_size(block.nbytes)))
    table = Table("blocks", ("block", "matrix", "A", "B", "operations", "bytes"), rows, ("bytes",))
    return Description(about, (_settings(settings), counts), (table,))


class _HasBlocks(Protocol):
    @property
    def blocks(self) -> Mapping[str, Block]: ...


class ShowsFactors:
    """Base of operators that have Kronecker factors and can draw them."""

    def plot(self: "_HasBlocks", names: Iterable[str] | None = None, *, most: int = 12) -> "list[Axes]":
        """Draw the factors `A` and `B` of every block as heat maps, into a new figure.

        Args:
            names: Blocks to draw. By default, all of them; if there are more than `most`, the first ones that are not
                just a vector, as biases and scales are.
            most: Maximum number of blocks to draw if `names` is not given.

        Returns:
            Axes of matplotlib: those of `A` and `B`, block by block.
        """
        blocks = self.blocks
        shown = chosen(names, blocks)
        if names is None and len(shown) > most:
            matrices = [name for name in shown if min(blocks[name].layout.matrix_shape[1:]) > 1]
            shown = (matrices or shown)[:most]
        panels = [Panel(name, blocks[name].A, blocks[name].B) for name in shown]
        return draw_factors(panels, left_out=0 if names is not None else len(blocks) - len(shown))


def describe_side(block: Block, side: Side) -> str:
    """Return the kind and size of a factor of a block."""
    _, rows, columns = block.layout.matrix_shape
    kind = "diagonal" if block.is_diagonal(side) else "dense"
    if side == "B" and block.sums.forward_only:
        kind = "identity"
    return kind_and_size(kind, columns if side == "A" else rows)


def _settings(settings: Settings) -> str:
    values = {f.name: getattr(settings, f.name) for f in fields(settings)}
    default = {f.name: f.default for f in fields(settings)}
    return ", ".join(f"{name}={v!r}" for name, v in values.items() if name in _ALWAYS or v != default[name])


_SAME_SETTINGS = "Pass the same arguments in all processes."


@loadable
class KFAC(ShowsFactors, BlockDiagonal):
    """Kronecker factors of every parametric operation of a model.

    Args:
        risk: Model, loss, data and parameters.
        fisher: The curvature matrix to approximate: `"type-2"` (the exact Fisher), `"ggn"` (the generalized
            Gauss-Newton matrix, which is the same for most losses), `"mc"`, also called `"type-1"` (the Fisher, with
            labels drawn from the model's likelihood), `"empirical"` (with the given labels), or `"forward-only"`
            (gradients are replaced by the identity at every position; with `"reduce"`, the sums over positions are
            replaced, so `B` is the identity times the average of `1 / S^2` over examples with `S` positions, as if
            positions were averaged).
        sharing: How to treat positions that share a weight (pixels, tokens): `"expand"` treats them like further
            examples, `"reduce"` sums over them first. One value for all parameters, or a dictionary by the name of a
            parameter or module; parameters that are not in it expand.
        mc_samples: Number of labels to draw per example for `"mc"`.
        seed: Seed for drawing labels. Draws depend only on the seed, the example and the sample.
        max_dim: Factors wider than this keep only their diagonal. A warning lists them.
        uncovered: What to do about parameters that no rule covers: `"error"`, `"skip"` (leave them out of this
            operator), or `"diagonal"` (compute the exact diagonal of their curvature, slowly).
        checkpoint: File for intermediate results, or a `Checkpoint` that also sets how often to write. If the file
            exists, the computation resumes from it.
        **advanced: The settings below.

    Advanced:
        joint_bias: Whether a bias shares the block of its weight.
        batch_axis: Position of the batch axis in inputs, if it is not the first. In activations, it is measured by the
            audit; without audit, it is assumed to be the same.
        first_datum: Index of the first example, for draws, if these data are part of a larger set.
        columns_at_once: Number of columns that are sent back together. More columns take more memory.
        factor_device: Device of the factors, if not the model's. `"cpu"` saves GPU memory and takes longer.
        factor_dtype: Dtype of the factors. By default, the model's, or float32 for half precision. Sums are always
            accumulated in float32 or better.
        products: Precision in which outer products for dense factors are computed, for models in float32 or half
            precision. `"auto"` multiplies half precision directly, with results in float32, and float32 according to
            `torch.backends.cuda.matmul`. `"float32"` converts half precision first, and does not use TF32. `"tf32"`
            multiplies float32 in TF32. `"bf16"` rounds float32 to bfloat16 first, which is fastest: an entry of a
            factor is off by at most about `2^-7` of its sum of absolute products. A CPU has no TF32, and is not faster
            with `"bf16"`. Eigenvalues of `EKFAC` are computed as with `"auto"`.
        audit: Whether to check, on a few examples of the first batch (and of the first batch of every other shape),
            that capture reproduces what the model computes; see `kfs.factors.audit.audit`. Without an audit, the batch
            axis is guessed from lengths of axes.
        replay: Whether passes over batches of one shape are recorded as a CUDA graph, from the third one on, if the
            model is on a GPU and more than a few batches follow; see `kfs.runtime.cuda_graphs`. Passes that cannot be
            recorded, because they depend on values of data, run normally; the logger `kfs.factors` reports this.
        memory: Maximum bytes of these graphs. By default, all that is available.
        placement: Where factors are stored, if several processes share the risk. With `"replicated"`, every process has
            all blocks. With `"owner"`, each block is owned by one process, which inverts and decomposes it. Then all
            processes call the same methods, as for the risk, and get the same results.
        factor_memory: Maximum bytes of the sums of one pass over the data. If blocks have more, there are several
            passes, each for some of the blocks. Results are the same to the last bit.

    Attributes:
        blocks: Blocks by name. Each has `A` and `B`; if another process owns it, use `fetch`.
        owners: The rank that owns each block, by name; empty if all processes have all blocks.
        num_data: Number of examples seen.
        settings: All of the above.
        loss: Name, reduction and scale of the loss, and a digest of its settings.
        count: The divisor of a mean over all targets seen.
        audit: The report of the audit; `None` if there was none, or if factors were loaded.
        computed_at: Digest of the parameter values at which it was computed; empty if unknown.

    Raises:
        ModelError: If a parameter is not covered.
        DataError: If a factor is not finite, or the batch axis is not found where it matters.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
        >>> risk = EmpiricalRisk(model, torch.nn.CrossEntropyLoss(), (torch.rand(10, 4), torch.randint(2, (10,))))
        >>> K = KFAC(risk)
        >>> list(K.blocks), K.blocks["0"].A.shape, K.blocks["0"].B.shape
        (['0', '2'], torch.Size([5, 5]), torch.Size([3, 3]))
        >>> K
        KFAC of Sequential with CrossEntropyLoss (mean): 23 x 23, float32 on cpu, symmetric
          fisher='type-2', sharing='expand'
          10 examples, 2 blocks, 216 B of factors
        >>> (K @ risk.gradient())["2.bias"].shape
        torch.Size([2])
    """

    symmetric = True
    _lists = ("blocks",)
    risk_of: partial[EmpiricalRisk] | None = None  # `None` in copies and after loading, which have no data

    def __init__(
        self,
        risk: EmpiricalRisk,
        fisher: Fisher = "type-2",
        sharing: Sharing | Mapping[str, Sharing] = "expand",
        *,
        mc_samples: int = 1,
        seed: int = 0,
        max_dim: int | None = None,
        uncovered: Uncovered = "error",
        checkpoint: str | Path | Checkpoint | None = None,
        **advanced: Unpack[Advanced],
    ) -> None:
        check_risk(risk)
        with risk.ranks.agreed("KFAC"):
            # Validate all settings before any computation.
            check_names(advanced, ("fisher", "sharing", "mc_samples", "seed", "max_dim", "uncovered", "checkpoint"))
            self.settings = Settings(
                fisher,
                sharing,
                mc_samples,
                seed,
                max_dim=max_dim,
                uncovered=uncovered,
                **advanced,
            )
            # Settings determine the number of passes, each of which compares the model over ranks, so compare them
            # first.
            if risk.ranks.are_several:
                check_same(risk.ranks, "settings", {"Settings": Same(self.settings.all(), _SAME_SETTINGS)})
            self._check_names(risk)
            checkpoint = checkpoint if isinstance(checkpoint, Checkpoint | None) else Checkpoint(checkpoint)
            blocks, owners, progress = compute_sums(risk, self.settings, checkpoint)
            # Create the space of parameters, blocks and counts.
            covered = {name for block in blocks for name in block.layout.params}
            # Other parameters are not used and have blocks of zeros, unless uncovered parameters were skipped.
            all_count = uncovered != "skip"
            shapes = {n: p.shape for n, p in risk.params.items() if all_count or n in covered}
            space = Space(shapes, risk.dtype, risk.device)
            super().__init__(space, None, risk.ranks if owners else None)
            self.owners = owners
            self._of = risk.about
            self.risk_of = risk.with_model
            self.computed_at = values_digest(risk.params[name] for name in space.shapes)
            self.loss = LossScale.of(risk)
            self.count = progress.count
            self.num_data = progress.num_data
            self.audit = progress.audit
            place_of = self._order()
            blocks.sort(key=lambda block: place_of(block.layout))
            self.blocks = ByName({block.layout.name: Block(block) for block in blocks}, "block")
            self._update_scale()
            warn_of_wide(blocks, self.settings, stacklevel=3)

    @property
    def own_stacks(self) -> list[Stack]:
        """The blocks of this process as Kronecker products, stacked by size."""
        if self._stacks is None:
            here = [block for block in self.blocks.values() if block.sums.is_local]
            parts = [(block.layout, block.structure()) for block in here]
            layouts = [block.layout for block in self.blocks.values()]
            # Rank 0 has the blocks of zeros for parameter rows that are not used.
            zeros = zero_blocks(layouts, self.domain) if self.ranks.rank == 0 else []
            self._stacks = stacked([*parts, *zeros])
            self._share_memory()
        return self._stacks

    def describe(self) -> Description:
        """Describe model, loss, settings, data and blocks."""
        return describe_factors(self.about, self.blocks, self.settings, counted(self.num_data, "example"))

    def update(self, risk: EmpiricalRisk) -> Self:
        """Add more data, in place; if it fails, nothing is changed.

        Args:
            risk: The same model, loss and parameters with other data. Draws continue where they ended.

        Returns:
            This object. It equals a KFAC computed from all data at once.
        """
        with (self.ranks if self.ranks.are_several else getattr(risk, "ranks", self.ranks)).agreed("update"):
            check_risk(risk)
            self.loss.check_same(LossScale.of(risk))
            self.check_ranks(risk)
            # Draws continue after those of the data seen so far.
            settings = replace(self.settings, first_datum=self.settings.first_datum + self.num_data)
            blocks, owners, progress = compute_sums(risk, settings, owners=self.owners)
            skips = self.settings.uncovered == "skip"
            named = _params(block.layout for block in blocks) if skips else set(risk.params)
            self._add(blocks, named, progress.num_data, progress.count, owners)
        self.audit = merge_audits(self.audit, progress.audit)
        return self

    def merge(self, other: "KFAC") -> Self:
        """Add the factors of another KFAC, computed from other data, in place.

        Args:
            other: A KFAC of the same model, loss and settings. With `"mc"`, give it another `first_datum`, or draws
                repeat.

        Returns:
            This object.
        """
        with self.ranks.agreed("merge"):
            if not isinstance(other, KFAC):
                raise ModelError(f"A {type(other).__name__} cannot be merged with a KFAC.", "Merge two of one kind.")
            self.settings.check_same(other.settings)
            self.loss.check_same(other.loss)
            if self.ranks.group is not other.ranks.group or self.owners != other.owners:
                raise ModelError(
                    "The blocks have different owners.", "Merge two with the same owners, or K.gathered() of both."
                )
        theirs = [block.sums for block in other.blocks.values()]
        self._add(theirs, set(other.domain.shapes), other.num_data, other.count, self.owners)
        self.audit = merge_audits(self.audit, other.audit)
        return self

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """Move all factors to a device, or convert them, in place."""
        for block in self.blocks.values():
            block.sums.to(device, dtype)
        self._move_space(device, dtype)
        self._update_scale()
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of copies and pickles, without the data."""
        return self.__dict__ | {"risk_of": None}

    def shared(self) -> "KFAC":
        """Return a shallow copy that shares tensors; a tensor that one of them replaces stays in the other."""
        K = KFAC.__new__(KFAC)
        K.__dict__ |= self.__dict__
        shared = {name: replace(block, sums=block.sums.shared()) for name, block in self.blocks.items()}
        K.blocks = ByName(shared, "block")
        K._stacks = None
        return K

    def fetch(self, name: str) -> Block:
        """Return a block with its factors from any owner. If blocks have owners, all processes must call it.

        Args:
            name: The block's name.

        Example:
            >>> risk = EmpiricalRisk(torch.nn.Linear(3, 2), torch.nn.MSELoss(), (torch.rand(9, 3), torch.rand(9, 2)))
            >>> KFAC(risk, placement="owner").fetch("weight").A.shape
            torch.Size([4, 4])
        """
        self._check_same(name=name)
        block = self.blocks[name]
        if not self.ranks.are_several:
            return block
        state = {"blocks": [block.sums.state()] if block.sums.is_local else []}
        (found,) = fetched(joined(self.ranks, state, self._lists))["blocks"]
        return replace(block, sums=BlockSums.from_state(found))

    def check_ranks(self, risk: EmpiricalRisk) -> None:
        """Raise if a risk belongs to other processes than those that own blocks.

        Raises:
            DistributedError: If the process groups differ.
        """
        if self.ranks.are_several and self.ranks.group is not risk.ranks.group:
            raise DistributedError(
                f"The blocks are owned by {self.ranks.size} processes, but the risk has another process group.",
                "Pass a risk whose data are split over the same group, or use K.gathered().",
            )

    def _add(
        self, blocks: Iterable[BlockSums], named: set[str], num_data: int, count: float, owners: Mapping[str, int]
    ) -> None:
        """Add sums of other data, which may use parameters, or rows of them (experts), that these data do not use."""
        others = {block.layout.name: block for block in blocks}
        others |= {n: others[n].turned_to(b.layout) for n, b in self.blocks.items() if n in others}
        # Both must have blocks of the same kind for the same parameters.
        mine = [block.layout for block in self.blocks.values()]
        block_map = BlockMap(mine)
        fit = all(block_map.admit(block.layout) for block in others.values())
        if not fit or named != set(self.domain.shapes):
            raise ModelError(
                f"The blocks differ: {list(self.blocks)} and {list(others)}.", "Use the same model and parameters."
            )
        # Compute all sums before replacing the first one, so that an error leaves this object unchanged.
        merged = {name: block.shared() for name, block in others.items()}
        merged |= {n: b.sums.plus(others[n]) for n, b in self.blocks.items() if n in others}
        for name, sums in merged.items():
            self.blocks.setdefault(name, Block(sums)).sums = sums
        place_of = self._order()
        by_place = sorted(self.blocks.items(), key=lambda item: place_of(item[1].layout))
        self.blocks = ByName(dict(by_place), "block")
        self.owners = dict(owners)
        self.num_data += num_data
        self.count += count
        self._update_scale()

    def _about(self) -> dict[str, Any]:
        """Return the readable part of a file's header."""
        settings = self.settings.state()
        return super()._about() | {
            "loss": f"{self.loss.name}, reduction={self.loss.reduction!r}",
            "fisher": settings["fisher"],
            "sharing": settings["sharing"],
            "num_data": self.num_data,
            "seed": settings["seed"],
        }

    def _state(self) -> dict[str, Any]:
        """Return the state for a file, without the space."""
        return {
            "settings": self.settings.state(),
            "of": self.of,
            "computed_at": self.computed_at,
            "loss": asdict(self.loss),
            "count": self.count,
            "num_data": self.num_data,
            "blocks": [block.sums.state() for block in self.blocks.values() if block.sums.is_local],
        }

    @classmethod
    def _from_state(cls, state: Any, space: Space, ranks: Ranks | None = None) -> Self:
        """Return the object from its state. If there are several ranks, each reads the blocks that it owns."""
        K = cls.__new__(cls)
        BlockDiagonal.__init__(K, space, None, ranks)
        K._of = str(state["of"])
        K.computed_at = str(state["computed_at"])
        K.settings = Settings.from_state(state["settings"])
        if K.ranks.are_several:
            K.settings = replace(K.settings, placement="owner")
        K.loss = LossScale(**state["loss"])
        K.count = float(state["count"])
        K.num_data = int(state["num_data"])
        K.audit = None
        blocks, K.owners = read_blocks(state["blocks"], K.ranks)
        place_of = K._order()
        blocks.sort(key=lambda block: place_of(block.layout))
        layouts = [block.layout for block in blocks]
        check_coverage([*layouts, *layouts_of_unused_rows(layouts, space)], space)
        K.blocks = ByName({block.layout.name: Block(block) for block in blocks}, "block")
        K._update_scale()
        return K

    def _update_scale(self) -> None:
        """Set the reduction factor of all blocks, after data were added."""
        for block in self.blocks.values():
            block.reduction_factor = self.loss.reduction_factor(self.count)
        self._stacks = None
        self._list_blocks()

    def _share_memory(self) -> None:
        """Make sums views of the stacked blocks, so that they are stored once."""
        for stack in self.own_stacks:
            structure = stack.structure
            for layout, place in stack.slices():
                block = self.blocks.get(layout.name)
                if block is None or len(block.sums.roles) > 1 or not isinstance(structure, Kronecker):
                    continue
                role = block.sums.roles["A"]
                for s, factor in ((role.input, structure.A), (role.gradient, structure.B)):
                    if factor.kind != "identity" and factor.values.dtype == s.total.dtype:
                        s.total = factor.values[place]

    def _check_names(self, risk: EmpiricalRisk) -> None:
        """Raise if `sharing` names parameters that do not exist."""
        if isinstance(self.settings.sharing, Mapping):
            known = set(risk.params) | {name.rpartition(".")[0] for name in risk.params}
            unknown = [name for name in self.settings.sharing if name not in known]
            if unknown:
                raise ModelError(f"sharing has unknown names {unknown}.", suggest(unknown, sorted(known)))


def _params(layouts: Iterable[Layout]) -> set[str]:
    """Return the names of all parameters in some layouts."""
    return {name for layout in layouts for name in layout.params}
