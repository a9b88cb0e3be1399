r"""Damping: three ways to invert Kronecker products that are close to singular.

Curvature matrices of neural networks have many tiny eigenvalues, so that one inverts them after adding something:

- `"exact"`: $(B \otimes A + \delta I)^{-1}$, to round-off, from the eigendecompositions of both factors.
- `"factored"` (Martens & Grosse, 2015): $(B + \tfrac{\sqrt{\delta}}{\pi} I)^{-1} \otimes (A + \pi \sqrt{\delta}
  I)^{-1}$. It stays a Kronecker product, and Cholesky factors suffice. Multiplied out, it adds $\delta I$ and two more
  terms, $\pi \sqrt{\delta}\, B \otimes I + \tfrac{\sqrt{\delta}}{\pi} I \otimes A$, which are small for
  $\pi^2 = \frac{\mathrm{tr}(A) / d_A}{\mathrm{tr}(B) / d_B}$, by the trace norm. It damps more than `"exact"` does.
- `"per-factor"`: $(B + \delta I)^{-1} \otimes (A + \delta I)^{-1}$. Simple and common, but factors have no common
  unit: how much it damps depends on how a scale is split between them.
"""

from typing import Literal

import torch
from torch import Tensor

from kfs.errors import ModelError
from kfs.kfac.structures.kronecker import Kronecker
from kfs.kfac.structures.structure import Structure

Method = Literal["exact", "factored", "per-factor"]
METHODS = ("exact", "factored", "per-factor")


def damped_inverse(structure: Structure, damping: Tensor, method: Method) -> Structure:
    """Invert blocks after damping.

    Args:
        structure: The blocks; other than Kronecker products have no factors, and are damped exactly.
        damping: One number per unit, `[U]`, not negative.
        method: `"exact"`, `"factored"` or `"per-factor"`.

    Returns:
        The inverses: Kronecker products, or eigenvalues and eigenvectors for exact damping.
    """
    if not (damping != 0).any():
        return structure.inverse()
    if method == "exact" or not isinstance(structure, Kronecker):
        if method != "exact":
            raise ModelError(
                f"Blocks without Kronecker factors cannot have {method} damping.", "Use method='exact' for them."
            )
        return structure.power(-1.0, damping)
    if method == "per-factor":
        return Kronecker(structure.A.shift(damping).inverse(), structure.B.shift(damping).inverse())
    pi = trace_norm_ratio(structure)
    root = damping.to(pi).sqrt()
    return Kronecker(structure.A.shift(pi * root).inverse(), structure.B.shift(root / pi).inverse())


def trace_norm_ratio(structure: Kronecker) -> Tensor:
    """Return `pi` of Martens & Grosse (2015), `[U]`: the root of the ratio of the factors' mean eigenvalues."""
    mean_A, mean_B = structure.A.trace() / structure.columns, structure.B.trace() / structure.rows
    ratio = mean_A / mean_B
    return torch.where((mean_A > 0) & (mean_B > 0), ratio, 1.0).sqrt()


if __name__ == "__main__":
    from kfs.kfac.structures.factor import Factor
    from kfs.verification import verify, verify_differs, verify_that

    torch.manual_seed(0)
    X, G = torch.randn(4, 3, dtype=torch.float64), torch.randn(1, 2, dtype=torch.float64)
    A, B, delta = X.T @ X, 0.01 * G.T @ G, 0.1
    K = Kronecker(Factor.dense(A.unsqueeze(0)), Factor.dense(B.unsqueeze(0)))
    rescaled = Kronecker(Factor.dense(100 * A.unsqueeze(0)), Factor.dense(B.unsqueeze(0) / 100))
    I_A, I_B = torch.eye(3, dtype=torch.float64), torch.eye(2, dtype=torch.float64)
    damping = torch.full((1,), delta, dtype=torch.float64)
    inverses = {m: damped_inverse(K, damping, m).to_dense()[0] for m in ("exact", "factored", "per-factor")}
    others = {m: damped_inverse(rescaled, damping, m).to_dense()[0] for m in ("exact", "factored", "per-factor")}

    exact = torch.linalg.inv(torch.kron(B, A) + delta * torch.kron(I_B, I_A))
    verify("exact damping adds a multiple of the identity", inverses["exact"], exact)
    pi = float(trace_norm_ratio(K))
    sides = torch.kron(pi * delta**0.5 * B, I_A) + torch.kron(I_B, delta**0.5 / pi * A)
    expanded = torch.linalg.inv(torch.kron(B, A) + sides + delta * torch.kron(I_B, I_A))
    verify("factored damping adds two terms more", inverses["factored"], expanded)
    verify_differs("so that it differs from exact damping", inverses["factored"], exact)
    gap = torch.linalg.eigvalsh(exact - inverses["factored"]).min()
    verify_that("and damps more, in every direction", bool(gap > 0))
    verify("exact damping does not care how a scale is split between factors", others["exact"], inverses["exact"])
    verify("nor does factored damping", others["factored"], inverses["factored"])
    verify_differs("per-factor damping does", others["per-factor"], inverses["per-factor"])
