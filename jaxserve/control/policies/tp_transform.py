"""The policy of AMOEBA: instances merge for a long request, and split when it is gone.

A request that no instance can hold waits in the waiting room. Then the least loaded instances that can hold it together
merge into one of a higher degree of tensor parallelism, which has more memory for KV pages. Further long requests go
there. When none is left, the merged instance takes no new requests, and splits as soon as enough of its KV is free
(AMOEBA, section 3.3).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from jaxserve.control.buddies import buddy_groups, in_buddy_order
from jaxserve.control.plan import InstancePlan, Plan
from jaxserve.control.plan_edits import merged, parts, with_instances
from jaxserve.control.policy import KeepsPlans, PlanProposal, ServiceView
from jaxserve.control.regroup import new_names
from jaxserve.control.resources import Resources
from jaxserve.core.errors import ConfigError
from jaxserve.telemetry import Snapshot


@dataclass(frozen=True)
class TransformSettings:
    """Settings of the policy, in seconds and in shares from 0 to 1. Raise `ConfigError` if one is not allowed."""

    hold: float = 2.0  # s without a long request before a merged instance drains
    release_usage: float = 0.5  # largest share of the parts' KV pages that sequences hold when an instance splits
    release_horizon: float = 2.0  # s for which usage is assumed to go on rising as it does now

    def __post_init__(self) -> None:
        for name in ("hold", "release_horizon"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}: it must be at least 0")
        if not 0 < self.release_usage <= 1:
            raise ConfigError(f"release_usage is {self.release_usage}: it must be above 0 and at most 1")


@dataclass(frozen=True)
class TransformState:
    """The memory of the policy: which placements there may be, and when merged instances were last needed."""

    start: Plan
    needed: Mapping[str, float] = field(default_factory=dict)  # name of a merged instance -> time (s)


class TransformPolicy(KeepsPlans):
    """A policy (`StructuralPolicy`) that changes the degree of tensor parallelism for long requests."""

    def __init__(self, resources: Resources, settings: TransformSettings, *, name: str = "tp_transform"):
        self.settings, self._resources, self._name = settings, resources, name

    @property
    def name(self) -> str:
        return self._name

    def first_structure(self, plan: Plan) -> TransformState:
        return TransformState(plan)

    def restructure(self, view: ServiceView, plan: Plan, state: TransformState) -> PlanProposal[TransformState]:
        state = self._remember(view, plan, state)
        need = view.waiting.longest if view.waiting.count else 0
        if need:
            return self._make_room(view, plan, state, need)
        proposals = [self._release(view, plan, state, plan.instance(name)) for name in state.needed]
        changes = [proposal for proposal in proposals if proposal.plan is not plan]
        if changes:
            return changes[0]
        return PlanProposal(plan, state, "; ".join(proposal.reason for proposal in proposals if proposal.reason))

    def largest_tp(self, plan: Plan) -> int:
        devices = sum(len(instance.devices) for instance in plan.instances)
        possible = (limits.tp for limits in self._resources.degrees if limits.tp <= devices)
        return max((*possible, plan.largest_tp))

    def _remember(self, view: ServiceView, plan: Plan, state: TransformState) -> TransformState:
        """Return the state with the times at which merged instances were last needed for a long request."""
        smallest = min(instance.tp for instance in state.start.instances)
        needed: dict[str, float] = {}
        for instance in plan.instances:
            if instance.tp > smallest:
                is_long = view.longest(instance.name) > self._max_len(instance.tp // 2)
                needed[instance.name] = view.time if is_long else state.needed.get(instance.name, view.time)
        return replace(state, needed=needed)

    # -- merge

    def _make_room(
        self, view: ServiceView, plan: Plan, state: TransformState, need: int
    ) -> PlanProposal[TransformState]:
        """Propose a plan under which an instance can hold a request of `need` tokens."""
        words = f"a request needs {need} tokens"
        able = [instance for instance in plan.instances if self._max_len(instance.tp) >= need]
        if able:
            chosen = min(able, key=lambda instance: self._load(view, instance))
            if not any(instance.draining for instance in able) or not chosen.draining:
                return PlanProposal(plan, state, f"{words}, which instance {chosen.name} can hold")
            reopened = plan.with_instance(chosen.with_draining(False))
            return PlanProposal(reopened, state, f"{words}: instance {chosen.name} takes requests again")
        degrees = [degree for degree in self._groups(state) if self._max_len(degree) >= need]
        if not degrees:
            return PlanProposal(plan, state, f"{words}, more than any instance could hold")
        candidates = self._candidates(view, plan, state, min(degrees))
        if not candidates:
            return PlanProposal(plan, state, f"{words}, more than the instances that are left could hold together")
        for members in candidates:
            *members, whole = self._merged(view, plan, state, members)
            if view.is_warm(whole):
                names = " and ".join(member.name for member in members)
                reason = f"{words}, which instances {names} can hold together"
                changed = with_instances(plan, members, (whole,))
                return PlanProposal(changed, state, reason)
        return PlanProposal(plan, state, f"{words}: the programs to hold it are still being compiled")

    def _candidates(
        self, view: ServiceView, plan: Plan, state: TransformState, degree: int
    ) -> list[Sequence[InstancePlan]]:
        """Return the instances that can become one of a degree, the least loaded first.

        Others than buddies merge only where operators have left no buddies together.
        """
        groups = [self._members(plan, devices) for devices in self._groups(state)[degree]]
        buddies: list[Sequence[InstancePlan]] = [members for members in groups if members is not None]
        if buddies:
            return sorted(buddies, key=lambda members: sum(self._load(view, member) for member in members))
        if sum(instance.tp for instance in plan.instances) < degree:
            return []
        for tp in sorted({instance.tp for instance in plan.instances if instance.tp < degree}, reverse=True):
            alike = [instance for instance in plan.instances if instance.tp == tp and len(instance.stages) == 1]
            if len(alike) > 1:
                alike.sort(key=lambda instance: self._load(view, instance))
                return [alike[: degree // tp] if len(alike) >= degree // tp else alike[:2]]
        return []

    def _groups(self, state: TransformState) -> Mapping[int, Sequence[tuple[int, ...]]]:
        return buddy_groups(state.start, self._resources.max_tp)

    def _members(self, plan: Plan, devices: Sequence[int]) -> list[InstancePlan] | None:
        """Return the instances on the devices of a group, None if they do not fill it exactly."""
        group = set(devices)
        members = [instance for instance in plan.instances if instance.devices & group]
        if any(len(member.stages) > 1 or not member.devices <= group for member in members):
            return None
        return members if {device for member in members for device in member.devices} == group else None

    def _merged(
        self, view: ServiceView, plan: Plan, state: TransformState, members: Sequence[InstancePlan]
    ) -> tuple[InstancePlan, ...]:
        """Return instances that merge next so that `members` can become one, and what they become.

        Members of unequal degrees merge in several steps, beginning with the smallest.
        """
        groups, smallest = self._groups(state), min(member.tp for member in members)
        own = [member for member in members if member.tp == smallest]
        if len(own) < len(members):
            pairs = ([member for member in own if member.devices <= set(group)] for group in groups[2 * smallest])
            own = next((pair for pair in pairs if len(pair) == 2), own[:2])
        devices = {device for member in own for device in member.devices}
        order = next((group for group in groups[len(devices)] if set(group) == devices), sorted(devices))
        own = in_buddy_order(own, order)
        (name,) = new_names(plan, 1, view.used_names)
        return (*own, merged(own, name, self._resources))

    def _max_len(self, degree: int) -> int:
        """Return the tokens of the longest sequence that an instance of a degree holds."""
        return self._resources.limits_of(degree).max_len

    def _load(self, view: ServiceView, instance: InstancePlan) -> int:
        """Return the load by which instances are compared, in tokens: KV in use, and prompts that wait."""
        seen = _seen(view, instance)
        return seen.waiting_tokens + seen.kv_pages_used * self._resources.page_size

    # -- split

    def _release(
        self, view: ServiceView, plan: Plan, state: TransformState, instance: InstancePlan
    ) -> PlanProposal[TransformState]:
        """Propose that a merged instance drains, or that it splits, or say what it waits for."""
        quiet = view.time - state.needed[instance.name]
        if quiet < self.settings.hold:
            if not instance.draining:
                return PlanProposal(plan, state)
            reason = f"instance {instance.name} has a long request again, and takes all requests"
            return PlanProposal(plan.with_instance(instance.with_draining(False)), state, reason)
        if not instance.draining:
            reason = f"instance {instance.name} has had no long request for {quiet:.1f} s and drains"
            return PlanProposal(plan.with_instance(instance.with_draining(True)), state, reason)
        count = self._parts(instance, state, view.longest(instance.name))
        names = new_names(plan, count, view.used_names)
        members = parts(instance, names, state.start, self._resources)
        seen, usage = _seen(view, instance), self._usage(view, instance, members)
        if usage > self.settings.release_usage or seen.num_waiting:
            waiting = f", {seen.num_waiting} waiting" if seen.num_waiting else ""
            reason = f"instance {instance.name} uses {usage:.0%} of its parts' KV"
            return PlanProposal(plan, state, f"{reason}, splits at {self.settings.release_usage:.0%}{waiting}")
        reason = f"no long request is left, and instance {instance.name} uses {usage:.0%} of its parts' KV"
        return PlanProposal(with_instances(plan, (instance,), members), state, reason)

    def _usage(self, view: ServiceView, instance: InstancePlan, parts: Sequence[InstancePlan]) -> float:
        """Return the share of the parts' KV pages that an instance will use, if its usage goes on as it does now.

        The parts have fewer pages than the instance, because each of them has a copy of the weights.
        """
        seen = _seen(view, instance)
        trend = (seen.recent.kv_trend or 0.0) if seen.recent is not None else 0.0
        rise = max(0.0, trend) * self.settings.release_horizon * seen.kv_pages_total
        return (seen.kv_pages_used + rise) / sum(part.kv_pages - 1 for part in parts)

    def _parts(self, instance: InstancePlan, state: TransformState, longest: int) -> int:
        """Return into how many instances one splits: as many as can each hold the longest request that is left."""
        degrees = [degree for degree in self._groups(state) if self._max_len(degree) >= longest]
        return max(2, instance.tp // min(degrees, default=instance.tp // 2))


def _seen(view: ServiceView, instance: InstancePlan) -> Snapshot:
    return view.snapshots.get(instance.name) or Snapshot()
