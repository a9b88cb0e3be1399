"""Rules: how an operation uses its parameters, and how its gradients are read. One file per kind of operation.

A rule is a pure function that returns a plan; see `kfs.factors.trace.plan`. Its signature has the supported arguments,
with the names that PyTorch documents. A call with other arguments has no rule.
"""

from collections.abc import Mapping

from torch import Tensor
from torch.nn import Module

from kfs.factors.accumulate.block_sums import BlockMap
from kfs.factors.rules import (
    attention,
    convolution,
    elementwise,
    embedding,
    experts,
    linear,
    normalization,
    recurrent,
)
from kfs.factors.rules.fallback import without_rule
from kfs.factors.trace.trace import Trace

RULES = {
    **linear.RULES,
    **experts.RULES,
    **convolution.RULES,
    **embedding.RULES,
    **normalization.RULES,
    **elementwise.RULES,
    **attention.RULES,
    **recurrent.RULES,
}


def new_trace(
    params: Mapping[str, Tensor],
    joint_bias: bool = True,
    mixing: bool = False,
    model: Module | None = None,
    block_map: BlockMap | None = None,
) -> Trace:
    """Return a new trace with all rules. Arguments are those of `Trace`."""
    return Trace(params, RULES, without_rule, joint_bias, mixing, model, block_map)


__all__ = ["RULES", "new_trace"]
