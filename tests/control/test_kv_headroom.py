"""How far the KV pages can still grow is what the policy in force may make of the plan, and nothing more."""

from dataclasses import dataclass, replace

import pytest

from jaxserve.control import InstancePlan, Proposal, SwapPrecision
from jaxserve.control.diff import diff
from jaxserve.control.kv_headroom import KVHeadroom
from jaxserve.control.plan import Plan
from jaxserve.control.policies import ManualPolicy, MorphPolicy, StaticPolicy
from jaxserve.control.policy import Policy
from jaxserve.telemetry import KVCapacity, Snapshot
from tests.support.control import TO_INT4, home_plan, machine

HOME, MACHINE = home_plan(), machine()
START = HOME.instance("0")
PAGE_SIZE = MACHINE.page_size
MORPH = MorphPolicy(MACHINE, range(16), TO_INT4)
SMALL = START.with_precisions({f"layers.{n}": "int4" for n in range(12)})  # what TO_INT4 may change
TOP = SMALL.with_kv_pages(MACHINE.kv_capacity(SMALL))


def capacity(policy: Policy, plan: InstancePlan = START) -> KVCapacity:
    (found,) = KVHeadroom(MACHINE, HOME).of(policy, replace(HOME, instances=(plan,))).values()
    return found


def swap_seconds(plan: InstancePlan, target: InstancePlan) -> float:
    return sum(change.seconds for change in diff(plan, target, MACHINE) if isinstance(change, SwapPrecision))


@pytest.mark.parametrize("policy", [StaticPolicy(), ManualPolicy()])
def test_policy_that_changes_nothing_has_no_more_than_the_present_pages(policy: Policy) -> None:
    assert capacity(policy) == KVCapacity(400 * PAGE_SIZE, 400 * PAGE_SIZE, 0.0)


def test_morph_grows_to_the_last_plan_of_its_ladder_in_the_time_of_its_transitions() -> None:
    found = capacity(MORPH)
    assert found.tokens == 400 * PAGE_SIZE
    assert found.max_tokens == (TOP.kv_pages - 1) * PAGE_SIZE > found.tokens
    assert found.max_seconds == pytest.approx(swap_seconds(START, TOP))
    assert found.max_seconds > 0


def test_less_time_is_left_on_the_way() -> None:
    halfway = START.with_precisions({f"layers.{n}": "int4" for n in range(6)})
    found = capacity(MORPH, halfway.with_kv_pages(MACHINE.kv_capacity(halfway)))
    assert found.max_tokens == capacity(MORPH).max_tokens
    assert found.max_seconds == pytest.approx(capacity(MORPH).max_seconds / 2)


def test_nothing_is_left_at_the_top() -> None:
    most = (TOP.kv_pages - 1) * PAGE_SIZE
    assert capacity(MORPH, TOP) == KVCapacity(most, most, 0.0)


def test_floor_of_quality_limits_the_growth() -> None:
    def loss(precisions) -> float:
        return 0.01 * sum(name == "int4" for name in precisions)

    limited = MorphPolicy(MACHINE, range(16), replace(TO_INT4, max_quality_loss=0.03), loss=loss)
    assert capacity(limited).max_tokens < capacity(MORPH).max_tokens
    assert capacity(limited).max_tokens > capacity(limited).tokens


def test_operators_plan_is_the_goal_of_the_manual_policy() -> None:
    target = Plan(1, (TOP,))
    assert capacity(ManualPolicy(target)).max_tokens == (TOP.kv_pages - 1) * PAGE_SIZE


def test_larger_plan_than_the_policy_wants_counts_as_it_is() -> None:
    assert capacity(StaticPolicy(), TOP).max_tokens == (TOP.kv_pages - 1) * PAGE_SIZE


@dataclass(frozen=True)
class Own:
    """A policy of a user, which does not say how far it goes."""

    name: str = "own"

    def init(self, plan: InstancePlan) -> None:
        return None

    def update(self, snapshot: Snapshot, plan: InstancePlan, state: None) -> Proposal[None]:
        return Proposal(plan, None)


def test_other_policies_may_use_the_smallest_variant_of_every_layer() -> None:
    assert capacity(Own()).max_tokens == (MACHINE.max_capacity(START) - 1) * PAGE_SIZE


def test_policy_whose_bound_fails_has_no_more_than_the_present_pages(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Own):
        def largest(self, plan: InstancePlan) -> InstancePlan:
            raise RuntimeError("a bug")

    assert capacity(Broken()) == KVCapacity(400 * PAGE_SIZE, 400 * PAGE_SIZE, 0.0)
    assert "policy own" in caplog.text


def test_capacity_follows_the_plan_and_the_policy() -> None:
    headroom = KVHeadroom(MACHINE, HOME)
    (before,) = headroom.of(MORPH, HOME).values()
    (static,) = headroom.of(StaticPolicy(), HOME).values()
    (after,) = headroom.of(MORPH, replace(HOME, instances=(TOP,))).values()
    assert before.max_tokens > static.max_tokens == static.tokens
    assert after.tokens == before.max_tokens


def test_each_instance_has_its_own_capacity() -> None:
    two = home_plan(dp=2)
    grown = two.instance("1").with_precisions({"layers.0": "int4"}).with_kv_pages(420)
    plan = replace(two, instances=(two.instance("0"), grown))
    capacities = KVHeadroom(MACHINE, two).of(StaticPolicy(), plan).values()
    assert [capacity.tokens for capacity in capacities] == [400 * PAGE_SIZE, 419 * PAGE_SIZE]
    assert KVCapacity.total(capacities).tokens == 819 * PAGE_SIZE
