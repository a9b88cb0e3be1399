"""A block: parameters that share one Kronecker product, with its factors `A` and `B`.

`Factors` are all blocks of a model, and everything else that a `kfs.KFAC` consists of, except for algebra, which lives
in `kfs.factors.blocks`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kfs.display.charts import Panel, draw_factors
from kfs.display.describe import Described, Description, Table, counted, matrix, readable_size, shaped, times
from kfs.display.suggestions import ByName
from kfs.distributed import Ranks
from kfs.distributed.distribution import REPLICATED, Distribution, Owned
from kfs.errors import DistributedError, ModelError, ShapeError
from kfs.factors.accumulate.across_ranks import choose_owners
from kfs.factors.accumulate.block_sums import BlockSums
from kfs.factors.audit import Audit, merge_audits
from kfs.factors.blocks import chosen
from kfs.factors.blocks.decompositions import computable
from kfs.factors.blocks.display import kind_and_size
from kfs.factors.blocks.factor import Factor
from kfs.factors.blocks.kronecker import Kronecker
from kfs.factors.blocks.stack import check_coverage, layouts_of_unused_rows
from kfs.factors.checkpoint import details
from kfs.factors.layout import BlockMap, Layout, Side, by_parameter
from kfs.factors.settings import Settings
from kfs.files import with_tensors
from kfs.operators.space import Space
from kfs.problem.risk import EmpiricalRisk

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SHOWN = 2**20  # entries of a factor; of larger factors, only the size is shown
# Always shown; other settings are shown if they differ from their default.
_ALWAYS = ("fisher", "sharing")


@dataclass(repr=False)
class Block(Described):
    """The Kronecker factors of one parameter, joint with its bias.

    Attributes:
        sums: Sums of outer products, before any scaling.
        reduction_factor: `R`, for all data seen.

    Example:
        >>> from kfs import KFAC, EmpiricalRisk
        >>> model = torch.nn.Linear(2, 1)
        >>> data = torch.tensor([[1.0, 0.0], [1.0, 2.0]]), torch.zeros(2, 1)
        >>> KFAC(EmpiricalRisk(model, torch.nn.MSELoss(), data)).blocks["weight"]
        Block 'weight' of weight and bias: 1 x 3, 40 B
          operations: linear; sharing: expand
          A: 3 x 3, float32 on cpu
             2.00e+00  2.00e+00  2.00e+00
             2.00e+00  4.00e+00  2.00e+00
             2.00e+00  2.00e+00  2.00e+00
          B: 1 x 1, float32 on cpu
             1.00e+00
    """

    sums: BlockSums
    reduction_factor: float = 1.0

    def describe(self) -> Description:
        """Describe parameters and factors; entries are shown if they are on a CPU, and not too many."""
        groups, rows, columns = self.layout.matrix_shape
        size = times((groups, rows, columns) if groups > 1 else (rows, columns))
        title = f"Block {self.name!r} of {' and '.join(self.layout.params)}: {size}, {readable_size(self.nbytes)}"
        facts = [f"operations: {', '.join(sorted(self.operations))}; sharing: {self.sharing}"]
        sides: tuple[Side, ...] = ("A", "B")
        for side in sides:
            total = self.sums.on_side(side)[0].total
            # Scaling copies the factor, the scale may be on an accelerator, and other processes may have the entries.
            if total.device.type != "cpu" or total.numel() > _SHOWN:
                facts.append(f"{side}: {shaped(total if groups > 1 else total[0])}")
            else:
                facts.append(matrix(side, self.A if side == "A" else self.B))
        return Description(title, tuple(facts))

    @property
    def layout(self) -> Layout:
        """How the parameter becomes a matrix."""
        return self.sums.layout

    @property
    def name(self) -> str:
        """The block's name."""
        return self.layout.name

    @property
    def sharing(self) -> str:
        """`"expand"` or `"reduce"`; `"exact"` for the diagonal of a parameter that no rule covers."""
        return self.sums.sharing

    @property
    def operations(self) -> set[str]:
        """The operations that used the parameter."""
        return self.sums.operations

    @property
    def nbytes(self) -> int:
        """Bytes of the sums."""
        return self.sums.nbytes

    @property
    def A(self) -> Tensor:  # noqa: N802 (the paper's symbol)
        """The input-based factor: `[d, d]`, only its diagonal `[d]`, or one for each group."""
        return self._without_single_group(self.scale("A") * self._total("A"))

    @property
    def B(self) -> Tensor:  # noqa: N802
        """The gradient-based factor: `[d, d]`, only its diagonal `[d]`, or one for each group."""
        total = self._total("B")
        if self.sums.forward_only:
            ones = torch.ones_like(total)
            total = ones if self.is_diagonal("B") else torch.diag_embed(ones.diagonal(dim1=-2, dim2=-1))
        return self._without_single_group(self.scale("B") * total)

    def is_diagonal(self, side: Side) -> bool:
        """Whether only the diagonal of a factor is stored."""
        return self.sums.is_diagonal(side)

    def kind(self, side: Side) -> str:
        """Return kind and size of a factor, such as `"dense 4x4"`."""
        _, rows, columns = self.layout.matrix_shape
        kind = "diagonal" if self.is_diagonal(side) else "dense"
        if side == "B" and self.sums.forward_only:
            kind = "identity"
        return kind_and_size(kind, columns if side == "A" else rows)

    def scale(self, side: Side) -> float:
        """Return the scale of the sum on one side, or of the identity in place of gradients."""
        if side == "A":
            return self.reduction_factor
        if self.sums.forward_only:
            return float(self.sums.identity_scale)
        return 1 / self.sums.terms if self.sums.terms else 1.0

    def matrix(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Read a gradient, or another vector of parameters, as the matrix that the block acts on: it becomes `B M A`.

        Args:
            tensors: By parameter name; more parameters than this block's are allowed. For several vectors, all tensors
                have one more axis in front, `[n, *shape]`.

        Returns:
            `[d_B, d_A]`, with the bias in the last column; `[groups, d_B, d_A]` for groups of channels; with an axis in
            front for several vectors.

        Raises:
            ShapeError: If a tensor is missing or has another size.

        Example:
            >>> from kfs import KFAC, EmpiricalRisk
            >>> model = torch.nn.Linear(3, 2)
            >>> risk = EmpiricalRisk(model, torch.nn.MSELoss(), (torch.rand(9, 3), torch.rand(9, 2)))
            >>> K, g = KFAC(risk), risk.gradient()
            >>> block = K.blocks["weight"]
            >>> M = block.matrix(g)
            >>> torch.allclose(block.B @ M @ block.A, block.matrix(K @ g)), block.tensors(M)["bias"].shape
            (True, torch.Size([2]))
        """
        shapes = self.layout.param_shapes()
        missing = [name for name in shapes if name not in tensors]
        if missing:
            raise ShapeError(f"The tensors lack {missing} of block {self.name!r}.", f"Pass all of {list(shapes)}.")
        several = self._has_several(tensors, shapes)
        columns = {name: tensors[name].reshape(-1, *shape) for name, shape in shapes.items()}
        M = self.layout.matrix(columns)
        M = M if self.layout.groups > 1 else M.squeeze(1)
        return M if several else M.squeeze(0)

    def tensors(self, matrix: Tensor) -> dict[str, Tensor]:
        """Return tensors by parameter name, the inverse of `matrix`; rows that belong to other blocks are zero.

        Args:
            matrix: `[d_B, d_A]`, as returned by `matrix`.

        Raises:
            ShapeError: If it has another shape.
        """
        groups, rows, columns = self.layout.matrix_shape
        shape = (groups, rows, columns) if groups > 1 else (rows, columns)
        several = matrix.ndim == len(shape) + 1
        if (matrix.shape[1:] if several else matrix.shape) != shape:
            raise ShapeError(
                f"The matrix has shape {list(matrix.shape)}, but block {self.name!r} acts on {list(shape)}.",
                "Pass what block.matrix(tensors) returns, or several of them, stacked.",
            )
        M = matrix.reshape(-1, groups, rows, columns)
        result = {name: M.new_zeros(len(M), *shape) for name, shape in self.layout.param_shapes().items()}
        self.layout.write(M, result)
        return result if several else {name: t.squeeze(0) for name, t in result.items()}

    def _has_several(self, tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Whether tensors have an axis for several vectors in front; raise if the shapes do not fit."""
        counts = {name: (tensors[name].numel(), prod(shape)) for name, shape in shapes.items()}
        lengths = {have // want for have, want in counts.values()}
        if len(lengths) > 1 or any(have % want for have, want in counts.values()):
            found = {name: list(tensors[name].shape) for name in shapes}
            raise ShapeError(
                f"The tensors of block {self.name!r} have shapes {found}.",
                f"Pass {dict(shapes)}; for several vectors, give all of them one more axis in front, of one length.",
            )
        exact = all(tensors[name].shape == shape for name, shape in shapes.items())
        # A parameter may be used with another shape than its own. Then it is one vector if it has one vector's size.
        leading = all(tensors[name].shape[1:] == shape for name, shape in shapes.items())
        return not exact and (leading or lengths != {1})

    def structure(self) -> Kronecker:
        """Return the block as a Kronecker product; factors are not copied."""
        return Kronecker(self._factor("A"), self._factor("B"))

    def _factor(self, side: Side) -> Factor:
        """Return the factor on one side, with its scale stored separately."""
        total = self._total(side)
        values = computable(total)
        if side == "B" and self.sums.forward_only:
            # A scale that is a tensor stays on its device, which avoids synchronization.
            scale = torch.as_tensor(self.sums.identity_scale).to(values).repeat(len(values))
            return Factor.identity(values.shape[-1], scale)
        scale = values.new_full((len(values),), self.scale(side))
        kind = "diagonal" if self.is_diagonal(side) else "dense"
        return Factor(values, scale, kind, eps=max(s.eps for s in self.sums.on_side(side)))  # type: ignore[arg-type]

    def _total(self, side: Side) -> Tensor:
        """Return the sum on one side, before scaling."""
        if not self.sums.is_local:
            raise DistributedError(
                f"Another process owns block {self.name!r}, so its factors are not here.",
                "Call K.fetch(name) in all processes, which copies one block to each of them, or K.gathered() for all.",
            )
        return self.sums.side_total(side)

    def _without_single_group(self, factor: Tensor) -> Tensor:
        return factor if self.layout.groups > 1 else factor.squeeze(0)


@dataclass(frozen=True)
class LossScale:
    """The part of a loss that is stored with factors: name, reduction, scale, and a digest of its settings."""

    name: str
    reduction: str
    scale: float
    details: str

    @classmethod
    def of(cls, risk: EmpiricalRisk) -> "LossScale":
        """Describe the loss of a risk."""
        return cls(risk.loss.name, risk.loss.reduction, risk.loss.scale, details(risk.loss))

    def reduction_factor(self, count: float) -> float:
        """Return the reduction factor `R`, given the count of all targets."""
        return self.scale if self.reduction == "sum" else self.scale / count

    def check_same(self, other: "LossScale") -> None:
        """Raise if the losses differ.

        Raises:
            ModelError: If the losses differ.
        """
        if self != other:
            raise ModelError(f"The losses differ: {self} and {other}.", "Use the same loss for all data.")


@dataclass(eq=False, repr=False)
class Factors:
    """Kronecker factors of all parameters: everything that a `kfs.KFAC` consists of.

    Attributes:
        space: The parameters.
        sums: The sums of all blocks, in the order of parameters. Those of other owners are on the meta device.
        settings: Which curvature matrix, and how.
        loss: Name, reduction and scale of the loss.
        count: The divisor of a mean over all targets seen.
        num_data: Number of examples seen.
        distribution: Which process has which blocks.
        of: Short description of model and loss.
        computed_at: Digest of the parameter values at which factors were computed; empty if unknown.
        audit: The report of the audit; `None` if there was none, or if factors were loaded.
        risk_of: Function from a model to its risk; `None` in copies and after loading, which have no data.
        blocks: All blocks by name: the sums with their scale.
    """

    space: Space
    sums: list[BlockSums]
    settings: Settings
    loss: LossScale
    count: float
    num_data: int
    distribution: Distribution = REPLICATED
    of: str = ""
    computed_at: str = ""
    audit: Audit | None = None
    risk_of: "partial[EmpiricalRisk] | None" = None
    blocks: ByName[Block] = field(init=False)

    def __post_init__(self) -> None:
        place_of = by_parameter(self.space.shapes)
        self.sums = sorted(self.sums, key=lambda block: place_of(block.layout))
        R = self.loss.reduction_factor(self.count)
        self.blocks = ByName({block.layout.name: Block(block, R) for block in self.sums})

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of copies and pickles, without the data."""
        return self.__dict__ | {"risk_of": None}

    def plus(self, other: "Factors") -> "Factors":
        """Return the factors of the data of both, which may use other parameters, or rows of them (experts).

        Raises:
            ModelError: If parameters have blocks of different kinds.
        """
        others = {block.layout.name: block for block in other.sums}
        others |= {n: others[n].turned_to(b.layout) for n, b in self.blocks.items() if n in others}
        block_map = BlockMap([block.layout for block in self.sums])
        fit = all(block_map.admit(block.layout) for block in others.values())
        if not fit or set(other.space.shapes) != set(self.space.shapes):
            raise ModelError(
                f"The blocks differ: {list(self.blocks)} and {list(others)}.", "Use the same model and parameters."
            )
        merged = {name: block.sums for name, block in self.blocks.items()}
        for name, block in others.items():
            merged[name] = merged[name].plus(block) if name in merged else block.shared()
        return replace(
            self,
            sums=list(merged.values()),
            count=self.count + other.count,
            num_data=self.num_data + other.num_data,
            distribution=other.distribution,
            audit=merge_audits(self.audit, other.audit),
        )

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None) -> "Factors":
        """Return the factors on a device, or in another precision. The sums are changed in place."""
        for block in self.sums:
            block.to(device, dtype)
        return replace(self, space=self.space.to(device, dtype))

    def describe(self, about: str, data: str) -> Description:
        """Describe an operator that has these factors, without reading their values.

        Args:
            about: The title.
            data: Description of the data, with the number of examples.
        """
        nbytes = readable_size(sum(block.nbytes for block in self.sums))
        values = {f.name: (getattr(self.settings, f.name), f.default) for f in fields(self.settings)}
        settings = ", ".join(f"{n}={v!r}" for n, (v, default) in values.items() if n in _ALWAYS or v != default)
        rows = []
        for block in self.blocks.values():
            layout = block.layout
            size = times(layout.matrix_shape if layout.groups > 1 else layout.matrix_shape[1:])
            operations = ", ".join(sorted(block.operations))
            rows.append((block.name, size, block.kind("A"), block.kind("B"), operations, readable_size(block.nbytes)))
        table = Table("blocks", ("block", "matrix", "A", "B", "operations", "bytes"), rows, ("bytes",))
        counts = f"{data}, {counted(len(rows), 'block')}, {nbytes} of factors"
        return Description(about, (settings, counts), (table,))

    def plot(self, names: Iterable[str] | None, most: int) -> "list[Axes]":
        """Draw the factors of blocks as heat maps; see `KFAC.plot`."""
        shown = chosen(names, self.blocks)
        if names is None and len(shown) > most:
            matrices = [name for name in shown if min(self.blocks[name].layout.matrix_shape[1:]) > 1]
            shown = (matrices or shown)[:most]
        panels = [Panel(name, self.blocks[name].A, self.blocks[name].B) for name in shown]
        return draw_factors(panels, left_out=0 if names is not None else len(self.blocks) - len(shown))

    def about(self) -> dict[str, Any]:
        """Return the readable part of a file's header."""
        settings = self.settings.state()
        return {
            "loss": f"{self.loss.name}, reduction={self.loss.reduction!r}",
            "fisher": settings["fisher"],
            "sharing": settings["sharing"],
            "num_data": self.num_data,
            "seed": settings["seed"],
        }

    def state(self) -> dict[str, Any]:
        """Return the content of a file, without the space, with the blocks of this process."""
        return {
            "settings": self.settings.state(),
            "of": self.of,
            "computed_at": self.computed_at,
            "loss": asdict(self.loss),
            "count": self.count,
            "num_data": self.num_data,
            "blocks": [block.state() for block in self.sums if block.is_local],
        }

    @classmethod
    def from_state(cls, state: Any, space: Space, ranks: Ranks) -> "Factors":
        """Load the result of `state` for all blocks. If there are several ranks, each reads the blocks that it owns."""
        states = list(state["blocks"])
        settings = Settings.from_state(state["settings"])
        distribution: Distribution = REPLICATED
        if not ranks.are_several:
            sums = list(map(BlockSums.from_state, states))
        else:
            settings = replace(settings, placement="owner")
            sums = [BlockSums.from_state(with_tensors(one, lambda t: t.to("meta"))) for one in states]
            distribution = Owned(ranks, choose_owners(sums, ranks.size, {}))
            own = [distribution.has(block.layout.name) for block in sums]
            sums = [BlockSums.from_state(states[i]) if own[i] else block for i, block in enumerate(sums)]
        layouts = [block.layout for block in sums]
        check_coverage([*layouts, *layouts_of_unused_rows(layouts, space)], space)
        loss, count, num_data = LossScale(**state["loss"]), float(state["count"]), int(state["num_data"])
        texts = str(state["of"]), str(state["computed_at"])
        return cls(space, sums, settings, loss, count, num_data, distribution, *texts)
