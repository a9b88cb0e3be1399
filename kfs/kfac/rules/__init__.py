"""Rules: what multiplies an operation's parameters, and how its gradients are read. One file per kind of operation.

A rule is a pure function that returns a plan; see `kfs.kfac.capture.plan`.
"""

from collections.abc import Mapping

from torch import Tensor

from kfs.kfac.capture.session import Session
from kfs.kfac.rules import attention, convolution, elementwise, embedding, experts, linear, normalization, recurrent
from kfs.kfac.rules.fallback import without_rule

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


def new_session(params: Mapping[str, Tensor], joint_bias: bool = True, mixing: bool = False) -> Session:
    """Start a session with all rules; arguments are those of `Session`."""
    return Session(params, RULES, without_rule, joint_bias, mixing)


__all__ = ["RULES", "new_session"]
