"""Blocks: algebra on blocks of a curvature matrix, for all structures in which they are stored."""

from kfs.factors.blocks.block_diagonal import BlockDiagonal
from kfs.factors.blocks.congruence import Congruence
from kfs.factors.blocks.damping import (
    METHODS,
    Damping,
    Method,
    Relative,
    absolute_damping,
    damped,
    damped_inverse,
    damping_by_name,
)
from kfs.factors.blocks.decompositions import BlockError, checking_later, computable
from kfs.factors.blocks.dense import Dense
from kfs.factors.blocks.display import chosen, describe_factor
from kfs.factors.blocks.eigenbasis import Eigenbasis
from kfs.factors.blocks.factor import Factor
from kfs.factors.blocks.kronecker import Kronecker
from kfs.factors.blocks.kronecker_sum import IterativeInverse, KroneckerSum
from kfs.factors.blocks.stack import Stack, stacked, stacked_with_zeros
from kfs.factors.blocks.structure import Structure

__all__ = [
    "METHODS",
    "BlockDiagonal",
    "BlockError",
    "Congruence",
    "Damping",
    "Dense",
    "Eigenbasis",
    "Factor",
    "IterativeInverse",
    "Kronecker",
    "KroneckerSum",
    "Method",
    "Relative",
    "Stack",
    "Structure",
    "absolute_damping",
    "checking_later",
    "chosen",
    "computable",
    "damped",
    "damped_inverse",
    "damping_by_name",
    "describe_factor",
    "stacked",
    "stacked_with_zeros",
]
