"""Parameters that meet the batch later: broadcast parameters, derived parameters, copies."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from kfs.kfac.capture.parameters import Derived, Tracked
from kfs.kfac.capture.plan import Broadcast, Call, Copy, Plan
from kfs.kfac.sums.interface import Receiver
from kfs.kfac.sums.outer_products import full_precision

if TYPE_CHECKING:
    from kfs.kfac.capture.mode import Capture


def tap_broadcast(capture: "Capture", step: Broadcast, t: Tensor, call: Call) -> Tensor:
    """Expand (a view of) a parameter to a shape with batch axis, and return it with a tap."""
    z = t.expand(step.shape)
    with full_precision(z.device.type):
        receive = _broadcast_receiver(capture, step, t, z, call)
    return capture.tap(z, receive)


def _broadcast_receiver(capture: "Capture", step: Broadcast, t: Tensor, z: Tensor, call: Call) -> Receiver:
    """Take note of the use of a parameter that is broadcast, and return what takes its gradients."""
    if step.plan is not None:
        (plan,) = settled(capture, step.plan, call, z)
        return capture.use(plan, None)
    derived = capture.tracker.get(t).derived
    assert derived is not None  # noqa: S101 (there is no third kind)
    read: Any = step.read
    collect = derived.receiver() if step.aligned else derived.collector()
    return lambda g: collect(read(g))


def follow(
    capture: "Capture",
    plan: Plan,
    call: Call,
    x: Tensor,
    out: Tensor,
    key: Any,
) -> Tensor | None:
    """Follow the output of a use whose inputs `x` do not depend on the data; `key` identifies the call.

    Returns:
        The output; `None` if it cannot be followed, because a bias would need gradients of its own.
    """
    if len(capture.session.settle(plan, call, out, capture.sums.placement, firmly=False)) > 1:
        return None

    def add_use(with_batch: bool) -> Receiver:
        (mine,) = settled(capture, plan, call, out)
        return capture.use(mine, x if with_batch else x.expand(capture.num_data, *x.shape))

    return add_derived(capture, out, plan.layout.weight, key, add_use)


def add_derived(capture: "Capture", out: Tensor, name: str, token: Any, add_use: Callable[[bool], Receiver]) -> Tensor:
    """Follow the output of an operation that has met no data yet; `add_use` is that of `Derived`."""
    out = out.contiguous()
    derived = Derived(add_use)
    capture.derived.append(derived)
    capture.tracker.add(Tracked(name, out, ("derived", token, out.shape), derived))
    return out


def track_copy(capture: "Capture", copy: Copy, result: Any, key: Any) -> Any:
    """Take a copy of a whole parameter for it; a view needs nothing."""
    if isinstance(result, Tensor) and capture.tracker.find(result) is None:
        capture.tracker.add(Tracked(copy.name, result, ("copy", key, result.dtype)))
    return result


def settled(capture: "Capture", plan: Plan, call: Call, like: Tensor) -> tuple[Plan, ...]:
    """Settle a plan once; it may meet the data in many batches."""
    known = capture.session.settled
    if plan not in known or not capture.fit(known[plan]):
        known[plan] = capture.session.settle(plan, call, like, capture.sums.placement)
    return known[plan]
