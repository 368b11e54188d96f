"""The policy of KunServe: when KV pages run out, instances drop the layers that they have in common.

Groups of instances then keep one copy of the layers together and serve as a pipeline, and the memory of the other
copies holds KV pages. When the burst is over, every instance gets all layers again (KunServe, sections 4.1 and 4.4).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from jaxserve.control.drop_plan import drop_plan
from jaxserve.control.groups import grouped_plan, restored_plans
from jaxserve.control.plan import InstancePlan, Plan
from jaxserve.control.plan_edits import with_instances
from jaxserve.control.policy import KeepsPlans, PlanProposal, ServiceView
from jaxserve.control.regroup import new_names
from jaxserve.control.resources import Resources
from jaxserve.core.errors import ConfigError, PlanError
from jaxserve.core.numeric import ceil_div
from jaxserve.telemetry import Snapshot


@dataclass(frozen=True)
class DropSettings:
    """Settings of the policy, in seconds and in shares from 0 to 1. Raise `ConfigError` if one is not allowed."""

    drop_usage: float = 0.9  # share of all KV pages in use from which sequences that wait are said to lack pages
    drop_wait: float = 0.1  # s that a sequence has waited
    release_usage: float = 0.5  # largest share of the members' own KV pages in use when layers are restored
    release_horizon: float = 2.0  # s for which usage is assumed to go on rising as it does now
    hold: float = 5.0  # s for which that must have been so

    def __post_init__(self) -> None:
        for name in ("drop_wait", "release_horizon", "hold"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}: it must be at least 0")
        for name in ("drop_usage", "release_usage"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: it must be above 0 and at most 1")


@dataclass(frozen=True)
class DropState:
    """The memory of the policy: the plan at the start, and since when groups would have had room without a drop."""

    start: Plan
    roomy_since: Mapping[str, float] = field(default_factory=dict)  # name of a group -> time (s)


class ParamDropPolicy(KeepsPlans):
    """A policy (`StructuralPolicy`) that drops replicated layers during bursts."""

    def __init__(self, resources: Resources, settings: DropSettings, *, name: str = "param_drop"):
        self.settings, self._resources, self._name = settings, resources, name

    @property
    def name(self) -> str:
        return self._name

    def first_structure(self, plan: Plan) -> DropState:
        return DropState(plan)

    def largest_tp(self, plan: Plan) -> int:
        return plan.largest_tp

    def restructure(self, view: ServiceView, plan: Plan, state: DropState) -> PlanProposal[DropState]:
        required = self._required(view, plan)
        state = self._remember(view, plan, state)
        if required > 0:
            return self._drop(view, plan, state, required)
        for name, since in state.roomy_since.items():
            if view.time - since >= self.settings.hold:
                return self._restore(view, plan, state, plan.instance(name))
        return PlanProposal(plan, state)

    # -- drop

    def _required(self, view: ServiceView, plan: Plan) -> int:
        """Return the KV pages that waiting sequences lack on their instances; 0 if none lacks any."""
        seen = [_seen(view, instance) for instance in plan.instances]
        waiting = [each for each in seen if each.num_waiting > each.num_deferred]
        if not waiting or max(each.oldest_wait for each in waiting) < self.settings.drop_wait:
            return 0
        if max(each.kv_usage for each in waiting) < self.settings.drop_usage:
            return 0
        return sum(map(self._lacking, waiting))

    def _lacking(self, seen: Snapshot) -> int:
        """Return the KV pages that the waiting sequences of an instance lack beside those that are free there."""
        # Each of them also begins a page for its answer.
        demand = ceil_div(seen.waiting_tokens, self._resources.page_size) + seen.num_waiting
        return max(0, demand - (seen.kv_pages_total - seen.kv_pages_used)) if seen.num_waiting else 0

    def _drop(self, view: ServiceView, plan: Plan, state: DropState, required: int) -> PlanProposal[DropState]:
        words = f"waiting sequences lack {required} KV pages"
        able = self._next_to_share([each for each in plan.instances if self._may_share(each, state)])
        sized = sorted(able, key=lambda each: -self._lacking(_seen(view, each)))  # sequences stay where they wait
        found = drop_plan(
            [(each,) * each.lanes for each in sized],  # an instance counts as many times as it has lanes
            required,
            self._freed,
            self._resources.max_lanes,
        )
        changed, names = plan, list(new_names(plan, len(found.groups), view.used_names))
        for group in found.groups:
            members = list(dict.fromkeys(group))
            if len(members) == 1:
                continue
            whole = self._grouped(members, names.pop(0))
            if whole is None:
                continue
            if not view.is_warm(whole):
                return PlanProposal(plan, state, f"{words}: the programs of groups are still being compiled")
            changed = with_instances(changed, members, (whole,))
        if changed is plan:
            return PlanProposal(plan, state, f"{words}, and no layers are left to drop: sequences are preempted")
        rest = "" if found.suffices else f"; {required - found.freed} are still lacking, and sequences are preempted"
        return PlanProposal(changed, state, f"{words}, and dropping layers frees {found.freed}{rest}")

    def _next_to_share(self, able: Sequence[InstancePlan]) -> Sequence[InstancePlan]:
        """Return the instances that may join now: the smallest of which there are several.

        A group has more KV pages in each lane than one of fewer instances. It cannot join that one, because it would
        have to give up pages, which are all in use when pages run out.
        """
        lanes = Counter(instance.lanes for instance in able)
        fewest = min((each for each, count in lanes.items() if count > 1), default=0)
        return [instance for instance in able if instance.lanes == fewest]

    def _may_share(self, instance: InstancePlan, state: DropState) -> bool:
        pattern = state.start.instances[0]
        return (
            not instance.draining
            and instance.tp == pattern.tp
            and len(instance.stages) == instance.lanes * len(pattern.stages)
        )

    def _freed(self, group: Sequence[InstancePlan], other: Sequence[InstancePlan]) -> int:
        """Return the KV pages that there are more when two groups become one."""
        one, two, both = (self._pages(list(dict.fromkeys(each))) for each in (group, other, (*group, *other)))
        return max(0, both - one - two)

    def _pages(self, members: Sequence[InstancePlan]) -> int:
        if len(members) == 1:
            return members[0].kv_pages
        whole = self._grouped(members, "")
        return 0 if whole is None else whole.kv_pages

    def _grouped(self, members: Sequence[InstancePlan], name: str) -> InstancePlan | None:
        """Return the group of instances with all KV pages that fit, None if they cannot share their layers."""
        try:
            whole = grouped_plan(members, name, self._resources)
        except PlanError:
            return None
        pages = self._resources.kv_capacity(whole)
        return whole.with_kv_pages(pages) if pages > sum(member.kv_pages for member in members) else None

    # -- restore

    def _remember(self, view: ServiceView, plan: Plan, state: DropState) -> DropState:
        """Return the state with the groups whose members would have room for all they hold."""
        roomy: dict[str, float] = {}
        for instance in plan.instances:
            seen = _seen(view, instance)
            own = instance.lanes * (state.start.instances[0].kv_pages - 1)
            fits = self._expected(seen) <= self.settings.release_usage * own
            if instance.lanes > 1 and not seen.num_waiting and fits:
                roomy[instance.name] = state.roomy_since.get(instance.name, view.time)
        return replace(state, roomy_since=roomy)

    def _expected(self, seen: Snapshot) -> float:
        """Return the KV pages that an instance will use if its usage goes on rising as it does now."""
        trend = (seen.recent.kv_trend or 0.0) if seen.recent is not None else 0.0
        return seen.kv_pages_used + max(0.0, trend) * self.settings.release_horizon * seen.kv_pages_total

    def _restore(self, view: ServiceView, plan: Plan, state: DropState, whole: InstancePlan) -> PlanProposal[DropState]:
        start = state.start.instances[0]
        names = new_names(plan, whole.lanes, view.used_names)
        members = restored_plans(whole, names, start, start.kv_pages)
        used = _seen(view, whole).kv_pages_used / (whole.lanes * (start.kv_pages - 1))
        if not all(map(view.is_warm, members)):
            return PlanProposal(plan, state, f"group {whole.name}: programs of its members are still being compiled")
        reason = f"group {whole.name} has used at most {used:.0%} of its members' own KV for {self.settings.hold:.0f} s"
        return PlanProposal(with_instances(plan, (whole,), members), state, reason)


def _seen(view: ServiceView, instance: InstancePlan) -> Snapshot:
    return view.snapshots.get(instance.name) or Snapshot()
