r"""EKFAC: KFAC's eigenvectors with the right eigenvalues.

KFAC approximates a block $C = R \sum_{n,c} \mathrm{vec}(G_{n,c}) \mathrm{vec}(G_{n,c})^\top$ of a curvature matrix by
$B \otimes A$, with eigenvectors $Q_B \otimes Q_A$ and eigenvalues $\lambda_B \lambda_A$. George et al. (2018) keep the
eigenvectors and replace the eigenvalues by the curvature along them,

$$
\Lambda = R \sum_{n,c} \left(Q_B^\top G_{n,c}\, Q_A\right)^{\odot 2},
\qquad
C \approx (Q_B \otimes Q_A)\, \mathrm{diag}(\mathrm{vec}\, \Lambda)\, (Q_B \otimes Q_A)^\top .
$$

No other choice of eigenvalues is closer to $C$ in the Frobenius norm, for these eigenvectors; in particular, KFAC's
are not. The trace is that of $C$. Without weight sharing, $G_{n,c} = g\, x^\top$, so that the squares are those of an
outer product: $\Lambda = R \sum (Q_B^\top g)^{\odot 2} \left((Q_A^\top x)^{\odot 2}\right)^\top$ is a product of two
matrices, and no per-datum gradient is formed. With weight sharing, gradients of a few data at a time are. Inputs and
gradients are rotated before they are multiplied, or their product is afterwards, whichever takes fewer operations.

It takes two passes over the data: one for the factors, one for the eigenvalues.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Self

import torch

from kfs.errors import DataError, ModelError
from kfs.kfac.blocks import Block
from kfs.kfac.kfac import KFAC, diagonal_blocks, without_vmap_if_needed
from kfs.kfac.layout import Key, Layout
from kfs.kfac.scaffold import sweep
from kfs.kfac.settings import Settings
from kfs.kfac.storage.checkpoint import Checkpoint, Journal, Progress
from kfs.kfac.structures.eigenbasis import Eigenbasis
from kfs.kfac.structures.stack import Stack, check_coverage
from kfs.kfac.sums.per_datum import PerDatum, Squares, Statistic
from kfs.operators.space import Space
from kfs.risk import EmpiricalRisk
from kfs.storage import UnfitError


class EKFAC(KFAC):
    """KFAC with corrected eigenvalues. It takes the arguments of `KFAC`, except that there is no `"forward-only"`.

    Attributes:
        blocks: Blocks by name. Their `A` and `B` are KFAC's; the eigenvectors come from them.
        num_data: How many data the eigenvalues were computed from.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
        >>> risk = EmpiricalRisk(model, torch.nn.CrossEntropyLoss(), (torch.rand(10, 4), torch.randint(2, (10,))))
        >>> E = EKFAC(risk)
        >>> (E.inverse(damping=1e-3) @ risk.gradient())["0.weight"].shape
        torch.Size([3, 4])
    """

    @classmethod
    def from_kfac(cls, K: KFAC, risk: EmpiricalRisk) -> "EKFAC":
        """Compute eigenvalues from some data, for the eigenvectors of a KFAC that may come from others.

        Args:
            K: Its factors are used as they are, and not copied.
            risk: The same model, loss and parameters, with any data.
        """
        E = cls.__new__(cls)
        E.__dict__ |= {name: value for name, value in K.__dict__.items() if name != "_stacks"}
        E.blocks, E._stacks = {name: block.shared() for name, block in K.blocks.items()}, None
        E._complete(risk)
        return E

    @property
    def stacks(self) -> list[Stack]:
        """The blocks by eigenvalues and eigenvectors, those of one size together in memory."""
        if self._stacks is None:
            R = self._loss.reduction_factor(self._eigen_count)
            self._stacks = [Stack(stack.layouts, stack.structure.scaled(R)) for stack in self._raw]
        return self._stacks

    def update(self, risk: EmpiricalRisk) -> Self:
        """Add more data to the eigenvalues, in place; the eigenvectors stay. If it fails, nothing is changed.

        Args:
            risk: The same model, loss and parameters with other data. Draws continue where they ended.
        """
        s = replace(self.settings, first_datum=self.settings.first_datum + self.num_data)
        more, num_data, count = self._squares(risk, s)
        self._add_raw(more, num_data, count)
        return self

    def merge(self, other: KFAC) -> Self:
        """Add eigenvalues that another object computed from other data, for the same eigenvectors, in place.

        Args:
            other: Comes from the same factors: use `from_kfac`.
        """
        self._check_settings(other)
        if not isinstance(other, EKFAC) or not all(
            mine.layouts == theirs.layouts and mine.structure.same_basis(theirs.structure)  # type: ignore[attr-defined]
            for mine, theirs in zip(self._raw, other._raw, strict=True)
        ):
            raise ModelError("The eigenvectors differ.", "Make both from one KFAC, with EKFAC.from_kfac(K, risk).")
        self._add_raw(other._raw, other.num_data, other._eigen_count)
        return self

    def _complete(self, risk: EmpiricalRisk, checkpoint: Checkpoint | None = None) -> None:
        """Decompose the factors and compute eigenvalues."""
        if self.settings.fisher == "forward-only":
            raise ModelError(
                "fisher='forward-only' has no gradients to correct eigenvalues with.", "Use KFAC, or another fisher."
            )
        self._raw = [
            Stack(stack.layouts, stack.apply(lambda structure: structure.eigenbasis())) for stack in super().stacks
        ]
        basis = [Q.values for stack in self._raw for Q in (stack.structure.Q_A, stack.structure.Q_B)]  # type: ignore[attr-defined]
        journal = None if checkpoint is None else Journal(checkpoint, risk, self.settings, "eigenvalues", basis)
        self._raw, self.num_data, self._eigen_count = self._squares(risk, self.settings, journal)
        self._stacks = None

    def _squares(
        self, risk: EmpiricalRisk, settings: Settings, journal: Journal | None = None
    ) -> tuple[list[Stack], int, float]:
        """Sum squared gradients in the eigenbases, without the reduction factor, and count data."""
        self._check_loss(risk)

        def run(s: Settings) -> tuple[list[Stack], Progress]:
            raw = [self._zeros(stack) for stack in self._raw]
            uses = PerDatum(s, self._layouts, self._statistics(raw))
            progress = sweep(risk, uses, "EKFAC", journal)
            uses.check_complete(resumed=journal is not None)
            return raw, progress

        raw, progress = without_vmap_if_needed(settings, run)
        self._add_exact(raw, risk, settings)
        for stack in raw:
            if not stack.structure.like.isfinite().all():
                raise DataError(
                    f"Gradients of the blocks {sorted(set(stack.names))} are not finite.",
                    "Look for NaN or infinity in the data, the parameters or the loss.",
                )
        return raw, progress.num_data, progress.count

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """Move everything to a device, or convert it, in place."""
        super().to(device, dtype)
        self._raw = [Stack(stack.layouts, stack.structure.to(device, dtype)) for stack in self._raw]
        return self

    def _state(self) -> dict[str, Any]:
        """Return everything but the space, for a file."""
        eigenvalues = [stack.state() for stack in self._raw]
        return super()._state() | {"eigenvalues": eigenvalues, "eigen_count": self._eigen_count}

    @classmethod
    def _from_state(cls, state: Any, space: Space) -> "EKFAC":
        """Undo `_state`."""
        E = super()._from_state(state, space)
        assert isinstance(E, EKFAC)  # noqa: S101 (it is this class)
        E._raw, E._eigen_count = list(map(Stack.from_state, state["eigenvalues"])), float(state["eigen_count"])
        check_coverage([layout for stack in E._raw for layout in stack.layouts], space)
        if not all(isinstance(stack.structure, Eigenbasis) for stack in E._raw):
            raise UnfitError("blocks are not given by eigenvalues")
        return E

    @property
    def _layouts(self) -> dict[Key, Layout]:
        return {b.layout.key: b.layout for b in self.blocks.values()}

    @staticmethod
    def _zeros(stack: Stack) -> Stack:
        """Return the same eigenvectors with eigenvalues of zero."""
        basis = stack.structure
        assert isinstance(basis, Eigenbasis)  # noqa: S101 (all of them are made that way)
        zeros = torch.zeros_like(basis.values, memory_format=torch.contiguous_format)
        return Stack(stack.layouts, replace(basis, values=zeros, noise=torch.zeros_like(basis.noise)))

    def _statistics(self, raw: list[Stack]) -> dict[Key, Statistic]:
        """Return what adds to the eigenvalues of each block."""
        found: dict[Key, Statistic] = {}
        for block, basis, part in self._parts(raw):
            if block.sharing != "exact":
                Q_A, Q_B = (Q.values[part] if Q.kind == "dense" else None for Q in (basis.Q_A, basis.Q_B))
                found[block.layout.key] = Squares(basis.values[part], Q_A, Q_B)
        return found

    def _add_exact(self, raw: list[Stack], risk: EmpiricalRisk, settings: Settings) -> None:
        """Write the exact diagonals of parameters that no rule covers."""
        exact = {block.name: (basis, part) for block, basis, part in self._parts(raw) if block.sharing == "exact"}
        if exact:
            for block in diagonal_blocks(risk, list(exact), settings):
                basis, part = exact[block.name]
                basis.values[part] = block.pairs["A"].gradient.total.reshape(1, -1, 1)

    def _parts(self, raw: list[Stack]) -> Iterator[tuple[Block, Eigenbasis, slice]]:
        """Go through all blocks with their eigenvalues."""
        for stack in raw:
            for layout, part in stack.slices():
                if layout.name in self.blocks:  # not rows that nothing uses
                    assert isinstance(stack.structure, Eigenbasis)  # noqa: S101 (all of them are made that way)
                    yield self.blocks[layout.name], stack.structure, part

    def _add_raw(self, more: list[Stack], num_data: int, count: float) -> None:
        """Add eigenvalues of other data."""
        for mine, theirs in zip(self._raw, more, strict=True):
            mine.structure.like.add_(theirs.structure.like.to(mine.structure.like))
        self.num_data, self._eigen_count = self.num_data + num_data, self._eigen_count + count
        self._stacks = None


if __name__ == "__main__":
    from torch.nn import CrossEntropyLoss, Linear, Sequential, Tanh

    from kfs.operators import GGN
    from kfs.verification import verify, verify_differs, verify_that

    torch.manual_seed(0)
    model = Sequential(Linear(4, 3), Tanh(), Linear(3, 3)).double()
    for N in (1, 20):
        X, y = 3 * torch.randn(N, 4, dtype=torch.float64), torch.randint(3, (N,))
        risk = EmpiricalRisk(model, CrossEntropyLoss(), (X, y))
        K, E = KFAC(risk), EKFAC(risk)
        for name, block in K.blocks.items():
            exact, kfac, ekfac = (op.submatrix(block.layout.params).to_dense() for op in (GGN(risk), K, E))
            case = f"layer {name}, {N} data"
            if N == 1:
                verify("for one datum, EKFAC equals the GGN's block", ekfac, exact, case=case)
                continue
            verify_differs("for several data, it approximates it", ekfac, exact, case=case)
            closer = (ekfac - exact).norm() < (kfac - exact).norm()
            verify_that("better than KFAC does, in the Frobenius norm", bool(closer), case=case)
            verify("the trace is right", ekfac.trace(), exact.trace(), case=case)
            Q = K.eigh()[1].submatrix(block.layout.params).to_dense()
            rotated = Q.T @ ekfac @ Q
            verify("it is diagonal in KFAC's eigenvectors", rotated, torch.diag(rotated.diagonal()), case=case)
            verify("with the exact block's diagonal", rotated.diagonal(), (Q.T @ exact @ Q).diagonal(), case=case)
