"""Structures: algebra on blocks, however they are stored."""

from kfs.kfac.structures.block_diagonal import BlockDiagonal
from kfs.kfac.structures.congruence import Congruence
from kfs.kfac.structures.damping import (
    METHODS,
    Damping,
    Method,
    Relative,
    absolute_damping,
    damped,
    damped_inverse,
    damping_by_name,
)
from kfs.kfac.structures.decompositions import BlockError, checking_later, computable
from kfs.kfac.structures.dense import Dense
from kfs.kfac.structures.eigenbasis import Eigenbasis
from kfs.kfac.structures.factor import Factor
from kfs.kfac.structures.kronecker import Kronecker
from kfs.kfac.structures.kronecker_sum import IterativeInverse, KroneckerSum
from kfs.kfac.structures.looking import chosen, describe_factor
from kfs.kfac.structures.stack import Stack, stacked, stacked_with_zeros
from kfs.kfac.structures.structure import Structure

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
