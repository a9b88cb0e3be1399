r"""Alternatives to KFAC and EKFAC: the exact block, its diagonal, and the best Kronecker product.

All approximate blocks $C = R \sum_{n,c} \mathrm{vec}(G_{n,c})\, \mathrm{vec}(G_{n,c})^\top$ of a curvature matrix, with
the same blocks and settings as `KFAC`. They are operators of the same kind, so that they can be compared:

- `exact_blocks`: $C$ itself. Its size is squared, so it is for small layers.
- `exact_diagonal`: the diagonal of $C$.
- `trace_scaled` (TKFAC; Gao et al., 2021): both factors are partial traces of $C$, $A \propto \sum G^\top G$ and
  $B \propto \sum G G^\top$, scaled such that the trace of their product is that of $C$.
- `optimal_kronecker`: the $A, B$ that minimize $\|C - B \otimes A\|_F$ in `rvec`. Rearranged, $C$ becomes one of which
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
from torch.nn.functional import pad

from kfs.display.progress import show_progress
from kfs.errors import ModelError
from kfs.factors.accumulate import Moment, PerDatumSums, Squares, Use
from kfs.factors.accumulate.inputs import Vectors
from kfs.factors.block import Block
from kfs.factors.blocks import (
    BlockDiagonal,
    Dense,
    Eigenbasis,
    Factor,
    Kronecker,
    Structure,
    stacked_with_zeros,
)
from kfs.factors.compute import WITHOUT_VMAP, one_by_one, sweep
from kfs.factors.kfac import KFAC
from kfs.factors.layout import Side
from kfs.factors.settings import Settings
from kfs.problem.risk import EmpiricalRisk
from kfs.runtime.precision import at_least_float32

S = TypeVar("S", bound=Moment)


def exact_blocks(risk: EmpiricalRisk, *, max_size: int = 4096, **settings: Any) -> BlockDiagonal:
    """Compute the exact blocks of a curvature matrix.

    Args:
        risk: Model, loss, data and parameters.
        max_size: Raise for blocks with more parameters than this.
        **settings: Settings of `KFAC`.

    Example:
        >>> risk = EmpiricalRisk(torch.nn.Linear(3, 2), torch.nn.MSELoss(), (torch.rand(9, 3), torch.rand(9, 2)))
        >>> exact_blocks(risk).shape
        (8, 8)
    """
    K = _kfac(risk, settings)
    # Exact blocks have entries between groups of channels, so layouts must not separate the groups.
    layouts = {name: replace(block.layout, groups=1) for name, block in K.blocks.items()}
    for name, layout in layouts.items():
        size = prod(layout.matrix_shape)
        if size > max_size:
            raise ModelError(
                f"Block {name!r} has {size} parameters, so its matrix has {size}^2 entries.",
                "Choose smaller layers with params=, or raise max_size=.",
            )
    matrices = exact_matrices(K, risk, layouts)
    parts = [(layout, Dense(matrices[name][None], *layout.matrix_shape[1:])) for name, layout in layouts.items()]
    return BlockDiagonal(K.domain, stacked_with_zeros(parts, K.domain)).called("exact_blocks", K.of)


def exact_matrices(K: KFAC, risk: EmpiricalRisk, names: Iterable[str]) -> dict[str, Tensor]:
    """Compute the exact matrices of some of KFAC's blocks, by name. Parameters are flattened by rows."""
    chosen = set(names)
    found = _moments(K, risk, lambda block: _OuterProducts(K, block) if block.name in chosen else None)
    return {name: K.blocks[name].reduction_factor * moment.total for name, moment in found.items()}


def exact_diagonal(risk: EmpiricalRisk, **settings: Any) -> BlockDiagonal:
    """Compute the diagonal of a curvature matrix, as an operator.

    Args:
        risk: Model, loss, data and parameters.
        **settings: Settings of `KFAC`.

    Example:
        >>> risk = EmpiricalRisk(torch.nn.Linear(3, 2), torch.nn.MSELoss(), (torch.rand(9, 3), torch.rand(9, 2)))
        >>> torch.allclose(exact_diagonal(risk).diagonal(), exact_blocks(risk).diagonal())
        True
    """
    K = _kfac(risk, settings)
    found = _moments(K, risk, lambda block: Squares(_zeros(K, *block.layout.matrix_shape)))
    made = _operator(K, lambda block: Eigenbasis.of_diagonal(block.reduction_factor * found[block.name].total))
    return made.called("exact_diagonal")


def trace_scaled(risk: EmpiricalRisk, **settings: Any) -> BlockDiagonal:
    """Compute Kronecker products of partial traces, with the traces of the exact blocks (Gao et al., 2021).

    Args:
        risk: Model, loss, data and parameters.
        **settings: Settings of `KFAC`.

    Example:
        >>> risk = EmpiricalRisk(torch.nn.Linear(3, 2), torch.nn.MSELoss(), (torch.rand(9, 3), torch.rand(9, 2)))
        >>> torch.allclose(trace_scaled(risk).trace(), exact_blocks(risk).trace())
        True
    """
    K = _kfac(risk, settings)
    found = _moments(K, risk, lambda block: _PartialTraces(K, block))

    def structure(block: Block) -> Structure:
        A, B = (_factor(contraction.total) for contraction in found[block.name].contractions)
        trace = B.trace()
        # A block without curvature has traces of zero, and remains zero.
        return Kronecker(A.scaled(block.reduction_factor), B.scaled(torch.where(trace > 0, 1 / trace, 0.0)))

    return _operator(K, structure).called("trace_scaled")


def optimal_kronecker(
    risk: EmpiricalRisk, *, steps: int = 20, tolerance: float = 1e-6, **settings: Any
) -> BlockDiagonal:
    """Compute the Kronecker products that are closest to the exact blocks in the Frobenius norm, by power iteration.

    Args:
        risk: Model, loss, data and parameters.
        steps: Maximum number of steps. Each takes two passes over the data. They start from KFAC.
        tolerance: Stop when the norms of all blocks change by less than this, relative to the norms.
        **settings: Settings of `KFAC`.

    Returns:
        An operator that is never further from the exact blocks than KFAC is.

    Example:
        >>> risk = EmpiricalRisk(torch.nn.Linear(3, 2), torch.nn.MSELoss(), (torch.rand(9, 3), torch.rand(9, 2)))
        >>> torch.allclose(optimal_kronecker(risk).to_dense(), exact_blocks(risk).to_dense())  # KFAC is exact here
        True
    """
    if steps < 1:
        raise ModelError(f"steps is {steps}.", "Use at least one.")
    K = _kfac(risk, settings)
    # The scale of KFAC's B does not matter: the first A is divided by the norm of B, and B is then replaced.
    B = {name: block.structure().B.unscaled().to(K.device, _zeros(K).dtype) for name, block in K.blocks.items()}
    norms = _zeros(K, 1)
    with show_progress("optimal Kronecker", steps, risk.progress, "step") as line:
        for _ in range(steps):
            A = _best_factors(K, risk, "A", B)
            B = _best_factors(K, risk, "B", A)
            line.advance()
            before = norms
            norms = torch.cat([A[name].squared_norm().sqrt() * B[name].squared_norm().sqrt() for name in B])
            if bool(((norms - before).abs() <= tolerance * norms).all()):
                break
    return _operator(K, lambda block: Kronecker(A[block.name], B[block.name])).called("optimal_kronecker")


def _best_factors(K: KFAC, risk: EmpiricalRisk, side: Side, fixed: dict[str, Factor]) -> dict[str, Factor]:
    """Return the best factors on one side for fixed factors on the other side, by block."""
    found = _moments(K, risk, lambda block: _Contraction(K, block, side, fixed[block.name]))
    best = {}
    for name, moment in found.items():
        total = K.blocks[name].reduction_factor * moment.total
        norm = fixed[name].squared_norm().clamp(min=torch.finfo(total.dtype).tiny)
        best[name] = _factor(total / norm.reshape(-1, *[1] * (total.ndim - 1)))
    return best


class _Contraction(Moment):
    """Sums of `G^T B G` for side A, or of `G A G^T` for side B: dense matrices, or only their diagonals.

    `fixed` is the factor in the middle, from the block's other side, with a scale of one. `None` for the identity.
    """

    def __init__(self, K: KFAC, block: Block, side: Side, fixed: Factor | None = None) -> None:
        groups, rows, columns = block.layout.matrix_shape
        size = columns if side == "A" else rows
        self.total = _zeros(K, groups, size) if block.is_diagonal(side) else _zeros(K, groups, size, size)
        self.fixed = fixed
        self.side = side
        self.columns = columns

    def add(self, gradients: Tensor) -> None:
        # A bias that was not used has no column yet.
        gradients = pad(gradients.to(self.total), (0, self.columns - gradients.shape[3])).transpose(0, 1)
        gradients = gradients if self.side == "A" else gradients.transpose(2, 3)  # [groups, n, summed, kept]
        self._add_products(gradients, gradients if self.fixed is None else self.fixed.left(gradients))

    def add_use(self, use: Use, g: Tensor) -> None:
        """Add a use; without shared positions, `G^T B G` is `(g^T B g) x x^T`, and no gradient is formed."""
        if isinstance(use.inputs, Vectors):
            x, g_of_x = (t.to(self.total) for t in use.inputs.both(use, g))
            if x.shape[1] == 1:
                # The bias has an input of one, or none at all if it was not used.
                x = pad(x, (0, self.columns - x.shape[2]), value=float(use.ones))
                kept, summed = (x, g_of_x) if self.side == "A" else (g_of_x, x)
                kept, summed = kept.unsqueeze(0), summed.unsqueeze(0)  # [groups, n, 1, size]
                product = summed if self.fixed is None else self.fixed.right(summed)
                self._add_products(kept, (product * summed).sum(3, keepdim=True) * kept)
                return
        super().add_use(use, g)

    def _add_products(self, left: Tensor, right: Tensor) -> None:
        """Add the products of `left^T` and `right`, `[groups, n, summed, kept]` each."""
        if self.total.ndim == 2:
            self.total += (left * right).sum((1, 2))
        else:
            self.total.baddbmm_(left.flatten(1, 2).transpose(1, 2), right.flatten(1, 2))


class _PartialTraces(Moment):
    """Both contractions of a block with the identity."""

    def __init__(self, K: KFAC, block: Block) -> None:
        self.contractions = _Contraction(K, block, "A"), _Contraction(K, block, "B")

    @property
    def totals(self) -> list[Tensor]:
        return [contraction.total for contraction in self.contractions]

    def add(self, gradients: Tensor) -> None:
        for contraction in self.contractions:
            contraction.add(gradients)

    def add_use(self, use: Use, g: Tensor) -> None:
        for contraction in self.contractions:
            contraction.add_use(use, g)


class _OuterProducts(Moment):
    """Sums of outer products of flattened gradients."""

    def __init__(self, K: KFAC, block: Block) -> None:
        size = prod(block.layout.matrix_shape)
        self.total = _zeros(K, size, size)
        self.columns = block.layout.matrix_shape[2]

    def add(self, gradients: Tensor) -> None:
        flat = pad(gradients.to(self.total), (0, self.columns - gradients.shape[3])).flatten(1)
        self.total.addmm_(flat.T, flat)


def _kfac(risk: EmpiricalRisk, settings: dict[str, Any]) -> KFAC:
    """Compute KFAC, for its blocks. Raise for blocks without gradients."""
    K = KFAC(risk, **settings)
    if K.settings.fisher == "forward-only":
        raise ModelError("fisher='forward-only' has no gradients.", "Use KFAC, or another fisher.")
    exact = [name for name, block in K.blocks.items() if block.sharing == "exact"]
    if exact:
        raise ModelError(f"No rule covers {exact}, so they have only diagonals.", "Pass uncovered='skip'.")
    return K


def _moments(
    K: KFAC, risk: EmpiricalRisk, make: Callable[[Block], S | None], settings: Settings | None = None
) -> dict[str, S]:
    """Create moments of blocks (`None` to leave a block out), and accumulate all per-example gradients in them."""
    settings = settings or K.settings
    layouts = {block.layout.key: block.layout for block in K.blocks.values()}
    made = {name: moment for name, block in K.blocks.items() if (moment := make(block)) is not None}
    try:
        moments = {K.blocks[name].layout.key: moment for name, moment in made.items()}
        sweep(risk, PerDatumSums(settings, layouts, moments), settings, "gradients")
    except WITHOUT_VMAP as error:
        return _moments(K, risk, make, one_by_one(settings, error))
    return made


def _operator(K: KFAC, structure: Callable[[Block], Structure]) -> BlockDiagonal:
    """Return an operator with a structure for every block."""
    parts = [(block.layout, structure(block)) for block in K.blocks.values()]
    return BlockDiagonal(K.domain, stacked_with_zeros(parts, K.domain)).called("", K.of)


def _zeros(K: KFAC, *shape: int) -> Tensor:
    """Return zeros for a sum, in float32 or better."""
    return torch.zeros(shape, dtype=at_least_float32(K.dtype), device=K.device)


def _factor(values: Tensor) -> Factor:
    """Return the factor of matrices `[groups, d, d]`, or of diagonals `[groups, d]`."""
    return Factor.dense(values) if values.ndim == 3 else Factor.diagonal(values)


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
