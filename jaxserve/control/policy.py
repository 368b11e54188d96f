"""Policy: a pure function from what an engine reports and the plan in force to the plan it should have."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from jaxserve.control.plan import Plan
from jaxserve.telemetry import Snapshot

State = TypeVar("State")


@dataclass(frozen=True)
class Proposal(Generic[State]):
    """What a policy wants: the same plan when nothing is to do."""

    plan: Plan
    state: State
    reason: str = ""  # with the numbers and thresholds that led to it; of the same plan, what the policy waits for


class Policy(Protocol[State]):
    """Decides. Keeps nothing to itself: what it has to remember is a value that it returns and gets back."""

    @property
    def name(self) -> str: ...

    def init(self, plan: Plan) -> State:
        """The state at the beginning. `plan` is the one that the engine was started with: the one to return to."""
        ...

    def update(self, snapshots: Sequence[Snapshot], plan: Plan, state: State) -> Proposal[State]:
        """The plan that should be in force instead of `plan`. `snapshots[i]` belongs to `plan.instances[i]`.

        Snapshots have their recent past. Time is theirs: it moves on while an engine has nothing to do. The state of a
        proposal with another plan is kept when that plan has been carried out; of one that was not, the state before.
        """
        ...


@runtime_checkable
class Foresees(Protocol):
    """A policy that can name plans which it may hold for long. Engines prepare for them what may be absent."""

    def foresee(self, plan: Plan) -> Sequence[Plan]:
        """Such plans, if the engine is started with `plan`."""
        ...


@dataclass(frozen=True)
class Chain:
    """Policies one after the other: each starts from what the one before proposed."""

    policies: tuple[Policy, ...]

    @property
    def name(self) -> str:
        return " + ".join(policy.name for policy in self.policies)

    def init(self, plan: Plan) -> tuple[Any, ...]:
        return tuple(policy.init(plan) for policy in self.policies)

    def update(self, snapshots: Sequence[Snapshot], plan: Plan, state: tuple[Any, ...]) -> Proposal[tuple[Any, ...]]:
        states, reasons = [], []
        for policy, before in zip(self.policies, state, strict=True):
            proposal = policy.update(snapshots, plan, before)
            plan = proposal.plan
            states.append(proposal.state)
            reasons.append(proposal.reason)
        return Proposal(plan, tuple(states), "; ".join(filter(None, reasons)))

    def foresee(self, plan: Plan) -> Sequence[Plan]:
        return [found for policy in self.policies if isinstance(policy, Foresees) for found in policy.foresee(plan)]


def chain(*policies: Policy) -> Chain:
    """One policy of several: each gets the plan that those before it want, and may change it further."""
    return Chain(policies)
