"""Rules: what multiplies an operation's parameters, and how its gradients are read. One file per kind of operation."""

from kfs.kfac.rules import (
    attention,
    convolution,
    elementwise,
    embedding,
    linear,
    normalization,
    recurrent,
)

RULES = {
    **linear.RULES,
    **convolution.RULES,
    **embedding.RULES,
    **normalization.RULES,
    **elementwise.RULES,
    **attention.RULES,
    **recurrent.RULES,
}

__all__ = ["RULES"]
