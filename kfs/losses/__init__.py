"""Losses: criterion, reduction factor, derivatives and draws, vectorized over a batch, one file per family."""

from kfs.losses.cross_entropy import TokenCrossEntropy
from kfs.losses.custom import Custom
from kfs.losses.interface import Loss
from kfs.losses.lookup import describe
from kfs.losses.preference import DPO, RewardPair
from kfs.losses.square import HalfSquaredError

__all__ = ["DPO", "Custom", "HalfSquaredError", "Loss", "RewardPair", "TokenCrossEntropy", "describe"]
