"""A session: what outlives batches. Which parameters are tracked, and all plans for their uses.

It serves a sweep over data and a training loop alike. A plan belongs to a call of an operation with arguments of some
shapes and strides, under some `autocast`, with some number of examples. It dies with the storage of a parameter.
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
    """Say why a parameter is not covered that some operation uses."""
    return f"it is used by {operation}, for which there is no rule"


class Session:
    """Tracked parameters, and plans for their uses.

    Args:
        params: The tracked parameters, by name.
        rules: By operation, what returns plans.
        fallback: What runs an operation that has no rule, or whose rule gave up: takes the capture, the operation, its
            arguments and its keyword arguments.
        joint_bias: Whether a bias shares the block of its weight.
        mixing: Whether data of a batch may influence each other, as by batch normalization in training.
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
        # Whose `autocast` counts. There is none on `meta`.
        self.device_type = self.device.type
        self.rules = rules
        self.fallback = fallback
        # What a rule returned, by call; a list of settled plans after the first use of an output that is tapped.
        self.plans: dict[Any, Any] = {}
        # Settled plans of parameters that meet the data later, by what a rule returned.
        self.settled: dict[Plan, tuple[Plan, ...]] = {}
        # `(parameter, why)` of hidden uses that were found in passes, and parameters that predictions depend on, by the
        # operations of a pass.
        self.hidden_uses: dict[Any, tuple[set[tuple[str, str]], set[str]]] = {}
        self.joint_bias = joint_bias
        self.both_ways: set[str] = set()  # weights that their biases do not join: see `BlockMap`
        self.mixing = mixing

    def renewed(self) -> "Session":
        """Return a session for the same parameters that has no plans."""
        tracker = self.tracker
        one = Session(tracker.params, self.rules, self.fallback, self.joint_bias, self.mixing, tracker.model)
        one.both_ways |= self.both_ways
        return one

    def learn(self, both_ways: Collection[str]) -> None:
        """Take note of weights that are used both ways round. Plans in which their biases join them are forgotten."""
        self.both_ways |= set(both_ways)
        self.forget_plans()

    def forget_plans(self) -> None:
        """Forget everything that depends on where parameters are stored."""
        self.plans.clear()
        self.settled.clear()
        self.hidden_uses.clear()

    def settle(self, plan: Plan, call: Call, like: Tensor, placement: BlockMap) -> tuple[Plan, ...]:
        """Decide to which block a use belongs: that of the weight joint with its bias, or one for each of them.

        Args:
            plan: What a rule returned.
            call: The call that it is for.
            like: The operation's output; has dtype and device.
            placement: The blocks that are there already.

        Returns:
            One plan, or two if there is a bias that does not join.
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
        layout, side = placement.place(plan.layout, name if may_join else None)
        fits = placement.admit(layout)
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
        return (settled, *self.settle(bias, call, like, placement))
