"""static: the plan that the engine was started with."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.control.plan import Plan
from jaxserve.control.policy import Proposal
from jaxserve.control.steady import towards
from jaxserve.telemetry import Snapshot


@dataclass(frozen=True)
class StaticPolicy:
    """Changes nothing; after another policy it goes back to the plan at the start. That plan is its state."""

    name: str = "static"

    def init(self, plan: Plan) -> Plan:
        return plan

    def update(self, snapshots: Sequence[Snapshot], plan: Plan, state: Plan) -> Proposal[Plan]:
        return towards(state, snapshots, plan, state, "back to the plan at the start")
