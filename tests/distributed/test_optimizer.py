"""The optimizer in several processes: the same training as in one process with all data.

Errors are tested in `test_optimizer_errors`, states and traffic in `test_optimizer_state`.
"""

from typing import Any

import pytest

from tests.distributed.pool import Pool
from tests.distributed.training import Plan, accelerators, in_one_process, on_ranks

# The order of sums differs between ranks and one process. Twenty steps amplify the round-off.
TOLERANCE = 1e-12
# A quadratic model amplifies more: with data in another order, one process differs from itself by 4e-11.
QUADRATIC_TOLERANCE = 1e-9
EVEN = Plan((12, 12))
FAST = {"lr": 0.3, "factors_every": 2, "inverses_every": 4}


def train_with_accelerators(plan: Plan, settings: dict[str, Any]) -> Any:
    with accelerators():
        return on_ranks(plan, **settings)


def train_on_ranks(plan: Plan, settings: dict[str, Any]) -> Any:
    return on_ranks(plan, **settings)


def train_with_one_accelerator(plan: Plan, settings: dict[str, Any]) -> Any:
    with accelerators():
        return in_one_process(plan, **settings)


def train_alone(plan: Plan, settings: dict[str, Any]) -> Any:
    return in_one_process(plan, **settings)


@pytest.mark.parametrize(
    ("plan", "settings"),
    [
        pytest.param(EVEN, {}, id="as it is"),
        pytest.param(EVEN, FAST | {"fisher": "empirical", "kl_clip": 0.01}, id="empirical"),
        pytest.param(EVEN, FAST | {"fisher": "type-2"}, id="type-2"),
        pytest.param(EVEN, FAST | {"fisher": "forward-only", "sharing": "reduce"}, id="forward-only"),
        pytest.param(EVEN, FAST | {"eigen": True}, id="eigen"),
        pytest.param(EVEN, FAST | {"damping_method": "exact", "fisher": "empirical"}, id="exact damping"),
        pytest.param(EVEN, {"quadratic_model": True, "fisher": "type-2"}, id="quadratic model"),
        pytest.param(EVEN._replace(reduction="sum"), FAST, id="sum"),
        pytest.param(EVEN._replace(reduction="sum", early=True), FAST, id="an optimizer that was made before"),
        pytest.param(Plan((6, 6), passes=2), FAST, id="no_sync"),
        pytest.param(Plan((6, 6), passes=2, ddp=False), FAST | {"eigen": True}, id="own averages"),
        pytest.param(Plan((3, 1, 7, 5)), FAST, id="uneven"),
        pytest.param(Plan((3, 1, 7, 5), reduction="sum", ddp=False), FAST | {"eigen": True}, id="uneven sum"),
        pytest.param(Plan((5, 0, 4), reduction="sum"), FAST, id="empty batches"),
        pytest.param(Plan((4, 4, 4), net="experts", ddp=False), FAST, id="experts"),
        pytest.param(Plan((4, 4, 4), net="experts", ddp=False, sort=True), FAST, id="experts that rank 0 does not use"),
        pytest.param(Plan((4, 4, 4), net="tied"), FAST, id="tied"),
        pytest.param(EVEN._replace(outlier=6), FAST, id="an input that is far too large"),
    ],
)
def test_ranks_train_as_one_process(ranks: Pool, plan: Plan, settings: dict[str, Any]) -> None:
    """Twenty steps equal those of one process with all data and the same gradients, and ranks agree bit by bit."""
    (expected,) = ranks(1, train_alone, plan, settings)
    results = ranks(len(plan.parts), train_on_ranks, plan, settings)
    assert len({one.bits for one in results}) == 1
    distance = (results[0].params - expected.params).norm() / expected.params.norm()
    assert distance < (QUADRATIC_TOLERANCE if settings.get("quadratic_model") else TOLERANCE)
    assert expected.events.refused_statistics == (plan.outlier is not None)
    assert all(one.events == expected.events and one.uncovered == expected.uncovered for one in results)


@pytest.mark.parametrize(
    ("plan", "settings"),
    [
        pytest.param(EVEN, FAST | {"replay": True}, id="recorded"),
        pytest.param(Plan((6, 6), passes=2), FAST | {"fisher": "type-2"}, id="no_sync"),
        pytest.param(EVEN._replace(reduction="sum"), FAST | {"eigen": True}, id="eigen, sum"),
    ],
)
def test_accelerators(ranks: Pool, plan: Plan, settings: dict[str, Any]) -> None:
    """On asynchronous devices, ranks agree on flags there; in steps without factors, hosts exchange no messages."""
    (expected,) = ranks(1, train_with_one_accelerator, plan, settings)
    results = ranks(2, train_with_accelerators, plan, settings)
    assert len({one.bits for one in results}) == 1
    assert (results[0].params - expected.params).norm() / expected.params.norm() < TOLERANCE
    assert all(one.events == expected.events for one in results)


WRONG = {
    "own averages are inverted": ("kfs.optim.across_ranks.sum_at_owners", lambda *_: None),
    "all ranks draw the same labels": ("kfs.optim.across_ranks.Exchange._place_of_data", lambda _, n: (0, 2 * n)),
    "a mean over examples of one rank": ("kfs.optim.across_ranks._over_ranks", lambda told: told[0]),
}


def train_in_a_wrong_way(variant: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*WRONG[variant])
        return on_ranks(EVEN, **FAST)


@pytest.mark.parametrize("variant", WRONG)
def test_wrong_variants_are_noticed(ranks: Pool, variant: str) -> None:
    """Wrong variants train as well, and bits are the same on all ranks, but the training is not that of one process."""
    (expected,) = ranks(1, train_alone, EVEN, FAST)
    first, second = ranks(2, train_in_a_wrong_way, variant)
    assert first.bits == second.bits
    assert (first.params - expected.params).norm() / expected.params.norm() > 1e5 * TOLERANCE
