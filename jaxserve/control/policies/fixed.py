"""Policies that go to a given plan as soon as the KV pages in use fit into it, and stay there."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxserve.control.plan import Plan
from jaxserve.control.policy import Proposal, State
from jaxserve.telemetry import Snapshot


def hold_plan(target: Plan, snapshots: Sequence[Snapshot], plan: Plan, state: State, reason: str) -> Proposal[State]:
    """Propose `target` for `reason`, but keep `plan` while sequences hold more KV pages than `target` has."""
    if plan.instances == target.instances:
        return Proposal(plan, state)
    for index, (snapshot, instance) in enumerate(zip(snapshots, target.instances, strict=False)):
        pages = instance.kv_pages - 1  # without the null page
        if snapshot.kv_pages_used > pages:
            return Proposal(plan, state, f"waiting: instance {index} holds {snapshot.kv_pages_used} > {pages} KV pages")
    return Proposal(replace(target, version=plan.version + 1), state, reason)


@dataclass(frozen=True)
class ManualPolicy:
    """A policy without state that goes to the operator's plan `target`; without one it keeps the plan in force."""

    target: Plan | None = None
    name: str = "manual"

    def init(self, plan: Plan) -> None:
        return None

    def update(self, snapshots: Sequence[Snapshot], plan: Plan, state: None) -> Proposal[None]:
        if self.target is None:
            return Proposal(plan, None)
        return hold_plan(self.target, snapshots, plan, None, "the operator's plan")


@dataclass(frozen=True)
class StaticPolicy:
    """A policy that changes nothing, except to return to the plan at the start after another policy.

    Its state is the plan at the start.
    """

    name: str = "static"

    def init(self, plan: Plan) -> Plan:
        return plan

    def update(self, snapshots: Sequence[Snapshot], plan: Plan, state: Plan) -> Proposal[Plan]:
        return hold_plan(state, snapshots, plan, state, "back to the plan at the start")
