"""Policies that go to a given plan as soon as the KV pages in use fit into it, and stay there."""

from dataclasses import dataclass

from jaxserve.control.plan import InstancePlan, Plan
from jaxserve.control.policy import Proposal, State
from jaxserve.telemetry import Snapshot


def hold_plan(
    target: InstancePlan, snapshot: Snapshot, plan: InstancePlan, state: State, reason: str
) -> Proposal[State]:
    """Propose `target` for `reason`, but keep `plan` while sequences hold more KV pages than `target` has."""
    if plan == target:
        return Proposal(plan, state)
    pages = target.kv_pages - 1  # without the null page
    if snapshot.kv_pages_used > pages:
        return Proposal(plan, state, f"waiting: {snapshot.kv_pages_used} KV pages in use > {pages}")
    return Proposal(target, state, reason)


@dataclass(frozen=True)
class ManualPolicy:
    """A policy without state that goes to the operator's plan `target`; without one it keeps the plan in force."""

    target: Plan | None = None
    name: str = "manual"

    def init(self, plan: InstancePlan) -> None:
        return None

    def update(self, snapshot: Snapshot, plan: InstancePlan, state: None) -> Proposal[None]:
        if self.target is None:
            return Proposal(plan, None)
        return hold_plan(self.target.instance(plan.name), snapshot, plan, None, "the operator's plan")

    def largest(self, plan: InstancePlan) -> InstancePlan | None:
        return None if self.target is None else self.target.instance(plan.name)


@dataclass(frozen=True)
class StaticPolicy:
    """A policy that changes nothing, except to return to the plan at the start after another policy.

    Its state is the plan at the start.
    """

    name: str = "static"

    def init(self, plan: InstancePlan) -> InstancePlan:
        return plan

    def update(self, snapshot: Snapshot, plan: InstancePlan, state: InstancePlan) -> Proposal[InstancePlan]:
        return hold_plan(state, snapshot, plan, state, "back to the plan at the start")

    def largest(self, plan: InstancePlan) -> InstancePlan | None:
        return plan
