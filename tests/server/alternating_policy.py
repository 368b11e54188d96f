"""A policy that changes its plan at every call: all layers to int4 with more pages, or back to the start."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxserve.control.plan import Plan
from jaxserve.control.policy import Proposal
from jaxserve.control.resources import Resources
from jaxserve.telemetry import Snapshot


@dataclass(frozen=True)
class Alternating:
    resources: Resources
    swap_order: Sequence[int]
    name: str = "alternating"

    def init(self, plan: Plan) -> Plan:
        return plan

    def update(self, snapshots: Sequence[Snapshot], plan: Plan, state: Plan) -> Proposal[Plan]:
        if plan.instances != state.instances:
            return Proposal(replace(state, version=plan.version + 1), state, "back")
        smaller = plan.with_precisions(0, {f"layers.{layer}": "int4" for layer in self.swap_order})
        return Proposal(smaller.with_kv_pages(0, plan.instances[0].kv_pages + 8), state, "there")
