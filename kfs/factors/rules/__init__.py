"""Rules: how an operation uses its parameters, and how its gradients are read. One file per kind of operation.

A rule is a pure function that returns a plan; see `kfs.factors.trace.plan`.
"""

from collections.abc import Mapping
from functools import cache
from inspect import signature
from typing import Any

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
from kfs.factors.trace.plan import Call, Planned
from kfs.factors.trace.trace import Rule, Trace

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
    rules = {func: asked(rule) for func, rule in RULES.items()}
    return Trace(params, rules, without_rule, joint_bias, mixing, model, block_map)


@cache
def asked(rule: Rule) -> Rule:
    """Return a rule that returns `None` if an operation is called with arguments that the rule does not have.

    The signature of a rule has the supported arguments, with the names that PyTorch documents.
    """
    known = signature(rule)

    def ask(call: Call, *args: Any, **named: Any) -> Planned:
        try:
            known.bind(call, *args, **named)
        except TypeError:
            return None
        return rule(call, *args, **named)

    return ask


__all__ = ["RULES", "asked", "new_trace"]
