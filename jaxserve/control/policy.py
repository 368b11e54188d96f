"""Policies: pure functions from snapshots and the plan in force to the plan that should be in force.

Every policy decides about each instance by itself. A policy that also decides which instances there are is a
`StructuralPolicy`.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from jaxserve.control.plan import InstancePlan, Plan
from jaxserve.core.errors import ConfigError
from jaxserve.telemetry import Snapshot, WaitingRoom

State = TypeVar("State")

MAX_FORESEEN = 4  # plans for which an instance has estimated the memory of the programs that it prepares


@dataclass(frozen=True)
class Proposal(Generic[State]):
    """Answer of a policy: the instance's plan that should be in force, or the present one if nothing should change.

    `reason` has the numbers and thresholds behind a change, or says what the policy waits for if nothing changes.
    """

    plan: InstancePlan
    state: State  # the policy's next state
    reason: str = ""


class Policy(Protocol[State]):
    """A policy, which decides for each instance which plan should be in force.

    It stores nothing in itself: its state for an instance is a value that it returns and gets back. It may have an
    attribute `precisions`, a tuple of the precisions that its plans need in addition to those of the start.
    """

    @property
    def name(self) -> str:
        """Name of the policy in logs and in the status."""
        ...

    def init(self, plan: InstancePlan) -> State:
        """Return an instance's first state. `plan` is its plan at the start, and the one to return to."""
        ...

    def update(self, snapshot: Snapshot, plan: InstancePlan, state: State) -> Proposal[State]:
        """Return the plan that should be in force instead of `plan`, from a snapshot of the instance.

        The snapshot has `recent` set. Its `time` goes on while the instance has nothing to do, so that a policy needs
        no clock. If the proposal has another plan, its state is adopted once that plan has been carried out. If that
        fails, the policy gets the previous state again.
        """
        ...


@dataclass(frozen=True)
class ServiceView:
    """A view of all instances together, for a policy."""

    time: float  # s
    snapshots: Mapping[str, Snapshot]  # by the name of the instance, with `recent` set
    waiting: WaitingRoom  # the requests that no instance can hold now
    longest: Callable[[str], int]  # name of an instance -> tokens that the longest of its sequences needs
    is_warm: Callable[[InstancePlan], bool]  # whether all programs that an instance runs are compiled
    used_names: Collection[str] = ()  # of all instances that there have been; new ones get others
    exchanging: Collection[str] = ()  # instances whose KV pages are on their way; they cannot change before that ends


@dataclass(frozen=True)
class PlanProposal(Generic[State]):
    """Answer of a structural policy: the plan of all instances that should be in force.

    Besides the set of instances, it decides which of them are draining. It leaves the rest of each plan as it is.
    """

    plan: Plan
    state: State
    reason: str = ""
    keeps: Collection[str] = ()  # names of instances whose own plans shall stay as they are for now


@runtime_checkable
class StructuralPolicy(Protocol[State]):
    """A policy that also decides which instances there are: it merges, splits, adds and removes them."""

    def first_structure(self, plan: Plan) -> State:
        """Return the first state. `plan` is the plan at the start, and the one to return to."""
        ...

    def restructure(self, view: ServiceView, plan: Plan, state: State) -> PlanProposal[State]:
        """Return the plan that should be in force instead of `plan`.

        State and failures are as in `Policy.update`.
        """
        ...

    def largest_tp(self, plan: Plan) -> int:
        """Return the largest degree of tensor parallelism that the policy may give an instance, starting from `plan`.

        The service accepts requests that an instance of this degree can hold.
        """
        ...


@runtime_checkable
class ForesightPolicy(Protocol):
    """A policy that can name in advance plans that it may hold for long, so that instances can prepare for them."""

    def foresee(self, plan: InstancePlan) -> Sequence[InstancePlan]:
        """Return the plans that the policy may hold for long in an instance that is started with `plan`."""
        ...


@runtime_checkable
class BoundedPolicy(Protocol):
    """A policy that can name the plan with the most KV pages that it may propose, for metrics and load reports."""

    def largest(self, plan: InstancePlan) -> InstancePlan | None:
        """Return this plan for an instance that was started with `plan`; None if the plan in force always stays."""
        ...


class KeepsPlans:
    """A base of structural policies that leave the plan of each instance as it is."""

    def init(self, plan: InstancePlan) -> None:
        return None

    def update(self, snapshot: Snapshot, plan: InstancePlan, state: None) -> Proposal[None]:
        return Proposal(plan, None)

    def largest(self, plan: InstancePlan) -> InstancePlan | None:
        return None


@contextmanager
def errors_of_policy(what: str) -> Iterator[None]:
    """Turn every error of a user's code in a `with` block into a `ConfigError` that says `what` raised it."""
    try:
        yield
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{what} raised {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class Chain:
    """A chain of policies, each of which starts from the plan that the previous one proposed."""

    policies: tuple[Policy, ...]

    @property
    def name(self) -> str:
        return " + ".join(policy.name for policy in self.policies)

    @property
    def precisions(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for policy in self.policies for name in getattr(policy, "precisions", ())))

    def init(self, plan: InstancePlan) -> tuple[Any, ...]:
        return tuple(policy.init(plan) for policy in self.policies)

    def update(self, snapshot: Snapshot, plan: InstancePlan, state: tuple[Any, ...]) -> Proposal[tuple[Any, ...]]:
        states, reasons = [], []
        for policy, old_state in zip(self.policies, state, strict=True):
            proposal = policy.update(snapshot, plan, old_state)
            # Only a structural policy decides about draining: the plan that others return to knows nothing of it.
            keeps = not isinstance(policy, StructuralPolicy)
            plan = proposal.plan.with_draining(plan.draining) if keeps else proposal.plan
            states.append(proposal.state)
            reasons.append(proposal.reason)
        return Proposal(plan, tuple(states), "; ".join(filter(None, reasons)))

    def first_structure(self, plan: Plan) -> tuple[Any, ...]:
        return tuple(
            policy.first_structure(plan) if isinstance(policy, StructuralPolicy) else None for policy in self.policies
        )

    def restructure(self, view: ServiceView, plan: Plan, state: tuple[Any, ...]) -> PlanProposal[tuple[Any, ...]]:
        """Return the proposal of the first policy that wants a change; the ones before it have had their reasons."""
        states, reasons, keeps = list(state), [], set[str]()
        for index, policy in enumerate(self.policies):
            if not isinstance(policy, StructuralPolicy):
                continue
            proposal = policy.restructure(view, plan, state[index])
            states[index] = proposal.state
            if proposal.plan.instances != plan.instances:
                return PlanProposal(proposal.plan, tuple(states), proposal.reason)
            reasons.append(proposal.reason)
            keeps.update(proposal.keeps)
        return PlanProposal(plan, tuple(states), "; ".join(filter(None, reasons)), keeps)

    def largest_tp(self, plan: Plan) -> int:
        structural = (policy for policy in self.policies if isinstance(policy, StructuralPolicy))
        return max((policy.largest_tp(plan) for policy in structural), default=plan.largest_tp)

    def foresee(self, plan: InstancePlan) -> Sequence[InstancePlan]:
        foreseeing = (policy for policy in self.policies if isinstance(policy, ForesightPolicy))
        return [foreseen for policy in foreseeing for foreseen in policy.foresee(plan)]


def chain(*policies: Policy) -> Chain:
    """Combine policies into one: each gets the plan that the previous one proposes, and may change it further."""
    return Chain(policies)
