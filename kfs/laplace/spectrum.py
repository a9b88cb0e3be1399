"""Eigenvalues of the curvature by block, and how large its parameters are: all that evidence depends on."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kfs.errors import SolverError
from kfs.kfac.structures import BlockDiagonal, Stack, Structure
from kfs.sharded import whole


@dataclass(frozen=True)
class BlockSpectrum:
    """What the marginal likelihood depends on in one block.

    Attributes:
        eigenvalues: Those of the log-likelihood's negative curvature, in float64, not negative.
        squared_norm: Sum of squared parameters.
    """

    eigenvalues: Tensor
    squared_norm: float

    def log_determinant_ratio(self, prior: float | Tensor) -> Tensor:
        """Return the logarithm of the posterior precision's determinant over that of the prior's."""
        # In this form, small eigenvalues are not lost beside a large prior.
        return (self.eigenvalues / prior).log1p().sum()

    def effective_number(self, prior: float) -> float:
        """Return how many parameters the data determine rather than the prior: the sum of `v / (v + prior)`."""
        return float((self.eigenvalues / (self.eigenvalues + prior)).sum())


def decomposed(K: BlockDiagonal, scale: float) -> BlockDiagonal:
    """Return a multiple of the curvature, by eigenvalues and eigenvectors where blocks are Kronecker products.

    Factors of KFAC remember their decompositions, so that this takes no time the second time.
    """
    stacks = [Stack(stack.layouts, stack.apply(_decomposed).scaled(scale)) for stack in K.stacks]
    return BlockDiagonal(K.domain, stacks).called(f"curvature of the log-likelihood, {type(K).__name__}", K.of)


def _decomposed(structure: Structure) -> Structure:
    return structure.eigenbasis()


def spectra(curvature: BlockDiagonal, params: Mapping[str, Tensor]) -> dict[str, BlockSpectrum]:
    """Return the spectrum of each block, by name.

    Args:
        curvature: That of the log-likelihood.
        params: The parameters, by name.

    Raises:
        SolverError: If a block has a negative eigenvalue, which is not that of round-off.
    """
    columns = {name: whole(p.detach()).double().unsqueeze(0) for name, p in params.items()}
    found: dict[str, BlockSpectrum] = {}
    for stack in curvature.stacks:
        values = stack.apply(lambda structure: structure.eigenvalues())
        noise = _round_off(values)
        for layout, part in stack.slices():
            mine = values[part].double()
            if bool((mine < -noise[part].unsqueeze(1)).any()):
                raise SolverError(
                    f"Block {layout.name!r} has a negative eigenvalue, {float(mine.min()):.3g}.",
                    "A posterior needs curvature that is positive semi-definite: use the GGN or the Fisher.",
                )
            squared_norm = float(layout.matrix(columns).square().sum())
            found[layout.name] = BlockSpectrum(mine.clamp(min=0).flatten(), squared_norm)
    return found


def _round_off(values: Tensor) -> Tensor:
    """Return a bound on the errors of eigenvalues, `[stack]`: those of sums grow with the number of data."""
    largest = values.abs().amax(1).double()
    bound: Tensor = largest * torch.finfo(values.dtype).eps ** 0.5
    return bound
