"""The policy of KunServe: when KV pages run out, instances drop the layers that they have in common.

Groups of instances then keep one copy of the layers together and serve as a pipeline, and the memory of the other
copies holds KV pages. When the burst is over, every instance gets all layers again (KunServe, sections 4.1 and 4.4).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

from jaxserve.control.drop_plan import drop_plan
from jaxserve.control.groups import can_restore, grouped_plan, restored_plans
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

    drop_usage: float = 0.9  # share of an instance's KV pages in use, with those for one more of its waiting sequences
    drop_wait: float = 0.1  # s that a sequence has waited
    release_usage: float = 0.5  # largest share of the members' own KV pages in use, or soon, when layers are restored
    hold: float = 5.0  # s for which that must have been so

    def __post_init__(self) -> None:
        for name in ("drop_wait", "hold"):
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
            if view.time - since >= self.settings.hold and name not in view.exchanging:
                return self._restore(view, plan, state, plan.instance(name))
        return PlanProposal(plan, state, keeps=self._kept(view, plan, state))

    def _kept(self, view: ServiceView, plan: Plan, state: DropState) -> list[str]:
        """Return the instances whose layers need not change for want of pages, if another policy changes layers.

        These are the ones that may soon drop layers, and groups that have pages left. Instances that have changed
        already may change back.
        """
        precisions = state.start.instances[0].precisions
        able = [each for each in plan.instances if each.lanes == 1 and self._may_share(view, each, state)]
        used = {each.name: self._usage_with_next(_seen(view, each)) for each in plan.instances}
        soon = [each for each in able if len(able) > 1 and used[each.name] > self.settings.release_usage]
        groups = (each for each in plan.instances if each.lanes > 1 and used[each.name] <= self.settings.drop_usage)
        return [each.name for each in (*soon, *groups) if each.precisions == precisions]

    # -- drop

    def _required(self, view: ServiceView, plan: Plan) -> int:
        """Return the KV pages that waiting sequences lack on their instances; 0 if none lacks any."""
        seen = [_seen(view, instance) for instance in plan.instances]
        waiting = [each for each in seen if each.num_waiting > each.num_deferred]
        if not waiting or max(each.oldest_wait for each in waiting) < self.settings.drop_wait:
            return 0
        if max(map(self._usage_with_next, waiting)) < self.settings.drop_usage:
            return 0
        return sum(map(self._lacking, waiting))

    def _usage_with_next(self, seen: Snapshot) -> float:
        """Return the share of an instance's KV pages that would be in use with one more of its waiting sequences."""
        following = seen.waiting_tokens / max(1, seen.num_waiting) / self._resources.page_size
        return (seen.kv_pages_used + following) / max(1, seen.kv_pages_total)

    def _lacking(self, seen: Snapshot) -> int:
        """Return the KV pages that the waiting sequences of an instance lack beside those that are free there."""
        return max(0, self._demand(seen) - (seen.kv_pages_total - seen.kv_pages_used)) if seen.num_waiting else 0

    def _demand(self, seen: Snapshot) -> int:
        """Return the KV pages that the waiting sequences of an instance need. Each also begins one for its answer."""
        return ceil_div(seen.waiting_tokens, self._resources.page_size) + seen.num_waiting

    def _drop(self, view: ServiceView, plan: Plan, state: DropState, required: int) -> PlanProposal[DropState]:
        words, start = f"waiting sequences lack {required} KV pages", state.start.instances[0]
        able = self._next_to_share([each for each in plan.instances if self._may_share(view, each, state)])
        found = drop_plan(
            # An instance counts as many times as it has lanes.
            [(each,) * each.lanes for each in self._in_pairs(view, able)],
            required,
            partial(self._freed, start),
            self._resources.max_lanes,
        )
        changed, names = plan, list(new_names(plan, len(found.groups), view.used_names))
        for group in found.groups:
            members = list(dict.fromkeys(group))
            if len(members) == 1:
                continue
            whole = self._grouped(members, names.pop(0), start)
            if whole is None:
                continue
            if not view.is_warm(whole):
                return PlanProposal(plan, state, f"{words}: the programs of groups are still being compiled")
            changed = with_instances(changed, members, (whole,))
        if changed is plan:
            return PlanProposal(plan, state, f"{words}, and no layers are left to drop: sequences are preempted")
        rest = "" if found.suffices else f"; {required - found.freed} are still lacking, and sequences are preempted"
        return PlanProposal(changed, state, f"{words}, and dropping layers frees {found.freed}{rest}")

    def _in_pairs(self, view: ServiceView, able: Sequence[InstancePlan]) -> list[InstancePlan]:
        """Return instances in pairs of neighbours, whose programs are compiled ahead, the pair that lacks most first.

        Sequences then stay where they wait.
        """
        ordered = sorted(able, key=lambda each: min(each.devices))
        pairs = [ordered[first : first + 2] for first in range(0, len(ordered), 2)]
        pairs.sort(key=lambda pair: (len(pair) < 2, -sum(self._lacking(_seen(view, each)) for each in pair)))
        return list(chain.from_iterable(pairs))

    def _next_to_share(self, able: Sequence[InstancePlan]) -> Sequence[InstancePlan]:
        """Return the instances that may join now: the smallest of which there are several.

        A group has more KV pages in each lane than one of fewer instances. It cannot join that one, because it would
        have to give up pages, which are all in use when pages run out.
        """
        lanes = Counter(instance.lanes for instance in able)
        fewest = min((each for each, count in lanes.items() if count > 1), default=0)
        return [instance for instance in able if instance.lanes == fewest]

    def _may_share(self, view: ServiceView, instance: InstancePlan, state: DropState) -> bool:
        pattern = state.start.instances[0]
        return (
            not instance.draining
            and instance.name not in view.exchanging
            and instance.tp == pattern.tp
            and len(instance.stages) == instance.lanes * len(pattern.stages)
        )

    def _freed(self, start: InstancePlan, group: Sequence[InstancePlan], other: Sequence[InstancePlan]) -> int:
        """Return the KV pages that there are more when two groups become one."""
        one, two, both = (self._pages(list(dict.fromkeys(each)), start) for each in (group, other, (*group, *other)))
        return max(0, both - one - two)

    def _pages(self, members: Sequence[InstancePlan], start: InstancePlan) -> int:
        if len(members) == 1:
            return members[0].kv_pages
        whole = self._grouped(members, "", start)
        return 0 if whole is None else whole.kv_pages

    def _grouped(self, members: Sequence[InstancePlan], name: str, start: InstancePlan) -> InstancePlan | None:
        """Return the group of instances with all KV pages that fit, None if there is none that can be restored."""
        try:
            whole = grouped_plan(members, name, self._resources)
            if not can_restore(whole, start, self._resources):
                return None
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
            if instance.lanes > 1 and self._soon_used(seen) <= self.settings.release_usage * own:
                roomy[instance.name] = state.roomy_since.get(instance.name, view.time)
        return replace(state, roomy_since=roomy)

    def _soon_used(self, seen: Snapshot) -> float:
        """Return the KV pages in use on average, with those for what waits and what comes if usage goes on rising."""
        if seen.recent is None:
            return seen.kv_pages_used + self._demand(seen)
        rise = max(0.0, seen.recent.kv_trend or 0.0) * self.settings.hold
        return (seen.recent.kv_usage + rise) * seen.kv_pages_total + self._demand(seen)

    def _restore(self, view: ServiceView, plan: Plan, state: DropState, whole: InstancePlan) -> PlanProposal[DropState]:
        start = state.start.instances[0]
        names = new_names(plan, whole.lanes, view.used_names)
        members = restored_plans(whole, names, start, start.kv_pages)
        used = self._soon_used(_seen(view, whole)) / (whole.lanes * (start.kv_pages - 1))
        if not all(map(view.is_warm, members)):
            return PlanProposal(plan, state, f"group {whole.name}: programs of its members are still being compiled")
        limit, hold = self.settings.release_usage, self.settings.hold
        reason = f"group {whole.name} uses {used:.0%} of its members' own KV, at most {limit:.0%} for {hold:.0f} s"
        return PlanProposal(with_instances(plan, (whole,), members), state, reason)


def _seen(view: ServiceView, instance: InstancePlan) -> Snapshot:
    return view.snapshots.get(instance.name) or Snapshot()
