"""Check for listings of single layers, against the engine's factors and the GGN."""

from collections.abc import Callable

from torch import Tensor

from kfs.factors.kfac import KFAC
from kfs.factors.settings import Sharing
from kfs.problem.risk import EmpiricalRisk
from kfs.verification import verify, verify_differs

# From both factors to their Kronecker product, in the order of a flattening.
Kron = Callable[[Tensor, Tensor], Tensor]


def verify_layer(
    case: str,
    risk: EmpiricalRisk,
    sharing: Sharing,
    A: Tensor,
    B: Tensor,
    G: Tensor,
    exact: bool,
    shared: bool,
    kron: Kron,
) -> None:
    """Compare factors of layer `"0"` with the engine's, and with the GGN's block."""
    block = KFAC(risk, sharing=sharing).blocks["0"]
    verify("the engine computes the same input-based factor", block.A, A, case=case)
    verify("the engine computes the same gradient-based factor", block.B, B, case=case)
    if not exact:
        verify_differs("otherwise, KFAC is an approximation", kron(A, B), G, case=case)
        return
    verify(f"KFAC-{sharing} equals the GGN", kron(A, B), G, case=case)
    if shared:  # with one position, both variants are the same
        other: Sharing = "reduce" if sharing == "expand" else "expand"
        block = KFAC(risk, sharing=other).blocks["0"]
        verify_differs(f"KFAC-{other} does not", kron(block.A, block.B), G, case=case)
