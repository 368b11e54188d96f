"""A policy that changes its plan at every call: all layers to int4 with more pages, or back to the start."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.control.plan import InstancePlan
from jaxserve.control.policy import Proposal
from jaxserve.control.resources import Resources
from jaxserve.telemetry import Snapshot


@dataclass(frozen=True)
class Alternating:
    resources: Resources
    swap_order: Sequence[int]
    name: str = "alternating"

    def init(self, plan: InstancePlan) -> InstancePlan:
        return plan

    def update(self, snapshot: Snapshot, plan: InstancePlan, state: InstancePlan) -> Proposal[InstancePlan]:
        if plan != state:
            return Proposal(state, state, "back")
        smaller = plan.with_precisions({f"layers.{layer}": "int4" for layer in self.swap_order})
        return Proposal(smaller.with_kv_pages(plan.kv_pages + 8), state, "there")
