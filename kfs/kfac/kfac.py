"""KFAC: the Kronecker-factored approximation of a curvature matrix, one block per parameter (with its bias)."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeVar

import torch

from kfs.errors import DataError, KfsWarning, ModelError
from kfs.kfac.blocks import Block, Pair
from kfs.kfac.layout import Layout
from kfs.kfac.scaffold import Result, kfac
from kfs.kfac.settings import Fisher, Settings, Sharing, Uncovered
from kfs.kfac.storage.checkpoint import Checkpoint, Journal, details
from kfs.kfac.structures.block_diagonal import BlockDiagonal
from kfs.kfac.structures.kronecker import Kronecker
from kfs.kfac.structures.stack import Stack, check_coverage, layouts_of_unused_rows, stacked, zero_block
from kfs.kfac.structures.structure import Structure
from kfs.kfac.sums.outer_products import Moment
from kfs.kfac.uncovered import diagonal_of_uncovered
from kfs.operators.space import Space
from kfs.risk import EmpiricalRisk

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class LossScale:
    """What remains of a loss after factors were computed: its name, how it scales them, a digest of its settings."""

    name: str
    reduction: str
    scale: float
    details: str

    @classmethod
    def of(cls, risk: EmpiricalRisk) -> "LossScale":
        """Describe the loss of a risk."""
        return cls(risk.loss.name, risk.loss.reduction, risk.loss.scale, details(risk.loss))

    def reduction_factor(self, count: float) -> float:
        """Return `R`, given the count of all targets."""
        return self.scale if self.reduction == "sum" else self.scale / count


class KFAC(BlockDiagonal):
    """Kronecker factors of every parametric operation of a model.

    Args:
        risk: Model, loss, data and parameters.
        fisher: Which curvature matrix is approximated: `"type-2"` (the Fisher, exactly), `"ggn"` (the generalized
            Gauss-Newton matrix, which is the same for most losses), `"mc"` (the Fisher, with labels drawn from the
            model's likelihood), `"empirical"` (with the labels at hand), or `"forward-only"` (gradients replaced by
            the identity).
        sharing: How positions that share a weight (pixels, tokens) enter: `"expand"` treats them like further data,
            `"reduce"` sums over them first. For all parameters, or by the name of a parameter or module (others
            expand).
        mc_samples: Draws per datum for `"mc"`.
        seed: Of the draws. They depend on seed, datum and draw alone.
        joint_bias: Whether a bias shares the block of its weight.
        max_dim: Factors wider than this keep their diagonal only, which is announced by a warning.
        uncovered: What to do about parameters that no rule covers: `"error"`, `"skip"` (leave them out of this
            operator), or `"diagonal"` (compute the exact diagonal of their curvature, slowly).
        batch_axis: Where the batch axis is in activations, if it is not first; `"reduce"` needs to know.
        first_datum: Index of the first datum, for draws, if these data are a part of a larger set.
        columns_at_once: How many backpropagated vectors are sent back together: more take more memory.
        factor_device: Where factors live, if not with the model: `"cpu"` saves memory of a GPU, and takes longer.
        factor_dtype: Precision of the factors, if not the model's (or float32 for half precision). They are summed up
            in float32 or better in any case.
        checkpoint: Where to write intermediate results, and to resume from if they are there: a path, or a
            `Checkpoint` that also says how often.

    Attributes:
        blocks: Blocks by name. Each has `A` and `B`.
        num_data: How many data were seen.
        settings: All of the above.

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
        >>> (K @ risk.gradient())["2.bias"].shape
        torch.Size([2])
    """

    symmetric = True

    def __init__(
        self,
        risk: EmpiricalRisk,
        fisher: Fisher = "type-2",
        sharing: Sharing | Mapping[str, Sharing] = "expand",
        *,
        mc_samples: int = 1,
        seed: int = 0,
        joint_bias: bool = True,
        max_dim: int | None = None,
        uncovered: Uncovered = "error",
        batch_axis: int | None = None,
        first_datum: int = 0,
        columns_at_once: int | None = None,
        factor_device: str | torch.device | None = None,
        factor_dtype: torch.dtype | None = None,
        checkpoint: str | Path | Checkpoint | None = None,
    ) -> None:
        """Compute all factors."""
        self.settings = Settings(
            fisher,
            sharing,
            mc_samples,
            seed,
            joint_bias,
            max_dim,
            uncovered,
            batch_axis,
            first_datum,
            columns_at_once,
            None if factor_device is None else str(factor_device),
            factor_dtype,
        )
        self._check_names(risk)
        checkpoint = checkpoint if isinstance(checkpoint, Checkpoint | None) else Checkpoint(checkpoint)
        blocks, result = _computed(risk, self.settings, checkpoint)
        covered = {name for block in blocks for name in block.layout.params}
        space = Space({n: p.shape for n, p in risk.params.items() if n in covered}, risk.dtype, risk.device)
        super().__init__(space, None)
        self._loss = LossScale.of(risk)
        self._count, self.num_data = result.count, result.num_data
        order = {name: place for place, name in enumerate(risk.params)}
        self.blocks = {b.name: b for b in sorted(blocks, key=lambda b: (order[b.layout.weight], b.layout.rows))}
        self._scale()
        warn_of_wide(self.blocks.values(), self.settings, stacklevel=3)
        self._complete(risk, checkpoint)

    @property
    def stacks(self) -> list[Stack]:
        """The blocks as Kronecker products, those of one size together in memory."""
        if self._stacks is None:
            parts: list[tuple[Layout, Structure]] = [(b.layout, b.structure()) for b in self.blocks.values()]
            unused = layouts_of_unused_rows([layout for layout, _ in parts], self.domain)
            self._stacks = stacked([*parts, *((layout, zero_block(layout, self.domain)) for layout in unused)])
            self._share_memory()
        return self._stacks

    def update(self, risk: EmpiricalRisk) -> Self:
        """Add more data, in place; if something goes wrong, nothing is changed.

        Args:
            risk: The same model, loss and parameters with other data. Draws continue where they ended.

        Returns:
            This object. It equals one that was computed from all data at once.
        """
        self._check_loss(risk)
        s = replace(self.settings, first_datum=self.settings.first_datum + self.num_data)
        blocks, result = _computed(risk, s)
        self._add({block.name: block for block in blocks}, result.num_data, result.count)
        return self

    def merge(self, other: "KFAC") -> Self:
        """Add what another object computed from other data, in place.

        Args:
            other: Of the same model, loss and settings; with `"mc"`, give it another `first_datum`, or draws repeat.

        Returns:
            This object.
        """
        if isinstance(other, type(self)) is not isinstance(self, type(other)):
            raise ModelError(
                f"A {type(other).__name__} cannot be merged with a {type(self).__name__}.", "Merge two of one kind."
            )
        self._check_settings(other)
        self._add(other.blocks, other.num_data, other._count)
        return self

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """Move all factors to a device, or convert them, in place."""
        for block in self.blocks.values():
            for pair in block.pairs.values():
                for moment in (pair.input, pair.gradient):
                    moment.total = moment.total.to(device=device, dtype=dtype)
        self._move_space(device, dtype)
        self._stacks = None
        return self

    def _add(self, blocks: Mapping[str, Block], num_data: int, count: float) -> None:
        """Add raw sums of other data."""
        if {n: b.layout for n, b in self.blocks.items()} != {n: b.layout for n, b in blocks.items()}:
            raise ModelError(
                f"The blocks differ: {list(self.blocks)} and {list(blocks)}.", "Use the same model and parameters."
            )
        merged = {
            name: {side: pair.merge(blocks[name].pairs[side]) for side, pair in block.pairs.items()}
            for name, block in self.blocks.items()
        }
        for name, pairs in merged.items():
            self.blocks[name].pairs = pairs
            self.blocks[name].operations |= blocks[name].operations
        self.num_data, self._count = self.num_data + num_data, self._count + count
        self._scale()

    def _complete(self, risk: EmpiricalRisk, checkpoint: Checkpoint | None = None) -> None:
        """Do what remains to be done after the factors were computed: nothing here."""

    def _check_loss(self, risk: EmpiricalRisk) -> None:
        """Refuse data for another loss."""
        theirs = LossScale.of(risk)
        if theirs != self._loss:
            raise ModelError(f"The losses differ: {self._loss} and {theirs}.", "Use the same loss for all data.")

    def _check_settings(self, other: "KFAC") -> None:
        """Refuse what was computed in another way."""
        mine, theirs = (replace(k.settings, first_datum=0) for k in (self, other))
        if mine != theirs:
            raise ModelError(f"The settings differ: {mine} and {theirs}.", "Merge what was computed in the same way.")
        if self._loss != other._loss:
            raise ModelError(f"The losses differ: {self._loss} and {other._loss}.", "Use the same loss for all data.")

    def _about(self) -> dict[str, Any]:
        """Return what people want to see in a file's header."""
        settings = self.settings.state()
        return super()._about() | {
            "loss": f"{self._loss.name}, reduction={self._loss.reduction!r}",
            "fisher": settings["fisher"],
            "sharing": settings["sharing"],
            "num_data": self.num_data,
            "seed": settings["seed"],
        }

    def _state(self) -> dict[str, Any]:
        """Return everything but the space, for a file."""
        return {
            "settings": self.settings.state(),
            "loss": asdict(self._loss),
            "count": self._count,
            "num_data": self.num_data,
            "blocks": [block.state() for block in self.blocks.values()],
        }

    @classmethod
    def _from_state(cls, state: Any, space: Space) -> "KFAC":
        """Undo `_state`."""
        K = cls.__new__(cls)
        BlockDiagonal.__init__(K, space, None)
        K.settings, K._loss = Settings.from_state(state["settings"]), LossScale(**state["loss"])
        K._count, K.num_data = float(state["count"]), int(state["num_data"])
        blocks = list(map(Block.from_state, state["blocks"]))
        layouts = [block.layout for block in blocks]
        check_coverage([*layouts, *layouts_of_unused_rows(layouts, space)], space)
        K.blocks = {block.name: block for block in blocks}
        K._scale()
        return K

    def _scale(self) -> None:
        """Tell blocks the reduction factor of all data seen."""
        for block in self.blocks.values():
            block.reduction_factor = self._loss.reduction_factor(self._count)
        self._stacks = None

    def _share_memory(self) -> None:
        """Let raw sums live where blocks of one size were put together, so that they are stored once."""
        for stack in self.stacks:
            structure = stack.structure
            for layout, part in stack.slices():
                block = self.blocks.get(layout.name)
                if block is None or set(block.pairs) != {"A"} or not isinstance(structure, Kronecker):
                    continue
                pair = block.pairs["A"]
                for moment, factor in ((pair.input, structure.A), (pair.gradient, structure.B)):
                    if factor.kind != "identity" and factor.values.dtype == moment.total.dtype:
                        moment.total = factor.values[part].reshape(moment.total.shape)

    def _check_names(self, risk: EmpiricalRisk) -> None:
        """Refuse weight sharing for parameters that do not exist."""
        if isinstance(self.settings.sharing, Mapping):
            known = set(risk.params) | {name.rpartition(".")[0] for name in risk.params}
            unknown = [name for name in self.settings.sharing if name not in known]
            if unknown:
                raise ModelError(f"sharing has unknown names {unknown}.", f"Choose from {sorted(known)}.")


def without_vmap_if_needed(settings: Settings, run: Callable[[Settings], Answer]) -> Answer:
    """Compute something for several vectors together, or one by one if an operation does not work with `vmap`."""
    try:
        return run(settings)
    except (RuntimeError, NotImplementedError) as error:
        if "vmap" not in str(error):
            raise
        if settings.columns_at_once is not None:
            raise ModelError(
                "An operation's backward pass does not work for several vectors together (vmap).",
                "Leave columns_at_once out, or set it to one.",
            ) from error
        return run(replace(settings, columns_at_once=1))


def _computed(
    risk: EmpiricalRisk, settings: Settings, checkpoint: Checkpoint | None = None
) -> tuple[list[Block], Result]:
    """Compute blocks, check them, and deal with parameters that are not covered."""
    journal = None if checkpoint is None else Journal(checkpoint, risk, settings, "factors")
    result = without_vmap_if_needed(settings, lambda s: kfac(risk, s, journal))
    bad = set(result.uncovered)
    blocks = [block for block in result.blocks if not bad & set(block.layout.params)]
    uncovered = result.uncovered | shared_with(bad, result.blocks)
    if uncovered and settings.uncovered == "error":
        raise coverage_error(uncovered)
    if blocks:
        _check_finite(blocks)
    if uncovered and settings.uncovered == "diagonal":
        blocks += diagonal_blocks(risk, list(uncovered), settings)
    if not blocks:
        raise coverage_error(uncovered)
    return blocks, result


def shared_with(bad: Iterable[str], blocks: Iterable[Block]) -> dict[str, str]:
    """Return other parameters in blocks of those that are not covered, and that this is why they are not."""
    bad = set(bad)
    names = [n for block in blocks if bad & set(block.layout.params) for n in block.layout.params if n not in bad]
    return dict.fromkeys(names, "it shares a block with one that is not covered")


def listed(uncovered: Mapping[str, str]) -> str:
    """Return some parameters that are not covered, and why, for a message."""
    some = "; ".join(f"{name!r}: {why}" for name, why in list(uncovered.items())[:5])
    return some + (f"; and {len(uncovered) - 5} more" if len(uncovered) > 5 else "")


def warn_of_wide(blocks: Iterable[Block], settings: Settings, stacklevel: int) -> None:
    """Warn about factors that keep their diagonal because they are wide."""
    sizes = [(f"{b.name}.{side}", getattr(b, side).shape[-1]) for b in blocks for side, d in b.diagonal.items() if d]
    wide = [f"{name} ({size})" for name, size in sizes if settings.is_diagonal(size)]
    if wide:
        text = f"Factors wider than max_dim={settings.max_dim} keep their diagonal only: {', '.join(wide)}."
        warnings.warn(text, KfsWarning, stacklevel=stacklevel)


def coverage_error(uncovered: Mapping[str, str]) -> ModelError:
    """Return the error for parameters without rule."""
    hint = ""
    if any("parametrizations." in name for name in uncovered):
        hint = " Weights with parametrizations are computed from others; parametrize.remove_parametrizations ends that."
    return ModelError(
        f"KFAC does not cover all parameters ({listed(uncovered)}).",
        "Choose others with params=, or pass uncovered='skip' to leave these out, or uncovered='diagonal' for their "
        f"exact diagonal.{hint} kfs.inspect(model, sample) shows what is covered.",
    )


def diagonal_blocks(risk: EmpiricalRisk, names: Iterable[str], settings: Settings) -> list[Block]:
    """Return blocks with exact diagonals."""
    blocks = []
    for name, entries in diagonal_of_uncovered(risk, list(names), settings).items():
        layout = Layout(name, (entries.numel(),), (0, entries.numel()), (0,), 1)
        pair = Pair(Moment(entries.new_ones(1, 1), False), Moment(entries.flatten(), True), 1.0)
        blocks.append(Block(layout, "exact", pairs={"A": pair}, operations={"any"}))
    return blocks


def _check_finite(blocks: list[Block]) -> None:
    """Refuse NaN and infinity; the device is asked once."""
    moments = [
        (block.name, what, moment)
        for block in blocks
        for pair in block.pairs.values()
        for what, moment in (("inputs", pair.input), ("gradients", pair.gradient))
    ]
    if torch.nn.utils.get_total_norm([moment.total for _, _, moment in moments]).isfinite():
        return
    for name, what, moment in moments:  # or they are only so large that the norm overflows
        if not moment.total.isfinite().all():
            raise DataError(
                f"The {what} of block {name!r} are not finite.",
                "Look for NaN or infinity in the data, the parameters or the loss.",
            )
