"""A session: the state that is kept between batches, which is the tracked parameters and all plans for their uses.

It serves a sweep over data and a training loop alike. A plan is cached by the operation, the shapes and strides of its
arguments, the `autocast` state and the number of examples. It is dropped when a parameter's storage changes.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from kfs.errors import ModelError
from kfs.factors.accumulate.block_sums import BlockMap
from kfs.factors.trace.plan import Call, Plan, Planned
from kfs.factors.trace.tracking import Tracker

Rule = Callable[..., Planned]


def no_rule(operation: str) -> str:
    """Return the reason why a parameter used by an operation is not covered."""
    return f"it is used by {operation}, for which there is no rule"


class Session:
    """Tracked parameters, and plans for their uses.

    Args:
        params: The tracked parameters, by name.
        rules: Rules by operation; each returns plans.
        fallback: Runs an operation that has no rule, or whose rule returned `None`. Takes the capture, the operation,
            its arguments and its keyword arguments.
        joint_bias: Whether a bias shares the block of its weight.
        mixing: Whether examples of a batch may influence each other, as with batch normalization in training.
        model: As in `Tracker`.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        rules: Mapping[Any, Rule],
        fallback: Callable[..., Any],
        joint_bias: bool = True,
        mixing: bool = False,
        model: Module | None = None,
    ) -> None:
        self.tracker = Tracker(params, model)
        self.device = next((p.device for p in params.values() if not p.is_meta), torch.device("cpu"))
        # Device type of the `autocast` state that matters. `meta` has no `autocast`.
        self.device_type = self.device.type
        self.rules = rules
        self.fallback = fallback
        # Results of rules, by call; a list of settled plans as soon as the output of the call was tapped.
        self.plans: dict[Any, Any] = {}
        # Settled plans of broadcast and derived parameters and their uses, by the rule's plan.
        self.settled: dict[Plan, tuple[Plan, ...]] = {}
        # By the hash of a pass's operations: `(parameter, why)` of the hidden uses found in it, and the parameters that
        # predictions depend on.
        self.hidden_uses: dict[Any, tuple[set[tuple[str, str]], set[str]]] = {}
        self.joint_bias = joint_bias
        self.both_ways: set[str] = set()  # weights whose biases stay apart: see `BlockMap`
        self.mixing = mixing

    def renewed(self) -> "Session":
        """Return a new session for the same parameters, without plans."""
        tracker = self.tracker
        one = Session(tracker.params, self.rules, self.fallback, self.joint_bias, self.mixing, tracker.model)
        one.both_ways |= self.both_ways
        return one

    def learn(self, both_ways: Collection[str]) -> None:
        """Record weights that are used both plain and transposed, and drop all plans: their biases no longer join."""
        self.both_ways |= set(both_ways)
        self.forget_plans()

    def forget_plans(self) -> None:
        """Drop everything that depends on the storage of parameters."""
        self.plans.clear()
        self.settled.clear()
        self.hidden_uses.clear()

    def settle(self, plan: Plan, call: Call, like: Tensor, block_map: BlockMap) -> tuple[Plan, ...]:
        """Choose the block of a use: a joint block for weight and bias, or one for each.

        Args:
            plan: The plan that a rule returned.
            call: The call that it belongs to.
            like: The operation's output, for its dtype and device.
            block_map: The existing blocks.

        Returns:
            One plan, or two if there is a bias that does not join the weight's block.
        """
        if plan.mixes and not self.mixing:
            raise ModelError(
                f"F.{plan.operation} is called with training=True: the prediction for one example depends on the rest "
                "of its batch.",
                "Call model.eval() first, or pass training=False.",
            )
        bias = plan.bias
        name = bias.layout.weight if bias is not None and plan.joins else None
        may_join = self.joint_bias and plan.layout.weight not in self.both_ways
        layout, side = block_map.place(plan.layout, name if may_join else None)
        fits = block_map.admit(layout)
        joint = name is not None and layout.bias == name and side == "A"
        settled = replace(
            plan,
            layout=layout,
            side=side,
            ones=joint,
            fits=fits,
            narrow=call.narrow,
            dtype=like.dtype,
            device=like.device,
        )
        if bias is None or joint:
            return (settled,)
        return (settled, *self.settle(bias, call, like, block_map))
