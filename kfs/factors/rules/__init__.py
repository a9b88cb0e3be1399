"""Rules: how an operation uses its parameters, and how its gradients are read. One file per kind of operation.

A rule is a pure function that returns a plan; see `kfs.factors.trace.plan`. Its signature has the supported arguments,
with the names that PyTorch documents. A call with other arguments has no rule.
"""

from functools import partial

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


# Makes a trace with all rules. Arguments are those of `Trace`.
new_trace = partial(Trace, rules=RULES, fallback=without_rule)

__all__ = ["RULES", "new_trace"]
