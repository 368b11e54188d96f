"""Policies that go to a given plan as soon as the KV pages in use fit into it, and stay there."""

from dataclasses import dataclass

from jaxserve.control.plan import InstancePlan, Plan
from jaxserve.control.policy import PlanProposal, Proposal, ServiceView, State
from jaxserve.control.regroup import has_same_instances
from jaxserve.telemetry import Snapshot

OPERATOR = "the operator's plan"


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
        target = self._target(plan)
        if target is None:
            return Proposal(plan, None)
        return hold_plan(target, snapshot, plan, None, OPERATOR)

    def first_structure(self, plan: Plan) -> None:
        return None

    def restructure(self, view: ServiceView, plan: Plan, state: None) -> PlanProposal[None]:
        if self.target is None or has_same_instances(plan, self.target):
            return PlanProposal(plan, None)
        return PlanProposal(self.target, None, OPERATOR)

    def largest_tp(self, plan: Plan) -> int:
        return plan.largest_tp if self.target is None else self.target.largest_tp

    def _target(self, plan: InstancePlan) -> InstancePlan | None:
        """Return the wanted plan of an instance; None without one, or while the set of instances is another one."""
        if self.target is None:
            return None
        return next((wanted for wanted in self.target.instances if _is_for(wanted, plan)), None)

    def largest(self, plan: InstancePlan) -> InstancePlan | None:
        return self._target(plan)


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

    def first_structure(self, plan: Plan) -> Plan:
        return plan

    def restructure(self, view: ServiceView, plan: Plan, state: Plan) -> PlanProposal[Plan]:
        if has_same_instances(plan, state):
            return PlanProposal(plan, state)
        return PlanProposal(state, state, "back to the instances at the start")

    def largest_tp(self, plan: Plan) -> int:
        return plan.largest_tp

    def largest(self, plan: InstancePlan) -> InstancePlan | None:
        return plan


def _is_for(wanted: InstancePlan, plan: InstancePlan) -> bool:
    return wanted.name == plan.name and wanted.same_place(plan)
