"""A block: parameters that share one Kronecker product, with its factors `A` and `B`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kfs.kfac.layout import Layout, Side
from kfs.kfac.structures.decompositions import computable
from kfs.kfac.structures.factor import Factor
from kfs.kfac.structures.kronecker import Kronecker
from kfs.kfac.sums.block_sums import BlockSums


@dataclass
class Block:
    """The Kronecker factors of one parameter, joint with its bias.

    Attributes:
        sums: Sums of outer products, before any scaling.
        reduction_factor: `R`, for all data seen.
    """

    sums: BlockSums
    reduction_factor: float = 1.0

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
        """What used the parameter."""
        return self.sums.operations

    @property
    def nbytes(self) -> int:
        """Bytes of the sums."""
        return self.sums.nbytes

    @property
    def A(self) -> Tensor:  # noqa: N802 (the document's symbol)
        """The input-based factor: `[d, d]`, only its diagonal `[d]`, or one for each group."""
        return self._without_single_group(self.scale("A") * self.sums.side_total("A"))

    @property
    def B(self) -> Tensor:  # noqa: N802
        """The gradient-based factor: `[d, d]`, only its diagonal `[d]`, or one for each group."""
        total = self.sums.side_total("B")
        if self.sums.forward_only:
            ones = torch.ones_like(total)
            total = ones if self.is_diagonal("B") else torch.diag_embed(ones.diagonal(dim1=-2, dim2=-1))
        return self._without_single_group(self.scale("B") * total)

    def is_diagonal(self, side: Side) -> bool:
        """Whether a factor is stored by its diagonal."""
        return self.sums.is_diagonal(side)

    def scale(self, side: Side) -> float:
        """Return what sums on one side, or the identity in place of gradients, are multiplied with."""
        if side == "A":
            return self.reduction_factor
        if self.sums.forward_only:
            return float(self.sums.identity_scale)
        return 1 / self.sums.terms if self.sums.terms else 1.0

    def structure(self) -> Kronecker:
        """Return the block as a Kronecker product; factors are not copied."""
        return Kronecker(self._factor("A"), self._factor("B"))

    def _factor(self, side: Side) -> Factor:
        """Return one side, with its scale beside it."""
        total = self.sums.side_total(side)
        values = computable(total)
        if side == "B" and self.sums.forward_only:
            # A scale that is a tensor stays on its device, which need not wait for it.
            scale = torch.as_tensor(self.sums.identity_scale).to(values).repeat(len(values))
            return Factor.identity(values.shape[-1], scale)
        scale = values.new_full((len(values),), self.scale(side))
        kind = "diagonal" if self.is_diagonal(side) else "dense"
        return Factor(values, scale, kind, eps=torch.finfo(total.dtype).eps)  # type: ignore[arg-type]

    def _without_single_group(self, factor: Tensor) -> Tensor:
        return factor if self.layout.groups > 1 else factor.squeeze(0)
