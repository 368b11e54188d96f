"""Going to a given plan and staying there, as soon as what is in use fits into it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxserve.control.plan import Plan
from jaxserve.control.policy import Proposal, State
from jaxserve.telemetry import Snapshot


def hold_plan(target: Plan, snapshots: Sequence[Snapshot], plan: Plan, state: State, reason: str) -> Proposal[State]:
    """Proposes `target` for `reason`; keeps `plan` if they are alike, and while sequences hold more than its pages."""
    if plan.instances == target.instances:
        return Proposal(plan, state)
    for number, (snapshot, instance) in enumerate(zip(snapshots, target.instances, strict=False)):
        pages = instance.kv_pages - 1  # but for the null page
        if snapshot.kv_pages_used > pages:
            return Proposal(
                plan, state, f"waiting: instance {number} holds {snapshot.kv_pages_used} > {pages} KV pages"
            )
    return Proposal(replace(target, version=plan.version + 1), state, reason)


@dataclass(frozen=True)
class ManualPolicy:
    """Goes to `target` and stays there; without one it stays at the plan that is in force. Has no state."""

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
    """Changes nothing; after another policy it goes back to the plan at the start. That plan is its state."""

    name: str = "static"

    def init(self, plan: Plan) -> Plan:
        return plan

    def update(self, snapshots: Sequence[Snapshot], plan: Plan, state: Plan) -> Proposal[Plan]:
        return hold_plan(state, snapshots, plan, state, "back to the plan at the start")
