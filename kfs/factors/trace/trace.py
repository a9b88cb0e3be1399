"""A trace: the tracked parameters of a model, and everything that is known about their uses.

It outlives batches, and serves a sweep over data and a training loop alike. Plans are found by key: the operation, the
shapes and strides of its arguments, the `autocast` state and the number of examples. A plan never changes. All plans
are dropped when a parameter's storage changes.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from kfs.errors import ModelError
from kfs.factors.layout import BlockMap
from kfs.factors.trace.plan import Call, Plan, Planned
from kfs.factors.trace.tracking import Tracker

Rule = Callable[..., Planned]
# A model whose shapes never repeat adds plans in every batch.
MOST_PLANS = 10_000


def no_rule(operation: str) -> str:
    """Return the reason why a parameter used by an operation is not covered."""
    return f"it is used by {operation}, for which there is no rule"


class Trace:
    """Tracked parameters, and plans for their uses.

    Args:
        params: The tracked parameters, by name.
        joint_bias: Whether a bias shares the block of its weight.
        mixing: Whether examples of a batch may influence each other, as with batch normalization in training.
        model: As in `Tracker`.
        block_map: The blocks that are known already. By default, none.
        rules: Rules by operation; each returns plans. `kfs.factors.rules.new_trace` passes all of them.
        fallback: Runs an operation that has no rule, or whose rule returned `None`. Takes the captured pass, the
            operation, its arguments and its keyword arguments.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        joint_bias: bool = True,
        mixing: bool = False,
        model: Module | None = None,
        block_map: BlockMap | None = None,
        *,
        rules: Mapping[Any, Rule],
        fallback: Callable[..., Any],
    ) -> None:
        self.tracker = Tracker(params, model)
        self.device = next((p.device for p in params.values() if not p.is_meta), torch.device("cpu"))
        # Device type of the `autocast` state that matters. `meta` has no `autocast`.
        self.device_type = self.device.type
        self.rules = rules
        self.fallback = fallback
        self.block_map = BlockMap() if block_map is None else block_map
        # Results of rules, by key of a call; a list of settled plans as soon as the output of the call was tapped. The
        # key of plans of broadcast and derived parameters is the rule's plan.
        self.plans: dict[Any, Any] = {}
        self.ready: dict[Any, list[Plan]] = {}  # the settled plans whose blocks are all in `block_map`
        # By the hash of a pass's operations: `(parameter, why)` of the hidden uses found in it, and the parameters that
        # predictions depend on.
        self.hidden_uses: dict[Any, tuple[set[tuple[str, str]], set[str]]] = {}
        self.joint_bias = joint_bias
        self.both_ways: set[str] = set()  # weights whose biases stay apart: see `BlockMap`
        self.mixing = mixing

    def renewed(self) -> "Trace":
        """Return a new trace for the same parameters, without plans and blocks."""
        tracker = self.tracker
        one = Trace(
            tracker.params, self.joint_bias, self.mixing, tracker.model, rules=self.rules, fallback=self.fallback
        )
        one.both_ways |= self.both_ways
        return one

    def learn(self, both_ways: Collection[str]) -> None:
        """Record weights that are used both plain and transposed, and drop all plans: their biases no longer join."""
        self.both_ways |= set(both_ways)
        self.forget_plans()

    def forget_plans(self) -> None:
        """Drop everything that depends on the storage of parameters."""
        self.plans.clear()
        self.ready.clear()
        self.hidden_uses.clear()

    def restart_blocks(self) -> None:
        """Forget which blocks exist, but keep plans: a training step may use other rows of a parameter."""
        self.block_map = BlockMap()
        self.ready.clear()

    def plans_of(self, key: Any) -> list[Plan] | None:
        """Return the settled plans of a call; `None` if there are none that fit the existing blocks."""
        plans = self.plans.get(key)
        if type(plans) is not list:
            return None
        for plan in plans:
            if plan.fits and not self.block_map.admit(plan.layout):
                return None
        self.ready[key] = plans
        return plans

    def settled(self, key: Any, planned: Iterable[Plan], call: Call, like: Tensor) -> list[Plan]:
        """Return the settled plans of a call; settle them if there are none that fit the existing blocks.

        A plan is settled when the block of its use has been chosen: a joint block for weight and bias, or one for each.

        Args:
            key: The key of the call.
            planned: The plans that a rule returned.
            call: The call that they belong to.
            like: The operation's output, for its dtype and device.

        Returns:
            One plan for each of `planned`, or two if there is a bias that does not join the weight's block.
        """
        found = self.ready.get(key) or self.plans_of(key)
        if found is not None:
            return found
        found = []
        for plan in planned:
            left: Plan | None = plan
            while left is not None:  # the weight's plan, and the bias's if it does not join
                if left.mixes and not self.mixing:
                    raise ModelError(
                        f"F.{left.operation} is called with training=True: the prediction for one example depends on "
                        "the rest of its batch.",
                        "Call model.eval() first, or pass training=False.",
                    )
                bias = left.bias
                name = bias.layout.weight if bias is not None and left.joins else None
                may_join = self.joint_bias and left.layout.weight not in self.both_ways
                layout, side = self.block_map.place(left.layout, name if may_join else None)
                fits = self.block_map.admit(layout)
                joint = name is not None and layout.bias == name and side == "A"
                settled = replace(left, layout=layout, side=side, ones=joint, fits=fits)
                found.append(replace(settled, narrow=call.narrow, dtype=like.dtype, device=like.device))
                left = None if joint else bias
        self.plans[key] = self.ready[key] = found
        return found
