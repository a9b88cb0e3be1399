"""A block: parameters that share one Kronecker product, with its factors `A` and `B`."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from kfs.display.describe import Described, Description, matrix, readable_size, shaped, times
from kfs.errors import DistributedError, ShapeError
from kfs.factors.accumulate.block_sums import BlockSums
from kfs.factors.blocks.decompositions import computable
from kfs.factors.blocks.factor import Factor
from kfs.factors.blocks.kronecker import Kronecker
from kfs.factors.layout import Layout, Side

_SHOWN = 2**20  # entries of a factor; of larger factors, only the size is shown


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
