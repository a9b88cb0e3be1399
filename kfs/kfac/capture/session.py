"""A session: what outlives batches. Which parameters are tracked, which blocks they make, and all plans.

It serves a sweep over data and a training loop alike. A plan belongs to a call of an operation with arguments of some
shapes and strides, under some `autocast`, with some number of data. It dies with the storage of a parameter.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from kfs.errors import ModelError
from kfs.kfac.capture.parameters import Tracker
from kfs.kfac.capture.plan import Call, Plan, Planned
from kfs.kfac.layout import Key, Layout, Side

Rule = Callable[..., Planned]


class Session:
    """Tracked parameters, their blocks, and plans for their uses.

    Args:
        params: The tracked parameters, by name.
        rules: By operation, what returns plans.
        fallback: What runs an operation that has no rule, or whose rule gave up: takes the capture, the operation, its
            arguments and its keyword arguments.
        joint_bias: Whether a bias shares the block of its weight.
        mixing: Whether data of a batch may influence each other, as by batch normalization in training.
        layouts: Blocks that are known from before.

    Attributes:
        tracker: Finds tracked parameters.
        device_type: Where they are.
        plans: What a rule returned, by call; a list of settled plans after the first use of an output that is tapped.
        hidden_uses: Hidden uses that were found in passes, by what a pass consists of.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        rules: Mapping[Any, Rule],
        fallback: Callable[..., Any],
        joint_bias: bool = True,
        mixing: bool = False,
        layouts: Iterable[Layout] = (),
    ) -> None:
        """Start without plans."""
        self.tracker = Tracker(params)
        self.device_type = next((p.device.type for p in params.values()), "cpu")
        self.rules = rules
        self.fallback = fallback
        self.plans: dict[Any, Any] = {}
        self.hidden_uses: dict[Any, set[tuple[str, str]]] = {}
        self._joint_bias = joint_bias
        self._mixing = mixing
        self._layouts: dict[Key, Layout] = {}
        self._blocks_of: dict[str, list[Layout]] = {}
        for layout in layouts:
            self._register(layout)

    def forget_plans(self) -> None:
        """Forget everything that depends on where parameters are stored."""
        self.plans.clear()
        self.hidden_uses.clear()

    def settle(self, plan: Plan, call: Call, like: Tensor, *, firmly: bool = True) -> tuple[Plan, ...]:
        """Decide to which block a use belongs: that of the weight joint with its bias, or one for each of them.

        Args:
            plan: What a rule returned.
            call: The call that it is for.
            like: The operation's output; has dtype and device.
            firmly: Whether the decision counts for further uses.

        Returns:
            One plan, or two if there is a bias that does not join.
        """
        if plan.mixes and not self._mixing:
            raise ModelError(
                f"F.{plan.operation} is called with training=True: the prediction for one datum depends on the rest "
                "of its batch.",
                "Call model.eval() first, or pass training=False.",
            )
        bias = plan.bias
        name = bias.layout.weight if bias is not None and plan.joins else None
        layout, side = self._place(plan.layout, name)
        fits = self._fits(layout)
        if fits and firmly and layout.key not in self._layouts:
            self._register(layout)
        joint = name is not None and layout.bias == name and side == "A"
        settled = replace(
            plan,
            layout=layout,
            side=side,
            ones=joint,
            fits=fits,
            batch=call.batch,
            narrow=call.narrow,
            dtype=like.dtype,
            device=like.device,
        )
        if bias is None or joint:
            return (settled,)
        return (settled, *self.settle(bias, call, like, firmly=firmly))

    def _place(self, layout: Layout, bias: str | None) -> tuple[Layout, Side]:
        """Return the layout of a weight's block, and on which side of it inputs are.

        The bias joins if that is wanted and does not contradict earlier uses. A weight that was used the other way
        round before (an embedding whose transpose computes the logits) has its inputs on the side of the gradients.
        """
        there = self._layouts.get(layout.key)
        if there is not None:
            turned = there.order == layout.order[layout.split :] + layout.order[: layout.split]
            if there.order != layout.order and turned and there.bias is None:
                return there, "B"
            return replace(layout, bias=there.bias), "A"
        if bias is None or not self._joint_bias:
            return layout, "A"
        taken = any(other.weight != layout.weight for other in self._blocks_of.get(bias, ()))
        return layout if taken else replace(layout, bias=bias), "A"

    def _fits(self, layout: Layout) -> bool:
        """Whether no other block has the same parameters in another way."""
        if layout.key in self._layouts:
            return layout == self._layouts[layout.key]
        start, stop = layout.rows
        others = [other for name in layout.params for other in self._blocks_of.get(name, ())]
        return all(
            other.weight == layout.weight and (other.rows[1] <= start or stop <= other.rows[0]) for other in others
        )

    def _register(self, layout: Layout) -> None:
        """Take note of a block."""
        self._layouts[layout.key] = layout
        for name in layout.params:
            self._blocks_of.setdefault(name, []).append(layout)
