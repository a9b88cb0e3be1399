r"""Optimal brain damage and surgeon: the cost of removing weights, and updates of the remaining ones.

Near a minimum, the loss grows by $\tfrac12 \Delta^\top C \Delta$ if weights change by $\Delta$, where $C$ is the damped
curvature.

- *Optimal brain damage* (LeCun et al., 1989) sets weight $i$ to zero, which costs $\tfrac12 C_{ii} w_i^2$.
- *Optimal brain surgeon* (Hassibi & Stork, 1992) also changes all other weights to minimize the loss, which costs
  $\tfrac12 w_i^2 / (C^{-1})_{ii}$.

Weights are removed in the order of these scores. A score is inaccurate after many other weights were removed: weights
that compensate for removed ones become more important. Therefore, weights are removed in several steps. After each one,
the remaining weights adapt and are scored again. Their update is computed for all removed weights of a block together.
With kept weights $k$ and removed weights $r$, it is


$$
w_k \leftarrow w_k + C_{kk}^{-1} C_{kr} w_r = w_k - (C^{-1})_{kr} \left((C^{-1})_{rr}\right)^{-1} w_r .
$$

This is the minimum over all weights with $w_r = 0$. The first form is solved using a Cholesky factor if few weights are
kept, the second form if few are removed. In between, the first form is solved using conjugate gradients.
"""

import torch
from torch import Tensor

from kfs.compress.layers import Layer
from kfs.errors import SolverError
from kfs.factors.blocks import Eigenbasis, Kronecker, Structure
from kfs.operators import LinearOperator, solve
from kfs.operators.space import Columns, Space

# Systems up to this size are solved using Cholesky factors.
_DENSE = 4096
# Submatrices without a formula are formed from products with at most this many numbers at a time.
_AT_ONCE = 2**24
_TOLERANCE = 1e-8
# The same for intermediate updates, which only decide which weights to remove next, or which damping to use.
_DENSE_ROUGHLY = 1024
_TOLERANCE_ROUGHLY = 1e-3
_ITERATIONS_ROUGHLY = 300


def damage(layer: Layer) -> Tensor:
    """Return twice the cost of setting single weights to zero, `[groups, d_B, d_A]`."""
    return layer.matrix.square() * (layer.structure.diagonal() + layer.damping)


def surgeon(layer: Layer, matrix: Tensor) -> Tensor:
    """Return twice the cost of removing single weights if all other weights adapt, `[groups, d_B, d_A]`."""
    return matrix.square() / layer.damped_inverse.diagonal()


def cost_of_columns(layer: Layer, num_channels: int) -> Tensor:
    """Return twice the cost of removing all columns of a channel if all other weights adapt, `[channels]`.

    The layer has no groups. Each of its input channels has equally many adjacent columns. The bias belongs to none.
    """
    inverse = layer.damped_inverse
    width = layer.layout.column_size // num_channels
    costs = []
    for start in range(0, layer.layout.column_size, width):
        part = slice(start, start + width)
        W = layer.matrix[0, :, part]
        if isinstance(inverse, Eigenbasis):
            # In the eigenbasis of the gradient side, rows are independent: solve one small system for each row.
            W = inverse.Q_B.T.to_dense()[0] @ W
            Q = inverse.Q_A.to_dense()[0][part]
            system = (Q * inverse.values[0].unsqueeze(1)) @ Q.T
            solved = torch.linalg.solve(system, W.unsqueeze(2)).squeeze(2)
        else:
            chosen = torch.zeros_like(layer.matrix[0], dtype=torch.bool)
            chosen[:, part] = True
            solved = _solve_dense(_submatrix(inverse, chosen), W.flatten()).reshape(W.shape)
        costs.append((W * solved).sum())
    return torch.stack(costs)


def adapted(layer: Layer, kept: Tensor, roughly: bool = False) -> Tensor:
    """Return the matrices that minimize the quadratic model, with weights at zero outside of the mask `kept`.

    With `roughly`, three digits suffice.

    Raises:
        SolverError: If conjugate gradients do not converge, or if curvature is singular and not damped.
    """
    inverse = layer.damped_inverse
    groups = range(len(layer.matrix))
    return torch.stack([_adapted_group(layer, inverse[g : g + 1], g, kept[g], roughly) for g in groups])


def _adapted_group(layer: Layer, inverse: Structure, group: int, kept: Tensor, roughly: bool) -> Tensor:
    """Return the optimal matrix of one group, `[d_B, d_A]`; see `adapted`."""
    W = layer.matrix[group]
    structure = layer.structure[group : group + 1]
    result = torch.where(kept, W, 0.0)
    removed = torch.where(kept, 0.0, W)
    num_kept = int(kept.sum())
    num_removed = kept.numel() - num_kept
    if 0 in {num_kept, num_removed}:
        return result
    # Solve the smaller one of both systems; see the formulas above.
    dense = min(_DENSE_ROUGHLY, _DENSE) if roughly else _DENSE
    if num_removed <= min(num_kept, dense):
        system = _submatrix(inverse, ~kept)
        multipliers = torch.zeros_like(W)
        multipliers[~kept] = _solve_dense(system, W[~kept])
        change = -inverse.multiply(multipliers[None, None])[0, 0]
    else:
        force = structure.multiply(removed[None, None])[0, 0]  # damping is diagonal, so it does not contribute
        change = torch.zeros_like(W)
        if num_kept <= dense:
            system = _submatrix(structure, kept)
            system.diagonal().add_(layer.damping)
            change[kept] = _solve_dense(system, force[kept])
        else:
            change = _solve_iteratively(layer, structure, inverse, kept, torch.where(kept, force, 0.0), roughly)
    return torch.where(kept, result + change, 0.0)


def _solve_dense(system: Tensor, b: Tensor) -> Tensor:
    """Solve a positive definite system using a Cholesky factor."""
    L = torch.linalg.cholesky(system)
    return torch.cholesky_solve(b.unsqueeze(1), L).squeeze(1)


def _submatrix(structure: Structure, chosen: Tensor) -> Tensor:
    """Return the submatrix of one block for entries `[d_B, d_A]` of its matrix, given as a mask."""
    rows, columns = chosen.nonzero(as_tuple=True)
    if isinstance(structure, Kronecker):
        A, B = structure.A.to_dense()[0], structure.B.to_dense()[0]
        return B[rows][:, rows] * A[columns][:, columns]
    if isinstance(structure, Eigenbasis):
        return _submatrix_in_eigenbasis(structure, rows, columns)
    parts = []
    places = torch.arange(len(rows), device=rows.device)
    for part in places.split(max(1, _AT_ONCE // chosen.numel())):
        units = torch.zeros(len(part), *chosen.shape, dtype=torch.float64, device=rows.device)
        units[part - part[0], rows[part], columns[part]] = 1.0
        parts.append(structure.multiply(units[None])[0][:, rows, columns])
    return torch.cat(parts)


def _submatrix_in_eigenbasis(basis: Eigenbasis, rows: Tensor, columns: Tensor) -> Tensor:
    """Return the submatrix of one block for some entries of its matrix, which are sorted by rows."""
    Q_A, Q_B = basis.Q_A.to_dense()[0], basis.Q_B.to_dense()[0]
    vectors = Q_A[columns]
    parts = []
    for row in rows.unique().tolist():
        # The coupling of this row with all rows, in the eigenbasis of the input side.
        coupling = (Q_B * Q_B[row]) @ basis.values[0]
        parts.append(vectors[rows == row] @ (vectors * coupling[rows]).T)
    return torch.cat(parts)


class _OnKept(LinearOperator):
    """One block on the kept entries, and the identity on removed ones, which makes the operator definite."""

    symmetric = True

    def __init__(self, structure: Structure, damping: float, kept: Tensor) -> None:
        space = Space({"matrix": kept.shape}, torch.float64, kept.device)
        super().__init__(space, space)
        self.structure = structure
        self.damping = damping
        self.kept = kept

    def multiply(self, columns: Columns) -> Columns:
        M = columns["matrix"]
        inside = torch.where(self.kept, M, 0.0)
        product = self.structure.multiply(inside[None])[0] + self.damping * inside
        return {"matrix": torch.where(self.kept, product, M)}

    multiply_transposed = multiply


def _solve_iteratively(
    layer: Layer, structure: Structure, inverse: Structure, kept: Tensor, force: Tensor, roughly: bool
) -> Tensor:
    """Solve the system of kept weights using conjugate gradients, preconditioned by the inverse of the whole block."""
    solution = solve(
        _OnKept(structure, layer.damping, kept),
        {"matrix": force},
        preconditioner=_OnKept(inverse, 0.0, kept),
        tolerance=_TOLERANCE_ROUGHLY if roughly else _TOLERANCE,
        max_iterations=_ITERATIONS_ROUGHLY if roughly else None,
    )
    if not (solution.converged or roughly):
        raise SolverError(
            f"The update of the weights that layer {layer.name!r} keeps did not converge: residual "
            f"{solution.residuals[-1]:.1e} after {solution.iterations} iterations.",
            "Pass more damping, or update=False.",
        )
    return solution.x["matrix"]
