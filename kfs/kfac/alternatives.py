r"""Other structures than KFAC and EKFAC: the exact block, its diagonal, and the best Kronecker product.

All approximate blocks $C = R \sum_{n,c} \mathrm{vec}(G_{n,c})\, \mathrm{vec}(G_{n,c})^\top$ of a curvature matrix, with
the same blocks and settings as `KFAC`, and are operators of the same kind, so that they can be compared:

- `exact_blocks`: $C$ itself. Its size is squared, so it is for small layers.
- `exact_diagonal`: the diagonal of $C$.
- `trace_scaled` (TKFAC; Gao et al., 2021): both factors are partial traces of $C$, $A \propto \sum G^\top G$ and
  $B \propto \sum G G^\top$, scaled such that the trace of their product is that of $C$.
- `optimal_kronecker`: the $A, B$ that minimise $\|C - B \otimes A\|_F$. Rearranged, $C$ becomes a matrix of which
  $\mathrm{vec}(B)\, \mathrm{vec}(A)^\top$ is the best approximation of rank one (Van Loan & Pitsianis, 1993). The power
  iteration that finds it needs no matrix of that size: for a given $B$, the best $A$ is
  $R \sum G^\top B\, G / \|B\|_F^2$, and the other way round. Each half step is a pass over the data.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from kfs.errors import ModelError
from kfs.kfac.backpropagated_vectors import one_by_one_if_needed
from kfs.kfac.block import Block
from kfs.kfac.kfac import KFAC
from kfs.kfac.layout import Layout
from kfs.kfac.scaffold import sweep
from kfs.kfac.structures.block_diagonal import BlockDiagonal
from kfs.kfac.structures.dense import Dense
from kfs.kfac.structures.eigenbasis import Eigenbasis
from kfs.kfac.structures.factor import Factor
from kfs.kfac.structures.kronecker import Kronecker
from kfs.kfac.structures.stack import layouts_of_unused_rows, stacked, zero_block
from kfs.kfac.structures.structure import Structure
from kfs.kfac.sums.inputs import Use, Vectors
from kfs.kfac.sums.per_datum import PerDatumSums, Squares, Statistic
from kfs.risk import EmpiricalRisk

S = TypeVar("S", bound=Statistic)
# Gives the sides of a block that are held fixed, [G, d, d] or (diagonals) [G, d].
Sides = dict[str, Tensor]


def exact_blocks(risk: EmpiricalRisk, *, max_size: int = 4096, **settings: Any) -> BlockDiagonal:
    """Compute the exact blocks of a curvature matrix.

    Args:
        risk: Model, loss, data and parameters.
        max_size: Refuse blocks of more numbers than this.
        **settings: Those of `KFAC`.

    Example:
        >>> risk = EmpiricalRisk(torch.nn.Linear(3, 2), torch.nn.MSELoss(), (torch.rand(9, 3), torch.rand(9, 2)))
        >>> exact_blocks(risk).shape
        (8, 8)
    """
    K = _kfac(risk, settings)
    for block in K.blocks.values():
        size = prod(_whole(block.layout).matrix_shape)
        if size > max_size:
            raise ModelError(
                f"Block {block.name!r} has {size} numbers, so that its matrix has {size}^2.",
                "Choose smaller layers with params=, or allow it with max_size=.",
            )
    matrices = exact_matrices(K, risk, K.blocks)

    def structure(block: Block) -> Structure:
        _, rows, columns = _whole(block.layout).matrix_shape
        return Dense(matrices[block.name].unsqueeze(0), rows, columns)

    return _operator(K, structure, _whole)


def exact_matrices(K: KFAC, risk: EmpiricalRisk, names: Iterable[str]) -> dict[str, Tensor]:
    """Compute the exact matrices of some of KFAC's blocks, by name; rows of their parameters come one by one."""
    chosen, R = set(names), _scale(K)
    sums = _sums(K, risk, lambda block: _Outer(block) if block.name in chosen else None)
    return {name: R * total for name, total in sums.items()}


def exact_diagonal(risk: EmpiricalRisk, **settings: Any) -> BlockDiagonal:
    """Compute the diagonal of a curvature matrix, as an operator.

    Args:
        risk: Model, loss, data and parameters.
        **settings: Those of `KFAC`.
    """
    K = _kfac(risk, settings)
    sums = _sums(
        K, risk, lambda block: Squares(torch.zeros(block.layout.matrix_shape, dtype=_dtype(K), device=K.device))
    )
    R = _scale(K)
    return _operator(K, lambda block: Eigenbasis.of_diagonal(R * sums[block.name]))


def trace_scaled(risk: EmpiricalRisk, **settings: Any) -> BlockDiagonal:
    """Compute Kronecker products of partial traces, with the traces of the exact blocks (Gao et al., 2021).

    Args:
        risk: Model, loss, data and parameters.
        **settings: Those of `KFAC`.
    """
    K = _kfac(risk, settings)
    found = _statistics(K, risk, lambda block: _PartialTraces(*(_contraction(block, side, K) for side in ("A", "B"))))
    R = _scale(K)

    def structure(block: Block) -> Structure:
        A, B = (_factor(contraction.total) for contraction in found[block.name].contractions)
        trace = B.trace()
        return Kronecker(A.scaled(R), B.scaled(torch.where(trace > 0, 1 / trace, 0.0)))

    return _operator(K, structure)


def optimal_kronecker(
    risk: EmpiricalRisk, *, steps: int = 20, tolerance: float = 1e-6, **settings: Any
) -> BlockDiagonal:
    """Compute the Kronecker products that are closest to the exact blocks in the Frobenius norm, by power iteration.

    Args:
        risk: Model, loss, data and parameters.
        steps: At most so many steps; each takes two passes over the data. They start from KFAC.
        tolerance: Stop when the norms of all blocks change by less than this, relative to them.
        **settings: Those of `KFAC`.

    Returns:
        An operator that is never further from the exact blocks than KFAC is.
    """
    if steps < 1:
        raise ModelError(f"steps is {steps}.", "Use at least one.")
    K = _kfac(risk, settings)
    R = _scale(K)
    sides: dict[str, Sides] = {name: {"B": _side(block, "B")} for name, block in K.blocks.items()}
    norms: Tensor | None = None
    for _ in range(steps):
        for side, fixed in (("A", "B"), ("B", "A")):
            sums = _sums(K, risk, lambda block, side=side: _contraction(block, side, K, sides[block.name]))  # type: ignore[misc]
            for name, total in sums.items():
                norm = sides[name][fixed].square().flatten(1).sum(1)
                best = R * total / norm.clamp(min=torch.finfo(norm.dtype).tiny).reshape(-1, *[1] * (total.ndim - 1))
                sides[name][side] = best
        new = torch.cat([(s["A"].flatten(1).norm(dim=1) * s["B"].flatten(1).norm(dim=1)) for s in sides.values()])
        if norms is not None and bool(((new - norms).abs() <= tolerance * new).all()):
            break
        norms = new
    return _operator(K, lambda block: Kronecker(*(_factor(sides[block.name][side]) for side in ("A", "B"))))


class _Contraction(Statistic):
    """Sums of `G^T B G` (or of `G A G^T`, if transposed), dense or only their diagonals.

    Args:
        total: `[G, d, d]`, or `[G, d]` for diagonals.
        fixed: What stands in the middle: `[G, e, e]`, a diagonal `[G, e]`, or nothing for the identity.
        transposed: Whether the middle is on the input side.
    """

    def __init__(self, total: Tensor, fixed: Tensor | None, transposed: bool) -> None:
        self.total, self.fixed, self.transposed = total, fixed, transposed

    def add(self, gradients: Tensor) -> None:
        gradients = gradients.to(self.total)
        missing = (self.total.shape[1] if not self.transposed else self._inner(gradients)) - gradients.shape[3]
        gradients = torch.nn.functional.pad(gradients, (0, missing)).transpose(0, 1)  # [G, n, d_B, d_A]
        gradients = gradients.transpose(2, 3) if self.transposed else gradients
        weighted = self._weighted(gradients)
        if self.total.ndim == 2:
            self.total += (gradients * weighted).sum((1, 2))
        else:
            self.total.baddbmm_(gradients.flatten(1, 2).transpose(1, 2), weighted.flatten(1, 2))

    def add_use(self, use: Use, g: Tensor) -> None:
        """Without shared positions, `G^T B G` is `(g^T B g) x x^T`, and no gradient is formed."""
        if isinstance(use.inputs, Vectors):
            x, of_x = (t.to(self.total) for t in use.inputs.both(use, g))
            width = self._inner(x) if self.transposed else self.total.shape[1]
            if x.shape[1] == 1 and (use.ones or x.shape[2] == width):
                x = torch.cat([x, torch.ones_like(x[..., :1])], 2) if use.ones else x
                near, far = (of_x, x) if self.transposed else (x, of_x)
                middle = self._weighted(far.unsqueeze(0).transpose(2, 3)).squeeze(0).squeeze(2)  # [N, e]
                weights = (middle * far.squeeze(1)).sum(1)
                near = near.squeeze(1)
                if self.total.ndim == 2:
                    self.total[0] += weights @ near.square()
                else:
                    self.total[0].addmm_(near.T * weights, near)
                return
        super().add_use(use, g)

    def _weighted(self, gradients: Tensor) -> Tensor:
        """Multiply `[G, n, e, d]` from the left with what is fixed."""
        if self.fixed is None:
            return gradients
        kind = Factor.dense if self.fixed.ndim == 3 else Factor.diagonal
        return kind(self.fixed).left(gradients)

    def _inner(self, like: Tensor) -> int:
        """Return the size of what is fixed on the input side, the bias included."""
        return like.shape[-1] if self.fixed is None else self.fixed.shape[1]


class _PartialTraces(Statistic):
    """Both contractions with the identity.

    Args:
        *contractions: Those for the two sides.
    """

    def __init__(self, *contractions: _Contraction) -> None:
        self.contractions = contractions

    def add(self, gradients: Tensor) -> None:
        for contraction in self.contractions:
            contraction.add(gradients)

    def add_use(self, use: Use, g: Tensor) -> None:
        for contraction in self.contractions:
            contraction.add_use(use, g)


class _Outer(Statistic):
    """Sums of outer products of flattened gradients."""

    def __init__(self, block: Block) -> None:
        groups, rows, columns = block.layout.matrix_shape
        like = block.sums.roles["A"].gradient.total
        self.columns = columns
        self.total = torch.zeros([groups * rows * columns] * 2, dtype=_wide(like), device=like.device)

    def add(self, gradients: Tensor) -> None:
        gradients = torch.nn.functional.pad(gradients, (0, self.columns - gradients.shape[3]))
        flat = gradients.to(self.total).flatten(1)
        self.total.addmm_(flat.T, flat)


def _kfac(risk: EmpiricalRisk, settings: dict[str, Any]) -> KFAC:
    """Compute KFAC, which knows all blocks."""
    K = KFAC(risk, **settings)
    if K.settings.fisher == "forward-only":
        raise ModelError("fisher='forward-only' has no gradients.", "Use KFAC, or another fisher.")
    exact = [name for name, block in K.blocks.items() if block.sharing == "exact"]
    if exact:
        raise ModelError(f"No rule covers {exact}, so that they have diagonals only.", "Pass uncovered='skip'.")
    return K


def _statistics(K: KFAC, risk: EmpiricalRisk, make: Callable[[Block], S | None]) -> dict[str, S]:
    """Show the per-datum gradients of blocks to statistics, and return these."""

    def run(settings: Any) -> dict[str, S]:
        layouts = {block.layout.key: block.layout for block in K.blocks.values()}
        made = {name: statistic for name, block in K.blocks.items() if (statistic := make(block)) is not None}
        statistics = {K.blocks[name].layout.key: statistic for name, statistic in made.items()}
        sums = PerDatumSums(settings, layouts, statistics)
        sweep(risk, sums, settings, "gradients", layouts=layouts.values())
        return made

    return one_by_one_if_needed(K.settings, run)


def _sums(K: KFAC, risk: EmpiricalRisk, make: Callable[[Block], Statistic | None]) -> dict[str, Tensor]:
    """Return the statistics' sums."""
    return {name: statistic.total for name, statistic in _statistics(K, risk, make).items()}


def _operator(
    K: KFAC, structure: Callable[[Block], Structure], layout_of: Callable[[Layout], Layout] = lambda layout: layout
) -> BlockDiagonal:
    """Make an operator of all blocks."""
    parts = [(layout_of(block.layout), structure(block)) for block in K.blocks.values()]
    unused = [
        (layout, zero_block(layout, K.domain)) for layout in layouts_of_unused_rows([p for p, _ in parts], K.domain)
    ]
    return BlockDiagonal(K.domain, stacked([*parts, *unused]))


def _contraction(block: Block, side: str, K: KFAC, sides: Sides | None = None) -> _Contraction:
    """Sum what becomes one side of a block, for a fixed other side (the identity if nothing is given)."""
    groups, rows, columns = block.layout.matrix_shape
    size = columns if side == "A" else rows
    shape = (groups, size) if block.is_diagonal(side) else (groups, size, size)  # type: ignore[arg-type]
    total = torch.zeros(shape, dtype=_dtype(K), device=K.device)
    fixed = None if sides is None else sides["B" if side == "A" else "A"]
    return _Contraction(total, fixed, transposed=side == "B")


def _side(block: Block, side: str) -> Tensor:
    """Return one of KFAC's factors, `[G, d, d]` or `[G, d]`."""
    values = getattr(block, side)
    wide: Tensor = values.to(_wide(values))
    return wide if block.layout.groups > 1 else wide.unsqueeze(0)


def _factor(values: Tensor) -> Factor:
    return Factor.dense(values) if values.ndim == 3 else Factor.diagonal(values)


def _whole(layout: Layout) -> Layout:
    """Return a layout that does not separate groups of channels: the exact block has entries between them."""
    return replace(layout, groups=1)


def _scale(K: KFAC) -> float:
    return next(iter(K.blocks.values())).reduction_factor


def _wide(like: Tensor) -> torch.dtype:
    return torch.promote_types(like.dtype, torch.float32)


def _dtype(K: KFAC) -> torch.dtype:
    return torch.promote_types(K.dtype, torch.float32)


if __name__ == "__main__":
    from torch.nn import CrossEntropyLoss, Linear, Sequential, Tanh

    from kfs.operators import GGN
    from kfs.verification import verify, verify_that

    torch.manual_seed(0)
    model = Sequential(Linear(3, 4), Tanh(), Linear(4, 3)).double()
    X, y = 3 * torch.randn(9, 3, dtype=torch.float64), torch.randint(3, (9,))
    risk = EmpiricalRisk(model, CrossEntropyLoss(), (X, y))
    for block in KFAC(risk).blocks.values():
        params, case = block.layout.params, f"layer {block.name}"
        C = GGN(risk).submatrix(params).to_dense()
        verify("exact blocks are those of the GGN", exact_blocks(risk).submatrix(params).to_dense(), C, case=case)
        entries = exact_diagonal(risk).submatrix(params).to_dense()
        verify("the diagonal is that of the GGN", entries, torch.diag(C.diagonal()), case=case)
        scaled = trace_scaled(risk).submatrix(params).to_dense()
        verify("trace scaling gives the GGN's trace", scaled.trace(), C.trace(), case=case)

        # Rearranged, the block is a matrix whose largest singular value says how close one can get.
        _, rows, columns = block.layout.matrix_shape
        index = block.layout.flat_index().flatten()
        blocks = C[index][:, index].reshape(rows, columns, rows, columns)
        rearranged = blocks.permute(0, 2, 1, 3).reshape(rows**2, columns**2)
        singular = torch.linalg.svdvals(rearranged)
        best = optimal_kronecker(risk, steps=100, tolerance=1e-14).submatrix(params).to_dense()
        verify(
            "no Kronecker product is closer than the one by power iteration",
            (best - C).square().sum(),
            singular[1:].square().sum(),
            case=case,
        )
        kfac = KFAC(risk).submatrix(params).to_dense()
        verify_that("KFAC is further away", bool((kfac - C).norm() > (best - C).norm()), case=case)
