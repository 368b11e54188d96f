"""manual: the operator's plan."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.control.plan import Plan
from jaxserve.control.policy import Proposal
from jaxserve.control.steady import towards
from jaxserve.telemetry import Snapshot


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
        return towards(self.target, snapshots, plan, None, "the operator's plan")
